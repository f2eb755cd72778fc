"""A trace of some steps: what the device and the host do, and when."""

import jax

SKIPPED = 10  # steps; the first ones compile and wait for data
TRACED = 5


def traced(train_step, folder):
    """Returns `train_step`, of which steps 11 to 15 of this process are traced: for
    XProf, and as `perfetto_trace.json.gz` for ui.perfetto.dev, below `folder`."""
    num_calls = 0

    def step(state, batch):
        nonlocal num_calls
        if num_calls == SKIPPED:
            jax.block_until_ready(state)
            jax.profiler.start_trace(folder, create_perfetto_trace=True)
        results = train_step(state, batch)
        num_calls += 1
        if num_calls == SKIPPED + TRACED:
            jax.block_until_ready(results)
            jax.profiler.stop_trace()
            print(f"traced {TRACED} steps: {folder}")
        return results

    return step
