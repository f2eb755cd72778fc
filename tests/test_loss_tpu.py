"""The fused loss's TPU kernels: interpreted here, and compiled ahead of time.

As a program this file compiles them for a TPU v5e and prints what it measured.
"""

import functools
import json
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental import topologies
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mlm_jax import loss, loss_tpu
from tests.test_loss import (
    random_inputs,
    reference,
    relative_errors,
    value_and_grads,
)


@pytest.fixture
def interpreted(monkeypatch):
    """Runs the kernels in place of the plain operations."""
    call = functools.partial(pl.pallas_call, interpret=True)
    monkeypatch.setattr(loss_tpu.pl, "pallas_call", call)
    monkeypatch.setattr(loss, "loss_xla", loss_tpu)


@pytest.fixture
def small_tiles(interpreted, monkeypatch):
    """Tiles of 4 slots and 8 columns: a few slots and classes are many tiles."""
    monkeypatch.setattr(loss_tpu, "MULTIPLE", 4)
    monkeypatch.setattr(loss_tpu, "SLOT_TILES", (4,))
    monkeypatch.setattr(loss_tpu, "COLUMNS", 8)


def compiled(num_classes, chunk):
    # Never the function that other tests compile: theirs has no kernels.
    return jax.jit(
        functools.partial(value_and_grads, num_classes=num_classes, chunk=chunk)
    )


def of_logits(logits_NxV, targets_N, weights_N):
    num_slots, num_columns = np.shape(logits_NxV)
    return compiled(num_columns, 8)(
        np.asarray(logits_NxV, np.float32),
        np.eye(num_columns, dtype=np.float32),
        np.zeros(num_columns, np.float32),
        np.asarray(targets_N, np.int32),
        np.asarray(weights_N, np.float32),
    )


def assert_as_reference(inputs, regularisers, num_classes, chunk, tolerance=1e-6):
    hidden_NxD, table_VxD, bias_V, *slots = inputs
    (value, predictions), grads = compiled(num_classes, chunk)(*inputs, *regularisers)
    (want, want_predictions), want_grads = reference(
        hidden_NxD.astype(np.float32),
        table_VxD[:num_classes],
        bias_V[:num_classes],
        *slots,
        *regularisers,
    )
    assert abs(value - want) <= tolerance * want
    d_hidden_NxD, d_table_VxD, d_bias_V = grads
    assert not d_table_VxD[num_classes:].any() and not d_bias_V[num_classes:].any()
    grads = d_hidden_NxD, d_table_VxD[:num_classes], d_bias_V[:num_classes]
    assert max(relative_errors(grads, want_grads)) <= tolerance
    if tolerance == 1e-6:
        np.testing.assert_allclose(
            predictions.losses_N, want_predictions.losses_N, rtol=2e-6, atol=1e-6
        )
        np.testing.assert_array_equal(predictions.ranks_N, want_predictions.ranks_N)


@pytest.mark.parametrize(
    "num_slots, num_columns, chunk, regularisers",
    [
        (1, 16, 8, (0.1, 0.05)),  # one prediction
        (13, 16, 8, (0.0, 0.0)),  # two chunks of two tiles, the last not full
        (13, 11, 16, (0.1, 0.05)),  # a last tile of the vocabulary not full
        (16, 19, 4, (0.1, 0.0)),
    ],
)
def test_kernels_equal_double_precision(
    small_tiles, num_slots, num_columns, chunk, regularisers
):
    """With 11 classes, the other columns padding of the largest logits."""
    hidden_NxD, _, _, targets_N, _ = random_inputs(num_slots, 11, "fractional")
    weights_N = np.linspace(1, 2, num_slots, dtype=np.float32)
    weights_N[1::3] = 0
    _, table_VxD, bias_V, *_ = random_inputs(num_slots, num_columns, "fractional")
    bias_V[11:] = 50
    inputs = hidden_NxD, table_VxD, bias_V, targets_N, weights_N
    assert_as_reference(inputs, regularisers, 11, chunk)


def test_kernels_take_bfloat16(small_tiles):
    hidden_NxD, *others = random_inputs(13, 19, "fractional")
    inputs = jnp.asarray(hidden_NxD, jnp.bfloat16), *others
    assert_as_reference(inputs, (0.1, 0.05), 19, 8, tolerance=1e-2)


def test_kernels_at_their_real_tiles(interpreted):
    rng = np.random.default_rng(0)
    inputs = (
        rng.normal(size=(300, 64)).astype(np.float32),
        rng.normal(0, 0.125, (1100, 64)).astype(np.float32),
        rng.normal(0, 0.1, 1100).astype(np.float32),
        rng.integers(0, 1040, 300).astype(np.int32),
        np.ones(300, np.float32),
    )
    assert_as_reference(inputs, (0.1, 0.05), 1040, chunk=None)


def test_ranks_of_ties(small_tiles):
    logits_NxV = [(1, 3, 3), (1, 3, 3), (3, 1, 0), (3, 1, 0), (0, 0, 9), (7, 7, 7)]
    weights_N = [1, 1, 0.5, 1, 0, 2]
    (_, predictions), _ = of_logits(logits_NxV, [1, 2, 0, 1, 2, 2], weights_N)
    np.testing.assert_array_equal(predictions.ranks_N, [0, 1, 0, 1, 3, 2])


def test_logits_of_ten_thousand(small_tiles):
    """The largest first and last: what was summed before it falls to exactly nothing.
    The targets are the largest, the least and one between."""
    logits_V = np.zeros(16)
    logits_V[[0, 1]] = 1e4, -1e4
    logits_NxV = [logits_V, logits_V[::-1]] * 3
    targets_N, want_N = [0, 15, 1, 14, 2, 13], [0, 0, 2e4, 2e4, 1e4, 1e4]
    (_, predictions), grads = of_logits(logits_NxV, targets_N, np.ones(6))
    np.testing.assert_allclose(predictions.losses_N, want_N, rtol=1e-6)
    assert all(np.isfinite(grad).all() for grad in grads)


def test_a_population(small_tiles):
    members = [random_inputs(13, 11, "fractional", seed=seed) for seed in range(2)]
    stacked = [np.stack(x) for x in zip(*members, strict=True)]
    fused = functools.partial(value_and_grads, num_classes=11, chunk=8)
    together = jax.jit(jax.vmap(fused))(*stacked)
    for member, inputs in enumerate(members):
        jax.tree.map(
            lambda all_, one, member=member: np.testing.assert_allclose(
                all_[member], one, rtol=1e-6, atol=1e-6
            ),
            together,
            jax.jit(fused)(*inputs),
        )


# ---- compiled for a TPU, without one ------------------------------------------------

SHAPES = (640, 256), (4096, 768), (2048, 1024)
NUM_COLUMNS = 30592


def arguments(num_slots, width, dtype, place):
    """Returns the abstract arguments of a head; slots may be sharded."""
    whole, split = place
    return (
        jax.ShapeDtypeStruct((num_slots, width), dtype, sharding=split),
        jax.ShapeDtypeStruct((NUM_COLUMNS, width), jnp.float32, sharding=whole),
        jax.ShapeDtypeStruct((NUM_COLUMNS,), jnp.float32, sharding=whole),
        jax.ShapeDtypeStruct((num_slots,), jnp.int32, sharding=split),
        jax.ShapeDtypeStruct((num_slots,), jnp.float32, sharding=split),
    )


def head(*inputs, is_partitioned=False):
    def objective(*inputs):
        return loss.masked_cross_entropy(
            *inputs, num_classes=30522, is_partitioned=is_partitioned
        )

    return jax.value_and_grad(objective, (0, 1, 2), has_aux=True)(*inputs)


def whole_logits(hidden_NxD, table_VxD, bias_V, targets_N, weights_N):
    def value(hidden_NxD, table_VxD, bias_V):
        logits_NxV = hidden_NxD @ table_VxD.T + bias_V[None]
        log_p_NxV = jax.nn.log_softmax(logits_NxV)
        return -weights_N @ jnp.take_along_axis(log_p_NxV, targets_N[:, None], 1)[:, 0]

    return jax.value_and_grad(value, (0, 1, 2))(hidden_NxD, table_VxD, bias_V)


def per_device(*inputs):
    (value, predictions), grads = head(*inputs)
    return jax.lax.psum((value, grads[1:]), "data"), predictions, grads[0]


def describe(compiled):
    text = compiled.as_text()
    shapes = re.findall(r"\b(?:pred|bf16|[fsu]\d+)\[([\d,]+)\]", text)
    sizes = [np.prod([int(n) for n in shape.split(",")]) for shape in shapes]
    return {
        "temporary": compiled.memory_analysis().temp_size_in_bytes,
        "largest": int(max(sizes)),
        "kernels": text.count('custom_call_target="tpu_custom_call"'),
    }


def compile_all():
    """Yields (name, what became of it)."""
    devices = topologies.get_topology_desc("v5e:2x2", platform="tpu").devices
    one = jax.sharding.SingleDeviceSharding(devices[0])
    for num_slots, width in SHAPES:
        for dtype in (jnp.float32, jnp.bfloat16):
            shapes = arguments(num_slots, width, dtype, (one, one))
            name = f"{num_slots}x{width} {jnp.dtype(dtype)}"
            yield name, describe(jax.jit(head).lower(*shapes).compile())
    shapes = arguments(4096, 768, jnp.float32, (one, one))
    yield "whole logits", describe(jax.jit(whole_logits).lower(*shapes).compile())

    mesh = jax.sharding.Mesh(np.array(devices), ("data",))
    place = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    shapes = arguments(4096, 256, jnp.float32, place)
    rows, whole = P("data"), P()
    mapped = jax.shard_map(
        lambda hidden_NxD, table_VxD, bias_V, *slots: per_device(
            hidden_NxD,
            *jax.lax.pcast((table_VxD, bias_V), "data", to="varying"),
            *slots,
        ),
        mesh=mesh,
        in_specs=(rows, whole, whole, rows, rows),
        out_specs=((whole, whole), rows, rows),
    )
    yield "shard_map", describe(jax.jit(mapped).lower(*shapes).compile())
    partitioned = functools.partial(head, is_partitioned=True)
    yield "jit", describe(jax.jit(partitioned).lower(*shapes).compile())
    pmapped = jax.pmap(
        per_device, "data", in_axes=(0, None, None, 0, 0), devices=devices
    )
    hidden, table, bias, *slots = arguments(640, 256, jnp.float32, (None, None))
    stacked = [jax.ShapeDtypeStruct((4, *x.shape), x.dtype) for x in (hidden, *slots)]
    lowered = pmapped.lower(stacked[0], table, bias, *stacked[1:])
    yield "pmap", describe(lowered.compile())


@pytest.mark.slow
def test_compiled_for_a_tpu():
    pytest.importorskip("libtpu")
    environment = os.environ | {
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "JAX_PLATFORMS": "cpu",
    }
    result = subprocess.run(
        [sys.executable, "-m", "tests.test_loss_tpu"],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert result.returncode == 0, result.stderr
    programs = dict(json.loads(line) for line in result.stdout.splitlines())
    whole_logits = programs.pop("whole logits")
    assert whole_logits["largest"] >= 4096 * NUM_COLUMNS
    assert programs.pop("jit")["kernels"] == 0
    for name, program in programs.items():
        assert program["kernels"] == 2, name
        # Nothing is larger than the table and its gradient.
        width = int(name.split("x")[1].split()[0]) if name[0].isdigit() else 256
        assert program["largest"] <= NUM_COLUMNS * width, name
    temporary = programs["4096x768 float32"]["temporary"]
    assert temporary <= whole_logits["temporary"] / 10


if __name__ == "__main__":
    for item in compile_all():
        print(json.dumps(item), flush=True)
