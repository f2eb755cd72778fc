"""Mines the collocations of the training text, to mask them as one unit.

    python -m mlm_jax.mine_collocations --config=configs/austen.py \\
        --output=collocations.txt

Writes a collocation a line, with the settings as comments, and prints the ten best of
each length. Uses the rows and the tokenizer of the config, and makes them if need be.
"""

import os
import pathlib
import time

from absl import flags

from mlm_jax import command, config
from mlm_jax.corruption import mining
from mlm_jax.corruption.collocations import MAX_WORDS, MIN_WORDS
from mlm_jax.data.rows import prepare
from mlm_jax.errors import InputError
from mlm_jax.files import write_text

CONFIG = command.define_config()
OUTPUT = flags.DEFINE_string("output", None, "The file to write.")
MAX = flags.DEFINE_integer(
    "max_words",
    MAX_WORDS,
    "The most words in a collocation.",
    lower_bound=MIN_WORDS,
    upper_bound=MAX_WORDS,
)
MIN_COUNT = flags.DEFINE_integer(
    "min_count", 10, "How often a collocation occurs at least.", lower_bound=2
)
SIZE = flags.DEFINE_integer(
    "size",
    None,
    "Collocations in the list; by default as many as have half of the words in them,"
    " and at most ten times the vocabulary.",
    lower_bound=1,
)
SCORE = flags.DEFINE_enum(
    "score",
    "pmi",
    list(mining.SCORES),
    "What collocations are ranked by: the paper's measure, or the one of the lists"
    " published with it, which favours frequent ones.",
)
BEST = 10


def main(arguments):
    del arguments
    c = CONFIG.value
    config.check(c)
    path = _output()
    start = time.monotonic()
    store = prepare(c.data, config.tokenizer_of(c))
    mined = mining.mine(
        store.train,
        store.tokenizer,
        max_words=MAX.value,
        min_count=MIN_COUNT.value,
        size=SIZE.value,
        max_size=10 * store.tokenizer.vocab_size,
        score=SCORE.value,
    )
    entries = [entry for found in mined.found.values() for entry in found]
    if not entries:
        raise InputError(
            f"no words occur together {MIN_COUNT.value} times in {mined.words:,} words;"
            " give more text or a lower --min_count."
        )
    settings = {
        "source": c.data.source,
        "rows": store.fingerprint,
        "tokenizer": store.tokenizer.digest,
        "max_words": MAX.value,
        "min_count": MIN_COUNT.value,
        "score": SCORE.value,
    }
    comments = [f"# {name} = {value}" for name, value in settings.items()]
    lines = comments + [f"# {_summary(mined)}"] + [entry.text for entry in entries]
    write_text(path, "\n".join(lines) + "\n")
    _print_best(mined)
    print(f"{_summary(mined)}; {time.monotonic() - start:.0f} s; wrote {path}")


def _output():
    """Returns the path, checked before minutes of work."""
    if not OUTPUT.value:
        raise InputError("--output=FILE is missing, such as --output=collocations.txt.")
    path = pathlib.Path(os.path.expanduser(OUTPUT.value))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--output={path}: {error.strerror}.") from error
    if path.is_dir():
        raise InputError(f"--output={path} is a directory; expected a file.")
    return path


def _summary(mined):
    lengths = ", ".join(
        f"{len(found):,} of {mined.candidates[n]:,} {n}-grams"
        for n, found in mined.found.items()
    )
    size = sum(len(found) for found in mined.found.values())
    return (
        f"{size:,} collocations: {lengths}; {mined.coverage:.1%} of {mined.words:,}"
        " words are part of one"
    )


def _print_best(mined):
    for n, found in mined.found.items():
        print(f"{n} words, of {len(found):,}:")
        for entry in found[:BEST]:
            print(f"  {entry.pmi:6.2f} {entry.count:7,}  {entry.text}")


if __name__ == "__main__":
    command.run(main)
