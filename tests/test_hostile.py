"""Files that are damaged, or made to do harm, end in one line or change nothing."""

import functools
import json
import pathlib
import pickle
import random
import re
import shutil

import numpy as np
import pytest
import tensorflow_datasets as tfds
from hypothesis import given, settings
from hypothesis import strategies as st

from configs import tiny
from mlm_jax import config, manifest, metrics, workdir
from mlm_jax.data import rows, sources
from mlm_jax.data.tokenizer import SPECIAL_TOKENS, Tokenizer
from mlm_jax.errors import DamageError, InputError
from tests.texts import data_config, documents

ROOT = pathlib.Path(__file__).parents[1]
TOKENIZER = {
    "kind": "wordpiece",
    "vocab_size": 300,
    "lowercase": True,
    "strip_accents": True,
    "max_characters": 10**8,
    "file": None,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Text, a cache with its tokenizer and rows, a saved config."""
    path = tmp_path_factory.mktemp("hostile")
    rng = np.random.default_rng(0)
    words = "the masked word is hidden and others are seen by it".split()
    lines = [" ".join(rng.choice(words, rng.integers(5, 60))) for _ in range(200)]
    (path / "text.txt").write_text("\n".join(lines))
    rows.prepare(data_config(path), TOKENIZER, log=lambda line: None)
    config.save(tiny.get_config(), path)
    return path


def prepare(path):
    return rows.prepare(data_config(path), TOKENIZER, log=lambda line: None)


@pytest.fixture
def copy(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "copy")


def refused(call, *parts):
    """`call` may only fail with one line, for people."""
    with pytest.raises(InputError) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text and len(text) < 1000
    for part in parts:
        assert part in text


def one_line_or(call):
    """Returns what `call` does, or None where it refuses in one line."""
    try:
        return call()
    except InputError as error:
        assert "\n" not in str(error)
        return None


def shards(path, split="train"):
    return sorted((path / "cache" / "rows").rglob(f"*{split}*.array_record*"))


# --- the row store ---------------------------------------------------------------


def test_b21_a_flipped_byte_of_a_shard_is_named(copy):
    (shard,) = shards(copy)
    whole = shard.read_bytes()
    ids = np.arange(len(prepare(copy).train))
    expected = prepare(copy).train.read(ids)["tokens"].tolist()
    rng = random.Random(0)
    used = [place for place, byte in enumerate(whole) if byte]  # blocks are padded
    found = 0
    for _ in range(30):
        damaged = bytearray(whole)
        damaged[rng.choice(used)] ^= 1 << rng.randrange(8)
        shard.write_bytes(damaged)
        train = prepare(copy).train
        read = one_line_or(lambda train=train: train.read(ids))
        if read is None:
            refused(lambda train=train: train.read(ids), shard.name, "record")
            found += 1
        else:
            assert read["tokens"].tolist() == expected
    assert found > 10


@pytest.mark.parametrize("size", [0, 100, 0.5, -1])
def test_b21_a_shard_cut_short_is_named(copy, size):
    (shard,) = shards(copy)
    whole = shard.read_bytes()
    shard.write_bytes(whole[: int(len(whole) * size) if size == 0.5 else size])

    def read_all():
        store = prepare(copy)
        store.train.read(np.arange(len(store.train)))

    refused(read_all, shard.name)
    refused(lambda: prepare(copy).train.verify(), shard.name)


def test_a_missing_shard_and_one_of_another_split_are_named(copy):
    (shard,), (other,) = shards(copy), shards(copy, "validation")
    shutil.copy(other, shard)
    refused(lambda: prepare(copy).train.verify(), shard.name, "records, not")
    shard.unlink()
    refused(lambda: prepare(copy).train.read(np.arange(4)), shard.name)


def test_verify_passes_what_is_whole(folder):
    store = prepare(folder)
    store.train.verify()
    store.validation.verify()


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\x00", b'{"name": 5}', b"[]"])
@pytest.mark.parametrize("name", ["dataset_info.json", "features.json"])
def test_damaged_facts_of_a_row_store_are_named(copy, name, content):
    (path,) = (copy / "cache" / "rows").rglob(name)
    path.write_bytes(content)
    refused(lambda: prepare(copy), "made anew")


class Quotations(tfds.core.GeneratorBasedBuilder):
    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        features = tfds.features.FeaturesDict({"text": tfds.features.Text()})
        return tfds.core.DatasetInfo(builder=self, features=features)

    def _split_generators(self, dl_manager):
        return {"train": ((n, {"text": f"saying {n} " * 9}) for n in range(64))}

    def _generate_examples(self):
        raise NotImplementedError


def quotations(folder):
    """Prepares the data set there; returns its one shard."""
    builder = Quotations(data_dir=folder, file_format="array_record")
    builder.download_and_prepare()
    (shard,) = folder.rglob("*.array_record*")
    return shard


def read_quotations(folder):
    found = documents(
        "tfds:quotations", document="file", on_bad_text="stop", data_dir=str(folder)
    )
    return list(found)


def test_b21_a_damaged_record_of_a_tfds_source_is_named(tmp_path):
    shard = quotations(tmp_path)
    content = bytearray(shard.read_bytes())
    at = content.rindex(b"saying") if b"saying" in content else len(content) * 3 // 4
    content[at] ^= 1
    shard.write_bytes(content)
    refused(lambda: read_quotations(tmp_path), "tfds:quotations record", shard.name)


@pytest.mark.parametrize("damage", ["empty", "cut", "zeros", "missing", "another"])
def test_r14_a_damaged_shard_of_a_tfds_source_is_named(tmp_path, damage):
    shard = quotations(tmp_path)
    whole = shard.read_bytes()
    if damage == "missing":
        shard.unlink()
    else:
        contents = {
            "empty": b"",
            "cut": whole[: len(whole) // 2],
            "zeros": bytes(len(whole)),
            "another": whole[::-1],
        }
        shard.write_bytes(contents[damage])
    refused(lambda: read_quotations(tmp_path), "tfds:quotations", shard.name)


@pytest.mark.parametrize("key", ["pythonClassName", "type"])
def test_r21_no_module_is_imported_because_a_file_names_it(
    copy, tmp_path, monkeypatch, key
):
    """Escaped, as JSON allows, too."""
    (tmp_path / "evil.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    (path,) = (copy / "cache" / "rows").rglob("features.json")
    escaped = "".join(f"\\u{ord(letter):04x}" for letter in key)
    path.write_text(f'{{"{escaped}": "evil.Feature", "content": "{{}}"}}')
    refused(lambda: prepare(copy), "features.json", "evil.Feature")

    builder = Quotations(data_dir=tmp_path, file_format="array_record")
    builder.download_and_prepare()
    (facts,) = (tmp_path / "quotations").rglob("features.json")
    facts.write_text(path.read_text())
    refused(lambda: read_quotations(tmp_path), "features.json", "evil.Feature")


# --- text, vocabularies, tokenizers ----------------------------------------------

TEXTS = st.lists(
    st.one_of(
        st.binary(max_size=40),
        st.sampled_from(
            [b"\n", b"\r\n", b"\0", b"\xef\xbb\xbf", b"\xff\xfe", b"\x1f\x8b"]
        ),
        st.text(max_size=20).map(lambda text: text.encode("utf-8", "surrogatepass")),
    ),
    max_size=12,
).map(b"".join)


@given(content=TEXTS, document=st.sampled_from(["file", "line", "blank_line"]))
@settings(max_examples=100, deadline=None)
def test_r17_any_bytes_as_text(tmp_path_factory, content, document):
    path = tmp_path_factory.getbasetemp() / "fuzz.txt"
    path.write_bytes(content)
    for on_bad_text in ("stop", "skip", "replace"):
        counts = sources.TextCounts()
        read = functools.partial(
            documents,
            f"files:{path}",
            document=document,
            on_bad_text=on_bad_text,
            data_dir=None,
            counts=counts,
        )
        found = one_line_or(lambda read=read: list(read()))
        is_gzip = content.startswith(b"\x1f\x8b")
        if found is None:
            assert on_bad_text == "stop" or is_gzip
        else:
            assert not any("\0" in text for text in found)
            assert all(text.encode() for text in found)  # no half of a surrogate
            if document == "line" and not is_gzip:  # no line is lost in silence
                lines = content.split(b"\n")
                lines = lines[:-1] if lines[-1] == b"" else lines
                skipped = counts.bad_lines if on_bad_text == "skip" else 0
                assert counts.documents + counts.empty + skipped == len(lines)


@given(content=TEXTS)
@settings(max_examples=100, deadline=None)
def test_r17_any_bytes_as_a_vocabulary(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "vocab.txt"
    for head in (b"", "\n".join(SPECIAL_TOKENS).encode() + b"\n"):
        path.write_bytes(head + content)
        load = functools.partial(
            Tokenizer.from_file, path, lowercase=True, strip_accents=True
        )
        tokenizer = one_line_or(load)
        if tokenizer is not None:
            (found,) = tokenizer.encode(["a word, \u00e9 and \U0001f600"])
            assert found.tokens.max() < tokenizer.vocab_size


@pytest.mark.parametrize("name", ["tokenizer.json", "bert_tokenizer.json"])
def test_r21_a_damaged_tokenizer_file(folder, tmp_path, name):
    paths = [*folder.rglob(name), *(ROOT / "tests" / "data" / "fixtures").glob(name)]
    whole = paths[0].read_bytes()
    rng = random.Random(0)
    path = tmp_path / "tokenizer.json"
    for n in range(60):
        damaged = bytearray(whole[: rng.randrange(len(whole))] if n % 3 == 0 else whole)
        for _ in range(n % 3):
            damaged[rng.randrange(min(len(whole), 4000))] = rng.randrange(256)
        path.write_bytes(damaged)
        one_line_or(lambda: Tokenizer.load(path))


def test_r21_ids_that_would_fill_the_memory_are_refused(folder, tmp_path):
    (whole,) = folder.rglob("tokenizer.json")
    content = json.loads(whole.read_text())
    content["model"]["vocab"]["zzz"] = 2**32 - 1
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content))
    refused(lambda: Tokenizer.load(path), "ids up to 4294967295")
    path.write_text("[" * 100_000)
    refused(lambda: Tokenizer.load(path), "not a tokenizer.json")


# --- a run's own files -----------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"5", b"\xff\xfe", b"{}", b"[" * 100_000, b'{"data": 5}']
    + [b'{"model": {"width": "wide"}}', b"NaN", b"null"],
)
def test_r21_a_damaged_config(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    refused(lambda: config.load(tmp_path), "config.json")


def test_r21_any_change_of_a_config(folder, tmp_path):
    whole = (folder / "config.json").read_bytes()
    rng = random.Random(0)
    for n in range(200):
        damaged = bytearray(whole[: rng.randrange(len(whole))] if n % 4 == 0 else whole)
        if n % 4:
            damaged[rng.randrange(len(whole))] = rng.randrange(256)
        (tmp_path / "config.json").write_bytes(damaged)
        c = one_line_or(lambda: config.load(tmp_path))
        if c is not None:
            config.check(c)


@pytest.mark.parametrize(
    "line",
    [b"", b"junk", b"[1]", b"{}", b'{"step": "1"}', b"\xff", b"5", b"[" * 99_999],
)
def test_r21_damaged_metrics_are_refused_by_line(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + line + b'\n{"step": 2}\n')
    before = path.read_bytes()
    refused(lambda: metrics.JsonLines(path, 2), "metrics.jsonl, line 2")
    assert path.read_bytes() == before


JSON = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=9)
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.one_of(
                st.sampled_from("data model step files sha256 size starts".split()),
                st.text(max_size=9),
            ),
            inner,
            max_size=4,
        ),
    ),
    max_leaves=20,
)


@given(value=JSON)
@settings(max_examples=50, deadline=None)
def test_r21_any_json_where_another_was_written(tmp_path_factory, value):
    path = tmp_path_factory.getbasetemp()
    for name in ("config.json", "environment.json", "manifest.json", "a.jsonl"):
        (path / name).write_text(json.dumps(value) + "\n")
    one_line_or(lambda: config.load(path))
    one_line_or(lambda: workdir.read_environment(path))
    one_line_or(lambda: metrics.read_json_lines(path / "a.jsonl"))
    with pytest.raises(DamageError):
        manifest.read(path)


def test_an_error_is_one_line_whatever_it_quotes():
    assert str(InputError("files:a\nb\u2028c")) == "files:a b c"


def test_b89_nothing_that_executes_is_read(tmp_path):
    """A pickle that leaves a mark is refused wherever a file may be given."""

    class Evil:
        def __reduce__(self):
            return pathlib.Path.touch, (tmp_path / "mark",)

    path = tmp_path / "tokenizer.json"
    path.write_bytes(pickle.dumps(Evil()))
    refused(lambda: Tokenizer.load(path))
    (tmp_path / "config.json").write_bytes(path.read_bytes())
    refused(lambda: config.load(tmp_path))
    refused(lambda: metrics.read_json_lines(path))
    assert not (tmp_path / "mark").exists()


def test_r21_the_package_has_no_call_that_executes_a_file():
    unsafe = re.compile(
        r"\bpickle\b|allow_pickle=True|(?<![\w.])(eval|exec)\(|yaml\.load|marshal"
    )
    for path in (ROOT / "mlm_jax").rglob("*.py"):
        found = unsafe.search(path.read_text())
        assert not found, f"{path}: {found[0]}"
