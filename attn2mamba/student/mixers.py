"""What replaces softmax attention: Hedgehog linear attention and its Mamba form, with an optional softmax window.

Per head, with q and k as the teacher's attention gets them (after RoPE and QK-norm):

    phi(x) = softmax([W x + b ; -(W x + b)])                        Hedgehog feature map (arXiv 2402.04347)
    S_t = a_t S_{t-1} + dt_t phi(k_t) [v_t ; 1]^T                   one state per key/value head, fp32
    [n_t ; z_t] = phi(q_t)^T S_t,   y_t = n_t / z_t                 numerator and normaliser in one scan
    output = y_t * silu(W_z x_t + b_z)                              gate

dt = softplus(W_u c + b_u), a = exp(-dt * lambda), c = x after a causal depthwise convolution, which also feeds the
teacher's q, k and v projections; the gate sees x itself, as in Mamba. `hedgehog` has a = dt = 1 and neither
convolution nor gate. All new parts start as the identity, so a HedgeMamba model starts as its Hedgehog model.

With a window w, the last w tokens are attended by the teacher's own softmax, tokens enter the state when they leave
the window, and both share one normaliser: older tokens weigh exp(l(q)) phi(q)^T S with l(q) = u q + c learned.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .cache import StateLayer, close_gaps
from .scan import chunked_scan
from .window import OlderWeight, ScoreRule, WindowSpan

SOFTPLUS_INVERSE_1 = math.log(math.e - 1)
SILU_INVERSE_1 = 1.2784645427610738
SMALLEST_NORMALISER = 1e-30  # only an empty state, and padding, come below it; adding it would bias small sums


class TokenInfo(NamedTuple):
    """What a mixer must know of this call's tokens.

    valid: (B, T) bool, False for padding, which stands to the left of the row's tokens; None when nothing is padding.
    document_ids: (B, T) int, tokens of different documents do not see each other; None for one document.
    pads: (B,) padding tokens of each row, given when they come after cached tokens; else None.
    """

    valid: Tensor | None = None
    document_ids: Tensor | None = None
    pads: Tensor | None = None


class FeatureMap(nn.Module):
    """(B, h, T, d) -> positive features (B, h, T, 2d) in fp32 that sum to 1. W = I at the start."""

    def __init__(self, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(head_dim).repeat(num_heads, 1, 1))
        self.bias = nn.Parameter(torch.zeros(num_heads, 1, head_dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x.float() @ self.weight.float().mT + self.bias.float()
        return torch.cat([x, -x], dim=-1).softmax(dim=-1)


class CausalConv(nn.Module):
    """Causal depthwise convolution over tokens, no activation: (B, T, hidden) -> same. Tap 0 weighs the current token.

    Starts as the identity. Taps never reach into another document or into padding.
    """

    def __init__(self, hidden_size: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.cat([torch.ones(1, hidden_size), torch.zeros(width - 1, hidden_size)]))
        self.bias = nn.Parameter(torch.zeros(hidden_size))

    def forward(self, x: Tensor, tokens: TokenInfo, state: StateLayer | None) -> Tensor:
        past = len(self.weight) - 1
        length = x.shape[1]
        if tokens.valid is not None:
            x = x * tokens.valid.unsqueeze(-1)
        tail = state.get("conv") if state is not None else None
        x = F.pad(x, (0, 0, past, 0)) if tail is None else torch.cat([tail, x], dim=1)
        x = close_gaps(x, tokens.pads, past, dim=1) if tail is not None else x
        if state is not None:
            state.set(conv=x[:, length:].clone())  # a view would keep all of x
        if length == 1:  # decoding: fewer, larger operations
            return ((x * self.weight.flip(0)).sum(1, keepdim=True) + self.bias).to(x.dtype)
        output = x[:, past:] * self.weight[0] + self.bias
        for tap in range(1, past + 1):
            term = x[:, past - tap : past - tap + length] * self.weight[tap]
            if tokens.document_ids is not None:
                shifted = F.pad(tokens.document_ids, (tap, 0), value=-1)[:, :length]
                term = term * (shifted == tokens.document_ids).unsqueeze(-1)
            output = output + term
        return output.to(x.dtype)


class _NonNegative(torch.autograd.Function):
    """max(x, 0) whose gradient lets a parameter below 0 move up: a plain clamp never wakes up again. At 0 the gradient
    passes whole, so that pieces of a batch add up; `Decay.project` keeps the parameter from going below."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp_min(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.where((x >= 0) | (grad < 0), grad, torch.zeros_like(grad))


class Decay(nn.Module):
    """(B, T, hidden) -> step size dt and log-decay -dt * lambda, both (B, G, T), fp32. Start: dt = 1, lambda = 0."""

    def __init__(self, hidden_size: int, num_kv_heads: int) -> None:
        super().__init__()
        self.step = nn.Linear(hidden_size, num_kv_heads)
        self.rate = nn.Parameter(torch.zeros(num_kv_heads))
        nn.init.zeros_(self.step.weight)
        nn.init.constant_(self.step.bias, SOFTPLUS_INVERSE_1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        dt = F.softplus(self.step(x).float()).transpose(1, 2)
        return dt, -dt * _NonNegative.apply(self.rate.float()).unsqueeze(-1)

    @torch.no_grad()
    def project(self) -> None:
        """After an optimiser step: back to where the rate means something."""
        self.rate.clamp_(min=0)


class Mixer(nn.Module):
    """One layer's mixer. `options` as `configuration_attn2mamba.complete_mixer` returns them; `geometry` =
    (num_heads, num_kv_heads, head_dim, value_dim, hidden_size)."""

    def __init__(self, options: dict[str, Any], geometry: tuple[int, int, int, int, int] | list[int]) -> None:
        super().__init__()
        heads, kv_heads, head_dim, value_dim, hidden_size = geometry
        self.window = options["window"]
        shared = options["share"] == "heads"
        self.feature_q = FeatureMap(1 if shared else heads, head_dim)
        self.feature_k = FeatureMap(1 if shared else kv_heads, head_dim)
        self.older = OlderWeight(heads, head_dim) if self.window else None
        self.conv = CausalConv(hidden_size, options["conv_width"]) if options["conv"] else None
        self.decay = Decay(hidden_size, kv_heads) if options["decay"] else None
        self.gate = nn.Linear(hidden_size, heads * value_dim) if options["gate"] else None
        if self.gate is not None:
            nn.init.zeros_(self.gate.weight)
            nn.init.constant_(self.gate.bias, SILU_INVERSE_1)
        for module in self.modules():
            # Else the family's own initialiser would overwrite the identity.
            module.__dict__["_is_hf_initialized"] = True

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        hidden: Tensor,
        convolved: Tensor,
        rule: ScoreRule,
        tokens: TokenInfo,
        state: StateLayer | None,
    ) -> Tensor:
        """query (B, H, T, d), key (B, G, T, d), value (B, G, T, v), hidden and convolved (B, T, hidden_size);
        returns (B, T, H, v). `state` is read and written when given."""
        with torch.autocast(query.device.type, enabled=False):
            dt = log_decay = None
            if self.decay is not None:
                dt, log_decay = self.decay(convolved.to(self.decay.step.weight.dtype))
            output = self._mix(query, key, value, dt, log_decay, rule, tokens, state)
        output = output.transpose(1, 2).to(value.dtype)
        if self.gate is not None:
            output = output * F.silu(self.gate(hidden)).view(output.shape).to(output.dtype)
        return output

    def _mix(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dt: Tensor | None,
        log_decay: Tensor | None,
        rule: ScoreRule,
        tokens: TokenInfo,
        state: StateLayer | None,
    ) -> Tensor:
        """(B, H, T, v) in fp32, before the gate."""
        local = None
        ids = document_slots(tokens, key)
        query_ids = ids
        if self.window:
            window = min(self.window, rule.sliding_window or self.window)
            span = WindowSpan.extend(window, key, value, dt, log_decay, ids, tokens.pads, state)
            local = span.attend(query, rule)
            key, value, dt, log_decay, ids = span.leaving()
        features = self.feature_k(key)
        if dt is not None:
            features = features * dt.unsqueeze(-1)
        if self.window or tokens.valid is not None:
            seen = (ids == query_ids).unsqueeze(1) & (ids >= 0).unsqueeze(1)
            features = features * seen.unsqueeze(-1)
            log_decay = log_decay * seen if log_decay is not None else None
        if tokens.document_ids is not None:
            log_decay = forget_at_boundaries(log_decay, query_ids, key.shape[1])
        output, memory = chunked_scan(
            self.feature_q(query),
            features,
            F.pad(value.float(), (0, 1), value=1.0),
            log_decay,
            state.get("memory") if state is not None else None,
        )
        if state is not None:
            state.set(memory=memory)
        numerator, weight = output[..., :-1], output[..., -1:]
        normaliser = weight.clamp_min(SMALLEST_NORMALISER)
        output = numerator / normaliser
        if local is None or self.older is None:
            return output
        local_output, local_log_weight = local
        # An empty state weighs nothing, however low the scores in the window are.
        log_weight = (self.older(query) + normaliser.log()).masked_fill(weight == 0, -torch.inf)
        return torch.lerp(local_output, output, torch.sigmoid(log_weight - local_log_weight))

    def attention_weights(self, query: Tensor, key: Tensor, rule: ScoreRule, tokens: TokenInfo) -> Tensor:
        """The weights (B, H, T, T) that this mixer, without decay, gives to the tokens: the quadratic form of
        `forward`, for matching the teacher's weights; fp32, so call it without autocast."""
        assert self.decay is None
        groups = query.shape[1] // key.shape[1]
        features = self.feature_k(key).repeat_interleave(groups, 1)
        log_weights = (self.feature_q(query) @ features.mT).clamp_min(SMALLEST_NORMALISER).log()
        index = torch.arange(key.shape[2], device=key.device)
        behind = index[:, None] - index
        sinks = None
        if self.older is not None:
            scores = rule.scores(query * rule.scaling, key.repeat_interleave(groups, 1).mT)
            near = behind < min(self.window, rule.sliding_window or self.window)
            log_weights = torch.where(near, scores, log_weights + self.older(query))
            sinks = rule.sinks
        ids = document_slots(tokens, key)
        visible = (behind >= 0) & (ids.unsqueeze(2) == ids.unsqueeze(1))
        log_weights = log_weights.masked_fill(~visible.unsqueeze(1), -torch.inf)
        if sinks is None:
            return log_weights.softmax(dim=-1)
        drain = sinks.float()[:, None, None].expand(*log_weights.shape[:3], 1)
        return torch.cat([log_weights, drain], dim=-1).softmax(dim=-1)[..., :-1]


def document_slots(tokens: TokenInfo, key: Tensor) -> Tensor:
    """(B or 1, T) ids: tokens of equal id may see each other, -1 is padding."""
    ids = tokens.document_ids
    if ids is None:
        ids = torch.zeros(1, key.shape[2], dtype=torch.long, device=key.device)
    return ids if tokens.valid is None else ids.masked_fill(~tokens.valid, -1)


def forget_at_boundaries(log_decay: Tensor | None, ids: Tensor, num_kv_heads: int) -> Tensor:
    """Log-decay (B, G, T) that is -inf at the first token of each document but the first."""
    if log_decay is None:
        log_decay = torch.zeros(ids.shape[0], num_kv_heads, ids.shape[1], device=ids.device)
    starts = F.pad(ids[:, 1:] != ids[:, :-1], (1, 0))
    return log_decay.masked_fill(starts.unsqueeze(1), -torch.inf)
