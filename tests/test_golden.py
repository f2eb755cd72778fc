"""Runs of each released version can be gone on with, and give the same numbers.

A directory of `golden` is what `train` wrote in 25 steps, saving every 20, without the
checkpoint of step 25 and the logs for TensorBoard.
"""

import json
import pathlib
import shutil

import pytest

from mlm_jax import checkpoint, config, manifest, train

ROOT = pathlib.Path(__file__).parents[1]
GOLDEN = sorted((ROOT / "tests" / "golden").iterdir())
EXACT = ("train/mask_hash", "train/num_masked", "eval/mask_hash@0.15")
CLOSE = ("train/loss", "train/grad_norm", "eval/loss@0.15")


def lines(run):
    """What the last five steps logged."""
    found = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line for line in found if line["step"] > 20]


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda path: path.name)
def test_r07_a_run_of_each_version_goes_on(golden, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)  # its text is named from here
    run = shutil.copytree(golden, tmp_path / "run")
    step, state = checkpoint.restore_latest(run)
    compared = {name: state[name] for name in checkpoint.COMPARED}
    recorded = manifest.read(golden / "checkpoints" / "20")["digest"]
    assert step == 20 and checkpoint.digest(compared) == recorded

    c = config.load(run)
    c.data.cache_dir = str(tmp_path / "cache")
    train.run(c, run)
    found, expected = lines(run), lines(golden)
    assert len(found) == len(expected) == 6
    for line, recorded in zip(found, expected, strict=True):
        assert line["step"] == recorded["step"]
        assert [line.get(n) for n in EXACT] == [recorded.get(n) for n in EXACT]
        for name in set(CLOSE) & recorded.keys():
            assert line[name] == pytest.approx(recorded[name], rel=1e-6)
