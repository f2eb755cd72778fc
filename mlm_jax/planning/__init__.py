"""What a step needs on a machine that is not there: the parts of `mlm_jax.plan`."""
