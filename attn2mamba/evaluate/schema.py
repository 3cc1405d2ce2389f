"""JSON answers: reading one, checking it against a schema, comparing it with what was expected.

The checker knows the part of JSON Schema that our own schemas and the Berkeley Function Calling Leaderboard use, and
the latter's names of types (dict, float, tuple, any), which no general library would take.
"""

import json
import re
from typing import Any

SYNONYMS = {"dict": "object", "float": "number", "tuple": "array"}
WRAPPING = re.compile(r"```(?:json)?\s*(.*?)\s*```|<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


def read_json(text: str) -> Any:
    """The JSON value that `text` is, and nothing but; a code fence or <tool_call> tags around the whole are allowed.
    Raises ValueError otherwise."""
    wrapped = WRAPPING.fullmatch(text.strip())
    inner = next(x for x in wrapped.groups() if x is not None) if wrapped else text
    try:
        return json.loads(inner, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _refuse(word: str) -> Any:
    raise ValueError(f"{word} is not JSON")


def fault(value: Any, schema: dict[str, Any], where: str = "answer") -> str | None:
    """The first way in which `value` breaks `schema`, or None. Knows type, enum, properties, required,
    additionalProperties (false), items, minItems, maxItems, minimum and maximum; what is given as the default passes,
    since the leaderboard declares defaults of null for strings. Other keywords are annotations."""
    if "default" in schema and same(value, schema["default"]):
        return None
    kind = SYNONYMS.get(schema.get("type", "any"), schema.get("type", "any"))
    if not _is(value, kind):
        return f"{where} is no {kind}"
    if "enum" in schema and not any(same(value, option) for option in schema["enum"]):
        return f"{where} is none of {schema['enum']}"
    if isinstance(value, dict):
        return _object_fault(value, schema, where)
    if isinstance(value, list):
        if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
            return f"{where} has {len(value)} items"
        faults = (fault(x, schema.get("items", {}), f"{where}[{i}]") for i, x in enumerate(value))
        return next((x for x in faults if x), None)
    if _is(value, "number") and not schema.get("minimum", value) <= value <= schema.get("maximum", value):
        return f"{where} is out of range"
    return None


def _object_fault(value: dict[str, Any], schema: dict[str, Any], where: str) -> str | None:
    properties = schema.get("properties") or {}
    missing = next((name for name in schema.get("required", ()) if name not in value), None)
    if missing is not None:
        return f"{where} lacks {missing}"
    unknown = next((name for name in value if name not in properties), None)
    if unknown is not None and schema.get("additionalProperties") is False:
        return f"{where} has {unknown}"
    faults = (fault(x, properties[name], f"{where}.{name}") for name, x in value.items() if name in properties)
    return next((x for x in faults if x), None)


def _is(value: Any, kind: str) -> bool:
    if kind == "any":
        return True
    if kind in ("integer", "number"):  # true is a number to Python, not to JSON
        whole = kind == "number" or isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        return isinstance(value, int | float) and not isinstance(value, bool) and whole
    types = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}
    return isinstance(value, types[kind])


def same(a: Any, b: Any) -> bool:
    """Equality of JSON values: 1 is 1.0 but not true."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def accepted(arguments: dict[str, Any], accepted_values: dict[str, list[Any]]) -> bool:
    """Whether a call's arguments are right as the leaderboard's answers say: for each argument a list of values that
    count, "" among them where it may be left out; nothing else may be given. Strings are compared as there, without
    case, blanks and the punctuation ,./-_*^'."""
    if any(name not in accepted_values for name in arguments):
        return False
    return all(
        any(_matches(arguments[name], option) for option in options) if name in arguments else "" in options
        for name, options in accepted_values.items()
    )


def _matches(value: Any, option: Any) -> bool:
    if isinstance(option, dict):
        return isinstance(value, dict) and accepted(value, option)
    if isinstance(option, list):
        equal = isinstance(value, list) and len(value) == len(option)
        return equal and all(_matches(x, y) for x, y in zip(value, option, strict=True))
    if isinstance(option, str) and isinstance(value, str):
        return _plain(value) == _plain(option)
    return same(value, option)


def _plain(text: str) -> str:
    return re.sub(r"[ ,./\-_*^]", "", text).lower().replace("'", '"')
