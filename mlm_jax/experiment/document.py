"""The words and tables of a report, from its facts."""

import itertools

from mlm_jax.experiment import statistics, words
from mlm_jax.experiment.page import Block, Cell, Picture, Section, Table, Text
from mlm_jax.experiment.report import exam_rate
from mlm_jax.experiment.words import NONE, count, mean_text, number, p_value, signed


def make_sections(facts, pictures):
    """Returns the sections of the report; `pictures` are the names that were drawn."""
    sections = [
        Section("question", "", _question(facts)),
        Section("answer", "Answer", _answer(facts, pictures)),
        Section("differences", "What differs between the arms", _differences(facts)),
        Section("comparison", "Comparison on the frozen exam", _comparison(facts)),
        Section("matrix", "Training rate against evaluation rate", _matrix(facts)),
        Section("optimum", "The best rate", _optimum(facts)),
        Section("curves", "Learning curves", _curves(facts, pictures)),
        Section("own-rate", "Loss at the arm's own training rate", _own_rate(facts)),
        Section("runs", "Runs", _runs(facts)),
        Section("provenance", "Provenance", _provenance(facts)),
        Section("wall-clock", "Wall clock", _wall_clock(facts, pictures)),
    ]
    return [section for section in sections if section.blocks]


def _question(facts):
    experiment = facts["experiment"]
    return [
        Text(experiment["question"], "lead"),
        Text(
            f"{count(experiment['arms'], 'arm')}, "
            f"{count(experiment['seeds'], 'seed')}, on {experiment['config']}; the "
            f"measure is {experiment['metric']}, the baseline "
            f"{experiment['baseline']}.",
            "note",
        ),
    ]


def _answer(facts, pictures):
    captions = {
        "comparison": "Paired differences to the baseline, mean and interval; a dot is "
        "a seed. Green is better, red worse, by the joint test.",
        "optimum": "Loss against the training rate; a dot is a seed. The line is the "
        "fitted parabola, the band the interval of its least place.",
    }
    return (
        [Text(text) for text in words.answer_sentences(facts)]
        + [Text(text, "warning") for text in facts["warnings"]]
        + [Picture(name, text) for name, text in captions.items() if name in pictures]
    )


def _differences(facts):
    arms = [arm["name"] for arm in facts["experiment"]["arms"]]
    fields = facts["fields"]
    rows = [[arm, *(_value(by_arm[arm]) for by_arm in fields.values())] for arm in arms]
    blocks: list[Block] = [Table(["arm", *fields], rows, is_wordy=True)]
    if base := facts["experiment"]["base"]:
        config = facts["experiment"]["config"]
        text = f"All arms change {config} by: {_settings(base)}."
        blocks.append(Text(text, "note"))
    if trunk := facts["experiment"]["trunk"]:
        text = _settings(trunk)
        blocks.append(
            Text(f"All arms go on from the end of a run with {text}.", "note")
        )
    if rungs := facts["experiment"]["rungs"]:
        share = facts["experiment"]["keep"]
        text = f"Of the arms the best {share:.0%} went on at step {_value(rungs)}."
        blocks.append(Text(text, "note"))
    return blocks


def _settings(settings):
    return ", ".join(f"{name} = {_value(value)}" for name, value in settings.items())


def _value(value):
    if isinstance(value, list):
        return ", ".join(map(_value, value)) or "()"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _comparison(facts):
    experiment = facts["experiment"]
    blocks: list[Block] = [
        Text(
            "The exam is the same for every arm: held-out rows, masks that depend on "
            "the row alone, at a fixed rate whatever the arm was trained at. "
            f"Differences are paired by seed, against {experiment['baseline']}. p is "
            "of the exact sign-flip test over seeds, and intervals hold what it cannot "
            "reject. Two columns adjust p for all arms of a table being looked at: "
            "Holm's, and the joint test, which flips whole seeds (Westfall and Young) "
            "and also assumes that noise is symmetric. Better and worse are by the "
            "joint one.",
            "note",
        )
    ]
    for exam, rows in facts["comparison"].items():
        blocks += [Text(exam, "title"), comparison_table(rows)]
    if equal := facts["equal_flops"]:
        flops = f"{equal['flops']:.3g} floating-point operations"
        blocks += [
            Text(f"{experiment['metric']} at equal arithmetic: {flops}", "title"),
            Text(
                "Each run where it had done as much as the one that does the least: "
                "between two evaluations, and before the end of its own schedule.",
                "note",
            ),
            comparison_table(equal["rows"]),
        ]
    for rung in facts["rungs"]:
        title = f"{experiment['metric']} at step {rung['step']:,}, where halving chose"
        blocks += [Text(title, "title"), comparison_table(rung["rows"])]
    main = facts["comparison"][experiment["metric"]]
    return [*blocks, Text(_confidence(main), "note")]


def comparison_table(rows):
    header = [
        *("arm", "seeds", "mean [interval]", "difference [interval]"),
        *("p", "Holm p", "joint p", "detectable"),
    ]
    return Table(header, [_comparison_row(row) for row in rows])


def _comparison_row(row):
    return [
        row["arm"],
        Cell(str(row["n"]), "worse" if row["n"] < 3 else ""),
        mean_text(row["mean"]),
        Cell(mean_text(row["difference"], signed), row["verdict"]),
        p_value(row["p"]),
        p_value(row["holm_p"]),
        p_value(row["joint_p"]),
        number(row["detectable"]),
    ]


def _confidence(rows):
    found = {
        (row["mean"]["n"], row["mean"]["confidence"])
        for row in rows
        if row["mean"] and row["mean"]["confidence"] is not None
    }
    texts = [f"{share:.1%} with {n} seeds" for n, share in sorted(found)]
    have = f"Intervals have a confidence of {', '.join(texts)}. " if texts else ""
    needed = statistics.seeds_needed()
    if any(n < needed for n, _ in found):
        have += f"Those of fewer than {needed} seeds are the seeds' range. "
    return (
        f"{have}Detectable: the difference that a single test at "
        f"p ≤ {statistics.ALPHA:g} finds four times in five with these seeds."
    )


def _matrix(facts):
    if not facts["matrix"]:
        return []
    matrix = facts["matrix"]
    rates = [f"at {exam_rate(exam):g}" for exam in matrix["exams"]]
    rows = [
        [arm, *map(number, means)]
        for arm, means in zip(matrix["arms"], matrix["means"], strict=True)
    ]
    return [
        Picture(
            "matrix",
            "Means over seeds. Colours compare the arms within an evaluation rate, "
            "not the rates: more hidden tokens make a harder exam. The best of each is "
            "bold.",
        ),
        Table(["trained with", *rates], rows),
    ]


def _optimum(facts):
    if not facts["optima"]:
        return []
    blocks: list[Block] = [
        Text(
            "A parabola through the mean losses against logit(rate). The interval "
            "is from resampled seeds, and has 95% confidence; the last column is the "
            "share of the resamples that have a minimum between the rates tried.",
            "note",
        )
    ]
    rows = [_optimum_row(row) for row in facts["optima"] if "refused" not in row]
    if rows:
        header = [
            "arms",
            "exam",
            "seeds",
            "best rate",
            "95% interval",
            "with a minimum",
        ]
        blocks.append(Table(header, rows))
    blocks += [
        Text(f"{row['exam']}: {words.optimum_sentence(row)}")
        for row in facts["optima"]
        if "refused" in row
    ]
    return blocks


def _optimum_row(row):
    interval = NONE
    if row["low"] is not None:
        interval = f"{row['low']:.3f} to {row['high']:.3f}"
    interior = NONE if row["interior"] is None else f"{row['interior']:.0%}"
    return [
        row["group"] or "all",
        row["exam"],
        str(row["n"]),
        f"{row['rate']:.3f}",
        interval,
        interior,
    ]


def _curves(facts, pictures):
    against = {
        "steps": "steps",
        "tokens": "tokens read; each view of a row counts",
        "predictions": "predictions, the hidden tokens that were scored",
        "flops": "the arithmetic of the matrix products",
    }
    metric = facts["experiment"]["metric"]
    blocks: list[Block] = [
        Picture(
            f"curves_{axis}",
            f"{metric} against {text}. Lines are means over seeds, bands their "
            "intervals; the axis is that of the second half.",
        )
        for axis, text in against.items()
        if f"curves_{axis}" in pictures
    ]
    rows = [
        [arm, *(words.big(curve[axis][-1]) for axis in against)]
        for arm, curve in facts["curves"].items()
    ]
    if rows:
        blocks.append(Text("What a run of each arm took:"))
        blocks.append(Table(["arm", "steps", "tokens", "predictions", "FLOPs"], rows))
    return blocks


def _own_rate(facts):
    rows = [
        [
            row["arm"],
            ", ".join(f"{rate:g}" for rate in row["rates"]) or NONE,
            mean_text(row["mean"]),
        ]
        for row in facts["own_rate"]
    ]
    return [
        Text(
            "Not comparable: each arm is scored on what it was trained on, and hiding "
            "more makes a harder task. Mean over the last tenth of the training.",
            "warning",
        ),
        Table(["arm", "training rate", "train/loss [interval]"], rows),
    ]


def _runs(facts):
    rows = []
    for arm, runs in itertools.groupby(facts["runs"], key=lambda run: run["arm"]):
        states = [run["state"] for run in runs]
        counts = [f"{states.count(s)}" for s in STATES]
        rows.append([arm, *counts])
    failed = [run for run in facts["runs"] if run["state"] != "finished"]
    blocks: list[Block] = [Table(["arm", *STATES], rows)]
    if failed:
        blocks.append(Text("Not in the comparison:"))
        header = ["arm", "seed", "state", "what is known"]
        blocks.append(
            Table(
                header,
                [[r["arm"], str(r["seed"]), r["state"], r["reason"]] for r in failed],
                is_wordy=True,
            )
        )
    return blocks


STATES = ("finished", "unfinished", "diverged", "missing")


def _provenance(facts):
    rows = [
        [name, ", ".join(_share(value, n, counts) for value, n in counts.items())]
        for name, counts in facts["provenance"].items()
    ]
    return [Table(["what", "value"], rows, is_wordy=True)] if rows else []


def _share(value, number_of_runs, counts):
    if len(counts) == 1:
        return value
    return f"{value} ({number_of_runs} run{'s' * (number_of_runs > 1)})"


def _wall_clock(facts, pictures):
    rows = [
        [
            row["arm"],
            NONE
            if row["tokens_per_second"] is None
            else f"{row['tokens_per_second']:,.0f}",
            number(row["seconds"], 1),
        ]
        for row in facts["wall_clock"]["speed"]
    ]
    blocks: list[Block] = [
        Text(
            "What depends on the machine and its load; all else in this report does "
            "not. Seconds are those of updates, at the logged speed: without "
            "compilation, evaluation and saving.",
            "note",
        )
    ]
    if "curves_seconds" in pictures:
        metric = facts["experiment"]["metric"]
        blocks.append(
            Picture("curves_seconds", f"{metric} against seconds of training.")
        )
    return [*blocks, Table(["arm", "tokens a second", "seconds"], rows)]
