"""Fills the masks of a sentence with a trained model.

    python -m mlm_jax.fill_mask --workdir=runs/austen "Mr. Darcy [MASK] to Elizabeth."

Prints, for each [MASK], the most probable tokens with their probabilities.
"""

import pathlib

from absl import flags

from mlm_jax import checkpoint, command, config, program
from mlm_jax.data.tokenizer import Tokenizer
from mlm_jax.errors import InputError
from mlm_jax.tasks.fill_mask import describe, fill_mask

WORKDIR = command.define_workdir("the model to use")
TOP = flags.DEFINE_integer("top", 5, "Tokens to print for each mask.", lower_bound=1)


def main(texts):
    if not texts:
        raise InputError('no text to fill, such as "Mr. Darcy [MASK] to Elizabeth."')
    c = config.load(WORKDIR.value)
    tokenizer = Tokenizer.load(pathlib.Path(WORKDIR.value) / "tokenizer.json")
    step, state = checkpoint.restore_latest(WORKDIR.value)
    print(f"{WORKDIR.value}, step {step:,}")
    model = program.model_of(c, tokenizer.vocab_size)
    for text in texts:
        filled = fill_mask(
            model,
            state["params"],
            tokenizer,
            text,
            row_length=c.data.row_length,
            top=TOP.value,
        )
        print(describe(text, filled))


if __name__ == "__main__":
    command.run(main, positional="texts")
