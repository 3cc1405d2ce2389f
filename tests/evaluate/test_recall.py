"""Recall tasks: contexts as long as asked for, answers where and as often as promised, a function of the seed alone."""

import re
from random import Random

import pytest

from attn2mamba.errors import UserError
from attn2mamba.evaluate.reading import continuation_ids, token_ids
from attn2mamba.evaluate.recall import COMMON, NEEDLES, RARE, TASKS, VALUES, hide, make_item, usable_words
from attn2mamba.evaluate.recall_text import WORDS, names, passage, sentences
from attn2mamba.evaluate.token_strings import Vocabulary, associative, copying

LENGTHS = (2600, 3333)
ONCE = ("needle", "multikey", "multivalue", "distractors")


def occurrences(word: str, text: str) -> list[int]:
    return [found.start() for found in re.finditer(rf"\b{word}\b", text)]


def longest(tokenizer, item) -> int:
    """Tokens of the context with whichever question takes most."""
    asked = (len(token_ids(tokenizer, q.text)) + q.answer_tokens(tokenizer) for q in item.questions)
    return len(token_ids(tokenizer, item.context)) + max(asked)


@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("task", TASKS)
def test_contexts_have_the_length_asked_for(tiny_tokenizer, task, tokens):
    """With a tokenizer that has next to no words: a word more would be at most 15 tokens."""
    for index in range(2):
        item = make_item(task, tiny_tokenizer, tokens, 0, index, 0.5)
        assert tokens - 16 < longest(tiny_tokenizer, item) <= tokens


def test_the_start_token_counts(bos_tokenizer):
    with_bos = longest(bos_tokenizer, make_item("needle", bos_tokenizer, 800, 0, 0, 0.5))
    assert 800 - 16 < 1 + with_bos <= 800


@pytest.mark.parametrize("task", ONCE)
@pytest.mark.parametrize("seed", [0, 1, 2**40, -3])
def test_the_answer_is_there_once(tiny_tokenizer, task, seed):
    item = make_item(task, tiny_tokenizer, 2600, seed, 0, 0.25)
    for question in item.questions:
        for answer in question.answers:
            assert len(occurrences(answer, item.context)) == 1
            assert not occurrences(answer, question.text)


@pytest.mark.parametrize("task", TASKS)
def test_candidates(tiny_tokenizer, task):
    """All different, the answers among them; wrong ones are in the context exactly where the task says so."""
    item = make_item(task, tiny_tokenizer, 2600, 5, 0, 1.0)
    lured = task not in ("needle", "multivalue")
    for question in item.questions:
        assert len(set(question.candidates)) == len(question.candidates)
        assert set(question.answers) < set(question.candidates)
        assert question.chance == len(question.answers) / len(question.candidates)
        for wrong in set(question.candidates) - set(question.answers):
            assert bool(occurrences(wrong, item.context)) == lured


@pytest.mark.parametrize("depth", [0.0, 0.3, 0.5, 1.0])
def test_the_needle_lies_at_its_depth(tiny_tokenizer, depth):
    for index in range(3):
        item = make_item("needle", tiny_tokenizer, 4000, 1, index, depth)
        (question,) = item.questions
        (place,) = occurrences(question.answers[0], item.context)
        assert place / len(item.context) == pytest.approx(depth, abs=0.05)
        assert question.depth == depth


@pytest.mark.parametrize("task", ["multikey", "distractors"])
def test_questions_are_spread_over_all_depths(tiny_tokenizer, task):
    item = make_item(task, tiny_tokenizer, 8000, 1, 0)
    assert len(item.questions) == NEEDLES
    for question in item.questions:
        (place,) = occurrences(question.answers[0], item.context)
        assert place / len(item.context) == pytest.approx(question.depth, abs=0.07)


def test_values_belong_to_the_key_asked_for(tiny_tokenizer):
    item = make_item("multivalue", tiny_tokenizer, 2600, 2, 0)
    (question,) = item.questions
    (key,) = re.fullmatch(r"\s+The secret words for (\w+) are", question.text).groups()
    assert set(re.findall(rf"One of the secret words for {key} is (\w+)\.", item.context)) == set(question.answers)
    assert len(question.answers) == VALUES


def test_variables_resolve_to_the_number_asked_for(tiny_tokenizer):
    """The statements, executed in the order of the text."""
    for index in range(3):
        item = make_item("tracking", tiny_tokenizer, 2600, 2, index)
        values: dict[str, str] = {}
        for name, number, other in re.findall(r"variable (\w+) is set to (?:(\d+)|the value of (\w+))", item.context):
            values[name] = number or values[other]
        for question in item.questions:
            number = re.search(r"\d+", question.text)[0]
            assert {name for name, value in values.items() if value == number} == set(question.answers)
            assert set(values) == set(question.candidates)


@pytest.mark.parametrize("tokens", [560, 700, 4000])
def test_common_words_are_common(tiny_tokenizer, tokens):
    item = make_item("commonwords", tiny_tokenizer, tokens, 4, 0)
    (question,) = item.questions
    counts = {word: len(occurrences(word, item.context)) for word in WORDS}
    assert sum(count > 0 for count in counts.values()) == COMMON + RARE
    assert min(counts[word] for word in question.answers) >= 3 * max(
        count for word, count in counts.items() if word not in question.answers
    )


def test_passages_name_their_people(tiny_tokenizer):
    item = make_item("distractors", tiny_tokenizer, 4000, 3, 0)
    for question in item.questions:
        name = re.search(r"by (\w+ \w+) about", question.text)[1]
        assert f"{name} became known for a book about the {question.answers[0]}." in item.context
        assert item.context.count(f"{name} was born in") == 1


@pytest.mark.parametrize("task", TASKS)
def test_items_are_a_function_of_seed_and_index(tiny_tokenizer, task):
    def make(seed, index):
        return make_item(task, tiny_tokenizer, 2600, seed, index, 0.5)

    Random(9).random()
    assert make(0, 1) == make(0, 1)
    assert len({make(0, 0), make(0, 1), make(1, 0)}) == 3


@pytest.mark.parametrize("task", TASKS)
def test_too_short_a_context(tiny_tokenizer, task):
    with pytest.raises(UserError, match=f"40 tokens are too few for a context of {task}; use a longer context"):
        make_item(task, tiny_tokenizer, 40, 0, 0, 0.5)


def test_words_of_one_token_are_preferred(tiny_tokenizer, monkeypatch):
    assert usable_words(tiny_tokenizer) == list(WORDS)
    few = set(WORDS[: COMMON + RARE])
    monkeypatch.setattr(
        "attn2mamba.evaluate.recall.continuation_ids",
        lambda tokenizer, text, word: [1] if word.strip() in few else [1, 2],
    )
    assert set(usable_words(tiny_tokenizer)) == few


def test_nothing_hidden_occurs_in_the_filler():
    draw = Random(0)
    people, texts = names(draw), sentences(draw)
    assert len(set(people)) == 900
    filler = " ".join([*(next(texts) for _ in range(5000)), *(passage(draw, name, "TOPIC") for name in people)])
    assert not set(WORDS) & set(re.findall(r"\w+", filler.lower()))
    assert len(set(WORDS)) == len(WORDS)


def test_hiding_keeps_needles_in_order_and_whole():
    filler = ["one two three four.", "five six seven eight.", "nine ten eleven twelve."]
    needles = [(0.0, "A"), (0.5, "B"), (0.5, "C"), (1.0, "D")]

    def fill(words):
        return hide(needles, filler, " ", words, lambda text: len(text.split()))

    assert fill(3) is None
    assert fill(4) == "A B C D"
    assert fill(12) == "A one two three four. B C five six seven eight. D"
    assert fill(14) == "A one two three four. five six seven eight. B C nine ten. D"
    assert fill(15) == "A one two three four. five six seven eight. B C nine ten eleven. D"


@pytest.fixture(scope="module")
def vocabulary(tiny_tokenizer):
    return Vocabulary.of(tiny_tokenizer)


@pytest.mark.parametrize(("pairs", "distance"), [(8, 32), (8, 33), (8, 34), (4, 500), (32, 128)])
def test_associative_recall(vocabulary, pairs, distance):
    string = associative(Random("a"), vocabulary, pairs, distance)
    step = vocabulary.pair
    assert step == 4 and len(string.ids) == distance + pairs * step and len(string.scored) == pairs
    first = {string.ids[i * step]: (i * step, string.ids[i * step + 2]) for i in range(pairs)}
    assert len(first) == pairs and len({value for _, value in first.values()}) == pairs
    distances = []
    for position in string.scored:
        place, value = first[string.ids[position - 2]]
        assert string.ids[position] == value
        assert string.ids.count(value) == 2
        distances.append(position - 2 - place)
    assert sum(distances) / pairs == distance
    assert max(abs(d - distance) for d in distances) < pairs * step
    assert string == associative(Random("a"), vocabulary, pairs, distance)


@pytest.mark.parametrize(("length", "distance"), [(16, 16), (16, 17), (32, 300)])
def test_copying(vocabulary, length, distance):
    string = copying(Random("a"), vocabulary, length, distance)
    assert len(string.ids) == distance + length and len(string.scored) == length - 1
    for position in string.scored:
        assert string.ids[position] == string.ids[position - distance]
        assert string.ids.count(string.ids[position]) == 2
    assert string != copying(Random("b"), vocabulary, length, distance)


def test_words_come_from_the_vocabulary(tiny_tokenizer, monkeypatch):
    vocabulary = Vocabulary.of(tiny_tokenizer)
    assert tiny_tokenizer.eos_token_id not in vocabulary.words
    assert not set(vocabulary.words) & {*continuation_ids(tiny_tokenizer, "a", ":\n")}
    monkeypatch.setattr("attn2mamba.evaluate.token_strings.ENOUGH", 3)
    words = [tiny_tokenizer.decode([i]) for i in Vocabulary.of(tiny_tokenizer).words]
    assert " the" in words and all(re.fullmatch(" [a-z]{3,}", word) for word in words)
