"""Measures a training step, or its parts, on random rows; one JSON object a line.

    python -m mlm_jax.benchmark --preset=mini
    python -m mlm_jax.benchmark --preset=mini --breakdown
    python -m mlm_jax.benchmark --part=loss_head --preset=base

A step is everything that training does: corruption, encoder with dropout, loss, AdamW.
`ceil(rate x L)` tokens of each row are predicted. `mfu` is the arithmetic that the step
needs (`flops.step_flops`), by its time, by the rate of a large matrix product measured
in turn with it: 1 is a step that does nothing but multiply matrices at full speed.

`--serve` prints a line when the step is compiled, and then, for each number n on
standard input, a list of n measured steps, so that others can be measured in turn with
it (see experiments/speed/race.py).
"""

import functools
import json
import math
import resource
import statistics
import sys
import time
from typing import NamedTuple

import jax
import numpy as np
from absl import flags

from configs import base
from mlm_jax import benchmark_parts, command, config, huge_pages, parallel, program
from mlm_jax.data.tokenizer import Vocabulary
from mlm_jax.flops import step_flops


class Preset(NamedTuple):
    num_layers: int
    width: int
    num_heads: int
    mlp_width: int
    vocab_size: int
    batch_size: int
    row_length: int = 128


PRESETS = {
    "tiny": Preset(2, 128, 2, 512, 8192, 16),
    "mini": Preset(4, 256, 4, 1024, 30522, 32),
    "small": Preset(4, 512, 8, 2048, 30522, 16),
    "base": Preset(12, 768, 12, 3072, 30522, 8),
}
PRESET = flags.DEFINE_enum("preset", "mini", PRESETS, "Size of the model and batch.")
VOCAB_SIZE = flags.DEFINE_integer("vocab_size", None, "Instead of the preset's.", 8)
BATCH_SIZE = flags.DEFINE_integer("batch_size", None, "Instead of the preset's.", 1)
ROW_LENGTH = flags.DEFINE_integer("row_length", None, "Instead of the preset's.", 8)
RATE = flags.DEFINE_float("rate", 0.15, "Share of tokens predicted.", 0.0, 1.0)
DROPOUT = flags.DEFINE_float("dropout", 0.1, "Of units and attention.", 0.0, 0.99)
DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Of the model.")
STEPS = flags.DEFINE_integer("steps", 10, "Measured, after two that are not.", 2)
SERVE = flags.DEFINE_bool("serve", False, "Measure when asked on standard input.")
BREAKDOWN = flags.DEFINE_bool("breakdown", False, "Measure the parts of the step too.")
PART = flags.DEFINE_enum(
    "part", None, benchmark_parts.PARTS, "Measure this against its rivals."
)


class Bench:
    """A compiled training step, a state, and a batch of random rows for it."""

    def __init__(self, preset, *, rate, dropout=0.0, dtype="float32"):
        self.preset = preset
        self.predictions_per_row = math.ceil(rate * preset.row_length)
        self.config = c = base.get_config()
        model = preset._asdict()
        c.tokenizer.vocab_size = model.pop("vocab_size")
        c.data.update({name: model.pop(name) for name in ("batch_size", "row_length")})
        c.model.update(model)
        c.model.update(dropout=dropout, attention_dropout=dropout, dtype=dtype)
        # [CLS] and [SEP] are never predicted.
        c.corruption.rate = self.predictions_per_row / (preset.row_length - 2)
        c.corruption.count = "exact"
        c.parallel.mode = "jit"  # the one that can be compiled ahead
        self.vocabulary = Vocabulary(preset.vocab_size)
        self.counts_V = np.ones(preset.vocab_size)
        mesh = parallel.make_mesh({"data": jax.device_count()})
        self.program = program.make_program(c, self.vocabulary, self.counts_V, mesh)
        self.batch = random_batch(preset)
        self.state = self.program.init(jax.random.key(0), config.hparams(c))

    @functools.cached_property
    def compiled(self):
        begin = time.perf_counter()
        compiled = self.program.train_step.lower(self.state, self.batch).compile()
        self.compile_seconds = time.perf_counter() - begin
        return compiled

    def step(self):
        """One update, waited for."""
        self.state, metrics = self.compiled(self.state, self.batch)
        return jax.block_until_ready(metrics)

    def flops(self):
        sizes = self.preset._asdict()
        del sizes["num_heads"]
        sizes["num_rows"] = sizes.pop("batch_size")
        return step_flops(**sizes, predictions_per_row=self.predictions_per_row)

    def settings(self):
        """What was measured, under the names that other benchmarks of a step use."""
        c, preset, compiled = self.config, self.preset, self.compiled
        return {
            "impl": "mlm_jax",
            "L": preset.num_layers,
            "H": preset.width,
            "A": preset.num_heads,
            "FF": preset.mlp_width,
            "V": preset.vocab_size,
            "seq": preset.row_length,
            "batch": preset.batch_size,
            "K": self.predictions_per_row,
            "dtype": c.model.dtype,
            "dropout": c.model.dropout,
            "huge_pages": huge_pages.are_asked_for(),
            "compile_s": round(self.compile_seconds, 2),
            "temporary_mb": round(benchmark_parts.temporary_bytes(compiled) / 2**20),
            "gflop_step": round(self.flops() / 1e9, 2),
        }


def random_batch(preset, seed=0):
    """Returns full rows of one segment, four words in five a single token."""
    rng = np.random.default_rng(seed)
    shape = preset.batch_size, preset.row_length
    tokens_BxL = rng.integers(5, preset.vocab_size, shape, dtype=np.int32)
    tokens_BxL[:, 0], tokens_BxL[:, -1] = 2, 3
    return {
        "tokens": tokens_BxL,
        "segment": np.ones(shape, np.int32),
        "position": np.tile(np.arange(shape[1], dtype=np.int32), (shape[0], 1)),
        "word_start": rng.random(shape) < 0.8,
        "row": np.arange(shape[0], dtype=np.int32),
        "epoch": np.zeros(shape[0], np.int32),
    }


def measure_step(bench):
    """Returns the figures of a step, measured in turn with a matrix product."""
    product, product_flops = benchmark_parts.matrix_product(bench.config.model.dtype)
    calls = {"step": bench.step} | {f"product {n}": product for n in range(5)}
    seconds = benchmark_parts.measure(calls, rounds=STEPS.value)
    step_times = seconds.pop("step")
    step_seconds = statistics.median(step_times)
    rate = product_flops / min(min(times) for times in seconds.values())
    num_tokens = bench.preset.batch_size * bench.preset.row_length
    return {
        "step_ms": round(step_seconds * 1e3, 2),
        "min_ms": round(min(step_times) * 1e3, 2),
        "tokens_per_s": round(num_tokens / step_seconds),
        "gflops_per_s": round(bench.flops() / step_seconds / 1e9, 1),
        "matrix_gflops_per_s": round(rate / 1e9, 1),
        "mfu": round(bench.flops() / step_seconds / rate, 3),
        "peak_rss_mb": peak_rss_mb(),
    }


def peak_rss_mb():
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / (2**20 if sys.platform == "darwin" else 2**10))


def serve(bench):
    bench.step()
    print(json.dumps(bench.settings() | {"ready": True}), flush=True)
    for line in sys.stdin:
        bench.step()  # wakes the threads up
        samples = []
        for _ in range(int(line)):
            begin = time.perf_counter()
            bench.step()
            samples.append({"ms": (time.perf_counter() - begin) * 1e3, "other": 0.0})
        print(json.dumps(samples), flush=True)


def main(arguments):
    del arguments
    overrides = {
        flag.name: flag.value
        for flag in (VOCAB_SIZE, BATCH_SIZE, ROW_LENGTH)
        if flag.value is not None
    }
    preset = PRESETS[PRESET.value]._replace(**overrides)
    bench = Bench(preset, rate=RATE.value, dropout=DROPOUT.value, dtype=DTYPE.value)
    if SERVE.value:
        serve(bench)
        return
    if PART.value:
        lines = benchmark_parts.PARTS[PART.value](bench, STEPS.value)
    else:
        lines = measured(bench)
    for line in lines:
        print(json.dumps({"preset": PRESET.value} | line), flush=True)


def measured(bench):
    yield bench.settings() | measure_step(bench)
    if BREAKDOWN.value:
        yield from benchmark_parts.breakdown(bench, STEPS.value)


if __name__ == "__main__":
    huge_pages.restart_with_huge_pages()
    command.run(main)
