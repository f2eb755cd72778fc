"""Rows on disk: a TFDS data set in ArrayRecord format, written and read by shard."""

import bisect
import contextlib
import functools
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow_datasets as tfds
from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter
from google.protobuf.message import DecodeError
from tensorflow_datasets.proto import tf_example_pb2

from mlm_jax.data.feature_files import refuse_foreign_classes
from mlm_jax.data.packing import Row
from mlm_jax.errors import InputError

NAME = "packed_rows"
SPLITS = ("train", "validation")
VERIFY_ROWS = 1024  # read at a time


def features(row_length: int, vocab_size: int) -> tfds.features.FeaturesDict:
    """Returns what a record of a row consists of."""
    small = vocab_size <= 1 << 16
    return tfds.features.FeaturesDict(
        {
            "tokens": _bytes_feature(row_length, np.uint16 if small else np.int32),
            "segment_lengths": _bytes_feature(None, np.int32),
            "word_start": _bytes_feature(-(-row_length // 8), np.uint8),
        }
    )


def _bytes_feature(size: int | None, dtype) -> tfds.features.Tensor:
    return tfds.features.Tensor(shape=(size,), dtype=dtype, encoding="bytes")


def write(path: pathlib.Path, rows: Iterable[Row], token_dtype) -> tuple[int, int]:
    """Writes a shard. Returns how many rows and bytes went into it."""
    # One record a group, so that reading one does not decode others.
    writer = ArrayRecordWriter(str(path), "group_size:1")
    num_rows = num_bytes = 0
    for row in rows:
        example = tf_example_pb2.Example()
        for name, array in {
            "tokens": row.tokens.astype(token_dtype),
            "segment_lengths": row.segment_lengths,
            "word_start": np.packbits(row.word_start),
        }.items():
            example.features.feature[name].bytes_list.value.append(array.tobytes())
        # TFDS's own writer leaves the order of the fields to chance.
        data = example.SerializeToString(deterministic=True)
        writer.write(data)
        num_rows, num_bytes = num_rows + 1, num_bytes + len(data)
    writer.close()
    return num_rows, num_bytes


class Shard(NamedTuple):
    path: pathlib.Path
    num_rows: int
    num_bytes: int


def publish(
    final: pathlib.Path,
    shards: Mapping[str, Sequence[Shard]],
    record: tfds.features.FeaturesDict,
    stats: Mapping,
) -> None:
    """Moves shards into the directory of a data set, which gets its name last.

    What a kill interrupted is done by another call.
    """
    folder = final.with_name(f"incomplete.{final.name}")
    folder.mkdir(parents=True, exist_ok=True)
    infos = []
    for split, parts in shards.items():
        template = tfds.core.ShardedFileTemplate(
            data_dir=folder,
            dataset_name=NAME,
            split=split,
            filetype_suffix="array_record",
        )
        for n, shard in enumerate(parts):
            place = template.sharded_filepath(shard_index=n, num_shards=len(parts))
            if shard.path.exists():
                shard.path.rename(place)
        info = tfds.core.SplitInfo(
            name=split,
            shard_lengths=[shard.num_rows for shard in parts],
            num_bytes=sum(shard.num_bytes for shard in parts),
            filename_template=template,
        )
        infos.append(info)
    tfds.folder_dataset.write_metadata(
        data_dir=folder,
        features=record,
        split_infos=infos,
        version=final.name,
        check_data=False,  # would need TensorFlow
        description="Packed rows of token ids for masked language modeling.",
        disable_shuffling=True,
        metadata=tfds.core.MetadataDict(stats),
    )
    folder.rename(final)


def load(final: pathlib.Path) -> tuple[dict, tuple["Rows", "Rows"]]:
    """Returns the stats of a data set and the rows of its two splits.

    Raises InputError if it is not what was written.
    """
    try:
        refuse_foreign_classes(final)
        builder = tfds.builder_from_directory(final)
        stats = dict(builder.info.metadata)
        stats["token_counts"]
        return stats, (Rows(builder, SPLITS[0]), Rows(builder, SPLITS[1]))
    except Exception as error:  # what reads these files raises nearly anything
        path = str(final / "dataset_info.json")
        raise _damaged(path, "it, or a file beside it,", error) from error


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
