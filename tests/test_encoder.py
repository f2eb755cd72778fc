"""The encoder: who sees whom, every number against double precision, dropout."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special, stats

from mlm_jax.model import attention, layers
from mlm_jax.model import encoder as encoder_module
from tests.helpers import CLS, SEP, make_batch, random_params, tiny_model

LENGTH = 16
NORM_POSITIONS = ("post", "pre")
SEGMENT_L = np.array([1] * 5 + [2] * 3 + [3] * 4 + [0] * 4)


@functools.cache
def model_and_params(norm_position="post", **changes):
    model = tiny_model(norm_position=norm_position, **changes)
    return model, random_params(model)


@functools.cache
def compile_encode(norm_position="post", **changes):
    """Returns the jitted `encode(params, batch, keys)`: the encoder alone."""
    model, _ = model_and_params(norm_position, **changes)

    def encode(encoder, batch, keys_B):
        return encoder(batch["tokens"], batch["segment"], batch["position"], keys_B)

    @jax.jit
    def apply(params, batch, keys_B=None):
        return model.encoder.apply(
            {"params": params["encoder"]}, batch, keys_B, method=encode
        )

    return apply


@functools.cache
def compile_model(norm_position="post", **changes):
    model, _ = model_and_params(norm_position, **changes)

    @jax.jit
    def apply(params, batch, predict_BxM, keys_B=None):
        return model.apply(
            {"params": params},
            batch["tokens"],
            batch["segment"],
            batch["position"],
            predict_BxM,
            keys_B,
        )

    return apply


def encode(batch, norm_position="post", keys_B=None, **changes):
    _, params = model_and_params(norm_position, **changes)
    fn = compile_encode(norm_position, **changes)
    return np.asarray(fn(params, batch, keys_B))


def packed_batch(num_rows=LENGTH, seed=0):
    """The same packed row, `num_rows` times."""
    tokens_L = np.random.default_rng(seed).integers(5, 12, LENGTH)
    tokens_L = np.where(SEGMENT_L > 0, tokens_L, 0)
    return make_batch([tokens_L] * num_rows, [SEGMENT_L] * num_rows)


def random_batch(num_rows, seed=0):
    rng = np.random.default_rng(seed)
    return make_batch(rng.integers(0, 12, (num_rows, LENGTH)), [SEGMENT_L] * num_rows)


# ---- who sees whom ------------------------------------------------------------------


@pytest.mark.parametrize("norm_position", NORM_POSITIONS)
def test_a_token_is_seen_by_its_own_segment_and_by_no_other(norm_position):
    """Row i has another token at i. Exactly zero elsewhere, not small; and padding is
    one more segment, which no token looks at."""
    batch = packed_batch()
    base_BxLxD = encode(batch, norm_position)
    changed = batch | {"tokens": batch["tokens"].copy()}
    each_L = np.arange(LENGTH)
    changed["tokens"][each_L, each_L] = (changed["tokens"][each_L, each_L] + 1) % 12
    is_changed_LxL = (encode(changed, norm_position) != base_BxLxD).any(-1)
    np.testing.assert_array_equal(
        is_changed_LxL, SEGMENT_L[:, None] == SEGMENT_L[None, :]
    )


def test_the_jacobian_is_zero_between_segments():
    """Of the sum over each output position with respect to each position's vector."""
    model, params = model_and_params()
    batch = jax.tree.map(lambda x: x[:1], packed_batch())
    batch = batch | {"position": np.arange(LENGTH)[None]}  # one vector a position

    def outputs_L(table_LxD):
        encoder = params["encoder"] | {"position_embed": {"embedding": table_LxD}}
        x_BxLxD = model.encoder.apply(
            {"params": encoder}, batch["tokens"], batch["segment"], batch["position"]
        )
        return (x_BxLxD[0] * jnp.arange(1.0, 9.0)[None]).sum(-1)

    table_LxD = params["encoder"]["position_embed"]["embedding"]
    jacobian_LxLxD = np.asarray(jax.jit(jax.jacobian(outputs_L))(table_LxD))
    is_same_LxL = SEGMENT_L[:, None] == SEGMENT_L[None, :]
    assert (jacobian_LxLxD[~is_same_LxL] == 0).all()
    assert (np.abs(jacobian_LxLxD[is_same_LxL]).max(-1) > 0).all()


@pytest.mark.parametrize("norm_position", NORM_POSITIONS)
def test_b32_extra_padding_changes_nothing(norm_position):
    tokens_L = np.array([CLS, 5, 6, 7, 8, 9, 5, 6, 11, SEP])
    short = make_batch([tokens_L], [np.ones(10)])
    long = make_batch([np.pad(tokens_L, (0, 6))], [np.pad(np.ones(10), (0, 6))])
    short_BxLxD, long_BxLxD = (encode(b, norm_position) for b in (short, long))
    assert np.abs(long_BxLxD[:, :10] - short_BxLxD).max() <= 1e-5
    assert np.isfinite(long_BxLxD).all()


def test_a_row_without_any_token_is_finite():
    batch = make_batch(np.zeros((1, LENGTH)))
    assert np.isfinite(encode(batch)).all()
    _, params = model_and_params()

    def total(params):
        return jnp.sum(
            compile_model().__wrapped__(params, batch, np.zeros((1, 1), int))[0]
        )

    grads = jax.jit(jax.grad(total))(params)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))


@pytest.mark.parametrize(
    "dtype, tolerance",
    [
        pytest.param("float32", 1e-6, marks=pytest.mark.slow),
        ("bfloat16", 2e-2),
        pytest.param("float16", 2e-2, marks=pytest.mark.slow),
    ],
)
def test_b36_a_row_of_padding_is_finite_and_changes_no_other(dtype, tolerance):
    """Beside packed rows, whose segments and padding are masked as well."""
    full = random_batch(4)
    padded = random_batch(4)
    for name in ("tokens", "segment", "position"):
        padded[name] = np.array(padded[name])
        padded[name][3] = 0
    expected_BxLxD = encode(full, dtype=dtype).astype(np.float32)
    found_BxLxD = encode(padded, dtype=dtype).astype(np.float32)
    assert np.isfinite(found_BxLxD).all()
    assert np.abs(found_BxLxD[:3] - expected_BxLxD[:3]).max() <= tolerance
    _, params = model_and_params(dtype=dtype)

    def total(params):
        predict_BxM = np.zeros((4, 1), int)
        hidden, *_ = compile_model(dtype=dtype).__wrapped__(params, padded, predict_BxM)
        return jnp.sum(hidden.astype(jnp.float32) ** 2)

    grads = jax.jit(jax.grad(total))(params)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))


def test_neighbours_in_the_batch_have_no_influence():
    batch = random_batch(LENGTH)
    others = random_batch(LENGTH, seed=1)
    others["tokens"][3] = batch["tokens"][3]
    np.testing.assert_array_equal(encode(batch)[3], encode(others)[3])
    reverse = jax.tree.map(lambda x: x[::-1], batch)
    np.testing.assert_array_equal(encode(reverse)[::-1], encode(batch))


def test_segments_are_alike_wherever_they_lie():
    """The same document first, second and third in a row: its number is no input."""
    document = [CLS, 5, 6, 7, SEP]
    segment_L = np.repeat([1, 2, 3, 0], [5, 5, 5, 1])
    x_LxD = encode(make_batch([document * 3 + [0]], [segment_L]))[0]
    np.testing.assert_allclose(x_LxD[:5], x_LxD[5:10], atol=1e-5)
    np.testing.assert_allclose(x_LxD[:5], x_LxD[10:15], atol=1e-5)


# ---- against double precision -------------------------------------------------------


def reference_norm(x, p):
    centred = x - x.mean(-1, keepdims=True)
    variance = (centred**2).mean(-1, keepdims=True)
    return centred / np.sqrt(variance + 1e-12) * p["scale"] + p["bias"]


def reference_gelu(x):
    return x * (1 + special.erf(x / np.sqrt(2))) / 2


def reference_dense(x, p):
    return x @ p["kernel"] + p["bias"]


def reference_rotation(x_LxK, position_L):
    """Units k and k + K/2 are a complex number, turned by position x 10000^(-2k/K)."""
    half = x_LxK.shape[1] // 2
    angle = position_L[:, None] * 10_000.0 ** (-np.arange(half) / half)
    turned = (x_LxK[:, :half] + 1j * x_LxK[:, half:]) * np.exp(1j * angle)
    return np.concatenate([turned.real, turned.imag], axis=1)


def reference_attention(x_LxD, p, segment_L, rotary_L, num_heads):
    width = x_LxD.shape[1]
    query, key, value = (
        reference_dense(x_LxD, p[n]) for n in ("query", "key", "value")
    )
    y_LxD = np.zeros_like(x_LxD)
    size = width // num_heads
    for head in range(num_heads):
        of_head = slice(head * size, (head + 1) * size)
        if rotary_L is not None:
            query[:, of_head] = reference_rotation(query[:, of_head], rotary_L)
            key[:, of_head] = reference_rotation(key[:, of_head], rotary_L)
        for i in range(len(x_LxD)):
            seen = np.flatnonzero(segment_L == segment_L[i])
            scores = key[seen, of_head] @ query[i, of_head] / np.sqrt(size)
            shares = np.exp(scores - scores.max())
            shares /= shares.sum()
            y_LxD[i, of_head] = shares @ value[seen, of_head]
    return reference_dense(y_LxD, p["out"])


def reference_mlp(x, p):
    return reference_dense(reference_gelu(reference_dense(x, p["up"])), p["down"])


def reference_encoder(params, tokens_L, segment_L, position_L, norm_position):
    """One row, one layer after the other: BERT's block, or the pre-LN one."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    x = p["embed"]["embedding"][tokens_L]
    is_learned = "position_embed" in p
    if is_learned:
        x = x + p["position_embed"]["embedding"][position_L]
    if norm_position == "post":
        x = reference_norm(x, p["embed_norm"])
    for layer in range(2):
        block = jax.tree.map(lambda leaf, layer=layer: leaf[layer], p["blocks"])
        attend = functools.partial(
            reference_attention,
            p=block["attention"],
            segment_L=segment_L,
            rotary_L=None if is_learned else position_L,
            num_heads=2,
        )
        if norm_position == "post":
            x = reference_norm(x + attend(x), block["attention_norm"])
            x = reference_norm(x + reference_mlp(x, block["mlp"]), block["mlp_norm"])
        else:
            x = x + attend(reference_norm(x, block["attention_norm"]))
            x = x + reference_mlp(reference_norm(x, block["mlp_norm"]), block["mlp"])
    return x if norm_position == "post" else reference_norm(x, p["final_norm"])


def reference_head(params, x_MxD):
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params["transform"])
    return reference_norm(reference_gelu(reference_dense(x_MxD, p["dense"])), p["norm"])


@pytest.mark.parametrize("position", ["learned", "rotary"])
@pytest.mark.parametrize("norm_position", NORM_POSITIONS)
def test_encoder_and_head_equal_the_reference(norm_position, position):
    """The layers of the scan, unstacked by hand, and the gather for the head."""
    batch = random_batch(3)
    predict_BxM = np.array([[7, 2, 2], [0, 15, 4], [9, 10, 1]])
    _, params = model_and_params(norm_position, position=position)
    assert ("position_embed" in params["encoder"]) == (position == "learned")
    x_BxLxD = encode(batch, norm_position, position=position)
    hidden_BxMxD, table_VxD, bias_V = compile_model(norm_position, position=position)(
        params, batch, predict_BxM
    )
    for row in range(3):
        want_LxD = reference_encoder(
            params["encoder"],
            batch["tokens"][row],
            batch["segment"][row],
            batch["position"][row],
            norm_position,
        )
        np.testing.assert_allclose(x_BxLxD[row], want_LxD, atol=2e-5)
        want_MxD = reference_head(params, want_LxD[predict_BxM[row]])
        np.testing.assert_allclose(hidden_BxMxD[row], want_MxD, atol=1e-4)
    np.testing.assert_array_equal(table_VxD, params["encoder"]["embed"]["embedding"])
    np.testing.assert_array_equal(bias_V, params["bias"])


@pytest.mark.parametrize("scan_unroll", [2, 3])
def test_unrolled_layers_are_the_same_layers(scan_unroll):
    """Dropout included, whether or not the turns come out even."""
    changes = dict(num_layers=3, dropout=0.3, attention_dropout=0.3)
    batch, keys_B = random_batch(3), dropout_keys(range(3))
    scanned = encode(batch, keys_B=keys_B, **changes)
    unrolled = encode(batch, keys_B=keys_B, scan_unroll=scan_unroll, **changes)
    np.testing.assert_allclose(unrolled, scanned, atol=1e-5)


@pytest.mark.parametrize("shape", [(7, 3, 5), (7, 5, 3), (4, 4, 4)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_dense_layer_and_its_gradients(shape, dtype):
    """The kernel is wide or tall; its gradient is a float32 sum in either dtype."""
    num_rows, num_inputs, num_features = shape
    rng = np.random.default_rng(0)
    layer = layers.Dense(num_features, jnp.dtype(dtype))
    x_NxD = rng.normal(size=(num_rows, num_inputs)).astype(np.float32)
    dy_NxF = rng.normal(size=(num_rows, num_features)).astype(np.float32)
    params = {
        "kernel": rng.normal(size=(num_inputs, num_features)).astype(np.float32),
        "bias": rng.normal(size=num_features).astype(np.float32),
    }

    def total(params, x_NxD):
        y_NxF = layer.apply({"params": params}, x_NxD)
        assert y_NxF.dtype == dtype
        return jnp.sum(y_NxF.astype(jnp.float32) * dy_NxF), y_NxF

    (grads, dx_NxD), y_NxF = jax.grad(total, (0, 1), has_aux=True)(params, x_NxD)
    rtol, atol = (1e-5, 1e-5) if dtype == "float32" else (0.02, 0.05)
    close = functools.partial(np.testing.assert_allclose, rtol=rtol, atol=atol)
    close(y_NxF.astype(np.float32), x_NxD @ params["kernel"] + params["bias"])
    close(dx_NxD, dy_NxF @ params["kernel"].T)
    close(grads["kernel"], x_NxD.T @ dy_NxF)
    close(grads["bias"], dy_NxF.sum(0))
    assert grads["kernel"].dtype == jnp.float32


def test_the_layers_of_the_scan_differ_at_the_start():
    """One seed for all of them would make them one layer applied twice."""
    model, _ = model_and_params()
    row = jnp.zeros((1, LENGTH), jnp.int32)
    params = jax.jit(model.init)(jax.random.key(0), row, row, row, row)["params"]
    kernel = params["encoder"]["blocks"]["attention"]["query"]["kernel"]
    assert not np.isclose(kernel[0], kernel[1]).any()
    # BERT's start: two standard deviations of 0.02 at most, biases 0, scales 1.
    table_VxD = params["encoder"]["embed"]["embedding"]
    assert np.abs(table_VxD).max() <= 0.04
    assert 0.016 < table_VxD.std() < 0.019
    assert (params["transform"]["norm"]["scale"] == 1).all()
    assert (params["transform"]["norm"]["bias"] == 0).all()
    assert (params["bias"] == 0).all()


def test_gelu_and_its_derivative_are_the_exact_ones():
    """The tanh approximation is off by up to 5e-4."""
    x_N = np.linspace(-8, 8, 4001).astype(np.float32)
    exact_N = x_N.astype(np.float64)
    cdf_N = (1 + special.erf(exact_N / np.sqrt(2))) / 2
    density_N = np.exp(-(exact_N**2) / 2) / np.sqrt(2 * np.pi)
    value_N, slope_N = jax.jit(jax.vmap(jax.value_and_grad(layers.gelu)))(x_N)
    np.testing.assert_allclose(value_N, exact_N * cdf_N, atol=1e-6)
    np.testing.assert_allclose(slope_N, cdf_N + exact_N * density_N, atol=1e-6)
    tangent_N = jax.jit(lambda x: jax.jvp(layers.gelu, (x,), (3 * jnp.ones_like(x),)))(
        x_N
    )
    np.testing.assert_allclose(tangent_N[1], 3 * slope_N, rtol=1e-6, atol=1e-6)


def test_gelu_of_bfloat16_is_right_to_its_precision():
    """At -3 it is -0.00405."""
    x_N = jnp.linspace(-4, 4, 801).astype(jnp.bfloat16)
    exact_N = reference_gelu(np.asarray(x_N, np.float64))
    value_N = np.asarray(jax.jit(layers.gelu)(x_N), np.float64)
    np.testing.assert_allclose(value_N, exact_N, rtol=2**-7)


# ---- the head -----------------------------------------------------------------------


def test_hidden_is_gathered_at_the_predicted_positions():
    batch = random_batch(3)
    _, params = model_and_params()
    every_BxL = np.broadcast_to(np.arange(LENGTH), (3, LENGTH))
    all_BxLxD = compile_model()(params, batch, every_BxL)[0]
    predict_BxM = np.array([[7, 2, 2], [0, 15, 4], [9, 10, 1]])
    hidden_BxMxD = compile_model()(params, batch, predict_BxM)[0]
    for row in range(3):
        np.testing.assert_allclose(
            hidden_BxMxD[row], all_BxLxD[row][predict_BxM[row]], atol=1e-6
        )


def test_the_output_matrix_is_the_token_embedding():
    """Its gradient is the sum of what comes from either use."""
    batch = random_batch(2)
    _, params = model_and_params()
    predict_BxM = np.array([[7, 2], [0, 11]])
    apply = compile_model().__wrapped__
    stop = jax.lax.stop_gradient

    def total(params, of_input, of_output):
        """The factors scale the gradient of either use, and leave the value."""
        hidden_BxMxD, table_VxD, bias_V = apply(params, batch, predict_BxM)
        hidden_BxMxD, table_VxD = (
            stop(x) + factor * (x - stop(x))
            for x, factor in ((hidden_BxMxD, of_input), (table_VxD, of_output))
        )
        logits_BxMxV = hidden_BxMxD @ table_VxD.T + bias_V[None, None]
        return jax.nn.logsumexp(logits_BxMxV, axis=-1).sum()

    grad_fn = jax.jit(jax.grad(total))
    both, as_input, as_output = (
        np.asarray(grad_fn(params, *factors)["encoder"]["embed"]["embedding"])
        for factors in ((1.0, 1.0), (1.0, 0.0), (0.0, 1.0))
    )
    np.testing.assert_allclose(both, as_input + as_output, rtol=1e-4, atol=1e-5)
    # As an input only the rows of tokens that a prediction can see have a gradient.
    seen = [
        batch["tokens"][row][SEGMENT_L == SEGMENT_L[i]]
        for row, predict_M in enumerate(predict_BxM)
        for i in predict_M
    ]
    is_seen_V = np.isin(np.arange(len(both)), np.concatenate(seen))
    assert (np.abs(as_input).max(1)[is_seen_V] > 1e-4).all()
    assert (as_input[~is_seen_V] == 0).all()
    assert np.abs(as_output).sum() > 0.1


def test_bfloat16_leaves_parameters_in_float32():
    batch = random_batch(3)
    predict_BxM = np.array([[7, 2, 2], [0, 15, 4], [9, 10, 1]])
    model, params = model_and_params(dtype="bfloat16")
    row = jnp.zeros((1, LENGTH), jnp.int32)
    shapes = jax.eval_shape(model.init, jax.random.key(0), row, row, row, row)
    assert {leaf.dtype for leaf in jax.tree.leaves(shapes)} == {jnp.dtype("float32")}
    half, table_VxD, bias_V = compile_model(dtype="bfloat16")(
        params, batch, predict_BxM
    )
    assert half.dtype == jnp.bfloat16
    assert table_VxD.dtype == bias_V.dtype == jnp.float32
    full = compile_model()(params, batch, predict_BxM)[0]
    assert full.dtype == jnp.float32
    error = np.abs(np.asarray(half, np.float32) - full)
    assert 0 < error.max() < 0.1 and error.mean() < 0.02


# ---- dropout ------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.1, 0.5, 1e-5, 0.9])
def test_dropout_keeps_the_mean_and_meets_its_rate(rate, monkeypatch):
    """Given every 16-bit number once, the share dropped is what it is by design."""
    every_1xN = jnp.arange(2**16, dtype=jnp.uint16)[None]
    monkeypatch.setattr(layers, "_random_bits", lambda keys_B, num_units: every_1xN)
    keys_B = jax.random.split(jax.random.key(0), 1)
    y_NxD = np.asarray(layers.dropout(keys_B, jnp.ones((2**13, 8)), rate), np.float64)
    share = (y_NxD == 0).mean()
    assert abs(share - rate) <= 1 / 2**16
    assert share == round(rate * 2**16) / 2**16
    np.testing.assert_allclose(y_NxD.mean(), 1, rtol=1e-6)


def test_dropout_draws_its_bits_evenly():
    """In statistics: both halves of a word, every unit, every row."""
    num_rows, num_units = 4000, 15  # odd, so that half of the last word is left
    keys_B = jax.random.split(jax.random.key(0), num_rows)
    y_NxD = jax.jit(lambda keys_B, x: layers.dropout(keys_B, x, 0.1))(
        keys_B, jnp.full((num_rows * 5, 3), 2.0)
    )
    y_BxU = np.asarray(y_NxD).reshape(num_rows, num_units)
    np.testing.assert_allclose(y_BxU[y_BxU > 0], 2 / 0.9, rtol=1e-4)
    dropped_BxU = y_BxU == 0
    deviation = np.sqrt(0.1 * 0.9 / num_rows)
    assert (np.abs(dropped_BxU.mean(0) - 0.1) < 5 * deviation).all()
    # Neighbours are independent: they drop together in one of a hundred.
    pairs = (dropped_BxU[:, 1:] & dropped_BxU[:, :-1]).mean()
    assert abs(pairs - 0.01) < 5 * np.sqrt(0.01 * 0.99 / (num_rows * 14))


def test_the_hashed_bits_look_random():
    """By chi-square and correlation, along a row, over rows of neighbouring keys, and
    between sites, whose keys are split from one."""
    num_rows, num_units = 64, 2**14
    rows_B = dropout_keys(range(num_rows))
    sites_2xB = jax.vmap(lambda key: jax.random.split(key, 2), out_axes=1)(rows_B)
    bits_2xBxU = np.stack(
        [np.asarray(layers._random_bits(keys_B, num_units)) for keys_B in sites_2xB]
    )
    for byte in (bits_2xBxU >> 8, bits_2xBxU & 255):
        counts = np.bincount(byte.ravel(), minlength=256)
        assert stats.chisquare(counts).pvalue > 1e-4
    z_2xBxU = (bits_2xBxU - bits_2xBxU.mean()) / bits_2xBxU.std()
    pairs = {f"lag {n}": (z_2xBxU[..., n:], z_2xBxU[..., :-n]) for n in (1, 2, 3, 16)}
    pairs["rows"] = z_2xBxU[:, 1:], z_2xBxU[:, :-1]
    pairs["sites"] = z_2xBxU[0], z_2xBxU[1]
    for name, (a, b) in pairs.items():
        assert abs(np.mean(a * b)) < 5 / np.sqrt(a.size), name
        # Dropped together as often as independent ones are.
        together = np.mean((a < -1.5) & (b < -1.5))
        expected = np.mean(a < -1.5) * np.mean(b < -1.5)
        assert abs(together - expected) < 5 * np.sqrt(expected / a.size), name


def dropout_keys(rows, seed=0):
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(
        jax.random.key(seed), np.asarray(rows)
    )


@pytest.mark.parametrize("norm_position", NORM_POSITIONS)
def test_dropout_of_a_row_depends_on_its_own_key_only(norm_position):
    """The same row and key, elsewhere in a batch of other rows with other keys."""
    batch, others = random_batch(4), random_batch(4, seed=1)
    others["tokens"][3] = batch["tokens"][1]
    run = functools.partial(encode, norm_position=norm_position, dropout=0.3)
    x_BxLxD = run(batch, keys_B=dropout_keys([0, 1, 2, 3]))
    y_BxLxD = run(others, keys_B=dropout_keys([7, 8, 9, 1]))
    np.testing.assert_allclose(y_BxLxD[3], x_BxLxD[1], atol=1e-5)
    # Another key is another mask.
    z_BxLxD = run(batch, keys_B=dropout_keys([0, 5, 2, 3]))
    assert np.abs(z_BxLxD[1] - x_BxLxD[1]).max() > 0.1
    np.testing.assert_allclose(z_BxLxD[0], x_BxLxD[0], atol=1e-5)


def test_no_keys_no_dropout():
    batch = random_batch(4)
    without = encode(batch)
    np.testing.assert_allclose(encode(batch, dropout=0.3), without, atol=1e-6)
    keys_B = dropout_keys(range(4))
    np.testing.assert_allclose(encode(batch, keys_B=keys_B), without, atol=1e-6)


def attention_inputs(num_rows=3, num_heads=2, head_size=4):
    """Returns query, key, value and the mask of packed rows."""
    rng = np.random.default_rng(0)
    shape = 3, num_rows, LENGTH, num_heads, head_size
    mask = attention.segment_mask(np.tile(SEGMENT_L, (num_rows, 1)))
    return *jnp.asarray(rng.normal(size=shape), jnp.float32), mask


def test_attention_with_its_weights_at_hand_is_the_same_attention():
    *qkv, mask = attention_inputs()
    want = jax.nn.dot_product_attention(*qkv, mask=mask)
    have = attention.attend(*qkv, mask, lambda weight: weight)
    np.testing.assert_allclose(have, want, atol=1e-6)


def test_attention_dropout_drops_weights_and_keeps_the_mean():
    """The value one-hot in the position shows the weights; no sum is one any more."""
    query, key, _, mask = attention_inputs(head_size=LENGTH)
    value = jnp.broadcast_to(jnp.eye(LENGTH)[None, :, None], query.shape)

    def weights(keys_B):
        return attention.attend(
            query, key, value, mask, lambda w: layers.dropout(keys_B, w, 0.25)
        )

    whole = weights(None)
    many = jnp.stack([weights(dropout_keys(range(3), seed)) for seed in range(200)])
    is_seen = np.broadcast_to(np.asarray(whole) > 0, many.shape)
    assert abs((np.asarray(many)[is_seen] == 0).mean() - 0.25) < 0.01
    assert (np.asarray(many)[~is_seen] == 0).all()
    np.testing.assert_allclose(many.mean(0), whole, atol=0.15)
    np.testing.assert_allclose((many.mean(0) - whole).mean(), 0, atol=2e-3)


def test_attention_dropout_of_a_row_depends_on_its_own_key_only():
    batch, others = random_batch(4), random_batch(4, seed=1)
    others["tokens"][3] = batch["tokens"][1]
    run = functools.partial(encode, attention_dropout=0.3)
    x_BxLxD = run(batch, keys_B=dropout_keys([0, 1, 2, 3]))
    y_BxLxD = run(others, keys_B=dropout_keys([7, 8, 9, 1]))
    np.testing.assert_allclose(y_BxLxD[3], x_BxLxD[1], atol=1e-5)
    assert np.abs(run(batch)[1] - x_BxLxD[1]).max() > 0.01
    np.testing.assert_allclose(run(batch), encode(batch), atol=1e-6)


@pytest.mark.parametrize("norm_position", NORM_POSITIONS)
def test_every_site_of_every_layer_drops_by_a_key_of_its_own(
    norm_position, monkeypatch
):
    """After the embedding, and twice in each of two layers: five keys a row."""
    model, params = model_and_params(norm_position, dropout=0.3)
    seen = []

    def note(data):
        seen.append(np.asarray(data))
        return np.float32(0)

    def record(keys_B, x_NxD, rate):
        assert rate == 0.3
        zero = jax.ShapeDtypeStruct((), jnp.float32)
        # Its result is used, so that the scan keeps the call.
        zero = jax.pure_callback(note, zero, jax.random.key_data(keys_B))
        return layers.dropout(keys_B, x_NxD, rate) + zero

    monkeypatch.setattr(encoder_module, "dropout", record)
    batch = random_batch(3)
    args = batch["tokens"], batch["segment"], batch["position"]
    keys_B = dropout_keys(range(3))
    jax.block_until_ready(
        model.encoder.apply({"params": params["encoder"]}, *args, keys_B)
    )
    assert len(seen) == 5
    assert len(np.unique(np.concatenate(seen), axis=0)) == 5 * 3


def test_dropout_falls_on_the_sublayers_and_the_residual_is_whole():
    """With every sublayer dropped a pre-LN block is the identity, and nothing is left
    of the tokens where the embedding is dropped."""
    batch = random_batch(2)
    model, params = model_and_params("pre")

    def dropped(keys_B, x_NxD, rate):
        return jnp.zeros_like(x_NxD)

    args = batch["tokens"], batch["segment"], batch["position"], dropout_keys(range(2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoder_module, "dropout", dropped)
        x_BxLxD = model.encoder.apply({"params": params["encoder"]}, *args)
    bias_D = params["encoder"]["final_norm"]["bias"]
    np.testing.assert_array_equal(x_BxLxD, np.broadcast_to(bias_D, x_BxLxD.shape))
