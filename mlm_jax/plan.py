"""Tells beforehand whether a config fits a machine, and what a step costs there.

    python -m mlm_jax.plan --config=configs/bert_base.py --topology=v5e:4x4
    python -m mlm_jax.plan --config=configs/tiny.py --topology=cpu:8 --json

Compiles the training step ahead of time, for a TPU too, from any machine, and reads the
compiled program: memory of a chip by class, arithmetic, traffic, and the shortest time
that the chip's peak rates allow. Prepares no data; the vocabulary has the size that the
config asks for. `--find_batch` searches the largest `data.batch_size` that fits.
"""

import json

from absl import flags

from mlm_jax import command, estimate, planning, topology

CONFIG = command.define_config()
TOPOLOGY = flags.DEFINE_string(
    "topology", None, "CHIP:AxB[xC], such as v5e:4x4, or cpu:N; default cpu:1."
)
JSON = flags.DEFINE_bool("json", False, "Print one JSON object.")
FIND_BATCH = flags.DEFINE_bool("find_batch", False, "Search the largest batch.")


def main(arguments):
    del arguments
    machine = topology.load(TOPOLOGY.value)
    c = CONFIG.value
    found = (planning.find_batch if FIND_BATCH.value else planning.plan)(c, machine)
    if JSON.value:
        print(json.dumps(estimate.as_json(c, machine, found)))
        return
    if machine.note:
        print(machine.note)
    print(estimate.describe(c, machine, found))


if __name__ == "__main__":
    command.run(main)
