"""Convert a pretrained Transformer into a Mamba model, and measure what it kept.

`import attn2mamba` lets transformers' Auto classes load converted models. `convert`, `distill` and `load` are the
Python interface; the command line is `attn2mamba --help`.
"""

import logging

__version__ = "0.1.0"

for _name in ("torchao", "torch.utils._pytree"):  # where torchao is installed, transformers imports it, and it warns
    logging.getLogger(_name).setLevel(logging.ERROR)  # of kernels for other machines

from . import student
from .convert import convert
from .distill import distill
from .teachers import load_teacher as load

__all__ = ["convert", "distill", "load", "student"]
