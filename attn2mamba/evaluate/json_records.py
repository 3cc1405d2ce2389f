"""A conversation that fills in a form, each answer a JSON object of a given schema: no data needed."""

import json
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

from .conversations import Conversations, Turn
from .measure import Json
from .schema import fault, read_json, same

CONVERSATIONS = 50
"""Where no limit is given."""
NAMES = (
    "Ada Moss",
    "Ben Okafor",
    "Carla Ruiz",
    "Deniz Kaya",
    "Eva Lindqvist",
    "Farid Nasser",
    "Grace Obi",
    "Hugo Bell",
)
CITIES = ("Lisbon", "Osaka", "Quito", "Tallinn", "Nairobi", "Leeds", "Hanoi", "Perth")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
COLOURS = ("red", "green", "blue", "black", "white", "yellow")

Field = tuple[str, Json, Callable[[Random], Any]]
"""Name, schema, and how a value is drawn."""


def _one_of(name: str, values: tuple[str, ...], closed: bool = False) -> Field:
    return name, {"type": "string", **({"enum": list(values)} if closed else {})}, lambda draw: draw.choice(values)


def _count(name: str, low: int, high: int) -> Field:
    return name, {"type": "integer"}, lambda draw: draw.randint(low, high)


def _yes_no(name: str) -> Field:
    return name, {"type": "boolean"}, lambda draw: draw.random() < 0.5


FORMS: dict[str, list[Field]] = {
    "Table booking": [
        _one_of("name", NAMES),
        _count("guests", 2, 12),
        _one_of("day", DAYS, closed=True),
        _yes_no("window_seat"),
        _count("hour", 17, 22),
    ],
    "Parcel": [
        _one_of("sender", NAMES),
        _one_of("destination", CITIES),
        _count("grams", 100, 9000),
        _yes_no("insured"),
        _one_of("pickup_day", DAYS, closed=True),
    ],
    "Bicycle rental": [
        _one_of("customer", NAMES),
        _one_of("colour", COLOURS, closed=True),
        _count("days", 2, 30),
        _yes_no("helmet"),
        _one_of("city", CITIES),
    ],
    "Course registration": [
        _one_of("student", NAMES),
        _count("room", 100, 999),
        _one_of("weekday", DAYS, closed=True),
        _yes_no("certificate"),
        _one_of("campus", CITIES),
    ],
}


class JsonRecords(Conversations):
    """Six turns about one form. The user states three of its fields, then two more; asks for one of each; changes one;
    asks for that and another; asks for the whole. Each request names its answer's keys and their types in words.

    Of each turn: `parses`, the whole answer is JSON; `valid`, it satisfies the schema; `right`, it has the values; and
    where these were said in an earlier turn alone, `recalled`, which is the same.
    """

    name = "json"
    max_new_tokens = 96
    introduction = (
        (
            'Hotel room: city is "Oslo", nights is 3, breakfast is true.\n'
            "Reply in JSON with the keys city (string), nights (integer) and breakfast (boolean).",
            '{"city": "Oslo", "nights": 3, "breakfast": true}',
        ),
        (
            "Hotel room: nights is now 5.\nReply in JSON with the key nights (integer).",
            '{"nights": 5}',
        ),
        (
            "Hotel room: what did I tell you?\nReply in JSON with the keys city (string) and nights (integer).",
            '{"city": "Oslo", "nights": 5}',
        ),
    )

    def options(self) -> Json:
        return {"conversations": self.count, "seed": self.suite.seed, "new_tokens": self.max_new_tokens}

    @property
    def count(self) -> int:
        return self.suite.limit or CONVERSATIONS

    def kinds(self) -> dict[str, int]:
        return {"form": self.count}

    def conversation(self, kind: str, index: int) -> list[Turn]:
        draw = Random(f"{self.suite.seed} {index}")
        subject, fields = draw.choice(list(FORMS.items()))
        fields = draw.sample(fields, len(fields))
        record = {name: value(draw) for name, _, value in fields}
        first, later = fields[:3], fields[3:]
        changed = draw.choice(first)
        old = record[changed[0]]
        new = next(x for x in iter(lambda: changed[2](draw), None) if x != old)
        before, after = record, {**record, changed[0]: new}
        kept = next(field for field in first if field is not changed)
        return [
            _turn(f"{subject}: {_said(first, before)}.", first, before),
            _turn(f"{subject}: {_said(later, before)}.", later, before),
            _turn(f"{subject}: what did I tell you?", [kept, later[0]], before, recalled=True),
            _turn(f"{subject}: {_said([changed], after, 'is now')}.", [changed], after),
            _turn(f"{subject}: what holds now?", [changed, later[1]], after, recalled=True),
            _turn(f"{subject}: what holds in all?", fields, after, recalled=True),
        ]


def _said(fields: list[Field], record: Json, verb: str = "is") -> str:
    return ", ".join(f"{name} {verb} {json.dumps(record[name])}" for name, _, _ in fields)


def _turn(said: str, fields: list[Field], record: Json, recalled: bool = False) -> Turn:
    names = [name for name, _, _ in fields]
    schema = {
        "type": "object",
        "properties": {name: kind for name, kind, _ in fields},
        "required": names,
        "additionalProperties": False,
    }
    keys = [f"{name} ({_in_words(kind)})" for name, kind, _ in fields]
    listed = f"keys {', '.join(keys[:-1])} and {keys[-1]}" if len(keys) > 1 else f"key {keys[0]}"
    expected = {name: record[name] for name in names}
    return Turn(f"{said}\nReply in JSON with the {listed}.", partial(score_record, schema, expected, recalled))


def _in_words(kind: Json) -> str:
    """A schema as the request has it: small models answer a schema in JSON with that schema."""
    return f"one of {', '.join(kind['enum'])}" if "enum" in kind else str(kind["type"])


def score_record(schema: Json, expected: Json, recalled: bool, text: str) -> dict[str, float]:
    try:
        value = read_json(text)
        scores = {"parses": 1.0, "valid": float(fault(value, schema) is None), "right": float(same(value, expected))}
    except ValueError:
        scores = {"parses": 0.0, "valid": 0.0, "right": 0.0}
    return scores | ({"recalled": scores["right"]} if recalled else {})
