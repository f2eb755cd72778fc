"""What a chip can do, from its maker's public pages."""

from typing import NamedTuple


class Chip(NamedTuple):
    """Peak rates a second. `flops` are of bfloat16 products, in which a TPU multiplies
    float32 too unless told otherwise; `link_bytes` go out over all its links."""

    hbm: int
    flops: float
    hbm_bytes: float
    link_bytes: float
    shapes: tuple[str, ...]  # some topologies


GIB = 2**30
# cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e}, "system architecture" (2026-11): memory
# and bandwidth a chip, peak compute a chip, and interchip bandwidth a chip in Gbit/s.
CHIPS = {
    "v4": Chip(32 * GIB, 275e12, 1228e9, 2400e9 / 8, ("2x2x2", "2x2x4")),
    "v5e": Chip(16 * GIB, 197e12, 819e9, 1600e9 / 8, ("2x2", "4x4", "16x16")),
    "v5p": Chip(95 * GIB, 459e12, 2765e9, 4800e9 / 8, ("2x2x2", "2x2x4")),
    "v6e": Chip(32 * GIB, 918e12, 1640e9, 3584e9 / 8, ("2x2", "4x4", "16x16")),
}
