"""Shows what a run holds: its newest checkpoint, with a digest to compare runs by.

    python -m mlm_jax.check --workdir=runs/austen

Prints `step N digest sha256:…` over parameters, optimizer state and step. Two runs that
print the same line hold the same bits.
"""

from mlm_jax import checkpoint, command

WORKDIR = command.define_workdir("what to look at")


def main(arguments):
    del arguments
    step, state = checkpoint.restore_latest(WORKDIR.value)
    compared = {name: state[name] for name in ("params", "opt_state", "step")}
    print(f"step {step} digest sha256:{checkpoint.digest(compared)}")


if __name__ == "__main__":
    command.run(main)
