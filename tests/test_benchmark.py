"""What the benchmark measures is what it says, and the work it counts is there."""

import functools
import io
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import base
from mlm_jax import benchmark, benchmark_parts, flops, huge_pages
from tests.helpers import largest_shape

PRESET = benchmark.Preset(2, 32, 2, 64, 1024, batch_size=32, row_length=64)
LARGE_VOCABULARY = PRESET._replace(width=8, vocab_size=30_592)


@functools.cache
def bench(rate=0.5):
    return benchmark.Bench(PRESET, rate=rate, dropout=0.1)


@functools.cache
def heads():
    return benchmark_parts.compile_heads(benchmark.Bench(LARGE_VOCABULARY, rate=0.5))


def test_the_three_heads_agree():
    compiled, inputs = heads()
    results = {name: jax.device_get(head(*inputs)) for name, head in compiled.items()}
    expected_loss, expected_gradients = results["gathered"]
    for loss, gradients in results.values():
        np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
        for gradient, expected in zip(gradients, expected_gradients, strict=True):
            np.testing.assert_allclose(gradient, expected, atol=1e-5)


def test_the_fused_head_never_holds_all_logits():
    """Four chunks of predictions, against 1,024 at once and all 2,048 positions."""
    compiled, _ = heads()
    memory = {
        name: benchmark_parts.temporary_bytes(head) for name, head in compiled.items()
    }
    assert memory["fused"] < memory["gathered"] < memory["full"]
    assert memory["full"] > 2 * memory["fused"]


def test_a_chunk_of_logits_is_the_largest_array_of_a_step():
    """1,024 predictions, at most 256 at a time, fewer where devices share them."""
    step = benchmark.Bench(LARGE_VOCABULARY, rate=0.5)
    num_rows, num_columns = largest_shape(step.compiled)
    assert num_rows <= 256 and num_columns == 30_592


def test_the_step_is_dispatched_fast():
    """An effect, as a check leaves behind, would keep every call on jax's slow path:
    milliseconds a step."""
    b = bench()
    traced = b.program.train_step.trace(b.state, b.batch)
    assert not traced.jaxpr.effects


def test_the_step_predicts_what_is_counted_and_learns():
    b = bench()
    first, second = (jax.device_get(b.step()) for _ in range(2))
    assert first["num_masked"] == PRESET.batch_size * b.predictions_per_row == 32 * 32
    assert np.isfinite(first["loss"]) and second["loss"] != first["loss"]


def test_flops_are_those_of_a_hand_count():
    """One layer of width 2, MLP 3, rows of 5, vocabulary 7, two rows, one prediction
    in each: 10 x (8 x 4 + 4 x 6 + 4 x 10) + 2 x (2 x 4 + 2 x 14), three times."""
    counted = flops.step_flops(
        num_layers=1,
        width=2,
        mlp_width=3,
        row_length=5,
        vocab_size=7,
        num_rows=2,
        predictions_per_row=1,
    )
    assert counted == 3 * (10 * 96 + 2 * 36) == 3096


def test_flops_of_gates_and_windows_are_those_of_a_hand_count():
    """Of three layers of that kind the first sees 5, the others 2 x 1 + 1 = 3 tokens:
    3 x 10 x (8 x 4 + 6 x 6) + 10 x 4 x 2 x (5 + 3 + 3), three times."""
    counted = flops.step_flops(
        num_layers=3,
        width=2,
        mlp_width=3,
        row_length=5,
        vocab_size=7,
        num_rows=2,
        predictions_per_row=0,
        gated=True,
        global_every=3,
        window=1,
    )
    assert counted == 3 * (30 * 68 + 80 * 11) == 8760
    c = base.get_config()
    plain = flops.config_flops(c, 0)
    c.model.gated, c.model.global_every, c.model.window = True, 12, 8
    saved = 11 * 4 * (128 - 17) * 768 - 12 * 2 * 768 * 3072
    assert plain - flops.config_flops(c, 0) == 3 * 256 * 128 * saved


def test_flops_of_a_config_count_every_view_of_a_row():
    c = base.get_config()
    flops_of_one = flops.config_flops(c, 20)
    sizes = dict(num_layers=12, width=768, mlp_width=3072, row_length=128)
    sizes |= dict(vocab_size=30522, num_rows=256, predictions_per_row=20)
    assert flops_of_one == flops.step_flops(**sizes)
    c.corruption.views = 3
    assert flops.config_flops(c, 20) == 3 * flops_of_one


def test_flops_are_what_the_compiler_counts():
    """Its count has the softmaxes, norms, dropout and optimizer too. Where nothing is
    scanned: it counts the body of a loop once."""
    preset = benchmark.Preset(2, 128, 2, 512, 1024, batch_size=8, row_length=64)
    b = benchmark.Bench(preset, rate=0.25)
    assert preset.batch_size * b.predictions_per_row <= 256  # a single chunk
    lowered = b.program.train_step.lower(b.state, b.batch)
    counted = lowered.cost_analysis()["flops"] * jax.device_count()  # of one of them
    assert 1 < counted / b.flops() < 1.15


def test_measure_takes_turns():
    order: list[str] = []

    def call(name):
        order.append(name)
        return jnp.zeros(())

    seconds = benchmark_parts.measure(
        {name: functools.partial(call, name) for name in "ab"}, rounds=2
    )
    assert order == list("ababab")  # the first round is not measured
    assert {name: len(times) for name, times in seconds.items()} == {"a": 2, "b": 2}


def test_serve_measures_when_it_is_asked(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("2\n1\n"))
    benchmark.serve(bench())
    ready, *samples = map(json.loads, capsys.readouterr().out.splitlines())
    assert ready["ready"] and ready["K"] == 32 and ready["gflop_step"] > 0
    assert [len(times) for times in samples] == [2, 1]
    assert all(sample["ms"] > 0 for times in samples for sample in times)


@pytest.mark.parametrize(
    "library, kernel, expected",
    [
        (("glibc", "2.36"), "always [madvise] never", True),
        (("glibc", "2.36"), "[always] madvise never", True),
        (("glibc", "2.36"), "always madvise [never]", False),
        (("glibc", "2.31"), "always [madvise] never", False),
        (("", ""), "always [madvise] never", False),
        (("glibc", "2.36"), None, False),
    ],
)
def test_huge_pages_are_asked_for_where_they_exist(
    library, kernel, expected, monkeypatch, tmp_path
):
    """And the command is started again exactly once, with other tunables kept."""
    path = tmp_path / "enabled"
    if kernel:
        path.write_text(kernel)
    started = []
    monkeypatch.setattr(huge_pages, "KERNEL", path)
    monkeypatch.setattr(huge_pages.platform, "libc_ver", lambda: library)
    monkeypatch.setattr(huge_pages.os, "execv", lambda *args: started.append(args))
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.check=1")
    for _ in range(2):
        huge_pages.restart_with_huge_pages()
    assert started == [(sys.executable, sys.orig_argv)] * expected
    assert huge_pages.are_asked_for() == expected
    assert huge_pages.os.environ["GLIBC_TUNABLES"].startswith("glibc.malloc.check=1")
