"""The tokenizer of a config: one that is given, or one learned from the text."""

import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence

from mlm_jax.data import sources
from mlm_jax.data.lines import TextCounts
from mlm_jax.data.pieces import Part
from mlm_jax.data.progress import Progress
from mlm_jax.data.shards import SPLITS
from mlm_jax.data.tokenizer import Tokenizer
from mlm_jax.errors import InputError
from mlm_jax.files import locked, name_of


def tokenizer(
    found: Sequence[sources.Source],
    text: Mapping,
    config: Mapping,
    folder: pathlib.Path,
    log: Callable[[str], object],
) -> Tokenizer:
    """Returns the tokenizer of `config.file`, or one learned from training documents.

    Args:
      found: the sources, read in turn.
      text: what is read: `source`, `content`, `document`, `on_bad_text` and
        `validation_fraction`.
      config: `kind`, `vocab_size`, `max_characters`, `lowercase`, `strip_accents`, and
        `file`.
      folder: where learned ones are kept.
      log: called with lines of progress.
    """
    switches = {key: config[key] for key in ("lowercase", "strip_accents")}
    if config["file"] is not None:
        return Tokenizer.from_file(config["file"], **switches)
    settings = switches | {key: config[key] for key in ("kind", "vocab_size")}
    limit = config["max_characters"]
    made_of = {key: value for key, value in text.items() if key != "source"}
    name = name_of(made_of | settings | {"max_characters": limit})
    path = folder / name / "tokenizer.json"
    if not path.exists():
        with locked(folder / f"{name}.lock"):
            if not path.exists():
                what = f"learning {config['vocab_size']:,} {config['kind']} pieces"
                progress = Progress(log, what)
                texts = TrainingTexts(found, text, limit, progress)
                learned = Tokenizer.train(texts, **settings)
                learned.save(path)
                log(f"{what}: {learned.vocab_size:,} in {progress.seconds():.1f} s")
    return Tokenizer.load(path)


class TrainingTexts:
    """Training documents for a tokenizer to learn from; each iteration reads them anew.

    A corpus of more characters than `limit` is sampled: the same share of each of its
    parts, from its beginning. That bounds time and memory, and no part is left out.
    """

    def __init__(
        self,
        found: Sequence[sources.Source],
        text: Mapping,
        limit: int,
        progress: Progress,
    ):
        self._text, self._progress = text, progress
        self._parts: list[tuple[sources.Source, Part]] = [
            (source, part) for source in found for part in sources.cut(source)
        ]
        num_bytes = sum(_size(part) for _, part in self._parts)
        self._share = limit / max(num_bytes, 1)
        self._characters = 0  # of all passes

    def __iter__(self) -> Iterator[str]:
        counts = TextCounts()
        found = dict.fromkeys(SPLITS, 0)
        is_whole = True
        for source, part in self._parts:
            end = counts.characters + self._share * _size(part)
            for text in sources.read_part(
                source, part, on_bad_text=self._text["on_bad_text"], counts=counts
            ):
                held_out = sources.is_held_out(text, self._text["validation_fraction"])
                found[SPLITS[held_out]] += 1
                if not held_out:
                    yield text
                self._characters += len(text)
                if self._progress.is_due():
                    self._progress.report(characters=self._characters)
                if counts.characters >= end:
                    is_whole = False
                    break
        if is_whole:
            amount = f"{counts.characters:,} characters"
            require_both(self._text, found, counts.documents, amount)


def _size(part: Part) -> int:
    return sum(piece.size for piece in part)


def require_both(
    text: Mapping, found: Mapping[str, int], documents: int, amount: str
) -> None:
    """Raises InputError, telling how little text there is, if a split has nothing."""
    empty = [split for split in SPLITS if not found[split]]
    if empty:
        raise InputError(
            f"{text['source']} has {documents} document{'s' * (documents != 1)} and"
            f" {amount}: too little to hold out documents for validation, {empty[0]} is"
            f" empty; give more text, cut it into more documents"
            f" (data.document={text['document']}: file, blank_line or line), or change"
            f" data.validation_fraction={text['validation_fraction']}"
        )
