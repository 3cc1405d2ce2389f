"""The recurrence S_t = a_t S_{t-1} + k_t v_t^T, y_t = q_t^T S_t: token by token, and in chunks of matrix products.

Shapes, with B sequences, H query heads, G key/value heads (H a multiple of G), T tokens, f features, d values:
query (B, H, T, f), key (B, G, T, f), value (B, G, T, d), log_decay (B, G, T) = log a_t <= 0 or None for a = 1,
initial_state (B, G, f, d) or None for zeros. Both functions return the output (B, H, T, d) and the state after the
last token (B, G, f, d), in fp32 whatever comes in: a bf16 state drifts by tens of per cent within a few thousand
tokens. A log_decay of -inf at a token forgets all that came before it (a document's first token).

The chunked form is the one of Mamba-2 (arXiv 2405.21060, listing 1), grouped so that keys are never repeated.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def recurrent_scan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor | None = None,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The definition, one token at a time. The reference for tests, and the step of cached decoding."""
    batch, heads, length, features = query.shape
    groups, width = key.shape[1], value.shape[-1]
    query = query.float().view(batch, groups, heads // groups, length, features)
    key, value = key.float(), value.float()
    state = query.new_zeros(batch, groups, features, width) if initial_state is None else initial_state.float()
    outputs = []
    for t in range(length):
        if log_decay is not None:
            state = state * log_decay[:, :, t, None, None].float().exp()
        state = torch.addcmul(state, key[:, :, t, :, None], value[:, :, t, None, :])
        outputs.append((query[:, :, :, t] @ state).unsqueeze(3))
    output = outputs[0] if length == 1 else torch.cat(outputs, dim=3)
    return output.view(batch, heads, length, width), state


def chunked_scan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor | None = None,
    initial_state: Tensor | None = None,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor]:
    """Equal to `recurrent_scan` in output, state and gradients, for any length and chunk size; time linear in T."""
    if query.shape[2] == 1:
        return recurrent_scan(query, key, value, log_decay, initial_state)
    batch, heads, length, features = query.shape
    groups, width = key.shape[1], value.shape[-1]
    chunk = min(chunk_size, length)
    chunks = -(-length // chunk)
    query, key, value = (_split_chunks(x.float(), chunks, chunk) for x in (query, key, value))
    # Query heads that share a key head become extra rows of one product: (B, G, n, heads per group * chunk, f).
    rows = query.view(batch, groups, heads // groups, chunks, chunk, features).transpose(2, 3)
    rows = rows.reshape(batch, groups, chunks, -1, features)

    scores = (rows @ key.mT).unflatten(3, (heads // groups, chunk))
    if log_decay is None:
        scores, key_to_end, query_from_start = scores.tril(), key, None
        chunk_decay = None
    else:
        log_decay = _split_chunks(log_decay.float().unsqueeze(-1), chunks, chunk).squeeze(-1)
        within = _decay_matrix(log_decay)
        scores = scores * within.unsqueeze(3)
        key_to_end = key * within[..., -1, :].unsqueeze(-1)
        query_from_start = log_decay.cumsum(-1).exp()
        chunk_decay = query_from_start[..., -1]
    before, state = _chunk_states(key_to_end.mT @ value, chunk_decay, initial_state)

    output = (scores.flatten(3, 4) @ value).unflatten(3, (heads // groups, chunk))
    from_state = (rows @ before).unflatten(3, (heads // groups, chunk))
    if query_from_start is not None:
        from_state = from_state * query_from_start[:, :, :, None, :, None]
    output = (output + from_state).transpose(2, 3).reshape(batch, heads, chunks * chunk, width)
    return output[:, :, :length], state


def _split_chunks(x: Tensor, chunks: int, chunk: int) -> Tensor:
    """(B, h, T, d) -> (B, h, chunks, chunk, d), zero-padded at the end (log-decay 0 and key 0 leave the state)."""
    missing = chunks * chunk - x.shape[2]
    return (F.pad(x, (0, 0, 0, missing)) if missing else x).unflatten(2, (chunks, chunk))


def _decay_matrix(log_decay: Tensor) -> Tensor:
    """(..., c) -> (..., c, c): entry i, j is prod_{j < s <= i} a_s for j <= i, else 0.

    Sums of each range rather than differences of cumulative sums: those lose the small decays behind a large one,
    and turn -inf into NaN. Masked before exp, so that nothing overflows in the part that is thrown away.
    """
    size = log_decay.shape[-1]
    keep = torch.ones(size, size, dtype=torch.bool, device=log_decay.device)
    steps = log_decay.unsqueeze(-1).expand(*log_decay.shape, size).masked_fill(~keep.tril(-1), 0)
    return steps.cumsum(-2).masked_fill(~keep.tril(), -torch.inf).exp()


def _chunk_states(updates: Tensor, chunk_decay: Tensor | None, initial_state: Tensor | None) -> tuple[Tensor, Tensor]:
    """State before each chunk (B, G, n, f, d) and after the last (B, G, f, d), from each chunk's own sum of k v^T."""
    state = torch.zeros_like(updates[:, :, 0]) if initial_state is None else initial_state.float()
    before = []
    for i in range(updates.shape[2]):
        before.append(state)
        if chunk_decay is not None:
            state = state * chunk_decay[:, :, i, None, None]
        state = state + updates[:, :, i]
    return torch.stack(before, dim=2), state
