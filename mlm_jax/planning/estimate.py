"""What a compiled training step costs on a chip: figures, and how they read."""

import math

import jax
import numpy as np

from mlm_jax.data.pipeline import place
from mlm_jax.flops import config_flops
from mlm_jax.model.head import padded_vocab_size
from mlm_jax.planning import hlo
from mlm_jax.program import num_slots


def figures(c, sizes, abstract_state, batch, compiled, chip):
    """Returns the figures of a step: everything of one chip, except where it says all.

    `sizes` is the mesh, {axis: devices}; `chip` a `topology.Chip`, or None.
    """
    module = hlo.Module(compiled.as_text())
    memory = memory_by_class(abstract_state, batch, compiled.memory_analysis())
    rows = sizes["data"] * sizes["fsdp"]
    num_chips = rows * sizes["tensor"]
    slots = num_slots(c, c.corruption)
    arrays = list(module.arrays())
    largest = max(arrays, key=lambda array: array.size)
    collectives: dict[str, dict[str, int]] = {}
    for found in module.collectives():
        kind = collectives.setdefault(found.kind, {"count": 0, "bytes": 0})
        kind["count"] += found.times
        kind["bytes"] += found.times * found.bytes
    result = {
        "batch_size": c.data.batch_size,
        "mesh": sizes,
        "chips": num_chips,
        "fits": chip is None or memory["total"] <= chip.hbm,
        "memory": memory,
        "largest_array": f"{largest.dtype}{list(largest.shape)}",
        "largest_array_bytes": largest.size,
        "predictions": c.data.batch_size * c.corruption.views // rows * slots,
        "logits_at_once": logits_at_once(c, sizes, arrays),
        "flops": module.matmul_flops(),
        "needed_flops_all": config_flops(c, slots),
        "hbm_bytes": module.hbm_bytes(),
        "collectives": collectives,
        "collective_bytes": sum(kind["bytes"] for kind in collectives.values()),
        "parameters_all": sum(x.size for x in jax.tree.leaves(abstract_state.params)),
    }
    if chip is not None:
        result["roofline"] = roofline(c, result, chip)
    return result


def logits_at_once(c, sizes, arrays):
    """Returns of how many predictions the largest array of logits is: of those as wide
    as the vocabulary, and not as the model, as the embedding is."""
    vocabulary = padded_vocab_size(c.tokenizer.vocab_size) // sizes["tensor"]
    widths = {c.model.width, c.model.width // sizes["fsdp"]}
    rows = (
        math.prod(array.shape) // vocabulary
        for array in arrays
        if vocabulary in array.shape and not widths & set(array.shape)
    )
    return max(rows, default=0)


def memory_by_class(abstract_state, batch, analysis):
    """Returns bytes of a chip. `temporaries` is all that a step makes on its way, the
    gradients among it; `layout` what the chip's layout adds to state and batch, less
    what of them the program does not read."""
    parameters = local_bytes(abstract_state.params)
    optimizer = local_bytes(abstract_state.opt_state)
    rest = local_bytes(abstract_state.replace(params={}, opt_state=()))
    rows = local_bytes(batch)
    arguments = analysis.argument_size_in_bytes
    memory = {
        "parameters": parameters,
        "optimizer": optimizer,
        "other_state": rest,
        "batch": rows,
        "layout": arguments - parameters - optimizer - rest - rows,
        "results": analysis.output_size_in_bytes - analysis.alias_size_in_bytes,
        "temporaries": analysis.temp_size_in_bytes,
        "program": analysis.generated_code_size_in_bytes,
    }
    return memory | {"total": sum(memory.values())}


def local_bytes(tree):
    """Returns the bytes of a chip's parts of abstract arrays."""

    def size(leaf):
        shape = leaf.sharding.shard_shape(leaf.shape)
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.eval_shape(jax.random.key_data, leaf)
            shape = leaf.shape
        return int(np.prod(shape)) * leaf.dtype.itemsize

    return sum(map(size, jax.tree.leaves(tree)))


def roofline(c, found, chip):
    """Returns the least time of a step at the chip's peak rates, were products, memory
    and links busy at once, and what follows for the whole run."""
    # A ring sends each byte of a sum twice: to add up, and to hand out.
    sent = {
        kind: total["bytes"] * (2 if kind == "all-reduce" else 1)
        for kind, total in found["collectives"].items()
    }
    seconds = {
        "products": found["flops"] / chip.flops,
        "memory": found["hbm_bytes"] / chip.hbm_bytes,
        "links": sum(sent.values()) / chip.link_bytes,
    }
    step = max(seconds.values())
    needed = found["needed_flops_all"] / found["chips"] / chip.flops
    rows, _ = place(c.optim.num_steps, found["batch_size"], c.data.batch_ramp)
    return {
        "seconds": seconds,
        "limit": max(seconds, key=lambda name: seconds[name]),
        "step_seconds": step,
        "mfu": needed / step,
        "intensity": found["flops"] / found["hbm_bytes"],
        "chip_intensity": chip.flops / chip.hbm_bytes,
        "tokens_per_second_all": found["batch_size"] * c.data.row_length / step,
        "tokens_all": rows * c.data.row_length,
        # As if smaller batches took less time by as much.
        "chip_hours": rows / found["batch_size"] * step * found["chips"] / 3600,
    }


def as_json(c, machine, found):
    """Returns what `--json` prints."""
    return {
        "topology": machine.name,
        "devices": len(machine.devices),
        "hosts": machine.num_hosts,
        "note": machine.note,
        "hbm_bytes": machine.chip and machine.chip.hbm,
        "config": c.to_dict(),
        "plans": found,
    }


def describe(c, machine, found):
    """Returns the text of a plan."""
    head = (
        f"{machine.name}: {len(machine.devices)} device(s) on {machine.num_hosts} "
        f"host(s)\nrows of {c.data.row_length} tokens, "
        f"{num_slots(c, c.corruption)} prediction slots each, "
        f"{c.parallel.microbatches} micro-batch(es), {c.model.dtype}, remat "
        f"{c.model.remat}"
    )
    parts = [_describe_mode(mode, plan, machine.chip) for mode, plan in found.items()]
    return "\n\n".join([head, *parts])


def _describe_mode(mode, plan, chip):
    if "memory" not in plan:
        return f"{mode}, batch {plan['batch_size']:,}: DOES NOT FIT\n  {plan['reason']}"
    mesh = " x ".join(f"{axis} {size}" for axis, size in plan["mesh"].items())
    fits = "" if chip is None else ": fits" if plan["fits"] else ": DOES NOT FIT"
    memory = dict(plan["memory"])
    total = memory.pop("total")
    of_chip = "" if chip is None else f"  of {_size(chip.hbm)}, {total / chip.hbm:.0%}"
    ratio = plan["flops"] * plan["chips"] / plan["needed_flops_all"]
    lines = [
        f"{mode} on {mesh}, batch {plan['batch_size']:,}{fits}",
        "  memory of a chip",
        *(
            f"    {name.replace('_', ' '):<12}{_size(memory[name]):>12}"
            for name in memory
        ),
        f"    {'total':<12}{_size(total):>12}{of_chip}",
        f"    largest array {plan['largest_array']}, "
        f"{_size(plan['largest_array_bytes'])}",
        f"    logits at once {plan['logits_at_once']:,} of {plan['predictions']:,}",
        "  a step of a chip",
        f"    products     {plan['flops'] / 1e9:>12,.1f} GFLOP; all chips do "
        f"{ratio:.3f} x what the model needs",
        f"    main memory  {_size(plan['hbm_bytes']):>12}",
    ]
    for kind, total in plan["collectives"].items():
        lines.append(f"    {kind:<19}{total['count']:>6,} x, {_size(total['bytes'])}")
    size = 4 * plan["parameters_all"]
    lines.append(
        f"    collectives move {plan['collective_bytes'] / size:.2f} x the "
        f"{plan['parameters_all'] / 1e6:,.1f} million float32 parameters"
    )
    if chip is not None:
        lines += _describe_roofline(plan["roofline"])
    return "\n".join(lines)


def _describe_roofline(roof):
    times = ", ".join(f"{k} {v * 1e3:.2f} ms" for k, v in roof["seconds"].items())
    return [
        f"  at peak rates: {times}",
        f"    a step takes at least {roof['step_seconds'] * 1e3:.2f} ms (by "
        f"{roof['limit']}), so MFU is at most {roof['mfu']:.0%}",
        f"    {roof['intensity']:.0f} FLOP a byte of main memory; the chip can do "
        f"{roof['chip_intensity']:.0f}",
        f"    {roof['tokens_all'] / 1e9:,.1f} billion tokens in at least "
        f"{roof['chip_hours']:,.1f} chip-hours, at most "
        f"{roof['tokens_per_second_all']:,.0f} tokens/s",
    ]


def _size(num_bytes):
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:,.2f} {unit}"
    return f"{num_bytes:,} B"
