"""Examples as rows: what they hold, and what happens to those that are too long."""

import numpy as np
import pytest

from mlm_jax.data import task_rows
from mlm_jax.data.examples import Answer, Example
from mlm_jax.data.tokenizer import Tokenizer
from mlm_jax.errors import InputError

TEXT = "the house was seen by a very old friend of hers, unbelievable"


@pytest.fixture(scope="module", params=["wordpiece", "bpe", "unigram"])
def tokenizer(request):
    return Tokenizer.train(
        [TEXT] * 4,
        kind=request.param,
        vocab_size=60 if request.param != "bpe" else 300,
        lowercase=True,
        strip_accents=True,
    )


def lay(kind, examples, tokenizer, row_length, *, stride=4, ids=None):
    encoded = task_rows.encode(kind, examples, tokenizer)
    return task_rows.lay(
        kind,
        examples,
        encoded,
        tokenizer=tokenizer,
        row_length=row_length,
        stride=stride,
        ids=ids or {},
    )


def row_text(rows, tokenizer, n):
    tokens = rows.columns["tokens"][n]
    return [int(t) for t in tokens[rows.columns["segment"][n] > 0]]


def test_a_pair_is_one_framed_segment(tokenizer):
    example = Example("here", ("the house", "a friend"), "yes")
    rows = lay("classification", [example], tokenizer, 32, ids={"no": 0, "yes": 1})
    special = tokenizer.special
    a, b = (e.tokens.tolist() for e in tokenizer.encode(["the house", "a friend"]))
    wanted = [special.cls, *a, special.sep, *b, special.sep]
    assert row_text(rows, tokenizer, 0) == wanted
    columns = rows.columns
    assert columns["segment"][0].tolist() == [1] * len(wanted) + [0] * (
        32 - len(wanted)
    )
    assert columns["position"][0, : len(wanted)].tolist() == list(range(len(wanted)))
    assert columns["tokens"][0, len(wanted) :].tolist() == [special.pad] * (
        32 - len(wanted)
    )
    assert columns["target"].tolist() == [1]
    assert rows.num_cut == 0


@pytest.mark.parametrize("lengths", [(9, 2), (2, 9), (7, 7), (20, 1)])
def test_b81_the_longer_of_a_pair_is_cut_and_sep_stays(tokenizer, lengths):
    special = tokenizer.special
    parts = tuple(np.full(n, special.unk, np.int32) for n in lengths)
    example = Example("here", ("", ""), "x")
    rows = task_rows.lay(
        "classification",
        [example],
        [task_rows.Encoded(parts, None)],
        tokenizer=tokenizer,
        row_length=12,
        stride=4,
        ids={"x": 0},
    )
    found = np.array(row_text(rows, tokenizer, 0))
    assert len(found) == min(12, sum(map(len, parts)) + 3)
    assert found[0] == special.cls and found[-1] == special.sep
    assert (found == special.sep).sum() == 2
    first = int(np.argmax(found == special.sep)) - 1
    second = len(found) - first - 3
    assert rows.num_cut == (sum(map(len, parts)) > 9)
    # As many of each as both may have, unless one has fewer.
    if rows.num_cut:
        assert (
            first == len(parts[0])
            or second == len(parts[1])
            or abs(first - second) <= 1
        )
        assert first + second == 9


def test_each_word_is_tagged_once_however_long_the_sentence(tokenizer):
    words = tuple("unbelievable friend of a house".split() * 5)
    tags = tuple("abcde"[n % 5] for n in range(len(words)))
    ids = {name: n for n, name in enumerate("abcde")}
    rows = lay("tagging", [Example("here", words, tags)], tokenizer, 24, ids=ids)
    n, position = np.nonzero(rows.columns["weight"])
    assert rows.places[n, position, 0].tolist() == list(range(len(words)))
    found = rows.columns["target"][n, position]
    assert found.tolist() == [ids[tag] for tag in tags]
    assert rows.num_rows > 1 and rows.num_cut == 1
    # The piece there is the first one of its word.
    for at, row, word in zip(position, n, words, strict=True):
        piece = tokenizer.piece(rows.columns["tokens"][row, at])
        assert piece.strip("#Ġ▁")[:1] in ("", word[0]) or piece == "[UNK]"


def test_a_word_of_nothing_has_a_tag_all_the_same(tokenizer):
    words = ("house", "\u200b", "friend")  # cleaned away by BERT's normaliser
    rows = lay(
        "tagging", [Example("here", words, ("x",) * 3)], tokenizer, 16, ids={"x": 0}
    )
    n, position = np.nonzero(rows.columns["weight"])
    assert rows.places[n, position, 0].tolist() == [0, 1, 2]


def test_a_word_longer_than_a_row_loses_its_end(tokenizer):
    words = ("friend", "unbelievable" * 9, "house")
    rows = lay(
        "tagging", [Example("here", words, ("x",) * 3)], tokenizer, 12, ids={"x": 0}
    )
    n, position = np.nonzero(rows.columns["weight"])
    assert rows.places[n, position, 0].tolist() == [0, 1, 2]


@pytest.mark.parametrize("stride", [1, 3, 100])
def test_windows_cover_the_context_and_tell_the_answer(tokenizer, stride):
    context = "the house was seen by a very old friend of hers"
    start, stop = context.index("very"), context.index("old") + 3
    example = Example("here", ("a", context), (Answer(start, "very old"),))
    rows = lay("spans", [example], tokenizer, 24, stride=stride)
    columns, covered = rows.columns, np.zeros(len(context), bool)
    answers = 0
    for n in range(rows.num_rows):
        found = rows.places[n]
        for begin, end in found[found[:, 0] >= 0]:
            covered[begin:end] = True
        first, last = columns["target"][n]
        if (first, last) != (0, 0):
            answers += 1
            text = context[found[first, 0] : found[last, 1]]
            assert text.strip() == "very old"
        else:  # some of the answer is not in the window
            inside = (found[:, 0] < stop) & (found[:, 1] > start)
            pieces = tokenizer.encode_with_offsets([context])[0][1]
            all_ = (pieces[:, 0] < stop) & (pieces[:, 1] > start)
            assert inside.sum() < all_.sum()
    assert answers >= 1
    assert covered[[i for i, c in enumerate(context) if c != " "]].all()
    assert rows.num_cut == (rows.num_rows > 1)


def test_a_question_without_an_answer_points_at_cls(tokenizer):
    rows = lay("spans", [Example("here", ("a", "the house"), ())], tokenizer, 16)
    assert rows.columns["target"].tolist() == [[0, 0]]


def test_a_long_question_leaves_room_for_the_context(tokenizer):
    example = Example("here", ("house " * 40, "the old friend"), ())
    rows = lay("spans", [example], tokenizer, 16)
    assert (rows.places[:, :, 0] >= 0).any(1).all()


def test_an_unknown_label_names_place_and_nearest(tokenizer):
    example = Example("file.jsonl line 3", ("a house",), "neutrl")
    ids = {"entailment": 0, "neutral": 1}
    with pytest.raises(
        InputError, match="file.jsonl line 3: label 'neutrl'.*'neutral'"
    ):
        lay("classification", [example], tokenizer, 16, ids=ids)
