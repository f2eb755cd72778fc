"""Measures our training step against others in turn, on one machine, as ratios.

    python experiments/speed/race.py --preset=mini --torch=/path/to/python

`--torch` is the interpreter of an environment with torch and transformers. Every rival
does the same work (see torch_step.py); each is a process that stays in memory and works
only when it is its turn. Prints a Markdown table; `share` is the needed arithmetic by
the rate of a large matrix product, measured in the same turns.
"""

import argparse
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).parent
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
OURS = "mlm_jax"


def intel_kernels():
    """Returns the environment that lets MKL take its fast kernels on any processor: a
    library that answers "yes" where MKL asks if the processor is Intel's."""
    if not shutil.which("cc"):
        return {}
    library = pathlib.Path(tempfile.mkdtemp()) / "intel.so"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", library],
        input=b"int mkl_serv_intel_cpu_true() { return 1; }",
        check=True,
    )
    return {"LD_PRELOAD": str(library)}


def rivals(torch, preset, dtype, extra):
    """Returns {label: (command, environment)}."""
    size = [f"--preset={preset}", f"--dtype={dtype}", *extra]
    ours = [sys.executable, "-m", "mlm_jax.benchmark", "--serve", *size]
    theirs = [torch, str(HERE / "torch_step.py"), *size]
    tuned = HUGE_PAGES | intel_kernels()
    return {
        OURS: (ours, {}),
        "Hugging Face, eager": (theirs, {}),
        "Hugging Face, torch.compile": ([*theirs, "--compile"], {}),
        "PyTorch, head gathered by hand": ([*theirs, "--head=gathered"], {}),
        "the same, huge pages, Intel kernels": ([*theirs, "--head=gathered"], tuned),
        "the same, compiled": ([*theirs, "--head=gathered", "--compile"], tuned),
    }


class Rival:
    """A process that measures steps when asked."""

    def __init__(self, command, environment):
        self.process = subprocess.Popen(
            command,
            env=os.environ | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.settings = self.answer()
        self.medians = []

    def answer(self):
        for line in self.process.stdout:
            if line.startswith(("{", "[")):
                return json.loads(line)
        raise SystemExit(f"error: {' '.join(map(str, self.process.args))} failed")

    def run(self, num_steps):
        self.process.stdin.write(f"{num_steps}\n")
        self.process.stdin.flush()
        times = [sample["ms"] for sample in self.answer()]
        self.medians.append(statistics.median(times))

    def peak_mb(self):
        status = pathlib.Path(f"/proc/{self.process.pid}/status").read_text()
        peak = next(line for line in status.splitlines() if line.startswith("VmHWM"))
        return int(peak.split()[1]) / 1024


MATRIX = """
import sys, time, json, jax, jax.numpy as jnp
x = jnp.ones((1024, 1024), sys.argv[1])
product = jax.jit(jnp.matmul)
product(x, x).block_until_ready()
print("{}", flush=True)
for line in sys.stdin:
    product(x, x).block_until_ready()
    times = []
    for _ in range(20):
        begin = time.perf_counter()
        product(x, x).block_until_ready()
        times.append(time.perf_counter() - begin)
    print(json.dumps([{"ms": min(times) * 1e3}]), flush=True)
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--preset", default="mini")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--torch", required=True, help="a python with transformers")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="in each round")
    parser.add_argument("--without", default="none", help="rivals to leave out: a word")
    options, extra = parser.parse_known_args()
    runners = {
        label: Rival(command, environment)
        for label, (command, environment) in rivals(
            options.torch, options.preset, options.dtype, extra
        ).items()
        if options.without not in label
    }
    matrix = Rival([sys.executable, "-c", MATRIX, options.dtype], {})
    for turn in range(options.rounds):
        order = list(runners.values())
        for runner in order if turn % 2 == 0 else reversed(order):
            runner.run(options.steps)
            matrix.run(1)
    rate = 2 * 1024**3 / min(matrix.medians) / 1e6
    gflop = runners[OURS].settings["gflop_step"]
    reference = runners["Hugging Face, eager"].medians
    print(f"{options.preset}, {gflop:.0f} GFLOP a step; matrices {rate:.0f} GFLOP/s\n")
    print("| step | ms | times eager's speed | GFLOP/s | share | peak MB |")
    print("| --- | --- | --- | --- | --- | --- |")
    for label, runner in runners.items():
        ms = statistics.median(runner.medians)
        ratio = statistics.median(
            a / b for a, b in zip(reference, runner.medians, strict=True)
        )
        print(
            f"| {label} | {ms:.0f} | {ratio:.2f} | {gflop / ms * 1e3:.0f} "
            f"| {gflop / ms * 1e3 / rate:.0%} | {runner.peak_mb():.0f} |"
        )
        runner.process.kill()
    matrix.process.kill()


if __name__ == "__main__":
    main()
