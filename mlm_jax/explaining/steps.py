"""The steps of the walkthrough from text to scores: words, pictures, tables, and the
functions that do it. `learning` has those that follow."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from mlm_jax.corruption import policy, select
from mlm_jax.data.tokenizer import Tokenizer
from mlm_jax.experiment.page import Table
from mlm_jax.explaining.pictures import Arrows, Bars, Box, Boxes, Drawing, Strips
from mlm_jax.explaining.words import number, set_of, share
from mlm_jax.model.attention import SelfAttention, attend
from mlm_jax.model.encoder import Encoder
from mlm_jax.model.head import MaskedLM, Transform


class Step(NamedTuple):
    title: str
    paragraphs: list[str]
    pictures: list[tuple[str, Drawing]]  # (caption, picture)
    functions: list[Callable]  # of this code, that do it
    tables: list[Table] = []
    formula: str = ""


def boxes(story):
    tokenizer = story.subject.tokenizer
    row = [
        Box(word, str(token))
        for word, token in zip(story.words, story.subject.tokens_T, strict=True)
    ]
    framed = (
        ""
        if story.subject.is_example
        else " [CLS] and [SEP] mark where the text begins and ends, and a piece that "
        "begins with ## goes on with the word before it, in vocabularies that write so."
    )
    return Step(
        "Text becomes boxes with numbers",
        [
            "A computer cannot read. So the text is cut into pieces, words or parts of "
            "words, and each piece is put into a box. The number in the box says which "
            f"entry of a fixed list it is, the vocabulary. Here the list has "
            f"{tokenizer.vocab_size:,} entries, and the text {len(row)} boxes.",
            "The numbers are names and nothing more: 7 is not more than 6." + framed,
        ],
        [("The text in boxes; below each piece its number in the vocabulary.",
          Boxes([row]))],
        [Tokenizer.encode_with_masks],
    )  # fmt: skip


def hidden_set(story):
    row = [
        Box(word, str(i), "hidden" if i in story.places else "")
        for i, word in enumerate(story.words)
    ]
    one = len(story.places) == 1
    return Step(
        "Some boxes are hidden: the set M",
        [
            "Now a game: some words are covered, each by the piece [MASK], and have to "
            "be guessed from the others. The places of the covered words are called M. "
            f"Counted from 0, here M = {set_of(story.places)}.",
            "In training nobody picks them: a row's random numbers do, anew each time "
            "the row is met, and usually about 15 of 100 words are hidden. The guesses "
            "at the places in M are all that is scored; what the model makes of words "
            "that it can see does not count."
            + ("" if one else " The steps below follow the first hidden place."),
        ],
        [("Below each box its place. The dark ones are hidden.", Boxes([row]))],
        [policy.make_corrupt, select.order_units],
        formula=f"M = {set_of(story.places)},  |M| = {len(story.places)}",
    )


def vectors(story):
    width = story.before_TxD.shape[1]
    subject = story.subject
    return Step(
        "Each box gets a vector",
        [
            "To guess, the model needs more than a name. For each entry of the "
            f"vocabulary it has a row of {width} numbers, a vector. "
            + (
                "These here were chosen by hand."
                if subject.is_example
                else "They began at random, and training has changed them to what "
                "they are now."
            ),
            "At this point a word has the same vector wherever it stands, and [MASK] "
            "has one too: it says only that something is missing.",
        ],
        [(
            f"The first {min(width, 24)} of {width} numbers of each box: blue is above "
            "0, orange below." if width > 4 else "The vectors of the words.",
            Strips(story.words, list(story.before_TxD)),
        )],
        [Encoder],
    )  # fmt: skip


def context(story):
    after = story.after_TxD[story.place]
    before = story.before_TxD[story.place]
    influence = [float(x) for x in story.influence_T]
    rows = [
        _context_row(subject_words, tokens, story)
        for subject_words, tokens, _ in story.contexts
    ]
    labels = [
        f"{name}: best guess {found_best(found)}" for name, _, found in story.contexts
    ]
    if story.subject.is_example:
        how = (
            "In this example attention is as simple as it can be: it looks at all "
            "words alike, so the new vector is the mean of all vectors of the text. A "
            "trained model looks at some words more than at others, through many heads "
            "and in several layers, and transforms what it finds on the way."
        )
        functions = [attend]
    else:
        how = (
            "Attention does it: at each place the model weighs all other places by how "
            "well they fit what is looked for there, and adds up what they offer. It "
            "looks to both sides, and does it once in each of its layers."
        )
        functions = [Encoder, SelfAttention]
    return Step(
        "Context changes the vectors",
        [
            "Now the boxes look at each other. Each vector is changed by the vectors "
            "around it, so that the one at the hidden place comes to hold what the "
            "other words say about it. " + how,
            "With other words around it the same [MASK] becomes another vector, and the "
            "guess is another one. With every word hidden nothing is known but that "
            "there is a text.",
        ],
        [
            ("The vector at the hidden place.",
             Strips(["before", "after"], [before, after])),
            ("The same place in different texts.", Boxes(rows, labels)),
            ("How far the vector at the hidden place moves, in parts of its length, if "
             "that word is hidden too.",
             Bars(story.words, influence, [number(x) for x in influence], story.place)),
        ],
        functions,
    )  # fmt: skip


def _context_row(name, tokens_T, story):
    del name
    tokenizer = story.subject.tokenizer
    from mlm_jax.explaining.facts import spell_all

    return [
        Box(word, "", "hidden" if i == story.place else "")
        for i, word in enumerate(spell_all(tokenizer, tokens_T))
    ]


def found_best(found):
    best = found.best[0]
    best = max(found.best, key=lambda guess: guess.score) if best else best
    ties = [g for g in found.best if np.isclose(g.score, best.score, atol=1e-6)]
    names = ", ".join(guess.word for guess in ties)
    each = " each" if len(ties) > 1 else ""
    return f"{names} ({share(best.loss)}{each})"


def scores(story):
    best = story.guesses.best
    hidden_D = story.guesses.hidden_D
    is_example = story.subject.is_example
    width = len(hidden_D)
    products = [best[0].vector_D * hidden_D]
    names = [guess.word for guess in best]
    figures = [number(guess.score) for guess in best]
    pictures = [
        ("The score of each word.", Bars(names, [g.score for g in best], figures))
    ]
    vectors_D = [hidden_D, *(guess.vector_D for guess in best)]
    if width == 2:
        labels = ["hidden place", *names]
        pictures.insert(0, (
            "Vectors of two numbers can be drawn as arrows. One that points where the "
            "arrow of the hidden place does scores high, one at a right angle 0.",
            Arrows(labels, vectors_D),
        ))  # fmt: skip
    else:
        labels = ["hidden place", _cut(names[0]), "product"]
        pictures.insert(0, (
            f"The first {min(width, 24)} of {width} pairs and their products; the sum of "
            f"all {width} is {number(products[0].sum())}.",
            Strips(labels, [hidden_D, best[0].vector_D, *products]),
        ))  # fmt: skip
    rows = [
        [g.word, number(g.vector_D @ hidden_D), number(g.bias), number(g.score)]
        for g in best
    ]
    last = (
        "Here nothing more happens: the bias is 0."
        if is_example
        else "Before that the vector of the hidden place goes through one more small "
        "layer. After it a number for each word is added, its bias, which lets words be "
        "likelier or rarer whatever the context."
    )
    if is_example:
        h, v = hidden_D, best[0].vector_D
        pairs = " + ".join(
            f"{number(a)} × {number(b)}" for a, b in zip(h, v, strict=True)
        )
        formula = f"score({best[0].word}) = {pairs} = {number(best[0].score)}"
    else:
        formula = (
            f"score({best[0].word}) = {number(products[0].sum())} + "
            f"{number(best[0].bias)} = {number(best[0].score)}"
        )
    return Step(
        "Scores: two vectors multiplied",
        [
            "Which words fit? The vector at the hidden place is compared with the vector "
            "of every word that could stand there: number by number multiplied, and all "
            "products added. That sum, the dot product, is large where both vectors are "
            "large in the same places with the same sign. It is the word's score.",
            "The vectors of the words are the same as in step 3: the table that reads "
            "also answers. " + last,
        ],
        pictures,
        [MaskedLM, Transform],
        tables=[Table(["word", "dot product", "bias", "score"], rows)],
        formula=formula,
    )


def _cut(word):
    return word if len(word) <= 10 else word[:9] + "…"


FIRST = [boxes, hidden_set, vectors, context, scores]
