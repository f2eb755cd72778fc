"""Coverage-guided fuzzing of what reads files, for hours if one likes.

    pip install atheris
    python -m tests.fuzz_readers text -max_total_time=60

An input may only be read, or refused in one line. The readers: text, vocabulary,
tokenizer, config, lines, manifest.
"""

import pathlib
import sys
import tempfile

import atheris

with atheris.instrument_imports(include=["mlm_jax"]):
    from mlm_jax import config, manifest, metrics
    from mlm_jax.data.tokenizer import SPECIAL_TOKENS, Tokenizer
    from mlm_jax.errors import DamageError, InputError
    from tests.texts import documents

FOLDER = pathlib.Path(tempfile.mkdtemp())
HEAD = "\n".join(SPECIAL_TOKENS).encode() + b"\n"


def read_text(path):
    for document in ("file", "line", "blank_line"):
        for on_bad_text in ("stop", "skip", "replace"):
            settings = dict(document=document, on_bad_text=on_bad_text, data_dir=None)
            for text in documents(f"files:{path}", **settings):
                assert "\0" not in text and text.encode()


def read_vocabulary(path):
    path.write_bytes(HEAD + path.read_bytes())
    tokenizer = Tokenizer.from_file(path, lowercase=True, strip_accents=True)
    (found,) = tokenizer.encode(["a word"])
    assert found.tokens.max(initial=0) < tokenizer.vocab_size


READERS = {
    "text": ("text.txt", read_text),
    "vocabulary": ("vocab.txt", read_vocabulary),
    "tokenizer": ("tokenizer.json", Tokenizer.load),
    "config": ("config.json", lambda path: config.load(path.parent)),
    "lines": ("metrics.jsonl", metrics.read_json_lines),
    "manifest": (manifest.NAME, lambda path: manifest.verify(path.parent)),
}


def main():
    name, read = READERS[sys.argv.pop(1)]
    path = FOLDER / name

    def test_one_input(content):
        path.write_bytes(content)
        try:
            read(path)
        except (InputError, DamageError) as error:
            assert "\n" not in str(error)

    atheris.Setup(sys.argv, test_one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
