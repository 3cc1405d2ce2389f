"""The code that a converted checkpoint carries: torch and transformers only, flat, relative imports only."""

from transformers import AutoConfig, AutoModelForCausalLM

from .configuration_attn2mamba import Attn2MambaConfig
from .modeling_attn2mamba import Attn2MambaForCausalLM

AutoConfig.register("attn2mamba", Attn2MambaConfig, exist_ok=True)
AutoModelForCausalLM.register(Attn2MambaConfig, Attn2MambaForCausalLM, exist_ok=True)
