"""A run that is killed and started again ends as if it had never been killed."""

import io
import os
import signal
import subprocess
import time

import pytest

from configs import tiny
from mlm_jax import config, files, metrics, training
from mlm_jax.errors import CheckpointError, InputError
from tests.runs import (
    assert_same,
    contents,
    finish,
    lines,
    start,
    train,
    wait_for,
)


def test_b56_killed_after_four_steps_ends_bit_identical(whole, tmp_path, shared):
    workdir = tmp_path / "run"
    process = start(workdir, shared)
    wait_for((workdir / "checkpoints" / "4").is_dir, process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not (workdir / "checkpoints" / "8").exists()

    assert "resumes at step 4" in train(workdir, shared)
    assert_same(workdir, whole)


@pytest.mark.slow
def test_killed_at_many_moments_ends_bit_identical(whole, tmp_path, shared):
    """Kills spread over start-up, compilation, steps and saves."""
    workdir = tmp_path / "run"
    for tenths in range(10, 200, 7):
        process = start(workdir, shared, **{"checkpoint.every_steps": 1})
        try:
            process.communicate(timeout=tenths / 10)
            assert process.returncode == 0
            break
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
    train(workdir, shared, **{"checkpoint.every_steps": 1})
    assert_same(workdir, whole)


def test_sigterm_saves_exits_75_and_resumes_exactly(whole, tmp_path, shared):
    workdir = tmp_path / "run"
    process = start(workdir, shared)
    logged = workdir / "metrics.jsonl"
    wait_for(lambda: logged.exists() and '"step": 1,' in logged.read_text(), process)
    process.send_signal(signal.SIGTERM)
    while process.poll() is None:  # R04: more signals, while it saves, change nothing
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.01)
    assert " after saving step" in finish(process, code=75)
    train(workdir, shared)
    assert_same(workdir, whole)


def test_a_finished_run_does_nothing_again(whole, shared):
    before = contents(whole)
    assert "is finished: step 8 of 8" in train(whole, shared)
    assert contents(whole) == before


def test_another_config_is_refused_by_field(whole, shared):
    output = train(whole, shared, code=2, **{"corruption.rate": 0.4})
    assert "corruption.rate: 0.3 -> 0.4" in output
    assert "--allow_change=corruption.rate" in output


def test_each_step_is_logged_once(whole):
    keys = [(line["step"], "eval/loss@0.15" in line) for line in lines(whole)]
    trained = [step for step, is_eval in keys if not is_eval]
    assert trained == list(range(1, 9))
    assert [step for step, is_eval in keys if is_eval] == [0, 4, 8]
    for line in lines(whole):
        assert line["step"] in (0, 4, 8) or line["train/mask_rate"] == pytest.approx(
            0.3, abs=0.03
        )


def test_what_a_killed_writer_left_is_cut(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "a": 1}\n{"step": 2, "a": 2}\n{"step": 3, "a"')
    with metrics.Writer(tmp_path, start_step=1) as writer:
        writer.write(2, {"a": float("inf")})
    assert path.read_text() == '{"step": 1, "a": 1}\n{"step": 2, "a": null}\n'


def test_a_run_without_its_checkpoints_does_not_start_over(tmp_path):
    """They may be on a disk that is not mounted: what it has logged must stay."""
    c = tiny.get_config()
    c.checkpoint.every_steps = 4
    ledger = tmp_path / "ledger.jsonl"
    ledger.write_text("".join(f'{{"step": {n}}}\n' for n in range(1, 10)))
    training._refuse_to_start_over(tmp_path)  # a run that has not begun
    config.save(c, tmp_path)
    with pytest.raises(CheckpointError, match="has logged step 9, and has no checkp"):
        training._refuse_to_start_over(tmp_path)
    ledger.write_text("".join(f'{{"step": {n}}}\n' for n in range(1, 9)))
    training._refuse_to_start_over(tmp_path)  # killed in its first save, perhaps


class Full(io.StringIO):
    def write(self, text):
        raise OSError(28, "No space left on device")


def test_r11_a_run_goes_on_when_no_line_can_be_printed():
    progress = metrics.Progress(8, Full())
    progress.print("held-out")
    progress.print_line(8, {})


def test_r11_a_file_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    files.write_text(path, "whole")
    (tmp_path / ".a.json.tmp").write_text("left by a kill")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError):
            files.write_text(path, "half")
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]
    assert path.read_text() == "whole"


def test_a_line_that_no_writer_left_is_refused(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"st\n{"step": 2}\n')
    with pytest.raises(InputError, match="metrics.jsonl, line 2 is damaged"):
        metrics.Writer(tmp_path, start_step=2)


def test_a_run_killed_before_its_first_checkpoint_leaves_no_line(tmp_path):
    """It evaluates at step 0 again."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "eval/loss@0.15": 7}\n')
    with metrics.Writer(tmp_path, start_step=None) as writer:
        writer.write(0, {"eval/loss@0.15": 6.0})
    text = (tmp_path / "metrics.jsonl").read_text()
    assert text == '{"step": 0, "eval/loss@0.15": 6.0}\n'
