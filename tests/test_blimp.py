"""All of BLiMP on the default run; skipped where either is not there.

The data are read from `../shared/data/blimp/blimp.tar.xz`, or as $BLIMP says; the run,
which `make train` makes, from `runs/austen`, or as $AUSTEN_RUN says.
"""

import os
import pathlib
import subprocess
import sys
import tarfile
import time

import pytest

from tests.runs import ROOT

BLIMP = pathlib.Path(
    os.environ.get("BLIMP", ROOT.parent / "shared/data/blimp/blimp.tar.xz")
)
RUN = pathlib.Path(os.environ.get("AUSTEN_RUN", ROOT / "runs/austen"))


@pytest.mark.slow
@pytest.mark.skipif(not BLIMP.exists(), reason=f"{BLIMP} is not there")
@pytest.mark.skipif(not RUN.exists(), reason=f"{RUN} is not there: make train")
def test_all_paradigms_of_blimp(tmp_path):
    with tarfile.open(BLIMP) as archive:
        archive.extractall(tmp_path, filter="data")
    begin = time.monotonic()
    result = subprocess.run(
        [sys.executable, "-m", "mlm_jax.judge_pairs", f"--workdir={RUN}"]
        + [str(tmp_path / "data"), f"--output={tmp_path / 'judged.jsonl'}"],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    print(result.stdout, f"{time.monotonic() - begin:.0f} s")  # shown by pytest -s
    assert " left" in result.stderr
    *paradigms, overall = result.stdout.splitlines()[1:]
    assert len(paradigms) == 67
    assert all(line.split("%")[1].startswith(" of 1,000") for line in paradigms)
    # 50% is chance, and 0.2% its standard error.
    share = float(overall.split()[1].removesuffix("%")) / 100
    assert " of 67,000" in overall and 0.51 < share < 0.8
