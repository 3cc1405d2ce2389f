"""Recipes as files: the shipped ones, YAML, overrides of single keys, and errors put in one line."""

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from attn2mamba.errors import UserError

RECIPES = Path(__file__).with_name("recipes")


def recipe_names() -> list[str]:
    """The names of the shipped recipes, sorted."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def recipe_text(name: str) -> str:
    """A shipped recipe's YAML with its comments; UserError if there is none of that name."""
    if name not in recipe_names():
        raise UserError(f"there is no recipe '{name}'; {_nearest(Path(name).stem, recipe_names())}")
    return (RECIPES / f"{name}.yaml").read_text(encoding="utf-8")


def read_recipe(name_or_path: str) -> dict[str, Any]:
    """The mapping in a shipped recipe or a YAML file, not validated; a shipped name goes before a file."""
    try:
        shipped = name_or_path in recipe_names() or not Path(name_or_path).exists()
        text = recipe_text(name_or_path) if shipped else Path(name_or_path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UserError(f"recipe '{name_or_path}' cannot be read: {reason}") from None
    data = _parse_yaml(text, f"recipe '{name_or_path}'")
    if data is None:
        raise UserError(f"recipe '{name_or_path}' is empty; see `attn2mamba recipes default` for one")
    if not isinstance(data, dict):
        raise UserError(f"recipe '{name_or_path}' must be a mapping of keys, not a {type(data).__name__}")
    return data


def apply_override(data: dict[str, Any], override: str) -> None:
    """Set one key of `data` in place from "key.path=value"; the value is YAML, list entries go by number."""
    path, equals, text = override.partition("=")
    path = path.strip()
    if not equals or not all(path.split(".")):
        raise UserError(f"override '{override}' must read key=value, as in stages.0.lr=1e-3")
    _assign(data, path.split("."), _parse_yaml(text, f"override '{path}'"), path)


def _assign(node: Any, keys: list[str], value: object, path: str) -> None:
    key: Any = keys[0]
    if isinstance(node, list):
        if not (key.isdecimal() and int(key) < len(node)):
            raise UserError(f"override '{path}': '{key}' must be a number below {len(node)}")
        key = int(key)
    elif not isinstance(node, dict):
        raise UserError(f"override '{path}': there is no '{key}' inside the plain value {node!r}")
    elif key not in node or node[key] is None:
        node[key] = {}
    if len(keys) == 1:
        node[key] = value
    else:
        _assign(node[key], keys[1:], value, path)


def _parse_yaml(text: str, source: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise UserError(f"{source} is not YAML at line {line}: {error.problem}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{source} is not YAML: {' '.join(str(error).split())}") from None


def explain(error: ValidationError, sections: Mapping[str, type[BaseModel]]) -> str:
    """One line on one of the errors, an unknown key before others since a misspelt key is also a missing one.

    `sections` gives the model that each key (or kind of stage) opens, "recipe" being the outermost.
    """
    details = error.errors(include_url=False)
    first = next((detail for detail in details if detail["type"] == "extra_forbidden"), details[0])
    kind, message, value = first["type"], first["msg"], first["input"]
    path = ".".join(map(str, _yaml_path(first["loc"])))
    if kind == "extra_forbidden":
        *outer, key = ("recipe", *map(str, first["loc"]))
        text = f"unknown key '{path}'; {_nearest(key, list(sections[outer[-1]].model_fields))}"
    elif kind == "value_error":
        text = f"'{path}': {first['ctx']['error']}" if path else str(first["ctx"]["error"])
    elif kind == "missing":
        text = f"'{path}' is missing"
    elif kind.startswith("union_tag"):
        tag = f"got {first['ctx']['tag']!r}" if "tag" in first["ctx"] else "but is missing"
        text = f"'{path}.kind' must be 'transfer' or 'finetune', {tag}"
    elif kind in ("model_type", "model_attributes_type"):
        text = f"'{path}' must be a mapping of keys, got {value!r}"
    elif message.startswith("Input should be "):
        text = f"'{path}' must be {message.removeprefix('Input should be ')}, got {value!r}"
    else:
        text = f"'{path}': {message[0].lower()}{message[1:]}"
    return " ".join(f"recipe: {text}".split())


def _yaml_path(location: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """pydantic puts the kind of a stage after its number, which the file does not."""
    return location[:2] + location[3:] if location[0:1] == ("stages",) else location


def _nearest(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean '{near[0]}'?" if near else f"known: {', '.join(known)}"
