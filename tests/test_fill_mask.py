"""Fill-mask: the mask that a user types is one mask, and the answer is the model's."""

import numpy as np
import pytest

from mlm_jax.errors import InputError
from mlm_jax.tasks.fill_mask import describe, fill_mask
from tests.reading import ROW_LENGTH, log_p_NxV, make_reader


@pytest.fixture(scope="module")
def reader():
    return make_reader()


def fill(reader, text, **settings):
    return fill_mask(reader, [text], **settings)[0]


def masked(reader, text):
    """Returns the tokens of a text with [CLS] and [SEP], and the places of its masks"""
    tokens_T = reader.frame(reader.tokenizer.encode_with_masks(text).tokens)
    return tokens_T, np.flatnonzero(tokens_T == reader.tokenizer.special.mask)


def test_b26_the_typed_mask_is_one_mask(reader):
    (choices,) = fill(reader, "hello [MASK] world")
    assert len(choices) == 5
    ids = reader.tokenizer.encode_with_masks("hello [MASK] world").tokens
    assert (ids == reader.tokenizer.special.mask).sum() == 1


def test_b26_lower_case_is_text_and_says_so(reader):
    with pytest.raises(InputError, match=r"no \[MASK\] in 'hello \[mask\] world'"):
        fill(reader, "hello [mask] world")


def test_b78_probabilities_are_those_of_the_whole_vocabulary(reader):
    """All of it sums to 1, best first; padding of the vocabulary is never offered."""
    everything = reader.tokenizer.vocab_size
    assert reader.params["bias"].shape[0] > everything
    (choices,) = fill(reader, "[MASK] world", top=everything + 40)
    assert len(choices) == everything
    p = np.array([p for _, p in choices])
    assert p.sum() == pytest.approx(1, abs=1e-5)
    assert (np.diff(p) <= 0).all()
    assert {piece for piece, _ in choices} == {
        reader.tokenizer.piece(id_) for id_ in range(everything)
    }


def test_each_of_several_masks_is_filled_while_the_others_are_hidden(reader):
    text = "[MASK] world [MASK] wide"
    filled = fill(reader, text, top=3)
    tokens_T, places = masked(reader, text)
    for place, choices in zip(places, filled, strict=True):
        p_V = np.exp(log_p_NxV(reader, [tokens_T], place)[0])
        best = np.argsort(-p_V)[:3]
        assert [c.text for c in choices] == [reader.tokenizer.piece(i) for i in best]
        np.testing.assert_allclose([c.p for c in choices], p_V[best], rtol=1e-4)
    lines = describe(text, filled).split("\n")
    assert lines[0] == text
    assert lines[1].startswith("  [MASK] 1: ") and lines[2].startswith("  [MASK] 2: ")


@pytest.mark.parametrize("kind, score", [("wordpiece", "mean"), ("bpe", "sum")])
def test_whole_words_are_the_best_of_all_words(kind, score):
    """With every beginning going on, against every word of one or two pieces."""
    reader = make_reader(kind)
    tokenizer, text = reader.tokenizer, "hello wide [MASK], is [MASK]"
    later = np.flatnonzero(tokenizer.continues_word)
    first = np.flatnonzero(~tokenizer.continues_word & ~tokenizer.is_special)
    tokens_T, places = masked(reader, text)
    filled = fill(reader, text, top=len(first), max_pieces=2, score=score)
    for place, choices in zip(places, filled, strict=True):
        one_V = log_p_NxV(reader, [tokens_T], place)[0]
        found = {(int(id_),): one_V[id_] for id_ in first}
        two_T = np.insert(tokens_T, place, tokenizer.special.mask)
        first_V = log_p_NxV(reader, [two_T], place)[0]
        filled_FxT = np.repeat(two_T[None], len(first), axis=0)
        filled_FxT[:, place] = first
        second_FxV = log_p_NxV(reader, filled_FxT, place + 1)
        for a, second_V in zip(first, second_FxV, strict=True):
            for b in later:
                total = first_V[a] + second_V[b]
                found[int(a), int(b)] = total / 2 if score == "mean" else total
        best = sorted(found.values(), reverse=True)[: len(first)]
        np.testing.assert_allclose([c.p for c in choices], np.exp(best), rtol=1e-4)
        word = max(found, key=found.__getitem__)
        assert choices[0].text == tokenizer.decode(word).strip()


def test_the_company_of_a_text_does_not_change_its_answer(reader):
    texts = ["[MASK] world", "the [MASK] is wide and the word is [MASK]", "[MASK]"]
    spread = fill_mask(make_reader(devices=4, batch_tokens=64), texts, max_pieces=2)
    for text, other in zip(texts, spread, strict=True):
        for a, b in zip(fill(reader, text, max_pieces=2), other, strict=True):
            assert [c.text for c in a] == [c.text for c in b]
            np.testing.assert_allclose([c.p for c in a], [c.p for c in b], rtol=1e-4)


@pytest.mark.parametrize("pieces, tokens", [(None, 35), (3, 37)])
def test_b81_a_text_that_is_too_long_is_refused_with_both_numbers(
    reader, pieces, tokens
):
    """With room for all pieces of a word; and what fits just so is read."""
    text = "[MASK]" + " wide" * ROW_LENGTH
    with pytest.raises(InputError, match=f"has {tokens} tokens.* at most 32"):
        fill(reader, text, max_pieces=pieces)
    spare = 2 + (pieces or 1)
    assert fill(reader, "[MASK]" + " wide" * (ROW_LENGTH - spare), max_pieces=pieces)


def test_a_score_of_another_name_is_refused(reader):
    with pytest.raises(InputError, match="score='max'; expected one of mean, sum"):
        fill(reader, "[MASK]", score="max")
