"""The steps of the walkthrough from scores to the loss that training lowers."""

import math

from mlm_jax import step
from mlm_jax.corruption import replace
from mlm_jax.corruption.replace import Action
from mlm_jax.experiment.page import Table
from mlm_jax.explaining.pictures import Bars, Box, Boxes, Curve, Flow, Strips, Whole
from mlm_jax.explaining.steps import Step
from mlm_jax.explaining.words import number, percent, set_of, share
from mlm_jax.loss import masked_cross_entropy
from mlm_jax.loss_xla import score
from mlm_jax.step import make_loss_fn


def powers(story):
    found = story.guesses
    best = found.best
    top = max(guess.score for guess in best)
    points = [(guess.score, f"{guess.word} {number(guess.power)}") for guess in best]
    low = min(0.0, math.floor(min(guess.score for guess in best)))
    high = max(1.0, math.ceil(top))
    return Step(
        "Every score becomes positive: e to the score",
        [
            "Scores may be negative, and they do not add up to anything. So each is made "
            "the power of a number, e = 2.718…: it is always above 0, grows with the "
            "score, and one more in score makes it e times as large.",
            "The program first subtracts the largest score from all of them. That "
            "divides all powers by the same number, so it changes none of the shares of "
            "the next step, but keeps every power at 1 or below, where no computer "
            "overflows.",
        ],
        [("Each word's score across, and e to the score upwards.", Curve(
            math.exp, points, low, high, "score", "e to the score", math.exp(high)))],
        [score],
        tables=[Table(
            ["word", "score", "e to the score", "largest subtracted"],
            [[g.word, number(g.score), number(g.power),
              number(math.exp(g.score - top))] for g in best],
        )],
        formula=f"e^{number(best[0].score)} = {number(best[0].power)}",
    )  # fmt: skip


def shares(story):
    found = story.guesses
    best = found.best
    others = found.num_classes - len(best)
    parts = [(g.word, math.exp(-g.loss), share(g.loss)) for g in best]
    rows = [[g.word, number(g.power), share(g.loss)] for g in best]
    if others:
        parts.append((f"{others:,} others", found.rest, number(found.rest)))
        rest = found.total - sum(g.power for g in best)
        rows.append([f"{others:,} others", number(rest), number(found.rest)])
    rows.append(["all", number(found.total), "1"])
    return Step(
        "Divided by the sum: shares that add up to 1",
        [
            "Each power is divided by the sum of all of them. What comes out are shares "
            f"of one whole: the {found.num_classes:,} words share it out among them, and "
            "what one gains others lose. They are the model's probabilities. Both steps "
            "together are called softmax.",
        ],
        [("The whole, shared out.", Whole([("", parts)]))],
        [masked_cross_entropy],
        tables=[Table(["word", "e to the score", "share p"], rows)],
        formula=f"p({best[0].word}) = {number(best[0].power)} / {number(found.total)} "
        f"= {share(best[0].loss)}",
    )


def extremes(story):
    titles = {
        "close": "scores 2, 1, 0",
        "tie": "a tie: scores 0, 0, 0",
        "runaway": "a runaway winner: scores 10, 1, 0",
    }
    rows = [
        (titles[name], [(g.word, math.exp(-g.loss), share(g.loss)) for g in found.best])
        for name, found in story.worked.items()
    ]
    tie, far = story.worked["tie"].best[0], story.worked["runaway"].best[0]
    return Step(
        "The tie and the runaway winner",
        [
            "Two cases show what such shares can do, for three words. Where all scores "
            f"are equal, whatever they are, each word has an equal share: {share(tie.loss)}, "
            "a third. Scores say nothing alone; only their differences count.",
            f"Where one is far ahead, it has nearly everything: {share(far.loss)}. Nearly, "
            "and never all of it: the other powers are above 0, so no share is ever "
            "exactly 1, nor exactly 0. A model can always still be surprised.",
        ],
        [("Three words, three sets of scores.", Whole(rows))],
        [masked_cross_entropy],
    )


def surprise(story):
    found = story.guesses
    best = found.best
    truth = story.truth
    points = [(math.exp(-g.loss), f"{g.word} {number(g.loss)}") for g in best]
    top = math.ceil(max(4.0, *(g.loss for g in best)) + 0.2)
    known = (
        f"The hidden word was {truth.word}."
        if story.subject.is_example
        else "What the hidden word was, only who wrote the text knows. The table has "
        f"the loss for each answer; below, the first guess, {truth.word}, stands in for "
        "the truth, so that the loss there is the least that it could be."
    )
    tie = story.worked["tie"].best[0]
    return Step(
        "The loss: minus log p of the true word",
        [
            "Now the word is uncovered. Only one share counts: the one that the model "
            "had given to the true word. The loss is minus its natural logarithm. It is "
            "near 0 where the true word had nearly the whole, grows without end as its "
            "share goes to 0, and is what one may call surprise. Sharing out evenly "
            f"among three words loses {number(tie.loss)}, whatever the truth.",
            known,
            "Why the logarithm? Probabilities of independent guesses multiply, and so "
            "their logarithms add: the loss of a whole text is the sum of its parts.",
        ],
        [("The share of the true word across, the loss upwards.", Curve(
            lambda p: -math.log(max(p, 1e-12)), points, 0.0, 1.0, "p of the true word",
            "loss", float(top)))],
        [masked_cross_entropy],
        tables=[Table(
            ["if the truth is", "its share p", "loss −log p"],
            [[g.word, share(g.loss), number(g.loss)] for g in best],
        )],
        formula=f"−log {share(truth.loss)} = {number(truth.loss)}",
    )  # fmt: skip


def average(story):
    draws = story.draws
    first, last = draws[0], draws[-1]
    rows = [[str(len(d.losses)), number(d.total), number(d.mean)] for d in draws]
    total = first.total + last.total
    count = len(first.losses) + len(last.losses)
    of_means = (first.mean + last.mean) / 2
    what = (
        "Take the three cases of step 8 as three hidden places, the true word the first."
        if story.subject.is_example
        else "Here words of this text itself were hidden by random numbers, few and "
        "many, and the model had to guess them. The sets are nested: what is hidden "
        "once stays hidden."
    )
    return Step(
        "Many hidden words, one number: the mean",
        [
            "A row has many hidden words, and a step of training many rows. The "
            f"objective is the mean of all their losses. {what}",
            "Why not the sum? It grows with the number of hidden words, as if guessing "
            "were worse where more is asked. The mean can be compared between few and "
            "many, between long and short texts, and between one set of masks and "
            "another.",
            "And it is one mean: all losses added, divided once by their number. To "
            f"average the means of a row with {len(first.losses)} and of a row with "
            f"{len(last.losses)} hidden words would give {number(of_means)} instead of "
            f"{number(total / count)}, and let each word of the shorter row count more.",
        ],
        [
            ("The loss at each hidden place of the last row of the table.", Bars(
                last.words, last.losses, [number(x) for x in last.losses])),
            ("The sum grows with what is asked; the mean stays comparable.", Bars(
                [f"{kind} of {len(d.losses)}" for kind in ("sum", "mean") for d in draws],
                [d.total for d in draws] + [d.mean for d in draws],
                [number(d.total) for d in draws] + [number(d.mean) for d in draws],
            )),
        ],
        [masked_cross_entropy, make_loss_fn],
        tables=[Table(["hidden words", "sum of losses", "mean"], rows)],
        formula=f"({' + '.join(map(number, last.losses))}) / {len(last.losses)} = "
        f"{number(last.mean)}" if len(last.losses) <= 6 else
        f"{number(last.total)} / {len(last.losses)} = {number(last.mean)}",
    )  # fmt: skip


NAMES = {
    Action.MASK: "[MASK] stands there",
    Action.RANDOM: "a random word stands there",
    Action.KEEP: "the word itself stands there",
}


def corruption(story):
    subject, place = story.subject, story.place
    total = sum(story.counts.values())
    asked = {
        Action.MASK: subject.mask_frac,
        Action.RANDOM: subject.random_frac,
        Action.KEEP: 1 - subject.mask_frac - subject.random_frac,
    }
    from mlm_jax.explaining.facts import spell_all

    kinds = {Action.MASK: "hidden", Action.RANDOM: "changed", Action.KEEP: "changed"}
    rows = [
        [
            Box(word, f"target {case.target}" if i == place else "",
                kinds[case.action] if i == place else "")
            for i, word in enumerate(spell_all(subject.tokenizer, case.inputs_T))
        ]
        for case in story.cases
    ]  # fmt: skip
    table = Table(
        ["what the model sees", "asked for", "counted", "target", "loss"],
        [
            [NAMES[case.action], percent(asked[case.action]),
             percent(story.counts[case.action] / total), case.target,
             number(case.loss)]
            for case in story.cases
        ],
    )  # fmt: skip
    split = " / ".join(f"{100 * part:.3g}" for part in asked.values())
    return Step(
        f"What stands at a hidden place: {split}",
        [
            "Whoever uses the model later shows it texts without any [MASK]. If it had "
            "to guess at [MASK]s only, it could do nothing at all with the other words. "
            "So of the chosen places only most get [MASK]; some get a random word, and "
            "some keep their own. The model is not told which is which, so it has to "
            "form an opinion about every word that it sees.",
            "What never changes is the target: whatever stands there, the loss is taken "
            "against the word that was in the text. All three kinds belong to M and "
            "count alike.",
            f"Of {total:,} places that were drawn, "
            + ", ".join(f"{n:,}" for n in story.counts.values())
            + " got [MASK], a random word, and their own. The random word is drawn from "
            "all ordinary entries of the vocabulary, and now and then is the word "
            "itself.",
        ],
        [("The same place, three ways.", Boxes(
            rows, [NAMES[case.action] for case in story.cases]))],
        [replace.replace, policy_of()],
        tables=[table],
    )  # fmt: skip


def policy_of():
    from mlm_jax.corruption.policy import make_corrupt

    return make_corrupt


def summary(story):
    best = story.guesses.best
    names = [guess.word for guess in best]
    row = [
        Box(word, "", "hidden" if i in story.places else "")
        for i, word in enumerate(story.words)
    ]
    last = story.draws[-1]
    stages = [
        ("Hide some words", Boxes([row])),
        ("Context makes the vector at the hidden place",
         Strips(["vector"], [story.guesses.hidden_D])),
        ("Its dot products with the words' vectors are scores",
         Bars(names, [g.score for g in best], [number(g.score) for g in best])),
        ("e to the score, divided by the sum: probabilities",
         Bars(names, [math.exp(-g.loss) for g in best], [share(g.loss) for g in best])),
        (f"Minus log of the true word's ({story.truth.word})",
         Bars(["loss"], [story.truth.loss], [number(story.truth.loss)], 0)),
        (f"The mean over all hidden words ({len(last.losses)} in step 10)",
         Bars(["mean loss"], [last.mean], [number(last.mean)], 0)),
    ]  # fmt: skip
    return Step(
        "All of it in one picture",
        [
            "Hide words; guess each from its context; lose the more, the less the truth "
            "was expected; average. Training repeats this, and after each batch changes "
            "every number of the model a little, in the direction in which the mean loss "
            "falls. Nobody labels anything: the text is its own answer.",
            "That is the whole objective. What a model has to know in order to guess "
            "well, grammar, meaning, facts, it has to learn on the way.",
        ],
        [("From the text to the loss.", Flow(stages))],
        [step.train_step],
        formula=f"loss = (1 / |M|) Σ over i in M of −log p(true word at i),  "
        f"here M = {set_of(story.places)}",
    )


LAST = [powers, shares, extremes, surprise, average, corruption, summary]
