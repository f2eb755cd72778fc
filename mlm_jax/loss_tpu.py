"""The two passes of the fused loss over a chunk's logits, as Pallas kernels for a TPU.

`score` makes what the loss needs of the logits and `accumulate` the gradients. Each
makes the logits of [slots, columns] at a time in VMEM: four matrix products where plain
operations have three, and no logits in HBM, to which those go half a dozen times.
T is the columns of a tile in the names.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

MULTIPLE = 128  # of which the slots of a chunk are one
SLOT_TILES = (640, 512, 384, 256, 128)
COLUMNS = 512  # of a tile of the table up to this width, else half of them and so on
FULL_WIDTH = 768
# All tiles together need less than the 16 MiB of a v4 up to a width of 1,024. Every TPU
# from v5 on has 64 MiB and more, and the default limit is 16.
VMEM_BYTES = 48 * 2**20
HIDDEN_BYTES = 3 * 2**20


def chunk_size(num_columns, width):
    """Returns the number of slots at a time: `accumulate` holds the gradient of their
    hidden vectors in VMEM, and reads and writes that of the table once a chunk."""
    del num_columns
    return max(MULTIPLE, HIDDEN_BYTES // (4 * width) // MULTIPLE * MULTIPLE)


def score(hidden_CxD, targets_C, table_VxD, bias_V):
    """Returns (max_C, others_C, target_C, ranks_C) of the logits, and `max_C`.

    `others_C` is the sum of exp(logit - max) over the classes but the target. Both it
    and the maximum are kept up from tile to tile (Milakov and Gimelshein 2018).
    """
    (num_slots, width), num_columns = hidden_CxD.shape, len(bias_V)
    slots, columns = _tiles(num_slots, num_columns, width)
    targets_Cx1 = targets_C[:, None]
    operands = _varying(
        hidden_CxD,
        table_VxD[targets_C],
        bias_V[targets_C][:, None],
        targets_Cx1,
        table_VxD,
        bias_V[None],
    )
    per_slot = pl.BlockSpec((slots, 1), lambda c, v: (c, 0))
    out = _out((num_slots, 1), jnp.float32, operands)
    results = pl.pallas_call(
        functools.partial(_score_kernel, num_columns=num_columns),
        out_shape=[out] * 4,
        grid=(num_slots // slots, pl.cdiv(num_columns, columns)),
        in_specs=[
            pl.BlockSpec((slots, width), lambda c, v: (c, 0)),
            pl.BlockSpec((slots, width), lambda c, v: (c, 0)),
            per_slot,
            per_slot,
            pl.BlockSpec((columns, width), lambda c, v: (v, 0)),
            pl.BlockSpec((1, columns), lambda c, v: (0, v)),
        ],
        out_specs=[per_slot] * 4,
        cost_estimate=_cost(hidden_CxD, table_VxD, products=1),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
    )(*operands)
    max_C, others_C, target_C, ranks_C = (x[:, 0] for x in results)
    return (max_C, others_C, target_C, ranks_C.astype(jnp.int32)), max_C


def _score_kernel(
    hidden_ref,
    target_row_ref,
    target_bias_ref,
    targets_ref,
    table_ref,
    bias_ref,
    max_ref,
    others_ref,
    target_ref,
    ranks_ref,
    *,
    num_columns,
):
    hidden_CxD = hidden_ref[...]

    @pl.when(pl.program_id(1) == 0)
    def _():
        # The target's logit, by a product like that of all others, from the diagonal:
        # what is equal must come out equal, or ranks of ties would be chance.
        square_CxC = _dot(hidden_CxD, target_row_ref[...], (1, 1))
        row_CxC = lax.broadcasted_iota(jnp.int32, square_CxC.shape, 0)
        column_CxC = lax.broadcasted_iota(jnp.int32, square_CxC.shape, 1)
        own_CxC = jnp.where(row_CxC == column_CxC, square_CxC, 0)
        target_ref[...] = own_CxC.sum(1, keepdims=True) + target_bias_ref[...]
        max_ref[...] = jnp.full_like(max_ref, -jnp.inf)
        others_ref[...] = jnp.zeros_like(others_ref)
        ranks_ref[...] = jnp.zeros_like(ranks_ref)

    logits_CxT, column_CxT = _logits(
        hidden_CxD, table_ref[...], bias_ref[...], num_columns
    )
    targets_Cx1, target_Cx1 = targets_ref[...], target_ref[...]
    is_target_CxT = column_CxT == targets_Cx1
    is_before_CxT = (logits_CxT > target_Cx1) | (
        (logits_CxT == target_Cx1) & (column_CxT < targets_Cx1)
    )
    is_before_CxT = is_before_CxT & ~is_target_CxT
    ranks_ref[...] += is_before_CxT.astype(jnp.float32).sum(1, keepdims=True)
    old_max_Cx1 = max_ref[...]
    max_Cx1 = jnp.maximum(old_max_Cx1, logits_CxT.max(1, keepdims=True))
    p_CxT = jnp.where(is_target_CxT, 0, jnp.exp(logits_CxT - max_Cx1))
    others_Cx1 = others_ref[...] * jnp.exp(old_max_Cx1 - max_Cx1)
    others_ref[...] = others_Cx1 + p_CxT.sum(1, keepdims=True)
    max_ref[...] = max_Cx1


def accumulate(
    max_C,
    hidden_CxD,
    targets_C,
    table_VxD,
    bias_V,
    scale_C,
    d_target_C,
    d_table_VxD,
    d_bias_V,
):
    """Returns `d_hidden_CxD`, and the chunk's part added to the other gradients, which
    are None before the first. Their buffers are used again."""
    (num_slots, width), num_columns = hidden_CxD.shape, len(bias_V)
    if d_table_VxD is None:
        d_table_VxD = jnp.zeros_like(table_VxD, jnp.float32)
        d_bias_V = jnp.zeros_like(bias_V)
    slots, columns = _tiles(num_slots, num_columns, width)
    operands = _varying(
        hidden_CxD,
        targets_C[:, None],
        max_C[:, None],
        scale_C[:, None],
        d_target_C[:, None],
        table_VxD,
        bias_V[None],
        d_table_VxD,
        d_bias_V[None],
    )
    per_slot = pl.BlockSpec((slots, 1), lambda v, c: (c, 0))
    per_column = pl.BlockSpec((1, columns), lambda v, c: (0, v))
    rows = pl.BlockSpec((columns, width), lambda v, c: (v, 0))
    d_hidden_CxD, d_table_VxD, d_bias_1xV = pl.pallas_call(
        functools.partial(_accumulate_kernel, num_columns=num_columns),
        out_shape=[
            _out(hidden_CxD.shape, jnp.float32, operands),
            _out(d_table_VxD.shape, jnp.float32, operands),
            _out((1, num_columns), jnp.float32, operands),
        ],
        grid=(pl.cdiv(num_columns, columns), num_slots // slots),
        in_specs=[
            pl.BlockSpec((slots, width), lambda v, c: (c, 0)),
            *[per_slot] * 4,
            rows,
            per_column,
            rows,
            per_column,
        ],
        out_specs=[
            pl.BlockSpec(hidden_CxD.shape, lambda v, c: (0, 0)),
            rows,
            per_column,
        ],
        input_output_aliases={7: 1, 8: 2},
        cost_estimate=_cost(hidden_CxD, table_VxD, products=3),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
    )(*operands)
    return d_hidden_CxD, d_table_VxD, d_bias_1xV[0]


def _accumulate_kernel(
    hidden_ref,
    targets_ref,
    max_ref,
    scale_ref,
    d_target_ref,
    table_ref,
    bias_ref,
    old_table_ref,
    old_bias_ref,
    d_hidden_ref,
    d_table_ref,
    d_bias_ref,
    *,
    num_columns,
):
    hidden_CxD = hidden_ref[...]
    slots = len(hidden_CxD)
    own = pl.ds(pl.multiple_of(pl.program_id(1) * slots, slots), slots)

    @pl.when(pl.program_id(1) == 0)
    def _():
        d_table_ref[...] = old_table_ref[...]
        d_bias_ref[...] = old_bias_ref[...]

    @pl.when(pl.program_id(0) == 0)
    def _():
        d_hidden_ref[own, :] = jnp.zeros_like(hidden_CxD, jnp.float32)

    # Rows past the table's last hold anything, and 0 x NaN is NaN.
    row_Tx1 = lax.broadcasted_iota(jnp.int32, (len(table_ref), 1), 0)
    row_Tx1 += pl.program_id(0) * len(table_ref)
    table_TxD = jnp.where(row_Tx1 < num_columns, table_ref[...], 0)
    logits_CxT, column_CxT = _logits(
        hidden_CxD, table_TxD, bias_ref[...], num_columns, axis=0
    )
    d_logits_CxT = jnp.where(
        column_CxT == targets_ref[...],
        d_target_ref[...],
        scale_ref[...] * jnp.exp(logits_CxT - max_ref[...]),
    )
    d_bias_ref[...] += d_logits_CxT.sum(0, keepdims=True)
    d_logits_CxT = d_logits_CxT.astype(hidden_CxD.dtype)
    d_hidden_ref[own, :] += _dot(d_logits_CxT, table_TxD, (1, 0))
    d_table_ref[...] += _dot(d_logits_CxT, hidden_CxD, (0, 0))


def _logits(hidden_CxD, table_TxD, bias_1xT, num_columns, axis=1):
    logits_CxT = _dot(hidden_CxD, table_TxD, (1, 1)) + bias_1xT
    column_CxT = lax.broadcasted_iota(jnp.int32, logits_CxT.shape, 1)
    column_CxT += pl.program_id(axis) * len(table_TxD)
    return jnp.where(column_CxT < num_columns, logits_CxT, -jnp.inf), column_CxT


def _tiles(num_slots, num_columns, width):
    slots = next(tile for tile in SLOT_TILES if num_slots % tile == 0)
    columns = COLUMNS
    while columns > MULTIPLE and columns * width > COLUMNS * FULL_WIDTH:
        columns //= 2
    return slots, min(columns, num_columns)


def _varying(*operands):
    """Marks all as per-device where one of them is, under `shard_map`."""
    types = [jax.typeof(x).manual_axis_type for x in operands]
    axes = frozenset().union(*(axis.varying for axis in types))

    def cast(x, own):
        missing = tuple(axes - own.varying)
        return lax.pcast(x, missing, to="varying") if missing else x

    return [cast(*pair) for pair in zip(operands, types, strict=True)]


def _cost(hidden_CxD, table_VxD, *, products):
    """What XLA cannot see inside a kernel: products of [C, D] and [V, D]."""
    num_logits = len(hidden_CxD) * len(table_VxD)
    return pl.CostEstimate(
        flops=2 * products * num_logits * hidden_CxD.shape[1],
        transcendentals=num_logits,
        bytes_accessed=table_VxD.nbytes * products,
    )


def _out(shape, dtype, operands):
    varying = jax.typeof(operands[0]).manual_axis_type
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=varying)


def _dot(a, b, contract):
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32)
