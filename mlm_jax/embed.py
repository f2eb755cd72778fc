"""Turns texts into vectors with a trained encoder.

    python -m mlm_jax.embed --workdir=runs/austen sentences.txt --output=vectors.npy

Reads a text a line, from files or the standard input. `--output` is a NumPy file of
float32 [texts, width], or a Parquet file with columns `text` and `vector`. A vector is
the mean of the last layer's states, or that at [CLS].
"""

from absl import flags

import mlm_jax
from mlm_jax import command
from mlm_jax.data.progress import Countdown
from mlm_jax.errors import InputError
from mlm_jax.tasks import texts
from mlm_jax.tasks.reader import POOLINGS

WORKDIR = command.define_workdir("the model to use")
STEP = command.define_step()
OUTPUT = command.define_output("File to write: NAME.npy or NAME.parquet.")
POOLING = flags.DEFINE_enum("pooling", "mean", list(POOLINGS), "States to one vector.")


def main(paths):
    if OUTPUT.value is None:
        raise InputError("--output=FILE is missing, such as --output=vectors.npy.")
    texts.check_vectors_path(OUTPUT.value)
    lines = texts.read_lines(paths)
    trained = mlm_jax.load(WORKDIR.value, STEP.value)
    tick = Countdown(command.tell, "embedding", "texts", len(lines))
    vectors_NxD = trained.embed(lines, pooling=POOLING.value, tick=tick)
    texts.write_vectors(OUTPUT.value, lines, vectors_NxD)
    command.tell(
        f"{OUTPUT.value}: {len(lines):,} vectors of {vectors_NxD.shape[1]} numbers"
    )


if __name__ == "__main__":
    command.run(main, positional="files")
