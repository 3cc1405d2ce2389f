"""Continuations: what is in the batch, and what the model's own settings say, makes no difference."""

import copy
import re

import pytest
import torch
from transformers import GenerationConfig

from attn2mamba.convert import convert
from attn2mamba.errors import UserError
from attn2mamba.evaluate.decoding import Sampling, answers, continuations, end_ids, padding_ids, prompt_ids
from attn2mamba.evaluate.generation import continue_text

PROMPTS = [[5, 6, 7], [8, 9, 10, 11], [12, 13, 14], [5, 6, 8], [20], [21, 22, 23, 24]]


@pytest.fixture(scope="module", params=["llama", "gemma3_text", "student"])
def model(request, tiny_teacher, tiny_tokenizer, randomise):
    family = "llama" if request.param == "student" else request.param
    teacher = tiny_teacher(family, vocab_size=len(tiny_tokenizer) + 20)
    if request.param != "student":
        return teacher
    return randomise(convert(teacher, {"name": "hedgemamba", "window": 4})[0]).eval()


@pytest.mark.parametrize("sampled", [False, True])
def test_the_rest_of_the_batch_does_not_matter(model, tiny_tokenizer, sampled):
    def run(prompts, batch_size):
        seeds = [1000 + prompt[-1] for prompt in prompts]
        sampling = Sampling(seeds) if sampled else None
        return continuations(model, tiny_tokenizer, prompts, 12, batch_size=batch_size, sampling=sampling)

    alone = [run([prompt], 1)[0] for prompt in PROMPTS]
    torch.manual_seed(1)
    assert run(PROMPTS, 1) == run(PROMPTS, 4) == alone
    assert run(PROMPTS[::-1], 3) == alone[::-1]


def test_every_token_is_read_once(model, tiny_tokenizer):
    """With the cache: a long text would else take the square of its length."""
    lengths: list[int] = []
    handle = model.register_forward_pre_hook(
        lambda m, args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    continuations(model, tiny_tokenizer, [[5, 6, 7]], 4, batch_size=1)
    handle.remove()
    assert lengths == [3, *[1] * (len(lengths) - 1)]


def test_greedy_is_the_argmax(model, tiny_tokenizer):
    """Of the tokenizer's ids: the head's other rows are padding, and made the likeliest here."""
    padded = copy.deepcopy(model)
    head = padded.get_output_embeddings()
    extra = padding_ids(padded, tiny_tokenizer)
    assert extra == list(range(len(tiny_tokenizer), head.weight.shape[0]))
    padded.tie_weights = lambda *_, **__: None
    head.weight = torch.nn.Parameter(head.weight.detach().clone())
    with torch.no_grad():
        head.weight[extra] = head.weight[:20] * 9
        text = answers(padded, tiny_tokenizer, [prompt_ids(tiny_tokenizer, "the cat")], 6, None, 1)[0]
        assert text and continue_text(padded, tiny_tokenizer, "the cat", 6) == text
        for prompt, row in zip(PROMPTS, continuations(padded, tiny_tokenizer, PROMPTS, 6, batch_size=2), strict=True):
            ids = list(prompt)
            for token in row:
                logits = padded(torch.tensor([ids]), use_cache=False).logits[0, -1, : len(tiny_tokenizer)]
                assert token == int(logits.argmax())
                ids.append(token)
            assert len(row) == 6 or row[-1] == tiny_tokenizer.eos_token_id


def test_own_settings_do_not_apply_and_come_back(model, tiny_tokenizer):
    plain = continuations(model, tiny_tokenizer, PROMPTS, 10, batch_size=4)
    own = GenerationConfig(repetition_penalty=5.0, no_repeat_ngram_size=1, do_sample=True, temperature=3.0, num_beams=2)
    kept, model.generation_config = model.generation_config, own
    try:
        assert continuations(model, tiny_tokenizer, PROMPTS, 10, batch_size=4) == plain
        assert model.generation_config is own
    finally:
        model.generation_config = kept


def test_a_text_ends_with_the_first_token_that_ends_texts(model, tiny_tokenizer):
    free = continuations(model, tiny_tokenizer, PROMPTS, 10, batch_size=4)
    end = free[1][3]
    kept, model.generation_config = model.generation_config, GenerationConfig(eos_token_id=[end])
    try:
        assert end_ids(model, tiny_tokenizer) == sorted({end, tiny_tokenizer.eos_token_id})
        ended = continuations(model, tiny_tokenizer, PROMPTS, 10, batch_size=4)
    finally:
        model.generation_config = kept
    for before, after in zip(free, ended, strict=True):
        assert after == (before[: before.index(end) + 1] if end in before else before)
    assert ended[1][-1] == end


def test_sampling_follows_the_nucleus(tiny_teacher, tiny_tokenizer):
    """Frequencies of the first token against the probabilities, cut at the smallest set that has top_p."""
    model = tiny_teacher("llama", vocab_size=len(tiny_tokenizer))
    draws, sampling = 4000, Sampling(range(4000), temperature=0.5, top_p=0.8)
    rows = continuations(model, tiny_tokenizer, [[5, 6]] * draws, 1, batch_size=1000, sampling=sampling)
    with torch.no_grad():
        probabilities = (model(torch.tensor([[5, 6]])).logits[0, -1] / 0.5).softmax(-1)
    ordered, tokens = probabilities.sort(descending=True)
    size = int((ordered.cumsum(0) < 0.8).sum()) + 1
    expected = torch.zeros_like(probabilities).index_put((tokens[:size],), ordered[:size] / ordered[:size].sum())
    found = torch.bincount(torch.tensor(rows).flatten(), minlength=len(expected)) / draws
    assert size > 3 and set(found.nonzero().flatten().tolist()) <= set(tokens[:size].tolist())
    assert float((found - expected).abs().max()) < 4 * (0.25 / draws) ** 0.5


def test_random_numbers_are_the_rows_own(tiny_teacher, tiny_tokenizer):
    model = tiny_teacher("llama", vocab_size=len(tiny_tokenizer))

    def run(seeds):
        return continuations(model, tiny_tokenizer, [[5, 6]] * 2, 10, batch_size=2, sampling=Sampling(seeds))

    first, second = run([1, 2])
    assert first != second and run([2, 1]) == [second, first]
    state = torch.random.get_rng_state()
    run([3, 4])
    assert torch.equal(state, torch.random.get_rng_state())


@pytest.mark.parametrize("batch_size", [1, 4])
def test_answers_are_cut_where_the_stop_is(model, tiny_tokenizer, batch_size):
    whole = answers(model, tiny_tokenizer, PROMPTS, 24, None, batch_size)
    longest = max(range(len(PROMPTS)), key=lambda i: len(whole[i]))
    stop = re.compile(re.escape(whole[longest][3]))
    cut = answers(model, tiny_tokenizer, PROMPTS, 24, stop, batch_size)
    assert cut == [text[: stop.search(text).start()] if stop.search(text) else text for text in whole]
    assert len(cut[longest]) <= 3 < len(whole[longest])


def test_prompts_begin_as_texts_do(tiny_tokenizer, bos_tokenizer):
    assert prompt_ids(tiny_tokenizer, "the cat") == tiny_tokenizer("the cat").input_ids
    assert prompt_ids(bos_tokenizer, "the cat") == bos_tokenizer("the cat").input_ids
    assert prompt_ids(bos_tokenizer, "the cat")[0] == bos_tokenizer.bos_token_id


def test_too_long_for_learned_positions(tiny_teacher, tiny_tokenizer):
    with pytest.raises(UserError, match="positions for 2048 tokens, not 2050"):
        continuations(tiny_teacher("gpt2"), tiny_tokenizer, [[1] * 2045], 5, batch_size=1)
