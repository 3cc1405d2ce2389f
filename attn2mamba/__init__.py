"""Convert a pretrained Transformer into a Mamba model of the same quality."""

__version__ = "0.1.0"
