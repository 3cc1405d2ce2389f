"""The stages: what trains and what does not, what the targets are, and that the losses fall."""

import math

import pytest
import torch

from attn2mamba import losses, stages
from attn2mamba.convert import convert
from attn2mamba.errors import UserError
from attn2mamba.recipe import Finetune, FinetuneLoss, Mixer, Recipe, Transfer
from attn2mamba.stages import FinetuneStage, TransferStage, model_inputs, parameter_counts, teacher_inputs
from attn2mamba.student.attention import MASKED, MASKLESS, mixer_attentions
from attn2mamba.train import fingerprint, split
from attn2mamba.vocabulary import Vocabulary

FAMILIES = ["llama", "gpt_neox", "gemma3_text", "gpt2"]
LENGTH = 24


def random_batch(seed: int = 0, rows: int = 2) -> stages.Batch:
    """Rows of three documents of different lengths."""
    ids = torch.randint(50, (rows, LENGTH), generator=torch.Generator().manual_seed(seed))
    documents = torch.tensor([[0] * 7 + [1] * 12 + [2] * 5, [0] * 3 + [1] * 1 + [2] * 20] * rows)[:rows]
    return {"input_ids": ids, "document_ids": documents}


def recipe_of(stage, **options) -> Recipe:
    return Recipe(sequence_length=LENGTH, batch_size=2, stages=[stage], **options)


def transfer(teacher, loss="cosine", window=0, **options):
    """(student, its transfer stage), set up to train."""
    spec = Transfer(mixer=Mixer(name="hedgehog", window=window), loss=loss, tokens=1, lr=1e-2)
    student, _ = convert(teacher, spec.mixer.model_dump())
    stage = TransferStage(student, recipe_of(spec, **options), spec)
    return student, set_up(student, stage)


def finetune(teacher, reference=None, freeze=("embeddings",), mixer=None, loss=None, **options):
    """(student, its finetune stage), set up to train; `reference` is the teacher of kl and hidden."""
    spec = Finetune(
        mixer=Mixer(name="hedgemamba", **(mixer or {})),
        loss=FinetuneLoss(**(loss or {})),
        freeze=list(freeze),
        tokens=1,
        lr=3e-4,
    )
    student, _ = convert(teacher, spec.mixer.model_dump())
    stage = FinetuneStage(student, recipe_of(spec, **options), spec, reference)
    return student, set_up(student, stage)


def set_up(student, stage):
    trainable = stage.trainable()
    for name, parameter in student.named_parameters():
        parameter.requires_grad_(name in trainable)
    stage.start()
    return stage


def steps(stage, count: int, lr: float = 1e-2, batch=random_batch) -> list[float]:
    """The losses of `count` optimiser steps, each over a batch of its own."""
    optimizer = torch.optim.AdamW(stage.trainable().values(), lr=lr, weight_decay=0)
    history = []
    for step in range(count):
        piece = batch(step)
        history.append(stage.backward(piece, stage.count(piece))["loss"])
        optimizer.step()
        optimizer.zero_grad()
    return history


def changed(model, before: dict[str, str]) -> set[str]:
    after = fingerprint(model.state_dict())
    return {name for name in before if before[name] != after[name]}


@pytest.mark.parametrize("window", [0, 5])
def test_transfer_trains_the_feature_maps_alone(tiny_teacher, window):
    student, stage = transfer(tiny_teacher("llama"), window=window)
    before = fingerprint(student.state_dict())
    steps(stage, 5)
    parts = (".mixer.feature_q.", ".mixer.feature_k.", *([".mixer.older."] if window else []))
    assert changed(student, before) == {name for name in before if any(part in name for part in parts)}


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_sees_the_teachers_stream(tiny_teacher, family, reset):
    """During transfer the model returns the teacher's logits."""
    teacher, batch = tiny_teacher(family), random_batch()
    student, stage = transfer(teacher, reset_documents=reset)
    with torch.no_grad():
        expected = teacher(**teacher_inputs(batch, reset), use_cache=False).logits
        actual = student(**model_inputs(batch, reset), use_cache=False).logits
        stage.stop()
        after = student(**model_inputs(batch, reset), use_cache=False).logits
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)
    assert (after - expected).abs().max() > 1e-2


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("loss", ["cosine", "mse", "attention"])
def test_transfer_learns(tiny_teacher, loss, window, reset):
    student, stage = transfer(tiny_teacher("llama"), loss, window, reset_documents=reset)
    held_out = random_batch(seed=99, rows=8)
    figures = stage.evaluate(held_out)
    before = figures["loss"]
    layers = [value for name, value in figures.items() if name.startswith("layer ")]
    assert len(layers) == 2 and layers[0] != layers[1] and sum(layers) / 2 == pytest.approx(before, rel=1e-5)
    history = steps(stage, 30)
    assert sum(history[-5:]) < 0.95 * sum(history[:5])
    assert stage.evaluate(held_out)["loss"] < 0.95 * before
    assert all(p.grad is None or not p.grad.any() for p in student.parameters())


def test_layers_are_learnt_apart(tiny_teacher):
    """No graph across layers: nothing but the mixers' own loss is differentiable, and it is each layer's own."""
    teacher = tiny_teacher("llama")
    student, stage = transfer(teacher)
    entering: list[bool] = []
    for layer in student.backbone.model.layers:
        layer.register_forward_pre_hook(lambda m, args: entering.append(args[0].requires_grad))
    stage.backward(random_batch(), 1)
    assert entering == [False, False]
    first = mixer_attentions(student)[0].mixer.feature_q.weight
    other, other_stage = transfer(teacher)
    with torch.no_grad():
        mixer_attentions(other)[1].mixer.feature_k.weight.add_(1.0)
    other_stage.backward(random_batch(), 1)
    torch.testing.assert_close(mixer_attentions(other)[0].mixer.feature_q.weight.grad, first.grad)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_document_has_the_target_it_would_have_alone(tiny_teacher, family, monkeypatch):
    """Packed documents: positions start anew and no token sees another document, in the stage-1 target as well as in
    the teacher of stage 2."""
    targets: list[torch.Tensor] = []

    def record(*args, **kwargs):
        output, weights = original(*args, **kwargs)
        targets.append(output)
        return output, weights

    original = stages.softmax_attention
    monkeypatch.setattr(stages, "softmax_attention", record)
    teacher = tiny_teacher(family)
    _, stage = transfer(teacher, reset_documents=True)
    packed = random_batch()
    alone = {name: x[:, 7:19] for name, x in packed.items()}
    alone = {"input_ids": alone["input_ids"][:1], "document_ids": torch.zeros(1, 12, dtype=torch.long)}
    for batch in (packed, alone):
        stage.evaluate(batch)
    layers = len(targets) // 2
    for together, own in zip(targets[:layers], targets[layers:], strict=True):
        torch.testing.assert_close(together[:1, 7:19], own, rtol=0, atol=1e-5)
    with torch.no_grad():
        together, own = (teacher(**teacher_inputs(b, True), use_cache=False).logits for b in (packed, alone))
    torch.testing.assert_close(together[:1, 7:19], own, rtol=0, atol=1e-5)


def test_stopping_leaves_a_model_that_builds_no_masks(tiny_teacher):
    student, stage = transfer(tiny_teacher("llama"))
    assert student.backbone.config._attn_implementation == MASKED
    stage.stop()
    assert student.backbone.config._attn_implementation == MASKLESS
    assert all(attention.observer is None for attention in mixer_attentions(student))


ALL_LOSSES = {"cross_entropy": 1.0, "kl": 0.5, "hidden": 0.5, "temperature": 2.0}


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("loss", ["cosine", "mse", "attention", "finetune"])
def test_micro_batches_add_up_to_the_batch(tiny_teacher, randomise, loss, reset):
    teacher, batch = tiny_teacher("llama"), random_batch(rows=4)
    gradients, values = [], []
    for size in (4, 1):
        if loss == "finetune":
            student, stage = finetune(teacher, teacher, loss=ALL_LOSSES, reset_documents=reset)
        else:
            student, stage = transfer(teacher, loss, reset_documents=reset)
        randomise(student)
        total = stage.count(batch)
        values.append(sum(stage.backward(piece, total)["loss"] for piece in split(batch, size)))
        gradients.append({name: p.grad for name, p in student.named_parameters() if p.grad is not None})
    assert values[0] == pytest.approx(values[1], rel=1e-5)
    assert gradients[0].keys() == gradients[1].keys() and gradients[0]
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-4, atol=1e-6, msg=name)


def test_finetune_leaves_the_embeddings_and_the_tied_head(tiny_teacher):
    student, stage = finetune(tiny_teacher("llama"))
    before = fingerprint(student.state_dict())
    steps(stage, 5)
    frozen = {"backbone.model.embed_tokens.weight", "backbone.lm_head.weight"}
    assert changed(student, before) == set(before) - frozen
    assert student.get_output_embeddings().weight is student.get_input_embeddings().weight


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("window", [0, 5])
def test_every_new_parameter_gets_a_gradient(tiny_teacher, family, window):
    student, stage = finetune(tiny_teacher(family), freeze=[], mixer={"window": window, "share": "none"})
    stage.backward(random_batch(), 1)
    new = {name: p.grad for name, p in student.named_parameters() if ".mixer." in name}
    assert any(name.endswith("decay.rate") for name in new)
    assert [name for name, grad in new.items() if grad is None or not grad.any()] == []


def test_decay_learns_from_zero(tiny_teacher):
    """At the default learning rate, where only the token before matters, a token's weight falls by more than 1 %
    from one token to the next within 300 steps."""

    def repeating(seed):
        ids = random_batch(seed)["input_ids"].repeat_interleave(2, dim=1)[:, :LENGTH]
        return {"input_ids": ids, "document_ids": torch.zeros_like(ids)}

    student, stage = finetune(tiny_teacher("llama"))
    decays = [attention.mixer.decay for attention in mixer_attentions(student)]
    assert not any(decay.rate.any() for decay in decays)
    kept, done = 1.0, 0
    while kept > 0.99 and done < 300:
        steps(stage, 30, lr=3e-4, batch=repeating)
        done += 30
        kept = min(math.exp(-decay.rate.max().item()) for decay in decays)  # dt starts at 1
    assert kept < 0.99


@pytest.mark.parametrize("loss", [{"kl": 1.0}, {"cross_entropy": 0.0, "hidden": 1.0}])
def test_comparing_with_a_teacher_needs_one(tiny_teacher, loss):
    teacher = tiny_teacher("llama")
    with pytest.raises(UserError, match="the teacher, which this run does not have"):
        finetune(teacher, None, loss=loss)
    _, stage = finetune(teacher, teacher, loss=loss)
    assert set(stage.backward(random_batch(), 1)) == {"loss", *(name for name, weight in loss.items() if weight)} | (
        {"cross_entropy"} if "cross_entropy" not in loss else set()
    )


def test_distillation_losses_are_zero_against_itself(tiny_teacher):
    """The student's own logits and hidden states as the teacher's."""
    student, stage = finetune(tiny_teacher("llama"), tiny_teacher("llama"), loss={**ALL_LOSSES, "cross_entropy": 0.0})
    apart = stage.backward(random_batch(), 10)
    stage.teacher = student
    same = stage.backward(random_batch(), 10)
    assert min(apart["kl"], apart["hidden"]) > 1e-2
    assert max(abs(same["kl"]), abs(same["hidden"])) < 1e-6


LARGER = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6}


def test_hidden_loss_against_a_larger_teacher_falls(tiny_teacher):
    """Width 32 and 2 layers beside width 48 and 3: the fit starts it lower than the identity, training lowers it on
    text that neither has seen, and the student takes part."""
    teacher = tiny_teacher("llama", seed=1, initializer_range=0.1, **LARGER)
    held_out = random_batch(seed=99, rows=8)

    def measure(stage):
        with torch.no_grad():
            return float(stage._terms(held_out, stage.count(held_out))["hidden"])

    loss = {"cross_entropy": 0.0, "hidden": 1.0}
    _, stage = finetune(tiny_teacher("llama", initializer_range=0.1), teacher, loss=loss, freeze=[])
    plain = measure(stage)
    stage.fit_projector(random_batch(n, rows=8) for n in range(50, 58))
    fitted, kept = measure(stage), [p.detach().clone() for p in stage.extra.parameters()]
    steps(stage, 80, lr=3e-3)
    trained = measure(stage)
    assert 0.9 * plain > fitted > 1.1 * trained
    assert all(p.grad is None for p in teacher.parameters())
    assert not any(torch.equal(p, before) for p, before in zip(stage.extra.parameters(), kept, strict=True))
    with torch.no_grad():
        for parameter, before in zip(stage.extra.parameters(), kept, strict=True):
            parameter.copy_(before)
    assert measure(stage) < fitted


def test_what_trains_with_a_projector(tiny_teacher):
    teacher = tiny_teacher("llama", seed=1, **LARGER)
    student, stage = finetune(tiny_teacher("llama"), teacher, loss=ALL_LOSSES)
    without = finetune(tiny_teacher("llama"), teacher, loss={"kl": 1.0})[1]
    extra = 2 * (32 * 48 + 48)
    assert without.extra is None and sum(p.numel() for p in stage.extra.parameters()) == extra
    trainable, frozen = (parameter_counts(student, without)[i] for i in (0, 2))
    assert parameter_counts(student, stage) == (trainable + extra, extra, frozen)
    assert frozen == 50 * 32 and set(stage.trainable()) - set(without.trainable()) == {
        f"projector.{kind}.{i}" for kind in ("weights", "biases") for i in (0, 1)
    }
    assert not any("projector" in name for name in student.state_dict())
    assert not transfer(teacher)[1].extra


def test_micro_batches_add_up_for_the_projector(tiny_teacher):
    teacher, batch = tiny_teacher("llama", seed=1, **LARGER), random_batch(rows=4)
    gradients = []
    for size in (4, 1):
        _, stage = finetune(tiny_teacher("llama"), teacher, loss=ALL_LOSSES)
        stage.fit_projector(split(batch, size))
        for piece in split(batch, size):
            stage.backward(piece, stage.count(batch))
        gradients.append([p.grad for p in stage.extra.parameters()])
    for one, two in zip(*gradients, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-5)
        assert one.any()


def vocabulary(shared, unknown=()) -> Vocabulary:
    return Vocabulary(torch.tensor(shared), torch.tensor(unknown, dtype=torch.long))


@pytest.mark.parametrize(("ours", "theirs"), [(50, 56), (56, 50), (56, 56), (56, 60)])
def test_padding_rows_take_no_part_in_the_kl(tiny_teacher, ours, theirs):
    """Of 50 ids; the cross-entropy, whose softmax has all of the student's rows, pushes its padding down."""
    base, teacher = tiny_teacher("gpt_neox", vocab_size=ours), tiny_teacher("gpt_neox", seed=1, vocab_size=theirs)
    found = []
    for boost in (0.0, 100.0):
        with torch.no_grad():
            for model in (base, teacher):
                model.get_output_embeddings().weight[50:] += boost
        student, _ = convert(base, {"name": "hedgemamba"})
        spec = Finetune(mixer=Mixer(name="hedgemamba"), loss=FinetuneLoss(kl=1), freeze=[], tokens=1, lr=1)
        stage = set_up(student, FinetuneStage(student, recipe_of(spec), spec, teacher, vocabulary(range(50))))
        values = stage.backward(random_batch(), stage.count(random_batch()))
        found.append((values["kl"], student.get_output_embeddings().weight.grad[50:]))
        assert math.isfinite(values["kl"]) and values["kl"] > 1e-2
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-4)
    assert found[0][1].any() == (ours > 50)
    only_kl = stage._terms(random_batch(), 1)["kl"]
    student.zero_grad()
    only_kl.backward()
    assert not student.get_output_embeddings().weight.grad[50:].any()


def test_after_an_id_that_the_teacher_does_not_know_it_has_no_say(tiny_teacher):
    """It has no row for id 45 or above; what stands before is compared as ever."""
    teacher = tiny_teacher("llama", seed=1, vocab_size=45)
    batch = {name: x[:, :8] for name, x in random_batch(rows=1).items()}
    batch["input_ids"] = batch["input_ids"] % 45
    spec = Finetune(mixer=Mixer(name="hedgemamba"), loss=FinetuneLoss(**ALL_LOSSES), tokens=1, lr=1)
    student, _ = convert(tiny_teacher("llama"), spec.mixer.model_dump())
    known = vocabulary(range(45), range(45, 50))
    stage = FinetuneStage(student, recipe_of(spec), spec, teacher, known)
    changed = {**batch, "input_ids": batch["input_ids"].clone()}
    changed["input_ids"][0, 5] = 47
    with torch.no_grad():
        short = stage._terms({name: x[:, :6] for name, x in batch.items()}, 10)
        terms = stage._terms(changed, 10)
    for name in ("kl", "hidden"):
        torch.testing.assert_close(terms[name], short[name])
    assert terms["cross_entropy"] > short["cross_entropy"]


@pytest.mark.parametrize("build", [transfer, finetune])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_weights_are_refused(tiny_teacher, build, dtype):
    with pytest.raises(UserError, match="training needs fp32 weights"):
        build(tiny_teacher("llama").to(dtype))


@pytest.mark.parametrize(("kind", "count"), [("transfer", 40), ("attention", 40), ("finetune", 100)])
def test_autocast_trains_like_fp32(tiny_teacher, kind, count):
    def last(precision):
        teacher = tiny_teacher("llama")
        if kind == "finetune":
            _, stage = finetune(teacher, teacher, loss=ALL_LOSSES, precision=precision)
        else:
            _, stage = transfer(teacher, "cosine" if kind == "transfer" else kind, precision=precision)
        return sum(steps(stage, count, lr=1e-3)[-3:])

    exact, rounded = last("fp32"), last("bf16")
    assert exact != rounded == pytest.approx(exact, rel=0.02)


def test_held_out_loss_is_the_models_without_dropout(tiny_teacher):
    student, stage = finetune(tiny_teacher("gpt2", resid_pdrop=0.5, embd_pdrop=0.5))
    assert student.training
    batch = random_batch()
    state = torch.get_rng_state()
    loss = stage.evaluate(batch)["loss"]
    assert student.training and torch.equal(torch.get_rng_state(), state)
    student.eval()
    labels = losses.next_token_labels(batch["input_ids"], None)
    with torch.no_grad():
        expected = losses.cross_entropy(student(batch["input_ids"], use_cache=False).logits, labels, 1)
    assert loss == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize("reset", [False, True])
def test_tokens_that_carry_loss(tiny_teacher, reset):
    teacher, batch = tiny_teacher("llama"), random_batch()
    assert transfer(teacher, reset_documents=reset)[1].count(batch) == 2 * LENGTH
    assert finetune(teacher, reset_documents=reset)[1].count(batch) == 2 * (LENGTH - (3 if reset else 1))
