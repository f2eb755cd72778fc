"""Masked language modeling in JAX."""


def load(workdir, step=None):
    """Returns the `trained.Trained` of a run's directory, at its newest checkpoint or
    that of `step`."""
    # Here, so that `import mlm_jax` takes no second: what follows imports JAX.
    from mlm_jax.trained import load

    return load(workdir, step)
