"""The steps of the walkthrough from text to scores: words, pictures, tables, and the
functions that do it. `learning` has those that follow."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from mlm_jax.corruption import policy, select
from mlm_jax.data.tokenizer import Tokenizer
from mlm_jax.experiment.page import Table
from mlm_jax.explaining.facts import spell
from mlm_jax.explaining.pictures import Arrows, Bars, Box, Boxes, Drawing, Strips
from mlm_jax.explaining.words import added, number, set_of, share
from mlm_jax.loss_xla import score
from mlm_jax.model.attention import SelfAttention, attend
from mlm_jax.model.encoder import Encoder
from mlm_jax.model.head import MaskedLM, Transform

SHOWN = 24  # numbers of a vector


class Step(NamedTuple):
    title: str
    paragraphs: list[str]
    pictures: list[tuple[str, Drawing]]  # (caption, picture)
    functions: list[Callable]  # of this code, that do it
    table: Table | None = None
    formula: str = ""


def boxes(story):
    subject = story.subject
    row = [
        Box(word, str(token))
        for word, token in zip(story.words, subject.tokens_T, strict=True)
    ]
    framed = (
        ""
        if subject.is_example
        else " [CLS] and [SEP] mark where the text begins and ends. In many "
        "vocabularies a piece that begins with ## goes on with the word before it."
    )
    return Step(
        "Text becomes boxes with numbers",
        [
            "A computer cannot read. So the text is cut into pieces, words or parts of "
            "words, and each piece is put into a box. The number in the box says which "
            "entry of a fixed list it is, the vocabulary. Here the list has "
            f"{subject.tokenizer.vocab_size:,} entries, and the text {len(row)} boxes.",
            "The numbers are names and nothing more: 7 is not more than 6." + framed,
        ],
        [("The text in boxes; below each piece its number.", Boxes([row]))],
        [Tokenizer.encode_with_masks],
    )


def hidden_set(story):
    row = [
        Box(word, str(i), "hidden" if i in story.places else "")
        for i, word in enumerate(story.words)
    ]
    several = len(story.places) > 1
    return Step(
        "Some boxes are hidden: the set M",
        [
            "Now a game: some words are covered, each by the piece [MASK], and have to "
            "be guessed from the others. The places of the covered words are called M. "
            f"Counted from 0, here M = {set_of(story.places)}.",
            "In training nobody picks them: random numbers do, and often 15 of 100 "
            "words are chosen. The guesses at the places in M are all that is scored."
            + " The steps below follow the first of them."
            * several,
        ],
        [("Below each box its place. The dark ones are hidden.", Boxes([row]))],
        [policy.make_corrupt, select.order_units],
        formula=f"M = {set_of(story.places)},  |M| = {len(story.places)}",
    )


def vectors(story):
    width, subject = story.before_TxD.shape[1], story.subject
    if subject.is_example:
        origin = "These were chosen by hand."
        place = "Where it stands plays no role in this example."
        caption = "The vectors of the words."
    else:
        origin = (
            "They began at random, and training has changed them to what they are now."
        )
        place = (
            "Where it stands the model is told in another way (positions are "
            f"{subject.position} here)."
        )
        caption = (
            f"The first {min(width, SHOWN)} of {width} numbers of each box: blue is "
            "above 0, orange below."
        )
    return Step(
        "Each box gets a vector",
        [
            "To guess, the model needs more than a name. For each entry of the "
            f"vocabulary it has a row of {width} numbers, a vector. {origin}",
            "At this point a word has the same vector wherever it stands, and [MASK] "
            f"has one too: it says only that something is missing. {place}",
        ],
        [(caption, Strips(story.words, list(story.before_TxD), SHOWN))],
        [Encoder],
    )


def context(story):
    tokenizer = story.subject.tokenizer
    pair = [x_TxD[story.place] for x_TxD in (story.before_TxD, story.after_TxD)]
    others = np.flatnonzero(~tokenizer.is_special[story.subject.tokens_T]).tolist()
    influence = [float(story.influence_T[i]) for i in others]
    rows = [_row_of(tokens_T, tokenizer) for _, tokens_T, _ in story.contexts]
    labels = [f"{name}: best guess {_best(found)}" for name, _, found in story.contexts]
    if story.subject.is_example:
        functions: list[Callable] = [attend]
        how = (
            "In this example attention is as simple as it can be: it looks at all "
            "words alike, so the new vector is the mean of all vectors of the text. A "
            "trained model looks at some words more than at others, through several "
            "heads and layers, and transforms what it finds on the way."
        )
    else:
        functions = [Encoder, SelfAttention]
        how = (
            "Attention does it: at each place the model weighs all places by how well "
            "they fit what is looked for there, and adds up what they offer. It looks "
            "to both sides, and does so in each of its layers."
        )
    return Step(
        "Context changes the vectors",
        [
            "Now the boxes look at each other. Each vector is changed by the vectors "
            "around it, so that the one at the hidden place comes to hold what the "
            f"other words say about it. {how}",
            "With other words around it the same [MASK] becomes another vector, and "
            "the guess is another one. With every word hidden nothing is known but "
            "where the text begins and ends.",
        ],
        [
            (
                "The vector at the hidden place.",
                Strips(["before", "after"], pair, SHOWN),
            ),
            ("The same place in different texts.", Boxes(rows, labels)),
            (
                "How far the vector at the hidden place moves, in parts of its length, "
                "if that word is hidden too.",
                Bars(
                    [story.words[i] for i in others],
                    influence,
                    [number(x) for x in influence],
                ),
            ),
        ],
        functions,
    )


def _row_of(tokens_T, tokenizer):
    mask = tokenizer.special.mask
    return [Box(spell(tokenizer, t), "", "hidden" * bool(t == mask)) for t in tokens_T]


def _best(found):
    best = max(found.best, key=lambda guess: guess.score)
    ties = [g for g in found.best if np.isclose(g.score, best.score, atol=1e-6)]
    names = ", ".join(guess.word for guess in ties)
    return f"{names} ({share(best.loss)}{' each' * (len(ties) > 1)})"


def scores(story):
    found, best = story.guesses, story.guesses.best
    names, first = [guess.word for guess in best], best[0]
    width = len(found.hidden_D)
    product_D = first.vector_D * found.hidden_D
    vectors_D = [found.hidden_D, *(guess.vector_D for guess in best)]
    if story.subject.is_example:
        last = "Here nothing more happens: the bias is 0."
        functions: list[Callable] = [score]
        pairs = zip(found.hidden_D, first.vector_D, strict=True)
        sum_of = " + ".join(f"{number(a)} × {number(b)}" for a, b in pairs)
        caption = (
            "Vectors of two numbers can be drawn as arrows. One that points where the "
            "arrow of the hidden place does scores high, one at a right angle 0."
        )
        picture: Drawing = Arrows(["hidden place", *names], vectors_D)
    else:
        last = (
            "Before that the vector of the hidden place goes through one more small "
            "layer. After it a number for each word is added, its bias, which lets "
            "words be likelier or rarer whatever the context."
        )
        functions = [Transform, MaskedLM, score]
        sum_of = f"{number(product_D.sum())} {added(first.bias)}"
        caption = (
            f"The first {min(width, SHOWN)} of {width} pairs and their products; the "
            f"sum of all {width} products is {number(product_D.sum())}."
        )
        labels = ["hidden place", first.word, "product"]
        picture = Strips(labels, [*vectors_D[:2], product_D], SHOWN)
    figures = [number(guess.score) for guess in best]
    rows = [
        [g.word, number(g.vector_D @ found.hidden_D), number(g.bias), number(g.score)]
        for g in best
    ]
    return Step(
        "Scores: two vectors multiplied",
        [
            "Which words fit? The vector at the hidden place is compared with the "
            "vector of every word that could stand there: number by number multiplied, "
            "and all products added. That sum, the dot product, is large where both "
            "vectors are large in the same places with the same sign. It is the word's "
            "score.",
            "The vectors of the words are those of step 3: the table that reads also "
            f"answers. {last}",
        ],
        [
            (caption, picture),
            ("The score of each word.", Bars(names, [g.score for g in best], figures)),
        ],
        functions,
        table=Table(["word", "dot product", "bias", "score"], rows),
        formula=f"score({first.word}) = {sum_of} = {number(first.score)}",
    )


FIRST = [boxes, hidden_set, vectors, context, scores]
