"""The chunked scan is the recurrence, and the recurrence is its definition."""

import pytest
import torch

from attn2mamba.student.scan import chunked_scan, recurrent_scan

KV_HEADS, FEATURES, WIDTH = 2, 6, 3
DECAYS = ["none", "0", "-0.01", "-1", "-60", "one -60", "half -60"]


def decays(kind: str, length: int) -> torch.Tensor | None:
    """(2, KV_HEADS, length). The last two put -60 before decays that a difference of running sums would lose."""
    if kind == "none":
        return None
    if kind == "one -60" or kind == "half -60":
        log_decay = -0.01 * torch.rand(2, KV_HEADS, length)
        log_decay[..., : 1 if kind == "one -60" else length // 2] = -60
        return log_decay
    return float(kind) * torch.rand(2, KV_HEADS, length)


def inputs(length: int, decay: str = "-1", groups: int = 2, initial: bool = True) -> list[torch.Tensor | None]:
    """query, key, value, log_decay, initial_state as a mixer makes them: features are positive and sum to 1."""
    torch.manual_seed(length)
    return [
        torch.randn(2, KV_HEADS * groups, length, FEATURES).softmax(-1),
        torch.randn(2, KV_HEADS, length, FEATURES).softmax(-1),
        torch.randn(2, KV_HEADS, length, WIDTH),
        decays(decay, length),
        torch.randn(2, KV_HEADS, FEATURES, WIDTH) if initial else None,
    ]


def run(scan, tensors, **options) -> dict[str, torch.Tensor]:
    """Output, final state and the gradient of every input under weights that differ by element."""
    leaves = [x.clone().requires_grad_() if x is not None else None for x in tensors]
    output, state = scan(*leaves, **options)
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(x.shape, generator=generator) for x in (output, state)]
    ((output * weights[0]).sum() + (state * weights[1]).sum()).backward()
    names = ("query", "key", "value", "log_decay", "initial_state")
    grads = {f"grad of {name}": x.grad for name, x in zip(names, leaves, strict=True) if x is not None}
    return {"output": output.detach(), "state": state.detach(), **grads}


def assert_same(tensors, chunk_size: int = 64) -> None:
    expected, actual = run(recurrent_scan, tensors), run(chunked_scan, tensors, chunk_size=chunk_size)
    for name, reference in expected.items():
        scale = max(1.0, reference.abs().max().item())
        torch.testing.assert_close(
            actual[name] / scale, reference / scale, atol=5e-6, rtol=0, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_recurrence_is_its_definition():
    query, key, value, log_decay, _ = inputs(9, initial=False)
    weights = query @ key.repeat_interleave(2, 1).mT
    for t in range(9):
        for j in range(9):
            kept = log_decay[:, :, j + 1 : t + 1].sum(-1).exp() if j <= t else torch.zeros(2, KV_HEADS)
            weights[:, :, t, j] *= kept.repeat_interleave(2, 1)
    output, state = recurrent_scan(query, key, value, log_decay)
    torch.testing.assert_close(output, weights @ value.repeat_interleave(2, 1), atol=1e-6, rtol=0)
    last = log_decay.flip(-1).cumsum(-1).flip(-1).roll(-1, -1).index_fill(-1, torch.tensor([8]), 0).exp()
    torch.testing.assert_close(state, (key * last.unsqueeze(-1)).mT @ value, atol=1e-6, rtol=0)


@pytest.mark.parametrize("chunk_size", [16, 50, 64, 256])
@pytest.mark.parametrize("length", [1, 2, 3, 63, 64, 65, 200, 257])
def test_any_length_and_chunk(length, chunk_size):
    assert_same(inputs(length), chunk_size)


@pytest.mark.parametrize("initial", [True, False])
@pytest.mark.parametrize("length", [3, 130])
@pytest.mark.parametrize("decay", DECAYS)
def test_any_decay(decay, length, initial):
    assert_same(inputs(length, decay, initial=initial))


@pytest.mark.parametrize("decay", ["none", "-1"])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_query_heads_share_a_key_head(groups, decay):
    assert_same(inputs(70, decay, groups))


@pytest.mark.parametrize("starts", [[0], [1], [16, 17, 40], [15, 32, 33, 34]])
def test_minus_infinity_forgets(starts):
    tensors = inputs(50)
    tensors[3][..., starts] = -torch.inf
    assert_same(tensors, 16)
    last = starts[-1]
    output, state = chunked_scan(*tensors, chunk_size=16)
    alone = chunked_scan(*(x[:, :, last:] for x in tensors[:4]), chunk_size=16)
    torch.testing.assert_close((output[:, :, last:], state), alone, atol=1e-6, rtol=0)


@pytest.mark.parametrize("decay", ["none", "-1", "half -60"])
@pytest.mark.parametrize("cut", [1, 2, 63, 64, 65, 129])
def test_split_anywhere(cut, decay):
    *tokens, state = inputs(130, decay)
    whole = chunked_scan(*tokens, state)
    head, middle = chunked_scan(*(x[:, :, :cut] if x is not None else None for x in tokens), state)
    tail, last = chunked_scan(*(x[:, :, cut:] if x is not None else None for x in tokens), middle)
    torch.testing.assert_close((torch.cat([head, tail], 2), last), whole, atol=5e-6, rtol=0)


@pytest.mark.parametrize("length", [1, 100])
def test_16_bit_inputs_give_a_32_bit_state(length):
    tensors = [x.bfloat16() for x in inputs(length)]
    output, state = chunked_scan(*tensors)
    assert output.dtype == state.dtype == torch.float32
    torch.testing.assert_close((output, state), chunked_scan(*(x.float() for x in tensors)), atol=0, rtol=0)


@pytest.mark.parametrize("step", [1, 64])
def test_a_long_16_bit_run_does_not_drift(step):
    """4096 tokens through the cached step (1) or prefill (64), against the sum in double precision."""
    query, key, value, *_ = (x.bfloat16() if x is not None else None for x in inputs(4096, "none", 1, initial=False))
    state = None
    for start in range(0, 4096, step):
        _, state = chunked_scan(*(x[:, :, start : start + step] for x in (query, key, value)), None, state)
    exact = key.double().mT @ value.double()
    assert (state - exact).norm() / exact.norm() < 1e-5
