"""Fills the masks of sentences with a trained model.

    python -m mlm_jax.fill_mask --workdir=runs/austen "Mr. Darcy [MASK] to Elizabeth."

Prints, for each [MASK], the most probable tokens with their probabilities. With
--max_pieces=3 a [MASK] is a whole word of up to three pieces, and what is printed is a
score: the geometric mean of the pieces' probabilities, or with --score=sum their
product.
"""

from absl import flags

import mlm_jax
from mlm_jax import command
from mlm_jax.errors import InputError
from mlm_jax.tasks.fill_mask import SCORES, describe

WORKDIR = command.define_workdir("the model to use")
STEP = command.define_step()
TOP = flags.DEFINE_integer("top", 5, "Choices to print for each mask.", lower_bound=1)
MAX_PIECES = flags.DEFINE_integer(
    "max_pieces", None, "Fill whole words of up to so many pieces.", lower_bound=1
)
SCORE = flags.DEFINE_enum("score", "mean", list(SCORES), "Of a whole word's pieces.")


def main(texts):
    if not texts:
        raise InputError('no text to fill, such as "Mr. Darcy [MASK] to Elizabeth."')
    trained = mlm_jax.load(WORKDIR.value, STEP.value)
    print(f"{trained.workdir}, step {trained.step:,}")
    all_filled = trained.fill_mask(
        texts, top=TOP.value, max_pieces=MAX_PIECES.value, score=SCORE.value
    )
    for text, filled in zip(texts, all_filled, strict=True):
        print(describe(text, filled))


if __name__ == "__main__":
    command.run(main, positional="texts")
