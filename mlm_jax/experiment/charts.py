"""The pictures of a report, from its facts: SVG and PNG, the same bytes each time."""

import io
import textwrap
from typing import Any

import matplotlib
import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator, NullLocator
from scipy import special

from mlm_jax.experiment.report import exam_rate

INK, DIM, LINE = "#1b2733", "#6b7785", "#d9dfe6"
BETTER, WORSE, NEUTRAL = "#15803d", "#c2410c", "#1f4e8c"
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "mlm_jax",  # names inside a picture do not change from time to time
    "svg.fonttype": "path",
    "font.size": 10,
    "axes.edgecolor": DIM,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": LINE,
    "grid.linewidth": 0.7,
    "text.color": INK,
    "xtick.color": DIM,
    "ytick.color": DIM,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
    "legend.fontsize": 9,
}
WIDTH = 4.8  # inches; two fit beside each other on a screen, one on a phone
AXES = {
    "steps": "training steps",
    "tokens": "tokens read",
    "predictions": "predictions",
    "flops": "floating-point operations",
    "seconds": "seconds of training",
}


def save(figure, kind):
    """Returns the bytes of a figure as `svg` or `png`, without dates and versions."""
    metadata = {"svg": dict.fromkeys(("Date", "Creator", "Format", "Type"))}
    metadata["png"] = {"Software": None}
    with matplotlib.rc_context(STYLE), io.BytesIO() as file:
        figure.savefig(file, format=kind, metadata=metadata[kind], dpi=200)
        return file.getvalue()


def _figure(height, **layout):
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.subplots(**layout)


def draw(facts):
    """Returns {name: Figure} of whatever the facts have."""
    with matplotlib.rc_context(STYLE):
        figures = {"comparison": _comparison(facts)} if _compared(facts) else {}
        for axis in ("steps", "tokens", "predictions", "flops"):
            if facts["curves"]:
                figures[f"curves_{axis}"] = _curves(facts, facts["curves"], axis)
        if facts["curves"]:
            clock = facts["wall_clock"]["curves"]
            figures["curves_seconds"] = _curves(facts, clock, "seconds")
        if facts["matrix"]:
            figures["matrix"] = _matrix(facts)
        fitted = [row for row in facts["optima"] if row["n"]]
        metric = facts["experiment"]["metric"]
        if main := [row for row in fitted if row["exam"] == metric]:
            figures["optimum"] = _optimum(metric, main)
        return figures


def _compared(facts):
    rows = facts["comparison"][facts["experiment"]["metric"]]
    return [row for row in rows if row["difference"]]


def _colors(num_arms):
    """Returns a colour for each arm: in order, or apart where there are few."""
    shades = np.linspace(0.0, 0.9, num_arms) if num_arms > 1 else [0.3]
    return [colormaps["viridis"](shade) for shade in shades]


def _curves(facts, curves, axis):
    """Means with bands. The axis is that of the second half of the training: beside its
    first steps the arms are one line."""
    arms = [arm["name"] for arm in facts["experiment"]["arms"]]
    columns = _legend_columns(arms)
    figure, axes = _figure(3.0 + 0.18 * -(-len(arms) // columns))
    late = []
    for name, color in zip(arms, _colors(len(arms)), strict=True):
        if name not in curves:
            continue
        curve = {key: _numbers(values) for key, values in curves[name].items()}
        x_K, baseline = curve[axis], name == facts["experiment"]["baseline"]
        axes.plot(
            x_K,
            curve["mean"],
            color=color,
            lw=2.4 if baseline else 1.4,
            marker="o",
            ms=3,
            label=f"{name} (baseline)" if baseline else name,
        )
        axes.fill_between(
            x_K, curve["low"], curve["high"], color=color, alpha=0.1, lw=0
        )
        late += [curve[key][len(x_K) // 2 :] for key in ("mean", "low", "high")]
    axes.set_xlabel(AXES[axis])
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    low, high = np.nanmin(np.concatenate(late)), np.nanmax(np.concatenate(late))
    axes.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))
    axes.set_ylabel(facts["experiment"]["metric"])
    axes.set_xlim(left=0)
    figure.legend(loc="outside lower center", ncols=columns)
    return figure


def _legend_columns(labels):
    return max(1, min(4, 60 // (max(map(len, labels)) + 9)))


def _comparison(facts):
    """Paired differences to the baseline with their intervals, an arm a line."""
    rows = _compared(facts)
    figure, axes = _figure(1.1 + 0.32 * len(rows))
    for y, row in enumerate(rows):
        found = row["difference"]
        color = verdict_color(row)
        seeds = list(row["differences"].values())
        below = [y + 0.26] * len(seeds)
        axes.plot(seeds, below, "o", ms=3, color=DIM, alpha=0.6, mew=0)
        if found["low"] is not None:
            axes.plot([found["low"], found["high"]], [y, y], color=color, lw=2.2)
        axes.plot(found["mean"], y, "D", ms=5.5, color=color)
    axes.axvline(0, color=INK, lw=1)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.set_yticks(range(len(rows)), [_label(row["arm"]) for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(f"difference in {facts['experiment']['metric']}")
    return figure


def _label(name):
    """Breaks a long name after its commas."""
    return textwrap.fill(name.replace(",", ", "), 26)


def verdict_color(row):
    verdict = row["verdict"]
    return {"better": BETTER, "worse": WORSE}.get(verdict, NEUTRAL)


def _matrix(facts):
    """The mean of each arm at each exam; colours compare within an exam only."""
    matrix = facts["matrix"]
    means_AxE = np.array([_numbers(row) for row in matrix["means"]])
    best_E = np.nanmin(means_AxE, axis=0)
    figure, axes = _figure(1.2 + 0.36 * len(means_AxE))
    above_AxE = means_AxE - best_E
    # A few arms far off would leave the others one colour.
    top = max(float(np.nanquantile(above_AxE, 0.85)), 1e-9)
    shades = colormaps["viridis_r"]
    axes.pcolormesh(
        above_AxE, cmap=shades, vmin=0, vmax=top, edgecolors="white", lw=1.5
    )
    for (i, j), mean in np.ndenumerate(means_AxE):
        is_dark = above_AxE[i, j] > 0.5 * top
        text = "–" if np.isnan(mean) else f"{mean:.3f}"
        weight = "bold" if mean == best_E[j] else "normal"
        color = "white" if is_dark else INK
        axes.text(
            j + 0.5, i + 0.5, text, ha="center", va="center", color=color, weight=weight
        )
    rates = [f"{exam_rate(exam):g}" for exam in matrix["exams"]]
    axes.set_xticks(np.arange(len(rates)) + 0.5, rates)
    names = [_label(name) for name in matrix["arms"]]
    axes.set_yticks(np.arange(len(names)) + 0.5, names)
    axes.invert_yaxis()
    axes.set_xlabel("evaluated at the rate")
    axes.set_ylabel("trained with")
    axes.grid(False)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return figure


def _optimum(metric, rows):
    """Losses of the seeds against the rate, the parabola, and its least place."""
    figure, axes = _figure(3.2 + 0.18 * len(rows))
    for row, color in zip(rows, _colors(len(rows)), strict=True):
        rates_R, losses_RxS = np.array(row["rates"]), np.array(row["losses"])
        x_R = special.logit(rates_R)
        seeds = np.repeat(x_R, losses_RxS.shape[1])
        axes.plot(
            seeds, losses_RxS.ravel(), "o", ms=3.5, color=color, alpha=0.35, mew=0
        )
        axes.plot(x_R, losses_RxS.mean(1), "D", ms=5, color=color)
        if "refused" in row:
            continue
        fine_K = np.linspace(x_R.min(), x_R.max(), 200)
        fitted_K = np.polynomial.polynomial.polyval(fine_K, row["coefficients"])
        name = f"{row['group']}: " if row["group"] else ""
        label = f"{name}best {row['rate']:.0%}"
        if row["low"] is not None:
            low, high = special.logit([row["low"], row["high"]])
            axes.axvspan(low, high, color=color, alpha=0.12, lw=0)
            label += f", interval {row['low']:.0%} to {row['high']:.0%}"
        axes.plot(fine_K, fitted_K, color=color, lw=1.8, label=label)
        axes.axvline(special.logit(row["rate"]), color=color, lw=1.2, ls="--")
    all_rates = sorted({rate for row in rows for rate in row["rates"]})
    axes.set_xticks(special.logit(all_rates), [f"{rate:.3g}" for rate in all_rates])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("training rate (on a logit scale)")
    axes.set_ylabel(metric)
    if axes.get_legend_handles_labels()[0]:
        figure.legend(loc="outside lower center")
    return figure


def _numbers(values):
    return np.array([np.nan if value is None else value for value in values], float)
