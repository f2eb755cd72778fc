"""A source to packed rows on disk, part by part.

A part's rows depend on its text and the recipe alone, and a part is done when its
facts are written. So parts may be built in any order, anywhere, and once: the store is
the same to the byte, and a build that was killed goes on with the parts that are
missing.
"""

import dataclasses
import functools
import itertools
import json
import pathlib
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from mlm_jax.data import shards, sources
from mlm_jax.data.lines import TextCounts
from mlm_jax.data.packing import PackStats, Row, pack
from mlm_jax.data.pieces import Part
from mlm_jax.data.progress import Progress
from mlm_jax.data.runners import Run
from mlm_jax.data.tokenizer import Encoded, Tokenizer
from mlm_jax.files import write_text

# Reading one record costs time proportional to the records of its shard.
ROWS_PER_SHARD = 8192
ENCODE_CHARACTERS = 1 << 20  # a batch for the tokenizer's threads
TALLY_ROWS = 256  # counted at once


@dataclasses.dataclass(frozen=True)
class Recipe:
    """All that the rows of a part depend on but its text, and where they are put."""

    source: sources.Source
    on_bad_text: str
    validation_fraction: float
    row_length: int
    packing: str
    tokenizer: pathlib.Path  # a tokenizer.json
    folder: pathlib.Path
    rows_per_shard: int

    def facts(self, number: int) -> pathlib.Path:
        """The file that tells of a part, there when its shards are."""
        return self.folder / f"{number:05d}.json"

    def shard(self, number: int, split: str, n: int) -> pathlib.Path:
        return self.folder / f"{number:05d}-{split}-{n:05d}"


def build(
    recipe: Recipe, final: pathlib.Path, *, run: Run, log: Callable[[str], object]
) -> dict:
    """Builds the parts that are missing and publishes all of them.

    Returns the stats, which are kept with the rows; their splits may be empty, and
    nothing is published then.

    Raises:
      InputError: for a source that cannot be read.
    """
    parts = sources.cut(recipe.source)
    missing = [n for n in range(len(parts)) if not recipe.facts(n).exists()]
    if len(missing) < len(parts):
        log(f"packing: {len(parts) - len(missing)} of {len(parts)} parts are there")
    progress = Progress(log, "packing")
    done: dict[str, int] = {"parts": 0, "documents": 0, "rows": 0, "tokens": 0}
    task = functools.partial(pack_part, recipe)
    for found in run(task, [(n, parts[n]) for n in missing]):
        done = {name: done[name] + found[name] for name in done}
        if progress.is_due():
            progress.report(**done)
    stats, places = _gather(recipe, len(parts))
    if all(stats[f"{split}_rows"] for split in shards.SPLITS):
        vocab_size = len(stats["token_counts"])
        shards.publish(
            final, places, shards.features(recipe.row_length, vocab_size), stats
        )
    return stats


def pack_part(recipe: Recipe, numbered: tuple[int, Part]) -> dict[str, int]:
    """Writes the shards of a part, then its facts. Returns what to report of it."""
    number, part = numbered
    tokenizer = _tokenizer(recipe.tokenizer)
    record = shards.features(recipe.row_length, tokenizer.vocab_size)
    token_dtype = record["tokens"].np_dtype
    counts_V = np.zeros(tokenizer.vocab_size, np.int64)
    facts: dict = {}
    for split in shards.SPLITS:
        # One pass each: reading is cheap beside encoding, and a split streams.
        text, stats = TextCounts(), PackStats()
        rows = pack(
            _encoded(_documents(recipe, part, split, text), tokenizer),
            length=recipe.row_length,
            special=tokenizer.special,
            mode=recipe.packing,
            stats=stats,
        )
        if split == "train":
            rows = _tallied(rows, counts_V)
        written = [
            shards.write(recipe.shard(number, split, n), some, token_dtype)
            for n, some in enumerate(_cut(rows, recipe.rows_per_shard))
        ]
        facts[split] = {"packed": dataclasses.asdict(stats), "shards": written}
        facts["text"] = dataclasses.asdict(text)  # the same in both passes
    facts["token_counts"] = counts_V.tolist()
    write_text(recipe.facts(number), json.dumps(facts))
    packed = [facts[split]["packed"] for split in shards.SPLITS]
    counted = {n: sum(p[n] for p in packed) for n in ("documents", "rows", "tokens")}
    return {"parts": 1} | counted


@functools.lru_cache(2)
def _tokenizer(path: pathlib.Path) -> Tokenizer:
    return Tokenizer.load(path)


def _documents(
    recipe: Recipe, part: Part, split: str, counts: TextCounts
) -> Iterator[str]:
    wanted = split == "validation"
    found = sources.read_part(
        recipe.source, part, on_bad_text=recipe.on_bad_text, counts=counts
    )
    for text in found:
        if sources.is_held_out(text, recipe.validation_fraction) == wanted:
            yield text


def _encoded(texts: Iterable[str], tokenizer: Tokenizer) -> Iterator[Encoded]:
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= ENCODE_CHARACTERS:
            yield from tokenizer.encode(batch)
            batch, size = [], 0
    yield from tokenizer.encode(batch)


def _tallied(rows: Iterator[Row], counts_V: np.ndarray) -> Iterator[Row]:
    for some in itertools.batched(rows, TALLY_ROWS):
        tokens = np.concatenate([row.tokens for row in some])
        counts_V += np.bincount(tokens, minlength=len(counts_V))
        yield from some


def _cut(rows: Iterator[Row], size: int) -> Iterator[Iterator[Row]]:
    """Yields `rows` in runs of `size`, each to be used up before the next."""
    for first in rows:
        yield itertools.chain([first], itertools.islice(rows, size - 1))


def _gather(
    recipe: Recipe, num_parts: int
) -> tuple[dict, dict[str, list[shards.Shard]]]:
    """Returns the sums over all parts, and all shards in order."""
    text = TextCounts()
    packed = {split: PackStats() for split in shards.SPLITS}
    places: dict[str, list[shards.Shard]] = {split: [] for split in shards.SPLITS}
    token_counts = np.zeros((), np.int64)
    for number in range(num_parts):
        facts = json.loads(recipe.facts(number).read_bytes())
        text = _plus(text, facts["text"])
        token_counts = token_counts + np.array(facts["token_counts"], np.int64)
        for split in shards.SPLITS:
            packed[split] = _plus(packed[split], facts[split]["packed"])
            places[split] += [
                shards.Shard(recipe.shard(number, split, n), *sizes)
                for n, sizes in enumerate(facts[split]["shards"])
            ]
    total = PackStats()
    for part in packed.values():
        total = _plus(total, dataclasses.asdict(part))
    return {
        "documents": text.documents,
        "empty_documents": text.empty + total.empty_documents,
        "characters": text.characters,
        "bad_lines": text.bad_lines,
        "bad_bytes": text.bad_bytes,
        "on_bad_text": recipe.on_bad_text,
        "tokens": total.tokens,
        "unknown": total.unknown,
        "unknown_share": total.unknown_share,
        "filled": total.filled,
        "positions": total.positions,
        "fill": total.fill,
        "token_counts": token_counts.tolist(),
        **{
            f"{split}_{name}": getattr(found, name)
            for split, found in packed.items()
            for name in ("documents", "tokens", "rows")
        },
    }, places


def _plus(counts, more: dict):
    sums = {name: getattr(counts, name) + more[name] for name in more}
    return dataclasses.replace(counts, **sums)
