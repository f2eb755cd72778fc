"""What reaches the tokenizer from a file, a data set or the bundled novels."""

import gzip
import subprocess
import sys

import numpy as np
import pytest

from mlm_jax.data import pieces, sources
from mlm_jax.errors import InputError
from tests.texts import documents


def read(source, document="line", on_bad_text="stop", data_dir=None, counts=None):
    settings = {"document": document, "on_bad_text": on_bad_text, "data_dir": data_dir}
    return list(documents(str(source), **settings, counts=counts))


def fingerprint(source, data_dir=None):
    found = sources.open_source(source, document="file", data_dir=data_dir)
    return found.fingerprint()


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
    for function in (read, fingerprint):
        with pytest.raises(InputError, match=message):
            function(source, data_dir=str(tmp_path))


def test_a_directory_is_refused_with_a_pattern(tmp_path):
    with pytest.raises(InputError, match=rf"files:{tmp_path}/\*.txt"):
        read(f"files:{tmp_path}")


def test_fingerprint_follows_content_and_order(tmp_path):
    source = f"files:{tmp_path}/*.txt"
    write(tmp_path / "1.txt", b"a")
    write(tmp_path / "2.txt", b"b")
    first = fingerprint(source)
    assert first == fingerprint(source) and len(first) == 64
    write(tmp_path / "1.txt", b"b")
    write(tmp_path / "2.txt", b"a")
    swapped = fingerprint(source)
    write(tmp_path / "1.txt", b"ba")
    write(tmp_path / "2.txt", b"")
    assert len({first, swapped, fingerprint(source)}) == 3


@pytest.mark.parametrize("document", ["line", "blank_line", "file"])
@pytest.mark.parametrize("size", [1, 7, 100, 10**6])
def test_pieces_cut_no_document(tmp_path, monkeypatch, document, size):
    rng = np.random.default_rng(size)
    lines = [b"x" * rng.integers(0, 9) + b"\r" * (n % 7 == 0) for n in range(300)]
    for name in ("a", "b"):
        write(tmp_path / f"{name}.txt", b"\n".join(lines))
    write(tmp_path / "c.txt", gzip.compress(b"\n".join(lines)))
    write(tmp_path / "d.txt", b"")
    source = f"files:{tmp_path}/*.txt"
    whole, parts = sources.TextCounts(), sources.TextCounts()
    expected = read(source, document, counts=whole)
    monkeypatch.setattr(pieces, "PART_BYTES", size)
    monkeypatch.setattr(pieces, "MAX_PARTS", 10**9)
    assert read(source, document, counts=parts) == expected
    assert parts == whole
    found = sources.open_source(source, document=document, data_dir=None)
    cut = sources.cut(found)
    assert sum(piece.size for part in cut for piece in part) == found.num_bytes()
    if size <= 100 and document != "file":
        assert len(cut) > 2 * 1200 / (size + 200)
    monkeypatch.setattr(pieces, "MAX_PARTS", 4)
    assert len(sources.cut(found)) <= 6  # pieces are not of one size


def test_a_bad_line_is_named_by_its_number_in_the_file(tmp_path, monkeypatch):
    lines = [b"line %d" % n for n in range(1, 101)]
    lines[56] += b"\xff"
    source = write(tmp_path / "bad.txt", b"\n".join(lines))
    monkeypatch.setattr(pieces, "PART_BYTES", 50)
    offset = len(b"\n".join(lines[:57])) - 1
    with pytest.raises(InputError, match=f"bad.txt: line 57, byte offset {offset}:"):
        read(source)


@pytest.mark.parametrize(
    "source, expected",
    [
        ("files:a b.txt", ["1 files:a b.txt"]),
        ("2 files:a", ["2 files:a"]),
        (
            "0.7 tfds:lm1b + .3 files:x/*.txt",
            ["7/10 tfds:lm1b", "3/10 files:x/*.txt"],
        ),
        ("1 files:c++ + d.txt + 2 files:e", ["1 files:c++ + d.txt", "2 files:e"]),
    ],
)
def test_mixtures_are_sources_with_weights(source, expected):
    assert [f"{weight} {name}" for weight, name in sources.mixture(source)] == expected


@pytest.mark.parametrize(
    "source, message",
    [
        ("0.7 files:a + files:b", "each source of a mixture has its weight"),
        ("files:a + 0.3 files:b", "each source of a mixture has its weight"),
        ("files:a + tfds:b", "each source of a mixture has its weight"),
        ("0 files:a + 1 files:b", "the weight of files:a is 0"),
        ("1 files:a + 1 files:a", "names files:a twice"),
    ],
)
def test_mixtures_that_cannot_be(source, message):
    with pytest.raises(InputError, match=message):
        sources.mixture(source)


def test_held_out_is_a_function_of_content_at_the_asked_rate():
    texts = [f"document {n}" for n in range(20_000)]
    share = np.mean([sources.is_held_out(text, 0.1) for text in texts])
    assert abs(share - 0.1) < 0.01
    assert not any(sources.is_held_out(text, 0.0) for text in texts)
    assert all(sources.is_held_out(text, 1.0) for text in texts)
    held = [sources.is_held_out(text, 0.1) for text in texts]
    kept = [sources.is_held_out(text, 0.2) for text in texts]
    assert not any(a and not b for a, b in zip(held, kept, strict=True))


def test_package_needs_neither_jax_nor_tensorflow():
    code = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {refused}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Refuse())
from mlm_jax.data import packing, pipeline, rows, runners, sources, tokenizer
"""
    refused = ("jax", "flax", "optax", "tensorflow", "apache_beam")
    code = code.replace("{refused}", str(refused))
    subprocess.run([sys.executable, "-c", code], check=True)
