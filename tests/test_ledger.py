"""The ledger of every step, and the command that compares two."""

import json
import pathlib
import subprocess
import sys

import pytest

from mlm_jax import diff_ledgers, metrics
from mlm_jax.errors import InputError

ROOT = pathlib.Path(__file__).parents[1]


def write_ledger(workdir, hashes, **changes):
    workdir.mkdir()
    with metrics.Writer(workdir, 0) as writer:
        for step, mask_hash in enumerate(hashes, 1):
            sums = dict.fromkeys(metrics.LEDGER, 7) | {"mask_hash": mask_hash}
            writer.write_ledger(step, sums | {"loss": 1.0} | changes)


def diff(*workdirs):
    return subprocess.run(
        [sys.executable, "-m", "mlm_jax.diff_ledgers", *map(str, workdirs)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_first_step_that_differs_is_named(tmp_path):
    write_ledger(tmp_path / "a", [11, 12, 13, 14])
    write_ledger(tmp_path / "b", [11, 12, 99, 98])
    result = diff(tmp_path / "a", tmp_path / "b")
    assert result.returncode == 1
    assert result.stdout.startswith("step 3 is the first that differs:\n")
    assert f"mask_hash: 13 in {tmp_path}/a, 99 in {tmp_path}/b" in result.stdout


def test_equal_ledgers_are_equal_as_far_as_both_go(tmp_path):
    write_ledger(tmp_path / "a", [11, 12, 13])
    write_ledger(tmp_path / "b", [11, 12])
    result = diff(tmp_path / "a", tmp_path / "b")
    assert result.returncode == 0
    assert result.stdout == "the same masks at all 2 steps that both have\n"


def test_what_is_no_ledger_is_refused(tmp_path):
    write_ledger(tmp_path / "a", [11])
    result = diff(tmp_path / "a", tmp_path / "nothing")
    assert result.returncode == 2
    assert "nothing holds no ledger.jsonl" in result.stderr
    assert diff(tmp_path / "a").returncode == 2
    (tmp_path / "a" / "ledger.jsonl").write_text('{"step": 1}\n{"st')
    with pytest.raises(InputError, match="line 2"):
        list(diff_ledgers.read_ledger(tmp_path / "a"))


def test_every_field_is_compared():
    line = dict.fromkeys(metrics.LEDGER, 7) | {"step": 1, "unit_lengths": [3, 1]}
    for field in metrics.LEDGER:
        found = diff_ledgers.first_difference([line], [line | {field: 8}])
        assert found == (1, {field: (line[field], 8)})
    assert diff_ledgers.first_difference([line], [dict(line)]) is None


def test_a_ledger_holds_the_ledger_and_nothing_else(tmp_path):
    write_ledger(tmp_path / "a", [11])
    (line,) = (tmp_path / "a" / "ledger.jsonl").read_text().splitlines()
    assert json.loads(line).keys() == {"step", *metrics.LEDGER}
