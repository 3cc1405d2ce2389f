import tomllib
from pathlib import Path

import pytest

from attn2mamba.errors import UserError
from attn2mamba.recipe import load_recipe, recipe_names, recipe_text

ROOT = Path(__file__).parent.parent


def message(name_or_path, *overrides):
    """The error that loading ends in, which has to be a single line."""
    with pytest.raises(UserError) as caught:
        load_recipe(name_or_path, overrides)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_overrides_apply_in_order_and_read_yaml():
    recipe = load_recipe(
        "paper",
        ["stages.0.tokens=1e6", "stages.0.lr=1", "stages.0.lr=1e-3", "keep=[0, 3]", "optimizer.clip=0.5"],
    )
    assert (recipe.stages[0].tokens, recipe.stages[0].lr, recipe.keep) == (1_000_000, 1e-3, [0, 3])
    assert (recipe.optimizer.clip, recipe.optimizer.weight_decay) == (0.5, 0.1)
    assert load_recipe("paper", ["keep=sliding"]).keep == "sliding"


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("stages.2.lr=1", "override 'stages.2.lr': '2' must be a number below 2"),
        ("stages.-1.lr=1", "override 'stages.-1.lr': '-1' must be a number below 2"),
        ("stages.first.lr=1", "override 'stages.first.lr': 'first' must be a number below 2"),
        ("batch_size.x=1", "override 'batch_size.x': there is no 'x' inside the plain value 48"),
        ("batch_size", "override 'batch_size' must read key=value"),
        ("stages..lr=1", "override 'stages..lr=1' must read key=value"),
        ("keep=[1", "override 'keep' is not YAML at line 1"),
    ],
)
def test_overrides_that_lead_nowhere_are_refused(override, complaint):
    assert message("paper", override).startswith(complaint)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "is empty"),
        (b"# only a comment\n", "is empty"),
        (b"- a\n- b\n", "must be a mapping of keys, not a list"),
        (b"batch_size: 8\nstages: [\n", "is not YAML at line 3"),
        (b"a: \xff\xfe", "cannot be read: it is not UTF-8 text"),
        (b"a: \x00", "is not YAML"),
    ],
)
def test_files_that_hold_no_recipe(tmp_path, content, complaint):
    path = tmp_path / "broken.yaml"
    path.write_bytes(content)
    assert message(str(path)).startswith(f"recipe '{path}' {complaint}")


def test_recipes_that_do_not_exist(tmp_path):
    assert message("papr") == "there is no recipe 'papr'; did you mean 'paper'?"
    assert message("no/such.yaml").startswith("there is no recipe 'no/such.yaml'; known: ")
    assert "cannot be read" in message(str(tmp_path))
    with pytest.raises(UserError, match="did you mean 'default'"):
        recipe_text("defalt")


def test_the_shipped_recipes_are_all_there():
    assert set(recipe_names()) >= {
        "paper",
        "default",
        "hedgehog",
        "direct",
        "scratch",
        "smollm2-135m",
        "demo",
    }
    package_data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    assert "recipes/*.yaml" in package_data["attn2mamba"]
