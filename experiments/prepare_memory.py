"""Peak memory and time of preparing corpora of growing size.

    python experiments/prepare_memory.py --megabytes=10,100,1000 --workers=2

Each corpus is the bundled novels over and over, with numbers of its own in every line,
so that it has ever new words. Prepared by `python -m mlm_jax.prepare`, which learns the
tokenizer too; the peak is that of its largest process. Arguments after `--` go to it.
"""

import pathlib
import resource
import subprocess
import sys
import tempfile
import time

from absl import app, flags

ROOT = pathlib.Path(__file__).parents[1]
MEGABYTES = flags.DEFINE_list("megabytes", ["10", "100"], "Sizes of the corpora.")
WORKERS = flags.DEFINE_integer("workers", 2, "Processes that pack rows.")


def write_corpus(path, num_bytes):
    """Writes the novels until `num_bytes` are there, blank lines between blocks."""
    novels = (ROOT / "mlm_jax" / "data" / "austen").glob("*.txt")
    blocks = "\n".join(novel.read_text() for novel in sorted(novels)).split("\n\n")
    size = number = 0
    with path.open("w") as file:
        while size < num_bytes:
            number += 1
            size += file.write(f"{number} {blocks[number % len(blocks)]} {number}\n\n")


def prepare(corpus, cache, flags_):
    """Returns seconds and peak kilobytes of the largest process."""
    start = time.monotonic()
    subprocess.run(
        [sys.executable, "-m", "mlm_jax.prepare", "--config=configs/tiny.py"]
        + [f"--config.data.source=files:{corpus}", f"--config.data.cache_dir={cache}"]
        + ["--config.data.document=blank_line", "--config.tokenizer.vocab_size=8192"]
        + flags_,
        cwd=ROOT,
        check=True,
    )
    # Of all children so far: sizes must grow from one call to the next.
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return time.monotonic() - start, peak


def main(argv):
    flags_ = [f"--workers={WORKERS.value}", *argv[1:]]
    with tempfile.TemporaryDirectory() as folder:
        for megabytes in map(int, MEGABYTES.value):
            corpus = pathlib.Path(folder) / f"{megabytes}.txt"
            write_corpus(corpus, megabytes * 10**6)
            cache = pathlib.Path(folder) / f"cache{megabytes}"
            seconds, peak = prepare(corpus, cache, flags_)
            print(f"{megabytes:,} MB: {seconds:.0f} s, peak {peak / 1024:.0f} MiB")


if __name__ == "__main__":
    app.run(main)
