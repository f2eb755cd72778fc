"""A mesh of data, fsdp and tensor: the same run, nothing whole that is in parts, and no
collective that is not needed."""

import functools
import re

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from configs import tiny
from mlm_jax import checkpoint, config, optim, parallel, program
from mlm_jax.errors import InputError
from mlm_jax.planning import hlo
from tests import test_executors as executors

AXES = ("data", "fsdp", "tensor")
LAYOUTS = [
    ((2, 1, 4), 2),
    ((2, 2, 2), 2),
    ((1, 4, 2), 1),
    ((1, 8, 1), 1),
    ((1, 1, 2), 1),
    ((4, 2, 1), 2),
    ((1, 2, 1), 4),
]
FAST = [LAYOUTS[0], LAYOUTS[4]]
SLOW = pytest.mark.slow


# sgd, as everywhere in test_executors, hides no error of scale.
@functools.cache
def build(sizes, microbatches=1, mode="jit", **overrides):
    fields = {"parallel.mode": mode, "parallel.microbatches": microbatches}
    c = executors.make_config(**fields | overrides)
    mesh = parallel.make_mesh(dict(zip(AXES, sizes, strict=True)))
    return program.make_program(c, executors.FakeTokenizer, executors.COUNTS_V, mesh)


@functools.cache
def compiled(sizes, microbatches, **overrides):
    built = build(sizes, microbatches, **overrides)
    lowered = built.train_step.lower(built.abstract_state, executors.make_batch(0))
    return lowered.compile()


@pytest.mark.parametrize(
    "sizes, microbatches",
    [pytest.param(*layout, marks=() if layout in FAST else SLOW) for layout in LAYOUTS],
)
def test_every_mesh_gives_the_same_run(sizes, microbatches):
    built = build(sizes, microbatches)
    built = built._replace(train_step=compiled(sizes, microbatches))
    executors.assert_same_run(executors.train(built), executors.reference())


@functools.cache
def adam_losses(sizes, microbatches, mode):
    overrides = {"optim.name": "adamw", "optim.num_steps": 200}
    overrides["optim.peak_learning_rate"] = 1e-3
    built = build(sizes, microbatches, mode, **overrides)
    _, history = executors.train(built, steps=200, **overrides)
    return [metrics["loss"] / metrics["weight"] for metrics in history]


@SLOW
@pytest.mark.parametrize(
    "sizes, microbatches, mode",
    [
        ((8, 1, 1), 1, "pmap"),
        ((4, 1, 1), 4, "pmap"),
        ((8, 1, 1), 2, "shard_map"),
        ((2, 2, 2), 2, "jit"),
        ((1, 8, 1), 1, "jit"),
    ],
)
def test_200_steps_of_adam_stay_together(sizes, microbatches, mode):
    losses = adam_losses(sizes, microbatches, mode)
    expected = adam_losses((1, 1, 1), 1, "jit")
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    assert np.mean(losses[-20:]) < np.mean(losses[:20]) - 0.05  # they did learn


def test_one_rule_covers_a_parameter_and_its_moments():
    built = build((2, 2, 2), **{"optim.name": "adamw"})
    state = jax.tree.map(lambda leaf: leaf.sharding.spec, built.abstract_state)
    for tree in (state.params, state.opt_state[0].mu, state.opt_state[0].nu):
        assert tree["encoder"]["embed"]["embedding"] == P("tensor", "fsdp")
        assert tree["bias"] == P("tensor")
        block = tree["encoder"]["blocks"]
        assert block["attention"]["query"]["kernel"] == P(None, "fsdp", "tensor")
        assert block["attention"]["out"]["kernel"] == P(None, "tensor", "fsdp")
        assert block["mlp"]["down"]["kernel"] == P(None, "tensor", "fsdp")
        assert block["mlp"]["down"]["bias"] == P()
    state = built.init(jax.random.key(0), config.hparams(executors.make_config()))
    moments = state.opt_state[0].mu["encoder"]["blocks"]["mlp"]["up"]["kernel"]
    assert moments.shape == (2, 16, 32)
    assert moments.addressable_shards[0].data.shape == (2, 8, 16)


def operations(text, shape):
    """Returns the operations of a program that make floats of this shape."""
    return re.findall(rf"= f32\[{shape}\]\S* ([a-z\-]+)\(", text)


@pytest.mark.parametrize("name", sorted(optim.OPTIMIZERS))
def test_moments_are_in_parts_as_their_parameters_are(name):
    """Of a matrix's shape; Adafactor's rows and columns are on every device."""
    state = build((2, 2, 2), **{"optim.name": name}).abstract_state
    by_path = {
        jax.tree_util.keystr(path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(state.params)
    }
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.opt_state):
        leaf.sharding.shard_shape(leaf.shape)  # raises where it does not divide
        path = jax.tree_util.keystr(path)
        for name, param in by_path.items():
            if path.endswith(name) and leaf.shape == param.shape:
                assert leaf.sharding == param.sharding, path


@SLOW
@pytest.mark.parametrize("name", ["adafactor", "lamb", "muon"])
def test_what_looks_at_whole_matrices_does_so_in_parts_too(name):
    overrides = {"optim.name": name, "optim.peak_learning_rate": 0.01}
    alone = executors.train(build((1, 1, 1), **overrides), **overrides)
    together = executors.train(build((2, 2, 2), **overrides), **overrides)
    # Muon's turns of Newton and Schulz make more of rounding than others do.
    executors.assert_same_run(together, alone, atol=1e-5)


def test_tensor_never_makes_the_table_or_its_logits_whole():
    """The table, split four ways by vocabulary, is never gathered: embeddings and the
    log-softmax are summed over the devices. V is 128, D 16."""
    text = compiled((2, 1, 4), 2).as_text()
    assert operations(text, "32,16")  # its part: the test can see it
    assert not operations(text, "128,16")
    assert not operations(text, r"\d+,128")
    kinds = {c.kind for c in hlo.Module(text).collectives() if c.bytes > 1000}
    assert kinds == {"all-reduce"}


def parameter_bytes(built):
    return sum(leaf.size * 4 for leaf in jax.tree.leaves(built.abstract_state.params))


@pytest.mark.parametrize(
    "sizes, microbatches, mode",
    [
        ((8, 1, 1), 2, "jit"),
        pytest.param((8, 1, 1), 1, "shard_map", marks=SLOW),
        pytest.param((2, 4, 1), 2, "jit", marks=SLOW),
    ],
)
def test_one_sum_of_the_gradients_and_what_fsdp_gathers(sizes, microbatches, mode):
    """However many micro-batches, chunks of the loss and layers there are, gradients
    are summed over devices once, beside a few numbers."""
    built = build(sizes, microbatches, mode=mode)
    module = hlo.Module(compiled(sizes, microbatches, mode=mode).as_text())
    found = module.collectives()
    assert all(c.times == 1 for c in found)
    sums = [c for c in found if c.kind == "all-reduce" and c.bytes > 1000]
    size = parameter_bytes(built)
    assert len(sums) == 1
    assert size <= sums[0].bytes <= size + 200  # with the sums of the metrics
    rest = [c for c in found if c.bytes > 1000 and c is not sums[0]]
    assert {c.kind for c in rest} == ({"all-gather"} if sizes[1] > 1 else set())
    assert sum(c.bytes for c in rest) <= size  # each parameter once


@SLOW
def test_pmap_sums_the_gradients_once():
    built = build((8, 1, 1), 2, mode="pmap")
    state = built.init(jax.random.key(0), config.hparams(executors.make_config()))
    lowered = built.train_step.lower(state, executors.make_batch(0))
    found = hlo.Module(lowered.compile().as_text()).collectives()
    sums = [c for c in found if c.bytes > 1000]
    assert [c.kind for c in found if c.kind != "all-reduce"] == []
    assert sum(c.bytes for c in sums) <= parameter_bytes(built) + 200


def next_loss(built, state):
    _, metrics = built.train_step(state, executors.make_batch(3))
    return float(metrics["loss"]), float(metrics["grad_norm"])


@pytest.mark.parametrize(
    "optimizer, mode", [("sgd", "jit"), pytest.param("adamw", "pmap", marks=SLOW)]
)
def test_a_checkpoint_of_one_layout_goes_on_in_another(tmp_path, optimizer, mode):
    overrides = {"optim.name": optimizer} if optimizer != "sgd" else {}
    saved = build((2, 2, 2), 2, **overrides)
    other = build((8, 1, 1), 2, mode=mode, **overrides)
    with checkpoint.Checkpoints(tmp_path, keep=1) as checkpoints:
        state, _ = executors.train(saved, steps=3)
        checkpoints.save(3, state)
        checkpoints.wait()
        expected = next_loss(saved, state)
        for built in (other, saved):
            step, again = checkpoints.restore(built.abstract_state)
            assert step == 3
            asked = jax.tree.map(lambda leaf: leaf.sharding, built.abstract_state)
            assert jax.tree.map(lambda leaf: leaf.sharding, again) == asked
            np.testing.assert_allclose(next_loss(built, again), expected, rtol=1e-5)


def test_a_mesh_that_cannot_work_is_refused_by_name():
    c = tiny.get_config()
    c.parallel.mesh.fsdp = 2
    for mode in ("pmap", "shard_map"):
        c.parallel.mode = mode
        with pytest.raises(InputError, match="mesh.fsdp = 2 needs .*mode = jit"):
            config.check(c)
    c.parallel.mode = "jit"
    config.check(c)
    assert config.check_devices(c, 8) == {"data": 4, "fsdp": 2, "tensor": 1}
    c.parallel.mesh.tensor = 4
    with pytest.raises(InputError, match="num_heads = 2; expected a multiple of"):
        config.check(c)
    c.model.num_heads = 4
    config.check(c)
    with pytest.raises(InputError, match="fsdp=2 x tensor=4; this process has 4"):
        config.check_devices(c, 4)
    c.parallel.mesh.tensor = 3
    with pytest.raises(InputError, match="mesh.tensor = 3; expected one of 1, 2, 4"):
        config.check(c)
