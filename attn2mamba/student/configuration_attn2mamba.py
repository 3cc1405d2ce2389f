"""Configuration of a converted model: the teacher's own configuration, and what replaced its attention."""

import json
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

MIXERS: dict[str, dict[str, Any]] = {
    "hedgehog": {"decay": False, "conv": False, "gate": False},
    "hedgemamba": {"decay": True, "conv": True, "gate": True},
}
"""Which parts each named mixer has by default; `conv_width`, `share` and `window` apply to both."""


def complete_mixer(mixer: dict[str, Any]) -> dict[str, Any]:
    """Fill in defaults. Raises ValueError for an unknown name, key or value (a config.json edited by hand)."""
    name = mixer.get("name", "hedgemamba")
    if name not in MIXERS:
        raise ValueError(f"unknown mixer {name!r}; known: {', '.join(MIXERS)}")
    full = {"name": name, "share": "heads", "window": 0, "conv_width": 4, **MIXERS[name]}
    unknown = set(mixer) - set(full)
    if unknown:
        raise ValueError(f"unknown mixer option {sorted(unknown)[0]!r}; known: {', '.join(full)}")
    full.update(mixer)
    if full["share"] not in ("heads", "none"):
        raise ValueError(f"mixer option share is 'heads' or 'none', not {full['share']!r}")
    if full["window"] < 0 or full["conv_width"] < 1:
        raise ValueError("mixer options: window must be 0 or more, conv_width 1 or more")
    return full


class Attn2MambaConfig(PreTrainedConfig):
    """base_config: the teacher's configuration as a dict. mixer: see `complete_mixer`. layers: one entry per decoder
    layer, None where attention was kept, else [num_heads, num_kv_heads, head_dim, value_dim, hidden_size] as met in
    the teacher's own attention call."""

    model_type = "attn2mamba"

    def __init__(
        self,
        base_config: dict[str, Any] | None = None,
        mixer: dict[str, Any] | None = None,
        layers: list[list[int] | None] | None = None,
        **kwargs: Any,
    ) -> None:
        self.base_config = dict(base_config or {})
        self.mixer = complete_mixer(mixer or {})
        self.layers = list(layers or [])
        for name in ("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"):
            kwargs.setdefault(name, self.base_config.get(name))
        super().__init__(**kwargs)
        self.__dict__["_complete"] = True  # until then transformers' checks would read, and judge, the base's values

    def base(self) -> PreTrainedConfig:
        """The teacher's configuration, as an object of its own class."""
        if "_base" not in self.__dict__:
            values = {k: v for k, v in self.base_config.items() if k not in ("transformers_version", "architectures")}
            if values["model_type"] not in CONFIG_MAPPING:
                kind = values["model_type"]
                raise ValueError(f"transformers has no {kind!r}, from which this was made; import what registers it")
            self.__dict__["_base"] = AutoConfig.for_model(**values)
        return self.__dict__["_base"]

    @property
    def reads_in_pieces(self) -> bool:
        """Whether a text read in pieces gives what it gives at once: not where rotary frequencies follow the length."""
        rotary = json.dumps(self.base_config.get("rope_parameters"), default=str)
        return not any(f'"{kind}"' in rotary for kind in ("dynamic", "longrope"))

    def to_dict(self) -> dict[str, Any]:
        values = super().to_dict()
        values.pop("_base", None)
        values.pop("_complete", None)
        return values

    @property
    def kept_layers(self) -> list[int]:
        """Indices of the layers whose attention was kept."""
        return [i for i, layer in enumerate(self.layers) if layer is None]

    def get_text_config(self, *args: Any, **kwargs: Any) -> "Attn2MambaConfig":
        return self

    def __getattr__(self, name: str) -> Any:
        # hidden_size, vocab_size, max_position_embeddings ...: generate, the harness and servers read them here.
        if name.startswith("_") or not self.__dict__.get("_complete") or not self.base_config:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        try:
            return getattr(self.base(), name)
        except Exception as error:  # what differs by layer has no value for the model: hasattr must say no
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r} ({error})") from error
