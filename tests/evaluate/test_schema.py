"""JSON answers: strict reading, the schema checker, accepted values."""

import re

import pytest

from attn2mamba.evaluate.schema import accepted, fault, read_json, same


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": 1}', {"a": 1}),
        ('  {"a": 1}\n', {"a": 1}),
        ('```json\n{"a": 1}\n```', {"a": 1}),
        ("```\n[1]\n```", [1]),
        ('<tool_call>\n{"a": 1}\n</tool_call>', {"a": 1}),
        ("null", None),
    ],
)
def test_reads(text, value):
    assert read_json(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Sure: {}",
        '{"a": 1} {"a": 1}',
        '{"a": 1,}',
        "{'a': 1}",
        '{"a": NaN}',
        '{"a": 1',
        '```json\n{"a": 1}\n``` done',
        "[" * 100_000,
    ],
)
def test_reads_nothing_else(text):
    with pytest.raises(ValueError):
        read_json(text)


SCHEMA = {
    "type": "object",
    "properties": {
        "n": {"type": "integer", "minimum": 1, "maximum": 9},
        "x": {"type": "number"},
        "s": {"type": "string", "enum": ["a", "b"]},
        "b": {"type": "boolean"},
        "l": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 2},
        "o": {"type": "object", "properties": {"k": {"type": "null"}}, "required": ["k"]},
        "d": {"type": "string", "default": None},
    },
    "required": ["n"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("value", "word"),
    [
        ({"n": 1}, None),
        ({"n": 5.0, "x": 2, "s": "a", "b": False, "l": ["y"], "o": {"k": None, "more": 1}, "d": None}, None),
        ({}, "lacks n"),
        ([], "no object"),
        ({"n": True}, "n is no integer"),
        ({"n": 1.5}, "n is no integer"),
        ({"n": "1"}, "n is no integer"),
        ({"n": 0}, "out of range"),
        ({"n": 10}, "out of range"),
        ({"n": 1, "x": False}, "x is no number"),
        ({"n": 1, "s": "c"}, "none of"),
        ({"n": 1, "b": 1}, "b is no boolean"),
        ({"n": 1, "l": []}, "0 items"),
        ({"n": 1, "l": ["a", "b", "c"]}, "3 items"),
        ({"n": 1, "l": ["a", 2]}, r"l\[1\] is no string"),
        ({"n": 1, "o": {}}, "o lacks k"),
        ({"n": 1, "d": 3}, "d is no string"),
        ({"n": 1, "z": 1}, "has z"),
    ],
)
def test_faults(value, word):
    found = fault(value, SCHEMA)
    if word is None:
        assert found is None
    else:
        assert found and re.search(word, found)


def test_types_of_the_leaderboard():
    schema = {"type": "dict", "properties": {"f": {"type": "float"}, "t": {"type": "tuple"}, "a": {"type": "any"}}}
    assert fault({"f": 1.5, "t": [1], "a": None, "more": 1}, schema) is None
    assert fault({"f": "1"}, schema) == "answer.f is no number"
    assert fault({"t": {}}, schema) == "answer.t is no array"


def test_sameness():
    assert same(1, 1.0) and same({"a": [1, {"b": None}]}, {"a": [1.0, {"b": None}]})
    assert not same(1, True) and not same(0, False) and not same([1], [1, 2]) and not same({"a": 1}, {"b": 1})
    assert not same("1", 1) and not same([True], [1])


@pytest.mark.parametrize(
    ("arguments", "right"),
    [
        ({"city": "New York", "n": 2}, True),
        ({"city": "new-york.", "n": 2.0, "unit": "km"}, True),
        ({"city": "NYC", "n": 3}, True),
        ({"city": "NYC"}, False),
        ({"city": "Boston", "n": 2}, False),
        ({"city": "NYC", "n": 4}, False),
        ({"city": "NYC", "n": "2"}, False),
        ({"city": "NYC", "n": 2, "unit": "mile"}, False),
        ({"city": "NYC", "n": 2, "other": 1}, False),
    ],
)
def test_accepted_arguments(arguments, right):
    answer = {"city": ["New York", "NYC"], "n": [2, 3], "unit": ["km", ""]}
    assert accepted(arguments, answer) is right


def test_accepted_lists_and_objects():
    answer = {"l": [["a", "b"], ["b", "a"]], "o": [{"k": [1, 2], "m": ["", "x"]}], "q": [[{"k": [1]}]]}
    good = {"l": ["b", "a"], "o": {"k": 2}, "q": [{"k": 1}]}
    assert accepted(good, answer)
    for change in (
        {"l": ["a"]},
        {"l": ["a", "c"]},
        {"o": {"k": 3}},
        {"o": {}},
        {"q": [{"k": 2}]},
        {"q": []},
        {"l": "a"},
    ):
        assert not accepted({**good, **change}, answer)
