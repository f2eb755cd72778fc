"""How a report writes numbers, and what it says of them."""

from mlm_jax.experiment import statistics
from mlm_jax.experiment.comparison import is_less_better

NONE = "–"


def number(value, digits=4):
    return NONE if value is None else f"{value:.{digits}f}"


def count(things, name):
    return f"{len(things)} {name}{'s' * (len(things) != 1)}"


def signed(value):
    return NONE if value is None else f"{value:+.4f}".replace("-", "−")


def p_value(value):
    if value is None:
        return NONE
    return "<0.0001" if value < 0.0001 else f"{value:.2g}"


def mean_text(estimate, form=number):
    """Returns `mean [low, high]`."""
    if estimate is None:
        return NONE
    if estimate["low"] is None:
        return form(estimate["mean"])
    low, high = form(estimate["low"]), form(estimate["high"])
    return f"{form(estimate['mean'])} [{low}, {high}]"


def big(value):
    """Returns 1.2 million and the like."""
    for size, name in ((1e12, " trillion"), (1e9, " billion"), (1e6, " million")):
        if value >= size:
            return f"{value / size:.3g}{name}"
    return f"{value:,.0f}"


def answer_sentences(facts):
    """Returns what the runs show, a sentence each."""
    metric = facts["experiment"]["metric"]
    rows = [row for row in facts["comparison"][metric] if row["mean"]]
    runs = [run["state"] for run in facts["runs"]]
    texts = [f"{runs.count('finished')} of {count(runs, 'run')} have finished."]
    if rows:
        best = (min if is_less_better(metric) else max)(
            rows, key=lambda row: row["mean"]["mean"]
        )
        which = "Lowest" if is_less_better(metric) else "Highest"
        text = f"{which} {metric}: {best['arm']}, {mean_text(best['mean'])}"
        if best["difference"]:
            difference = mean_text(best["difference"], signed)
            text += f"; {difference} against {facts['experiment']['baseline']}"
        texts.append(f"{text}.")
    for verdict in ("better", "worse"):
        found = [row["arm"] for row in rows if row["verdict"] == verdict]
        if found:
            texts.append(
                f"{verdict.capitalize()} than the baseline, at a joint p of at most "
                f"{statistics.ALPHA:g}: {', '.join(found)}."
            )
    unknown = [r["arm"] for r in rows if r["p"] is not None and not r["verdict"]]
    if unknown:
        names = ", ".join(unknown) if len(unknown) < 7 else f"{len(unknown)} arms"
        texts.append(f"Not told apart from the baseline: {names}.")
    texts += [optimum_sentence(row) for row in facts["optima"] if row["exam"] == metric]
    if facts["trend"]:
        texts.append(trend_sentence(facts["trend"]))
    return texts


def optimum_sentence(row):
    """Says where a fitted optimum lies, or why it is not known."""
    name = f"{row['group']}: " if row["group"] else ""
    if "refused" in row:
        return f"{name}{row['refused']}"
    text = f"{name}The fitted best rate is {row['rate']:.3f}"
    if row["low"] is None:
        return f"{text} (one seed: no interval)."
    return f"{text}, with a 95% interval from {row['low']:.3f} to {row['high']:.3f}."


def trend_sentence(trend):
    sizes = ", ".join(map(big, trend["sizes"]))
    if "refused" in trend:
        return f"Trend over model size: {trend['refused']}"
    text = (
        f"Trend over model size ({sizes} parameters in the layers): for a model ten "
        f"times as large the logit of the best rate changes by {signed(trend['slope'])}"
    )
    if trend["low"] is None:
        return f"{text} (one seed: no interval)."
    low, high = signed(trend["low"]), signed(trend["high"])
    return f"{text}, with a 95% interval from {low} to {high}."
