"""Machines that are not there, described for a compiler: their chips and devices."""

import contextlib
import math
import os
import re
import tempfile
from typing import NamedTuple

import jax

from mlm_jax.errors import InputError


class Chip(NamedTuple):
    """Peak rates a second. `flops` are of bfloat16 products, in which a TPU multiplies
    float32 too unless told otherwise; `link_bytes` go out over all its links."""

    hbm: int
    flops: float
    hbm_bytes: float
    link_bytes: float
    shapes: tuple[str, ...]  # some topologies


GIB = 2**30
# docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e}, "system architecture"; of the links'
# bidirectional bandwidth half.
CHIPS = {
    "v4": Chip(32 * GIB, 275e12, 1228e9, 300e9, ("2x2x2", "2x2x4")),
    "v5e": Chip(16 * GIB, 197e12, 819e9, 200e9, ("2x2", "4x4", "16x16")),
    "v5p": Chip(95 * GIB, 459e12, 2765e9, 600e9, ("2x2x2", "2x2x4")),
    "v6e": Chip(32 * GIB, 918e12, 1638e9, 400e9, ("2x2", "4x4", "16x16")),
}

CPU = re.compile(r"cpu:([1-9]\d{0,3})")
TPU = re.compile(r"(v\w+):(\d+(?:x\d+){1,2})")


class Topology(NamedTuple):
    name: str
    devices: list
    chip: Chip | None  # None for a CPU
    note: str  # what a reader must know, or ""

    @property
    def num_hosts(self) -> int:
        return len({device.process_index for device in self.devices})


def load(name: str | None) -> Topology:
    """Returns the topology `CHIP:AxB[xC]` or `cpu:N`, N simulated devices.

    None is cpu:1, and a TPU without the package libtpu as many CPU devices; the note
    says so. To be called before JAX is asked for devices. Raises InputError for a name
    that is not known.
    """
    if name is None:
        note = "no --topology: planned for one CPU device."
        return Topology("cpu:1", _cpu_devices(1), None, note)
    if match := CPU.fullmatch(name):
        return Topology(name, _cpu_devices(int(match[1])), None, "")
    match = TPU.fullmatch(name)
    if not match or match[1] not in CHIPS:
        raise InputError(f"--topology={name} is not known; expected {_allowed()}.")
    try:
        return Topology(name, _tpu_devices(name), CHIPS[match[1]], "")
    except ImportError:
        count = math.prod(map(int, match[2].split("x")))
        note = (
            f"{name} needs the package libtpu (pip install 'mlm_jax[tpu]'): planned"
            f" for {count} CPU devices instead."
        )
        return Topology(f"cpu:{count}", _cpu_devices(count), None, note)
    except jax.errors.JaxRuntimeError as error:
        raise InputError(
            f"--topology={name} is refused by libtpu; expected {_allowed()}."
        ) from error


def _allowed() -> str:
    names = [f"{chip}:{shape}" for chip in CHIPS for shape in CHIPS[chip].shapes]
    return f"a slice such as {', '.join(names)}, or cpu:N"


def _cpu_devices(count: int) -> list:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)
    return jax.devices()


def _tpu_devices(name: str) -> list:
    import libtpu  # noqa: F401  an optional requirement
    from jax.experimental import topologies

    # Or libtpu asks a metadata server which machine it is on, and complains.
    os.environ |= {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_MIN_LOG_LEVEL": "3",
    }
    jax.config.update("jax_platforms", "cpu")
    with _quiet():
        return topologies.get_topology_desc(name, platform="tpu").devices


@contextlib.contextmanager
def _quiet():
    """Drops what libraries in C++ write to standard error."""
    saved = os.dup(2)
    with tempfile.TemporaryFile() as sink:
        os.dup2(sink.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(saved, 2)
            os.close(saved)
