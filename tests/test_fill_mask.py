"""Fill-mask: the mask that a user types is one mask, and the answer is the model's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mlm_jax.data.tokenizer import Tokenizer
from mlm_jax.errors import InputError
from mlm_jax.tasks.fill_mask import describe, fill_mask
from tests.helpers import tiny_model

ROW_LENGTH = 16
TEXT = ["hello wide world, the world is wide and the word is hello"] * 4


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(
        TEXT, kind="wordpiece", vocab_size=60, lowercase=True, strip_accents=True
    )


@pytest.fixture(scope="module")
def model_and_params(tokenizer):
    model = tiny_model(
        vocab_size=tokenizer.vocab_size,
        row_length=ROW_LENGTH,
        num_layers=1,
        width=16,
        mlp_width=32,
        dropout=0.5,
        attention_dropout=0.5,
    )
    row = jnp.zeros((1, ROW_LENGTH), jnp.int32)
    params = model.init(jax.random.key(0), row, row, row, row)["params"]
    return model, jax.tree.map(
        lambda leaf: leaf + 0.1 * jnp.arange(leaf.size).reshape(leaf.shape) % 0.37,
        params,
    )


def fill(model_and_params, tokenizer, text, top=5):
    model, params = model_and_params
    return fill_mask(model, params, tokenizer, text, row_length=ROW_LENGTH, top=top)


def test_b26_the_typed_mask_is_one_mask(model_and_params, tokenizer):
    (choices,) = fill(model_and_params, tokenizer, "hello [MASK] world")
    assert len(choices) == 5
    ids = tokenizer.encode_with_masks("hello [MASK] world").tokens
    assert (ids == tokenizer.special.mask).sum() == 1


def test_b26_lower_case_is_text_and_says_so(model_and_params, tokenizer):
    with pytest.raises(InputError, match=r"no \[MASK\] in 'hello \[mask\] world'"):
        fill(model_and_params, tokenizer, "hello [mask] world")


def test_probabilities_are_those_of_the_whole_vocabulary(model_and_params, tokenizer):
    """All of it sums to 1, best first; padding of the vocabulary is never offered."""
    everything = tokenizer.vocab_size
    (choices,) = fill(model_and_params, tokenizer, "[MASK] world", top=everything)
    p = np.array([p for _, p in choices])
    assert p.sum() == pytest.approx(1, abs=1e-5)
    assert (np.diff(p) <= 0).all()
    assert {piece for piece, _ in choices} == {
        tokenizer.piece(id_) for id_ in range(everything)
    }


def test_several_masks_each_have_their_own_answer(model_and_params, tokenizer):
    text = "[MASK] world [MASK] wide"
    filled = fill(model_and_params, tokenizer, text)
    assert len(filled) == 2 and filled[0] != filled[1]
    lines = describe(text, filled).split("\n")
    assert lines[0] == text
    assert lines[1].startswith("  [MASK] 1: ") and lines[2].startswith("  [MASK] 2: ")


def test_a_text_that_is_too_long_is_refused_with_both_numbers(
    model_and_params, tokenizer
):
    text = "[MASK]" + " wide" * ROW_LENGTH
    with pytest.raises(InputError, match="has 19 tokens.* at most 16"):
        fill(model_and_params, tokenizer, text)
