"""The two passes of the fused loss over a chunk's logits, in plain operations.

`score` makes the logits and what the loss needs of them, `accumulate` the gradients
from what `score` kept: one buffer of [C, V], which first holds the logits and then
their exponentials.
"""

import jax.numpy as jnp
from jax import lax

MULTIPLE = 1  # of which the slots of a chunk are one
BUDGET = 320 * 30_592  # logits at a time: 37 MiB in float32


def chunk_size(num_columns, width):
    """Returns the number of slots at a time for a table of `num_columns` rows.

    As many as the budget holds, from 64 to 1,024. On a CPU, loss and gradients, time
    over that of whole logits (Optax) and temporary memory:

        slots x width, columns   whole   chunks
          640 x 256,    8,192      1.00   640: 0.86   320: 0.88
          640 x 256,   30,522      1.00   640: 0.94   320: 0.95   128: 0.97
          320 x 512,   30,522      1.00   320: 0.98   160: 0.99
          160 x 768,   30,522      1.00   160: 0.94    80: 1.09
        2,048 x 768,   30,522      1.00   512: 0.80   256: 0.82  1024: 0.85
          640 x 256,  250,112      1.00   128: 0.85    64: 0.92    32: 1.15
            MB of the last         1221   128:  215    64:  100    32:   49

    So the size hardly matters for time until the products get thin, below 64. The
    vocabulary itself is never cut: with at most `width` slots at a time their logits
    are smaller than the table's gradient, and that has to be.
    """
    del width
    return max(64, min(1024, BUDGET // num_columns))


def score(hidden_CxD, targets_C, table_VxD, bias_V):
    """Returns (max_C, others_C, target_C, ranks_C) of the logits, and `p_CxV`.

    `p_CxV` is exp(logit - max), 0 at the target, and `others_C` its sum.
    """
    logits_CxV = _dot(hidden_CxD, table_VxD, (1, 1)) + bias_V[None]
    column_CxV = lax.broadcasted_iota(jnp.int32, logits_CxV.shape, 1)
    targets_Cx1 = targets_C[:, None]
    target_Cx1 = jnp.take_along_axis(logits_CxV, targets_Cx1, 1)
    is_before_CxV = (logits_CxV > target_Cx1) | (
        (logits_CxV == target_Cx1) & (column_CxV < targets_Cx1)
    )
    # Both at once: on a CPU this reads the logits once and writes nothing, where a sum
    # of its own would write [C, V] integers first, and argmax takes as long as a matrix
    # product.
    max_C, ranks_C = lax.reduce(
        (logits_CxV, is_before_CxV.astype(jnp.int32)),
        (jnp.float32(-jnp.inf), jnp.int32(0)),
        lambda a, b: (jnp.maximum(a[0], b[0]), a[1] + b[1]),
        (1,),
    )
    p_CxV = jnp.exp(logits_CxV - max_C[:, None])
    p_CxV = jnp.where(column_CxV == targets_Cx1, 0, p_CxV)
    scores = max_C, p_CxV.sum(1), target_Cx1[:, 0], ranks_C
    return scores, p_CxV


def accumulate(
    p_CxV,
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
    are None before the first.

    The targets' own part is added apart, in float32: in a sum over the classes, among
    numbers a thousandth of it, it would cost them their last digits.
    """
    del bias_V
    scale_Cx1, d_target_Cx1 = scale_C[:, None], d_target_C[:, None]
    chunk_d_bias_V = (scale_Cx1 * p_CxV).sum(0).at[targets_C].add(d_target_C)
    p_CxV = p_CxV.astype(hidden_CxD.dtype)
    d_hidden_CxD = scale_Cx1 * _dot(p_CxV, table_VxD, (1, 0))
    d_hidden_CxD += d_target_Cx1 * table_VxD[targets_C]
    scaled_CxD = (scale_Cx1 * hidden_CxD).astype(hidden_CxD.dtype)
    if d_table_VxD is None:
        d_table_VxD, d_bias_V = _dot(p_CxV, scaled_CxD, (0, 0)), chunk_d_bias_V
    else:
        d_table_VxD = _add_product(d_table_VxD, p_CxV, scaled_CxD)
        d_bias_V += chunk_d_bias_V
    d_table_VxD = d_table_VxD.at[targets_C].add(d_target_Cx1 * hidden_CxD)
    return d_hidden_CxD, d_table_VxD, d_bias_V


def _add_product(total_VxD, p_CxV, hidden_CxD):
    """Returns total + p.T @ hidden, with no temporary larger than `p_CxV`.

    The product as a whole is as large as the table. In blocks half as large as `p_CxV`
    it takes as long, and the temporaries of 256 slots at a time fall from 121 to 71 MB
    for a table of 30,522 x 768.
    """
    num_columns, width = total_VxD.shape
    if width <= len(p_CxV):
        return total_VxD + _dot(p_CxV, hidden_CxD, (0, 0))
    rows = -(-p_CxV.size // (2 * width))
    for begin in range(0, num_columns, rows):
        block = slice(begin, begin + rows)
        # One after the other: XLA would make all the products first.
        total_VxD, p_CxV = lax.optimization_barrier((total_VxD, p_CxV))
        sum_RxD = total_VxD[block] + _dot(p_CxV[:, block], hidden_CxD, (0, 0))
        total_VxD = lax.dynamic_update_slice_in_dim(total_VxD, sum_RxD, begin, 0)
    return total_VxD


def _dot(a, b, contract):
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32)
