"""What training costs in FLOPs, bytes and seconds, from shapes alone. docs/cost.md states the formulas.

A FLOP is a multiplication or an addition inside a matrix product; nothing else is counted. Products are those that the
code runs (student/scan.py, mixers.py, window.py, stages.py), with T = tokens of a sequence, rounded up to whole chunks
where the scan pads it. `geometry` is [num_heads, num_kv_heads, head_dim, value_dim, hidden_size].
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .hardware import Hardware
from .student.window import BLOCK

CHUNK = 64
"""Tokens per chunk of `chunked_scan`, its default."""

SOFTMAX_BACKWARD = 2.5
"""Products of a fused attention's backward over those of its forward: it computes the scores anew."""

LOGITS, LOGITS_WITH_TEACHER = 3, 8
"""Copies of the logits at the peak of stage 2: logits, log-probabilities and their gradient; with
a teacher, the same of both models, and what the divergence keeps."""

TRANSIENT = 2
"""Stage 1: a layer's graph and its gradients, over the graph."""

UPDATE_BYTES = 28
"""Memory traffic of one AdamW update of a parameter: reads weight, gradient and two moments, writes all but one."""


class Flops(NamedTuple):
    """FLOPs that run in fp32 under any precision, and all others."""

    fp32: float = 0.0
    other: float = 0.0

    def __add__(self, more: tuple) -> "Flops":
        return Flops(self.fp32 + more[0], self.other + more[1])

    def times(self, factor: float) -> "Flops":
        return Flops(self.fp32 * factor, self.other * factor)

    @property
    def total(self) -> float:
        return self.fp32 + self.other


class Product(NamedTuple):
    """A matrix product of a mixer: FLOPs of its forward, how many of its operands get a gradient in stage 1 (in stage 2
    both do; each costs the forward once more), and whether it runs in fp32 under autocast too."""

    flops: float
    transfer: int
    fp32: bool = True


class Matrix(NamedTuple):
    """A weight outside the mixers; `parameters`: those that one token meets (of stacked experts, the ones it is routed
    to)."""

    parameters: float
    trains: bool


@dataclass
class Shape:
    """A student and what trains of it. `geometry` is the teacher's, of every layer; `converted` the layers with a
    mixer; `windows` the sliding windows, None for a layer that sees everything. `matrices` are the layers', `width`
    their inputs and outputs a token, with those of norms; `head` is the output projection on `vocabulary` logits.
    `parameters` and `trainable` count each once."""

    matrices: list[Matrix]
    width: float
    head: Matrix
    vocabulary: int
    geometry: list[list[int]]
    windows: list[int | None]
    converted: list[int]
    mixer: dict[str, Any]
    parameters: int
    trainable: int
    teacher_parameters: int

    def mixer_of(self, layer: int) -> dict[str, Any]:
        """The mixer's options in one layer: its window is never wider than the teacher's."""
        window = self.mixer["window"]
        return {**self.mixer, "window": min(window, self.windows[layer] or window)}


@dataclass
class Memory:
    """Bytes. weights: fp32, of teacher and student; optimizer: AdamW's two moments; activations: what one micro-batch
    keeps for its backward, logits included."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    total: int = field(init=False)

    def __post_init__(self) -> None:
        self.total = self.weights + self.gradients + self.optimizer + self.activations


def mixer_products(mixer: dict[str, Any], geometry: Sequence[int], length: int) -> list[Product]:
    """The matrix products of one mixer's forward over a sequence of `length` tokens."""
    heads, kv_heads, head_dim, value_dim, hidden = geometry
    features, width, chunk = 2 * head_dim, value_dim + 1, min(CHUNK, length)
    padded = -(-length // chunk) * chunk
    products = [
        *_feature_maps(geometry, length),
        Product(2 * padded * chunk * heads * features, 2),  # scores within a chunk
        Product(2 * padded * chunk * heads * width, 1),  # scores times values
        Product(2 * padded * kv_heads * features * width, 1),  # chunk's sum of k v^T
        Product(2 * padded * heads * features * width, 2),  # query times state
    ]
    if mixer["window"]:
        seen = mixer["window"] + min(BLOCK, length)
        products += [
            Product(2 * padded * seen * heads * head_dim, 0, fp32=False),
            Product(2 * padded * seen * heads * value_dim, 0),
            Product(2 * length * heads * head_dim, 1),  # weight of older tokens
        ]
    if mixer["decay"]:
        products.append(Product(2 * length * hidden * kv_heads, 1))
    if mixer["gate"]:
        products.append(Product(2 * length * hidden * heads * value_dim, 1, fp32=False))
    return products


def _feature_maps(geometry: Sequence[int], length: int) -> list[Product]:
    heads, kv_heads, head_dim, _, _ = geometry
    return [Product(2 * length * h * head_dim**2, 1) for h in (heads, kv_heads)]


def weight_products(mixer: dict[str, Any], geometry: Sequence[int], length: int) -> list[Product]:
    """The same where stage 1 matches attention weights (loss: attention): the quadratic form."""
    heads, _, head_dim, _, _ = geometry
    products = [*_feature_maps(geometry, length), Product(2 * length**2 * heads * 2 * head_dim, 2)]
    if mixer["window"]:
        products += [Product(2 * length**2 * heads * head_dim, 0), Product(2 * length * heads * head_dim, 1)]
    return products


def softmax_flops(geometry: Sequence[int], length: int, window: int | None = None) -> float:
    """Forward of causal softmax attention: each query meets the keys that it sees, and no more."""
    heads, _, head_dim, value_dim, _ = geometry
    reach = min(window or length, length)
    pairs = reach * (reach + 1) / 2 + (length - reach) * reach
    return 2 * pairs * heads * (head_dim + value_dim)


def teacher_flops(shape: Shape, length: int, logits: int) -> Flops:
    """One sequence through the teacher, with `logits` positions through its output projection."""
    weights = sum(2 * m.parameters for m in shape.matrices) * length + 2 * shape.head.parameters * logits
    layers = zip(shape.geometry, shape.windows, strict=True)
    return Flops(other=weights + sum(softmax_flops(g, length, w) for g, w in layers))


def transfer_flops(shape: Shape, length: int, weights: bool = False) -> Flops:
    """One sequence of stage 1: the teacher's forward (one position's logits), each mixer's forward, and the gradients
    of feature maps and window weight. `weights`: the loss compares attention weights."""
    products = weight_products if weights else mixer_products
    total = teacher_flops(shape, length, 1)
    for i in shape.converted:
        total += _mixers(products(shape.mixer_of(i), shape.geometry[i], length), lambda p: 1 + p.transfer)
    return total


def finetune_flops(shape: Shape, length: int, teacher: bool) -> Flops:
    """One sequence of stage 2: forward of the student, gradients of all inputs and of the weights that train; the
    teacher's forward where a loss compares with it."""
    weights = sum(2 * m.parameters * (2 + m.trains) for m in (*shape.matrices, shape.head)) * length
    total = Flops(other=weights)
    for i, geometry in enumerate(shape.geometry):
        if i in shape.converted:
            total += _mixers(mixer_products(shape.mixer_of(i), geometry, length), lambda p: 3)
        else:
            kept = softmax_flops(geometry, length, shape.windows[i])
            total += Flops(other=kept * (1 + SOFTMAX_BACKWARD))
    return total + teacher_flops(shape, length, length) if teacher else total


def _mixers(products: list[Product], times) -> Flops:
    fp32, other = (sum(p.flops * times(p) for p in products if p.fp32 is kind) for kind in (True, False))
    return Flops(fp32, other)


def mixer_floats(mixer: dict[str, Any], geometry: Sequence[int]) -> float:
    """fp32 numbers a token that one mixer keeps for its backward: what its products and softmaxes read again."""
    heads, kv_heads, head_dim, value_dim, hidden = geometry
    features, width = 2 * head_dim, value_dim + 1
    floats: float = (heads + kv_heads) * head_dim  # q and k, to the feature maps
    floats += 2 * heads * features + kv_heads * features  # features; those of q once more, by chunks
    floats += heads * CHUNK + kv_heads * width  # scores and values
    floats += kv_heads * features * width / CHUNK  # the state before each chunk
    floats += heads * (width + value_dim)  # numerator and normaliser; output
    if mixer["window"]:
        seen = (mixer["window"] + BLOCK) / BLOCK
        floats += kv_heads * (head_dim + value_dim) * seen + 2 * heads * seen * BLOCK + 3 * heads * value_dim
    if mixer["decay"]:
        floats += (heads + 2 * kv_heads) * CHUNK  # scores before the decay; the decays within a chunk, and their mask
        floats += 2 * kv_heads * features + heads * width  # keys by step size and by decay to the end; read-out
        floats += kv_heads * features * width / CHUNK
    if mixer["conv"]:
        floats += 2 * hidden
    if mixer["gate"]:
        floats += 2 * heads * value_dim
    return floats


def transfer_activations(shape: Shape, tokens: int, element: int) -> float:
    """Bytes at the peak of a micro-batch of stage 1: one layer's mixer, its gradients, and the teacher's stream."""
    mixer = {**shape.mixer, "window": 0}  # attending to a window has nothing to learn
    largest = max(mixer_floats(mixer, shape.geometry[i]) for i in shape.converted)
    return tokens * (largest * 4 * TRANSIENT + shape.width / len(shape.geometry) * element)


def finetune_activations(shape: Shape, tokens: int, element: int, teacher: bool) -> float:
    """Bytes that a micro-batch of stage 2 keeps for its backward: inputs and outputs of matrices and norms, what each
    mixer keeps, keys, values and outputs of kept attentions; and logits, their log-probabilities and gradients."""
    total = shape.width * element
    for i, geometry in enumerate(shape.geometry):
        if i in shape.converted:
            total += mixer_floats(shape.mixer_of(i), geometry) * 4
        else:
            heads, kv_heads, head_dim, value_dim, _ = geometry
            total += (heads + kv_heads) * (head_dim + value_dim) * element
    return tokens * (total + shape.vocabulary * 4 * (LOGITS_WITH_TEACHER if teacher else LOGITS))


def seconds(flops: Flops, steps: int, trainable: int, hardware: Hardware, bf16: bool, share: float) -> float:
    """Time of `flops`, at `share` of the peak (utilisation times devices), and of the optimiser's `steps`."""
    time = (flops.fp32 / hardware.fp32 + flops.other / (hardware.bf16 if bf16 else hardware.fp32)) / share
    return time + (steps * trainable * UPDATE_BYTES / hardware.bandwidth if hardware.bandwidth else 0)
