"""Each optimizer against its paper's algorithm, a matrix at a time, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mlm_jax import optim
from tests.helpers import hparams

NUM_LAYERS = 2
# Adafactor factors what has 128 rows and columns.
SHAPES = {
    "blocks": {"kernel": (NUM_LAYERS, 128, 130), "bias": (NUM_LAYERS, 130)},
    "dense": {"kernel": (8, 6), "bias": (6,)},
    "embed": {"embedding": (140, 128)},
}
NUMBERS = dict(weight_decay=0.1, b1=0.9, b2=0.99, eps=1e-3)
STEPS = 10


def draw(rng, size=1.0):
    return jax.tree.map(
        lambda shape: rng.normal(0, size, shape).astype(np.float32),
        SHAPES,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def matrices(tree):
    """Returns {name: matrix or vector} in double precision, layers apart."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(jax.device_get(tree)):
        name = "/".join(part.key for part in path)
        parts = leaf if "blocks" in name else [leaf]
        found |= {f"{i}/{name}": x.astype(np.float64) for i, x in enumerate(parts)}
    return found


def rms(x):
    return np.sqrt(np.mean(x**2))


class Adam:
    def __init__(self, name):
        self.m = self.v = 0.0

    def __call__(self, t, g, p):
        h = NUMBERS
        self.m = h["b1"] * self.m + (1 - h["b1"]) * g
        self.v = h["b2"] * self.v + (1 - h["b2"]) * g**2
        self.v_hat = self.v / (1 - h["b2"] ** t)
        return self.m / (1 - h["b1"] ** t) / (np.sqrt(self.v_hat) + h["eps"])


class StableAdam(Adam):
    def __call__(self, t, g, p):
        update = super().__call__(t, g, p)
        floor = np.maximum(self.v_hat, NUMBERS["eps"] ** 2)
        return update / max(1, np.sqrt(np.mean(g**2 / floor)))


class Lamb(Adam):
    def __init__(self, name):
        super().__init__(name)
        self.is_scaled = not name.endswith("bias")

    def __call__(self, t, g, p):
        update = super().__call__(t, g, p)
        if not self.is_scaled:
            return update
        update = update + NUMBERS["weight_decay"] * p
        return update * np.linalg.norm(p) / np.linalg.norm(update)


class Lion:
    def __init__(self, name):
        self.m = 0.0

    def __call__(self, t, g, p):
        h = NUMBERS
        update = np.sign(h["b1"] * self.m + (1 - h["b1"]) * g)
        self.m = h["b2"] * self.m + (1 - h["b2"]) * g
        return update


class Adafactor:
    """Algorithm 4, with decay 1 - t^-0.8, clipping at 1 and a relative step."""

    def __init__(self, name):
        self.rows = self.columns = self.v = 0.0

    def __call__(self, t, g, p):
        decay, square = 1 - t**-0.8, g**2 + 1e-30
        if min(g.shape) >= 128 and g.ndim == 2:
            self.rows = decay * self.rows + (1 - decay) * square.mean(1)
            self.columns = decay * self.columns + (1 - decay) * square.mean(0)
            v = np.outer(self.rows, self.columns) / self.rows.mean()
        else:
            v = self.v = decay * self.v + (1 - decay) * square
        update = g / np.sqrt(v)
        return update / max(1, rms(update)) * max(1e-3, rms(p))


class Muon(Adam):
    """Nesterov momentum, five turns of Newton and Schulz, an update as large as
    AdamW's; AdamW itself for what is no matrix of a layer."""

    def __init__(self, name):
        super().__init__(name)
        self.is_matrix = name.endswith("kernel")

    def __call__(self, t, g, p):
        if not self.is_matrix:
            return super().__call__(t, g, p)
        b = NUMBERS["b1"]
        self.m = b * self.m + (1 - b) * g
        x = b * self.m / (1 - b ** (t + 1)) + (1 - b) * g / (1 - b**t)
        x = x / np.linalg.norm(x)
        for _ in range(5):
            square = x @ x.T
            x = 3.4445 * x + (-4.775 * square + 2.0315 * square @ square) @ x
        return 0.2 * np.sqrt(max(g.shape)) * x


class Sgd:
    def __init__(self, name):
        pass

    def __call__(self, t, g, p):
        return g


REFERENCES = {
    "adamw": Adam,
    "stable_adamw": StableAdam,
    "lamb": Lamb,
    "lion": Lion,
    "adafactor": Adafactor,
    "muon": Muon,
    "sgd": Sgd,
}


def gradients():
    rng = np.random.default_rng(1)
    # A gradient that grows at once, which is what clipping of updates is for.
    sizes = [1, 1, 1, 0.01, 0.1, 30, 1, 1, 3, 1]
    return [draw(rng, size) for size in sizes]


def make_update(name):
    @jax.jit
    def update(params, state, grads, rate, numbers):
        transform = optim.OPTIMIZERS[name](rate, numbers)
        updates, state = transform.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return update


@pytest.mark.parametrize("name", sorted(REFERENCES))
def test_ten_steps_are_those_of_the_paper(name):
    assert REFERENCES.keys() == optim.OPTIMIZERS.keys()
    numbers = hparams(**NUMBERS)
    params = draw(np.random.default_rng(0))
    want = matrices(params)
    references = {matrix: REFERENCES[name](matrix) for matrix in want}
    update = make_update(name)
    state = optim.OPTIMIZERS[name](0.0, numbers).init(params)
    rates = np.linspace(0.03, 0.001, STEPS)
    for t, (grads, rate) in enumerate(zip(gradients(), rates, strict=True), 1):
        params, state = update(params, state, grads, jnp.float32(rate), numbers)
        for matrix, g in matrices(grads).items():
            p = want[matrix]
            is_decayed = not matrix.endswith("bias") and name != "lamb"
            decay = NUMBERS["weight_decay"] * p * is_decayed
            want[matrix] = p - rate * (references[matrix](t, g, p) + decay)
    for matrix, found in matrices(params).items():
        np.testing.assert_allclose(
            found, want[matrix], rtol=1e-4, atol=1e-4, err_msg=matrix
        )


@pytest.mark.parametrize("name", sorted(REFERENCES))
def test_r23_a_frozen_update_moves_no_bit_of_a_moment(name):
    numbers = hparams(**NUMBERS)
    params = draw(np.random.default_rng(0))
    update = make_update(name)
    state = optim.OPTIMIZERS[name](0.0, numbers).init(params)
    for grads in gradients()[:3]:
        params, state = update(params, state, grads, jnp.float32(0.01), numbers)
    zeros = jax.tree.map(lambda x: np.full_like(x, -0.0), params)
    frozen = optim.frozen_unless(False, numbers)
    _, after = update(params, state, zeros, jnp.float32(0.01), frozen)
    for old, new in zip(jax.tree.leaves(state), jax.tree.leaves(after), strict=True):
        if old.ndim:
            assert np.asarray(old).tobytes() == np.asarray(new).tobytes()


def test_muons_update_is_nearly_orthogonal_and_as_large_as_adamws():
    numbers = hparams(**NUMBERS | {"weight_decay": 0.0})
    params, grads = draw(np.random.default_rng(0)), gradients()[0]
    state = optim.muon(1.0, numbers).init(params)
    after, _ = make_update("muon")(params, state, grads, jnp.float32(1), numbers)
    before = matrices(params)
    for matrix, found in matrices(after).items():
        change = before[matrix] - found
        if matrix.endswith("kernel"):
            values = np.linalg.svd(change / 0.2 / np.sqrt(max(change.shape)))[1]
            assert 0.6 < np.quantile(values, 0.05) and values.max() < 1.3
            assert 0.15 < rms(change) < 0.25
