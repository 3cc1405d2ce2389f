"""What README, docs and recipe headers tell a reader to type is understood, and what they point at is there."""

import ast
import re
import shlex
from pathlib import Path

import pytest
import typer

from attn2mamba.recipe import (
    Checkpoints,
    Evaluate,
    Finetune,
    FinetuneLoss,
    Mixer,
    Optimizer,
    Recipe,
    Transfer,
    load_recipe,
)
from attn2mamba_cli import app

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
RECIPES = sorted((ROOT / "attn2mamba" / "recipes").glob("*.yaml"))


def commands() -> list[str]:
    pages = [re.sub(r"\\\n\s*", " ", path.read_text()) for path in PAGES]
    found = [
        line for page in pages for block in re.findall(r"```\w*\n(.*?)```", page, re.S) for line in block.splitlines()
    ]
    found += [path.read_text().splitlines()[0].removeprefix("# ") for path in RECIPES]
    names = "distill|eval|bench|report|generate|inspect|recipes"
    return [line for line in found if re.match(rf"attn2mamba ({names})\b", line)]


@pytest.mark.parametrize("line", commands())
def test_commands_parse(line):
    name, *arguments = shlex.split(line)[1:]
    command = typer.main.get_command(app).commands[name]
    context = command.make_context(name, arguments)
    if name == "distill":
        load_recipe(context.params["recipe"], context.params["overrides"])


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.name)
def test_links_and_python(path):
    text = path.read_text()
    for target in re.findall(r"\]\(([^)#\s]+)\)", text):
        assert target.startswith("http") or (path.parent / target).exists(), target
    for block in re.findall(r"```python\n(.*?)```", text, re.S):
        ast.parse(block)


def test_every_key_of_a_recipe_is_explained():
    page = (ROOT / "docs" / "recipes.md").read_text()
    for section in (Recipe, Transfer, Finetune, FinetuneLoss, Mixer, Optimizer, Checkpoints, Evaluate):
        for key in section.model_fields:
            assert re.search(rf"[`.]{key}[`.]", page), key


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    for path in PAGES:
        for target in re.findall(r"^make (\w+)|`make (\w+)`", path.read_text(), re.M):
            assert re.search(rf"^{''.join(target)}:", makefile, re.M), target


BENCHMARKS = [path for path in sorted((ROOT / "benchmarks").glob("*.py")) if path.name != "timing.py"]


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda p: p.name)
def test_benchmarks_name_their_command(path):
    assert f"python benchmarks/{path.name}" in ast.get_docstring(ast.parse(path.read_text()))
