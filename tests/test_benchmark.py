"""The heads that the benchmark compares do the same work."""

import functools

import jax
import numpy as np

from mlm_jax import benchmark


@functools.cache
def heads():
    inputs = benchmark.make_inputs(
        batch_size=32, row_length=64, width=16, vocab_size=4096, rate=0.5
    )
    return benchmark.compile_heads(inputs), inputs


def test_the_three_heads_agree():
    compiled, inputs = heads()
    results = {name: jax.device_get(head(*inputs)) for name, head in compiled.items()}
    expected_loss, expected_gradients = results["gathered"]
    for loss, gradients in results.values():
        np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
        for gradient, expected in zip(gradients, expected_gradients, strict=True):
            np.testing.assert_allclose(gradient, expected, atol=1e-5)


def test_the_fused_head_never_holds_all_logits():
    """Four chunks of 256 predictions, against 1,024 at once and all 2,048 positions."""
    compiled, _ = heads()
    memory = {name: benchmark.temporary_bytes(head) for name, head in compiled.items()}
    assert memory["fused"] < memory["gathered"] < memory["full"]
    assert memory["full"] > 2 * memory["fused"]
