"""Tells beforehand whether a config fits a machine, and what a step costs there.

    python -m mlm_jax.plan --config=configs/bert_base.py --topology=v5e:4x4
    python -m mlm_jax.plan --config=configs/tiny.py --topology=cpu:8 --json

Compiles the training step ahead of time, for a TPU too, from any machine, and reads the
compiled program: memory of a chip by class, arithmetic, traffic, and the shortest time
that the chip's peak rates allow. Prepares no data; the vocabulary has the size that the
config asks for. `--find_batch` searches the largest `data.batch_size` that fits.
"""

import json
import sys

import jax
import numpy as np
from absl import flags

from mlm_jax import command, config, parallel
from mlm_jax.data.tokenizer import Vocabulary
from mlm_jax.errors import InputError
from mlm_jax.planning import estimate, topology
from mlm_jax.program import make_program

CONFIG = command.define_config()
TOPOLOGY = flags.DEFINE_string(
    "topology", None, "CHIP:AxB[xC], such as v5e:4x4, or cpu:N; default cpu:1."
)
JSON = flags.DEFINE_bool("json", False, "Print one JSON object.")
FIND_BATCH = flags.DEFINE_bool("find_batch", False, "Search the largest batch.")


def plan(c, machine):
    """Returns {executor: figures} of config `c` on a `topology.Topology`.

    Raises InputError where the config cannot run there at all.
    """
    config.check(c)
    config.check_devices(c, len(machine.devices))
    return {mode: plan_mode(c, machine, mode) for mode in modes(c, machine)}


def modes(c, machine):
    """The executors that can run the config there. On one device there is one."""
    sizes = config.check_devices(c, len(machine.devices))
    if sizes["fsdp"] * sizes["tensor"] > 1 or sizes["data"] == 1:
        return ["jit"]
    # pmap is for one process, and a process has the chips of one host. The program of
    # jit on a mesh of rows alone is that of shard_map.
    return ["shard_map"] if machine.num_hosts > 1 else ["pmap", "shard_map"]


def plan_mode(c, machine, mode):
    """Returns the figures of one executor; `fits` is False, with a `reason`, where XLA
    finds no room."""
    c = c.copy_and_resolve_references()
    c.parallel.mode = mode
    sizes = config.check_devices(c, len(machine.devices))
    mesh = parallel.make_mesh(sizes, machine.devices)
    program = make_program(c, vocabulary(c), np.ones(c.tokenizer.vocab_size), mesh)
    batch = abstract_batch(c, mesh)
    lowered = program.train_step.lower(program.abstract_state, batch)
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        reason = str(error).strip().split("\n")[0]
        return {"batch_size": c.data.batch_size, "fits": False, "reason": reason}
    return estimate.figures(
        c, sizes, program.abstract_state, batch, compiled, machine.chip
    )


def vocabulary(c):
    if c.corruption.strategy == "pmi":
        raise InputError(
            "config.corruption.strategy = pmi needs the run's tokenizer; plan with "
            "--config.corruption.strategy=ngram, whose step has the same products."
        )
    return Vocabulary(c.tokenizer.vocab_size)


def abstract_batch(c, mesh):
    """Returns the shapes of a batch, placed as the step takes it."""
    rows, tokens = c.data.batch_size, (c.data.batch_size, c.data.row_length)
    shapes = {
        "tokens": (tokens, np.int32),
        "segment": (tokens, np.int32),
        "position": (tokens, np.int32),
        "word_start": (tokens, bool),
        "row": ((rows,), np.int32),
        "epoch": ((rows,), np.int32),
    }
    sharding = parallel.batch_sharding(mesh)
    return {
        name: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
        for name, (shape, dtype) in shapes.items()
    }


def find_batch(c, machine):
    """Returns {executor: figures} of the largest batch that fits: to an eighth."""
    if machine.chip is None:
        raise InputError("--find_batch needs a chip: --topology=v5e:4x4, for example.")
    config.check(c)
    return {mode: largest(c, machine, mode) for mode in modes(c, machine)}


def largest(c, machine, mode):
    """Doubles the batch until it does not fit, then halves the interval."""
    c = c.copy_and_resolve_references()
    sizes = config.check_devices(c, len(machine.devices))
    unit = sizes["data"] * sizes["fsdp"] * c.parallel.microbatches

    def attempt(rows):
        c.data.batch_size = rows * unit
        print(f"{mode}: trying a batch of {rows * unit:,}", file=sys.stderr)
        return plan_mode(c, machine, mode)

    found, rows = attempt(1), 1
    if not found["fits"]:
        return found
    step = 1
    while step >= max(1, rows // 8):
        larger = attempt(rows + step)
        if larger["fits"]:
            found, rows, step = larger, rows + step, 2 * step
        else:
            step //= 2
    return found


def main(arguments):
    del arguments
    machine = topology.load(TOPOLOGY.value)
    c = CONFIG.value
    found = (find_batch if FIND_BATCH.value else plan)(c, machine)
    if JSON.value:
        print(json.dumps(estimate.as_json(c, machine, found)))
        return
    if machine.note:
        print(machine.note)
    print(estimate.describe(c, machine, found))


if __name__ == "__main__":
    command.run(main)
