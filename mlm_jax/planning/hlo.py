"""Reads XLA's compiled text: what a step multiplies, moves and sends.

Counts are of one device and of everything that runs: a loop's body counts as often as
the loop turns.
"""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2}
BYTES |= {"s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8}
COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
)
# What moves nothing by itself: names for memory, calls, whose insides are counted, and
# the half of a move that is not counted.
FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while"}
FREE |= {"call", "conditional", "after-all", "partition-id", "replica-id"}
FREE |= {"copy-start", "slice-start"} | {f"{kind}-done" for kind in COLLECTIVES}

HEADER = re.compile(r"^(ENTRY )?%([\w.\-]+) \(.*\{$")
INSTRUCTION = re.compile(r"^ +(ROOT )?%([\w.\-]+) = (.+?) ([a-z][a-z\-]*)\((.*)$")
ARRAY = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\](?:\{([^}]*)\})?")
# What a kernel says of itself, since its insides are not XLA's.
KERNEL_FLOPS = re.compile(r'"cost_estimate": ?\{[^}]*"flops": ?"?(\d+)')
CALLED = re.compile(r"\b(?:calls|to_apply|branch_computations)=\{?(%[\w.\-, %]+)")


class Array(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    layout: str

    @property
    def size(self) -> int:
        """Bytes."""
        return BYTES.get(self.dtype, 0) * math.prod(self.shape)

    @property
    def hbm_bytes(self) -> int:
        """Bytes in main memory; S(1) marks a TPU's own on-chip memory."""
        return 0 if "S(1)" in self.layout else self.size


class Instruction(NamedTuple):
    name: str
    arrays: list[Array]  # of the result
    opcode: str
    operands: list[str]
    attributes: str
    is_root: bool


class Collective(NamedTuple):
    kind: str
    arrays: list[Array]
    times: int
    name: str  # the operation of the program that it came from

    @property
    def bytes(self) -> int:
        """Of the results, each time."""
        return sum(array.size for array in self.arrays)


class Module:
    """A compiled program, from `compiled.as_text()`."""

    def __init__(self, text: str):
        self.computations: dict[str, dict[str, Instruction]] = {}
        entry = ""
        for line in text.splitlines():
            if match := HEADER.match(line):
                here = self.computations[match[2]] = {}
                entry = match[2] if match[1] else entry
            elif match := INSTRUCTION.match(line):
                here[match[2]] = _instruction(match)
        self.times: dict[str, int] = {}  # how often each computation runs
        self.is_fused: set[str] = set()
        self._run(entry, 1)

    def collectives(self) -> list[Collective]:
        """Every collective that runs, in the order of the text."""
        found = []
        for times, _, instruction in self._running():
            kind = instruction.opcode.removesuffix("-start")
            if kind not in COLLECTIVES:
                continue
            arrays = instruction.arrays
            if instruction.opcode != kind and kind != "all-reduce":
                arrays = arrays[1:2]  # a start's result has its operand before it
            name = re.search(r'op_name="([^"]*)"', instruction.attributes)
            found.append(Collective(kind, arrays, times, name[1] if name else ""))
        return found

    def matmul_flops(self) -> int:
        """Floating-point operations of matrix products; a multiply and an add are
        two."""
        flops = 0
        for times, computation, instruction in self._running():
            if instruction.opcode == "dot":
                flops += times * _dot_flops(instruction, computation)
            elif instruction.opcode == "convolution":
                flops += times * _convolution_flops(instruction, computation)
            elif match := KERNEL_FLOPS.search(instruction.attributes):
                flops += times * int(match[1])
        return flops

    def hbm_bytes(self) -> int:
        """Bytes read from and written to main memory, each operand and result once: a
        fusion's insides stay on the chip."""
        total = 0
        for name, times in self.times.items():
            if name in self.is_fused:
                continue
            computation = self.computations[name]
            for instruction in computation.values():
                if instruction.opcode not in FREE:
                    total += times * self._traffic(instruction, computation)
        return total

    def arrays(self) -> Iterator[Array]:
        """Every array that a running computation writes to memory."""
        for name in self.times.keys() - self.is_fused:
            for instruction in self.computations[name].values():
                if instruction.opcode not in FREE:
                    yield from instruction.arrays

    def _run(self, name: str, times: int, fused: bool = False) -> None:
        self.times[name] = self.times.get(name, 0) + times
        if fused:
            self.is_fused.add(name)
        for instruction in self.computations[name].values():
            attributes = instruction.attributes
            if instruction.opcode == "while":
                trips = times * self._trips(attributes)
                self._run(_attribute(attributes, "body"), trips)
            elif match := CALLED.search(attributes):
                inside = fused or instruction.opcode in ("fusion", "reduce", "scatter")
                for called in re.findall(r"%([\w.\-]+)", match[1]):
                    if instruction.opcode.removesuffix("-start") not in COLLECTIVES:
                        self._run(called, times, inside)

    def _trips(self, attributes: str) -> int:
        """How often a while loop turns: as XLA says, or the bound that its counter is
        compared with, from 0."""
        if match := re.search(r'known_trip_count":\{"n":"(\d+)"', attributes):
            return int(match[1])
        condition = self.computations[_attribute(attributes, "condition")]
        bounds = [
            int(instruction.operands[0])
            for instruction in condition.values()
            if instruction.opcode == "constant" and instruction.operands
        ]
        return bounds[0] if len(bounds) == 1 else 1

    def _running(self) -> Iterator[tuple[int, dict[str, Instruction], Instruction]]:
        for name, times in self.times.items():
            computation = self.computations[name]
            for instruction in computation.values():
                yield times, computation, instruction

    def _traffic(self, instruction, computation) -> int:
        """Bytes that an instruction reads from main memory and writes there. Where it
        only takes a slice of an array, or puts one into it, those of the slice."""
        operands = [computation[name] for name in instruction.operands]
        if "AllocateBuffer" in instruction.attributes:
            return 0
        match instruction.opcode:
            case "dynamic-slice":
                return 2 * _hbm_bytes(instruction)
            case "dynamic-update-slice":
                return 2 * _hbm_bytes(operands[1])
            case "copy-done" | "slice-done":  # of a move onto the chip or from it
                (source,) = computation[operands[0].operands[0]].arrays
                (moved,) = instruction.arrays
                return moved.hbm_bytes + (moved.size if source.hbm_bytes else 0)
            case "fusion":
                inside = self._inside(instruction)
                read = self._elements_read(inside)
                return _written(instruction, inside) + sum(
                    array.hbm_bytes * read[i] // max(math.prod(array.shape), 1)
                    for i, operand in enumerate(operands)
                    for array in operand.arrays
                )
        return _hbm_bytes(instruction) + sum(map(_hbm_bytes, operands))

    def _inside(self, fusion) -> dict[str, Instruction]:
        return self.computations[_attribute(fusion.attributes, "calls")]

    def _elements_read(self, inside, wanted: int | None = None) -> dict[int, int]:
        """How many elements of each parameter a fusion reads, to make all of its result
        or `wanted` elements of it: it makes no element that nothing takes."""
        used = dict.fromkeys(inside, 0)
        read = {}
        for name, user in reversed(inside.items()):
            size = _elements(user)
            used[name] = min(used[name], size)
            if user.is_root:
                used[name] = size if wanted is None else min(wanted, size)
            if user.opcode == "parameter":
                read[int(user.operands[0])] = used[name]
            elif used[name] and user.opcode != "constant":
                taken = self._elements_taken(user, used[name], inside)
                for operand, elements in zip(user.operands, taken, strict=True):
                    used[operand] += elements
        return read

    def _elements_taken(self, user, wanted: int, inside) -> list[int]:
        """Of each operand, to make `wanted` elements of an instruction's result."""
        sizes = [_elements(inside[name]) for name in user.operands]
        match user.opcode:
            case "fusion":
                read = self._elements_read(self._inside(user), wanted)
                return [read[i] for i in range(len(sizes))]
            case "dynamic-update-slice":  # into its operand's own place
                return [0, *sizes[1:]]
            case "dynamic-slice" | "slice":
                return [min(wanted, sizes[0]), *sizes[1:]]
        size = _elements(user)
        return [wanted if n == size else n for n in sizes]


def _written(fusion, inside) -> int:
    (root,) = (x for x in inside.values() if x.is_root)
    made = map(inside.get, root.operands) if root.opcode == "tuple" else [root]
    values = [value for value in made for _ in value.arrays]
    total = 0
    for array, value in zip(fusion.arrays, values, strict=True):
        while value.opcode == "bitcast":
            value = inside[value.operands[0]]
        if value.opcode == "dynamic-update-slice" and array.hbm_bytes:
            total += _size(inside[value.operands[1]])
        else:
            total += array.hbm_bytes
    return total


def _elements(instruction) -> int:
    return sum(math.prod(array.shape) for array in instruction.arrays)


def _hbm_bytes(instruction) -> int:
    return sum(array.hbm_bytes for array in instruction.arrays)


def _size(instruction) -> int:
    return sum(array.size for array in instruction.arrays)


def _instruction(match) -> Instruction:
    inside, attributes = _to_closing_parenthesis(match[5])
    operands = re.findall(r"%([\w.\-]+)", inside)
    if not operands and inside.isdigit():  # of a parameter or a scalar constant
        operands = [inside]
    arrays = [
        Array(dtype, tuple(map(int, filter(None, shape.split(",")))), layout)
        for dtype, shape, layout in ARRAY.findall(match[3])
    ]
    return Instruction(match[2], arrays, match[4], operands, attributes, bool(match[1]))


def _to_closing_parenthesis(text: str) -> tuple[str, str]:
    depth = 1
    for place, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if not depth:
            return text[:place], text[place + 1 :]
    return text, ""


def _attribute(attributes: str, name: str) -> str:
    match = re.search(rf"\b{name}=%([\w.\-]+)", attributes)
    assert match, f"{name} in {attributes}"
    return match[1]


def _is_float(array: Array) -> bool:
    return array.dtype in ("f64", "f32", "f16", "bf16")


def _dot_flops(dot, computation) -> int:
    (result,) = dot.arrays
    if not _is_float(result):
        return 0
    left = computation[dot.operands[0]].arrays[0]
    match = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", dot.attributes)
    assert match, dot.attributes
    dims = map(int, filter(None, match[1].split(",")))
    return 2 * math.prod(result.shape) * math.prod(left.shape[dim] for dim in dims)


def _convolution_flops(convolution, computation) -> int:
    """A TPU has its matrix products as convolutions; what is batched in one may be a
    dilated window, of which a place meets one element."""
    result = convolution.arrays[0]
    if not _is_float(result):
        return 0
    left, right = (computation[name].arrays[0] for name in convolution.operands[:2])
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", convolution.attributes)
    assert labels, convolution.attributes
    left_labels, right_labels, result_labels = labels.groups()
    flops = 2 * right.shape[right_labels.index("i")]
    for label in "bf":
        flops *= result.shape[result_labels.index(label)]
    for label in filter(str.isdigit, result_labels):
        flops *= _meetings(
            left.shape[left_labels.index(label)],
            result.shape[result_labels.index(label)],
            _window(convolution.attributes, int(label)),
        )
    return flops


def _window(attributes: str, dim: int) -> dict[str, int]:
    """The window of a convolution in one of its spatial dimensions."""
    window = {"size": 1, "stride": 1, "lhs_dilate": 1, "rhs_dilate": 1, "pad": 0}
    match = re.search(r"window=\{([^}]*)\}", attributes)
    for field in match[1].split() if match else []:
        name, _, values = field.partition("=")
        if name in window:
            window[name] = int(values.split("x")[dim].split("_")[0])
    return window


def _meetings(input_size: int, output_size: int, window: dict[str, int]) -> int:
    """How many pairs of a result and a place of the window meet an element."""
    count = 0
    for output in range(output_size):
        for k in range(window["size"]):
            place = output * window["stride"] + k * window["rhs_dilate"] - window["pad"]
            index, rest = divmod(place, window["lhs_dilate"])
            count += rest == 0 and 0 <= index < input_size
    return count
