"""Formulas against what the code is seen to do: FLOPs as counted by torch, bytes as allocated."""

import weakref

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, MixtralConfig

from attn2mamba.convert import convert, hand_over
from attn2mamba.costs import (
    Flops,
    finetune_activations,
    finetune_flops,
    mixer_products,
    seconds,
    softmax_flops,
    transfer_activations,
    transfer_flops,
)
from attn2mamba.hardware import Hardware
from attn2mamba.probe import attention_geometry
from attn2mamba.recipe import Recipe
from attn2mamba.stages import FinetuneStage, TransferStage, train_only
from attn2mamba.training_cost import student_shape

LENGTH = 100  # not a multiple of the scan's chunk


def recipe(window=0, loss="cosine", keep=(), kl=0.0, freeze=("embeddings",), length=LENGTH):
    transfer = {"kind": "transfer", "mixer": {"window": window}, "loss": loss, "tokens": 1000, "lr": 1e-3}
    finetune = {"kind": "finetune", "mixer": {"name": "hedgemamba"}, "tokens": 1000, "lr": 1e-3, "freeze": list(freeze)}
    finetune["loss"] = {"cross_entropy": 1.0, "kl": kl}
    return Recipe.model_validate(
        {"sequence_length": length, "batch_size": 2, "keep": list(keep), "stages": [transfer, finetune]}
    )


def stages(teacher, recipe):
    """Each stage of the recipe, ready for `backward`, with the shape that costs are reckoned from."""
    geometry = attention_geometry(teacher)
    student, _ = convert(teacher, recipe.stages[0].mixer.model_dump(), recipe.keep)
    for index, spec in enumerate(recipe.stages):
        if index:
            hand_over(student, spec.mixer.model_dump())
        stage = FinetuneStage(student, recipe, spec, teacher) if index else TransferStage(student, recipe, spec)
        for parameter in train_only(student, stage).values():
            parameter.grad = torch.zeros_like(parameter)
        stage.start()
        yield stage, student_shape(teacher, geometry, recipe.keep, spec)
        stage.stop()
        student.zero_grad()


def batch(length=LENGTH):
    ids = torch.randint(0, 50, (2, length), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "document_ids": torch.zeros_like(ids)}


def counted(stage) -> int:
    """FLOPs of one sequence. Fused attention is not counted on the CPU, so it runs as plain products."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        stage.backward(batch(), 2 * LENGTH)
    return counter.get_total_flops() // 2


def whole(shape, i) -> float:
    """Of plain products, which compute the scores of later tokens too."""
    heads, _, head_dim, value_dim, _ = shape.geometry[i]
    return 2 * LENGTH**2 * heads * (head_dim + value_dim)


def beyond_causal(shape) -> float:
    """What plain products compute in a teacher's forward besides what is reckoned."""
    return sum(
        whole(shape, i) - softmax_flops(g, LENGTH, w)
        for i, (g, w) in enumerate(zip(shape.geometry, shape.windows, strict=True))
    )


def mixtral():
    config = MixtralConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=8,
    )
    return AutoModelForCausalLM.from_config(config, experts_implementation="eager").eval()


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gemma3_text", "gpt2", "mixtral"])
@pytest.mark.parametrize(
    ("changes", "compares"),
    [
        ({}, False),
        ({"window": 16, "kl": 0.5}, True),
        ({"loss": "attention", "freeze": ["*.mlp.*", "embeddings"]}, False),
    ],
    ids=["plain", "window and kl", "attention weights"],
)
def test_flops_are_those_counted(tiny_teacher, family, changes, compares):
    teacher = mixtral() if family == "mixtral" else tiny_teacher(family)
    (transfer, first), (finetune, second) = [
        (counted(stage), shape) for stage, shape in stages(teacher, recipe(**changes))
    ]
    reckoned = transfer_flops(first, LENGTH, changes.get("loss") == "attention").total + beyond_causal(first)
    assert reckoned == pytest.approx(transfer, rel=1e-3)
    reckoned = finetune_flops(second, LENGTH, compares).total + (beyond_causal(second) if compares else 0)
    assert reckoned == pytest.approx(finetune, rel=1e-3)


def test_a_kept_layer_runs_its_softmax_backwards(tiny_teacher):
    for stage, shape in list(stages(tiny_teacher("llama"), recipe(keep=[0])))[1:]:
        fused = 3.5 * softmax_flops(shape.geometry[0], LENGTH)
        plain = 3 * whole(shape, 0)  # two products each way for two operands
        stage.start()
        assert finetune_flops(shape, LENGTH, False).total - fused + plain == pytest.approx(counted(stage), rel=1e-3)
        assert shape.converted == [1]


def test_time_tells_precisions_apart():
    hardware = Hardware("", bf16=100.0, fp32=10.0, memory=None, bandwidth=None)
    flops = Flops(fp32=10.0, other=100.0)
    assert seconds(flops, 5, 1000, hardware, bf16=True, share=0.5) == pytest.approx((1 + 1) / 0.5)
    assert seconds(flops, 5, 1000, hardware, bf16=False, share=0.5) == pytest.approx((1 + 10) / 0.5)
    with_traffic = hardware._replace(bandwidth=28.0)
    assert seconds(flops, 5, 1000, with_traffic, bf16=True, share=1) == pytest.approx(2 + 5 * 1000)


def test_the_scan_costs_the_same_a_token_at_any_length():
    mixer = {"window": 0, "decay": True, "gate": True}
    costs = [sum(p.flops for p in mixer_products(mixer, [8, 2, 64, 64, 512], n)) / n for n in (1024, 65536)]
    assert costs[0] == costs[1]
    assert softmax_flops([8, 2, 64, 64, 512], 4096, 512) < softmax_flops([8, 2, 64, 64, 512], 4096) / 3


class Live(TorchDispatchMode):
    """The most bytes that tensors made inside held at once."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.sizes = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.sizes:
                    self.sizes[storage._cdata] = storage.nbytes()
                    self.now += storage.nbytes()
                    self.peak = max(self.peak, self.now)
                    weakref.finalize(storage, self._drop, storage._cdata)
        return out

    def _drop(self, key):
        self.now -= self.sizes.pop(key, 0)


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gemma3_text"])
@pytest.mark.parametrize("kl", [0.0, 0.5])
def test_activations_are_about_those_held(tiny_teacher, family, kl):
    length, peaks, reckoned = 256, [], []
    for stage, shape in stages(tiny_teacher(family), recipe(kl=kl, length=length)):
        with Live() as live:
            stage.backward(batch(length), 2 * length)
        peaks.append(live.peak)
        reckoned.append(
            finetune_activations(shape, 2 * length, 4, bool(kl))
            if reckoned
            else transfer_activations(shape, 2 * length, 4)
        )
    assert 0.5 < reckoned[0] / peaks[0] < 2.5
    assert reckoned[1] == pytest.approx(peaks[1], rel=0.3)
