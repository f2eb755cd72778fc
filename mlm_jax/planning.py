"""Compiles a config's training step for a machine that is not there, and reads it."""

import sys

import jax
import numpy as np

from mlm_jax import config, estimate, parallel
from mlm_jax.data.tokenizer import Vocabulary
from mlm_jax.errors import InputError
from mlm_jax.program import make_program


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
    num_devices = np.prod(list(sizes.values()))
    mesh = parallel.make_mesh(sizes, machine.devices[:num_devices])
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
