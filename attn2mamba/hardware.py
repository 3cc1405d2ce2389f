"""Accelerators by name, as their vendors' data sheets give them, or a rate of one's own."""

import math
from difflib import get_close_matches
from typing import NamedTuple

from .errors import UserError

TERA, GIGA = 1e12, 1e9


class Hardware(NamedTuple):
    """Peak FLOP/s of dense matrix products in bf16 (fp32 accumulation) and in plain fp32 (no TF32), bytes of memory,
    and bytes per second to it. Memory and bandwidth are None where only a rate was given."""

    name: str
    bf16: float
    fp32: float
    memory: float | None
    bandwidth: float | None


HARDWARE = {
    name: Hardware(name, bf16 * TERA, fp32 * TERA, memory * GIGA, bandwidth * GIGA)
    for name, bf16, fp32, memory, bandwidth in (
        ("a10", 125, 31.2, 24, 600),
        ("a100-40gb", 312, 19.5, 40, 1555),
        ("a100-80gb", 312, 19.5, 80, 2039),
        ("h100-pcie", 756, 51, 80, 2000),
        ("h100-sxm", 989, 67, 80, 3350),
        ("h200", 989, 67, 141, 4800),
        ("l4", 121, 30.3, 24, 300),
        ("l40s", 362, 91.6, 48, 864),
        ("rtx-3090", 71, 35.6, 24, 936),
        ("rtx-4090", 165, 82.6, 24, 1008),
    )
}


def parse_hardware(text: str) -> Hardware:
    """An accelerator's name, or a number: the FLOP/s to reckon with, in any precision. Raises UserError for others."""
    if text.lower() in HARDWARE:
        return HARDWARE[text.lower()]
    try:
        rate = float(text)
    except ValueError:
        near = [name for name in HARDWARE if text and name.startswith(text.lower())]
        near = near or get_close_matches(text.lower(), HARDWARE, 1)
        known = f"give a number of FLOP/s or one of {', '.join(HARDWARE)}"
        hint = f"did you mean {' or '.join(near)}?" if near else known
        raise UserError(f"hardware '{text}' is unknown; {hint}") from None
    if not (math.isfinite(rate) and rate > 0):
        raise UserError(f"hardware '{text}': a number of FLOP/s must be above 0")
    return Hardware(text, rate, rate, None, None)
