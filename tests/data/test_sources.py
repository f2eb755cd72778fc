"""What reaches the tokenizer from a file, a data set or the bundled novels."""

import gzip
import json
import subprocess
import sys

import numpy as np
import pytest
import tensorflow_datasets as tfds

from mlm_jax.data import sources
from mlm_jax.errors import InputError


def read(source, document="line", on_bad_text="stop", data_dir=None, counts=None):
    settings = {"document": document, "on_bad_text": on_bad_text, "data_dir": data_dir}
    return list(sources.documents(str(source), **settings, counts=counts))


def write(path, data: bytes) -> str:
    path.write_bytes(data)
    return f"files:{path}"


def test_bundled_novels_are_whole_and_start_at_every_chapter():
    counts = sources.TextCounts()
    chapters = read("bundled:austen", counts=counts)
    assert len(chapters) == 269 and counts.documents == 269
    assert chapters[0].startswith("EMMA") and "CHAPTER I\n" in chapters[0]
    assert chapters[1].startswith("CHAPTER II\n")
    # Six novels of 4,024,178 bytes; a document loses only the `\n` before the next.
    assert sum(len(c.encode()) for c in chapters) == 4_024_178 - 269


@pytest.mark.parametrize(
    "document, expected",
    [
        ("file", ["a\nb\n\n \nc", "d"]),
        ("blank_line", ["a\nb", "c", "d"]),
        ("line", ["a", "b", "c", "d"]),
    ],
)
def test_documents_of_files_in_sorted_order(tmp_path, document, expected):
    write(tmp_path / "2.txt", b"d")
    write(tmp_path / "1.txt", b"a\nb\n\n \nc")
    assert read(f"files:{tmp_path}/*.txt", document) == expected


def test_white_space_yields_nothing_but_is_counted(tmp_path):
    counts = sources.TextCounts()
    source = write(tmp_path / "a.txt", b"one\n\n \t\ntwo\n\xe3\x80\x80\n")
    assert read(source, counts=counts) == ["one", "two"]
    assert (counts.documents, counts.empty, counts.characters) == (2, 3, 6)


def test_gzip_is_recognised_by_content(tmp_path):
    source = write(tmp_path / "text", gzip.compress(b"\xef\xbb\xbfone\r\ntwo"))
    assert read(source) == ["one", "two"]
    cut = write(tmp_path / "cut.gz", gzip.compress(b"one" * 1000)[:-9])
    with pytest.raises(InputError, match="cut.gz cannot be read"):
        read(cut)


def test_b18_only_newline_separates_lines(tmp_path):
    middle = "a\u2028b\u2029c\u0085d\x0be\x1cf"
    source = write(tmp_path / "a.txt", f"first\n{middle}\nlast\n".encode())
    assert read(source) == ["first", middle, "last"]


@pytest.fixture
def bad_file(tmp_path):
    lines = [b"line %d" % n for n in range(1, 101)]
    lines[56] = b"bad \xc3( and \xff"
    return write(tmp_path / "bad.txt", b"\n".join(lines) + b"\n")


def test_b20_stop_names_file_line_and_byte(bad_file):
    offset = len(b"".join(b"line %d\n" % n for n in range(1, 57))) + 4
    with pytest.raises(InputError, match=rf"bad.txt: line 57, byte offset {offset}:"):
        read(bad_file)


@pytest.mark.parametrize(
    "on_bad_text, line_57", [("skip", "line 58"), ("replace", "bad \ufffd( and \ufffd")]
)
def test_b20_skip_and_replace_count(bad_file, on_bad_text, line_57):
    counts = sources.TextCounts()
    lines = read(bad_file, on_bad_text=on_bad_text, counts=counts)
    assert lines[56] == line_57 and len(lines) == 99 + (on_bad_text == "replace")
    assert (counts.bad_lines, counts.bad_bytes) == (1, 2)


@pytest.mark.parametrize("document", ["file", "line", "blank_line"])
def test_b20_byte_order_mark_and_crlf_leave_no_trace(tmp_path, document):
    clean = write(tmp_path / "clean.txt", b"one\ntwo\n\nthree\n")
    windows = write(tmp_path / "dos.txt", b"\xef\xbb\xbfone\r\ntwo\r\n\r\nthree\r\n")
    assert read(windows, document) == read(clean, document)


def test_b20_nul_is_bad_text(tmp_path):
    source = write(tmp_path / "nul.txt", b"\xef\xbb\xbfone\ntw\0o\n")
    with pytest.raises(InputError, match="line 2, byte offset 9: a NUL byte"):
        read(source)
    source = write(tmp_path / "first.txt", b"\xef\xbb\xbfo\0ne\n")
    with pytest.raises(InputError, match="line 1, byte offset 4: a NUL byte"):
        read(source)


@pytest.mark.parametrize(
    "source, message",
    [
        ("austen", "not one of bundled:NAME, files:PATTERN"),
        ("file:x", "not one of"),
        ("files:", "not one of"),
        ("bundled:austin", "did you mean bundled:austen"),
        ("files:/nowhere/*.txt", "matches no file"),
        ("tfds:no_such_data_set", "no_such_data_set is unknown"),
    ],
)
def test_sources_that_cannot_be(source, message, tmp_path):
    for function in (read, lambda s, **k: sources.fingerprint(s, **k)):
        with pytest.raises(InputError, match=message):
            function(source, data_dir=str(tmp_path))


def test_a_directory_is_refused_with_a_pattern(tmp_path):
    with pytest.raises(InputError, match=rf"files:{tmp_path}/\*.txt"):
        read(f"files:{tmp_path}")


def test_fingerprint_follows_content_and_order(tmp_path):
    def fingerprint():
        return sources.fingerprint(f"files:{tmp_path}/*.txt", data_dir=None)

    write(tmp_path / "1.txt", b"a")
    write(tmp_path / "2.txt", b"b")
    first = fingerprint()
    assert first == fingerprint() and len(first) == 64
    write(tmp_path / "1.txt", b"b")
    write(tmp_path / "2.txt", b"a")
    swapped = fingerprint()
    write(tmp_path / "1.txt", b"ba")
    write(tmp_path / "2.txt", b"")
    assert len({first, swapped, fingerprint()}) == 3


def test_held_out_is_a_function_of_content_at_the_asked_rate():
    texts = [f"document {n}" for n in range(20_000)]
    share = np.mean([sources.is_held_out(text, 0.1) for text in texts])
    assert abs(share - 0.1) < 0.01
    assert not any(sources.is_held_out(text, 0.0) for text in texts)
    assert all(sources.is_held_out(text, 1.0) for text in texts)
    held = [sources.is_held_out(text, 0.1) for text in texts]
    kept = [sources.is_held_out(text, 0.2) for text in texts]
    assert not any(a and not b for a, b in zip(held, kept, strict=True))


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
            yield n, {"author": "a", "text": text}


@pytest.fixture
def sayings(tmp_path):
    tfds.disable_progress_bar()
    builder = Sayings(data_dir=tmp_path, file_format="array_record")
    builder.download_and_prepare()
    return builder


@pytest.mark.parametrize("name", ["tfds:sayings", "tfds:sayings:1.2.0"])
def test_tfds_train_split_in_order(sayings, tmp_path, name):
    counts = sources.TextCounts()
    found = read(name, data_dir=str(tmp_path), counts=counts)
    assert found == ["Know\rthyself.\nSaid\u2028one.", "Nothing."]
    assert (counts.documents, counts.empty) == (2, 1)
    assert len(sources.fingerprint(name, data_dir=str(tmp_path))) == 64


def test_tfds_other_formats_are_refused(sayings, tmp_path):
    path = sayings.data_path / "dataset_info.json"
    info = json.loads(path.read_text())
    path.write_text(json.dumps(info | {"fileFormat": "tfrecord"}))
    with pytest.raises(InputError, match="as tfrecord, which has no random access"):
        read("tfds:sayings", data_dir=str(tmp_path))


def test_tfds_not_prepared_names_the_folder_and_the_command(tmp_path):
    with pytest.raises(InputError, match="is not prepared in") as caught:
        read("tfds:glue/cola", data_dir=str(tmp_path))
    message = str(caught.value)
    assert str(tmp_path) in message and "download_and_prepare()" in message
    assert "file_format='array_record'" in message


def test_package_needs_neither_jax_nor_tensorflow():
    code = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("jax", "flax", "optax", "tensorflow"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Refuse())
from mlm_jax.data import packing, pipeline, rows, sources, tokenizer
"""
    subprocess.run([sys.executable, "-c", code], check=True)
