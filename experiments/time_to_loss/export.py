"""Writes what a rival needs to train on our rows and take our exam.

    python experiments/time_to_loss/export.py --config=configs/austen.py

The file has `train` int32[R, L], the packed training rows; `inputs` and `labels`
int32[E, L], the held-out rows under the frozen masks of `eval.rates[0]`, labels -100
where nothing is predicted; and the ids of the special tokens.
"""

import jax
import numpy as np
from absl import flags

from mlm_jax import command, config, keys, program
from mlm_jax.data import pipeline, rows
from mlm_jax.keys import Purpose

CONFIG = command.define_config()
OUTPUT = flags.DEFINE_string("output", "exam.npz", "The file to write.")


def main(arguments):
    del arguments
    c = CONFIG.value
    config.check(c)
    store = rows.prepare(c.data, c.tokenizer)
    special = store.tokenizer.special
    corrupt = jax.jit(program.eval_corrupt(c, store.tokenizer))
    key = keys.purpose_key(jax.random.key(c.eval.seed), Purpose.CORRUPTION)
    inputs, labels = [], []
    for batch in pipeline.eval_batches(
        store.validation, num_rows=c.eval.num_rows, batch_size=64, pad_id=special.pad
    ):
        out, _ = corrupt(key, batch, program.eval_hparams(c, c.eval.rates[0]), 0.0)
        labels_BxL = np.full(batch["tokens"].shape, -100, np.int32)
        is_used_BxM = np.asarray(out["weights"]) > 0
        row_BxM, _ = np.nonzero(is_used_BxM)
        predict_BxM = np.asarray(out["predict"])[is_used_BxM]
        labels_BxL[row_BxM, predict_BxM] = np.asarray(out["targets"])[is_used_BxM]
        is_row = batch["row"] >= 0
        inputs.append(np.asarray(out["inputs"])[is_row])
        labels.append(labels_BxL[is_row])
    train = store.train.read(np.arange(len(store.train)))["tokens"]
    np.savez(
        OUTPUT.value,
        train=train.astype(np.int32),
        inputs=np.concatenate(inputs),
        labels=np.concatenate(labels),
        vocab_size=store.tokenizer.vocab_size,
        **special._asdict(),
    )


if __name__ == "__main__":
    command.run(main)
