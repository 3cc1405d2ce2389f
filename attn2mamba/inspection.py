"""What a teacher is, what would replace its attention, and what that costs; or what a converted model is. From shapes
alone. The fields here are the keys of `attn2mamba inspect --json`, which docs/cost.md describes."""

from dataclasses import dataclass, field
from typing import Any, cast

from .anatomy import Experts, Positions, active_parameters, attention_calls, attention_parts, expert_layers, positions
from .card import describe
from .convert import clean_config, kept_indices
from .errors import UserError
from .hardware import Hardware
from .probe import attention_geometry
from .quiet import quiet
from .recipe import Recipe
from .sizes import CONTEXTS, added_parameters, cross_over, kv_bytes, sliding_windows, state_bytes
from .student.configuration_attn2mamba import Attn2MambaConfig
from .teachers import Teacher, check_length
from .training_cost import StageCost, training_costs

ELEMENT = 2
"""Bytes of an activation in the sizes shown: bf16, what models are served in."""

VARIANTS: dict[str, dict[str, Any]] = {
    "hedgehog": {"name": "hedgehog"},
    "hedgemamba": {"name": "hedgemamba"},
    "hedgemamba, window 64": {"name": "hedgemamba", "window": 64},
}
KEEP_SLIDING = "hedgemamba, keep sliding"


@dataclass
class AttentionKind:
    """Layers whose attention has the same shape. sliding_window in tokens; None where it sees everything."""

    layers: list[int]
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    hidden_size: int
    sliding_window: int | None


@dataclass
class Variant:
    """One mixer for the teacher: parameters added, in all and by part; bytes of a sequence by context length (bf16
    activations, fp32 state; those of kept attention included), of which state_bytes do not grow; and the length, in
    tokens, from which that is less than the KV cache (None: never)."""

    mixer: str
    added_parameters: int
    parts: dict[str, int]
    state_bytes: int
    bytes: dict[int, int]
    cross_over: int | None


@dataclass
class Training:
    """The recipe on the hardware. memory_bytes: of the stage that needs most, on each device; fits: None where the
    hardware's memory is not known."""

    recipe: str
    precision: str
    sequence_length: int
    hardware: dict[str, Any]
    utilisation: float
    devices: int
    stages: list[StageCost]
    flops: float
    seconds: float
    memory_bytes: float
    fits: bool | None


@dataclass
class Inspection:
    """attention_layers of the teacher would be converted, keep_sliding are those that `keep: sliding` would leave.
    kv_bytes: a sequence's KV cache by context length, in bf16. refused: what is not possible, with the reason."""

    kind: str
    teacher: str
    family: str
    parameters: int
    active_parameters: int
    layers: int
    attention: list[AttentionKind]
    positions: Positions
    experts: list[Experts]
    attention_norms: list[str]
    attention_biases: list[str]
    softcap: float | None
    sinks: bool
    keep_sliding: list[int]
    feature_maps_per_head: int
    kv_bytes: dict[int, int]
    variants: list[Variant]
    training: Training | None = None
    refused: dict[str, str] = field(default_factory=dict)


@dataclass
class StudentInspection:
    """A model that is converted already. kv_bytes: what its teacher would need; bytes: what it needs itself."""

    kind: str
    model: str
    family: str
    description: str
    parameters: int
    active_parameters: int
    layers: int
    mixer: dict[str, Any]
    kept_layers: list[int]
    kv_bytes: dict[int, int]
    state_bytes: int
    bytes: dict[int, int]
    cross_over: int | None


@dataclass
class Terms:
    """What training is reckoned with. utilisation: the share of the hardware's peak that is reached."""

    recipe_name: str
    recipe: Recipe
    hardware: Hardware
    utilisation: float = 0.4
    devices: int = 1


@quiet()
def inspect_model(teacher: Teacher, terms: Terms | None = None) -> Inspection | StudentInspection:
    """An account of a teacher or of a converted model. Raises UserError when a teacher cannot be converted."""
    if isinstance(teacher.config, Attn2MambaConfig):
        return inspect_student(teacher)
    return inspect_teacher(teacher, terms)


def inspect_student(student: Teacher) -> StudentInspection:
    config = cast(Attn2MambaConfig, student.config)
    return StudentInspection(
        kind="student",
        model=student.name,
        family=config.base().model_type,
        description=describe(config),
        parameters=sum(p.numel() for p in student.model.parameters()),
        active_parameters=active_parameters(student.model),
        layers=len(config.layers),
        mixer=config.mixer,
        kept_layers=config.kept_layers,
        kv_bytes={n: kv_bytes(config, n, ELEMENT) for n in CONTEXTS},
        state_bytes=state_bytes(config, ELEMENT),
        bytes=student_bytes(config),
        cross_over=cross_over(config, ELEMENT),
    )


def inspect_teacher(teacher: Teacher, terms: Terms | None = None) -> Inspection:
    """Raises UserError when the teacher has no attention that can be converted."""
    model = teacher.model
    geometry = attention_geometry(model)
    calls, windows = attention_calls(model), sliding_windows(model.config)
    norms, biases = attention_parts(model)
    base = Attn2MambaConfig(base_config=clean_config(model), layers=[*geometry])
    found = Inspection(
        kind="teacher",
        teacher=teacher.name,
        family=teacher.config.model_type,
        parameters=sum(p.numel() for p in model.parameters()),
        active_parameters=active_parameters(model),
        layers=len(geometry),
        attention=attention_kinds(geometry, windows),
        positions=positions(model, calls),
        experts=expert_layers(model),
        attention_norms=norms,
        attention_biases=biases,
        softcap=next((c.softcap for c in calls.values() if c.softcap), None),
        sinks=any(c.sinks for c in calls.values()),
        keep_sliding=_keep_sliding(teacher, len(geometry)),
        feature_maps_per_head=added_parameters({"share": "none"}, geometry)["feature_maps"],
        kv_bytes={n: kv_bytes(base, n, ELEMENT) for n in CONTEXTS},
        variants=[],
    )
    for name, mixer in VARIANTS.items():
        found.variants.append(make_variant(name, mixer, base, geometry, []))
    if 0 < len(found.keep_sliding) < len(geometry):
        found.variants.append(make_variant(KEEP_SLIDING, {"name": "hedgemamba"}, base, geometry, found.keep_sliding))
    if terms is not None:
        try:
            found.training = make_training(teacher, geometry, terms)
        except UserError as error:
            found.refused[f"recipe {terms.recipe_name}"] = str(error)
    return found


def _keep_sliding(teacher: Teacher, layers: int) -> list[int]:
    if getattr(teacher.config, "num_kv_shared_layers", 0):
        return []
    try:
        return kept_indices(teacher.model, "sliding", layers)
    except UserError:
        return []


def attention_kinds(geometry: list[list[int]], windows: list[int | None]) -> list[AttentionKind]:
    kinds: dict[tuple, list[int]] = {}
    for index, shape in enumerate(geometry):
        kinds.setdefault((*shape, windows[index] if index < len(windows) else None), []).append(index)
    return [AttentionKind(layers, *kind) for kind, layers in kinds.items()]


def make_variant(
    name: str, mixer: dict[str, Any], base: Attn2MambaConfig, geometry: list[list[int]], keep: list[int]
) -> Variant:
    layers = [None if i in keep else g for i, g in enumerate(geometry)]
    config = Attn2MambaConfig(base_config=base.base_config, mixer=mixer, layers=layers)
    parts = added_parameters(mixer, [g for g in layers if g])
    fixed = state_bytes(config, ELEMENT)
    return Variant(name, sum(parts.values()), parts, fixed, student_bytes(config), cross_over(config, ELEMENT))


def student_bytes(config: Attn2MambaConfig) -> dict[int, int]:
    fixed = state_bytes(config, ELEMENT)
    return {n: fixed + kv_bytes(config, n, ELEMENT, kept_only=True) for n in CONTEXTS}


def make_training(teacher: Teacher, geometry: list[list[int]], terms: Terms) -> Training:
    """Raises UserError where the recipe does not fit the teacher."""
    recipe, hardware = terms.recipe, terms.hardware
    check_length(teacher.model, recipe.sequence_length)
    stages = training_costs(teacher.model, geometry, recipe, hardware, terms.utilisation, terms.devices)
    memory = max(stage.memory.total for stage in stages)
    return Training(
        recipe=terms.recipe_name,
        precision=recipe.precision,
        sequence_length=recipe.sequence_length,
        hardware=hardware._asdict(),
        utilisation=terms.utilisation,
        devices=terms.devices,
        stages=stages,
        flops=sum(stage.flops for stage in stages),
        seconds=sum(stage.seconds for stage in stages),
        memory_bytes=memory,
        fits=None if hardware.memory is None else memory <= hardware.memory,
    )
