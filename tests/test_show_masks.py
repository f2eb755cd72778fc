"""What show_masks shows is what training does; nothing in a corpus can disguise it.

The command runs as its users run it: in this process its flags would meet `train`'s.
"""

import collections
import html.parser
import os
import pathlib
import re
import subprocess
import sys

import jax
import numpy as np
import pytest

from configs import tiny
from mlm_jax import keys, mask_page, program
from mlm_jax.corruption import settings
from mlm_jax.corruption.replace import Action
from mlm_jax.data import pipeline, rows
from mlm_jax.mask_page import Chart, Group, Piece, Report, Row

ROOT = pathlib.Path(__file__).parents[1]
NUM_ROWS, DRAWS = 5, 150
WORDS = "table chair window garden river mountain carriage letter sister morning"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A corpus of short documents, one of them in every four with a script."""
    folder = tmp_path_factory.mktemp("masks")
    rng = np.random.default_rng(0)
    documents = [
        " ".join(rng.choice(WORDS.split(), 24)) + " <script>alert(1)</script>" * (n < 9)
        for n in range(36)
    ]
    (folder / "text.txt").write_text("\n\n".join(documents))
    return folder


def overrides(folder, **corruption):
    """Returns {field: value} of a config over `configs/tiny.py`."""
    data = {
        "data.source": f"files:{folder}/text.txt",
        "data.document": "blank_line",
        "data.validation_fraction": 0.2,
        "data.cache_dir": str(folder / "cache"),
        "data.packing": "single",
        "tokenizer.vocab_size": corruption.pop("vocab_size", 400),
    }
    return data | {f"corruption.{name}": value for name, value in corruption.items()}


def run(fields, *arguments):
    values = [f"--config.{name}={value}" for name, value in fields.items()]
    module = [sys.executable, "-m", "mlm_jax.show_masks", "--config=configs/tiny.py"]
    return subprocess.run(
        [*module, *values, *arguments],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=100,
    )


def shown(folder, fields):
    """Returns the text and the page of a successful run."""
    page = folder / "page.html"
    sizes = f"--rows={NUM_ROWS}", f"--draws={DRAWS}"
    result = run(fields, *sizes, f"--html={page}")
    assert result.returncode == 0, result.stderr
    return result.stdout, page.read_text()


def in_training(fields):
    """Returns tokenizer, batch and ledger of the first `DRAWS` rows of training."""
    c = tiny.get_config()
    c.update_from_flattened_dict(fields)
    store = rows.prepare(c.data, c.tokenizer, log=lambda line: None)
    batches = pipeline.TrainBatches(store.train, batch_size=DRAWS, seed=c.seed)
    corrupt = jax.jit(program.train_corrupt(c, store.tokenizer, store.token_counts))
    key = keys.purpose_key(jax.random.key(c.seed), keys.Purpose.CORRUPTION)
    out = corrupt(key, batches[0], settings.hparams(c.corruption), 0.0)
    return store.tokenizer, *jax.device_get(out)


@pytest.fixture(scope="module")
def split_run(folder):
    """Tokens that are words; more of them corrupted than predicted."""
    fields = overrides(
        folder,
        corruption_rate=0.6,
        prediction_rate=0.4,
        mask_frac=0.4,
        random_frac=0.3,
        random_pool="full_vocab",
    )
    return *shown(folder, fields), *in_training(fields)


@pytest.fixture(scope="module")
def word_run(folder):
    """Words of several tokens."""
    fields = overrides(folder, vocab_size=60, strategy="word", rate=0.5)
    return *shown(folder, fields), *in_training(fields)


def row_texts(text):
    """Returns the text of each row that was shown, in one line."""
    blocks = [b.split("\n") for b in text.split("\n\n")]
    return [" ".join(map(str.strip, b[1:])) for b in blocks if b[0].startswith("row ")]


def test_every_position_is_shown_as_what_it_is(split_run):
    text, _, tokenizer, batch, _ = split_run
    seen = collections.Counter()
    found = row_texts(text)
    assert len(found) == NUM_ROWS
    for i, line in enumerate(found):
        words = re.sub(r"(?<=[⟧›])(?=[⟦‹])", " ", line)  # no space before punctuation
        expected = []
        predicted = batch["predict"][i][batch["weights"][i] > 0]
        (real,) = np.nonzero(batch["segment"][i])
        for place in real:
            piece = tokenizer.piece(batch["tokens"][i, place])
            stands = tokenizer.piece(batch["inputs"][i, place]).replace("##", "·")
            action = Action(batch["action"][i, place])
            shape = {
                Action.NONE: piece,
                Action.MASK: piece,
                Action.RANDOM: f"{piece}→{stands}",
                Action.KEEP: f"≡{piece}",
            }[action]
            ends = "⟦⟧" if place in predicted else "‹›"
            ends = ends if action else ("", "")
            expected.append(ends[0] + shape + ends[1])
            seen[action, place in predicted] += 1
        assert words.replace(" ", "") == "".join(expected).replace(" ", "")
    assert len(seen) == 7  # nothing, and three actions predicted or not


def test_words_are_hidden_whole(word_run):
    text, *_ = word_run
    lines = row_texts(text)
    assert len(lines) == NUM_ROWS
    pieces = []
    for line in lines:
        # What is left are words and the marks where units begin and end.
        plain = re.sub(r"→·?[^\s⟧·]+", "", line).replace("≡", "")
        assert not re.search(r"\w⟦|⟧\w", plain)
        pieces += [unit.split("·") for unit in re.findall("⟦(.*?)⟧", plain)]
    assert all(" " not in piece for unit in pieces for piece in unit)
    assert {"".join(unit) for unit in pieces} >= {"letter", "mountain"}
    assert max(map(len, pieces)) > 1


@pytest.mark.parametrize("name", ["split_run", "word_run"])
def test_the_numbers_are_those_of_the_ledger(name, request):
    text, page, _, batch, ledger = request.getfixturevalue(name)
    lines = " ".join(text.split())
    maskable, hidden = int(ledger["num_maskable"]), int(ledger["num_hidden"])
    per_row = (batch["unit"] < batch["unit"].shape[1]).sum(1)
    for what, hidden_B in {
        "hidden": (batch["action"] != Action.NONE).sum(1),
        "predicted": (batch["weights"] > 0).sum(1),
    }.items():
        share = f"{what} {hidden_B.sum() / maskable:.2%} of {maskable:,} tokens"
        rates_B = hidden_B / per_row
        spread = f"mean {rates_B.mean():.2%} and standard deviation {rates_B.std():.2%}"
        assert share in lines and spread in lines
    units = int(ledger["unit_lengths"].sum())
    assert f"units {units:,} hidden, {hidden / units:.2f} tokens each" in lines
    assert f"overflow: {ledger['num_overflow']} predictions" in lines
    for action in ("mask", "random", "kept"):
        share = int(ledger[f"num_{action}_tokens"]) / hidden
        assert re.search(rf"{action} +{share:.1%} █* asked", lines)
    for n, count in enumerate(ledger["unit_lengths"].tolist()):
        if count / units > 0.001:
            assert re.search(rf"\n +{n + 1} +{count / units:.1%} █*\n", text + "\n")
    same = (batch["inputs"] == batch["tokens"]) & (batch["action"] == Action.RANDOM)
    draws = int(ledger["num_random_tokens"])
    for form in (lines, page):
        assert f"{same.sum()} of {draws:,} random draws gave the token itself" in form


def test_bars_hold_all_rows(split_run):
    text, *_ = split_run
    for title in ("Hidden", "Predicted"):
        block = text.split(f"\n{title} share of a row\n")[1].split("\n\n")[0]
        shares = [float(share) for share in re.findall(r"% +([\d.]+)% ", block)]
        assert sum(shares) == pytest.approx(100, abs=0.1 * len(shares))


class Reader(html.parser.HTMLParser):
    """Checks that what opens closes; collects tags, headings and text."""

    def __init__(self, page):
        super().__init__()
        self.open, self.tags, self.text = [], collections.Counter(), []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags[tag] += 1
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attrs):
        self.tags[tag] += 1

    def handle_data(self, data):
        self.text.append(data)


def test_the_page_is_whole_and_escapes_the_corpus(split_run, word_run):
    for _, page, *_ in (split_run, word_run):
        reader = Reader(page)
        assert not reader.open and not reader.tags["script"]
        assert reader.tags["article"] == NUM_ROWS
        assert reader.tags["svg"] >= 3 and reader.tags["rect"] > 3
        text = " ".join(reader.text)
        for _, meaning in mask_page.LEGEND:
            assert meaning in text
        assert "Hidden share of a row" in text and "Tokens in a hidden unit" in text
        assert not re.search(r"(src|href)=|@import|url\(", page)


def report(*pieces, is_predicted=True):
    group = Group(True, is_predicted, list(pieces))
    chart = Chart("<i>chart</i>", ["<b>"], [1], [0.5], 0)
    return Report("<script>", [("fact", "a < b")], [chart], [Row("row 0", [[group]])])


def test_marks_in_the_text_cannot_be_taken_for_ours():
    text = mask_page.text(report(Piece("mask", "a→b⟧")), color=False, width=80)
    assert row_texts(text) == [r"⟦a\→b\⟧⟧"]


def test_markup_in_any_text_is_text():
    page = mask_page.page(report(Piece("random", "</b>", "<script>", seen_joint="·")))
    reader = Reader(page)
    assert not reader.tags["script"] and not reader.tags["i"]
    assert reader.text.count("<script>") == 2  # title and heading
    assert " → ·<script>" in reader.text


def test_colours_add_to_the_marks_and_take_none_away():
    pieces = Piece("mask", "one"), Piece("kept", "two", joint=" ")
    for is_predicted in (True, False):
        what = report(*pieces, is_predicted=is_predicted)
        plain = mask_page.text(what, color=False, width=80)
        colored = mask_page.text(what, color=True, width=80)
        assert "\x1b" not in plain
        assert re.sub(r"\x1b\[[\d;]*m", "", colored) == plain
        assert len(set(re.findall(r"\x1b\[([\d;]+)m", colored))) > 5


def test_lines_break_between_words_only():
    pieces = [Piece("mask", f"word{n}", joint=" ") for n in range(40)]
    lines = mask_page.text(report(*pieces), color=False, width=40).split("\n")
    lines = [line for line in lines if "word1" in line or "word39" in line]
    assert all(len(line) <= 40 for line in lines)
    assert all(f"word{n}" in " ".join(lines) for n in (1, 10, 19, 39))


@pytest.mark.parametrize(
    "argument, part",
    [
        ("--rows=0", "rows"),
        ("--split=test", "train|validation"),
        ("--html=/no/such/folder/page.html", "no such folder"),
    ],
)
def test_wrong_flags_exit_2_with_one_line(argument, part, folder):
    result = run(overrides(folder), "--draws=1", "--rows=1", argument)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1 and result.stderr.startswith("error: ")
    assert part in result.stderr
