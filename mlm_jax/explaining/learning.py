"""The steps of the walkthrough from scores to the loss that training lowers."""

import math

from mlm_jax import step
from mlm_jax.corruption.policy import make_corrupt
from mlm_jax.corruption.replace import Action, replace
from mlm_jax.experiment.page import Table
from mlm_jax.explaining.facts import spell_all
from mlm_jax.explaining.pictures import (
    Bars,
    Box,
    Boxes,
    Curve,
    Drawing,
    Flow,
    Strips,
    Whole,
)
from mlm_jax.explaining.steps import SHOWN, Step
from mlm_jax.explaining.words import number, percent, set_of, share
from mlm_jax.loss import masked_cross_entropy
from mlm_jax.loss_xla import score

CASES = {"close": "", "tie": "a tie: ", "runaway": "a runaway winner: "}
SEEN = {
    Action.MASK: "[MASK]",
    Action.RANDOM: "a random word",
    Action.KEEP: "the word itself",
}


def powers(story):
    best = story.guesses.best
    top = max(guess.score for guess in best)
    points = [(guess.score, f"{guess.word} {number(guess.power)}") for guess in best]
    low = min(0.0, math.floor(min(guess.score for guess in best)))
    high = max(1.0, math.ceil(top))
    curve = Curve(
        math.exp, points, low, high, "score", "e to the score", math.exp(high)
    )
    rows = [
        [g.word, number(g.score), number(g.power), number(math.exp(g.score - top))]
        for g in best
    ]
    return Step(
        "Every score becomes positive: e to the score",
        [
            "Scores may be negative, and they do not add up to anything. So the number "
            "e = 2.718… is raised to each of them: the power is always above 0, grows "
            "with the score, and one more in score makes it e times as large.",
            "The program first subtracts the largest score from all of them. That "
            "divides all powers by the same number, so it changes none of the shares "
            "of the next step, but keeps every power at 1 or below, where nothing "
            "overflows.",
        ],
        [("Each word's score across, and e to the score upwards.", curve)],
        [score],
        table=Table(["word", "score", "e to the score", "largest subtracted"], rows),
        formula=f"e^{number(best[0].score)} = {number(best[0].power)}",
    )


def shares(story):
    found, best = story.guesses, story.guesses.best
    others = found.num_classes - len(best)
    parts = [(g.word, math.exp(-g.loss), share(g.loss)) for g in best]
    rows = [[g.word, number(g.power), share(g.loss)] for g in best]
    entries = "words" if story.subject.is_example else "entries of the vocabulary"
    if others:
        name, rest = f"{others:,} others", found.total - sum(g.power for g in best)
        parts.append((name, found.rest, number(found.rest)))
        rows.append([name, number(rest), number(found.rest)])
    rows.append(["all", number(found.total), "1"])
    return Step(
        "Divided by the sum: shares that add up to 1",
        [
            "Each power is divided by the sum of all of them. What comes out are "
            f"shares of one whole: the {found.num_classes:,} {entries} share it out "
            "among them, and what one gains others lose. They are the model's "
            "probabilities. Both steps together are called softmax.",
        ],
        [("The whole, shared out.", Whole([("", parts)]))],
        [masked_cross_entropy],
        table=Table(["word", "e to the score", "share p"], rows),
        formula=f"p({best[0].word}) = {number(best[0].power)} / {number(found.total)} "
        f"= {share(best[0].loss)}",
    )


def extremes(story):
    rows = [
        (
            f"{CASES[name]}scores {', '.join(number(g.score) for g in found.best)}",
            [(g.word, math.exp(-g.loss), share(g.loss)) for g in found.best],
        )
        for name, found in story.worked.items()
    ]
    tie, far = story.worked["tie"].best[0], story.worked["runaway"].best[0]
    return Step(
        "The tie and the runaway winner",
        [
            "Two cases show what such shares can do, for three words. Where all scores "
            "are equal, whatever they are, each word has an equal share: "
            f"1/{story.worked['tie'].num_classes}, or {share(tie.loss)}. "
            "Scores say nothing alone; only their differences count.",
            f"Where one is far ahead, it has nearly everything: {share(far.loss)}. "
            "Nearly, and never all of it: the other powers are above 0, so no share is "
            "ever exactly 1, nor exactly 0. A model can always still be surprised.",
        ],
        [("Three words, three sets of scores.", Whole(rows))],
        [masked_cross_entropy],
    )


def surprise(story):
    best, truth = story.guesses.best, story.truth
    points = [(math.exp(-g.loss), f"{g.word} {number(g.loss)}") for g in best]
    top = float(math.ceil(max(4.0, *(g.loss for g in best)) + 0.2))
    if story.subject.is_example:
        known = f"The hidden word was {truth.word}."
    else:
        known = (
            "What the hidden word was, only who wrote the text knows. The table has "
            "the loss for each answer; from here on the first guess, "
            f"{truth.word}, stands in for the truth, whose loss is the least of all."
        )
    tie = story.worked["tie"].best[0]
    return Step(
        "The loss: minus log p of the true word",
        [
            "Now the word is uncovered. Only one share counts: the one that the model "
            "had given to the true word. The loss is minus its natural logarithm. It "
            "is near 0 where the true word had nearly the whole, grows without end as "
            "its share goes to 0, and is what one may call surprise. Sharing out "
            f"evenly among three words loses {number(tie.loss)}, whatever the truth.",
            known,
            "Why the logarithm? Hidden words are guessed independently of each other, "
            "so that the probability of all truths together is the product of their "
            "shares. The logarithm makes a sum of it, one part for each hidden word.",
        ],
        [
            (
                "The share of the true word across, the loss upwards.",
                Curve(_loss, points, 0.0, 1.0, "p of the true word", "loss", top),
            )
        ],
        [masked_cross_entropy],
        table=Table(
            ["if the truth is", "its share p", "loss −log p"],
            [[g.word, share(g.loss), number(g.loss)] for g in best],
        ),
        formula=f"−log {share(truth.loss)} = {number(truth.loss)}",
    )


def _loss(p):
    return -math.log(p) if p > 0 else math.inf


def average(story):
    draws = story.draws
    first, last = draws[0], draws[-1]
    sizes = [len(d.losses) for d in draws]
    total, count = first.total + last.total, sizes[0] + sizes[-1]
    of_means = (first.mean + last.mean) / 2
    figures = [number(x) for x in last.losses]
    if story.subject.is_example:
        which = (
            "Take the three cases of step 8 as three hidden places, where mat is true."
        )
    else:
        which = (
            "Here words of this text itself were hidden by random numbers, few and "
            "many, each set a part of the next, and the model guessed them."
        )
    added = " + ".join(figures) if len(figures) <= 6 else number(last.total)
    added = f"({added})" if len(figures) <= 6 else added
    totals, means = [d.total for d in draws], [d.mean for d in draws]
    return Step(
        "Many hidden words, one number: the mean",
        [
            "A row has many hidden words, and a step of training many rows. The "
            f"objective is the mean of all their losses. {which}",
            "Why not the sum? It grows with every hidden word, however well guessed. "
            "Long texts would look worse than short ones, and steps with many hidden "
            "words would push harder. The mean is the loss of one guess, however many "
            "there are. (It still rises where so much is hidden that less "
            "is left to guess from: models are compared with the same share hidden.)",
            "And it is one mean: all losses added, divided once by their number. To "
            f"average the means of a row with {sizes[0]} and of a row with {sizes[-1]} "
            f"hidden words would give {number(of_means)} instead of "
            f"{number(total / count)}, and count each word of the first for more.",
        ],
        [
            (
                f"The loss at each of {sizes[-1]} hidden places.",
                Bars(last.words, last.losses, figures),
            ),
            (
                "The sum grows with every hidden word; the mean is that of one guess.",
                Bars(
                    [f"{kind} of {n}" for kind in ("sum", "mean") for n in sizes],
                    totals + means,
                    [number(x) for x in totals + means],
                ),
            ),
        ],
        [masked_cross_entropy, step.make_loss_fn],
        table=Table(
            ["hidden words", "sum of losses", "mean"],
            [
                [str(n), number(a), number(b)]
                for n, a, b in zip(sizes, totals, means, strict=True)
            ],
        ),
        formula=f"{added} / {sizes[-1]} = {number(last.mean)}",
    )


def corruption(story):
    subject, place, counts = story.subject, story.place, story.counts
    total = sum(counts.values())
    kept = 1 - subject.mask_frac - subject.random_frac
    fractions = (subject.mask_frac, subject.random_frac, kept)
    asked = dict(zip(SEEN, fractions, strict=True))
    rows = []
    for case in story.cases:
        kind = "hidden" if case.action == Action.MASK else "changed"
        row = [Box(word) for word in spell_all(subject.tokenizer, case.inputs_T)]
        row[place] = Box(row[place].word, f"target {case.target}", kind)
        rows.append(row)
    table = [
        [
            SEEN[case.action],
            percent(asked[case.action]),
            percent(counts[case.action] / total),
            case.target,
            number(case.loss),
        ]
        for case in story.cases
    ]
    return Step(
        "What stands at a hidden place: "
        + " / ".join(f"{100 * part:.3g}" for part in fractions),
        [
            "Whoever uses the model later often shows it texts without any [MASK]. A "
            "model that is only ever asked about [MASK]s need not know anything about "
            "the words that it sees. So a chosen place does not always get [MASK]: it "
            "may get a random word, or keep its own. The model is not told which words "
            "were chosen, so any word that it sees may be asked for.",
            "What never changes is the target: whatever stands there, the loss is "
            "taken against the word that was in the text. All three kinds belong to M "
            "and count alike.",
            f"Of {total:,} places that were drawn for this page, "
            f"{counts[Action.MASK]:,} got [MASK], {counts[Action.RANDOM]:,} a random "
            f"word, and {counts[Action.KEEP]:,} their own. The random word is drawn "
            "from all ordinary entries of the vocabulary, and now and then is the word "
            "itself.",
        ],
        [
            (
                "The same place, three ways.",
                Boxes(
                    rows, [f"{SEEN[case.action]} stands there" for case in story.cases]
                ),
            )
        ],
        [replace, make_corrupt],
        table=Table(["it sees", "asked for", "counted", "target", "loss"], table),
    )


def summary(story):
    best, last = story.guesses.best, story.draws[-1]
    names = [guess.word for guess in best]
    row = [
        Box(word, "", "hidden" if i in story.places else "")
        for i, word in enumerate(story.words)
    ]
    stages: list[tuple[str, Drawing]] = [
        ("Hide some words", Boxes([row])),
        (
            "Context makes the vector at the hidden place",
            Strips(["vector"], [story.guesses.hidden_D], SHOWN),
        ),
        (
            "Its dot products with the words' vectors are scores",
            Bars(names, [g.score for g in best], [number(g.score) for g in best]),
        ),
        (
            "e to the score, divided by the sum: probabilities",
            Bars(
                names, [math.exp(-g.loss) for g in best], [share(g.loss) for g in best]
            ),
        ),
        (
            f"Minus log of the share of the truth, {story.truth.word}",
            Bars(["loss"], [story.truth.loss], [number(story.truth.loss)], 0),
        ),
        (
            f"The mean over hidden words: here the {len(last.losses)} of step 10",
            Bars(["mean loss"], [last.mean], [number(last.mean)], 0),
        ),
    ]
    return Step(
        "All of it in one picture",
        [
            "Hide words; guess each from its context; lose the more, the less the "
            "truth was expected; average. Training repeats this, and after each batch "
            "changes the numbers of the model a little, so that the mean loss falls. "
            "Nobody labels anything: the text is its own answer.",
            "That is the whole objective. What a model has to know in order to guess "
            "well, grammar, meaning, facts, it has to learn on the way.",
        ],
        [("From the text to the loss.", Flow(stages))],
        [step.train_step],
        formula="loss = (1 / |M|) Σ over i in M of −log p(true word at i),  "
        f"here M = {set_of(story.places)}",
    )


LAST = [powers, shares, extremes, surprise, average, corruption, summary]
