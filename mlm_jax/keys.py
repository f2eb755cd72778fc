"""Where randomness comes from: a key per (seed, purpose, epoch, row).

Devices, processes, batch size and accumulation never enter, so they cannot change a
mask. Each process of random choice has a purpose of its own: drawing more for one
purpose leaves the others as they were.
"""

import enum

import jax


class Purpose(enum.IntEnum):
    """The numbers are part of every result: never reuse or renumber one."""

    INIT = 0
    CORRUPTION = 1
    DROPOUT = 2


def purpose_key(key, purpose):
    return jax.random.fold_in(key, int(purpose))


def row_keys(key, epoch_B, row_B):
    """Returns key[B]: one key for each visit of a row."""

    def row_key(epoch, row):
        return jax.random.fold_in(jax.random.fold_in(key, epoch), row)

    return jax.vmap(row_key)(epoch_B, row_B)
