"""Whole models: decoding, padding, packing, caching and generation give what one plain forward of each row gives."""

import copy
from itertools import pairwise

import pytest
import torch
from transformers import DynamicCache

from attn2mamba.convert import convert
from attn2mamba.student import modeling_attn2mamba
from attn2mamba.student.cache import StateCache, StateLayer

HEDGEHOG = {"name": "hedgehog"}
HEDGEMAMBA = {"name": "hedgemamba"}
WINDOWED = {"name": "hedgemamba", "window": 5, "share": "none"}
VARIANTS = {
    f"{family}-{name}": (family, mixer, [])
    for family in ("llama", "gpt_neox", "gemma3_text", "gpt2")
    for name, mixer in (("hedgehog", HEDGEHOG), ("hedgemamba", HEDGEMAMBA), ("window", WINDOWED))
} | {
    "llama-keep-last": ("llama", WINDOWED, [1]),
    "gpt2-keep-first": ("gpt2", HEDGEMAMBA, [0]),
    "gemma3_text-keep-sliding": ("gemma3_text", HEDGEMAMBA, "sliding"),
}
HYBRIDS = [name for name in VARIANTS if "keep" in name]
FEW = ["llama-window", "gpt_neox-hedgemamba", *HYBRIDS]
TOLERANCE = {"atol": 1e-4, "rtol": 0}


@pytest.fixture(scope="module")
def build(tiny_teacher, randomise):
    """Variant name -> student with random mixers, over a teacher that may be changed by keywords."""

    def make(name: str, **changes):
        family, mixer, keep = VARIANTS[name]
        return randomise(convert(tiny_teacher(family, **changes), mixer, keep)[0]).eval()

    return make


@pytest.fixture(scope="module", params=VARIANTS)
def student(request, build):
    return build(request.param)


def only(names: list[str]):
    """Run a test on these variants rather than on all."""
    return pytest.mark.parametrize("student", names, indirect=True)


def draw(*lengths: int) -> list[torch.Tensor]:
    """One row of random tokens for each length."""
    torch.manual_seed(sum(lengths))
    return [torch.randint(1, 50, (n,)) for n in lengths]


def pad(rows: list[torch.Tensor], side: str, to: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """input_ids and attention_mask of a batch; "both" alternates the side."""
    length = to or max(len(row) for row in rows)
    ids, mask = (
        torch.zeros(len(rows), length, dtype=torch.long),
        torch.zeros(len(rows), length, dtype=torch.long),
    )
    for i, row in enumerate(rows):
        left = side == "left" or (side == "both" and i % 2)
        start = length - len(row) if left else 0
        ids[i, start : start + len(row)], mask[i, start : start + len(row)] = row, 1
    return ids, mask


@torch.no_grad()
def alone(model, row: torch.Tensor) -> torch.Tensor:
    """Logits (T, vocabulary) of one row, without a cache."""
    return model(row[None], use_cache=False).logits[0]


def held(cache: StateCache) -> list[torch.Tensor]:
    """Every tensor in a cache, in order."""
    found = []
    for layer in cache.layers:
        found += (
            [layer.tensors[n] for n in sorted(layer.tensors)]
            if isinstance(layer, StateLayer)
            else [layer.keys, layer.values]
        )
    return found


def held_bytes(cache: StateCache) -> int:
    """Memory that a cache keeps alive, views counted in full."""
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in held(cache)}.values())


@torch.no_grad()
@pytest.mark.parametrize("prompt", [1, 2, 3, 7])
def test_decoding_equals_the_full_forward(student, prompt):
    (row,) = draw(prompt + 8)
    expected = alone(student, row)
    output = student(row[None, :prompt], use_cache=True)
    torch.testing.assert_close(output.logits[0], expected[:prompt], **TOLERANCE)
    for t in range(prompt, len(row)):
        output = student(row[None, t : t + 1], past_key_values=output.past_key_values)
        torch.testing.assert_close(output.logits[0, 0], expected[t], **TOLERANCE)


@torch.no_grad()
def test_a_prompt_may_be_split_anywhere(student):
    (row,) = draw(64)
    whole = student(row[None], use_cache=True)
    for cut in (1, 3, 4, 31, 63):
        cache = student(row[None, :cut], use_cache=True).past_key_values
        parts = student(row[None, cut:], past_key_values=cache)
        torch.testing.assert_close(parts.logits[:, -1], whole.logits[:, -1], **TOLERANCE)
        torch.testing.assert_close(held(parts.past_key_values), held(whole.past_key_values), **TOLERANCE)
        assert cache.get_seq_length() == 64


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right", "both"])
@pytest.mark.parametrize("lengths", [(1, 14, 4), (5,)], ids=str)
def test_padding_is_inert(student, lengths, side):
    rows = draw(*lengths)
    ids, mask = pad(rows, side, to=17)
    for use_cache in (False, True):
        logits = student(ids, attention_mask=mask, use_cache=use_cache).logits
        for i, row in enumerate(rows):
            torch.testing.assert_close(logits[i, mask[i].bool()], alone(student, row), **TOLERANCE)


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_decoding_after_padding(student, side):
    prompts, tails = draw(1, 14, 4), draw(3, 3, 3)
    ids, mask = pad(prompts, side)
    cache = student(ids, attention_mask=mask, use_cache=True).past_key_values
    expected = [alone(student, torch.cat(pair))[-3:] for pair in zip(prompts, tails, strict=True)]
    for t in range(3):
        mask = torch.cat([mask, mask.new_ones(3, 1)], 1)
        step = torch.stack([tail[t : t + 1] for tail in tails])
        logits = student(step, attention_mask=mask, past_key_values=cache).logits
        torch.testing.assert_close(logits[:, 0], torch.stack([x[t] for x in expected]), **TOLERANCE)


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_chunks_of_rows_of_different_lengths(student, side):
    """The third call is a decoding step in which one row has nothing to add."""
    chunks = [draw(3, 6, 1), draw(4, 1, 7), draw(1, 0, 1), draw(2, 5, 3)]
    cache, masks, logits = student.new_cache(), [], []
    for rows in chunks:
        ids, mask = pad(rows, side)
        masks.append(mask)
        logits.append(student(ids, attention_mask=torch.cat(masks, 1), past_key_values=cache).logits)
    for i in range(3):
        actual = torch.cat([x[i, m[i].bool()] for x, m in zip(logits, masks, strict=True)])
        torch.testing.assert_close(actual, alone(student, torch.cat([rows[i] for rows in chunks])), **TOLERANCE)


@torch.no_grad()
def test_positions_come_from_the_mask(student):
    ids, mask = pad(draw(9, 5), "left")
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    given = student(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    assert torch.equal(student(ids, attention_mask=mask, use_cache=False).logits, given)
    shifted = student(ids, attention_mask=mask, position_ids=positions + torch.arange(9), use_cache=False).logits
    assert not torch.allclose(shifted[1, -1], given[1, -1], atol=1e-3)


def generate(model, ids, mask=None, tokens: int = 8, **options) -> torch.Tensor:
    mask = torch.ones_like(ids) if mask is None else mask
    options = {"do_sample": False, "pad_token_id": 0, **options}
    return model.generate(ids, attention_mask=mask, max_new_tokens=tokens, min_new_tokens=tokens, **options)[
        :, ids.shape[1] :
    ]


def test_greedy_batch_equals_single_rows(student):
    rows = draw(1, 14, 4)
    batch = generate(student, *pad(rows, "left"))
    for row, generated in zip(rows, batch, strict=True):
        expected = row
        for _ in range(8):
            expected = torch.cat([expected, alone(student, expected)[-1:].argmax(-1)])
        assert torch.equal(generated, expected[len(row) :])


def test_beam_search_reorders_the_state(student):
    ids, mask = pad(draw(9, 5), "left")
    cached, uncached = (generate(student, ids, mask, num_beams=4, use_cache=use_cache) for use_cache in (True, False))
    assert torch.equal(cached, uncached)


@only(FEW)
def test_several_samples(student):
    (row,) = draw(5)
    torch.manual_seed(0)
    samples = generate(student, row[None], do_sample=True, num_return_sequences=3)
    assert samples.shape == (3, 8)
    assert len(samples.unique(dim=0)) > 1


@only(FEW)
@pytest.mark.parametrize("how", ["prompt_lookup_num_tokens", "assistant_model"])
def test_assisted_decoding_is_refused(student, how):
    value = {"prompt_lookup_num_tokens": 3, "assistant_model": student}[how]
    with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
        generate(student, draw(9)[0][None], **{how: value})


@only(["llama-window", "llama-keep-last"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"attention_mask": torch.ones(1, 1, 3, 3)}, "must be 2-D"),
        ({"past_key_values": DynamicCache()}, "needs its own cache"),
        ({"inputs_embeds": torch.zeros(1, 3, 32)}, "either input_ids or inputs_embeds"),
        ({"document_ids": torch.zeros(1, 3), "use_cache": True}, "cannot be combined"),
        (
            {"document_ids": torch.zeros(1, 3), "attention_mask": torch.tensor([[0, 1, 1]])},
            "cannot be combined",
        ),
        (
            {"document_ids": torch.zeros(1, 3), "position_ids": torch.arange(3)[None]},
            "leave position_ids out",
        ),
    ],
    ids=lambda x: "+".join(x) if isinstance(x, dict) else "",
)
def test_what_a_mixer_cannot_honour_is_refused(student, arguments, message):
    with pytest.raises(ValueError, match=message):
        student(input_ids=torch.ones(1, 3, dtype=torch.long), **arguments)


@only(FEW)
def test_a_state_cannot_be_rolled_back(student):
    with pytest.raises(ValueError, match="cannot be rolled back"):
        student.new_cache().crop(-1)


@torch.no_grad()
def test_packed_documents_do_not_see_each_other(student):
    rows = [torch.cat(pieces) for pieces in (draw(9, 1, 14), draw(2, 20, 2))]
    cuts = [(0, 9, 10, 24), (0, 2, 22, 24)]
    ids = torch.stack([torch.searchsorted(torch.tensor(cut[1:]), torch.arange(24), right=True) for cut in cuts])
    packed = student(torch.stack(rows), document_ids=ids).logits
    for row, cut, logits in zip(rows, cuts, packed, strict=True):
        expected = [alone(student, row[a:b]) for a, b in pairwise(cut)]
        torch.testing.assert_close(logits, torch.cat(expected), **TOLERANCE)


@torch.no_grad()
@only(FEW)
@pytest.mark.parametrize("side", ["left", "right"])
def test_hidden_states_and_kept_logits_are_in_the_callers_order(student, side):
    rows = draw(9, 5)
    ids, mask = pad(rows, side)
    output = student(ids, attention_mask=mask, output_hidden_states=True)
    for i, row in enumerate(rows):
        expected = student(row[None], output_hidden_states=True).hidden_states
        actual = [x[i, mask[i].bool()] for x in output.hidden_states]
        torch.testing.assert_close(actual, [x[0] for x in expected], **TOLERANCE)
    for keep, columns in ((1, [8]), (3, [6, 7, 8]), (torch.tensor([0, 4, 8]), [0, 4, 8])):
        kept = student(ids, attention_mask=mask, logits_to_keep=keep).logits
        assert torch.equal(kept[mask[:, columns].bool()], output.logits[:, columns][mask[:, columns].bool()])


@only(FEW)
def test_a_conversation_continues_from_its_cache(student):
    (row,) = draw(9)
    first = student.generate(row[None], max_new_tokens=5, pad_token_id=0, do_sample=False, return_dict_in_generate=True)
    again = torch.cat([first.sequences, draw(4)[0][None]], 1)
    continued = generate(student, again, **{modeling_attn2mamba._CACHE: first.past_key_values})
    assert torch.equal(continued, generate(student, again))


@torch.no_grad()
@only(FEW)
def test_embeddings_may_be_given(student):
    ids, mask = pad(draw(9, 5), "right")
    embedded = student(inputs_embeds=student.get_input_embeddings()(ids), attention_mask=mask).logits
    torch.testing.assert_close(embedded[mask.bool()], student(ids, attention_mask=mask).logits[mask.bool()])


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
@only(FEW)
def test_gradient_checkpointing_changes_nothing(student):
    student = copy.deepcopy(student).train()
    ids, mask = pad(draw(20, 13), "right")
    grads = []
    for enable in (student.gradient_checkpointing_disable, student.gradient_checkpointing_enable):
        enable()
        student.zero_grad()
        torch.manual_seed(0)  # dropout
        student(ids, attention_mask=mask, labels=ids).loss.backward()
        grads.append({name: p.grad for name, p in student.named_parameters()})
    assert all(g is not None for g in grads[0].values())
    torch.testing.assert_close(grads[1], grads[0])


@only(FEW)
def test_a_copy_is_independent(student, randomise):
    (row,) = draw(9)
    before, other = alone(student, row), copy.deepcopy(student)
    assert torch.equal(alone(other, row), before)
    randomise(other, seed=2)
    changed = alone(other, row)
    assert not torch.allclose(changed, before, atol=1e-2)
    assert torch.equal(alone(student, row), before)
    assert torch.equal(alone(other, row), changed)


@torch.no_grad()
@only(FEW)
@pytest.mark.parametrize("side", ["left", "right"])
def test_loss_is_over_real_next_tokens(student, side):
    """Labels that the caller left unmasked: padding is not predicted, nor is the first token after padding."""
    rows = draw(9, 5)
    ids, mask = pad(rows, side)
    losses = [torch.nn.functional.cross_entropy(alone(student, r)[:-1], r[1:], reduction="sum") for r in rows]
    actual = student(ids, attention_mask=mask, labels=ids).loss
    torch.testing.assert_close(actual, sum(losses) / (8 + 4))


@torch.no_grad()
@only(FEW)
def test_a_long_prompt_is_read_in_pieces(student, monkeypatch):
    rows = draw(40, 23, 3)
    single = [alone(student, row) for row in rows]
    monkeypatch.setattr(modeling_attn2mamba, "PREFILL_CHUNK", 7)
    for side in ("left", "right"):
        ids, mask = pad(rows, side)
        logits = student(ids, attention_mask=mask, logits_to_keep=0).logits
        for i, expected in enumerate(single):
            torch.testing.assert_close(logits[i, mask[i].bool()], expected, **TOLERANCE)
        for keep in (1, 5, 9):
            kept = student(ids, attention_mask=mask, logits_to_keep=keep).logits
            real = mask[:, -keep:].bool()
            torch.testing.assert_close(kept[real], logits[:, -keep:][real], **TOLERANCE)
            assert kept.shape[1] == keep
    (whole,) = draw(40)
    torch.testing.assert_close(student(whole[None]).logits[0], alone(student, whole), **TOLERANCE)


@torch.no_grad()
@only(["llama-hedgehog", "llama-hedgemamba", "llama-window"])
def test_the_cache_does_not_grow(student, monkeypatch):
    monkeypatch.setattr(modeling_attn2mamba, "PREFILL_CHUNK", 32)
    sizes, kept = set(), set()
    for length in (32, 40, 320):
        cache = student(draw(length)[0][None], logits_to_keep=1, use_cache=True).past_key_values
        sizes.add(cache.nbytes())
        kept.add(held_bytes(cache))
    assert len(sizes) == 1
    assert kept == sizes  # no view that keeps a longer tensor alive


@torch.no_grad()
@only(["llama-window", "llama-keep-last"])
def test_bytes_of_a_cache(student):
    ids = torch.ones(3, 10, dtype=torch.long)
    cache = student(ids, use_cache=True).past_key_values
    memory = 3 * 2 * 16 * 9 * 4  # batch, kv heads, features, values + normaliser, fp32
    conv = 3 * 3 * 32 * 4
    window = 3 * 5 * (2 * 2 * 8 * 4 + 2 * 2 * 4 + 8)  # keys and values, dt and decay, ids
    kept = 3 * 10 * 2 * 2 * 8 * 4
    layer = memory + conv + window
    assert cache.nbytes() == (layer + kept if student.config.kept_layers else 2 * layer)


@torch.no_grad()
@only(["llama-window"])
def test_a_cache_starts_anew(student):
    row, other = draw(9, 7)
    cache = student(*pad([other[:3]], "left", to=7), past_key_values=student.new_cache()).past_key_values
    cache.reset()
    assert cache.nbytes() == cache.get_seq_length() == 0
    torch.testing.assert_close(student(row[None], past_key_values=cache).logits[0], alone(student, row), **TOLERANCE)


@torch.no_grad()
@only(FEW)
@pytest.mark.parametrize(
    ("operation", "chosen"),
    [
        ("reorder_cache", [2, 2, 0]),
        ("batch_select_indices", [1]),
        ("batch_repeat_interleave", [0, 0, 1, 1, 2, 2]),
    ],
)
def test_rows_of_a_cache(student, operation, chosen):
    prompts, nxt = draw(9, 4, 6), torch.tensor([[7]])
    ids, mask = pad(prompts, "left")
    cache = student(ids, attention_mask=mask, use_cache=True).past_key_values
    getattr(cache, operation)(2 if "repeat" in operation else torch.tensor(chosen))
    logits = student(nxt.expand(len(chosen), 1), past_key_values=cache).logits[:, 0]
    expected = torch.stack([alone(student, torch.cat([prompts[i], nxt[0]]))[-1] for i in chosen])
    torch.testing.assert_close(logits, expected, **TOLERANCE)


@torch.no_grad()
@only(["llama-window", "gpt_neox-hedgemamba"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_weights_keep_a_32_bit_memory(student, dtype, tmp_path):
    student.save_pretrained(tmp_path)
    half = type(student).from_pretrained(tmp_path, dtype=dtype)
    assert {p.dtype for p in half.parameters()} == {dtype}
    (row,) = draw(30)
    output = half(row[None], use_cache=True)
    assert output.logits.dtype == dtype
    assert all(layer.tensors["memory"].dtype == torch.float32 for layer in output.past_key_values.layers)
    difference = (output.logits[0].float() - alone(student, row)).norm() / alone(student, row).norm()
    assert difference < (0.1 if dtype == torch.bfloat16 else 0.02)


def test_model_loss_does_not_cross_documents(tiny_teacher):
    student, _ = convert(tiny_teacher("llama"), {"name": "hedgemamba"})
    ids = torch.randint(3, student.config.vocab_size, (1, 12))
    documents = (torch.arange(12) >= 7).long()[None]
    packed = student(ids, labels=ids, document_ids=documents).loss
    parts = [student(ids[:, a:b], labels=ids[:, a:b], use_cache=False).loss * (b - a - 1) for a, b in ((0, 7), (7, 12))]
    torch.testing.assert_close(packed, sum(parts) / 10)


def test_mask_shorter_than_the_tokens_is_refused(tiny_teacher):
    student, _ = convert(tiny_teacher("llama"), {"name": "hedgemamba"})
    with pytest.raises(ValueError, match="covers 3 of 5"):
        student(torch.ones(1, 5, dtype=torch.long), attention_mask=torch.ones(1, 3))


@only(["llama-window", "llama-keep-last"])
def test_another_attention_implementation_does_not_pass_the_mixers_over(student):
    """transformers would else run the teacher's softmax in silence."""
    student = copy.deepcopy(student)
    student.set_attn_implementation("sdpa")
    with pytest.raises(RuntimeError, match="no other attention implementation"):
        student(torch.ones(1, 3, dtype=torch.long))


@only(["llama-window"])
def test_resized_embeddings_are_saved(student, tmp_path):
    student = copy.deepcopy(student)
    student.resize_token_embeddings(80)
    student.save_pretrained(tmp_path)
    again = type(student).from_pretrained(tmp_path).eval()
    (row,) = draw(9)
    assert torch.equal(alone(again, row), alone(student, row)) and again.config.vocab_size == 80
