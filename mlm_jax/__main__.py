"""Lists the commands."""

COMMANDS = """\
python -m mlm_jax.COMMAND [flags]     (--help explains each)

train      trains a masked language model, or resumes it
  python -m mlm_jax.train --config=configs/tiny.py --workdir=runs/tiny
fill_mask  fills the [MASK]s of a sentence with a trained model
  python -m mlm_jax.fill_mask --workdir=runs/tiny "The [MASK] was dark."
check      shows a run's newest checkpoint and its digest
  python -m mlm_jax.check --workdir=runs/tiny
benchmark  measures the loss head against full logits
  python -m mlm_jax.benchmark"""

if __name__ == "__main__":
    print(COMMANDS)
