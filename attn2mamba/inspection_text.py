"""`attn2mamba inspect` for people: what a busy engineer needs first, in eighty columns."""

from itertools import pairwise

from rich.console import Console
from rich.table import Table

from .anatomy import Positions
from .inspection import AttentionKind, Inspection, StudentInspection, Training
from .sizes import human_bytes, human_cross_over


def print_inspection(found: Inspection | StudentInspection, console: Console) -> None:
    if isinstance(found, StudentInspection):
        _print_student(found, console)
    else:
        _print_teacher(found, console)


def _print_student(found: StudentInspection, console: Console) -> None:
    _say(console, f"{found.model}: {found.description}, made from a {found.family}; it is converted already")
    options = ", ".join(f"{name} {value}" for name, value in found.mixer.items() if name != "name")
    _say(console, f"{_count(found.parameters)} parameters{_active(found)}, {found.layers} layers; mixer: {options}")
    table = _table("Memory of one sequence (bf16 activations, fp32 state)", [f"{n:,} tokens" for n in found.kv_bytes])
    table.add_row("teacher's KV cache", *map(human_bytes, found.kv_bytes.values()))
    table.add_row("this model", *map(human_bytes, found.bytes.values()))
    console.print(table)
    _say(console, f"Smaller from {human_cross_over(found.cross_over)}.")


def _print_teacher(found: Inspection, console: Console) -> None:
    _say(console, f"{found.teacher}: {found.family}, {_count(found.parameters)} parameters{_active(found)}")
    _say(console, f"{found.layers} attention layers would be converted{_keep(found)}")
    for kind in found.attention:
        where = "each" if len(found.attention) == 1 else f"layers {_ranges(kind.layers)}"
        _say(console, f"* {where}: {_shape(kind)}")
    _say(console, f"* {_positions(found.positions, found.attention)}")
    for mixture in found.experts:
        shared = f", and {_count(mixture.shared_parameters)} shared parameters" if mixture.shared_parameters else ""
        _say(
            console, f"* {mixture.experts} experts in {mixture.layers} layers, {mixture.active} active a token{shared}"
        )
    extras = _extras(found)
    if extras:
        _say(console, f"* {'; '.join(extras)}")
    console.print(_added(found))
    _say(console, f"One feature map per head (share: none) takes {_count(found.feature_maps_per_head)} instead.")
    console.print(_memory(found))
    if found.training:
        console.print(_training(found.training))
        _say(console, _verdict(found.training))
    for what, reason in found.refused.items():
        _say(console, f"{what} is not possible: {reason}")


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False)


def _active(found: Inspection | StudentInspection) -> str:
    return f" ({_count(found.active_parameters)} active a token)" if found.active_parameters < found.parameters else ""


def _keep(found: Inspection) -> str:
    if not found.keep_sliding:
        return ""
    windows = {k.sliding_window for k in found.attention if k.sliding_window}
    sizes = ", ".join(f"{window:,}" for window in sorted(windows))
    return f"; `keep: sliding` would keep {len(found.keep_sliding)} of them (window {sizes})"


def _shape(kind: AttentionKind) -> str:
    dims = str(kind.head_dim) if kind.head_dim == kind.value_dim else f"{kind.head_dim} (values {kind.value_dim})"
    window = f", sliding window {kind.sliding_window:,}" if kind.sliding_window else ""
    plural = "s" if kind.kv_heads > 1 else ""
    return f"{kind.heads} query heads on {kind.kv_heads} key/value head{plural} of {dims}{window}"


def _positions(found: Positions, kinds: list[AttentionKind]) -> str:
    if found.kind == "learned":
        return f"learned positions, {found.limit:,} at most"
    if found.kind == "other":
        return "no rotary or learned positions found"
    parts = []
    for entry in found.rotary:
        whole = all(kind.head_dim == entry["dims"] for kind in kinds)
        text = f"{entry['layers']}: " if entry["layers"] else ""
        text += "all dimensions" if whole else f"{entry['dims']} dimensions of a head"
        text += f", theta {entry['theta']:,.0f}" if entry["theta"] else ""
        if entry["scaling"]:
            text += f", {entry['scaling']} scaling" + (f" by {entry['factor']:g}" if entry["factor"] else "")
        parts.append(text)
    trained = f"; {found.trained:,} positions in the configuration" if found.trained else ""
    nope = f"; none in layers {_ranges(found.nope_layers)} (NoPE)" if found.nope_layers else ""
    return f"RoPE on {'; '.join(parts)}{nope}{trained}"


def _extras(found: Inspection) -> list[str]:
    parts = []
    if found.attention_norms:
        parts.append(f"norms in the attention: {', '.join(found.attention_norms)}")
    if found.attention_biases:
        parts.append(f"biases in {', '.join(found.attention_biases)}")
    if found.softcap:
        parts.append(f"scores soft-capped at {found.softcap:g}")
    if found.sinks:
        parts.append("attention sinks")
    return parts


def _added(found: Inspection) -> Table:
    parts = {"feature_maps": "maps", "decay": "decay", "convolution": "conv", "gate": "gate", "window_weight": "window"}
    table = _table("Parameters added", ["all", *parts.values()])
    for variant in found.variants:
        counts = (variant.added_parameters, *(variant.parts[part] for part in parts))
        table.add_row(variant.mixer, *(_count(n) if n else "" for n in counts))
    return table


def _memory(found: Inspection) -> Table:
    columns = [*(f"{n // 1024}k" for n in found.kv_bytes), "smaller from"]
    table = _table("Memory of one sequence by tokens (bf16 activations, fp32 state)", columns)
    table.add_row("KV cache", *map(human_bytes, found.kv_bytes.values()), "")
    for v in found.variants:
        table.add_row(v.mixer, *map(human_bytes, v.bytes.values()), human_cross_over(v.cross_over))
    return table


def _training(training: Training) -> Table:
    hardware, many = training.hardware["name"], training.devices
    where = f"{many} x {hardware}" if training.hardware["memory"] else f"{many} x {hardware} FLOP/s"
    title = f"Recipe {training.recipe}, {training.precision}, on {where} at {training.utilisation:.0%} of its peak"
    table = _table(title, [f"{stage.kind} ({stage.mixer})" for stage in training.stages])
    rows = {
        "tokens": [f"{s.tokens:,}" for s in training.stages],
        "parameters that train": [_count(s.trainable_parameters) for s in training.stages],
        "FLOPs a token": [f"{s.flops_per_token:.2e}" for s in training.stages],
        "FLOPs": [f"{s.flops:.2e}" for s in training.stages],
        "memory a device": [human_bytes(s.memory.total) for s in training.stages],
        "time": [human_seconds(s.seconds) for s in training.stages],
    }
    for name, cells in rows.items():
        table.add_row(name, *cells)
    return table


def _verdict(training: Training) -> str:
    text = f"In all {training.flops:.2e} FLOPs, {human_seconds(training.seconds)}"
    if training.fits is None:
        return f"{text}."
    memory = human_bytes(training.hardware["memory"])
    return f"{text}; {'fits' if training.fits else 'does NOT fit'} in {memory}. How: docs/cost.md."


def _table(title: str, columns: list[str]) -> Table:
    table = Table(title=title, title_justify="left")
    for column in ("", *columns):
        table.add_column(column, justify="right" if column else "left")
    return table


def _ranges(indices: list[int]) -> str:
    """[0, 1, 2, 5] -> "0-2, 5"; [0, 2, 4, 6] -> "0, 2, ... 6"."""
    steps = {b - a for a, b in pairwise(indices)}
    if len(indices) > 3 and len(steps) == 1 and steps != {1}:
        return f"{indices[0]}, {indices[1]}, ... {indices[-1]}"
    runs: list[list[int]] = []
    for index in indices:
        if runs and runs[-1][-1] == index - 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _count(number: float) -> str:
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.1f}{unit}" if number < 100 * size else f"{number / size:.0f}{unit}"
    return f"{number:.0f}"


def human_seconds(seconds: float) -> str:
    for unit, size in (("years", 365 * 86400), ("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:.0f} seconds"
