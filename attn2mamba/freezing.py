"""Which parameters a recipe's `freeze` names."""

from fnmatch import fnmatchcase

import torch

from .errors import UserError
from .recipe import Finetune, Recipe
from .student.configuration_attn2mamba import Attn2MambaConfig
from .student.modeling_attn2mamba import Attn2MambaForCausalLM


def check_freezes(recipe: Recipe, config: Attn2MambaConfig) -> None:
    """Raises UserError, before anything trains, for a `freeze` that will match nothing when its stage begins."""
    for stage in recipe.stages:
        if isinstance(stage, Finetune):
            mixer = stage.mixer.model_dump()
            shape = Attn2MambaConfig(base_config=config.base_config, mixer=mixer, layers=config.layers)
            with torch.device("meta"):
                frozen_names(Attn2MambaForCausalLM(shape), stage.freeze)


def frozen_names(model: Attn2MambaForCausalLM, patterns: list[str]) -> set[str]:
    """Parameters that `patterns` name: "embeddings" (input and output), or globs over parameter or module names,
    as the teacher calls them. Raises UserError for a pattern that matches nothing, or when nothing is left to train."""
    names = {name.removeprefix("backbone."): name for name, _ in model.named_parameters()}
    frozen: set[str] = set()
    for pattern in patterns:
        if pattern == "embeddings":
            modules = (model.get_input_embeddings(), model.get_output_embeddings())
            ids = {id(p) for module in modules if module is not None for p in module.parameters()}
            matched = {name for name, p in model.named_parameters() if id(p) in ids}
        else:
            matched = {
                full for name, full in names.items() if fnmatchcase(name, pattern) or fnmatchcase(name, pattern + ".*")
            }
        if not matched:
            raise UserError(f"freeze: {pattern!r} matches no parameter; names look like {next(iter(names))}")
        frozen |= matched
    if len(frozen) == len(names):
        raise UserError("freeze: every parameter is frozen; nothing is left to train")
    return frozen
