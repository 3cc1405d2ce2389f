"""Recall measures: who knows the answer is right, who does not is not, and sharing a reading changes nothing."""

import json
import math
import re
from random import Random
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from attn2mamba.convert import convert
from attn2mamba.errors import UserError
from attn2mamba.evaluate import reading as reading_module
from attn2mamba.evaluate.calibration import calibrate
from attn2mamba.evaluate.measure import Subject
from attn2mamba.evaluate.options import SuiteOptions
from attn2mamba.evaluate.reading import Reading, cache_bytes, check_context, first_ids, token_ids
from attn2mamba.evaluate.recall import TASKS, Question, make_item
from attn2mamba.evaluate.recall_measures import DEPTHS, MEASURES, Recall, Strings, among_best, answer
from attn2mamba.evaluate.recall_text import WORDS, sentences
from attn2mamba.evaluate.token_strings import Vocabulary
from attn2mamba.sizes import kv_bytes, state_bytes
from attn2mamba.student.attention import mixer_attentions
from attn2mamba.student.configuration_attn2mamba import Attn2MambaConfig

TOKENS = 620


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE whose vocabulary holds the tasks' words as one token each; `<eos>` is id 0."""
    draw = Random(0)
    texts = [next(sentences(draw)) for _ in range(400)]
    texts += [f"The secret word for {word} is {word}. the {word}, {word}" for word in WORDS] * 4
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options = {"special_tokens": ["<eos>"], "initial_alphabet": alphabet, "show_progress": False}
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=1500, **options))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


class Output(dict):
    __getattr__ = dict.__getitem__


class Ids(list):
    """The cache of `Scripted`: all ids read."""

    layers = ()


class Scripted(torch.nn.Module):
    """A causal LM whose next token is `script(all ids so far)`."""

    def __init__(self, vocab_size, script, cached=True):
        super().__init__()
        self.config = SimpleNamespace(vocab_size=vocab_size, max_position_embeddings=700, model_type="scripted")
        self.device, self.dtype, self.script, self.cached = torch.device("cpu"), torch.float32, script, cached

    def get_input_embeddings(self):
        return None

    def forward(self, input_ids, use_cache, logits_to_keep, past_key_values=()):
        seen, logits = Ids(past_key_values), torch.zeros(1, input_ids.shape[1], self.config.vocab_size)
        wanted = input_ids.shape[1] - (logits_to_keep or input_ids.shape[1])
        for i, token in enumerate(input_ids[0].tolist()):
            seen.append(token)
            if i >= wanted:
                logits[0, i, self.script(seen)] = 20.0
        cache = seen if self.cached else None
        return Output(logits=logits[:, -logits_to_keep:], past_key_values=cache)


def subject(model, tokenizer):
    return Subject("teacher", "name", model, tokenizer, "fp32", "fingerprint")


def scripted(tokenizer, script, **options):
    return subject(Scripted(len(tokenizer), script, **options), tokenizer)


@pytest.fixture(scope="module", params=["teacher", "student", "windowed", "hybrid", "sliding"])
def real(request, tiny_teacher, tokenizer, randomise):
    """A random tiny model of each kind."""
    family = "gemma3_text" if request.param == "sliding" else "llama"
    model = tiny_teacher(family, vocab_size=len(tokenizer))
    if request.param in ("student", "windowed", "hybrid"):
        mixer = {"name": "hedgemamba", "window": 5 if request.param == "windowed" else 0}
        model = randomise(convert(model, mixer, [1] if request.param == "hybrid" else [])[0]).eval()
    return subject(model, tokenizer)


@torch.no_grad()
def direct(model, ids) -> torch.Tensor:
    """Logits (n, V) of one plain forward."""
    return model(torch.tensor([ids]), use_cache=False).logits[0].float()


def draw(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 250, (count,), generator=generator).tolist()


@pytest.mark.parametrize("piece", [7, 64, 1000])
def test_reading_in_pieces_is_reading_at_once(real, piece):
    ids = draw(200)
    expected = direct(real.model, ids)
    reading = Reading(real.model)
    reading.piece = piece
    reading.read(ids[:90])
    torch.testing.assert_close(reading.logits, expected[89], atol=1e-4, rtol=0)
    likelihoods, likeliest = reading.follow(ids[90:])
    targets = expected.log_softmax(-1)[89:-1].gather(1, torch.tensor(ids[90:]).unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(likelihoods, targets, atol=1e-4, rtol=0)
    assert likeliest.tolist() == expected[89:-1].argmax(-1).tolist()
    torch.testing.assert_close(reading.logits, expected[-1], atol=1e-4, rtol=0)


def test_a_shared_reading_equals_separate_ones(real):
    context, questions = draw(150), [draw(9, seed) for seed in (1, 2, 3)]
    shared = Reading(real.model).read(context)
    before = shared.logits.clone()
    for question in [*questions, questions[0]]:
        branch = shared.copy().read(question)
        alone = Reading(real.model).read(context).read(question)
        assert torch.equal(branch.logits, alone.logits)
        torch.testing.assert_close(branch.logits, direct(real.model, context + question)[-1], atol=1e-4, rtol=0)
        assert branch.greedy(5) == alone.greedy(5)
    assert torch.equal(shared.logits, before)


def test_greedy_equals_generate(real):
    ids = draw(60)
    generated = real.model.generate(
        torch.tensor([ids]), attention_mask=torch.ones(1, 60), max_new_tokens=6, do_sample=False, eos_token_id=None
    )
    assert Reading(real.model).read(ids).greedy(6) == generated[0, 60:].tolist()


def test_likelihoods_of_continuations(real):
    """Of one token and of several; the reading stays where it is."""
    ids, continuations = draw(40), [[5], [6], [7, 8, 9], [7, 9]]
    reading = Reading(real.model).read(ids)
    found = reading.log_likelihoods(continuations)
    assert found == reading.log_likelihoods(continuations)
    for continuation, likelihood in zip(continuations, found, strict=True):
        logits = direct(real.model, ids + continuation).log_softmax(-1)
        expected = sum(float(logits[39 + i, token]) for i, token in enumerate(continuation))
        assert likelihood == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("task", ["multikey", "tracking"])
def test_questions_about_one_context_are_scored_as_if_alone(real, task):
    """The whole measure: each question after a reading of its own gives the unit's scores."""
    measure = Recall(task, [TOKENS], 1, 0)
    (unit,) = measure.units(real)
    result = measure.run(real, unit)
    item = make_item(task, real.tokenizer, TOKENS, 0, 0)
    for index, question in enumerate(item.questions[:2]):
        reading = Reading(real.model).read(token_ids(real.tokenizer, item.context))
        scores = answer(reading, real, question)
        assert scores == {form: result["scores"][f"{form}@{TOKENS}"][index] for form in scores}


@pytest.mark.parametrize("task", TASKS)
def test_every_task_gives_both_scores(tokenizer, task):
    measure, silent = Recall(task, [900], 1, 0), scripted(tokenizer, lambda ids: 0)
    unit = measure.units(silent)[0]
    result = measure.run(silent, unit)
    assert result == measure.run(silent, unit)
    assert set(result["scores"]) == {"greedy@900", "likelihood@900"}
    assert {len(scores) for scores in result["scores"].values()} == {len(result["depths"])}
    assert {score for scores in result["scores"].values() for score in scores} == {0.0}


def look_up(tokenizer, statement: str):
    """The script of a model that finds the answer by `statement`, in which {} is the key of the question."""

    def script(ids: list[int]) -> int:
        text = tokenizer.decode(ids)
        question = re.search(r"The secret word for (\w+) is$", text)
        found = question and re.search(statement.format(question[1]), text)
        return token_ids(tokenizer, f" {found[1]}")[0] if found else 0

    return script


KNOWS, GUESSES = r"The secret word for {} is (\w+)\.", r"The secret (word) for {}"


@pytest.mark.parametrize("task", ["needle", "multikey"])
@pytest.mark.parametrize(("statement", "right"), [(KNOWS, 1.0), (GUESSES, 0.0)])
def test_a_model_that_reads_is_right_and_one_that_guesses_is_not(tokenizer, task, statement, right):
    measure, reader = Recall(task, [TOKENS], 1, 0), scripted(tokenizer, look_up(tokenizer, statement))
    results = {unit: measure.run(reader, unit) for unit in measure.units(reader)[:2]}
    for metric, figure in measure.figures(results).items():
        assert figure.value == right, metric
    assert {cell["accuracy"] for cell in measure.cells(results)} == {right}


class Says:
    """A reading that likes some words, and writes a text."""

    def __init__(self, tokenizer, likes: dict[str, float], text: str) -> None:
        self.tokenizer, self.likes, self.text = tokenizer, likes, text

    def read(self, ids):
        return self

    def log_likelihoods(self, continuations):
        return [self.likes.get(self.tokenizer.decode(ids).strip(), -9.0) for ids in continuations]

    def greedy(self, count):
        return token_ids(self.tokenizer, self.text)[:count]


@pytest.mark.parametrize(
    ("likes", "text", "greedy", "likelihood"),
    [
        ({"lion": -1, "wolf": -2}, " lion, wolf", 1.0, 1.0),
        ({"lion": -1, "rose": -2, "wolf": -3}, " wolf and lion", 1.0, 0.5),
        ({"rose": -1, "salt": -2}, " wolf, lioness", 0.5, 0.0),
        ({}, " lions", 0.0, 0.0),
        ({"lion": math.nan, "wolf": math.nan}, "", math.nan, math.nan),
    ],
)
def test_scores_of_a_question(tokenizer, likes, text, greedy, likelihood):
    question = Question("Which?", ("lion", "wolf"), ("lion", "wolf", "rose", "salt"))
    scores = answer(Says(tokenizer, likes, text), SimpleNamespace(tokenizer=tokenizer), question)
    assert scores == pytest.approx({"greedy": greedy, "likelihood": likelihood}, nan_ok=True)


def test_a_tie_is_no_recall():
    assert among_best({"a": 1.0, "b": 0.0, "c": 0.0}, "a", 1)
    assert not among_best({"a": 1.0, "b": 1.0, "c": 0.0}, "a", 1)
    assert among_best({"a": 1.0, "b": 1.0, "c": 0.0}, "a", 2)


def test_cells_by_length_and_depth(tokenizer):
    reader = scripted(tokenizer, look_up(tokenizer, KNOWS))
    measure = Recall("needle", [720, TOKENS], 2, 0)
    units = measure.units(reader)
    assert len(units) == len(set(units)) == 2 * 2 * len(DEPTHS)
    results = {unit: measure.run(reader, unit) for unit in units if unit.endswith(("/0.0", "/0.5"))}
    cells = measure.cells(json.loads(json.dumps(results)))
    assert len(cells) == 2 * 2 * 2
    for cell in cells:
        assert cell["n"] == 2 and cell["accuracy"] == 1.0 and cell["task"] == "needle"
        assert cell["beyond_training"] == (cell["tokens"] == 720)
        assert cell["chance"] == (0.0 if cell["form"] == "greedy" else 1 / 16)
    assert {(cell["tokens"], cell["depth"]) for cell in cells} == {(n, d) for n in (TOKENS, 720) for d in (0.0, 0.5)}


def test_cells_count_answers(tokenizer):
    """Of questions with several, so that chance can be told from knowledge."""
    measure, reader = Recall("multivalue", [TOKENS], 2, 0), scripted(tokenizer, lambda ids: 0)
    results = {unit: measure.run(reader, unit) for unit in measure.units(reader)}
    assert {figure.n for figure in measure.figures(results).values()} == {2}
    assert [cell["n"] for cell in measure.cells(results)] == [8, 8]


def induction(ids: list[int]) -> int:
    """What followed the last token where it last came before."""
    before = [i for i, token in enumerate(ids[:-1]) if token == ids[-1]]
    return ids[before[-1] + 1] if before else 0


def induction_of_two(ids: list[int]) -> int:
    """The same for the last two tokens."""
    before = [i for i in range(1, len(ids) - 1) if ids[i - 1 : i + 1] == ids[-2:]]
    return ids[before[-1] + 1] if before else 0


@pytest.mark.parametrize(
    ("name", "script", "least", "most"),
    [("copying", induction, 1, 1), ("associative", induction, 0, 0.3), ("associative", induction_of_two, 1, 1)],
)
def test_strings_by_distance(tokenizer, name, script, least, most):
    """Copying is what induction over one token does; a pair needs its key, which stands before the colon."""
    measure, reader = Strings(name, [300], 1, 0), scripted(tokenizer, script)
    units = measure.units(reader)
    distances = {64, 128, 256}
    assert {int(unit.split("/")[1]) for unit in units} == distances
    results = {unit: measure.run(reader, unit) for unit in units}
    for cell in (cells := measure.cells(json.loads(json.dumps(results)))):
        assert cell["n"] == (31 if name == "copying" else cell["size"])
        assert cell["chance"] == 1 / cell["size"] and not cell["beyond_training"]
        assert least <= cell["accuracy"] <= most
    assert {cell["distance"] for cell in cells} == distances
    assert set(measure.figures(results)) == {f"accuracy@{distance}" for distance in distances}


def test_strings_are_scored_as_one_forward_scores_them(real):
    measure = Strings("associative", [300], 1, 0)
    unit = measure.units(real)[0]
    size, distance, _ = map(int, unit.split("/"))
    result = measure.run(real, unit)
    string = measure.make(Random(f"associative 0 {unit}"), Vocabulary.of(real.tokenizer), size, distance)
    predicted = direct(real.model, list(string.ids)).argmax(-1)
    right = sum(int(predicted[i - 1]) == string.ids[i] for i in string.scored)
    assert result["scores"] == {f"accuracy@{distance}": [right / size]}


def test_the_bos_stands_before_everything(tiny_teacher, bos_tokenizer, monkeypatch):
    bos = subject(tiny_teacher("llama", vocab_size=len(bos_tokenizer)), bos_tokenizer)
    assert first_ids(bos_tokenizer) == [bos_tokenizer.bos_token_id]
    seen = []
    read = Reading.read
    monkeypatch.setattr(Reading, "read", lambda self, ids: seen.append(list(ids)) or read(self, ids))
    for measure in (Recall("needle", [700], 1, 0), Strings("copying", [200], 1, 0)):
        seen.clear()
        measure.run(bos, "700/0/0.5" if measure.name == "needle" else "32/64/0")
        assert seen[0][0] == bos_tokenizer.bos_token_id
        assert all(bos_tokenizer.bos_token_id not in ids[i == 0 :] for i, ids in enumerate(seen))


def test_cache_sizes(real):
    """As `sizes` reckons them for a conversion, sliding windows included."""
    config = real.model.config
    if isinstance(config, Attn2MambaConfig):
        expected = state_bytes(config) + kv_bytes(config, 100, kept_only=True)
        assert expected < kv_bytes(config, 100) or mixer_attentions(real.model)
    else:
        expected = kv_bytes(convert(real.model)[0].config, 100)
    assert cache_bytes(real.model, 100) == expected


def test_a_context_must_fit_into_memory(real, monkeypatch):
    need = 2 * cache_bytes(real.model, 4096)
    monkeypatch.setattr(reading_module, "free_bytes", lambda device: need)
    check_context(real.model, 4096)
    monkeypatch.setattr(reading_module, "free_bytes", lambda device: need - 1)
    message = "a context of 4,096 tokens takes .* use a shorter context"
    for name in ("needle", "associative"):
        with pytest.raises(UserError, match=message):
            MEASURES[name](SuiteOptions(context=(1024, 4096))).units(real)


def test_a_context_must_have_positions(tiny_teacher, tiny_tokenizer):
    gpt2 = subject(tiny_teacher("gpt2", n_positions=64, vocab_size=len(tiny_tokenizer)), tiny_tokenizer)
    with pytest.raises(UserError, match="positions for 64 tokens, not 65"):
        check_context(gpt2.model, 65)


def test_a_model_without_a_cache_is_refused(tokenizer):
    stateless = scripted(tokenizer, induction, cached=False)
    with pytest.raises(UserError, match="Scripted keeps no cache to read on from"):
        Reading(stateless.model).read([1])


def test_words_of_several_tokens(tiny_teacher, tiny_tokenizer):
    """Where a vocabulary has no words, candidates are compared by all of their tokens."""
    spelling = subject(tiny_teacher("llama", vocab_size=len(tiny_tokenizer)), tiny_tokenizer)
    item = make_item("needle", tiny_tokenizer, 700, 0, 0, 0.5)
    (question,) = item.questions
    context, asked = (token_ids(tiny_tokenizer, text) for text in (item.context, question.text))
    reading = Reading(spelling.model).read(context)
    words = [token_ids(tiny_tokenizer, f" {word}") for word in question.candidates]
    assert min(map(len, words)) > 1
    found = []
    for ids in words:
        logits = direct(spelling.model, context + asked + ids).log_softmax(-1)
        start = len(context) + len(asked) - 1
        found.append(sum(float(logits[start + i, token]) for i, token in enumerate(ids)))
    right = found[question.candidates.index(question.answers[0])] == max(found)
    assert answer(reading.copy(), spelling, question)["likelihood"] == float(right)
    assert reading.read(asked).log_likelihoods(words) == pytest.approx(found, abs=1e-3)


def test_strings_need_some_room(real):
    with pytest.raises(UserError, match="a context of 64 tokens is too short for associative"):
        Strings("associative", [64], 1, 0).units(real)


def test_registry():
    assert set(MEASURES) == {*TASKS, "associative", "copying"}
    for name, make in MEASURES.items():
        measure = make(SuiteOptions(context=(2048, 1024), limit=3, seed=7))
        assert measure.name == name and measure.items == 3
        assert json.loads(json.dumps(measure.options()))["seed"] == 7
        assert measure.options() != make(SuiteOptions(context=(2048, 1024), limit=3, seed=8)).options()
        assert make(SuiteOptions()).items > 1


CELL = {"task": "needle", "form": "likelihood", "tokens": 1024, "chance": 0.25, "beyond_training": False}


def test_calibration_judges_a_length_by_all_of_its_depths():
    """16 answers, chance 1/4: above 0.25 + 2 sqrt(3/16/16) = 0.467 the teacher knows something."""
    student = [{**CELL, "depth": depth, "accuracy": 0.5, "n": 8} for depth in (0.0, 1.0)]
    for accuracies, fails in (((0.0, 0.9), True), ((0.1, 0.9), False)):
        teacher = [{**CELL, "depth": d, "accuracy": a, "n": 8} for d, a in zip((0.0, 1.0), accuracies, strict=True)]
        marked = calibrate(student, teacher)
        assert [cell["teacher"] for cell in marked] == list(accuracies)
        assert [cell["teacher_fails"] for cell in marked] == [fails, fails]
        assert [{k: v for k, v in cell.items() if not k.startswith("teacher")} for cell in marked] == student


def test_calibration_compares_equal_places_alone():
    cell = {**CELL, "depth": 0.5, "accuracy": 0.5, "n": 8}
    perplexity = {"context": 1024, "perplexity": 9.0, "n": 5}
    for other in ({"tokens": 2048}, {"form": "greedy"}, {"task": "multikey"}, {"depth": 0.0}):
        assert calibrate([cell, perplexity], [{**cell, **other}, perplexity]) == [cell, perplexity]
    guess = {"task": "tracking", "form": "greedy", "accuracy": 0.0, "n": 8}
    assert calibrate([guess], [guess])[0]["teacher_fails"]
    assert not calibrate([guess], [{**guess, "accuracy": 0.125}])[0]["teacher_fails"]
