"""The recipe's schema: which keys there are, what they may be and how stages follow from one another.

`load_recipe` is the way in; reading, overriding and the wording of errors live in `recipe_file`.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    StrictBool,
    StrictInt,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)

from attn2mamba.counts import parse_count
from attn2mamba.errors import UserError
from attn2mamba.recipe_file import apply_override, explain, read_recipe, recipe_names, recipe_text

__all__ = ["Recipe", "load_recipe", "parse_count", "recipe_names", "recipe_text"]

HEDGEMAMBA_ONLY = ("conv_width", "decay", "conv", "gate")


def _count(value: object) -> int:
    try:
        return parse_count(value)
    except UserError as error:
        raise ValueError(error) from None


def _number(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("must be a number, not true or false")
    return value


Count = Annotated[int, BeforeValidator(_count)]
Natural = Annotated[StrictInt, Field(ge=0)]
Positive = Annotated[StrictInt, Field(ge=1)]
Real = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False)]
Weight = Annotated[Real, Field(ge=0)]
Above0 = Annotated[Real, Field(gt=0)]
Fraction = Annotated[Real, Field(ge=0, le=1)]
Beta = Annotated[Real, Field(ge=0, lt=1)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Mixer(_Section):
    """What takes the place of softmax attention in each converted layer."""

    name: Literal["hedgehog", "hedgemamba"]
    share: Literal["heads", "none"] = "heads"
    window: Natural = 0
    conv_width: Positive = 4
    decay: StrictBool = True
    conv: StrictBool = True
    gate: StrictBool = True

    @model_validator(mode="after")
    def _hedgehog_is_plain(self) -> Self:
        misplaced = [key for key in HEDGEMAMBA_ONLY if key in self.model_fields_set]
        if self.name == "hedgehog" and misplaced:
            raise ValueError(f"hedgehog has no {', '.join(misplaced)}; remove it, or name hedgemamba")
        return self

    @model_serializer(mode="wrap")
    def _without_foreign_keys(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        foreign = HEDGEMAMBA_ONLY if self.name == "hedgehog" else ()
        return {key: value for key, value in handler(self).items() if key not in foreign}


class Transfer(_Section):
    """Stage 1: feature maps learn to predict what each layer's softmax attention puts out."""

    kind: Literal["transfer"] = "transfer"
    mixer: Mixer = Field(default_factory=lambda: Mixer(name="hedgehog"))
    loss: Literal["cosine", "mse", "attention"] = "cosine"
    tokens: Count
    lr: Above0

    @field_validator("mixer", mode="before")
    @classmethod
    def _name_hedgehog(cls, value: object) -> object:
        return {"name": "hedgehog", **value} if isinstance(value, dict) else value

    @field_validator("mixer")
    @classmethod
    def _only_hedgehog(cls, mixer: Mixer) -> Mixer:
        if mixer.name != "hedgehog":
            raise ValueError(f"a transfer stage trains hedgehog only; give {mixer.name} a finetune stage")
        return mixer


class FinetuneLoss(_Section):
    """Weights of the finetune stage's losses; temperature is that of the logit KL."""

    cross_entropy: Weight = 1.0
    kl: Weight = 0.0
    hidden: Weight = 0.0
    temperature: Above0 = 1.0

    @model_validator(mode="after")
    def _something_to_learn(self) -> Self:
        if not (self.cross_entropy or self.kl or self.hidden):
            raise ValueError("cross_entropy, kl and hidden are all 0; give at least one a weight above 0")
        return self


class Finetune(_Section):
    """Stage 2: the whole student trains, but for the parameters that `freeze` names."""

    kind: Literal["finetune"] = "finetune"
    mixer: Mixer
    loss: FinetuneLoss = Field(default_factory=FinetuneLoss)
    freeze: list[Annotated[str, Field(min_length=1)]] = ["embeddings"]
    tokens: Count
    lr: Above0


Stage = Annotated[Transfer | Finetune, Field(discriminator="kind")]


class Checkpoints(_Section):
    """A checkpoint every so many tokens, of which the newest `keep` stay."""

    every: Count = 50_000_000
    keep: Positive = 2


class Evaluate(_Section):
    """Held-out loss every so many tokens, over so many tokens."""

    every: Count = 10_000_000
    tokens: Count = 50_000


class Optimizer(_Section):
    """AdamW; warmup is a fraction of the stage's steps, min_lr_ratio the end of the cosine over its peak."""

    betas: tuple[Beta, Beta] = (0.9, 0.95)
    weight_decay: Weight = 0.1
    clip: Above0 = 1.0
    warmup: Fraction = 0.02
    min_lr_ratio: Fraction = 0.1


class Recipe(_Section):
    """All that a distillation run is told, besides its teacher, its data and where to write."""

    sequence_length: Annotated[StrictInt, Field(ge=2)]
    batch_size: Positive
    micro_batch_size: Positive | None = None
    seed: Natural = 0
    precision: Literal["fp32", "bf16"] = "fp32"
    reset_documents: StrictBool = False
    initialize: Literal["teacher", "random"] = "teacher"
    keep: list[Natural] | Literal["sliding"] = []
    checkpoints: Checkpoints = Field(default_factory=Checkpoints)
    evaluate: Evaluate = Field(default_factory=Evaluate)
    optimizer: Optimizer = Field(default_factory=Optimizer)
    stages: Annotated[list[Stage], Field(min_length=1)]

    @field_validator("precision", mode="before")
    @classmethod
    def _fp32_masters(cls, value: object) -> object:
        if value not in ("fp32", "bf16"):
            why = "weights stay fp32, since 16 bits lose small updates"
            raise ValueError(f"must be fp32 or bf16 (autocast), got {value!r}; {why}")
        return value

    @field_validator("keep", mode="before")
    @classmethod
    def _layers_or_sliding(cls, value: object) -> object:
        layers = isinstance(value, list) and all(type(layer) is int and layer >= 0 for layer in value)
        if not layers and value != "sliding":
            raise ValueError(f"must be sliding or a list of layer numbers from 0, got {value!r}")
        return value

    @model_validator(mode="after")
    def _whole_micro_batches(self) -> Self:
        if self.micro_batch_size and self.batch_size % self.micro_batch_size:
            raise ValueError(f"'micro_batch_size' {self.micro_batch_size} does not divide {self.batch_size}")
        return self

    @model_validator(mode="after")
    def _something_older_than_the_window(self) -> Self:
        for index, stage in enumerate(self.stages):
            if stage.mixer.window >= self.sequence_length:
                why = f"must be below sequence_length {self.sequence_length}, or nothing trains the state"
                raise ValueError(f"'stages.{index}.mixer.window' {stage.mixer.window} {why}")
        return self

    @model_validator(mode="after")
    def _mixers_follow(self) -> Self:
        stages = self.stages[:1]
        for index, stage in enumerate(self.stages[1:], start=1):
            mixer = _inherit(stage.mixer, stages[-1].mixer, f"stages.{index}.mixer")
            stages.append(stage.model_copy(update={"mixer": mixer}))
        self.stages = stages
        return self

    def to_yaml(self) -> str:
        """The recipe with every default and inherited value written out; loads to an equal recipe."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


SECTIONS: dict[str, type[BaseModel]] = {
    "recipe": Recipe,
    "checkpoints": Checkpoints,
    "evaluate": Evaluate,
    "optimizer": Optimizer,
    "transfer": Transfer,
    "finetune": Finetune,
    "mixer": Mixer,
    "loss": FinetuneLoss,
}


def _inherit(mixer: Mixer, previous: Mixer, path: str) -> Mixer:
    """`mixer` with what it leaves unset taken from the stage before; its shapes may not differ."""
    if (previous.name, mixer.name) == ("hedgemamba", "hedgehog"):
        raise ValueError(f"'{path}.name' cannot go back from hedgemamba to hedgehog; name hedgemamba")
    keys = ("share", "window", *(HEDGEMAMBA_ONLY if previous.name == "hedgemamba" else ()))
    inherited = {key: getattr(previous, key) for key in keys}
    for key, value in inherited.items():
        own = getattr(mixer, key)
        if key in mixer.model_fields_set and own != value:
            raise ValueError(f"'{path}.{key}' is {own!r}, before it {value!r}; leave it out to inherit")
    return mixer.model_copy(update=inherited)


def load_recipe(name_or_path: str, overrides: Sequence[str] = ()) -> Recipe:
    """The shipped recipe or YAML file of that name, after overrides such as "stages.0.lr=1e-3".

    Raises UserError, in one line that names the key, for whatever cannot be read or is not allowed.
    """
    data = read_recipe(name_or_path)
    for override in overrides:
        apply_override(data, override)
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        raise UserError(explain(error, SECTIONS)) from None
