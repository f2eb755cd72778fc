"""A trace has the steps it is asked for, and changes no result."""

import gzip
import json

import jax
import jax.numpy as jnp

from mlm_jax import profiling


def test_five_steps_are_traced_for_both_viewers(tmp_path, capsys):
    plain = jax.jit(lambda state, batch: (state + batch, {"loss": state}))
    step = profiling.traced(plain, tmp_path / "profile")
    state = jnp.float32(0)
    for k in range(20):
        if k == profiling.SKIPPED:
            assert not (tmp_path / "profile").exists()
        state, metrics = step(state, jnp.float32(k))
        if k == profiling.SKIPPED + profiling.TRACED - 1:
            (trace,) = (tmp_path / "profile").rglob("perfetto_trace.json.gz")
    assert state == sum(range(20)) and metrics["loss"] == sum(range(19))
    assert len(list((tmp_path / "profile").rglob("*.xplane.pb"))) == 1
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    names = [event.get("name", "") for event in events]
    assert sum("jit_<lambda>" in n or "PjitFunction" in n for n in names) >= 5
    assert "traced 5 steps" in capsys.readouterr().out
