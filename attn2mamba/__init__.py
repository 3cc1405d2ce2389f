"""Convert a pretrained Transformer into a Mamba model of the same quality.

`import attn2mamba` lets transformers' Auto classes load converted models. `convert`, `distill` and `load` are the
Python interface; the command line is `attn2mamba --help`.
"""

__version__ = "0.1.0"

from . import student
from .convert import convert
from .distill import distill
from .teachers import load_teacher as load

__all__ = ["convert", "distill", "load", "student"]
