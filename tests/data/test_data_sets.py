"""TFDS data sets: prepared by hand, mocked, made from a faked download; no network."""

import json
import pathlib
import sys
from unittest import mock

import numpy as np
import pytest
import tensorflow_datasets as tfds
from etils import epath
from tensorboardX.record_writer import RecordWriter
from tensorflow_datasets.proto import tf_example_pb2

from mlm_jax.data import pieces, rows, runners, sources
from mlm_jax.errors import InputError
from tests.texts import documents

# The protobuf that Beam asks for warns of a field that TFDS reads.
pytestmark = pytest.mark.filterwarnings("ignore:label:DeprecationWarning")


def read(name, folder, on_bad_text="stop", counts=None):
    settings = {"document": "file", "on_bad_text": on_bad_text, "counts": counts}
    return list(documents(name, data_dir=str(folder), **settings))


def source(name, folder):
    return sources.open_source(name, document="file", data_dir=str(folder))


class Sayings(tfds.core.GeneratorBasedBuilder):
    """A data set of the user's own."""

    VERSION = tfds.core.Version("1.2.0")

    def _info(self):
        features = {"author": tfds.features.Text(), "text": tfds.features.Text()}
        return tfds.core.DatasetInfo(
            builder=self,
            features=tfds.features.FeaturesDict(features),
            disable_shuffling=True,
        )

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples()}

    def _generate_examples(self):
        for n, text in enumerate(["Know\rthyself.\nSaid\u2028one.", "  ", "Nothing."]):
            yield n, {"author": f"a{n}", "text": text}


@pytest.fixture
def sayings(tmp_path):
    source("tfds:sayings", tmp_path).fetch(lambda line: None)
    return next(tmp_path.rglob("dataset_info.json"))


@pytest.mark.parametrize("name", ["tfds:sayings", "tfds:sayings:1.2.0"])
def test_the_train_split_in_order(sayings, tmp_path, name):
    counts = sources.TextCounts()
    found = read(name, tmp_path, counts=counts)
    assert found == ["Know\rthyself.\nSaid\u2028one.", "Nothing."]
    assert (counts.documents, counts.empty) == (2, 1)
    assert len(source(name, tmp_path).fingerprint()) == 64


def test_a_text_feature_can_be_named(sayings, tmp_path):
    assert read("tfds:sayings#author", tmp_path) == ["a0", "a1", "a2"]
    fingerprints = {
        source(f"tfds:sayings{f}", tmp_path).fingerprint() for f in FEATURES
    }
    assert len(fingerprints) == 2
    with pytest.raises(InputError, match="no text feature named autor; did you mean"):
        read("tfds:sayings#autor", tmp_path)


FEATURES = ("", "#text", "#author")


def test_a_data_set_that_is_there_is_not_made_again(sayings, tmp_path):
    before = sayings.stat().st_mtime_ns
    source("tfds:sayings", tmp_path).fetch(pytest.fail)
    assert sayings.stat().st_mtime_ns == before


def test_damaged_facts_are_named_and_no_other_name_is_proposed(sayings, tmp_path):
    sayings.write_text("{")
    for name in ("tfds:sayings", "tfds:sayings:1.2.0"):
        with pytest.raises(InputError, match=f"{name} cannot be opened") as caught:
            read(name, tmp_path)
        assert "did you mean" not in str(caught.value)


def test_other_formats_are_refused(sayings, tmp_path):
    info = json.loads(sayings.read_text())
    sayings.write_text(json.dumps(info | {"fileFormat": "riegeli"}))
    with pytest.raises(InputError, match="is riegeli; expected array_record or tfrec"):
        read("tfds:sayings", tmp_path)


@pytest.mark.parametrize(
    "name, right",
    [
        ("lm1c", "tfds:lm1b?"),
        ("LM1B", "tfds:lm1b?"),
        ("wikipedai/20230601.en", "tfds:wikipedia/20230601.en?"),
        ("wikipedia/20230601.eng", "tfds:wikipedia/20230601.en?"),
        ("wiki40/en", "tfds:wiki40b/en?"),
        ("c4/enn", "tfds:c4/en?"),
        ("lm1b:9.9.9", "tfds:lm1b:1.1.0?"),
        ("wiki40b/en:9.9.9", "tfds:wiki40b/en:1.3.0?"),
        ("saying", "tfds:sayings?"),
    ],
)
def test_a_misspelt_name_gets_the_nearest_right_one(sayings, tmp_path, name, right):
    for call in (lambda s: s.fetch(pytest.fail), lambda s: s.fingerprint()):
        with pytest.raises(InputError) as caught:
            call(source(f"tfds:{name}", tmp_path))
        message = str(caught.value)
        assert message.endswith(f"did you mean {right}") and "\n" not in message
        assert f"tfds:{name} is unknown" in message and len(message) < 600


@pytest.mark.parametrize("name", ["a b", "../x", "lm1b:x", "huggingface:imdb"])
def test_what_is_no_name_is_refused(tmp_path, name):
    with pytest.raises(InputError, match="is not of the form tfds:NAME"):
        read(f"tfds:{name}", tmp_path)


def test_a_failed_download_names_the_folder_and_the_way_out(tmp_path):
    failing = mock.patch.object(
        tfds.download.DownloadManager,
        "download_and_extract",
        side_effect=ConnectionError("no route to host\nmore"),
    )
    log = []
    with failing, pytest.raises(InputError, match="no route to host") as caught:
        source("tfds:glue/cola", tmp_path).fetch(log.append)
    message = str(caught.value)
    assert str(tmp_path) in message and "data.data_dir" in message
    assert "\n" not in message and str(tmp_path) in log[0]


def test_tfds_code_runs_on_a_faked_download(tmp_path):
    """GLUE's own code, from its own file format, without TensorFlow."""
    folder = tmp_path / "download" / "CoLA"
    folder.mkdir(parents=True)
    for split in ("train", "dev", "test"):
        head = "index\tsentence\n" if split == "test" else ""
        lines = [f"gj04\t{n % 2}\t\tSentence {n} of {split}." for n in range(5)]
        (folder / f"{split}.tsv").write_text(head + "\n".join(lines) + "\n")
    with mock.patch.object(
        tfds.download.DownloadManager,
        "download_and_extract",
        return_value=epath.Path(folder.parent),
    ):
        source("tfds:glue/cola", tmp_path).fetch(lambda line: None)
    found = read("tfds:glue/cola", tmp_path)
    assert sorted(found) == [f"Sentence {n} of train." for n in range(5)]


class BeamSayings(Sayings):
    """What wikipedia, wiki40b and c4 are: generated by Beam."""

    def _generate_examples(self):
        beam = tfds.core.lazy_imports.apache_beam
        texts = [(f"k{n}", {"author": "a", "text": f"saying {n}"}) for n in range(50)]
        return beam.Create(texts)

    def _info(self):
        features = {"author": tfds.features.Text(), "text": tfds.features.Text()}
        return tfds.core.DatasetInfo(
            builder=self, features=tfds.features.FeaturesDict(features)
        )


def test_a_data_set_made_by_beam(tmp_path):
    pytest.importorskip("apache_beam", reason="apache-beam is optional: mlm_jax[beam]")
    options = runners.beam_options(["--runner=DirectRunner"])
    source("tfds:beam_sayings", tmp_path).fetch(lambda line: None, options)
    found = read("tfds:beam_sayings", tmp_path)
    assert sorted(found) == sorted(f"saying {n}" for n in range(50))


def test_without_beam_it_is_said_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "apache_beam", None)
    with pytest.raises(InputError, match="TFDS failed to make it: .*apache_beam"):
        source("tfds:beam_sayings", tmp_path).fetch(lambda line: None)


def write_data_set(folder, name, shards, write, suffix, version="1.0.0"):
    """A prepared directory as TFDS leaves it, one list of texts a shard."""
    home = folder / name / version
    home.mkdir(parents=True)
    template = tfds.core.ShardedFileTemplate(
        data_dir=home,
        dataset_name=name.partition("/")[0],
        split="train",
        filetype_suffix=suffix,
    )
    num_bytes = 0
    for n, texts in enumerate(shards):
        path = template.sharded_filepath(shard_index=n, num_shards=len(shards))
        records = []
        for text in texts:
            example = tf_example_pb2.Example()
            for key, value in {"text": text, "title": "t"}.items():
                feature = example.features.feature[key]
                feature.bytes_list.value.append(value.encode())
            records.append(example.SerializeToString())
        write(str(path), records)
        num_bytes += sum(map(len, records))
    text = tfds.features.Text()
    tfds.folder_dataset.write_metadata(
        data_dir=home,
        features=tfds.features.FeaturesDict({"text": text, "title": text}),
        split_infos=[
            tfds.core.SplitInfo(
                name="train",
                shard_lengths=[len(texts) for texts in shards],
                num_bytes=num_bytes,
                filename_template=template,
            )
        ],
        version=version,
        filename_template=template,
        check_data=False,
    )
    return home


def write_tfrecord(path, records):
    # An implementation of the format that shares nothing with the reader.
    writer = RecordWriter(path)
    for record in records:
        writer.write(record)
    writer.close()


def write_array_record(path, records):
    from array_record.python.array_record_module import ArrayRecordWriter

    writer = ArrayRecordWriter(path, "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()


WRITERS = {"tfrecord": write_tfrecord, "array_record": write_array_record}
SHARDS = [[f"Article {n} of shard {s}. " * (n % 5) for n in range(100)] for s in (0, 1)]


@pytest.mark.parametrize("suffix", WRITERS)
@pytest.mark.parametrize("name", ["wikipedia/20230601.en", "wiki40b/en", "c4/en"])
def test_directories_prepared_elsewhere_are_read(tmp_path, monkeypatch, suffix, name):
    versions = {"wikipedia": "1.0.0", "wiki40b": "1.3.0", "c4": "3.1.0"}
    version = versions[name.partition("/")[0]]
    write_data_set(tmp_path, name, SHARDS, WRITERS[suffix], suffix, version)
    expected = [text for shard in SHARDS for text in shard if text]
    assert read(f"tfds:{name}", tmp_path) == expected
    monkeypatch.setattr(pieces, "PART_BYTES", 2000)
    found = source(f"tfds:{name}", tmp_path)
    found.fetch(pytest.fail)
    cut = sources.cut(found)
    assert len(cut) == 2 if suffix == "tfrecord" else len(cut) > 5
    assert read(f"tfds:{name}", tmp_path) == expected


@pytest.mark.parametrize("place", [3, 9, 14, 40, -2, None])
def test_b21_a_damaged_tfrecord_is_named(tmp_path, place):
    texts = [["first " * 9, "second " * 9]]
    home = write_data_set(tmp_path, "lm1b", texts, write_tfrecord, "tfrecord", "1.1.0")
    (path,) = home.glob("*tfrecord*")
    content = bytearray(path.read_bytes())
    if place is None:
        del content[-1]
    else:
        content[place] ^= 4
    path.write_bytes(content)
    record = 1 if place in (-2, None) else 0
    with pytest.raises(InputError, match=f"{path.name} record {record} is damaged"):
        read("tfds:lm1b", tmp_path)


def test_bad_text_in_a_record_is_named(tmp_path):
    texts = [["good", "not\n\0good"]]
    write_data_set(tmp_path, "lm1b", texts, write_array_record, "array_record", "1.1.0")
    where = "tfds:lm1b record 1: line 2, byte offset 4: a NUL byte"
    with pytest.raises(InputError, match=where):
        read("tfds:lm1b", tmp_path)
    assert read("tfds:lm1b", tmp_path, on_bad_text="skip") == ["good", "not"]


def test_tfds_own_mock_is_read(tmp_path):
    """Metadata as if prepared, and random text from TFDS in place of the records."""
    shards = [["x" * 50] * 40]
    home = write_data_set(
        tmp_path, "lm1b", shards, write_array_record, "array_record", "1.1.0"
    )
    for shard in home.glob("*array_record*"):
        shard.write_bytes(b"")
    with tfds.testing.mock_data(num_examples=40, data_dir=str(tmp_path)):
        found = read("tfds:lm1b", tmp_path)
    assert len(found) == 40 and len(set(found)) > 30


@pytest.mark.parametrize("suffix", WRITERS)
def test_rows_of_a_data_set_do_not_depend_on_its_format(tmp_path, suffix):
    rng = np.random.default_rng(0)
    words = np.array("the masked word is hidden and others are seen by it".split())
    texts = [" ".join(rng.choice(words, 40)) for _ in range(200)]
    write_data_set(tmp_path, "lm1b", [texts], WRITERS[suffix], suffix, "1.1.0")
    store = rows.prepare(
        {
            "source": "tfds:lm1b",
            "document": "file",
            "on_bad_text": "stop",
            "data_dir": str(tmp_path),
            "cache_dir": str(tmp_path / "cache"),
            "row_length": 32,
            "packing": "packed",
            "validation_fraction": 0.1,
        },
        {
            "kind": "wordpiece",
            "vocab_size": 100,
            "max_characters": 10**8,
            "lowercase": True,
            "strip_accents": True,
            "file": None,
        },
        log=lambda line: None,
    )
    assert store.stats["documents"] == 200
    first = store.train.read(np.array([0]))["tokens"][0]
    held_out = [sources.is_held_out(text, 0.1) for text in texts]
    expected = store.tokenizer.encode([texts[held_out.index(False)]])[0].tokens
    np.testing.assert_array_equal(first[1:31], expected[:30])


def test_no_data_set_is_looked_for_beyond_its_folder(tmp_path):
    with pytest.raises(InputError, match="tfds:lm1b in .* is not there"):
        read("tfds:lm1b", tmp_path)
    assert list(pathlib.Path(tmp_path).iterdir()) == []
