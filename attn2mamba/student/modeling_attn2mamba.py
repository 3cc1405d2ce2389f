"""A converted model: the teacher's own decoder with mixers in place of softmax attention."""

import copy
import inspect
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, GenerationMixin, PreTrainedModel

from .attention import MASKED, MASKLESS, attentions, documents_apart, install, mixer_attentions
from .cache import StateCache, StateLayer
from .configuration_attn2mamba import Attn2MambaConfig
from .inputs import Call, permute
from .mixers import Mixer

PREFILL_CHUNK = 2048
"""Tokens per forward when a longer prompt is read into a cache: memory does not grow with the prompt."""

# transformers renamed the argument during 5.x.
_NAMES = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
_CACHE = "cache" if "cache" in _NAMES else "past_key_values"


class Attn2MambaPreTrainedModel(PreTrainedModel):
    config_class = Attn2MambaConfig
    config: Attn2MambaConfig
    base_model_prefix = "backbone"
    supports_gradient_checkpointing = True
    _supports_attention_backend = True
    _supports_sdpa = True
    _is_stateful = True  # makes `generate` refuse assisted decoding, which would need to roll the state back


class Attn2MambaForCausalLM(Attn2MambaPreTrainedModel, GenerationMixin):
    """`backbone` is the family's own causal LM; `config.layers` says which of its attentions have a mixer."""

    def __init__(self, config: Attn2MambaConfig, backbone: PreTrainedModel | None = None) -> None:
        super().__init__(config)
        if backbone is None:
            base = copy.deepcopy(config.base())
            backbone = AutoModelForCausalLM.from_config(base, attn_implementation="eager")
        self.backbone = backbone
        for _, attention in list(attentions(backbone)):
            geometry = config.layers[cast(int, attention.layer_idx)]
            if geometry is not None:
                install(attention, Mixer(config.mixer, geometry))
        self.converted = mixer_attentions(backbone)
        self.need_masks(bool(config.kept_layers))
        self.post_init()

    def need_masks(self, needed: bool) -> None:
        """Whether the family should build its attention masks (some layer attends by softmax)."""
        self.backbone.config._attn_implementation = MASKED if needed else MASKLESS

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.backbone.get_input_embeddings()

    def set_input_embeddings(self, value: torch.nn.Module) -> None:
        self.backbone.set_input_embeddings(value)

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.backbone.get_output_embeddings()

    def set_output_embeddings(self, value: torch.nn.Module) -> None:
        self.backbone.set_output_embeddings(value)

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> torch.nn.Embedding:
        """As in transformers; the base's configuration follows, so that the model loads again."""
        embeddings = super().resize_token_embeddings(*args, **kwargs)
        self.config.base_config["vocab_size"] = self.config.base().vocab_size = embeddings.num_embeddings
        return embeddings

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # the forward makes a StateCache

    def new_cache(self) -> StateCache:
        """An empty cache: fixed-size states, and transformers' own layers where attention was kept."""
        kept = self.config.kept_layers
        family = DynamicCache(config=self.config.base()).layers if kept else []
        return StateCache([family[i] if i in kept else StateLayer() for i in range(len(self.config.layers))])

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        cache: StateCache | None = None,
        past_key_values: StateCache | None = None,
        document_ids: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> Any:
        """As every causal LM of transformers. attention_mask (B, T) or (B, past + T): padding may stand on either
        side and never enters a state. document_ids (B, T): packed documents that must not see each other (training;
        not with a cache or padding). Raises ValueError for a 4-D mask or a cache of another kind."""
        cache = cache if cache is not None else past_key_values
        if use_cache is None:
            use_cache = cache is not None or not (self.training or document_ids is not None)
        if not use_cache:
            cache = None
        elif cache is None:
            cache = self.new_cache()
        call = Call.check(input_ids, inputs_embeds, attention_mask, position_ids, labels, document_ids, cache)
        length = call.shape[1]
        whole = cache is None or labels is not None or torch.is_grad_enabled() or isinstance(logits_to_keep, Tensor)
        whole = whole or not self.config.reads_in_pieces
        if whole or length <= PREFILL_CHUNK or kwargs.get("output_hidden_states"):
            return self._step(call, cache, logits_to_keep, **kwargs)
        logits = []
        for start in range(0, length, PREFILL_CHUNK):
            stop = min(start + PREFILL_CHUNK, length)
            keep = max(1, logits_to_keep - (length - stop)) if logits_to_keep else 0
            outputs = self._step(call.slice(start, stop), cache, keep, **kwargs)
            logits.append(outputs.logits)
        outputs.logits = torch.cat(logits, dim=1)[:, -logits_to_keep:]
        return outputs

    def _step(self, call: Call, cache: StateCache | None, logits_to_keep: int | Tensor, **kwargs: Any) -> Any:
        call, order = call.mask_labels().pads_to_the_left()
        tokens, positions, mask = call.prepare(cache)
        for attention in self.converted:
            attention.tokens = tokens
        kept = logits_to_keep if order is None else 0
        if isinstance(kept, int) and 0 < kept < call.shape[1]:
            # As indices: given a number, families that share keys between layers drop queries that a state must see.
            kept = torch.arange(call.shape[1] - kept, call.shape[1], device=call.device)
        with documents_apart(self.backbone, call.document_ids):
            outputs = self.backbone(
                input_ids=call.input_ids,
                inputs_embeds=call.inputs_embeds,
                attention_mask=mask,
                position_ids=positions,
                labels=call.labels,
                use_cache=cache is not None,
                logits_to_keep=kept,
                **{_CACHE: cache},
                **kwargs,
            )
        if order is not None:
            back = order.argsort(dim=1)
            wanted = logits_to_keep if isinstance(logits_to_keep, Tensor) else slice(-logits_to_keep, None)
            outputs.logits = permute(outputs.logits, back)[:, wanted]
            if outputs.hidden_states is not None:
                outputs.hidden_states = tuple(permute(x, back) for x in outputs.hidden_states)
        return outputs


Attn2MambaConfig.register_for_auto_class()
Attn2MambaForCausalLM.register_for_auto_class("AutoModelForCausalLM")
