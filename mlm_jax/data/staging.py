"""The documents of a config, split and packed into files of arrays, a shard each."""

import dataclasses
import itertools
import pathlib
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from mlm_jax.data import sources
from mlm_jax.data.packing import PackStats, Row, pack
from mlm_jax.data.progress import Progress
from mlm_jax.data.tokenizer import Encoded, Tokenizer
from mlm_jax.errors import InputError

SPLITS = ("train", "validation")
# Reading one record costs time proportional to the records of its shard.
ROWS_PER_SHARD = 8192
ENCODE_CHARACTERS = 1 << 20  # a batch for the tokenizer's threads


class SplitDocuments:
    """The documents of a config's source; each iteration reads them anew."""

    def __init__(self, data: Mapping):
        self._data = data
        self.counts = sources.TextCounts()

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """Yields (split, document)."""
        self.counts = sources.TextCounts()
        keys = ("source", "document", "on_bad_text", "data_dir")
        settings = {key: self._data[key] for key in keys}
        for text in sources.documents(**settings, counts=self.counts):
            held_out = sources.is_held_out(text, self._data["validation_fraction"])
            yield SPLITS[held_out], text


class TrainingTexts:
    """The training documents, for a tokenizer to learn from."""

    def __init__(self, data: Mapping, progress: Progress):
        self._data, self._progress = data, progress
        self._characters = 0  # of all passes

    def __iter__(self) -> Iterator[str]:
        documents = SplitDocuments(self._data)
        found = dict.fromkeys(SPLITS, 0)
        for split, text in documents:
            found[split] += 1
            if split == "train":
                yield text
            self._characters += len(text)
            if self._progress.is_due():
                self._progress.report(characters=self._characters)
        amount = f"{documents.counts.characters:,} characters"
        require_both(self._data, found, sum(found.values()), amount)


def require_both(data: Mapping, found: Mapping, documents: int, amount: str) -> None:
    """Raises InputError, telling how little text there is, if a split has nothing."""
    empty = [split for split in SPLITS if not found[split]]
    if empty:
        raise InputError(
            f"{data['source']} has {documents} document{'s' * (documents != 1)} and"
            f" {amount}: too little to hold out documents for validation, {empty[0]} is"
            f" empty; give more text, cut it into more documents"
            f" (data.document={data['document']}: file, blank_line or line), or change"
            f" data.validation_fraction={data['validation_fraction']}"
        )


def stage(
    data: Mapping, tokenizer: Tokenizer, folder: pathlib.Path, log
) -> tuple[dict[str, list[pathlib.Path]], dict]:
    """Packs both splits into `folder`.

    Returns:
      The files of each split in order, for `StagedShard`, and the counts to keep with
      the rows.
    """
    documents = SplitDocuments(data)
    progress = Progress(log, "packing")
    packed = {split: PackStats() for split in SPLITS}
    staged: dict[str, list[pathlib.Path]] = {}
    counts_V = np.zeros(tokenizer.vocab_size, np.int64)
    for split in SPLITS:
        # One pass each: reading is cheap beside encoding, and a split streams.
        rows = pack(
            _encoded((text for s, text in documents if s == split), tokenizer),
            length=data["row_length"],
            special=tokenizer.special,
            mode=data["packing"],
            stats=packed[split],
        )
        rows = _reported(rows, packed, progress)
        if split == "train":
            rows = _tallied(rows, counts_V)
        staged[split] = _write(rows, folder / split, tokenizer.vocab_size)
    stats = _stats(packed, documents.counts) | {
        "on_bad_text": data["on_bad_text"],
        "token_counts": counts_V.tolist(),
    }
    require_both(data, staged, stats["documents"], f"{stats['tokens']} tokens")
    return staged, stats


def _stats(packed: Mapping[str, PackStats], counts: sources.TextCounts) -> dict:
    total = _sum(packed.values())
    return {
        "documents": counts.documents,
        "empty_documents": counts.empty + total.empty_documents,
        "characters": counts.characters,
        "bad_lines": counts.bad_lines,
        "bad_bytes": counts.bad_bytes,
        "tokens": total.tokens,
        "unknown": total.unknown,
        "unknown_share": total.unknown_share,
        "fill": total.fill,
        **{
            f"{split}_{name}": getattr(stats, name)
            for split, stats in packed.items()
            for name in ("documents", "tokens", "rows")
        },
    }


def _encoded(texts: Iterator[str], tokenizer: Tokenizer) -> Iterator[Encoded]:
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= ENCODE_CHARACTERS:
            yield from tokenizer.encode(batch)
            batch, size = [], 0
    yield from tokenizer.encode(batch)


def _reported(
    rows: Iterator[Row], packed: Mapping[str, PackStats], progress: Progress
) -> Iterator[Row]:
    for row in rows:
        if progress.is_due():
            total = _sum(packed.values())
            progress.report(
                documents=total.documents, rows=total.rows, tokens=total.tokens
            )
        yield row


def _tallied(rows: Iterator[Row], counts_V: np.ndarray) -> Iterator[Row]:
    for row in rows:
        counts_V += np.bincount(row.tokens, minlength=len(counts_V))
        yield row


def _sum(parts: Iterable[PackStats]) -> PackStats:
    names = [field.name for field in dataclasses.fields(PackStats)]
    return PackStats(**{n: sum(getattr(part, n) for part in parts) for n in names})


def _write(
    rows: Iterator[Row], prefix: pathlib.Path, vocab_size: int
) -> list[pathlib.Path]:
    """Writes `ROWS_PER_SHARD` rows a file, the last with the rest."""
    paths = []
    for number, shard in enumerate(itertools.batched(rows, ROWS_PER_SHARD)):
        path = prefix.with_name(f"{prefix.name}-{number:05d}.npz")
        tokens_NxL = np.stack([row.tokens for row in shard])
        np.savez(
            path,
            tokens=tokens_NxL.astype(np.uint16 if vocab_size <= 1 << 16 else np.int32),
            word_start=np.packbits([row.word_start for row in shard], axis=1),
            segment_lengths=np.concatenate([row.segment_lengths for row in shard]),
            num_segments=np.array([len(row.segment_lengths) for row in shard]),
        )
        paths.append(path)
    return paths


@dataclasses.dataclass
class StagedShard:
    """Yields the rows of a file, then removes it."""

    path: pathlib.Path

    def __call__(self) -> Iterator[tuple[int, dict]]:
        with np.load(self.path) as arrays:
            staged = {name: arrays[name] for name in arrays.files}
        ends_N = np.cumsum(staged["num_segments"])
        for n, end in enumerate(ends_N):
            start = end - staged["num_segments"][n]
            yield (
                n,
                {
                    "tokens": staged["tokens"][n],
                    "segment_lengths": staged["segment_lengths"][start:end],
                    "word_start": staged["word_start"][n],
                },
            )
        self.path.unlink()
