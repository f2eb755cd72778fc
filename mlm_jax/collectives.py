"""The only places where the step body notices that there is more than one device.

`axis` is the name of a mapped mesh axis, or None in a global-view program.
"""

import jax


def psum(tree, axis):
    return tree if axis is None else jax.lax.psum(tree, axis)


def varying(tree, axis):
    """Marks replicated values as per-device, so that their gradients stay local.

    Without it `shard_map` sums the gradient of a replicated value by itself, and the
    step's own psum would multiply it by the number of devices.
    """
    return tree if axis is None else jax.lax.pcast(tree, axis, to="varying")
