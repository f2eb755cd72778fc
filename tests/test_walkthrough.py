"""What the walkthrough tells is what the library computes, and known by hand."""

import functools
import html.parser
import importlib
import math
import os
import pathlib
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import ml_collections
import numpy as np
import pytest

from mlm_jax import trained, walkthrough
from mlm_jax.corruption.replace import Action
from mlm_jax.errors import InputError
from mlm_jax.explaining import facts, pictures, story, subjects, telling, words
from tests import reading

ROOT = pathlib.Path(__file__).parents[1]
TEXT = "hello wide [MASK], the [MASK] is wide"


@functools.cache
def example():
    return story.gather(subjects.Example())


@functools.cache
def make_trained(kind="wordpiece"):
    """A run with random parameters, never written down."""
    reader = reading.make_reader(kind)
    fields = {
        "data": {"row_length": reading.ROW_LENGTH},
        "corruption": {"mask_frac": 0.6, "random_frac": 0.3},
        "model": {"position": "learned"},
    }
    return trained.Trained(
        workdir=pathlib.Path("runs/random"),
        step=1200,
        config=ml_collections.ConfigDict(fields),
        tokenizer=reader.tokenizer,
        model=reader.model,
        params=reader.params,
        mesh=reader.mesh,
    )


@functools.cache
def of_run():
    return story.gather(subjects.Run(make_trained(), TEXT, top=4))


TOLD = {"example": example, "run": of_run}


# ---- the numbers --------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, shares, losses",
    [
        ("close", [0.665241, 0.244728, 0.090031], [0.407606, 1.407606, 2.407606]),
        ("tie", [1 / 3] * 3, [math.log(3)] * 3),
        ("runaway", [0.999831, 0.000123, 0.000045], [0.000169, 9.000169, 10.000169]),
    ],
)
def test_the_worked_examples(name, shares, losses):
    found = example().worked[name]
    assert [guess.word for guess in found.best] == ["mat", "car", "sky"]
    p_K = np.exp([-guess.loss for guess in found.best])
    np.testing.assert_allclose(p_K, shares, atol=1e-6)
    np.testing.assert_allclose([g.loss for g in found.best], losses, atol=1e-6)
    powers = [guess.power for guess in found.best]
    np.testing.assert_allclose(powers / np.sum(powers), p_K, rtol=1e-5)
    np.testing.assert_allclose(found.total, np.sum(powers), rtol=1e-6)


def test_the_example_comes_to_the_same_by_vectors():
    """From the words' vectors through attention to 2, 1, 0, by hand."""
    told = example()
    vectors = [subjects.VECTORS[word] for word in subjects.SENTENCE.split()]
    hidden_D = np.mean(vectors, axis=0)
    np.testing.assert_allclose(hidden_D, (2, 1))
    np.testing.assert_allclose(told.guesses.hidden_D, hidden_D, rtol=1e-6)
    scores = [np.dot(subjects.VECTORS[word], hidden_D) for word in subjects.CLASSES]
    np.testing.assert_allclose(scores, (2, 1, 0))
    np.testing.assert_allclose(
        [guess.score for guess in told.guesses.best], scores, atol=1e-6
    )
    assert words.number(told.truth.loss) == "0.408"
    alone = told.contexts[-1][2]
    assert [words.share(guess.loss) for guess in alone.best] == ["0.333"] * 3
    other = told.contexts[1][2].best
    assert max(other, key=lambda guess: guess.score).word == "sky"
    without_cat = np.mean([v for v in vectors if v != (4, 3)] + [(0, 0)], axis=0)
    moved = np.linalg.norm(without_cat - hidden_D) / np.linalg.norm(hidden_D)
    np.testing.assert_allclose(told.influence_T[1], moved, rtol=1e-5)


def test_a_run_is_told_with_the_numbers_of_its_model():
    """Against logits made whole, in double precision."""
    told = of_run()
    reader = make_trained().reader
    tokens_T, place = told.subject.tokens_T, told.place
    assert told.places == [3, 6] and tokens_T[3] == reader.tokenizer.special.mask
    (log_p_V,) = reading.log_p_NxV(reader, [tokens_T], place)
    order = [i for i in np.argsort(-log_p_V) if not reader.tokenizer.is_special[i]]
    assert [guess.id for guess in told.guesses.best] == order[:4]
    for guess in told.guesses.best:
        np.testing.assert_allclose(-guess.loss, log_p_V[guess.id], atol=1e-4)
        dot = guess.vector_D @ told.guesses.hidden_D
        np.testing.assert_allclose(guess.score, dot + guess.bias, atol=1e-4)
    rest = 1 - np.exp(log_p_V[order[:4]]).sum()
    np.testing.assert_allclose(told.guesses.rest, rest, atol=1e-4)
    filled = make_trained().fill_mask(TEXT, top=1)[0]
    assert filled[0].p == pytest.approx(math.exp(log_p_V.max()), abs=1e-4)
    # Hiding a word moves the vector; the special tokens were left alone.
    is_special_T = reader.tokenizer.is_special[tokens_T]
    assert (told.influence_T[~is_special_T] > 0).all()
    assert (told.influence_T[is_special_T] == 0).all()


def test_many_masks_are_summed_and_divided_once():
    told = of_run()
    reader, truth_T = make_trained().reader, told.subject.truth_T
    sizes = [len(draw.losses) for draw in told.draws]
    maskable = len(truth_T) - 2
    assert sizes == [max(1, round(rate * maskable)) for rate in story.RATES]
    for small, large in zip(told.draws, told.draws[1:], strict=False):
        assert not set(small.words) - set(large.words)  # nested
    for draw in (*told.draws, *example().draws):
        assert draw.mean == pytest.approx(sum(draw.losses) / len(draw.losses))
    # All at once: the losses of the largest draw by the reader, a place at a time.
    places = np.array([2, 3, 5])
    inputs_T = truth_T.copy()
    inputs_T[places] = reader.tokenizer.special.mask
    draw = facts.losses_at(told.subject, inputs_T[None], places)
    for place, loss in zip(places, draw.losses, strict=True):
        (log_p_V,) = reading.log_p_NxV(reader, [inputs_T], place)
        assert loss == pytest.approx(-log_p_V[truth_T[place]], abs=1e-4)


@pytest.mark.parametrize("name", TOLD)
def test_corruption_keeps_the_target(name):
    told = TOLD[name]()
    subject, place = told.subject, told.place
    assert [case.action for case in told.cases] == list(told.counts)
    seen = [case.inputs_T[place] for case in told.cases]
    truth = subject.truth_T[place]
    special = subject.tokenizer.is_special
    assert seen[0] == subject.tokenizer.special.mask and seen[2] == truth
    assert not special[seen[1]]
    for case in told.cases:
        assert case.target == told.cases[2].seen
        others_T = np.delete(case.inputs_T - subject.truth_T, place)
        assert not others_T.any()
    total = sum(told.counts.values())
    assert total >= facts.DRAWS
    wanted = {Action.MASK: subject.mask_frac, Action.RANDOM: subject.random_frac}
    for action, fraction in wanted.items():
        deviation = math.sqrt(fraction * (1 - fraction) / total)
        assert abs(told.counts[action] / total - fraction) < 5 * deviation


# ---- how they read ------------------------------------------------------------------


@pytest.mark.parametrize(
    "loss, text",
    [
        (0.407606, "0.665"),
        (1.0986123, "0.333"),
        (2.407606, "0.090"),
        (0.000168557, "0.9998"),
        (1e-8, "0.99999999"),
        (3e-13, "1 − 3.00 × 10⁻¹³"),
        (7.5, "0.000553"),
        (40, "4.25 × 10⁻¹⁸"),
        (0.0005, "0.9995"),
        (0, "1"),
    ],
)
def test_a_share_is_below_one_and_above_nothing(loss, text):
    assert words.share(loss) == text


@pytest.mark.parametrize(
    "x, text",
    [
        (2, "2"),
        (1.9999999, "2"),
        (11.10734, "11.107"),
        (-0.5, "−0.500"),
        (0.000169, "0.00017"),
        (22030.18, "22,030.180"),
        (1.0687e13, "1.07 × 10¹³"),
        (0, "0"),
    ],
)
def test_numbers_read_well(x, text):
    assert words.number(x) == text


class Reader(html.parser.HTMLParser):
    """Collects tags, and refuses what is not closed in order."""

    VOID = {"meta", "img", "wbr", "br"}

    def __init__(self, page):
        super().__init__()
        self.tags, self.open, self.texts = [], [], []
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] != ["style"]:
            self.texts.append(data)


def pictures_of(reader):
    import base64

    sources = [attributes["src"] for tag, attributes in reader.tags if tag == "img"]
    kind = "data:image/svg+xml;base64,"
    assert all(source.startswith(kind) for source in sources)
    return [base64.b64decode(source.removeprefix(kind)).decode() for source in sources]


@pytest.mark.parametrize("name", TOLD)
def test_the_page_needs_no_other_file(name):
    page = telling.to_html(TOLD[name]())
    reader = Reader(page)
    tags = {tag for tag, _ in reader.tags}
    assert not tags & {"script", "link", "iframe", "object", "style/"}
    drawn = pictures_of(reader)
    assert len(drawn) == 16
    for svg in drawn:
        ElementTree.fromstring(svg)  # well-formed
        assert set(re.findall(r"https?://[^\"]*", svg)) == {
            "http://www.w3.org/2000/svg"
        }
        assert "href" not in svg and "url(" not in svg
    rest = re.sub(r'src="data:[^"]*"', "", page)
    assert not re.search(r"https?:|src=|@import|url\(", rest)


@pytest.mark.parametrize("name", TOLD)
def test_page_and_text_say_the_same(name):
    told = TOLD[name]()
    text = telling.to_text(told, color=False, width=88)
    page = " ".join(Reader(telling.to_html(told)).texts)
    assert max(map(len, text.splitlines())) <= 110
    flat = " ".join(text.split())
    for step in telling.make_steps(told):
        for sentence in (step.title, *step.paragraphs):
            assert sentence in page
            assert " ".join(sentence.split()) in flat
        for row in step.table.rows if step.table else []:
            assert all(cell in page and cell in text for cell in row)
    for number in ("0.665", "0.245", "0.090", "0.333", "0.9998"):
        assert number in text
    assert "1.000" not in text.replace("1.0000", "")
    for guess in told.guesses.best:
        assert words.number(guess.loss) in text
    if name == "example":
        assert all(number in page for number in ("0.665", "0.408", "0.9998", "1.099"))
    assert "\x1b" not in text
    assert "\x1b[1m" in telling.to_text(told, color=True, width=88)


@pytest.mark.parametrize("name", TOLD)
def test_each_step_names_functions_that_are_there(name):
    page = telling.to_html(TOLD[name]())
    named = re.findall(r'<p class="by">in the code: ([^<]*)</p>', page)
    assert len(named) == len(re.findall("<section", page)) == 12
    for path in ", ".join(named).split(", "):
        module, found = path, None
        while found is None:
            module = module.rpartition(".")[0]
            try:
                found = importlib.import_module(module)
            except ModuleNotFoundError:
                assert module
        assert module.startswith("mlm_jax.")
        for part in path.removeprefix(f"{module}.").split("."):
            found = getattr(found, part)
        assert callable(found) and words.name_of(found) == path


def test_what_a_corpus_holds_cannot_disguise_itself():
    class Tokenizer:
        def decode(self, ids):
            return "<b>\x1b[2J\u202e"

    assert facts.spell(Tokenizer(), 0) == "<b>\ufffd[2J\ufffd"
    row = pictures.Boxes([[pictures.Box("<b>&", "1")]])
    assert "<b>" not in row.svg() and "&lt;b&gt;&amp;" in row.svg()
    ElementTree.fromstring(row.svg())


def test_byte_level_pieces_read_as_words():
    told = story.gather(subjects.Run(make_trained("bpe"), "hello [MASK] world", top=3))
    assert "world" in told.words and not any("Ġ" in word for word in told.words)
    Reader(telling.to_html(told))


# ---- the command --------------------------------------------------------------------


@pytest.mark.parametrize(
    "texts, workdir, step, part",
    [
        (["The cat sat on the [MASK]."], None, None, "--workdir=DIR"),
        ([], None, 5, "--step=5"),
        ([], "runs/none", None, "0 texts; expected one"),
        (["a [MASK]", "b [MASK]"], "runs/none", None, "2 texts; expected one"),
        (["a [MASK]"], "runs/none", None, "runs/none"),
    ],
)
def test_arguments_that_do_not_go_together(texts, workdir, step, part):
    with pytest.raises(InputError, match=re.escape(part)) as error:
        walkthrough.subject_of(texts, workdir, step, 5)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["no mask", "[MASK] " + "hello " * 40])
def test_texts_that_cannot_be_read(text):
    with pytest.raises(InputError, match=r"no \[MASK\]|reads at most 32"):
        subjects.Run(make_trained(), text)


def run(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "mlm_jax.walkthrough", *arguments],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "COLUMNS": "88"},
        capture_output=True,
        text=True,
        timeout=500,
    )


def test_the_command_writes_text_and_page(tmp_path):
    result = run(f"--html={tmp_path}/page.html")
    assert result.returncode == 0, result.stderr
    assert result.stdout == telling.to_text(example(), color=False, width=88) + "\n"
    assert (tmp_path / "page.html").read_text() == telling.to_html(example())


@pytest.mark.parametrize(
    "arguments, part",
    [
        (["a [MASK]"], "--workdir=DIR"),
        (["--html=/nowhere/page.html"], "no such folder"),
        (["--top=0"], "top"),
    ],
)
def test_the_command_refuses_in_one_line(arguments, part):
    result = run(*arguments)
    assert result.returncode == 2
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert part in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("name", TOLD)
def test_a_browser_shows_it(tmp_path, name, width):
    api = pytest.importorskip("playwright.sync_api", reason="playwright is missing")
    names = ("chromium-headless-shell", "chromium", "google-chrome")
    found = next(filter(None, map(shutil.which, names)), None)
    if not found:
        pytest.skip(f"none of {', '.join(names)} is installed")
    path = tmp_path / "page.html"
    path.write_text(telling.to_html(TOLD[name]()))
    with (
        api.sync_playwright() as playwright,
        playwright.chromium.launch(
            executable_path=found, args=["--no-sandbox"]
        ) as browser,
    ):
        tab = browser.new_page(viewport={"width": width, "height": 800})
        problems, requests = [], []
        tab.on("pageerror", lambda error: problems.append(error.message))
        tab.on("console", lambda message: problems.append(message.text))
        tab.on("request", lambda request: requests.append(request.url))
        tab.goto(path.as_uri())
        assert not problems
        assert [u for u in requests if not u.startswith("data:")] == [tab.url]
        assert tab.evaluate("document.documentElement.scrollWidth") == width
        images = tab.evaluate(
            "[...document.images].map(i => [i.complete, i.naturalWidth, i.width])"
        )
        assert len(images) == 16
        assert all(done and real == 400 and shown > 250 for done, real, shown in images)
