"""The masking rate as a function of training progress."""

import jax.numpy as jnp


def rate_at(progress, hparams):
    """Returns the rate at `progress`, the share of the updates that are done.

    From `rate` it goes to `final_rate` between `schedule_begin` and `schedule_end`:
    not at all, in a line, along half a cosine, or at once at `schedule_end`. The form
    `schedule` is a traced number too, an index into `settings.SCHEDULES`.
    """
    begin, end = hparams["schedule_begin"], hparams["schedule_end"]
    way = (progress - begin) / jnp.where(end > begin, end - begin, 1)
    way = jnp.where(end > begin, jnp.clip(way, 0, 1), progress >= end)
    forms = [jnp.zeros_like(way), way, (1 - jnp.cos(jnp.pi * way)) / 2, way >= 1]
    share = jnp.stack([form.astype(jnp.float32) for form in forms])[hparams["schedule"]]
    # This form is exact at both ends, so that no rate exceeds the two by a rounding.
    return (1 - share) * hparams["rate"] + share * hparams["final_rate"]
