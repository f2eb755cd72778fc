"""One step body: the same masks, loss and gradient on any devices, however split.

Plain SGD throughout, since Adam hides errors of scale.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from configs import tiny
from mlm_jax import collectives, config, parallel, program, step

VOCAB_SIZE = 60
STEPS = 5
FAST = [
    ("pmap", 8, 1),
    ("pmap", 1, 2),
    ("pmap", 4, 4),
    ("shard_map", 8, 1),
    ("jit", 8, 2),
]
LAYOUTS = [
    pytest.param(*layout, marks=() if layout in FAST else pytest.mark.slow)
    for layout in itertools.product(
        ("pmap", "shard_map", "jit"), (1, 2, 4, 8), (1, 2, 4)
    )
    if layout[1] * layout[2] <= 16
]
COUNTS_V = np.arange(VOCAB_SIZE)


class FakeTokenizer:
    vocab_size = VOCAB_SIZE
    is_special = np.arange(VOCAB_SIZE) < 5

    class special:
        mask = 4


def make_config(**overrides):
    c = tiny.get_config()
    c.data.row_length = 16
    c.model.width = 16
    c.model.num_heads = 4
    c.model.mlp_width = 32
    c.model.dropout = 0.1
    c.corruption.rate = 0.4
    c.optim.name = "sgd"
    c.optim.peak_learning_rate = 0.1
    c.optim.num_steps = STEPS
    c.optim.warmup_steps = 1
    c.update_from_flattened_dict(overrides)
    return c


def make_batch(k, num_rows=16, length=16):
    """Rows of very different lengths, so that devices hold unequal counts."""
    rng = np.random.default_rng(k)
    lengths_B = rng.integers(3, length + 1, num_rows)
    lengths_B[: num_rows // 2] = 3  # half of the devices see one token a row
    segment_BxL = (np.arange(length)[None] < lengths_B[:, None]).astype(np.int32)
    tokens_BxL = rng.integers(5, VOCAB_SIZE, (num_rows, length)).astype(np.int32)
    tokens_BxL[:, 0] = 2
    tokens_BxL[np.arange(num_rows), lengths_B - 1] = 3
    return {
        "tokens": tokens_BxL * segment_BxL,
        "segment": segment_BxL,
        "position": np.arange(length, dtype=np.int32)[None] * segment_BxL,
        "word_start": rng.random(segment_BxL.shape) < 0.6,
        "row": np.arange(num_rows, dtype=np.int32) + 16 * k,
        "epoch": np.full(num_rows, k % 2, np.int32),
    }


def make_mesh(num_devices):
    return parallel.make_mesh({"data": num_devices})


@functools.cache
def build(mode, num_devices, microbatches=1, strategy="token"):
    """Returns (program, the list that grows with each trace of its train step)."""
    traces = []
    original = step.train_step

    def counted(*args, **kwargs):
        traces.append(1)
        return original(*args, **kwargs)

    c = make_config(
        **{
            "parallel.mode": mode,
            "parallel.microbatches": microbatches,
            "corruption.strategy": strategy,
        }
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step, "train_step", counted)
        built = program.make_program(c, FakeTokenizer, COUNTS_V, make_mesh(num_devices))
    return built, traces


def train(built, steps=STEPS, seed=0, **overrides):
    """Returns (state, metrics of each step)."""
    state = built.init(jax.random.key(seed), config.hparams(make_config(**overrides)))
    history = []
    for k in range(steps):
        state, metrics = built.train_step(state, make_batch(k))
        history.append(jax.device_get(metrics))
    return state, history


@functools.cache
def reference(strategy="token"):
    return train(build("jit", 1, strategy=strategy)[0])


def assert_same_run(run, expected_run, atol=1e-6):
    (state, history), (expected_state, expected_history) = run, expected_run
    for metrics, expected in zip(history, expected_history, strict=True):
        assert metrics.keys() == expected.keys()
        for name, leaf in metrics.items():
            if name in ("loss", "grad_norm", "learning_rate"):
                np.testing.assert_allclose(leaf, expected[name], rtol=1e-5)
            else:  # counts, the hash of the masks: exactly
                np.testing.assert_array_equal(leaf, expected[name], err_msg=name)
    jax.tree.map(
        lambda leaf, expected: np.testing.assert_allclose(leaf, expected, atol=atol),
        jax.device_get(state.params),
        jax.device_get(expected_state.params),
    )


@pytest.mark.parametrize("mode, devices, microbatches", LAYOUTS)
def test_every_layout_gives_the_same_run(mode, devices, microbatches):
    assert_same_run(train(build(mode, devices, microbatches)[0]), reference())


@pytest.mark.parametrize(
    "layout",
    [("pmap", 8), ("shard_map", 4), ("jit", 2, 2)],
    ids=str,
)
@pytest.mark.slow
def test_every_layout_learns_the_same_from_spans(layout):
    """Whether it hides the same, corruption/test_layouts.py asks of every strategy."""
    run = train(build(*layout, strategy="span")[0])
    assert_same_run(run, reference("span"))
    hashes = [metrics["mask_hash"] for metrics in run[1]]
    assert hashes != [metrics["mask_hash"] for metrics in reference()[1]]
    lengths = sum(metrics["unit_lengths"] for metrics in run[1])
    assert (lengths[1:] > 0).sum() >= 3


def test_pmap_leaves_the_same_bits_on_every_device():
    """pmap does not check replication: a forgotten psum would show here."""
    state, _ = train(build("pmap", 8)[0], steps=10)
    for leaf in jax.tree.leaves((state.params, state.opt_state, state.step)):
        shards = [np.asarray(shard.data) for shard in leaf.addressable_shards]
        assert len(shards) == 8
        for shard in shards[1:]:
            np.testing.assert_array_equal(shard, shards[0])


def test_the_state_is_donated_and_the_batch_is_not():
    built, _ = build("pmap", 8)
    state = built.init(jax.random.key(0), config.hparams(make_config()))
    batch = jax.device_put(make_batch(0))
    new_state, _ = built.train_step(state, batch)
    assert state.params["encoder"]["embed"]["embedding"].is_deleted()
    assert not batch["tokens"].is_deleted()
    assert int(new_state.step) == 1


@pytest.mark.parametrize("layout", [("pmap", 8), ("shard_map", 8), ("jit", 8, 2)])
def test_one_compilation_for_every_number(layout):
    """Rate, split, learning rate, decay, clip, schedule and seed are all traced."""
    changes = [
        {},
        {"corruption.rate": 0.15, "corruption.mask_frac": 0.5},
        {"optim.peak_learning_rate": 0.02, "optim.warmup_steps": 3},
        {"optim.weight_decay": 0.0, "optim.clip_norm": 9.0, "optim.num_steps": 50},
    ]
    built, traces = build(*layout)
    hashes = set()
    for seed, change in enumerate(changes):
        _, history = train(built, steps=2, seed=seed, **change)
        hashes |= {int(metrics["mask_hash"]) for metrics in history}
    assert len(traces) == 1
    assert len(hashes) == 2 * len(changes)


def toy_step(state, batch, *, axis=None, num_microbatches=1):
    """`sum_grads` and the reductions of `train_step` on losses that are given."""

    def loss_fn(params, batch, key):
        loss = jnp.sum(params["w"] * batch["loss"])
        return loss, {"loss": loss, "num_masked": batch["count"].sum()}

    params = collectives.varying(state, axis)
    grads, sums = step.sum_grads(loss_fn, params, batch, None, num_microbatches)
    grads, sums = collectives.psum((grads, sums), axis)
    return grads["w"] / sums["num_masked"], sums["loss"] / sums["num_masked"]


@pytest.mark.parametrize("mode", ["pmap", "shard_map", "jit"])
def test_b53_the_mean_is_over_tokens_not_over_devices(mode):
    """Two targets summing to 6 on one device, six summing to 6 on another: 12 / 8."""
    batch = {"loss": jnp.array([6.0, 6.0]), "count": jnp.array([2.0, 6.0])}
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    run = parallel.compile_eval_step(
        lambda params, batch, key, hparams, axis=None: toy_step(
            params, batch, axis=axis
        ),
        mode,
        mesh,
        parallel_shardings(mesh),
    )
    gradient, loss = run({"w": jnp.float32(1)}, batch, jnp.int32(0), jnp.int32(0))
    assert float(loss) == 1.5
    assert float(gradient) == 1.5


def parallel_shardings(mesh):
    class Shardings:
        params = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    return Shardings


def test_b52_the_mean_is_over_tokens_not_over_microbatches():
    """One target of loss 4, then three of loss 1: 7 / 4, not 2.5."""
    batch = {"loss": jnp.array([4.0, 3.0]), "count": jnp.array([1.0, 3.0])}
    _, loss = toy_step({"w": jnp.float32(1)}, batch, num_microbatches=2)
    assert float(loss) == 1.75


def test_rules_that_match_nothing_are_refused():
    mesh = make_mesh(2)
    spec = jax.sharding.PartitionSpec("data")
    with pytest.raises(ValueError, match="no_such_parameter"):
        parallel.state_shardings(
            {"w": jnp.ones(2)}, [("no_such_parameter", spec)], mesh
        )
    shardings = parallel.state_shardings(
        {"a": {"w": jnp.ones(2)}}, [("a/w", spec)], mesh
    )
    assert shardings["a"]["w"].spec == spec
