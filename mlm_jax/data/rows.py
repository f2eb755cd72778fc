"""The row store: packed rows on disk, a row's id its index.

A `tensorflow_datasets` builder writes ArrayRecord, in a directory named by all that
the rows depend on. Documents stream through tokenizer and packer once, into one file
of arrays a shard; the builder then writes the shards. The directory gets its name
when everything is in it, so a kill leaves nothing that looks like a store.
"""

import bisect
import contextlib
import dataclasses
import functools
import io
import os
import pathlib
import shutil
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import tensorflow_datasets as tfds
from array_record.python.array_record_module import ArrayRecordReader
from google.protobuf.message import DecodeError
from tensorflow_datasets.proto import tf_example_pb2

from mlm_jax.data import sources
from mlm_jax.data.feature_files import refuse_foreign_classes
from mlm_jax.data.progress import Progress
from mlm_jax.data.staging import SPLITS, StagedShard, TrainingTexts, stage
from mlm_jax.data.tokenizer import Tokenizer
from mlm_jax.errors import InputError
from mlm_jax.files import locked, name_of

VERIFY_ROWS = 1024  # read at a time
# Raise it when a row is written differently: stores of other formats are built anew.
FORMAT = "1.0.0"


class PackedRows(tfds.core.ShardBasedBuilder):
    """Writes staged rows; `GeneratorBasedBuilder` would keep a split in memory."""

    VERSION = tfds.core.Version(FORMAT)

    def __init__(
        self, *, staged: Mapping[str, Sequence[pathlib.Path]], stats, **kwargs
    ):
        self._staged, self._stats = staged, stats
        with np.load(staged["train"][0]) as arrays:
            tokens_NxL, bits_NxW = arrays["tokens"], arrays["word_start"]
        self._features = {
            "tokens": _bytes_feature(tokens_NxL.shape[1], tokens_NxL.dtype),
            "segment_lengths": _bytes_feature(None, np.int32),
            "word_start": _bytes_feature(bits_NxW.shape[1], np.uint8),
        }
        super().__init__(file_format="array_record", **kwargs)

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description="Packed rows of token ids for masked language modeling.",
            features=tfds.features.FeaturesDict(self._features),
            disable_shuffling=True,
            metadata=tfds.core.MetadataDict(self._stats),
        )

    def _shard_iterators_per_split(self, dl_manager):
        del dl_manager
        return {
            split: [StagedShard(path) for path in paths]
            for split, paths in self._staged.items()
        }


def _bytes_feature(size: int | None, dtype) -> tfds.features.Tensor:
    return tfds.features.Tensor(shape=(size,), dtype=dtype, encoding="bytes")


class Rows:
    """The rows of one split, read by id.

    Reads ArrayRecord itself: for a batch TFDS's data source starts a thread a shard
    and decodes an example in 60 us, which together take five times as long.
    """

    def __init__(self, builder: tfds.core.DatasetBuilder, split: str):
        files = builder.info.splits[split]
        self._paths = [str(path) for path in files.filepaths]
        self._ends = np.cumsum(files.shard_lengths)
        features = builder.info.features
        (self.row_length,) = features["tokens"].shape
        self._dtypes = {name: feature.np_dtype for name, feature in features.items()}
        # More shards than these are closed again: a process may not open them all.
        self._reader = functools.lru_cache(256)(_open_shard)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def _record(self, id_: int) -> bytes:
        path, place = self._place(id_)
        with self._refuse_damaged(id_):
            return self._reader(path).read([place])[0]

    def _place(self, id_: int) -> tuple[str, int]:
        shard = bisect.bisect_right(self._ends, id_)
        return self._paths[shard], id_ - (int(self._ends[shard - 1]) if shard else 0)

    @contextlib.contextmanager
    def _refuse_damaged(self, id_: int):
        try:
            yield
        except Exception as error:  # ArrayRecord and protobuf raise nearly anything
            path, place = self._place(id_)
            raise _damaged(path, f"record {place} (row {id_})", error) from error

    def verify(self) -> None:
        """Reads every record. Raises InputError, naming shard and record, at the first
        that is not what was written."""
        starts = [0, *map(int, self._ends[:-1])]
        for path, start, end in zip(self._paths, starts, self._ends, strict=True):
            try:
                found = _open_shard(path).num_records()
            except Exception as error:
                raise _damaged(path, "it", error) from error
            if found != end - start:
                raise _damaged(path, f"it has {found} records, not {end - start}", None)
            for first in range(start, int(end), VERIFY_ROWS):
                self.read(np.arange(first, min(first + VERIFY_ROWS, int(end))))

    def read(self, ids_N: np.ndarray) -> dict[str, np.ndarray]:
        """Returns rows by id.

        Returns:
          `tokens` int32[N, L], `segment_lengths` int32[N, S] with zeros after the
          last segment, and `word_start` bool[N, L].

        Raises:
          InputError: for a record that is not what was written.
        """
        records = [self._record(int(i)) for i in ids_N]
        try:
            return self._decoded(records)
        except (DecodeError, IndexError, ValueError):
            # A shard cut short may give empty records; which is found one by one.
            for id_, record in zip(ids_N, records, strict=True):
                with self._refuse_damaged(int(id_)):
                    self._decoded([record])
            raise

    def _decoded(self, records: list[bytes]) -> dict[str, np.ndarray]:
        parse = tf_example_pb2.Example.FromString
        fields = [parse(record).features.feature for record in records]
        found = {
            name: [field[name].bytes_list.value[0] for field in fields]
            for name in self._dtypes
        }
        num_N = np.array([len(lengths) for lengths in found["segment_lengths"]])
        num_N //= self._dtypes["segment_lengths"].itemsize
        lengths_NxS = np.zeros((len(records), num_N.max()), np.int32)
        is_segment_NxS = np.arange(num_N.max())[None] < num_N[:, None]
        flat = {
            name: np.frombuffer(b"".join(values), self._dtypes[name])
            for name, values in found.items()
        }
        lengths_NxS[is_segment_NxS] = flat["segment_lengths"]
        bits_NxW = flat["word_start"].reshape(len(records), -1)
        word_start_NxL = np.unpackbits(bits_NxW, axis=1, count=self.row_length)
        return {
            "tokens": flat["tokens"].reshape(len(records), -1).astype(np.int32),
            "segment_lengths": lengths_NxS,
            "word_start": word_start_NxL.astype(bool),
        }


def _damaged(path: str, what: str, error: Exception | None) -> InputError:
    reason = f" cannot be read: {_first_line(error)}" if error else ""
    return InputError(
        f"{path}: {what}{reason}. Rows are made from the text: remove "
        f"{pathlib.Path(path).parents[2]}, and they are made anew."
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).split("\n")[0][:200]


def _open_shard(path: str) -> ArrayRecordReader:
    # Rows are read in random order: nothing is worth reading ahead.
    options = "readahead_buffer_size:0"
    return ArrayRecordReader(path, options=options, file_reader_buffer_size=4096)


@dataclasses.dataclass(frozen=True)
class RowStore:
    """Rows, the tokenizer that made them, and what building them counted."""

    train: Rows
    validation: Rows
    tokenizer: Tokenizer
    stats: Mapping[str, float]
    row_length: int
    fingerprint: str

    @property
    def token_counts(self) -> np.ndarray:
        """int64[V]: how often each token occurs in the training rows."""
        return np.array(self.stats["token_counts"], np.int64)


def prepare(
    data: Mapping, tokenizer_config: Mapping, *, log: Callable[[str], object] = print
) -> RowStore:
    """Builds the rows a config asks for, or finds them in the cache.

    Args:
      data: `source`, `document`, `on_bad_text`, `data_dir`, `cache_dir`, `row_length`,
        `packing` and `validation_fraction`.
      tokenizer_config: `kind`, `vocab_size`, `lowercase`, `strip_accents`, and `file`:
        a vocabulary to use, or None to learn one from the training documents.
      log: called with a line of progress about once a second, and with a summary.

    Raises:
      InputError: for a source that cannot be read, or too little text for two splits.
    """
    cache = pathlib.Path(os.path.expanduser(data["cache_dir"])).absolute()
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # ValueError: no path can have a NUL
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"data.cache_dir={cache}: {reason}") from error
    text = {
        key: data[key] for key in ("document", "on_bad_text", "validation_fraction")
    }
    text["content"] = sources.fingerprint(data["source"], data_dir=data["data_dir"])
    tokenizer = _tokenizer(data, tokenizer_config, text, cache / "tokenizers", log)
    fingerprint = name_of(
        text
        | {key: data[key] for key in ("row_length", "packing")}
        | {"tokenizer": tokenizer.digest, "format": FORMAT}
    )
    home = cache / "rows" / fingerprint
    final = home / PackedRows.name / FORMAT
    how = "found"
    if not final.exists():
        with locked(cache / "rows" / f"{fingerprint}.lock"):
            if not final.exists():  # another process may have built it meanwhile
                how = "built"
                _build(data, tokenizer, home, log)
    stats, splits = _open(final)
    log(_summary(data["source"], stats, how, final))
    return RowStore(*splits, tokenizer, stats, data["row_length"], fingerprint)


def _open(final: pathlib.Path) -> tuple[dict, tuple[Rows, Rows]]:
    try:
        refuse_foreign_classes(final)
        builder = tfds.builder_from_directory(final)
        stats = dict(builder.info.metadata)
        stats["token_counts"]
        return stats, (Rows(builder, SPLITS[0]), Rows(builder, SPLITS[1]))
    except Exception as error:  # what reads these files raises nearly anything
        path = str(final / "dataset_info.json")
        raise _damaged(path, "it, or a file beside it,", error) from error


def find(data: Mapping, fingerprint: str) -> tuple[Rows, Rows]:
    """Returns the two splits of the store with this fingerprint.

    Raises:
      FileNotFoundError: if there is none.
      InputError: if it cannot be read.
    """
    cache = pathlib.Path(os.path.expanduser(data["cache_dir"])).absolute()
    final = cache / "rows" / fingerprint / PackedRows.name / FORMAT
    if not final.exists():
        raise FileNotFoundError(final)
    return _open(final)[1]


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


def _tokenizer(data, config, text, folder, log) -> Tokenizer:
    switches = {key: config[key] for key in ("lowercase", "strip_accents")}
    if config["file"] is not None:
        return Tokenizer.from_file(config["file"], **switches)
    settings = switches | {key: config[key] for key in ("kind", "vocab_size")}
    path = folder / name_of(text | settings) / "tokenizer.json"
    if not path.exists():
        with locked(folder / f"{path.parent.name}.lock"):
            if not path.exists():
                what = f"learning {config['vocab_size']:,} {config['kind']} pieces"
                progress = Progress(log, what)
                tokenizer = Tokenizer.train(TrainingTexts(data, progress), **settings)
                tokenizer.save(path)
                log(f"{what}: {tokenizer.vocab_size:,} in {progress.seconds():.1f} s")
    return Tokenizer.load(path)


def _build(data: Mapping, tokenizer: Tokenizer, home: pathlib.Path, log) -> None:
    shutil.rmtree(home, ignore_errors=True)  # what a killed build left
    folder = home / "staged"
    folder.mkdir(parents=True)
    try:
        staged, stats = stage(data, tokenizer, folder, log)
        builder = PackedRows(data_dir=home, staged=staged, stats=stats)
        tfds.disable_progress_bar()
        with contextlib.redirect_stdout(io.StringIO()):  # it speaks of downloads
            builder.download_and_prepare()
    except BaseException:
        shutil.rmtree(home, ignore_errors=True)
        raise
    folder.rmdir()
