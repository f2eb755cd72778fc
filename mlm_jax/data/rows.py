"""The row store: packed rows on disk, a row's id its index.

Each source has a store of its own, in a directory named by all that its rows depend
on. The directory gets its name when everything is in it, so a kill leaves nothing that
looks like a store. A mixture is several stores under one tokenizer.
"""

import dataclasses
import os
import pathlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mlm_jax.data import build, runners, shards, sources, vocabulary
from mlm_jax.data.mixture import MixedRows, shares
from mlm_jax.data.shards import Rows
from mlm_jax.data.tokenizer import Tokenizer
from mlm_jax.errors import InputError
from mlm_jax.files import locked, name_of

# Raise it when a row is written differently: stores of other formats are built anew.
FORMAT = "1.1.0"


AnyRows = Rows | MixedRows


@dataclasses.dataclass(frozen=True)
class RowStore:
    """Rows, the tokenizer that made them, and what building them counted."""

    train: AnyRows
    validation: AnyRows
    tokenizer: Tokenizer
    stats: Mapping[str, Any]
    row_length: int
    fingerprint: str

    @property
    def token_counts(self) -> np.ndarray:
        """int64[V]: how often each token occurs in the training rows, each once."""
        return np.array(self.stats["token_counts"], np.int64)


def prepare(
    data: Mapping,
    tokenizer_config: Mapping,
    *,
    log: Callable[[str], object] = print,
    run: runners.Run | None = None,
    beam_options=None,
) -> RowStore:
    """Builds the rows a config asks for, or finds them in the cache.

    Args:
      data: `source`, `document`, `on_bad_text`, `data_dir`, `cache_dir`, `row_length`,
        `packing` and `validation_fraction`.
      tokenizer_config: `kind`, `vocab_size`, `max_characters`, `lowercase`,
        `strip_accents`, and `file`: a vocabulary to use, or None to learn one from the
        training documents.
      log: called with a line of progress about once a second, and with a summary.
      run: who packs the parts; by default a process a core.
      beam_options: for TFDS data sets that have to be made by Beam.

    Raises:
      InputError: for a source that cannot be read, or too little text for two splits.
    """
    run = runners.in_processes() if run is None else run
    cache = _cache(data)
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # ValueError: no path can have a NUL
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"data.cache_dir={cache}: {reason}") from error
    mixture = sources.mixture(data["source"])
    in_cycle = shares([weight for weight, _ in mixture])
    where = {key: data[key] for key in ("document", "data_dir")}
    found = [sources.open_source(name, **where) for _, name in mixture]
    for source in found:
        source.fetch(log, beam_options)
    contents = [source.fingerprint() for source in found]
    keys = ("document", "on_bad_text", "validation_fraction")
    text = {key: data[key] for key in keys}
    tokenizer = vocabulary.tokenizer(
        found,
        text | {"source": data["source"], "content": contents},
        tokenizer_config,
        cache / "tokenizers",
        log,
    )
    settings = text | {key: data[key] for key in ("row_length", "packing")}
    settings |= {"tokenizer": tokenizer.digest, "format": FORMAT}
    prints = [name_of(settings | {"content": content}) for content in contents]
    finals = [_final(cache, fingerprint) for fingerprint in prints]
    all_stats, all_splits = [], []
    for (_, name), source, final in zip(mixture, found, finals, strict=True):
        how = "found"
        if not final.exists():
            with locked(final.parents[1].with_suffix(".lock")):
                if not final.exists():  # another process may have built it meanwhile
                    how = "built"
                    told = {**data, "source": name}
                    _build(source, told, tokenizer, final, run, log)
        stats, splits = shards.load(final)
        log(_summary(name, stats, how, final))
        all_stats.append(stats)
        all_splits.append(splits)
    train, validation = _mixed(all_splits, in_cycle)
    return RowStore(
        train,
        validation,
        tokenizer,
        _added(all_stats),
        data["row_length"],
        _joined(in_cycle, prints),
    )


def find(data: Mapping, fingerprint: str) -> tuple[AnyRows, AnyRows]:
    """Returns the two splits of the store with this fingerprint.

    Raises:
      FileNotFoundError: if there is none.
      InputError: if it cannot be read.
    """
    weights, prints = zip(*sources.mixture(fingerprint), strict=True)
    finals = [_final(_cache(data), name) for name in prints]
    for final in finals:
        if not final.exists():
            raise FileNotFoundError(final)
    return _mixed([shards.load(final)[1] for final in finals], shares(weights))


def _mixed(
    splits: Sequence[tuple[Rows, Rows]], in_cycle: Sequence[int]
) -> tuple[AnyRows, AnyRows]:
    """Returns the two splits of all stores together."""
    if len(splits) == 1:
        return splits[0]
    train, validation = zip(*splits, strict=True)
    return MixedRows(train, in_cycle), MixedRows(validation, in_cycle)


def _joined(in_cycle: Sequence[int], prints: Sequence[str]) -> str:
    """Returns the fingerprint of a mixture: like `data.source`, for `find` to read."""
    if len(prints) == 1:
        return prints[0]
    weighted = zip(in_cycle, prints, strict=True)
    return " + ".join(f"{share} {fingerprint}" for share, fingerprint in weighted)


def _added(all_stats: Sequence[Mapping]) -> dict:
    """Returns the counts of several stores as one's."""
    if len(all_stats) == 1:
        return dict(all_stats[0])
    first = all_stats[0]
    counts = [name for name, value in first.items() if isinstance(value, int)]
    added: dict = {name: sum(stats[name] for stats in all_stats) for name in counts}
    tokens = np.sum([stats["token_counts"] for stats in all_stats], axis=0)
    return added | {"token_counts": tokens.tolist()}


def _cache(data: Mapping) -> pathlib.Path:
    return pathlib.Path(os.path.expanduser(data["cache_dir"])).absolute()


def _final(cache: pathlib.Path, fingerprint: str) -> pathlib.Path:
    return cache / "rows" / fingerprint / shards.NAME / FORMAT


def _build(source, data, tokenizer, final, run, log) -> None:
    folder = final.parents[1] / "parts"  # what a killed build left there is used
    folder.mkdir(parents=True, exist_ok=True)
    recipe = build.Recipe(
        source=source,
        on_bad_text=data["on_bad_text"],
        validation_fraction=data["validation_fraction"],
        row_length=data["row_length"],
        packing=data["packing"],
        tokenizer=folder / "tokenizer.json",
        folder=folder,
        rows_per_shard=build.ROWS_PER_SHARD,
    )
    tokenizer.save(recipe.tokenizer)
    try:
        stats = build.build(recipe, final, run=run, log=log)
        rows = {split: stats[f"{split}_rows"] for split in shards.SPLITS}
        amount = f"{stats['tokens']} tokens"
        vocabulary.require_both(data, rows, stats["documents"], amount)
    except InputError:  # it would come again, other than a kill or a full disk
        shutil.rmtree(final.parents[1])
        raise
    shutil.rmtree(folder)


def _summary(source: str, stats: Mapping, how: str, where: pathlib.Path) -> str:
    line = (
        f"{source}: {stats['train_rows']:,} training and"
        f" {stats['validation_rows']:,} validation rows, {stats['tokens']:,} tokens,"
        f" fill {stats['fill']:.2%}, [UNK] {stats['unknown_share']:.3%};"
        f" {stats['documents']:,} documents"
    )
    if stats["empty_documents"]:
        line += f", {stats['empty_documents']:,} empty"
    if stats["bad_lines"]:
        line += (
            f", {stats['bad_lines']:,} lines with {stats['bad_bytes']:,} bad bytes"
            f" ({stats['on_bad_text']})"
        )
    return f"{line}; {how} in {where}"
