"""The facts of all trials -> the result, and that as Markdown for people."""

import math

import numpy as np

LESS_IS_BETTER = ("loss", "squared_error")


def summarise(trials, metric):
    """Returns the facts of a result.

    For each learning rate the median and the extremes over seeds of every score, on
    validation and test; `best` is the learning rate with the highest median validation
    score. Diverged trials count as lower than any other. Independent of the order.
    """
    rates = sorted({facts["learning_rate"] for facts in trials})
    rows = []
    for rate in rates:
        some = [facts for facts in trials if facts["learning_rate"] == rate]
        some.sort(key=lambda facts: facts["seed"])
        rows.append(
            {
                "learning_rate": rate,
                "seeds": [facts["seed"] for facts in some],
                "diverged": sum(facts["state"] == "diverged" for facts in some),
                "best_epochs": [facts["best_epoch"] for facts in some],
                "seconds": sum(facts["seconds"] for facts in some),
                "validation": _spreads(some, "validation"),
                "test": _spreads(some, "test"),
            }
        )
    ranked = sorted(rows, key=lambda row: -_rank(row, metric))
    return {
        "metric": metric,
        "best": ranked[0]["learning_rate"],
        "rows": rows,
    }


def markdown(result, what):
    """Returns a result as a table, best learning rate in bold."""
    metric = result["metric"]
    has_test = any(row["test"] for row in result["rows"])
    names = ["learning rate", "seeds", f"validation {metric}"]
    names += [f"test {metric}"] if has_test else []
    names += ["epochs", "seconds"]
    lines = [
        what,
        "",
        f"Median over seeds, lowest and highest in brackets. Of the learning rates the "
        f"one with the best median validation {metric} is bold.",
        "",
        _line(names),
        _line(["---"] * len(names)),
    ]
    for row in result["rows"]:
        cells = [f"{row['learning_rate']:g}", _count(row)]
        cells.append(_cell(row["validation"].get(metric)))
        cells += [_cell(row["test"].get(metric))] if has_test else []
        cells += [_epochs(row["best_epochs"]), f"{row['seconds']:.0f}"]
        if row["learning_rate"] == result["best"]:
            cells = [f"**{cell}**" for cell in cells]
        lines.append(_line(cells))
    best = next(r for r in result["rows"] if r["learning_rate"] == result["best"])
    split = "test" if has_test else "validation"
    others = [
        f"{name} {_cell(spread)}"
        for name, spread in best[split].items()
        if name != metric
    ]
    if others:
        lines += ["", f"Other {split} scores of that one: {'; '.join(others)}."]
    return "\n".join(lines) + "\n"


def _spreads(trials, split):
    """Returns {score: {median, low, high, values}}; {} if no trial has the split."""
    names = next((list(facts[split]) for facts in trials if facts[split]), [])
    spreads = {}
    for name in names:
        worst = math.inf if name in LESS_IS_BETTER else -math.inf
        found = [(facts[split] or {}).get(name) for facts in trials]
        values = [worst if v is None or math.isnan(v) else float(v) for v in found]
        spreads[name] = {
            "median": float(np.median(values)) if _has_median(values) else math.nan,
            "low": min(values),
            "high": max(values),
            "values": values,
        }
    return spreads


def _has_median(values):
    middle = sorted(values)[(len(values) - 1) // 2 : len(values) // 2 + 1]
    return all(map(math.isfinite, middle))


def _rank(row, metric):
    median = row["validation"].get(metric, {}).get("median", math.nan)
    return -math.inf if math.isnan(median) else median


def _line(cells):
    return f"| {' | '.join(cells)} |"


def _count(row):
    diverged = f", {row['diverged']} diverged" if row["diverged"] else ""
    return f"{len(row['seeds'])}{diverged}"


def _cell(spread):
    if spread is None:
        return "-"
    return f"{spread['median']:.4f} [{spread['low']:.4f}, {spread['high']:.4f}]"


def _epochs(epochs):
    return (
        f"{min(epochs)}"
        if min(epochs) == max(epochs)
        else f"{min(epochs)}-{max(epochs)}"
    )
