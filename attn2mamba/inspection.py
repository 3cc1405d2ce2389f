"""What a teacher is, what would replace its attention, and from which context length on that needs less memory."""

from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from .convert import attention_geometry, clean_config
from .sizes import CONTEXTS, cross_over, human_bytes, human_cross_over, kv_bytes, state_bytes
from .student.configuration_attn2mamba import Attn2MambaConfig
from .student.mixers import Mixer
from .teachers import Teacher

ELEMENT = 2
"""Bytes of an activation in the sizes shown: bf16, what models are served in."""

VARIANTS: dict[str, dict[str, Any]] = {
    "hedgehog": {"name": "hedgehog"},
    "hedgemamba": {"name": "hedgemamba"},
    "hedgemamba, window 64": {"name": "hedgemamba", "window": 64},
}


@dataclass
class Variant:
    """One mixer for the teacher: parameters added, bytes of state per sequence (bf16 activations, fp32 state),
    and the context length, in tokens, from which that is less than the KV cache (None: never)."""

    mixer: str
    added_parameters: int
    state_bytes: int
    cross_over: int | None


@dataclass
class Inspection:
    """layers: attention layers. heads: (query heads, key/value heads, head dim) of each kind of layer met.
    kv_bytes: bytes of a sequence's KV cache by context length, in bf16."""

    teacher: str
    family: str
    parameters: int
    layers: int
    heads: list[tuple[int, int, int]]
    kv_bytes: dict[int, int]
    variants: list[Variant]


def inspect_teacher(teacher: Teacher) -> Inspection:
    """From shapes alone. Raises UserError when the teacher has no attention that can be converted."""
    geometry = attention_geometry(teacher.model)
    base = clean_config(teacher.model)
    variants = []
    for name, mixer in VARIANTS.items():
        config = Attn2MambaConfig(base_config=base, mixer=mixer, layers=geometry)
        added = sum(p.numel() for g in geometry if g for p in Mixer(config.mixer, g).parameters())
        variants.append(Variant(name, added, state_bytes(config, ELEMENT), cross_over(config, ELEMENT)))
    return Inspection(
        teacher=teacher.name,
        family=teacher.config.model_type,
        parameters=sum(p.numel() for p in teacher.model.parameters()),
        layers=sum(g is not None for g in geometry),
        heads=sorted({(g[0], g[1], g[2]) for g in geometry if g}),
        kv_bytes={n: kv_bytes(config, n, ELEMENT) for n in CONTEXTS},
        variants=variants,
    )


def print_inspection(found: Inspection, console: Console) -> None:
    heads = "; ".join(f"{h} query heads on {g} key/value heads of {d}" for h, g, d in found.heads)
    console.print(f"{found.teacher}: {found.family}, {found.parameters / 1e6:.1f}M parameters")
    console.print(f"{found.layers} attention layers would be converted ({heads})")
    table = Table()
    for column in ("", "added parameters", *(f"{n:,} tokens" for n in found.kv_bytes), "smaller from"):
        table.add_column(column, justify="left" if not column else "right")
    table.add_row("KV cache (bf16)", "", *map(human_bytes, found.kv_bytes.values()), "")
    for v in found.variants:
        sizes = [human_bytes(v.state_bytes)] * len(found.kv_bytes)
        table.add_row(v.mixer, f"{v.added_parameters / 1e6:.2f}M", *sizes, human_cross_over(v.cross_over))
    console.print(table)
