"""A run on a mixture: killed and resumed, then verified."""

import subprocess
import sys

import pytest

from tests import runs

AUSTEN = runs.TEXT.parent
MIXTURE = {
    "data.source": f"0.75 files:{AUSTEN}/emma.txt + 0.25 files:{AUSTEN}/persuasion.txt"
}


@pytest.mark.slow
def test_a_killed_run_on_a_mixture_ends_as_if_never_killed(shared, tmp_path):
    runs.train(tmp_path / "whole", shared, **MIXTURE)
    ledger = tmp_path / "killed" / "ledger.jsonl"
    for steps in (3, 6):
        process = runs.start(tmp_path / "killed", shared, **MIXTURE)
        runs.wait_for(
            lambda n=steps: ledger.exists() and ledger.read_text().count("\n") >= n,
            process,
        )
        process.kill()
        process.communicate()
    runs.train(tmp_path / "killed", shared, **MIXTURE)
    assert runs.digest(tmp_path / "killed") == runs.digest(tmp_path / "whole")
    assert runs.lines(tmp_path / "killed") == runs.lines(tmp_path / "whole")
    check = [sys.executable, "-m", "mlm_jax.check", f"--workdir={tmp_path}/whole"]
    done = subprocess.run(check, cwd=runs.ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "row store: whole" in done.stderr

    heavier = {"data.source": MIXTURE["data.source"].replace("0.75", "0.5")}
    text = runs.train(tmp_path / "whole", shared, code=2, **heavier)
    assert "data.source" in text
