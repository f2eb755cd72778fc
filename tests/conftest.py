"""Eight simulated devices, every silent broadcast an error, and quick compilation."""

import os

# Compiling is most of what a test costs, and LLVM's optimiser most of compiling. Tests
# that start the commands run them as users do.
os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    """Where all runs keep rows and compiled programs."""
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="session")
def whole(tmp_path_factory, shared):
    """Eight steps without an interruption."""
    from tests import runs

    workdir = tmp_path_factory.mktemp("whole") / "run"
    runs.train(workdir, shared)
    return workdir
