"""The two stages: what trains, what is minimised, what is measured. The loop in train.py knows neither by name."""

from contextlib import AbstractContextManager, nullcontext
from fnmatch import fnmatchcase
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from . import losses
from .errors import UserError
from .recipe import Finetune, Recipe, Transfer
from .student.attention import mixer_attentions, softmax_attention
from .student.configuration_attn2mamba import Attn2MambaConfig
from .student.inputs import positions_within
from .student.modeling_attn2mamba import Attn2MambaForCausalLM

Batch = dict[str, Tensor]
Metrics = dict[str, float]


class Stage(Protocol):
    """One stage of a run, over a model that it leaves as it found it but for the trained weights."""

    name: str

    def trainable(self) -> dict[str, nn.Parameter]:
        """The parameters that this stage trains, by name."""

    def start(self) -> None:
        """Set the model up; `stop` undoes it."""

    def stop(self) -> None: ...

    def backward(self, batch: Batch, total: int) -> Metrics:
        """Add the gradient of this micro-batch's share of a step of `total` tokens; returns its share of the loss."""

    def count(self, batch: Batch) -> int:
        """Tokens of the batch that carry loss."""

    def evaluate(self, batch: Batch) -> Metrics:
        """Held-out figures of the batch, as sums over its `count` tokens."""


class TransferStage:
    """Stage 1: each mixer learns to return what its layer's softmax attention returns, on the teacher's own stream.

    One model, no graph across layers: the softmax output flows on, the loss of each layer is local and its backward
    runs at once, so memory holds one layer's graph.
    """

    def __init__(self, model: Attn2MambaForCausalLM, recipe: Recipe, stage: Transfer) -> None:
        self.name = "transfer"
        self.model, self.loss, self.reset = model, stage.loss, recipe.reset_documents
        self.autocast = autocast(model, recipe)
        self.total, self.learning = 1, True
        self.shares: list[Tensor] = []

    def trainable(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.model.named_parameters() if ".mixer." in name}

    def start(self) -> None:
        self.model.eval()
        self.model.need_masks(True)
        for attention in mixer_attentions(self.model):
            attention.observer = self._observe

    def stop(self) -> None:
        self.model.need_masks(bool(self.model.config.kept_layers))
        for attention in mixer_attentions(self.model):
            attention.observer = None

    def count(self, batch: Batch) -> int:
        return batch["input_ids"].numel()

    def backward(self, batch: Batch, total: int) -> Metrics:
        return {"loss": self._run(batch, total, learning=True)}

    def evaluate(self, batch: Batch) -> Metrics:
        return {"loss": self._run(batch, 1, learning=False)}

    def _run(self, batch: Batch, total: int, learning: bool) -> float:
        self.total, self.learning, self.shares = total, learning, []
        with torch.no_grad(), self.autocast:
            self.model(**model_inputs(batch, self.reset), use_cache=False, logits_to_keep=1)
        return float(torch.stack(self.shares).mean())

    def _observe(self, module, mix, query, key, value, mask, **kwargs) -> Tensor:
        wants_weights = self.loss == "attention"
        target, weights = softmax_attention(module, query, key, value, mask, **kwargs, output_attentions=wants_weights)
        with torch.set_grad_enabled(self.learning):
            if wants_weights:
                scaling = kwargs.get("scaling") or query.shape[-1] ** -0.5
                with torch.autocast(query.device.type, enabled=False):
                    predicted = module.mixer.attention_weights(query, key, scaling, module.tokens)
                assert weights is not None
                per_token = losses.attention_loss(predicted, weights)
            else:
                function = losses.cosine_loss if self.loss == "cosine" else losses.mse_loss
                per_token = function(mix(query, key, value), target)
            loss = per_token.sum() / self.total
            if self.learning:
                loss.backward()
        self.shares.append(loss.detach())
        return target


class FinetuneStage:
    """Stage 2: the whole student on cross-entropy, the teacher's logits and its hidden states, as weighted."""

    def __init__(
        self, model: Attn2MambaForCausalLM, recipe: Recipe, stage: Finetune, teacher: PreTrainedModel | None
    ) -> None:
        self.name = "finetune"
        self.model, self.weights, self.reset = model, stage.loss, recipe.reset_documents
        self.teacher = teacher if stage.loss.kl or stage.loss.hidden else None
        if (stage.loss.kl or stage.loss.hidden) and teacher is None:
            raise UserError("loss kl and hidden compare with the teacher, which this run does not have")
        self.frozen = frozen_names(model, stage.freeze)
        self.autocast = autocast(model, recipe)

    def trainable(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.model.named_parameters() if name not in self.frozen}

    def start(self) -> None:
        self.model.train()

    def stop(self) -> None:
        self.model.eval()

    def count(self, batch: Batch) -> int:
        return int((self._labels(batch) != losses.IGNORE).sum())

    def _labels(self, batch: Batch) -> Tensor:
        return losses.next_token_labels(batch["input_ids"], batch["document_ids"] if self.reset else None)

    def backward(self, batch: Batch, total: int) -> Metrics:
        with self.autocast:
            terms = self._terms(batch, total)
        weights = self.weights.model_dump()
        loss = sum(weights[name] * term for name, term in terms.items())
        loss.backward()
        return {"loss": float(loss.detach()), **{name: float(term.detach()) for name, term in terms.items()}}

    def _terms(self, batch: Batch, total: int) -> dict[str, Tensor]:
        labels, inputs = self._labels(batch), model_inputs(batch, self.reset)
        hidden = bool(self.weights.hidden)
        output = self.model(**inputs, use_cache=False, output_hidden_states=hidden)
        terms = (
            {"cross_entropy": losses.cross_entropy(output.logits, labels, total)} if self.weights.cross_entropy else {}
        )
        if self.teacher is not None:
            with torch.no_grad():
                target = self.teacher(**teacher_inputs(batch, self.reset), use_cache=False, output_hidden_states=hidden)
            if self.weights.kl:
                temperature = self.weights.temperature
                terms["kl"] = losses.logit_kl(output.logits, target.logits, labels, total, temperature)
            if hidden:
                terms["hidden"] = losses.hidden_alignment(output.hidden_states, target.hidden_states, labels, total)
        return terms

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Metrics:
        training = self.model.training
        self.model.eval()  # dropout would blur the figure and move the random state on
        with self.autocast:
            logits = self.model(**model_inputs(batch, self.reset), use_cache=False).logits
        self.model.train(training)
        return {"loss": float(losses.cross_entropy(logits, self._labels(batch), total=1))}


def train_only(model: nn.Module, stage: Stage) -> dict[str, nn.Parameter]:
    """Give gradients to what `stage` trains and to nothing else; returns those parameters, by name."""
    parameters = stage.trainable()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in parameters)
    return parameters


def model_inputs(batch: Batch, reset: bool) -> Batch:
    """Arguments of the student's forward: packed documents see each other unless `reset`."""
    inputs = {"input_ids": batch["input_ids"]}
    return {**inputs, "document_ids": batch["document_ids"]} if reset else inputs


def teacher_inputs(batch: Batch, reset: bool) -> Batch:
    """The same for a plain transformers model, which tells packed documents by positions that start anew."""
    inputs = {"input_ids": batch["input_ids"]}
    return {**inputs, "position_ids": positions_within(batch["document_ids"])} if reset else inputs


def autocast(model: nn.Module, recipe: Recipe) -> AbstractContextManager:
    """fp32 master weights always; bf16 means autocast. Raises UserError for a model with 16-bit weights."""
    parameter = next(model.parameters())
    if parameter.dtype != torch.float32:
        raise UserError(f"training needs fp32 weights, not {parameter.dtype}: 16 bits lose small updates; load in fp32")
    return torch.autocast(parameter.device.type, torch.bfloat16) if recipe.precision == "bf16" else nullcontext()


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
