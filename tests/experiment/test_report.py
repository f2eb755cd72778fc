"""The report says what the runs' files hold, of every run, and the same each time."""

import base64
import html.parser
import json
import math
import re
import shutil
import subprocess
import sys
import types

import numpy as np
import pytest

from mlm_jax import report
from mlm_jax.errors import InputError
from mlm_jax.experiment import document, results, words
from mlm_jax.experiment import page as page_module
from mlm_jax.experiment.report import make_facts
from mlm_jax.experiment.sweep import Arm, Experiment
from mlm_jax.flops import step_flops
from mlm_jax.metrics import read_json_lines
from tests.experiment import made_up
from tests.runs import ROOT

RATES = (0.1, 0.2, 0.3, 0.5, 0.8)
SEEDS = range(6)
STATES = {
    ("rate=0.8", 1): "diverged",
    ("rate=0.8", 2): "unfinished",
    ("rate=0.5", 0): "missing",
}
QUESTION = "Is <script>alert(1)</script> & 15% | enough?"


def mask_rate(**fields):
    settings = made_up.rates(*RATES)
    return made_up.experiment(settings, SEEDS, settings[0], question=QUESTION, **fields)


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """A sweep with three runs that failed, and its report."""
    directory = tmp_path_factory.mktemp("swept")
    made_up.write(directory, mask_rate(), states=STATES)
    report.write(mask_rate(), directory)
    return directory


def facts_of(directory, experiment):
    """Returns the facts of the runs, without drawing anything."""
    found = make_facts(experiment, results.read(experiment, directory))
    return json.loads(json.dumps(found))


@pytest.fixture(scope="module")
def facts(swept):
    return json.loads((swept / "report" / "report.json").read_text())


@pytest.fixture(scope="module")
def page(swept):
    return (swept / "report" / "index.html").read_text()


class Reader(html.parser.HTMLParser):
    """Checks that what opens closes; collects tables as text, by section, and tags."""

    def __init__(self, page):
        super().__init__()
        self.open, self.tags, self.tables = [], [], {}
        self._section = self._cell = None
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img", "wbr"):
            self.open.append(tag)
        if tag == "section":
            self._section = dict(attrs)["id"]
        elif tag == "table":
            self.tables.setdefault(self._section, []).append([])
        elif tag == "tr":
            self.tables[self._section][-1].append([])
        elif tag in ("td", "th"):
            self._cell = ""

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        if tag in ("td", "th"):
            self.tables[self._section][-1][-1].append(self._cell)
            self._cell = None

    def handle_data(self, data):
        if self._cell is not None:
            self._cell += data


def tables(page, section):
    """Returns the rows of each table of a section, without their headers."""
    return [rows[1:] for rows in Reader(page).tables[section]]


def markdown_tables(text, title):
    """The same of the Markdown."""
    section = text.split(f"\n## {title}\n")[1].split("\n## ")[0]
    found = [part.split("\n") for part in section.split("\n\n") if part[:2] == "| "]
    clean = [re.sub(r"\*\*|\\", "", line) for lines in found for line in lines]
    cells = iter([[cell.strip() for cell in line[1:-1].split("|")] for line in clean])
    return [[next(cells) for _ in lines][2:] for lines in found]


def numbers(text):
    """Returns the numbers of a cell; NaN for a dash."""
    text = text.replace("−", "-").replace("–", "nan")
    return [float(n) for n in re.findall(r"[-+]?(?:\d+\.?\d*(?:e-?\d+)?|nan)", text)]


def assert_is(cell, *expected, digits=4):
    """To four places, or to two digits."""
    expected = [math.nan if value is None else value for value in expected]
    close = {"abs": 6e-5, "rel": 0} if digits == 4 else {"rel": 0.05}
    assert numbers(cell) == pytest.approx(expected, **close, nan_ok=True), cell


@pytest.mark.parametrize("form", ["html", "markdown"])
def test_comparison_tables_match_the_json(swept, facts, page, form):
    found = tables(page, "comparison")
    if form == "markdown":
        text = (swept / "report" / "report.md").read_text()
        found = markdown_tables(text, "Comparison on the frozen exam")
    expected = [*facts["comparison"].values(), facts["equal_flops"]["rows"]]
    assert len(found) == len(expected) == 3
    for rows, expected_rows in zip(found, expected, strict=True):
        for cells, row in zip(rows, expected_rows, strict=True):
            name, n, mean, difference, p, holm, joint, detectable = cells
            assert (name, n) == (row["arm"], str(row["n"]))
            ends = ("mean", "low", "high")
            assert_is(mean, *(row["mean"][end] for end in ends))
            if row["difference"]:
                assert_is(difference, *(row["difference"][end] for end in ends))
            else:
                assert name == "rate=0.1" and difference == "–"
            assert_is(p, row["p"], digits=2)
            assert_is(holm, row["holm_p"], digits=2)
            assert_is(joint, row["joint_p"], digits=2)
            assert_is(detectable, row["detectable"])


def test_each_p_stands_in_its_own_column():
    found = {"mean": 1.0, "low": None, "high": None}
    row = {"arm": "a", "n": 3, "mean": found, "difference": None, "verdict": ""}
    row |= {"p": 0.01, "holm_p": 0.02, "joint_p": 0.03, "detectable": 0.04}
    table = document.comparison_table([row])
    shown = dict(zip(table.header, table.rows[0], strict=True))
    assert (shown["p"], shown["Holm p"], shown["joint p"]) == ("0.01", "0.02", "0.03")
    assert shown["detectable"] == "0.0400"


def test_the_other_tables_match_the_json(facts, page):
    (matrix,) = tables(page, "matrix")
    for cells, arm, means in zip(
        matrix, facts["matrix"]["arms"], facts["matrix"]["means"], strict=True
    ):
        assert cells[0] == arm
        assert [float(cell) for cell in cells[1:]] == pytest.approx(means, abs=5e-5)
    (optima,) = tables(page, "optimum")
    for cells, row in zip(optima, facts["optima"], strict=True):
        assert cells[1:3] == [row["exam"], str(row["n"])]
        found = numbers(cells[3]) + numbers(cells[4])
        expected = [row["rate"], row["low"], row["high"]]
        assert found == pytest.approx(expected, abs=5e-4)
    for cells, row in zip(tables(page, "own-rate")[0], facts["own_rate"], strict=True):
        assert_is(cells[1], *row["rates"])
        assert_is(cells[2], *(row["mean"][end] for end in ("mean", "low", "high")))
    speeds = facts["wall_clock"]["speed"]
    for cells, row in zip(tables(page, "wall-clock")[0], speeds, strict=True):
        assert float(cells[1].replace(",", "")) == round(row["tokens_per_second"])
    (differences,) = tables(page, "differences")
    assert differences == [[f"rate={rate:g}", f"{rate:g}"] for rate in RATES]


def test_the_json_is_what_the_runs_hold(swept, facts):
    """From the files, by hand."""
    last = {}
    for rate in RATES:
        for seed in SEEDS:
            folder = swept / f"rate={rate:g}" / f"seed{seed}"
            if (f"rate={rate:g}", seed) not in STATES:
                lines = (folder / "metrics.jsonl").read_text().splitlines()
                evals = [json.loads(line) for line in lines if "eval/loss" in line]
                last[rate, seed] = evals[-1]["eval/loss@0.4"]
    for rate, row in zip(RATES, facts["comparison"]["eval/loss@0.4"], strict=True):
        seeds = [seed for seed in SEEDS if (rate, seed) in last]
        values = [last[rate, seed] for seed in seeds]
        assert row["values"] == {str(s): v for s, v in zip(seeds, values, strict=True)}
        assert row["mean"]["mean"] == pytest.approx(np.mean(values))
        if rate != 0.1:
            paired = [last[rate, seed] - last[0.1, seed] for seed in seeds]
            assert row["difference"]["mean"] == pytest.approx(np.mean(paired))
    assert facts["optima"][0]["low"] < 0.3 < facts["optima"][0]["high"]
    verdicts = [row["verdict"] for row in facts["comparison"]["eval/loss@0.15"]]
    assert verdicts == ["", "better", "better", "", ""]  # five seeds, and four


def flops_of(run, ledger, views):
    """Step by step."""
    c = run.config
    return sum(
        step_flops(
            num_layers=c["model.num_layers"],
            width=c["model.width"],
            mlp_width=c["model.mlp_width"],
            row_length=c["data.row_length"],
            vocab_size=made_up.store().tokenizer.vocab_size,
            num_rows=views * c["data.batch_size"],
            predictions_per_row=row["num_masked"] / views / c["data.batch_size"],
        )
        for row in ledger
    )


def test_each_view_of_a_row_is_work(tmp_path):
    settings = [{"corruption.views": 3, "corruption.rate": 0.1}]
    experiment = made_up.experiment(settings, (0,), settings[0])
    made_up.write(tmp_path, experiment)
    (run,) = results.read(experiment, tmp_path)
    folder = tmp_path / "views=3,rate=0.1" / "seed0"
    ledger = read_json_lines(folder / "ledger.jsonl")
    assert run.curves.flops[-1] == pytest.approx(flops_of(run, ledger, views=3))


def test_axes_count_what_was_trained_on(swept, facts):
    run = results.read(mask_rate(), swept)[0]
    folder = swept / "rate=0.1" / "seed0"
    ledger = read_json_lines(folder / "ledger.jsonl")
    curves = run.curves
    assert curves.steps.tolist() == [0, 10, 20, 30, 40]
    for name, axis in (("num_maskable", "tokens"), ("num_masked", "predictions")):
        total = [sum(row[name] for row in ledger[:step]) for step in curves.steps]
        assert getattr(curves, axis).tolist() == total
    assert curves.flops[-1] == pytest.approx(flops_of(run, ledger, views=1))
    seconds = curves.tokens[-1] / 20_000
    assert curves.seconds[-1] == pytest.approx(seconds, rel=0.1)
    curve = facts["curves"]["rate=0.1"]
    assert curve["steps"] == [0, 10, 20, 30, 40]
    for i in range(5):
        assert curve["low"][i] <= curve["mean"][i] <= curve["high"][i]


def test_equal_arithmetic_is_where_the_cheapest_run_ends(swept, facts):
    runs = [r for r in results.read(mask_rate(), swept) if r.state == "finished"]
    equal = facts["equal_flops"]
    assert equal["flops"] == min(run.curves.flops[-1] for run in runs)
    dear = next(run for run in runs if run.arm == "rate=0.8")
    flops, losses = dear.curves.flops, dear.curves.values["eval/loss@0.15"]
    share = (equal["flops"] - flops[-2]) / (flops[-1] - flops[-2])
    expected = losses[-2] + share * (losses[-1] - losses[-2])
    assert 0 < share < 1
    assert equal["rows"][-1]["values"]["0"] == pytest.approx(expected)
    cheap = mask_rate()._replace(arms=mask_rate().arms[:1])
    assert facts_of(swept, cheap)["equal_flops"] is None


def test_a_loss_that_is_no_number_at_the_end_is_not_compared(one_run):
    experiment, directory, folder = one_run
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines()
    lines[-1] = re.sub(r'(loss@0.4": )[\d.]+', r"\1null", lines[-1])
    path.write_text("\n".join(lines) + "\n")
    facts = facts_of(directory, experiment)
    assert facts["runs"][0]["state"] == "diverged"
    assert facts["comparison"][experiment.metric][0]["n"] == 0


def test_the_loss_at_the_own_rate_is_over_predictions_at_the_end():
    lines = [
        {"step": 80, "train/loss": 9.0, "train/num_masked": 1},
        {"step": 95, "train/loss": 4.0, "train/num_masked": 30},
        {"step": 97, "train/loss": None, "train/num_masked": 0},
        {"step": 100, "train/loss": 8.0, "train/num_masked": 10},
        {"step": 100, "eval/loss@0.15": 1.0},
    ]
    assert results._own_rate_loss(lines, 100) == pytest.approx(5.0)


def test_of_an_accuracy_more_is_better(swept):
    facts = facts_of(swept, mask_rate(metric="eval/accuracy@0.4"))
    assert facts["exams"] == ["eval/accuracy@0.4", "eval/accuracy@0.15"]
    rows = facts["comparison"]["eval/accuracy@0.4"]
    assert [row["verdict"] for row in rows] == ["", "better", "better", "", ""]
    assert rows[2]["difference"]["mean"] > 0
    assert facts["optima"] == [] and facts["trend"] is None
    best = words.answer_sentences(facts)[1]
    assert best.startswith("Highest eval/accuracy@0.4: rate=0.3")


def test_failed_runs_are_told_of_and_not_compared(swept, facts, page):
    (counts, failed) = tables(page, "runs")
    unfinished = swept / "rate=0.8" / "seed2" / "metrics.jsonl"
    last = json.loads(unfinished.read_text().splitlines()[-1])
    reached = f"eval/loss@0.15 {last['eval/loss@0.15']:.4f}"
    assert counts[3:] == [
        ["rate=0.5", "5", "0", "0", "1"],
        ["rate=0.8", "4", "1", "1", "0"],
    ]
    assert failed == [
        ["rate=0.5", "0", "missing", "no metrics.jsonl"],
        ["rate=0.8", "1", "diverged", "step 21: loss nan"],
        ["rate=0.8", "2", "unfinished", f"at step 20 of 40, {reached}"],
    ]
    rows = facts["comparison"][facts["experiment"]["metric"]]
    assert [row["n"] for row in rows] == [6, 6, 6, 5, 4]
    assert facts["optima"][0]["n"] == 3  # seeds that finished at every rate
    markdown = (swept / "report" / "report.md").read_text()
    for text in (page, markdown):
        assert "27 of 30 runs have finished" in text
        assert "Compared over fewer seeds than planned" in text
        assert "Not comparable" in text


def test_provenance_is_that_of_the_runs(swept, facts):
    path = swept / "rate=0.1" / "seed0" / "environment.json"
    environment = json.loads(path.read_text())
    provenance = facts["provenance"]
    assert provenance["data.fingerprint"] == {environment["data.fingerprint"]: 29}
    assert provenance["tokenizer.digest"] == {environment["tokenizer.digest"]: 29}
    assert provenance["jax"] == {environment["starts"][0]["packages"]["jax"]: 29}
    assert provenance["git"] == {str(environment["starts"][0]["git"]): 29}


def without_clock(folder):
    """Returns the files of a report without what depends on the clock."""
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    facts = json.loads(files["report.json"])
    assert facts.pop("wall_clock")
    files["report.json"] = json.dumps(facts).encode()
    page, clock, _ = files["index.html"].partition(b'<section id="wall-clock">')
    text, title, _ = files["report.md"].partition(b"## Wall clock")
    assert clock and title
    del files["curves_seconds.svg"], files["curves_seconds.png"]
    return files | {"index.html": page, "report.md": text}


def test_the_same_runs_give_the_same_report_whatever_the_clock(swept, tmp_path):
    directory = tmp_path / "another place"
    made_up.write(directory, mask_rate(), states=STATES, speed=7_000.0)
    report.write(mask_rate(), directory)
    expected = without_clock(swept / "report")
    assert without_clock(directory / "report") == expected
    assert len(expected) == 3 + 2 * 7
    slow, fast = (d / "report" / "report.json" for d in (directory, swept))
    clocks = [json.loads(path.read_text())["wall_clock"] for path in (slow, fast)]
    assert clocks[0] != clocks[1]


def test_the_page_needs_no_other_file_and_runs_nothing(page):
    reader = Reader(page)
    tags = [tag for tag, _ in reader.tags]
    assert not {"script", "link", "iframe", "object"} & set(tags)
    assert tags.count("img") == 8
    assert "&lt;script&gt;alert(1)" in page
    for tag, attributes in reader.tags:
        assert not any(name.startswith("on") for name in attributes)
        if tag == "img":
            kind, data = attributes["src"].split(",", 1)
            assert kind == "data:image/svg+xml;base64"
            picture = base64.b64decode(data).decode()
            assert re.findall('href="(?!#)', picture) == []
            assert set(re.findall(r"https?://[\w./]+", picture)) <= {
                "http://www.w3.org/2000/svg",
                "http://www.w3.org/1999/xlink",
                "http://www.w3.org/Graphics/SVG/1.1/DTD/svg11.dtd",
                "http://purl.org/dc/elements/1.1/",
                "http://creativecommons.org/ns",
                "http://www.w3.org/1999/02/22",
            }
            assert "<script" not in picture
        elif tag == "a":
            assert attributes["href"][1:] in {a.get("id") for _, a in reader.tags}
    rest = re.sub(r'src="data:[^"]*"', "", page)
    assert not re.search(r"https?:|src=|@import|url\(", rest)


def test_pictures_are_written_for_a_paper(swept):
    names = "comparison matrix optimum curves_steps curves_flops curves_seconds".split()
    for name in names:
        svg = (swept / "report" / f"{name}.svg").read_bytes()
        assert svg.startswith(b"<?xml") and b"<path" in svg
        png = (swept / "report" / f"{name}.png").read_bytes()
        assert png.startswith(b"\x89PNG") and len(png) > 5_000


def test_one_seed_is_warned_of(tmp_path):
    experiment = mask_rate()._replace(seeds=(0,))
    made_up.write(tmp_path, experiment)
    facts = facts_of(tmp_path, experiment)
    assert any("One seed only" in text for text in facts["warnings"])
    for row in facts["comparison"][experiment.metric]:
        assert row["p"] is None and row["mean"]["low"] is None
    assert facts["optima"][0]["rate"] == pytest.approx(0.3, abs=0.05)
    assert facts["optima"][0]["low"] is None


def test_sizes_have_a_trend(tmp_path):
    best = {64: 0.2, 256: 0.4}
    settings = [
        {"model.width": width, "corruption.rate": rate}
        for width in best
        for rate in RATES
    ]
    experiment = made_up.experiment(settings, range(3), settings[0])
    made_up.write(
        tmp_path,
        experiment,
        losses=lambda c, *rest: made_up.loss_at(c, *rest, best=best[c.model.width]),
    )
    facts = facts_of(tmp_path, experiment)
    main = facts["optima"][:2]
    assert [row["group"] for row in main] == ["width=64", "width=256"]
    assert [row["rate"] for row in main] == pytest.approx([0.2, 0.4], abs=0.05)
    sizes = [2 * (4 * width**2 + 2 * width * 512) for width in best]
    assert facts["trend"]["sizes"] == sizes
    expected = math.log((0.4 / 0.6) / (0.2 / 0.8)) / math.log10(sizes[1] / sizes[0])
    assert facts["trend"]["low"] < expected < facts["trend"]["high"]
    assert "3 seeds cannot reach p < 0.05" in facts["warnings"][0]


def test_nothing_trained_is_a_report_too(tmp_path, monkeypatch, capsys):
    """By the command, which prints the answer."""
    monkeypatch.setattr(report.sweep, "load", lambda path: mask_rate())
    monkeypatch.setattr(report, "WORKDIR", types.SimpleNamespace(value=tmp_path))
    report.main(["experiments/mask_rate.py"])
    page = tmp_path / "report" / "index.html"
    printed = capsys.readouterr().out
    assert "nothing is compared" in printed and str(page) in printed
    assert "no metrics.jsonl" in page.read_text()
    Reader(page.read_text())


def test_branches_and_halving_are_told(swept):
    experiment = mask_rate(trunk={"seed": 3}, rungs=(10, 20))
    facts = facts_of(swept, experiment)
    text = page_module.to_markdown("", document.make_sections(facts, []))
    assert "go on from the end of a run with seed = 3" in text
    assert "Of the arms the best 50% went on at step 10, 20." in text
    assert "### eval/loss@0.15 at step 20, where halving chose" in text
    rows = facts["rungs"][1]["rows"]
    assert [row["n"] for row in rows] == [6, 6, 6, 5, 6]  # all but the missing one
    lines = read_json_lines(swept / "rate=0.8" / "seed2" / "metrics.jsonl")
    assert rows[4]["values"]["2"] == lines[-1]["eval/loss@0.15"]
    assert lines[-1]["step"] == 20


def test_different_exams_and_unplanned_changes_are_told(tmp_path):
    experiment = mask_rate()._replace(seeds=(0, 1), arms=mask_rate().arms[:2])
    made_up.write(tmp_path, experiment)
    folder = tmp_path / "rate=0.2" / "seed1"
    path = folder / "metrics.jsonl"
    path.write_text(path.read_text().replace('@0.4": 7', '@0.4": 8'))
    path = folder / "config.json"
    path.write_text(path.read_text().replace('"b2": 0.98', '"b2": 0.99'))
    path = folder / "environment.json"
    path.write_text(path.read_text().replace('"1 cpu"', '"4 gpu"'))
    text = " ".join(facts_of(tmp_path, experiment)["warnings"])
    assert "eval/loss@0.4: the runs did not sit the same exam" in text
    assert "eval/loss@0.15: the runs" not in text
    assert "Runs differ in what no arm sets: optim.b2" in text
    assert "Not the same in all runs: devices (1 cpu, 4 gpu)" in text


@pytest.fixture
def one_run(tmp_path):
    experiment = mask_rate()._replace(seeds=(0,), arms=mask_rate().arms[:1])
    made_up.write(tmp_path, experiment)
    return experiment, tmp_path, tmp_path / "rate=0.1" / "seed0"


def edit(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    "name, old, new, part",
    [
        ("config.json", '"rate": 0.1', '"rate": 0.2', "corruption.rate = 0.2"),
        ("metrics.jsonl", '{"step": 10', '{"stop": 10', "line"),
        ("ledger.jsonl", '{"step": 7,', '{"step": 6,', "lacks step 7"),
        ("environment.json", "starts", "ends", "damaged"),
        ("tokenizer.json", "{", "[", "tokenizer.json"),
    ],
)
def test_files_that_cannot_be_trusted_are_named(one_run, name, old, new, part):
    experiment, directory, folder = one_run
    edit(folder / name, old, new)
    with pytest.raises(InputError, match=part) as error:
        facts_of(directory, experiment)
    assert name in str(error.value) and "\n" not in str(error.value)


def test_an_unknown_metric_is_refused_with_the_nearest(one_run):
    experiment, directory, _ = one_run
    with pytest.raises(InputError, match="did you mean eval/loss@0.15"):
        facts_of(directory, experiment._replace(metric="eval/lost@0.15"))


def test_a_trained_run_is_read(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "base" / "seed0")
    arms = (Arm("base", {}),)
    experiment = Experiment(
        name="real",
        question="What is this?",
        config="configs/tiny.py",
        arms=arms,
        seeds=(0,),
        baseline="base",
        metric="eval/loss@0.15",
        base={"optim.num_steps": 8},
    )
    facts = facts_of(tmp_path, experiment)
    assert facts["runs"][0]["state"] == "finished"
    curve = facts["curves"]["base"]
    assert curve["steps"] == [0, 4, 8]
    assert 0 < curve["predictions"][1] < curve["tokens"][1] <= 4 * 8 * 30
    assert facts["wall_clock"]["speed"][0]["seconds"] > 0
    assert facts["own_rate"][0]["mean"]["mean"] == pytest.approx(6.2, abs=0.5)


def test_the_command_loads_no_jax_and_exits_2_for_what_is_not_there(tmp_path):
    code = """
import runpy, sys
try:
    runpy.run_module("mlm_jax.report", run_name="__main__", alter_sys=True)
finally:
    assert "jax" not in sys.modules
"""
    result = subprocess.run(
        [sys.executable, "-c", code, "experiments/none.py", f"--workdir={tmp_path}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 2
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1


def launch(playwright):
    """Returns a headless Chromium; skips the test where there is none."""
    names = ("chromium-headless-shell", "chromium", "google-chrome")
    found = next(filter(None, map(shutil.which, names)), None)
    if not found:
        pytest.skip(f"none of {', '.join(names)} is installed")
    return playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 390])
def test_a_browser_shows_it(swept, facts, width):
    api = pytest.importorskip("playwright.sync_api", reason="playwright is missing")
    with api.sync_playwright() as playwright, launch(playwright) as browser:
        tab = browser.new_page(viewport={"width": width, "height": 800})
        problems, requests = [], []
        tab.on("pageerror", lambda error: problems.append(error.message))
        tab.on("console", lambda message: problems.append(message.text))
        tab.on("request", lambda request: requests.append(request.url))
        tab.goto((swept / "report" / "index.html").as_uri())
        assert not problems
        assert [u for u in requests if not u.startswith("data:")] == [tab.url]
        # Nothing is wider than the window, and every picture is drawn.
        assert tab.evaluate("document.documentElement.scrollWidth") == width
        images = tab.evaluate(
            "[...document.images].map(i => [i.complete, i.naturalWidth, i.width])"
        )
        assert len(images) == 8
        assert all(done and real > 100 and shown > 250 for done, real, shown in images)
        cells = tab.evaluate(
            "[...document.querySelectorAll('#comparison table')].map(t => "
            "[...t.rows].slice(1).map(r => [...r.cells].map(c => c.innerText)))"
        )
    expected = [*facts["comparison"].values(), facts["equal_flops"]["rows"]]
    for rows, expected_rows in zip(cells, expected, strict=True):
        for (name, n, mean, *_), row in zip(rows, expected_rows, strict=True):
            assert (name, n) == (row["arm"], str(row["n"]))
            assert_is(mean, *(row["mean"][end] for end in ("mean", "low", "high")))
