"""Function calls over several turns, on the questions of the Berkeley Function Calling Leaderboard."""

import json
from functools import cached_property, partial
from typing import Any

from ..errors import UserError
from .conversations import Conversations, Turn
from .measure import Json
from .options import SuiteOptions
from .schema import accepted, fault, read_json
from .task_data import read_rows, rows_digest

DATA = "gorilla-llm/Berkeley-Function-Calling-Leaderboard"
CATEGORIES = ("simple_python", "multiple", "live_simple", "irrelevance")
TURNS = 4
NONE = "none"
"""Name that is called where no function helps."""
INSTRUCTION = (
    "Answer with one JSON object and nothing else: the call of one of the functions below, as "
    '{"name": NAME, "arguments": {NAME: VALUE, ...}}. If none of them helps, answer {"name": "none", "arguments": {}}.'
)
EXAMPLE = {
    "name": "get_weather",
    "description": "Weather of a day at a place.",
    "parameters": {
        "type": "object",
        "properties": {"place": {"type": "string"}, "days_ahead": {"type": "integer"}},
        "required": ["place"],
    },
}


def request_text(tools: list[Json], request: str) -> str:
    functions = "\n".join(json.dumps(tool) for tool in tools)
    return f"{INSTRUCTION}\nFunctions:\n{functions}\nRequest: {request}"


class ToolCalls(Conversations):
    """Conversations of four requests of one category, each with its own functions; the instruction comes with every
    request, after two examples of the format.

    Of each turn: `parses`, the whole answer is JSON; `valid`, it is a call of one of the functions and its arguments
    satisfy their schema, or the call of none; `name`, the right one; `arguments`, the right ones too. In the category
    irrelevance `name` means that none was called, in so many words: an answer that is no call at all is not right, as
    it is on the leaderboard. These are not the leaderboard's figures.
    """

    name = "tool_calls"
    max_new_tokens = 128
    introduction = (
        (request_text([EXAMPLE], "Who wrote Middlemarch?"), '{"name": "none", "arguments": {}}'),
        (
            request_text([EXAMPLE], "Will it rain in Oslo in two days?"),
            '{"name": "get_weather", "arguments": {"place": "Oslo", "days_ahead": 2}}',
        ),
    )

    def __init__(self, options: SuiteOptions) -> None:
        """The limit counts requests of each category. Raises UserError without a local copy of the data set."""
        super().__init__(options)
        if options.data_root is None:
            raise UserError(
                f"tool_calls needs a local copy of {DATA} as parquet files; give --data-root, or measure json"
            )
        root, limit = options.data_root, options.limit
        self.rows = {category: read_rows(root, DATA, category, "test", limit) for category in CATEGORIES}

    @cached_property
    def _options(self) -> Json:
        return {"rows": rows_digest(list(self.rows.values())), "turns": TURNS, "new_tokens": self.max_new_tokens}

    def options(self) -> Json:
        return self._options

    def kinds(self) -> dict[str, int]:
        return {category: -(-len(rows) // TURNS) for category, rows in self.rows.items()}

    def conversation(self, kind: str, index: int) -> list[Turn]:
        return [call_turn(row) for row in self.rows[kind][index * TURNS : (index + 1) * TURNS]]


def call_turn(row: dict[str, str]) -> Turn:
    tools, answer = json.loads(row["tools"]), json.loads(row["answer"])
    request = "\n".join(message["content"] for message in json.loads(row["messages"]))
    return Turn(request_text(tools, request), partial(score_call, tools, answer))


def score_call(tools: list[Json], answer: list[Json], text: str) -> dict[str, float]:
    """answer: as the leaderboard has it, [] or [{name: {argument: [accepted values]}}]."""
    try:
        call: Any = read_json(text)
    except ValueError:
        return {"parses": 0.0, "valid": 0.0, "name": 0.0, "arguments": 0.0}
    schemas = {tool["name"]: tool["parameters"] for tool in tools} | {NONE: {"type": "object"}}
    envelope = {
        "type": "object",
        "properties": {"name": {"type": "string", "enum": list(schemas)}, "arguments": {"type": "object"}},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
    if fault(call, envelope):
        return {"parses": 1.0, "valid": 0.0, "name": 0.0, "arguments": 0.0}
    name, arguments = call["name"], call["arguments"]
    right = next(iter(answer[0].items())) if answer else (NONE, {})
    return {
        "parses": 1.0,
        "valid": float(fault(arguments, schemas[name]) is None),
        "name": float(name == right[0]),
        "arguments": float(name == right[0] and accepted(arguments, right[1])),
    }
