"""What a recipe costs for a teacher: each stage's FLOPs, memory and time on stated hardware. Reads no weights."""

from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
from transformers import PreTrainedModel

from .anatomy import active_share
from .convert import clean_config, kept_indices
from .costs import (
    Matrix,
    Memory,
    Shape,
    finetune_activations,
    finetune_flops,
    seconds,
    transfer_activations,
    transfer_flops,
)
from .freezing import frozen_names
from .hardware import Hardware
from .recipe import Finetune, Recipe, Transfer
from .sizes import sliding_windows
from .student.configuration_attn2mamba import Attn2MambaConfig
from .student.modeling_attn2mamba import Attn2MambaForCausalLM
from .train import micro_batch_size, steps_of


@dataclass
class StageCost:
    """One stage. flops_per_token: of all that is computed for a token; memory: bytes on each device; seconds: of the
    whole stage."""

    kind: str
    mixer: str
    tokens: int
    steps: int
    trainable_parameters: int
    flops_per_token: float
    flops: float
    memory: Memory
    seconds: float


def training_costs(
    model: PreTrainedModel,
    geometry: list[list[int]],
    recipe: Recipe,
    hardware: Hardware,
    utilisation: float,
    devices: int,
) -> list[StageCost]:
    """Costs of the recipe's stages for a model whose attention has the shapes `geometry`. Raises UserError where the
    recipe does not fit the model."""
    keep = kept_indices(model, recipe.keep, len(geometry))
    return [
        stage_cost(student_shape(model, geometry, keep, stage), recipe, index, hardware, utilisation, devices)
        for index, stage in enumerate(recipe.stages)
    ]


def stage_cost(
    shape: Shape, recipe: Recipe, index: int, hardware: Hardware, utilisation: float, devices: int
) -> StageCost:
    stage, length = recipe.stages[index], recipe.sequence_length
    bf16, steps = recipe.precision == "bf16", steps_of(recipe, index)
    tokens = steps * recipe.batch_size * length
    batch, element = (recipe.micro_batch_size or micro_batch_size(recipe)) * length, 2 if bf16 else 4
    if isinstance(stage, Finetune):
        compares = bool(stage.loss.kl or stage.loss.hidden)
        flops = finetune_flops(shape, length, compares)
        activations = finetune_activations(shape, batch, element, compares)
        if bf16:  # autocast keeps a copy of each weight that trains
            activations += 2 * sum(m.parameters for m in shape.matrices if m.trains)
    else:
        flops = transfer_flops(shape, length, stage.loss == "attention")
        activations = transfer_activations(shape, batch, element)
    memory = Memory(
        weights=4 * (shape.parameters + shape.teacher_parameters),
        gradients=4 * shape.trainable,
        optimizer=8 * shape.trainable,
        activations=round(activations),
    )
    flops = flops.times(tokens / length)
    time = seconds(flops, steps, shape.trainable, hardware, bf16, utilisation * devices)
    mixer = stage.mixer.name
    return StageCost(stage.kind, mixer, tokens, steps, shape.trainable, flops.total / tokens, flops.total, memory, time)


def student_shape(
    model: PreTrainedModel, geometry: list[list[int]], keep: list[int], stage: Transfer | Finetune
) -> Shape:
    """Shapes of the student that `stage` trains, made on the meta device."""
    layers = [None if i in keep else g for i, g in enumerate(geometry)]
    config = Attn2MambaConfig(base_config=clean_config(model), mixer=stage.mixer.model_dump(), layers=layers)
    with torch.device("meta"):
        student = Attn2MambaForCausalLM(config)
    names = dict(student.named_parameters())
    frozen = set(n for n in names if ".mixer." not in n)
    if isinstance(stage, Finetune):
        frozen = frozen_names(student, stage.freeze)
    matrices, width, head = weights(student, frozen)
    return Shape(
        matrices=matrices,
        width=width,
        head=head,
        vocabulary=len(output_weight(student)),
        geometry=geometry,
        windows=sliding_windows(config.base()),
        converted=[i for i, layer in enumerate(layers) if layer is not None],
        mixer=config.mixer,
        parameters=sum(p.numel() for p in names.values()),
        trainable=sum(p.numel() for n, p in names.items() if n not in frozen),
        teacher_parameters=sum(p.numel() for p in model.parameters()),
    )


def weights(model: PreTrainedModel, frozen: set[str]) -> tuple[list[Matrix], float, Matrix]:
    """What tokens are multiplied by outside the mixers: the layers' matrices, the inputs and outputs of these and of
    norms (numbers a token), and the output projection."""
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    output, share = output_weight(model), active_share(model)
    body, width = [], 0.0
    for name, p in model.named_parameters():
        if p is output or id(p) in tables or ".mixer." in name or name.endswith("bias"):
            continue
        if p.dim() == 1:
            width += 2 * p.numel()
            continue
        part = share.get(id(p), 1.0)
        body.append(Matrix(p.numel() * part, name not in frozen))
        width += sum(p.shape[-2:]) * (part * p.shape[0] if p.dim() == 3 else 1)
    trains = next(name for name, p in model.named_parameters() if p is output) not in frozen
    return body, width, Matrix(output.numel(), trains)


def output_weight(model: PreTrainedModel) -> nn.Parameter:
    return cast(nn.Parameter, model.get_output_embeddings().weight)
