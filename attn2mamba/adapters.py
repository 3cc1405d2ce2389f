"""PEFT adapter directories: the base that an adapter names, and the adapter merged into it (extra `lora`)."""

import importlib.util
import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from attn2mamba.errors import UserError
from attn2mamba.locate import Place, locate
from attn2mamba.weight_files import HOW_TO_ALLOW, is_whole_safetensors

CONFIG, SAFE, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
MERGE_TOLERANCE = 1e-4  # of the largest logit; sums in another order come to about 1e-6


@dataclass(frozen=True)
class Adapter:
    """An adapter's directory, its kind as PEFT calls it, and the place of the model that it was trained on."""

    path: Path
    label: str
    kind: str
    base: Place

    def __str__(self) -> str:
        return f"adapter '{self.label}' ({self.kind})"

    @property
    def has_tokenizer(self) -> bool:
        return any((self.path / name).is_file() for name in TOKENIZER_FILES)

    @contextmanager
    def of_its_base(self) -> Iterator[None]:
        """Mistakes inside are about the base, which the user did not name: say where it comes from."""
        try:
            yield
        except UserError as error:
            raise UserError(f"{self} names its base in {CONFIG}: {error}") from error


def find_adapter(place: Place) -> Adapter | None:
    """The adapter that a directory holds, None where it holds none.

    Raises UserError where its configuration names no base, or one that is an adapter too, and where a whole model
    lies in the same directory.
    """
    path = Path(place.path)
    if not (path / CONFIG).is_file():
        return None
    if any(not file.name.startswith("adapter_model") for file in path.glob("*.safetensors")):
        raise UserError(f"model '{place.label}' holds a model and an adapter; give each a directory of its own")
    try:
        settings = json.loads((path / CONFIG).read_text())
        name, kind = settings["base_model_name_or_path"], settings["peft_type"]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"adapter '{place.label}': {CONFIG} cannot be read; fetch it again") from None
    if not name:
        raise UserError(f"adapter '{place.label}': {CONFIG} has no base_model_name_or_path; write its base there")
    task = settings.get("task_type") or "CAUSAL_LM"
    if task != "CAUSAL_LM":
        raise UserError(f"adapter '{place.label}' is for {task}, not a language model; give one for CAUSAL_LM")
    adapter = Adapter(path, place.label, kind, Place(name, name))
    with adapter.of_its_base():
        base = locate(name)
        if (Path(base.path) / CONFIG).is_file():
            raise UserError(f"'{base.label}' is an adapter too; merge it into a model first")
    return replace(adapter, base=replace(base, revision=settings.get("revision") if base.is_hub else None))


def check_adapter(adapter: Adapter, allow_pickle: bool, device_map: Any) -> None:
    """Raise UserError where peft is missing, or the adapter's weights are missing, cut short or a pickle, or the base
    is to be spread over devices."""
    if device_map is not None:
        raise UserError(f"{adapter} is merged on one device; save the merged model, then place that")
    if importlib.util.find_spec("peft") is None:
        raise UserError(f"{adapter} needs peft; pip install peft")
    if (adapter.path / SAFE).is_file():
        if not is_whole_safetensors(adapter.path / SAFE):
            raise UserError(f"{adapter}: {SAFE} is cut short or damaged; fetch it again")
    elif not (adapter.path / PICKLE).is_file():
        raise UserError(f"{adapter} has no weights ({SAFE}) beside its {CONFIG}; add them")
    elif not allow_pickle:
        raise UserError(f"{adapter} has its weights in a pickle ({PICKLE}); {HOW_TO_ALLOW}")


def merge(base: PreTrainedModel, adapter: Adapter) -> PreTrainedModel:
    """`base`, changed in place, with the adapter's changes in its weights: an ordinary model, all of it trainable.

    The sums are made in fp32. Raises UserError for an adapter that does not fit the base, and for a kind that
    cannot be merged, found by its name or because the merged model answers otherwise.
    """
    dtype = base.dtype
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of tied weights, which are seen to here
            merged = _merge(base.float().eval(), adapter)
    except UserError:
        raise
    except Exception as error:  # each kind of adapter fails in its own way
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"{adapter} cannot be merged into its base ({reason})") from error
    return merged.requires_grad_(True).to(dtype)  # type: ignore[arg-type]


@torch.no_grad()
def _merge(base: PreTrainedModel, adapter: Adapter) -> PreTrainedModel:
    import peft

    settings = peft.PeftConfig.from_pretrained(str(adapter.path))
    if settings.is_prompt_learning:
        raise UserError(f"{adapter} lives in the prompt, not in weights; it cannot be merged")
    wrapped: Any = peft.PeftModelForCausalLM(base, settings)
    report = wrapped.load_adapter(str(adapter.path), "default", is_trainable=False, torch_device="cpu")
    strays = [*report.unexpected_keys, *report.missing_keys]
    if strays:
        raise UserError(
            f"{adapter} does not fit its base '{adapter.base.label}' (such as {strays[0]}); "
            "give it the base that it was trained on"
        )
    expected = _probe(wrapped.eval())
    _untie_adapted(base)
    merged: PreTrainedModel = wrapped.merge_and_unload()
    difference = (_probe(merged) - expected).abs().max() / expected.abs().max()
    if not difference < MERGE_TOLERANCE:
        raise UserError(f"{adapter} cannot be merged: the merged model would answer otherwise")
    _settle_ties(merged)
    return merged


def _probe(model: Any) -> Tensor:
    """Logits of 16 different tokens, which pass through every weight that counts."""
    size = model.get_input_embeddings().weight.shape[0]
    ids = torch.arange(16).mul(size // 16).remainder(size).unsqueeze(0)
    return model(input_ids=ids).logits


def _untie_adapted(base: PreTrainedModel) -> None:
    """A head of its own where an adapter changes only one end of a tied pair: merging would change both."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    ends: list[Any] = [base.get_input_embeddings(), base.get_output_embeddings()]
    plain: list[Any] = [end.get_base_layer() if isinstance(end, BaseTunerLayer) else end for end in ends]
    if plain != ends and plain[0].weight is plain[1].weight:
        plain[1].weight = torch.nn.Parameter(plain[0].weight.clone())


def _settle_ties(model: PreTrainedModel) -> None:
    """Have a model whose embeddings and head have parted say so, in its configuration and when it is saved."""
    head: Any = model.get_output_embeddings()
    embeddings: Any = model.get_input_embeddings()
    if head.weight is not embeddings.weight:
        model.config.tie_word_embeddings = False
        model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=True)
