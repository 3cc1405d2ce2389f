"""The families that the README names, one by one, and every other causal language model of transformers, by sweep."""

from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch
import transformers
from sweep import FAMILIES, assert_close, document, generated, greedy, own_logits, randomise, sweep
from tiny_families import VOCABULARY, tiny_config, tiny_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from attn2mamba.convert import convert, hand_over
from attn2mamba.errors import UserError
from attn2mamba.probe import attention_geometry, refuse_packing
from attn2mamba.recipe import Finetune, Mixer, Recipe, Transfer
from attn2mamba.stages import FinetuneStage, TransferStage, train_only
from attn2mamba.student.attention import attentions, mixer_attentions, softmax_attention
from attn2mamba.student.modeling_attn2mamba import Attn2MambaForCausalLM

MHA, GQA, MQA = [4, 4, 8, 8, 32], [4, 2, 8, 8, 32], [4, 1, 8, 8, 32]
# family: (geometry of each layer, changes to the tiny configuration)
NAMED: dict[str, tuple[list[list[int]], dict]] = {
    "gpt_neox": ([MHA] * 2, {"rotary_pct": 0.25, "use_parallel_residual": True, "attention_bias": True}),
    "llama": ([GQA] * 2, {"attention_bias": True}),
    "qwen2": ([GQA] * 2, {}),
    "qwen3": ([GQA] * 2, {}),
    "mistral": ([GQA] * 2, {"sliding_window": 6}),
    "gemma2": ([GQA] * 2, {"attn_logit_softcapping": 2.0}),
    "gemma3_text": ([[4, 2, 16, 16, 32]] * 2, {"head_dim": 16, "layer_types": ["sliding_attention", "full_attention"]}),
    "phi": ([GQA] * 2, {}),
    "phi3": ([GQA] * 2, {}),
    "gpt2": ([MHA] * 2, {}),
    "gpt_bigcode": ([MQA] * 2, {}),
    "olmo2": ([GQA] * 2, {}),
    "mixtral": ([GQA] * 2, {}),
    "qwen3_moe": ([GQA] * 2, {}),
    "olmoe": ([GQA] * 2, {}),
    "gpt_oss": ([GQA] * 2, {}),
    "deepseek_v3": ([[4, 4, 16, 8, 32]] * 2, {}),
    "gemma4_text": ([GQA, [4, 2, 16, 16, 32]] * 2, {"per_layer_config": {i: {"head_dim": 16} for i in (1, 3)}}),
}
ODD = {
    "MHA": {"num_key_value_heads": 4},
    "MQA": {"num_key_value_heads": 1},
    "head_dim 12": {"head_dim": 12},
    "head_dim 7 of value": {"hidden_size": 28, "head_dim": 14},
    "six heads on three": {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 36, "head_dim": 6},
}
MIXERS = {"pure": {"name": "hedgemamba"}, "window": {"name": "hedgemamba", "window": 5}}


def build(family: str) -> PreTrainedModel:
    return tiny_model(tiny_config(family, **NAMED[family][1]))


def tokens(rows: int = 2, length: int = 20) -> Tensor:
    return torch.randint(1, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(length))


def student_of(teacher: PreTrainedModel, mixer: dict) -> Attn2MambaForCausalLM:
    """A student with random mixers, which never stops on a token."""
    student, _ = convert(teacher, mixer)
    randomise(student)
    student.generation_config.eos_token_id = None
    return student


def stage_one(teacher: PreTrainedModel, window: int = 0, loss: str = "cosine"):
    spec = Transfer(mixer=Mixer(name="hedgehog", window=window), loss=loss, tokens=1, lr=1e-2)
    student, _ = convert(teacher, spec.mixer.model_dump())
    return student, TransferStage(student, Recipe(sequence_length=40, batch_size=2, stages=[spec]), spec)


@pytest.fixture(scope="module", params=NAMED)
def family(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def teacher(family) -> PreTrainedModel:
    return build(family)


@pytest.fixture(scope="module", params=MIXERS)
def student(request, teacher) -> Attn2MambaForCausalLM:
    return student_of(teacher, MIXERS[request.param])


def test_geometry(family, teacher):
    assert convert(teacher)[0].config.layers == NAMED[family][0]


@pytest.mark.parametrize("window", [0, 30])
def test_stage_one_follows_the_familys_own_eager_attention(family, teacher, window):
    """What each attention module returns in stage 1 (soft-cap, sinks, sliding window included), and the logits."""
    eager = AutoModelForCausalLM.from_config(teacher.config, attn_implementation="eager").eval()
    eager.load_state_dict(teacher.state_dict())
    student, stage = stage_one(teacher, window)
    outputs: dict[str, list[Tensor]] = {"eager": [], "student": []}
    for role, model in (("eager", eager), ("student", student.backbone)):
        for _, module in attentions(model):
            module.register_forward_hook(lambda m, args, output, role=role: outputs[role].append(output[0]))
    stage.start()
    stage.learning = False
    assert_close(own_logits(student, tokens()), own_logits(eager, tokens()))
    assert len(outputs["eager"]) == len(NAMED[family][0])
    for actual, expected in zip(outputs["student"], outputs["eager"], strict=True):
        assert_close(actual, expected)


def test_a_window_over_everything_is_the_teachers_attention(family, teacher):
    """Up to the length of the family's own sliding window, from which on older tokens come from the state."""
    student, _ = convert(teacher, {"name": "hedgehog", "window": 30})
    assert_close(own_logits(student, tokens(2, 6)), own_logits(teacher, tokens(2, 6)))


def test_every_attention_parameter_matters(family, teacher):
    """Biases, query and key norms and sinks of the teacher's attention reach the student. A key's bias adds the same
    to all scores of a query only in softmax, so here it matters too."""
    student, _ = convert(teacher, {"name": "hedgehog", "window": 4})
    expected = own_logits(student, tokens())
    for name, module in attentions(student.backbone):
        for parameter_name, parameter in module.named_parameters():
            if ".mixer." in f".{parameter_name}" or parameter_name == "inner_attn.bias":
                continue
            before = parameter.detach().clone()
            with torch.no_grad():
                parameter.add_(torch.randn_like(parameter))
            changed = own_logits(student, tokens())
            assert (changed - expected).abs().max() > 1e-3, f"{name}.{parameter_name}"
            with torch.no_grad():
                parameter.copy_(before)


def test_stage_one_trains_mixers_alone(family, teacher):
    """Every tensor of the teacher, routers and experts included, is bit-equal after optimiser steps; the loss falls."""
    student, stage = stage_one(teacher)
    before = {name: p.clone() for name, p in student.named_parameters() if ".mixer." not in name}
    optimizer = torch.optim.Adam(train_only(student, stage).values(), lr=1e-2)
    stage.start()
    batch = {"input_ids": tokens(), "document_ids": torch.zeros(2, 20, dtype=torch.long)}
    losses = []
    for _ in range(8):
        losses.append(stage.backward(batch, stage.count(batch))["loss"])
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0]
    after = dict(student.named_parameters())
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_gradients_are_where_the_stage_says(family, teacher):
    """Stage 2 reaches every parameter that it trains, and no frozen one. An expert that no token chose has none."""
    spec = Finetune(mixer=Mixer(name="hedgemamba"), tokens=1, lr=1e-3)
    student, _ = convert(teacher, spec.mixer.model_dump())
    stage = FinetuneStage(student, Recipe(sequence_length=20, batch_size=2, stages=[spec]), spec, None)
    trained = train_only(student, stage)
    stage.start()
    stage.backward({"input_ids": tokens(), "document_ids": torch.zeros(2, 20, dtype=torch.long)}, 38)
    frozen = {id(p) for m in (student.get_input_embeddings(), student.get_output_embeddings()) for p in m.parameters()}
    for name, parameter in student.named_parameters():
        if id(parameter) in frozen:
            assert parameter.grad is None and name not in trained
        elif not any(fnmatchcase(name, pattern) for pattern in UNREACHED):
            assert parameter.grad is not None, name


UNREACHED = ["*.gate.e_score_correction_bias", "*.sinks"]
"""Parameters that the family itself gives no gradient, and sinks, which only a softmax window uses."""


def test_handover(family, teacher):
    student, _ = convert(teacher, {"name": "hedgehog"})
    randomise(student)
    before = own_logits(student, tokens())
    hand_over(student, {"name": "hedgemamba"})
    assert_close(own_logits(student, tokens()), before)


@torch.no_grad()
def test_text_may_be_read_in_any_pieces(student):
    whole = own_logits(student, tokens(2, 20))
    for cut in (1, 2, 3, 7, 19):
        cache = student.new_cache()
        pieces = [x for x in tokens(2, 20).tensor_split([cut, cut + 1], dim=1) if x.numel()]
        assert_close(torch.cat([student(x, past_key_values=cache).logits for x in pieces], 1), whole)


@torch.no_grad()
def test_padding_on_the_left_changes_nothing(student):
    rows = [tokens(1, n) for n in (3, 17, 1)]
    ids, mask = torch.zeros(3, 17, dtype=torch.long), torch.zeros(3, 17, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, 17 - row.shape[1] :], mask[i, 17 - row.shape[1] :] = row, 1
    logits = student(ids, attention_mask=mask, use_cache=False).logits
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    batch = student.generate(ids, attention_mask=mask, **options)[:, 17:]
    for i, row in enumerate(rows):
        assert_close(logits[i, 17 - row.shape[1] :], own_logits(student, row)[0])
        assert torch.equal(batch[i], greedy(student, row)[0, row.shape[1] :])


def test_beams_equal_those_without_a_cache(student):
    options = {"max_new_tokens": 5, "num_beams": 4, "do_sample": False, "pad_token_id": 0}
    prompt = tokens(2, 7)
    mask = torch.ones_like(prompt)
    cached, plain = (student.generate(prompt, attention_mask=mask, use_cache=c, **options) for c in (True, False))
    assert torch.equal(cached, plain)


def test_save_reload_generate(student, tmp_path):
    student.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(own_logits(again, tokens()), own_logits(student, tokens()))
    again.generation_config.eos_token_id = None
    assert torch.equal(generated(again, tokens(1, 5)), greedy(student, tokens(1, 5)))


@pytest.mark.parametrize("changes", ODD.values(), ids=list(ODD))
@pytest.mark.parametrize("mixer", MIXERS.values(), ids=list(MIXERS))
def test_heads_of_every_shape_convert(changes, mixer):
    teacher = tiny_model(tiny_config("llama", **changes))
    student = student_of(teacher, mixer)
    assert torch.equal(generated(student, tokens(1, 9)), greedy(student, tokens(1, 9)))


@pytest.fixture(scope="module")
def published() -> dict[str, str]:
    """The lines of docs/families.md by family; none where it was written with another transformers."""
    text = (Path(__file__).parent.parent / "docs" / "families.md").read_text()
    lines = text.splitlines() if f"transformers {transformers.__version__} " in text else []
    return {line.split(" | ")[0].removeprefix("| "): line for line in lines if line.startswith("| ")}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_converts_or_is_refused_as_published(name, published):
    outcome = sweep(name)
    if published:
        assert published[name] in document([outcome])


REFUSALS = {
    "bloom": "BloomForCausalLM (bloom) cannot be converted: it adds ALiBi position biases",
    "mamba": "MambaForCausalLM (mamba) cannot be converted: it mixes tokens by a recurrence",
    "diffllama": "DiffLlamaForCausalLM (diffllama) cannot be converted: it calls its attention function more than",
    "gemma3": "Gemma3ForConditionalGeneration (gemma3) cannot be converted: it wraps a language model",
    "falcon": "FalconForCausalLM (falcon) cannot be converted: it does not go through transformers' attention",
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_names_family_feature_and_what_to_do(name):
    """Before any weight is read: from shapes alone."""
    with torch.device("meta"):
        teacher = AutoModelForCausalLM.from_config(tiny_config(name))
    with pytest.raises(UserError) as caught:
        convert(teacher)
    assert str(caught.value).startswith(REFUSALS[name])
    assert "; " in str(caught.value) and "\n" not in str(caught.value)
    assert mixer_attentions(teacher) == []


@pytest.mark.parametrize("part", ["self_attn.k_proj", "mlp"])
def test_what_mixes_tokens_besides_attention_is_refused(part):
    """A convolution before the keys, a sum over earlier tokens: found by running it, whatever the family calls it."""
    teacher = tiny_model(tiny_config("llama"))
    module = teacher.model.layers[0].get_submodule(part)
    module.register_forward_hook(lambda m, args, x: x + torch.nn.functional.pad(x[:, :-1], (0, 0, 1, 0)))
    with pytest.raises(UserError, match="mixes tokens by something besides attention"):
        convert(teacher)


def test_attention_that_is_more_than_its_attention_function_is_refused():
    teacher = tiny_model(tiny_config("llama"))
    output = teacher.model.layers[0].self_attn.o_proj
    output.register_forward_hook(lambda m, args, x: 2 * x if teacher.config._attn_implementation == "eager" else x)
    with pytest.raises(UserError, match="not plain softmax attention"):
        convert(teacher)


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "opt", "afmoe", "gemma3_text", "bert"])
def test_packed_documents_stay_apart_in_every_softmax(name):
    """In the teacher of stage 2, in a kept layer and in stage 1's stream, also where the family passes no positions to
    its masks."""
    teacher = tiny_model(tiny_config(name))
    refuse_packing(teacher)
    ids, documents = tokens(2, 20), torch.tensor([[0] * 7 + [1] * 13])
    for student in (convert(teacher, {"name": "hedgehog"}, keep=[0])[0], stage_one(teacher)[0]):
        randomise(student)
        if not student.config.kept_layers:
            TransferStage(student, Recipe(sequence_length=40, batch_size=2, stages=[SPEC]), SPEC).start()
            for attention in mixer_attentions(student):
                attention.observer = lambda m, mix, *args, **options: softmax_attention(m, *args, **options)[0]
        with torch.no_grad():
            packed = student(ids, document_ids=documents.expand(2, -1)).logits
        assert_close(packed[:, 7:], own_logits(student, ids[:, 7:]))


SPEC = Transfer(tokens=1, lr=1e-2)


@pytest.mark.parametrize(
    ("name", "changes", "mixer", "keep", "words"),
    [
        ("phimoe", {}, {"window": 20}, [], "masks all but the last 6 tokens by itself; set window to 6 or less"),
        ("llama4_text", {}, {"window": 4}, [], "attends within chunks"),
        ("gemma3n_text", {}, {}, [0], "shares keys and values between layers"),
        ("gemma4_text", {}, {}, "sliding", "shares keys and values between layers"),
        ("llama", {"num_key_value_heads": 3}, {}, [], "4 query heads on 3 key/value heads"),
    ],
)
def test_what_an_option_would_do_wrongly_is_refused(name, changes, mixer, keep, words):
    with pytest.raises(UserError, match=words):
        convert(tiny_model(tiny_config(name, **changes)), {"name": "hedgehog", **mixer}, keep)


def test_16_bits_hide_nothing():
    teacher = tiny_model(tiny_config("llama"))
    module = teacher.model.layers[0].mlp
    module.register_forward_hook(lambda m, args, x: x + 0.01 * torch.nn.functional.pad(x[:, :-1], (0, 0, 1, 0)))
    with pytest.raises(UserError, match="mixes tokens by something besides attention"):
        convert(teacher.to(torch.bfloat16))


def test_weights_that_are_not_finite():
    teacher = tiny_model(tiny_config("llama"))
    teacher.model.layers[0].mlp.up_proj.weight.data[0] = torch.nan
    with pytest.raises(UserError, match="not finite"):
        convert(teacher)


def test_a_model_without_a_language_model_head():
    model = AutoModelForSequenceClassification.from_config(tiny_config("llama"))
    with pytest.raises(UserError, match="no language-model head"):
        convert(model)


@pytest.mark.parametrize("name", ["jetmoe", "mixtral"])
def test_shapes_without_weights(name):
    with torch.device("meta"):
        teacher = AutoModelForCausalLM.from_config(tiny_config(name))
    if name == "mixtral":
        assert attention_geometry(teacher) == NAMED[name][0]
    else:
        with pytest.raises(UserError, match="configuration alone does not tell"):
            attention_geometry(teacher)


def test_frequencies_that_follow_the_length_are_read_at_once():
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    config = tiny_config(
        "phi3",
        sliding_window=None,
        max_position_embeddings=8000,
        original_max_position_embeddings=3000,
        rope_parameters={**rope, "original_max_position_embeddings": 3000},
    )
    student = student_of(tiny_model(config), {"name": "hedgehog"})
    ids = tokens(1, 3500)
    with torch.no_grad():
        pieces, whole = (student(ids, use_cache=c, logits_to_keep=1).logits for c in (True, False))
    assert_close(pieces, whole)
