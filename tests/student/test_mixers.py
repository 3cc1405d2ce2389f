"""The mixers against a token-by-token reference in double precision, and against the teacher's softmax."""

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from attn2mamba.student.cache import StateLayer
from attn2mamba.student.configuration_attn2mamba import complete_mixer
from attn2mamba.student.mixers import CausalConv, Decay, FeatureMap, Mixer, TokenInfo
from attn2mamba.student.window import ScoreRule

HEADS, KV_HEADS, HEAD_DIM, VALUE_DIM, HIDDEN = GEOMETRY = 4, 2, 6, 5, 16
SCALING = 0.3
PLAIN = ScoreRule(SCALING)
RULES = {
    "plain": PLAIN,
    "softcap": ScoreRule(SCALING, softcap=0.5),
    "sinks": ScoreRule(SCALING, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])),
    "sliding": ScoreRule(SCALING, sliding_window=3),
}
GEOMETRIES = {
    "MHA": (3, 3, 7, 7, 16),
    "GQA": (6, 2, 6, 6, 16),
    "MQA": (4, 1, 5, 5, 16),
    "wide values": (4, 2, 3, 9, 16),
}
HEDGEHOG, HEDGEMAMBA = {"name": "hedgehog"}, {"name": "hedgemamba"}
MIXERS = [HEDGEHOG, HEDGEMAMBA, {**HEDGEMAMBA, "share": "none"}]


@pytest.fixture
def mixer(randomise) -> Callable[..., Mixer]:
    """Options -> a mixer with random parameters; `fresh` leaves it as it starts."""

    def build(options: dict, geometry=GEOMETRY, fresh: bool = False) -> Mixer:
        module = Mixer(complete_mixer(options), geometry)
        return module if fresh else randomise(module)

    return build


def draw(length: int, batch: int = 1, seed: int = 0, geometry=GEOMETRY) -> list[torch.Tensor]:
    """query, key, value, hidden, convolved, all independent of each other."""
    torch.manual_seed(seed)
    heads, kv_heads, head_dim, value_dim, hidden = geometry
    heads = [
        torch.randn(batch, h, length, d) for h, d in ((heads, head_dim), (kv_heads, head_dim), (kv_heads, value_dim))
    ]
    return [*heads, torch.randn(batch, length, hidden), torch.randn(batch, length, hidden)]


def mix(
    module: Mixer, tensors, tokens: TokenInfo | None = None, state: StateLayer | None = None, rule: ScoreRule = PLAIN
) -> torch.Tensor:
    with torch.no_grad():
        return module(*tensors, rule, tokens or TokenInfo(), state)


def cut(tensors, start: int, stop: int) -> list[torch.Tensor]:
    return [x[..., start:stop, :] for x in tensors]


def reference(module: Mixer, query, key, value, hidden, convolved, rule: ScoreRule = PLAIN) -> torch.Tensor:
    """One sequence (no batch dimension), one query head and one token at a time, from the mixer's parameters alone."""
    p = {name: x.detach().double() for name, x in module.named_parameters()}
    query, key, value, hidden, convolved = (x.double() for x in (query, key, value, hidden, convolved))

    def feature(name: str, head: int, x: torch.Tensor) -> torch.Tensor:
        head = head if len(p[f"{name}.weight"]) > 1 else 0
        x = p[f"{name}.weight"][head] @ x + p[f"{name}.bias"][head, 0]
        return torch.cat([x, -x]).softmax(-1)

    length, window = query.shape[1], min(module.window, rule.sliding_window or module.window)
    output = torch.zeros(length, len(query), value.shape[-1], dtype=torch.double)
    for head in range(len(query)):
        group = head * len(key) // len(query)
        state = torch.zeros(2 * key.shape[-1], value.shape[-1] + 1, dtype=torch.double)
        for t in range(length):
            enters = t - window
            if enters >= 0:
                dt, decay = torch.ones(()), torch.ones(())
                if module.decay is not None:
                    dt = F.softplus(p["decay.step.weight"][group] @ convolved[enters] + p["decay.step.bias"][group])
                    decay = torch.exp(-dt * p["decay.rate"][group])
                held = F.pad(value[group, enters], (0, 1), value=1)
                state = decay * state + dt * torch.outer(feature("feature_k", group, key[group, enters]), held)
            total = feature("feature_q", head, query[head, t]) @ state
            if window:
                total = total * torch.exp(p["older.weight"][head] @ query[head, t] + p["older.bias"][head])
                near = slice(max(0, enters + 1), t + 1)
                scores = rule.scaling * key[group, near] @ query[head, t]
                scores = scores if rule.softcap is None else rule.softcap * torch.tanh(scores / rule.softcap)
                total = total + torch.exp(scores) @ F.pad(value[group, near], (0, 1), value=1)
                total[-1] += 0 if rule.sinks is None else rule.sinks[head].double().exp()
            output[t, head] = total[:-1] / total[-1]
    if module.gate is not None:
        output = output * F.silu(hidden @ p["gate.weight"].T + p["gate.bias"]).view(output.shape)
    return output.float()


def softmax_attention(query, key, value) -> torch.Tensor:
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=SCALING).transpose(1, 2)


def test_features_are_positive_and_sum_to_one(randomise):
    features = randomise(FeatureMap(HEADS, HEAD_DIM))(torch.randn(2, HEADS, 5, HEAD_DIM) * 3)
    assert features.shape[-1] == 2 * HEAD_DIM
    assert (features > 0).all()
    torch.testing.assert_close(features.sum(-1), torch.ones(2, HEADS, 5))


@pytest.mark.parametrize("window", [0, 1, 5, 64])
@pytest.mark.parametrize("options", MIXERS, ids=str)
def test_equals_the_reference(mixer, options, window):
    module, tensors = mixer({**options, "window": window}), draw(80)
    expected = reference(module, *(x[0] for x in tensors))
    torch.testing.assert_close(mix(module, tensors)[0], expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=list(GEOMETRIES))
@pytest.mark.parametrize("window", [0, 5])
def test_heads_of_every_shape(mixer, geometry, window):
    module, tensors = mixer({**HEDGEMAMBA, "window": window}, geometry), draw(40, geometry=geometry)
    expected = reference(module, *(x[0] for x in tensors))
    torch.testing.assert_close(mix(module, tensors)[0], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("rule", RULES.values(), ids=list(RULES))
@pytest.mark.parametrize("window", [2, 5, 64])
def test_a_window_weighs_as_the_teacher_does(mixer, window, rule):
    module, tensors = mixer({**HEDGEMAMBA, "window": window}), draw(80)
    expected = reference(module, *(x[0] for x in tensors), rule)
    torch.testing.assert_close(mix(module, tensors, rule=rule)[0], expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("rule", RULES.values(), ids=list(RULES))
@pytest.mark.parametrize("window", [0, 1, 5, 64])
def test_cached_steps_equal_one_call(mixer, window, rule):
    module, tensors, state = mixer({**HEDGEMAMBA, "window": window}), draw(80, batch=2), StateLayer()
    pieces = [
        mix(module, cut(tensors, a, b), state=state, rule=rule) for a, b in ((0, 7), (7, 8), (8, 9), (9, 75), (75, 80))
    ]
    torch.testing.assert_close(torch.cat(pieces, 1), mix(module, tensors, rule=rule), atol=2e-5, rtol=0)


@pytest.mark.parametrize("window", [0, 5])
def test_hedgemamba_starts_as_hedgehog(mixer, window):
    hedgehog = mixer({**HEDGEHOG, "window": window})
    hedgemamba = mixer({**HEDGEMAMBA, "window": window}, fresh=True)
    hedgemamba.load_state_dict(hedgehog.state_dict(), strict=False)
    tensors = draw(200)
    torch.testing.assert_close(mix(hedgemamba, tensors), mix(hedgehog, tensors), atol=2e-6, rtol=0)


@pytest.mark.parametrize("window", [0, 5])
def test_shared_heads_equal_repeated_ones(mixer, window):
    module, (query, key, value, hidden, convolved) = mixer({**HEDGEHOG, "window": window}), draw(30)
    repeated = mixer({**HEDGEHOG, "window": window}, (HEADS, HEADS, HEAD_DIM, VALUE_DIM, HIDDEN))
    repeated.load_state_dict(module.state_dict())
    key_value = [x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (key, value)]
    actual = mix(module, [query, key, value, hidden, convolved])
    torch.testing.assert_close(actual, mix(repeated, [query, *key_value, hidden, convolved]), atol=2e-6, rtol=0)


@pytest.mark.parametrize("scale", [1, 10])
@pytest.mark.parametrize("length", [1, 40, 100])
def test_a_window_over_everything_is_the_teachers_softmax(mixer, length, scale):
    """Also where the scores, as some pretrained models have them, are so low that exp underflows."""
    query, key, value, *rest = draw(length)
    query, key = query * scale, key - 0.2 * scale * query[:, ::2]
    actual = mix(mixer({**HEDGEHOG, "window": 100}), [query, key, value, *rest])
    torch.testing.assert_close(actual, softmax_attention(query, key, value), atol=1e-5, rtol=0)


@pytest.mark.parametrize("rule", RULES.values(), ids=list(RULES))
@pytest.mark.parametrize("window", [0, 1, 5, 64])
def test_attention_weights_are_what_the_mixer_does(mixer, window, rule):
    module, tensors = mixer({**HEDGEHOG, "window": window}), draw(70)
    query, key, value, *_ = tensors
    documents = TokenInfo(document_ids=torch.tensor([[0] * 30 + [1] * 40]))
    for tokens in (TokenInfo(), documents):
        weights = module.attention_weights(query, key, rule, tokens)
        if rule.sinks is None or not window:
            torch.testing.assert_close(weights.sum(-1), torch.ones(1, HEADS, 70))
        output = (weights @ value.repeat_interleave(HEADS // KV_HEADS, 1)).transpose(1, 2)
        torch.testing.assert_close(mix(module, tensors, tokens, rule=rule), output, atol=2e-5, rtol=0)


@pytest.mark.parametrize("window", [0, 1, 5, 64])
@pytest.mark.parametrize("options", MIXERS, ids=str)
def test_documents_do_not_see_each_other(mixer, options, window):
    module, tensors, bounds = mixer({**options, "window": window}), draw(90), [0, 1, 30, 33, 90]
    ids = torch.cat([torch.full((b - a,), 7 * i) for i, (a, b) in enumerate(pairwise(bounds))])
    packed = mix(module, tensors, TokenInfo(document_ids=ids[None]))
    alone = torch.cat([mix(module, cut(tensors, a, b)) for a, b in pairwise(bounds)], 1)
    torch.testing.assert_close(packed, alone, atol=2e-5, rtol=0)


@pytest.mark.parametrize("window", [0, 5])
def test_padding_enters_nothing(mixer, window):
    """Rows of 3, 0 and 12 padding tokens; then three more tokens, of which the second row lacks one."""
    module, state = mixer({**HEDGEMAMBA, "window": window}), StateLayer()
    rows, pads = [draw(20, seed=i) for i in range(3)], [3, 0, 12]
    batch = [torch.cat(x) for x in zip(*rows, strict=True)]
    valid = torch.stack([torch.arange(20) >= n for n in pads])
    first = mix(module, batch, TokenInfo(valid=valid), state)
    more = [draw(3, seed=9 + i) for i in range(3)]
    later = torch.tensor([[True] * 3, [False, True, True], [True] * 3])
    tokens = TokenInfo(valid=later, pads=(~later).sum(1))
    second = mix(module, [torch.cat(x) for x in zip(*more, strict=True)], tokens, state)
    for i, n in enumerate(pads):
        fresh = cut(more[i], 0 if i != 1 else 1, 3)
        whole = [torch.cat(x, -2) for x in zip(cut(rows[i], n, 20), fresh, strict=True)]
        actual = torch.cat([first[i, n:], second[i, later[i]]])
        torch.testing.assert_close(actual, mix(module, whole)[0], atol=2e-5, rtol=0)


def test_convolution_starts_as_the_identity():
    x = torch.randn(2, 9, HIDDEN)
    assert torch.equal(CausalConv(HIDDEN, 4)(x, TokenInfo(), None), x)


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("length", [1, 2, 3, 9])
def test_convolution_is_causal(randomise, length, width):
    conv, x = randomise(CausalConv(HIDDEN, width)), torch.randn(2, length, HIDDEN)
    with torch.no_grad():
        conv.weight.add_(torch.randn(width, HIDDEN))
        expected = torch.stack(
            [
                conv.bias + sum(conv.weight[tap] * x[:, t - tap] for tap in range(min(width, t + 1)))
                for t in range(length)
            ],
            1,
        )
        torch.testing.assert_close(conv(x, TokenInfo(), None), expected)
        state = StateLayer()
        steps = [conv(x[:, t : t + 1], TokenInfo(), state) for t in range(length)]
        torch.testing.assert_close(torch.cat(steps, 1), expected)


def test_convolution_stays_in_its_document():
    conv, x = CausalConv(HIDDEN, 4), torch.randn(1, 9, HIDDEN)
    torch.nn.init.normal_(conv.weight)
    packed = conv(x, TokenInfo(document_ids=torch.tensor([[0, 0, 1, 2, 2, 2, 2, 2, 2]])), None)
    alone = [conv(x[:, a:b], TokenInfo(), None) for a, b in ((0, 2), (2, 3), (3, 9))]
    torch.testing.assert_close(packed, torch.cat(alone, 1))


@pytest.mark.parametrize("options", MIXERS, ids=str)
@pytest.mark.parametrize("window", [0, 5])
def test_the_future_changes_nothing(mixer, options, window):
    module, tensors = mixer({**options, "window": window}), draw(40)
    changed = [torch.cat([x[..., :25, :], torch.randn_like(x[..., 25:, :])], -2) for x in tensors]
    assert torch.equal(mix(module, tensors)[:, :25], mix(module, changed)[:, :25])


@pytest.mark.parametrize("start", [0.0, -0.02])
def test_decay_wakes_up(start):
    """A rate at or below 0 does not stay below it, and rises as soon as forgetting pays."""
    decay, x = Decay(HIDDEN, KV_HEADS), torch.randn(1, 9, HIDDEN)
    torch.nn.init.constant_(decay.rate, start)
    optimizer = torch.optim.SGD([decay.rate], lr=0.05)

    def descend(loss) -> None:
        for _ in range(20):
            optimizer.zero_grad()
            loss(decay(x)[1]).backward()
            optimizer.step()
            decay.project()

    descend(lambda log_decay: -log_decay.mean(-1).sum())
    assert torch.equal(decay.rate, torch.zeros(KV_HEADS))
    assert torch.equal(decay(x)[1], torch.zeros(1, KV_HEADS, 9))
    descend(lambda log_decay: (log_decay + 0.5).square().mean(-1).sum())
    assert (decay.rate > 0.3).all()


def test_gradients_of_a_rate_at_zero_add_up():
    """Pieces of a batch that pull apart must cancel, not leave the upward one alone."""
    decay, x = Decay(HIDDEN, KV_HEADS), torch.randn(1, 9, HIDDEN)
    for sign in (1, -1):
        (sign * decay(x)[1].sum()).backward()
    assert torch.equal(decay.rate.grad, torch.zeros(KV_HEADS))


def test_a_rate_below_zero_is_not_pushed_further_down():
    decay = Decay(HIDDEN, KV_HEADS)
    torch.nn.init.constant_(decay.rate, -0.02)
    (-decay(torch.randn(1, 9, HIDDEN))[1].sum()).backward()
    assert not decay.rate.grad.any()


def test_decay_starts_at_one():
    step, log_decay = Decay(HIDDEN, KV_HEADS)(torch.randn(1, 9, HIDDEN))
    torch.testing.assert_close(step, torch.ones(1, KV_HEADS, 9))
    assert torch.equal(log_decay, torch.zeros(1, KV_HEADS, 9))


@pytest.mark.parametrize("window", [0, 5])
def test_every_parameter_learns_from_the_start(mixer, window):
    module, tensors, moved = mixer({**HEDGEMAMBA, "window": window}, fresh=True), draw(30), set()
    query, _, value, hidden, _ = tensors
    for sign in (1, -1):
        module.zero_grad()
        convolved = module.conv(hidden, TokenInfo(), None)
        key = convolved[..., :HEAD_DIM].unsqueeze(1).expand(-1, KV_HEADS, -1, -1)
        (sign * module(query, key, value, hidden, convolved, PLAIN, TokenInfo(), None).square().sum()).backward()
        assert all(p.grad.isfinite().all() for p in module.parameters())
        moved |= {name for name, p in module.named_parameters() if p.grad.any()}
    assert moved == {name for name, _ in module.named_parameters()}


class LargestTensor(TorchDispatchMode):
    """Remembers the most bytes that any one result needed."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else [result]:
            if isinstance(x, torch.Tensor):
                self.bytes = max(self.bytes, x.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("options", [HEDGEHOG, HEDGEMAMBA, {**HEDGEMAMBA, "window": 64}], ids=str)
def test_memory_is_linear_in_the_context(mixer, options):
    module, largest = mixer(options), {}
    for length in (1024, 4096):
        with LargestTensor() as mode:
            module(*draw(length), PLAIN, TokenInfo(), None).sum().backward()
        largest[length] = mode.bytes
    assert largest[4096] <= 4 * largest[1024]


def test_a_normaliser_is_shared_by_window_and_state(mixer):
    """A constant value comes back as it is, however the weights fall: they sum to 1."""
    query, key, value, *rest = draw(60)
    actual = mix(mixer({**HEDGEHOG, "window": 5}), [query, key, torch.full_like(value, math.pi), *rest])
    torch.testing.assert_close(actual, torch.full_like(actual, math.pi), atol=1e-5, rtol=0)


def test_features_that_hardly_overlap_still_give_an_average(mixer):
    """One token can only return its own value, however small phi(q) phi(k) is."""
    module = mixer({"name": "hedgehog"}, fresh=True)
    query, key, value, hidden, _ = (20 * x if i < 2 else x for i, x in enumerate(draw(1)))
    output = module(query, key, value, hidden, hidden, PLAIN, TokenInfo(), None)
    expected = value.repeat_interleave(query.shape[1] // value.shape[1], 1).transpose(1, 2)
    torch.testing.assert_close(output, expected)
