"""Shows what a corruption policy does to text: its masks on rows, and its statistics.

    python -m mlm_jax.show_masks --config=configs/austen.py \
        --config.corruption.strategy=span --html=masks.html

Rows and masks are those that training meets, from its first row on. `--html` writes the
same as a page.
"""

import itertools
import math
import unicodedata

import jax
import numpy as np
from absl import flags

from mlm_jax import command, config, keys, mask_page, program
from mlm_jax.corruption import schedule, settings
from mlm_jax.corruption.replace import Action
from mlm_jax.data import pipeline, rows
from mlm_jax.errors import InputError
from mlm_jax.mask_page import Chart, Group, Piece, Report, Row

CONFIG = command.define_config()
ROWS = flags.DEFINE_integer("rows", 8, "Rows to show.", lower_bound=1)
DRAWS = flags.DEFINE_integer(
    "draws", 2000, "Row visits to count over, at least --rows.", lower_bound=1
)
SPLIT = flags.DEFINE_enum("split", "train", ["train", "validation"], "Rows to take.")
PROGRESS = flags.DEFINE_float(
    "progress", 0.0, "Share of the training done.", lower_bound=0, upper_bound=1
)
COLOR = command.define_color()
HTML = command.define_html()

VISITS = 64  # in one call of `corrupt`
MAX_BARS = 14  # of the histogram of rates

KINDS = {Action.MASK: "mask", Action.RANDOM: "random", Action.KEEP: "kept"}
VISIBLE = {"\n": "⏎", "\t": "⇥"}


def make_report(c, *, split, num_rows, draws, progress):
    """Returns the `Report` on the first `draws` visits of rows, `num_rows` of them
    shown."""
    config.check(c)
    store = rows.prepare(c.data, config.tokenizer_of(c))
    hparams = settings.hparams(c.corruption)
    tally = Tally()
    shown: list[Row] = []
    for batch, ledger in _visits(c, store, split, max(draws, num_rows), progress):
        tally.add(batch, ledger)
        missing = num_rows * c.corruption.views - len(shown)
        for i in range(min(missing, len(batch["row"]))):
            row = {name: leaf[i] for name, leaf in batch.items()}
            view = i % c.corruption.views
            shown.append(_row(row, view, c.corruption.views, store.tokenizer))
    if not tally.sums["num_maskable"]:
        raise InputError(f"no row of {split} has a token that may be hidden.")
    asked = float(schedule.rate_at(progress, hparams))
    return Report(
        title=f"{c.corruption.strategy} masks at {_asked(c.corruption, asked)}",
        facts=_facts(c, split, progress, asked, hparams, tally),
        charts=_charts(c, asked, hparams, tally),
        rows=shown,
    )


def _visits(c, store, split, draws, progress):
    """Yields (batch, ledger), `draws` visits in all."""
    batches = pipeline.TrainBatches(
        getattr(store, split), batch_size=VISITS, seed=c.seed
    )
    corrupt = jax.jit(program.train_corrupt(c, store.tokenizer, store.token_counts))
    key = keys.purpose_key(jax.random.key(c.seed), keys.Purpose.CORRUPTION)
    hparams = settings.hparams(c.corruption)
    # As before the first update: a model that knows nothing loses ln V on every token.
    num_tokens = store.tokenizer.vocab_size
    hparams["token_loss"] = np.full(num_tokens, math.log(num_tokens), np.float32)
    for first in range(0, draws, VISITS):
        batch = batches[first // VISITS]
        # Visits beyond the last become padding, which has nothing to count.
        batch["segment"][draws - first :] = 0
        yield jax.device_get(corrupt(key, batch, hparams, np.float32(progress)))


class Tally:
    """What the policy did, summed over visits, and rates visit by visit."""

    def __init__(self):
        self.sums = {}
        self.words_K = np.zeros(settings.MAX_WORDS + 1, np.int64)
        self.unchanged = 0  # random draws of the token itself
        self._counts = []

    def add(self, batch, ledger):
        for name, leaf in ledger.items():
            self.sums[name] = self.sums.get(name, 0) + leaf.astype(np.int64)
        is_random_BxL = batch["action"] == Action.RANDOM
        is_same_BxL = batch["inputs"] == batch["tokens"]
        self.unchanged += int((is_random_BxL & is_same_BxL).sum())
        is_hidden_BxL = batch["action"] != Action.NONE
        self._count_words(batch, is_hidden_BxL)
        length = batch["unit"].shape[1]
        maskable_B = (batch["unit"] < length).sum(1)
        counts = maskable_B, is_hidden_BxL.sum(1), (batch["weights"] > 0).sum(1)
        self.num_slots = batch["predict"].shape[1]
        self._counts.append(np.stack(counts)[:, maskable_B > 0])

    def _count_words(self, batch, is_hidden_BxL):
        length = is_hidden_BxL.shape[1]
        place_L = np.arange(length)
        begins_BxL = batch["word_start"] | (batch["unit"] == place_L[None])
        row, place = np.nonzero(begins_BxL & is_hidden_BxL)
        words = np.bincount(row * length + batch["unit"][row, place])
        words = np.minimum(words[words > 0], len(self.words_K) - 1)
        self.words_K += np.bincount(words, minlength=len(self.words_K))

    def counts(self):
        """Returns maskable_N, hidden_N, predicted_N; rows with none are out."""
        return np.concatenate(self._counts, axis=1)


def _facts(c, split, progress, asked, hparams, tally):
    corruption, sums = c.corruption, tally.sums
    maskable_N, hidden_N, predicted_N = tally.counts()
    units = int(sums["unit_lengths"].sum())
    share = float(hparams["predicted_share"])
    return [
        ("policy", _policy(corruption, progress, asked, tally.num_slots)),
        (
            "text",
            f"{c.data.source}, {split}, seed {c.seed}: {len(maskable_N):,} "
            f"{'views' if corruption.views > 1 else 'visits'} of rows of "
            f"{c.data.row_length} tokens",
        ),
        ("hidden", _rate(hidden_N, maskable_N, _asked(corruption, asked))),
        ("predicted", _rate(predicted_N, maskable_N, _asked(corruption, asked, share))),
        (
            "units",
            f"{units:,} hidden, {sums['num_hidden'] / max(units, 1):.2f} tokens each",
        ),
        (
            "random",
            f"{tally.unchanged:,} of {sums['num_random_tokens']:,} random draws gave "
            "the token itself: counted as random, the model sees no change",
        ),
        (
            "slots",
            f"{predicted_N.max()} of {tally.num_slots} in use in the fullest row; "
            f"overflow: {sums['num_overflow']:,} predictions found no slot",
        ),
    ]


def _policy(corruption, progress, asked, num_slots):
    strategy = {
        "span": f"span of {corruption.span_min} to {corruption.span_max} words "
        f"({corruption.span_lengths})",
        "ngram": f"ngram of 1 to {corruption.ngram_max} words",
        "pmi": f"pmi (collocations of {corruption.collocations})",
    }.get(corruption.strategy, corruption.strategy)
    parts = [strategy, f"{corruption.count} count", f"rate {_percent(asked)}"]
    if corruption.row_rate:
        parts[-1] = "rate of each row its own"
    elif corruption.schedule != "constant":
        parts[-1] += f" at progress {progress:g} ({corruption.schedule} schedule)"
    split = corruption.mask_frac, corruption.random_frac, _kept(corruption)
    parts += [
        f"mask/random/keep {'/'.join(f'{100 * part:g}' for part in split)} drawn a "
        f"{corruption.replacement_unit}",
        f"random from {corruption.random_pool}",
        f"{num_slots} slots (M)",
        f"{corruption.views} view{'s' * (corruption.views > 1)} of a row",
        "new masks each epoch"
        if corruption.dynamic
        else f"{corruption.duplicates} masks a row",
    ]
    if corruption.token_weights != "uniform":
        power = f"to the power {corruption.weight_power:g}"
        parts.append(f"tokens weighted by {corruption.token_weights} {power}")
    return ", ".join(parts)


def _kept(corruption):
    return round(1 - corruption.mask_frac - corruption.random_frac, 9)


def _asked(corruption, rate, share=1.0):
    if corruption.row_rate:
        low, high = (share * end for end in corruption.row_rate)
        return f"{_percent(low)} to {_percent(high)}"
    return _percent(share * rate)


def _rate(chosen_N, maskable_N, asked):
    rates_N = chosen_N / maskable_N
    return (
        f"{chosen_N.sum() / maskable_N.sum():.2%} of {maskable_N.sum():,} tokens "
        f"(asked: {asked}); over rows, mean {rates_N.mean():.2%} and standard "
        f"deviation {rates_N.std():.2%}"
    )


def _percent(share):
    return f"{100 * share:.4g}%"


def _charts(c, asked, hparams, tally):
    corruption, sums = c.corruption, tally.sums
    maskable_N, hidden_N, predicted_N = tally.counts()
    share = float(hparams["predicted_share"])
    targets = (None, None) if corruption.row_rate else (asked, share * asked)
    charts = [_rates("Hidden share of a row", hidden_N, maskable_N, targets[0])]
    if (predicted_N != hidden_N).any():
        title = "Predicted share of a row"
        charts.append(_rates(title, predicted_N, maskable_N, targets[1]))
    lengths_K = sums["unit_lengths"]
    labels = [f"{n + 1}" for n in range(len(lengths_K))]
    labels[-1] += "+"
    charts.append(_up_to_last("Tokens in a hidden unit", labels, lengths_K))
    if corruption.strategy in ("span", "ngram"):
        cdf_K = np.append(hparams["length_cdf"].astype(float), 1)
        title = "Words in a hidden unit (the end of a segment cuts some short)"
        share_K = np.diff(cdf_K, prepend=0)
        charts.append(_up_to_last(title, labels, tally.words_K[1:], share_K))
    elif corruption.strategy == "pmi":
        charts.append(_up_to_last("Words in a hidden unit", labels, tally.words_K[1:]))
    names = ("mask", "random", "kept")
    counts = [int(sums[f"num_{name}_tokens"]) for name in ("mask", "random", "kept")]
    fractions = [corruption.mask_frac, corruption.random_frac, _kept(corruption)]
    charts.append(Chart("At the hidden tokens", list(names), counts, fractions))
    return charts


def _rates(title, chosen_N, maskable_N, asked):
    """Classes of as many steps of 1 / (tokens of the longest row) each: other widths
    would hold now more, now fewer of the rates that can be."""
    steps = int(maskable_N.max())
    step_N = np.rint(chosen_N / maskable_N * steps).astype(int)
    low = int(step_N.min())
    width = -(-(int(step_N.max()) + 1 - low) // MAX_BARS)
    counts = np.bincount((step_N - low) // width)
    labels = []
    for i in range(len(counts)):
        first = low + i * width
        ends = sorted({first, first + width - 1})
        labels.append("-".join(f"{100 * end / steps:.1f}" for end in ends) + "%")
    marked = None if asked is None else (round(asked * steps) - low) // width
    return Chart(title, labels, counts.tolist(), [], marked)


def _up_to_last(title, labels, counts_K, asked_K=()):
    """Leaves out the classes at the end that have nothing."""
    is_there_K = counts_K > 0
    if len(asked_K):
        is_there_K |= asked_K > 1e-6
    last = int(np.flatnonzero(is_there_K).max(initial=0)) + 1
    asked = [float(share) for share in asked_K[:last]]
    return Chart(title, labels[:last], counts_K[:last].tolist(), asked)


def _row(row, view, views, tokenizer):
    """Returns the `Row` of one row of a batch, as arrays without their first axis."""
    used = row["predict"][row["weights"] > 0]
    is_predicted_L = np.isin(np.arange(len(row["tokens"])), used)
    num_hidden = int((row["action"] != Action.NONE).sum())
    maskable = int((row["unit"] < len(row["unit"])).sum())
    title = f"row {row['row']:,}, epoch {row['epoch']}"
    if views > 1:
        title += f", view {view + 1} of {views}"
    title += f": {num_hidden} of {maskable} hidden"
    if maskable:
        title += f" ({num_hidden / maskable:.1%})"
    title += f", {len(used)} predicted"

    def group_of(i):
        is_hidden = bool(row["action"][i])
        unit = int(row["unit"][i]) if is_hidden else -1
        return int(row["segment"][i]), is_hidden, unit, bool(is_predicted_L[i])

    segments: list[list[Group]] = []
    (real,) = np.nonzero(row["segment"])
    for (segment, is_hidden, _, is_predicted), places in itertools.groupby(
        real.tolist(), group_of
    ):
        if segment > len(segments):
            segments.append([])
        pieces = [_piece(row, i, tokenizer) for i in places]
        segments[-1].append(Group(is_hidden, is_predicted, pieces))
    return Row(title, segments)


def _piece(row, i, tokenizer):
    token = row["tokens"][i]
    text, has_space = _spell(tokenizer, token)
    is_inside = row["action"][i] and row["unit"][i] != i and not row["word_start"][i]
    joint = "·" if is_inside else ""
    kind = "special" if tokenizer.is_special[token] else "text"
    kind = KINDS.get(Action(row["action"][i]), kind)
    piece = Piece(kind, text, joint=" " if has_space else joint)
    if kind != "random":
        return piece
    seen, starts_word = _spell(tokenizer, row["inputs"][i])
    is_inside = not starts_word and seen[0].isalnum()
    return piece._replace(seen=seen, seen_joint="·" if is_inside else "")


def _spell(tokenizer, token):
    """Returns the text of a token within a text, and whether a space comes before."""
    before = tokenizer.decode([tokenizer.special.cls])
    text = tokenizer.decode([tokenizer.special.cls, token]).removeprefix(before)
    if "\ufffd" in text:  # a byte of a character
        text = tokenizer.piece(token)
    has_space = text.startswith(" ")
    text = "".join(
        VISIBLE.get(c, "\ufffd" if unicodedata.category(c) == "Cc" else c)
        for c in text.strip(" ")
    )
    return text or "␣", has_space


def main(arguments):
    del arguments
    command.check_html(HTML.value)
    report = make_report(
        CONFIG.value,
        split=SPLIT.value,
        num_rows=ROWS.value,
        draws=DRAWS.value,
        progress=PROGRESS.value,
    )
    print(mask_page.text(report, **command.terminal(COLOR.value)))
    if HTML.value:
        command.write_html(HTML.value, mask_page.page(report))


if __name__ == "__main__":
    command.run(main)
