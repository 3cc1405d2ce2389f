"""The two stages: what trains, what is minimised, what is measured. The loop in train.py knows neither by name."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from . import losses
from .alignment import Projector, layer_map
from .errors import UserError
from .freezing import frozen_names
from .recipe import Finetune, Recipe, Transfer
from .student.attention import documents_apart, mixer_attentions, score_rule, softmax_attention
from .student.inputs import positions_within
from .student.modeling_attn2mamba import Attn2MambaForCausalLM
from .vocabulary import Vocabulary

Batch = dict[str, Tensor]
Metrics = dict[str, float]


class Stage(Protocol):
    """One stage of a run, over a model that it leaves as it found it but for the trained weights."""

    name: str

    @property
    def extra(self) -> nn.Module | None:
        """What trains beside the model: kept in checkpoints, and dropped when the stage ends."""

    def trainable(self) -> dict[str, nn.Parameter]:
        """The parameters that this stage trains, by name, those of `extra` included."""

    def start(self) -> None:
        """Set the model up; `stop` undoes it."""

    def stop(self) -> None: ...

    def backward(self, batch: Batch, total: int) -> Metrics:
        """Add the gradient of this micro-batch's share of a step of `total` tokens; returns its share of the loss."""

    def count(self, batch: Batch) -> int:
        """Tokens of the batch that carry loss."""

    def evaluate(self, batch: Batch) -> Metrics:
        """Held-out figures of the batch, as sums over its `count` tokens: the loss, and `layer N` of each layer that
        has one of its own, in order."""


class TransferStage:
    """Stage 1: each mixer learns to return what its layer's softmax attention returns, on the teacher's own stream.

    One model, no graph across layers: the softmax output flows on, the loss of each layer is local and its backward
    runs at once, so memory holds one layer's graph.
    """

    extra = None

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
        loss = self._run(batch, 1, learning=False)
        return {"loss": loss, **{f"layer {i}": float(share) for i, share in enumerate(self.shares)}}

    def _run(self, batch: Batch, total: int, learning: bool) -> float:
        self.total, self.learning, self.shares = total, learning, []
        with torch.no_grad(), self.autocast:
            self.model(**model_inputs(batch, self.reset), use_cache=False, logits_to_keep=1)
        return float(torch.stack(self.shares).mean())

    def _observe(self, module, mix, query, key, value, mask, **kwargs) -> Tensor:
        wants_weights = self.loss == "attention"
        options = {**kwargs, "output_attentions": wants_weights}
        target, weights = softmax_attention(module, query, key, value, mask, **options)
        with torch.set_grad_enabled(self.learning):
            if wants_weights:
                with torch.autocast(query.device.type, enabled=False):
                    predicted = module.mixer.attention_weights(query, key, score_rule(query, kwargs), module.tokens)
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
    """Stage 2: the whole student on cross-entropy, the teacher's logits and its hidden states, as weighted. The teacher
    may be of another width and depth; `vocabulary` says which ids it shares with the student (None: all)."""

    def __init__(
        self,
        model: Attn2MambaForCausalLM,
        recipe: Recipe,
        stage: Finetune,
        teacher: PreTrainedModel | None,
        vocabulary: Vocabulary | None = None,
    ) -> None:
        self.name = "finetune"
        self.model, self.weights, self.reset = model, stage.loss, recipe.reset_documents
        self.vocabulary = vocabulary
        if needs_teacher(stage) and teacher is None:
            raise UserError("loss kl and hidden compare with the teacher, which this run does not have")
        self.teacher = teacher if needs_teacher(stage) else None
        self.frozen = frozen_names(model, stage.freeze)
        self.autocast = autocast(model, recipe)
        self.extra = Projector.between(model, teacher) if stage.loss.hidden and teacher is not None else None

    def trainable(self) -> dict[str, nn.Parameter]:
        extra = self.extra.named_parameters(prefix="projector") if self.extra else ()
        return {name: p for name, p in self.model.named_parameters() if name not in self.frozen} | dict(extra)

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
        loss: Any = sum(getattr(self.weights, name) * term for name, term in terms.items())
        loss.backward()
        return {"loss": float(loss.detach()), **{name: float(term.detach()) for name, term in terms.items()}}

    def _terms(self, batch: Batch, total: int) -> dict[str, Tensor]:
        weights, labels, output = self.weights, self._labels(batch), self._output(batch)
        terms = {"cross_entropy": losses.cross_entropy(output.logits, labels, total)} if weights.cross_entropy else {}
        if self.teacher is None:
            return terms
        target, labels = self._target(batch, labels)
        if weights.kl:
            shared = self.vocabulary.shared if self.vocabulary else None
            terms["kl"] = losses.logit_kl(output.logits, target.logits, labels, total, weights.temperature, shared)
        if weights.hidden:
            ours = self.extra(output.hidden_states) if self.extra else output.hidden_states
            layers = layer_map(len(ours) - 1, len(target.hidden_states) - 1)
            terms["hidden"] = losses.hidden_alignment(ours, target.hidden_states, labels, total, layers)
        return terms

    def _output(self, batch: Batch) -> Any:
        inputs = model_inputs(batch, self.reset)
        return self.model(**inputs, use_cache=False, output_hidden_states=bool(self.weights.hidden))

    @torch.no_grad()
    def _target(self, batch: Batch, labels: Tensor) -> tuple[Any, Tensor]:
        """The teacher's output, and those of the labels at which it means something."""
        assert self.teacher is not None
        if self.vocabulary:
            ids, labels = self.vocabulary.for_teacher(batch["input_ids"], labels)
            batch = {**batch, "input_ids": ids}
        with documents_apart(self.teacher, batch["document_ids"] if self.reset else None):
            inputs = teacher_inputs(batch, self.reset)
            output = self.teacher(**inputs, use_cache=False, output_hidden_states=bool(self.weights.hidden))
        return output, labels

    @torch.no_grad()
    def fit_projector(self, batches: Iterable[Batch]) -> None:
        """Start the projector, where the stage has one, from the least-squares fit over `batches`."""
        if self.extra:
            self.extra.fit(map(self._states, batches))

    def _states(self, batch: Batch) -> tuple[Sequence[Tensor], Sequence[Tensor], Tensor]:
        with self.autocast:
            output, (target, labels) = self._output(batch), self._target(batch, self._labels(batch))
        return output.hidden_states, target.hidden_states, labels != losses.IGNORE

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Metrics:
        training = self.model.training
        self.model.eval()  # dropout would blur the figure and move the random state on
        with self.autocast:
            logits = self.model(**model_inputs(batch, self.reset), use_cache=False).logits
        self.model.train(training)
        return {"loss": float(losses.cross_entropy(logits, self._labels(batch), total=1))}


def needs_teacher(stage: Transfer | Finetune) -> bool:
    """Whether a stage of a recipe compares with the teacher."""
    return isinstance(stage, Finetune) and bool(stage.loss.kl or stage.loss.hidden)


def train_only(model: nn.Module, stage: Stage) -> dict[str, nn.Parameter]:
    """Give gradients to what `stage` trains and to nothing else; returns those parameters, by name."""
    parameters = stage.trainable()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in parameters)
    return parameters


def parameter_counts(model: nn.Module, stage: Stage) -> tuple[int, int, int]:
    """Parameters that `stage` trains, those of them in its `extra`, and those of the model that stay as they are."""
    trainable = sum(p.numel() for p in stage.trainable().values())
    extra = sum(p.numel() for p in stage.extra.parameters()) if stage.extra else 0
    return trainable, extra, sum(p.numel() for p in model.parameters()) + extra - trainable


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
