"""Pseudo-log-likelihood: the definition, by a slow loop and by another library."""

import numpy as np
import pytest

from mlm_jax.errors import InputError
from mlm_jax.tasks.likelihood import (
    KINDS,
    Likelihood,
    likelihoods,
    masked_copies,
    pseudo_log_likelihood,
    pseudo_perplexity,
)
from tests.reading import ROW_LENGTH, log_p_NxV, make_reader

# Words of one piece, of two (word ##lo) and three (hello ##r ##ld).
TEXTS = ["the wordlo is hellorld, hello", "is the world", "", "wide"]


@pytest.fixture(scope="module")
def reader():
    return make_reader()


def slowly(reader, text, kind):
    """Returns log p of each token, by a loop: one position and one row at a time."""
    encoded = reader.tokenizer.encode([text])[0]
    tokens_T = reader.frame(encoded.tokens)
    word_T = np.cumsum(encoded.word_start)
    found = []
    for t in range(len(encoded.tokens)):
        masked_T = tokens_T.copy()
        for s in range(len(encoded.tokens)):
            hidden = {
                "original": s == t,
                "within_word_l2r": word_T[s] == word_T[t] and s >= t,
                "whole_word": word_T[s] == word_T[t],
            }[kind]
            if hidden:
                masked_T[s + 1] = reader.tokenizer.special.mask
        log_p_V = log_p_NxV(reader, [masked_T], t + 1)[0]
        found.append(log_p_V[encoded.tokens[t]])
    return np.array(found)


@pytest.mark.parametrize("kind", KINDS)
def test_equals_a_slow_loop(reader, kind):
    found = pseudo_log_likelihood(reader, TEXTS, kind=kind)
    for text, likelihood in zip(TEXTS, found, strict=True):
        expected_T = slowly(reader, text, kind)
        np.testing.assert_allclose(likelihood.log_p_T, expected_T, rtol=1e-5, atol=1e-5)
        assert likelihood.pll == pytest.approx(expected_T.sum(), abs=1e-4)
    assert found[2].pll == 0 and len(found[2].tokens_T) == 0


# minicons 0.3.39 (`MaskedLMScorer`, `PLL_metric`) with transformers 5.24.0, whose
# `BertForMaskedLM` was given the parameters of `make_reader()`: of TEXTS but the empty
# one the sums, and the tokens of the first.
MINICONS = {
    "original": (
        [-46.40873336791992, -12.507821083068848, -4.403964042663574],
        [-4.465375900268555, -5.176100254058838, -5.91653299331665, -6.536334037780762]
        + [-6.8391828536987305, -3.9647202491760254, -4.429771900177002]
        + [-2.266663074493408, -6.814050197601318],
    ),
    "within_word_l2r": (
        [-46.53812026977539, -12.507821083068848, -4.403964042663574],
        [-4.465375900268555, -5.270096778869629, -5.91653299331665, -6.536334037780762]
        + [-6.876554489135742, -3.9627418518066406, -4.429771900177002]
        + [-2.266663074493408, -6.814050197601318],
    ),
}


@pytest.mark.parametrize("kind", MINICONS)
def test_equals_minicons(reader, kind):
    plls, log_p_T = MINICONS[kind]
    found = pseudo_log_likelihood(reader, [t for t in TEXTS if t], kind=kind)
    np.testing.assert_allclose([f.pll for f in found], plls, atol=2e-5)
    np.testing.assert_allclose(found[0].log_p_T, log_p_T, atol=1e-5)


def test_b86_what_is_hidden_for_each_piece(reader):
    """Words of 1, 2 and 3 pieces; [CLS] and [SEP] are neither hidden nor counted."""
    encoded = reader.tokenizer.encode(["the wordlo hellorld"])[0]
    pieces = [reader.tokenizer.piece(id_) for id_ in encoded.tokens]
    assert pieces == ["the", "word", "##lo", "hello", "##r", "##ld"]
    sizes = [1, 2, 3]
    ends = np.cumsum(sizes)
    hidden_by_hand = {kind: [] for kind in KINDS}
    for begin, end in zip([0, *ends[:-1]], ends, strict=True):
        for t in range(begin, end):
            hidden_by_hand["original"].append({t})
            hidden_by_hand["within_word_l2r"].append(set(range(t, end)))
            hidden_by_hand["whole_word"].append(set(range(begin, end)))
    for kind in KINDS:
        inputs_TxT, predict_T, targets_T = masked_copies(reader, encoded, kind)
        is_mask_TxT = inputs_TxT == reader.tokenizer.special.mask
        hidden = [set((np.flatnonzero(is_T) - 1).tolist()) for is_T in is_mask_TxT]
        assert hidden == hidden_by_hand[kind]
        framed_T = reader.frame(encoded.tokens)
        assert (np.where(is_mask_TxT, framed_T[None], inputs_TxT) == framed_T).all()
        assert predict_T.tolist() == list(range(1, len(pieces) + 1))
        assert targets_T.tolist() == encoded.tokens.tolist()


def test_b86_words_of_one_piece_are_the_same_in_every_kind(reader):
    text = "hello the world is wide"
    encoded = reader.tokenizer.encode([text])[0]
    assert encoded.word_start.all()
    plls = {pseudo_log_likelihood(reader, [text], kind=k)[0].pll for k in KINDS}
    assert len(plls) == 1
    # And of several they are not: that is what the kinds are for.
    plls = {pseudo_log_likelihood(reader, TEXTS[:1], kind=k)[0].pll for k in KINDS}
    assert len(plls) == len(KINDS)


@pytest.mark.parametrize("batch_tokens, devices", [(8, 1), (100, 1), (64, 8)])
def test_b86_batch_size_padding_and_devices_do_not_show(reader, batch_tokens, devices):
    other = make_reader(devices=devices, batch_tokens=batch_tokens)
    for text in TEXTS:
        together = pseudo_log_likelihood(other, [*TEXTS, text * 2, text])[-1]
        (alone,) = pseudo_log_likelihood(reader, [text])
        np.testing.assert_allclose(
            together.log_p_T, alone.log_p_T, rtol=1e-5, atol=1e-5
        )


def test_b78_the_padding_of_the_vocabulary_has_no_probability(reader):
    """Large logits there change nothing."""
    bias_V = np.array(reader.params["bias"])
    bias_V[reader.tokenizer.vocab_size :] = 50
    other = make_reader(params=reader.params | {"bias": bias_V})
    assert len(bias_V) > reader.tokenizer.vocab_size
    a, b = (pseudo_log_likelihood(r, TEXTS[:1])[0].pll for r in (reader, other))
    assert a == pytest.approx(b, abs=1e-4)


def test_texts_are_told_in_order_and_all_of_their_tokens(reader):
    ticks = []
    encoded = reader.encode([*TEXTS, *TEXTS])
    found = list(likelihoods(reader, encoded, tick=ticks.append))
    assert sum(ticks) == sum(len(text.tokens) for text in encoded)
    assert [f.pll for f in found[:4]] == [f.pll for f in found[4:]]  # bit for bit
    for text, likelihood in zip(encoded, found, strict=True):
        assert text.tokens.tolist() == likelihood.tokens_T.tolist()


def test_pseudo_perplexity_is_one_sum_over_one_count():
    """4 nats on two tokens and 8 on six: exp(12 / 8), not the mean of two of them."""
    corpus = [
        Likelihood(np.zeros(2, int), np.array([-1.0, -3.0])),
        Likelihood(np.zeros(0, int), np.zeros(0)),
        Likelihood(np.zeros(6, int), np.full(6, -8 / 6)),
    ]
    assert pseudo_perplexity(corpus) == pytest.approx(np.exp(1.5))
    assert np.isnan(pseudo_perplexity(corpus[1:2]))


def test_b81_a_text_that_is_too_long_is_refused_with_both_numbers(reader):
    texts = ["wide", "wide " * ROW_LENGTH]
    with pytest.raises(InputError, match="text 2, 'wide .* 34 tokens.* at most 32"):
        pseudo_log_likelihood(reader, texts)
    full = "wide " * (ROW_LENGTH - 2)
    (likelihood,) = pseudo_log_likelihood(reader, [full])
    np.testing.assert_allclose(
        likelihood.log_p_T, slowly(reader, full, "original"), atol=1e-5
    )
