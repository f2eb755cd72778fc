"""Where a step runs. Every mode takes and returns the same unreplicated state."""

import functools
import re

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


def make_mesh(shape) -> Mesh:
    """A mesh from {axis name: size}."""
    # jax.make_mesh defaults to Explicit axes, under which nn.Embed's gather raises.
    auto = (AxisType.Auto,) * len(shape)
    return jax.make_mesh(tuple(shape.values()), tuple(shape), axis_types=auto)


def state_shardings(abstract_state, rules, mesh):
    """Shards each leaf by the first (pattern, spec) found in its path, or not at all.

    An optimizer moment's path ends in its parameter's path, so one rule covers both.
    """
    unused = {pattern for pattern, _ in rules}

    def sharding(path, leaf):
        del leaf
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        for pattern, spec in rules:
            if re.search(pattern, name):
                unused.discard(pattern)
                return NamedSharding(mesh, spec)
        return NamedSharding(mesh, P())

    shardings = jax.tree_util.tree_map_with_path(sharding, abstract_state)
    if unused:
        raise ValueError(f"Sharding rules that match no parameter: {sorted(unused)}.")
    return shardings


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
        case "shard_map":  # the same program on global arrays, replication type-checked
            mapped = jax.shard_map(
                functools.partial(step, axis="data"),
                mesh=mesh,
                in_specs=(P(), P("data")),
                out_specs=P(),
            )
            return jax.jit(mapped, donate_argnums=0)
        case "jit":  # the compiler places the collectives: FSDP, tensor parallel
            return jax.jit(
                step,
                in_shardings=(shardings, NamedSharding(mesh, P("data"))),
                out_shardings=(shardings, NamedSharding(mesh, P())),
                donate_argnums=0,
            )
    raise ValueError(f"Unknown mode {mode!r}; expected pmap, shard_map or jit.")


def compile_eval_step(step, mode, mesh, shardings):
    """Returns (params, batch, key, hparams) -> sums; nothing is donated."""
    match mode:
        case "pmap":
            return _pmap_over_rows(step, mesh, batch_argument=1, num_arguments=4)
        case "shard_map":
            mapped = jax.shard_map(
                functools.partial(step, axis="data"),
                mesh=mesh,
                in_specs=(P(), P("data"), P(), P()),
                out_specs=P(),
            )
            return jax.jit(mapped)
        case "jit":
            replicated = NamedSharding(mesh, P())
            rows = NamedSharding(mesh, P("data"))
            return jax.jit(
                step,
                in_shardings=(shardings.params, rows, replicated, replicated),
                out_shardings=replicated,
            )
    raise ValueError(f"Unknown mode {mode!r}; expected pmap, shard_map or jit.")


def _pmap_over_rows(step, mesh, *, batch_argument, num_arguments=2, donate_argnums=()):
    """Maps the batch over the devices; other arguments and the result are whole."""
    num_devices = mesh.shape["data"]
    pmapped = jax.pmap(
        functools.partial(step, axis="data"),
        axis_name="data",
        in_axes=tuple(0 if i == batch_argument else None for i in range(num_arguments)),
        out_axes=None,
        donate_argnums=donate_argnums,
        devices=list(mesh.devices.flat),
    )

    def split(x):
        return x.reshape(num_devices, -1, *x.shape[1:])

    def call(*arguments):
        batch = jax.tree.map(split, arguments[batch_argument])
        after = batch_argument + 1
        return pmapped(*arguments[:batch_argument], batch, *arguments[after:])

    return call
