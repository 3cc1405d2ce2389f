"""Conversations in JSON: right and wrong calls, state over turns, what the model sees."""

import json
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from attn2mamba.evaluate import conversations
from attn2mamba.evaluate.conversations import render
from attn2mamba.evaluate.json_records import JsonRecords
from attn2mamba.evaluate.measure import Subject
from attn2mamba.evaluate.options import SuiteOptions
from attn2mamba.evaluate.tool_calls import CATEGORIES, DATA, ToolCalls, score_call

TOOLS = [
    {
        "name": "area",
        "parameters": {
            "type": "dict",
            "properties": {"base": {"type": "integer"}, "unit": {"type": "string", "enum": ["m", "cm"]}},
            "required": ["base"],
        },
    },
    {"name": "math.sum", "parameters": {"type": "dict", "properties": {}, "required": []}},
]
ANSWER = [{"area": {"base": [10], "unit": ["m", ""]}}]


@pytest.mark.parametrize(
    ("text", "parses", "valid", "name", "arguments"),
    [
        ('{"name": "area", "arguments": {"base": 10}}', 1, 1, 1, 1),
        ('{"name": "area", "arguments": {"base": 10, "unit": "m"}}', 1, 1, 1, 1),
        ('```json\n{"name": "area", "arguments": {"base": 10}}\n```', 1, 1, 1, 1),
        ('{"name": "area", "arguments": {"base": 11}}', 1, 1, 1, 0),
        ('{"name": "area", "arguments": {"base": 10, "unit": "cm"}}', 1, 1, 1, 0),
        ('{"name": "area", "arguments": {"base": 10, "unit": "km"}}', 1, 0, 1, 0),
        ('{"name": "area", "arguments": {"base": "10"}}', 1, 0, 1, 0),
        ('{"name": "area", "arguments": {}}', 1, 0, 1, 0),
        ('{"name": "math.sum", "arguments": {}}', 1, 1, 0, 0),
        ('{"name": "none", "arguments": {}}', 1, 1, 0, 0),
        ('{"name": "volume", "arguments": {"base": 10}}', 1, 0, 0, 0),
        ('{"name": "area"}', 1, 0, 0, 0),
        ('{"name": ["area"], "arguments": {"base": 10}}', 1, 0, 0, 0),
        ('{"name": "area", "arguments": {"base": 10}, "why": 1}', 1, 0, 0, 0),
        ('[{"name": "area", "arguments": {"base": 10}}]', 1, 0, 0, 0),
        ('Sure! {"name": "area", "arguments": {"base": 10}}', 0, 0, 0, 0),
        ("area(base=10)", 0, 0, 0, 0),
        ("", 0, 0, 0, 0),
    ],
)
def test_scores_of_calls(text, parses, valid, name, arguments):
    wanted = {"parses": parses, "valid": valid, "name": name, "arguments": arguments}
    assert score_call(TOOLS, ANSWER, text) == wanted


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ('{"name": "none", "arguments": {}}', 1),
        ('{"name": "area", "arguments": {"base": 10}}', 0),
        ("I cannot help with that.", 0),
    ],
)
def test_where_no_function_helps(text, right):
    scores = score_call(TOOLS, [], text)
    assert (scores["name"], scores["arguments"]) == (right, right)


@pytest.fixture(scope="module")
def subject(tiny_teacher, tiny_tokenizer):
    model = tiny_teacher("llama", vocab_size=len(tiny_tokenizer))
    return Subject("teacher", "tiny", model, tiny_tokenizer, "fp32", "f")


@pytest.fixture
def script(monkeypatch):
    """Answers that a model would give, by a function of the prompt's text; what it was asked is kept."""

    def install(reply):
        asked = []

        def scripted(model, tokenizer, prompts, max_new_tokens, stop, batch_size):
            texts = [tokenizer.decode(prompt) for prompt in prompts]
            asked.extend(texts)
            return [reply(text) for text in texts]

        monkeypatch.setattr(conversations, "answers", scripted)
        return asked

    return install


@pytest.fixture
def root(tmp_path):
    for category in CATEGORIES:
        rows = [
            {
                "messages": json.dumps([{"role": "user", "content": f"{category} {i}"}]),
                "tools": json.dumps(TOOLS),
                "answer": "[]" if category == "irrelevance" else json.dumps(ANSWER),
            }
            for i in range(6)
        ]
        folder = tmp_path / DATA / category
        folder.mkdir(parents=True)
        pq.write_table(pa.Table.from_pylist(rows), folder / "test.parquet")
    return tmp_path


def test_tool_calls_by_turn(root, subject, script):
    """Right for two turns, then chatter: the history holds the model's own answers, cells tell where it broke."""
    call = '{"name": "area", "arguments": {"base": 10}}'
    asked = script(lambda text: call if text.count("Assistant:") <= 4 else "Well, ten.")
    measure = ToolCalls(SuiteOptions(data_root=root))
    assert measure.kinds() == dict.fromkeys(CATEGORIES, 2)
    results = {unit: measure.run(subject, unit) for unit in measure.units(subject)}
    assert list(results) == [f"{category}/0" for category in CATEGORIES]
    assert results["multiple/0"]["scores"]["valid"] == [0.5, 1.0]  # four turns, and the last two requests
    assert results["multiple/0"]["scores"]["all_valid"] == [0.0, 1.0]
    assert results["irrelevance/0"]["scores"]["name"] == [0.0, 0.0]
    assert results["multiple/0"]["answers"] == [[call, call, "Well, ten.", "Well, ten."], [call, call]]
    rows = [row for row in measure.cells(results) if row["kind"] == "multiple"]
    assert [(row["turn"], row["valid"], row["arguments"], row["n"]) for row in rows] == [
        (1, 1.0, 1.0, 2), (2, 1.0, 1.0, 2), (3, 0.0, 0.0, 1), (4, 0.0, 0.0, 1)
    ]  # fmt: skip
    last = next(text for text in asked if "simple_python 3" in text)
    assert last.index("simple_python 0") < last.index(call) < last.index("simple_python 1") < last.index("Well, ten.")
    assert last.endswith("Request: simple_python 3\n\nAssistant:")


def test_limit_counts_requests(root):
    assert ToolCalls(SuiteOptions(data_root=root, limit=5)).kinds() == dict.fromkeys(CATEGORIES, 2)
    measure = ToolCalls(SuiteOptions(data_root=root, limit=3))
    assert [len(measure.conversation("multiple", i)) for i in range(measure.kinds()["multiple"])] == [3]


SAID = re.compile(r'(\w+) is (?:now )?("[^"]*"|\d+|true|false)')
KEYS = re.compile(r"(\w+) \((?:string|integer|boolean|one of [^)]*)\)")


def right_answer(text):
    """Of one who remembers: the last that was said of each key that the last request names."""
    record = {name: json.loads(value) for name, value in SAID.findall(text)}
    return json.dumps({name: record[name] for name in KEYS.findall(text[text.rindex("Reply in JSON") :])})


def test_one_who_remembers_is_right(subject, script):
    script(right_answer)
    measure = JsonRecords(SuiteOptions(limit=9))
    results = {unit: measure.run(subject, unit) for unit in measure.units(subject)}
    assert {metric: figure.value for metric, figure in measure.figures(results).items()} == dict.fromkeys(
        ("parses", "valid", "right", "recalled", "all_valid"), 1.0
    )
    rows = measure.cells(results)
    assert [(row["turn"], row["n"]) for row in rows] == [(turn, 9) for turn in range(1, 7)]
    assert [row["turn"] for row in rows if "recalled" in row] == [3, 5, 6]


def test_one_who_forgets_is_not(subject, script):
    """Knows the last message alone: keeps the format where values are given, and cannot recall."""

    def reply(text):
        try:
            return right_answer("User:" + text.rsplit("User:", 1)[1])
        except KeyError:
            return "{}"

    script(reply)
    measure = JsonRecords(SuiteOptions(limit=4))
    results = {"form/0": measure.run(subject, "form/0")}
    figures = {metric: figure.value for metric, figure in measure.figures(results).items()}
    assert figures == {"parses": 1.0, "valid": 0.5, "right": 0.5, "recalled": 0.0, "all_valid": 0.0}


def test_a_change_is_a_change(subject, script):
    """One who never hears of the change is wrong in the fifth and sixth turn."""

    def reply(text):
        return right_answer(re.sub(r"is now [^.\n]*", "is unknown", text))

    script(reply)
    measure = JsonRecords(SuiteOptions(limit=8))
    results = {unit: measure.run(subject, unit) for unit in measure.units(subject)}
    assert [row["right"] for row in measure.cells(results)] == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    assert measure.figures(results)["valid"].value == 1.0


def test_records_are_a_function_of_seed_and_index():
    def said(seed, index):
        return [turn.request for turn in JsonRecords(SuiteOptions(seed=seed)).conversation("form", index)]

    assert said(0, 1) == said(0, 1)
    assert len({str(said(seed, index)) for seed in (0, 1) for index in range(20)}) == 40
    assert JsonRecords(SuiteOptions()).kinds() == {"form": 50}


def test_batches_do_not_matter(subject, monkeypatch):
    monkeypatch.setattr(JsonRecords, "max_new_tokens", 6)
    monkeypatch.setattr(JsonRecords, "introduction", ())
    talk = JsonRecords(SuiteOptions()).conversation("form", 0)[:2]
    monkeypatch.setattr(JsonRecords, "conversation", lambda self, kind, index: talk[: 1 + index % 2])

    def run(batch_size):
        return JsonRecords(SuiteOptions(limit=4, batch_size=batch_size)).run(subject, "form/0")

    assert run(1) == run(4)


def test_what_the_model_sees(tiny_tokenizer, bos_tokenizer):
    history = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat"}]
    history.append({"role": "user", "content": "on"})
    text = "User: the cat\n\nAssistant: sat\n\nUser: on\n\nAssistant:"
    assert tiny_tokenizer.decode(render(tiny_tokenizer, history)) == text
    assert render(bos_tokenizer, history)[0] == bos_tokenizer.bos_token_id
    bos_tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    try:
        ids = render(bos_tokenizer, history)
    finally:
        bos_tokenizer.chat_template = None
    assert bos_tokenizer.decode(ids) == "<bos>[user]the cat[assistant]sat[user]on[assistant]"
