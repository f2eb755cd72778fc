"""Where a step runs. Every mode takes and returns the same unreplicated state.

A mesh has three axes. Rows are spread over `data` and `fsdp`. Over `fsdp` parameters
and moments are in parts too, and the parameters gathered for the length of a step. Over
`tensor` each device multiplies by its part of the matrices only.
"""

import functools
import math
import re

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

# The first pattern found in a leaf's path counts, else it is on every device. Blocks
# have a leading axis of layers. Of two matrices in a row the first is split by columns
# and the second by rows, so that only the second's result is summed over devices
# (Shoeybi et al. 2019); embedding and output matrix by vocabulary.
RULES = [
    ("/(embed|decoder)/embedding$", P("tensor", "fsdp")),
    ("/(query|key|value|up|gate)/kernel$", P(None, "fsdp", "tensor")),
    ("/blocks/.*(out|down)/kernel$", P(None, "tensor", "fsdp")),
    ("/transform/dense/kernel$", P("fsdp", None)),
]
BIAS_RULES = [  # not every model has these
    ("/(query|key|value|up|gate)/bias$", P(None, "tensor")),
    ("(params|mu|nu|v)/bias$", P("tensor")),
]


def make_mesh(shape, devices=None) -> Mesh:
    """A mesh from {axis name: size}, of `devices` or of those that are there. It has
    `data`, and of the other axes those above 1."""
    shape = {name: n for name, n in shape.items() if name == "data" or n > 1}
    num_devices = math.prod(shape.values())
    devices = (devices or jax.devices())[:num_devices]
    # jax.make_mesh defaults to Explicit axes, under which nn.Embed's gather raises.
    auto = (AxisType.Auto,) * len(shape)
    sizes, names = tuple(shape.values()), tuple(shape)
    return jax.make_mesh(sizes, names, axis_types=auto, devices=devices)


def num_row_shards(mesh):
    """Returns in how many parts the rows of a batch are."""
    return math.prod(mesh.shape[name] for name in _row_axes(mesh))


def state_shardings(abstract_state, rules, mesh, optional_rules=()):
    """Shards each leaf by the first (pattern, spec) found in its path, or not at all.

    An optimizer moment's path ends in its parameter's path, so one rule covers both.
    Raises ValueError for one of `rules` that is of no leaf.
    """
    unused = {pattern for pattern, _ in rules}

    def sharding(path, leaf):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        for pattern, spec in (*rules, *optional_rules):
            if re.search(pattern, name):
                unused.discard(pattern)
                if len(spec) > leaf.ndim:  # a moment of the rows or columns
                    break
                return NamedSharding(
                    mesh, P(*(axis if axis in mesh.shape else None for axis in spec))
                )
        return NamedSharding(mesh, P())

    shardings = jax.tree_util.tree_map_with_path(sharding, abstract_state)
    if unused:
        raise ValueError(f"Sharding rules that match no parameter: {sorted(unused)}.")
    return shardings


def batch_sharding(mesh):
    """How the rows of a batch are spread."""
    return NamedSharding(mesh, P(_row_axes(mesh)))


def mode_for(mode, mesh):
    """Returns the mode that a step is compiled for.

    One device has nothing to reduce over, and pmap's reduction would copy every
    gradient (2% of a BERT-base step on a CPU)."""
    return "jit" if mesh.size == 1 and mode == "pmap" else mode


def compile_train_step(step, mode, mesh, shardings):
    """Returns (state, batch) -> (state, metrics); the state passed in is donated."""
    match mode:
        case "pmap":  # data parallel, one process
            return _pmap_over_rows(step, mesh, batch_argument=1, donate_argnums=0)
        case "shard_map" | "jit":  # the same program on global arrays
            return jax.jit(
                _over_rows(step, mesh, shardings),
                in_shardings=(shardings, batch_sharding(mesh)),
                out_shardings=(shardings, NamedSharding(mesh, P())),
                donate_argnums=0,
            )
    raise ValueError(f"Unknown mode {mode!r}; expected pmap, shard_map or jit.")


def compile_eval_step(step, mode, mesh, shardings):
    """Returns (params, batch, key, hparams) -> sums; nothing is donated."""
    match mode:
        case "pmap":
            return _pmap_over_rows(step, mesh, batch_argument=1, num_arguments=4)
        case "shard_map" | "jit":
            replicated, rows = NamedSharding(mesh, P()), batch_sharding(mesh)
            if num_row_shards(mesh) > 1:
                step = functools.partial(step, axis=_row_axes(mesh))
                step = _map_rows(step, mesh, (P(), rows.spec, P(), P()), P())
            return jax.jit(
                step,
                in_shardings=(shardings.params, rows, replicated, replicated),
                out_shardings=replicated,
            )
    raise ValueError(f"Unknown mode {mode!r}; expected pmap, shard_map or jit.")


def compile_by_row(function, mesh):
    """Returns the compiled `function(params, batch) -> tree`, whose results have a row
    for each row of the batch: rows are spread over the devices, and come back whole."""
    if mesh.size == 1:
        return jax.jit(function)
    rows = batch_sharding(mesh).spec
    mapped = _map_rows(function, mesh, (P(), rows), rows)
    return jax.jit(mapped, out_shardings=NamedSharding(mesh, P()))


def _over_rows(step, mesh, shardings):
    """The train step with all that meets a row mapped over the axes of rows.

    Left to the compiler, as `tensor` and the update are, sums over rows would be taken
    over devices in every turn of a scan, over micro-batches or over chunks of the loss.
    """
    if num_row_shards(mesh) == 1:  # and XLA refuses a sum over an axis of one
        return step

    def spread(sum_over_rows):
        in_specs = P(), batch_sharding(mesh).spec
        mapped = _map_rows(sum_over_rows, mesh, in_specs, P())

        def call(state, batch):
            grads, sums = mapped(state, batch)
            # As the parameters are split, so that no later operation meets the whole.
            return jax.lax.with_sharding_constraint(grads, shardings.params), sums

        return call

    return functools.partial(step, axis=_row_axes(mesh), spread=spread)


def _map_rows(body, mesh, in_specs, out_specs):
    return jax.shard_map(
        body,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=set(_row_axes(mesh)),
        # Whether a result is the same on every device. JAX 0.12's searchsorted, which
        # draws the random tokens, fails in that where an axis is left to the compiler.
        check_vma="tensor" not in mesh.shape,
    )


def _row_axes(mesh):
    return tuple(name for name in mesh.axis_names if name != "tensor")


def _pmap_over_rows(step, mesh, *, batch_argument, num_arguments=2, donate_argnums=()):
    """Maps the batch over the devices; other arguments and the result are whole."""
    pmapped = jax.pmap(
        functools.partial(step, axis="data"),
        axis_name="data",
        in_axes=tuple(0 if i == batch_argument else None for i in range(num_arguments)),
        out_axes=None,
        donate_argnums=donate_argnums,
        devices=list(mesh.devices.flat),
    )
    return _OnSplitRows(pmapped, mesh.shape["data"], batch_argument)


class _OnSplitRows:
    """A pmapped function that takes the batch as the other modes do."""

    def __init__(self, pmapped, num_devices, batch_argument):
        self._pmapped, self._num_devices = pmapped, num_devices
        self._batch_argument = batch_argument

    def __call__(self, *arguments):
        return self._pmapped(*self._split_rows(arguments, lambda split, x: split(x)))

    def lower(self, *arguments):
        """Takes arrays or their shapes, as `jax.jit(…).lower`."""
        return self._pmapped.lower(*self._split_rows(arguments, jax.eval_shape))

    def _split_rows(self, arguments, apply):
        def split(x):
            return x.reshape(self._num_devices, -1, *x.shape[1:])

        at = self._batch_argument
        batch = jax.tree.map(lambda x: apply(split, x), arguments[at])
        return *arguments[:at], batch, *arguments[at + 1 :]
