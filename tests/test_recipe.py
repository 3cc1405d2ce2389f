import re

import pytest
import yaml

from attn2mamba.errors import UserError
from attn2mamba.recipe import Finetune, Recipe, Transfer, load_recipe, recipe_names, recipe_text

TWO_STAGES = """
sequence_length: 128
batch_size: 8
stages:
  - {kind: transfer, tokens: 50k, lr: 1e-2}
  - kind: finetune
    mixer: {name: hedgemamba}
    tokens: 1.5M
    lr: 3e-4
"""


@pytest.fixture
def two_stages(tmp_path):
    path = tmp_path / "two.yaml"
    path.write_text(TWO_STAGES)
    return str(path)


def message(name_or_path, *overrides):
    """The error that loading ends in, which has to be a single line."""
    with pytest.raises(UserError) as caught:
        load_recipe(name_or_path, overrides)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_defaults(two_stages):
    recipe = load_recipe(two_stages)
    assert (recipe.precision, recipe.initialize, recipe.keep, recipe.micro_batch_size) == (
        "fp32",
        "teacher",
        [],
        None,
    )
    assert (recipe.seed, recipe.reset_documents) == (0, False)
    assert (recipe.checkpoints.every, recipe.checkpoints.keep) == (50_000_000, 2)
    assert (recipe.evaluate.every, recipe.evaluate.tokens) == (10_000_000, 50_000)
    assert recipe.optimizer.betas == (0.9, 0.95)
    transfer, finetune = recipe.stages
    assert isinstance(transfer, Transfer) and isinstance(finetune, Finetune)
    assert (transfer.mixer.name, transfer.loss, transfer.tokens, transfer.lr) == (
        "hedgehog",
        "cosine",
        50_000,
        0.01,
    )
    assert (finetune.loss.cross_entropy, finetune.loss.kl, finetune.freeze) == (1.0, 0.0, ["embeddings"])
    assert finetune.mixer.model_dump() == {
        "name": "hedgemamba",
        "share": "heads",
        "window": 0,
        "conv_width": 4,
        "decay": True,
        "conv": True,
        "gate": True,
    }


def test_later_stages_inherit_share_and_window(two_stages):
    recipe = load_recipe(two_stages, ["stages.0.mixer.share=none", "stages.0.mixer.window=64"])
    assert (recipe.stages[1].mixer.share, recipe.stages[1].mixer.window) == ("none", 64)


def test_an_equal_explicit_window_is_allowed_and_another_refused(two_stages):
    load_recipe(two_stages, ["stages.0.mixer.window=64", "stages.1.mixer.window=64"])
    assert "'stages.1.mixer.window' is 64, before it 0" in message(two_stages, "stages.1.mixer.window=64")
    assert "'stages.1.mixer.share' is 'none'" in message(two_stages, "stages.1.mixer.share=none")


def test_hedgemamba_parts_are_inherited_between_hedgemamba_stages(two_stages):
    stage = "{kind: finetune, mixer: {name: hedgemamba}, tokens: 1k, lr: 1}"
    overrides = [f"stages=[{stage}, {stage}]", "stages.0.mixer.gate=false"]
    assert load_recipe(two_stages, overrides).stages[1].mixer.gate is False
    assert "'stages.1.mixer.gate'" in message(two_stages, *overrides, "stages.1.mixer.gate=true")


def test_hedgemamba_does_not_go_back_to_hedgehog(two_stages):
    stages = "[{mixer: {name: hedgemamba}}, {mixer: {name: hedgehog}}]"
    common = [f"stages.{i}.{rest}" for i in (0, 1) for rest in ("kind=finetune", "tokens=1", "lr=1")]
    assert "'stages.1.mixer.name' cannot go back" in message(two_stages, f"stages={stages}", *common)


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("stages.0.tokns=1", "unknown key 'stages.0.tokns'; did you mean 'tokens'?"),
        ("stages.1.loss.kll=1", "unknown key 'stages.1.loss.kll'; did you mean 'kl'?"),
        ("stages.1.mixer.windw=1", "unknown key 'stages.1.mixer.windw'; did you mean 'window'?"),
        ("stages.0.freeze=[a]", "unknown key 'stages.0.freeze'; known: kind, mixer, loss, tokens, lr"),
        ("optimizer.weight_decy=0", "unknown key 'optimizer.weight_decy'; did you mean 'weight_decay'?"),
        ("batchsize=4", "unknown key 'batchsize'; did you mean 'batch_size'?"),
        ("stagess.0.lr=1", "unknown key 'stagess'; did you mean 'stages'?"),
    ],
)
def test_an_unknown_key_names_the_nearest(two_stages, override, nearest):
    assert message(two_stages, override) == f"recipe: {nearest}"


def test_a_misspelt_required_key_is_reported_as_misspelt(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(TWO_STAGES.replace("tokens: 50k", "tokns: 50k"))
    assert message(str(path)) == "recipe: unknown key 'stages.0.tokns'; did you mean 'tokens'?"


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("sequence_length=1", "'sequence_length' must be greater than or equal to 2, got 1"),
        ("sequence_length=1.5", "'sequence_length' must be a valid integer, got 1.5"),
        ("batch_size=true", "'batch_size' must be a valid integer, got True"),
        ("micro_batch_size=3", "'micro_batch_size' 3 does not divide 8"),
        (
            "precision=pure-bf16",
            "'precision': must be fp32 or bf16 (autocast), got 'pure-bf16'; weights stay fp32",
        ),
        ("precision=fp16", "'precision': must be fp32 or bf16"),
        ("keep=all", "'keep': must be sliding or a list of layer numbers from 0, got 'all'"),
        ("keep=[-1]", "'keep': must be sliding or a list of layer numbers"),
        ("initialize=zeros", "'initialize' must be 'teacher' or 'random', got 'zeros'"),
        ("stages=[]", "'stages': list should have at least 1 item"),
        ("stages.0=5", "'stages.0' must be a mapping of keys, got 5"),
        ("stages.0.kind=distil", "'stages.0.kind' must be 'transfer' or 'finetune', got 'distil'"),
        ("stages.0={tokens: 1}", "'stages.0.kind' must be 'transfer' or 'finetune', but is missing"),
        ("stages.0={kind: transfer, lr: 1}", "'stages.0.tokens' is missing"),
        ("stages.0.lr=-1", "'stages.0.lr' must be greater than 0, got -1"),
        ("stages.0.lr=.nan", "'stages.0.lr' must be"),
        ("stages.0.lr=fast", "'stages.0.lr' must be a valid number"),
        ("stages.0.lr=true", "'stages.0.lr': must be a number, not true or false"),
        ("stages.0.tokens=50kk", "'stages.0.tokens': '50kk' is not a count above 0"),
        ("stages.0.loss=l1", "'stages.0.loss' must be 'cosine', 'mse' or 'attention', got 'l1'"),
        ("stages.0.mixer=hedgehog", "'stages.0.mixer' must be a mapping of keys, got 'hedgehog'"),
        ("stages.0.mixer.name=hedgemamba", "'stages.0.mixer': a transfer stage trains hedgehog only"),
        ("stages.0.mixer.gate=true", "'stages.0.mixer': hedgehog has no gate"),
        ("stages.1.mixer.window=-1", "'stages.1.mixer.window' must be greater than or equal to 0"),
        ("stages.1.mixer.conv_width=0", "'stages.1.mixer.conv_width' must be greater than or equal to 1"),
        ("stages.1.loss.cross_entropy=0", "'stages.1.loss': cross_entropy, kl and hidden are all 0"),
        ("stages.1.loss.kl=-1", "'stages.1.loss.kl' must be greater than or equal to 0"),
        ("stages.1.loss.temperature=0", "'stages.1.loss.temperature' must be greater than 0"),
        ("stages.1.freeze=embeddings", "'stages.1.freeze' must be a valid list, got 'embeddings'"),
        ("optimizer.betas=[0.9, 1]", "'optimizer.betas.1' must be less than 1"),
        ("optimizer.warmup=2", "'optimizer.warmup' must be less than or equal to 1"),
    ],
)
def test_impossible_values_name_the_key_and_what_is_allowed(two_stages, override, complaint):
    assert message(two_stages, override).startswith(f"recipe: {complaint}")


@pytest.mark.parametrize("name", recipe_names())
def test_shipped_recipes_load_round_trip_and_open_with_their_command(name, tmp_path):
    recipe = load_recipe(name)
    saved = tmp_path / "recipe.yaml"
    saved.write_text(recipe.to_yaml())
    assert load_recipe(str(saved)) == recipe
    first_line = recipe_text(name).splitlines()[0]
    command = r"# attn2mamba distill --recipe (\S+) --teacher \S+ --data \S+ --output \S+"
    match = re.fullmatch(command, first_line)
    assert match and match[1] == name


def test_round_trip_keeps_what_is_not_default(two_stages, tmp_path):
    recipe = load_recipe(two_stages, ["keep=sliding", "stages.0.mixer.window=32", "stages.1.lr=1e-7", "seed=3"])
    saved = tmp_path / "saved.yaml"
    saved.write_text(recipe.to_yaml())
    assert load_recipe(str(saved)) == recipe
    assert "gate" not in yaml.safe_load(recipe.to_yaml())["stages"][0]["mixer"]


def test_the_paper_recipe_is_the_papers():
    recipe = load_recipe("paper")
    transfer, finetune = recipe.stages
    assert isinstance(transfer, Transfer) and isinstance(finetune, Finetune)
    assert (recipe.sequence_length, recipe.batch_size) == (1024, 48)
    assert (transfer.loss, transfer.tokens, transfer.lr) == ("cosine", 10**9, 1e-2)
    assert (finetune.tokens, finetune.lr) == (9 * 10**9, 3e-4)
    assert (transfer.mixer.name, finetune.mixer.name, finetune.mixer.share) == (
        "hedgehog",
        "hedgemamba",
        "heads",
    )
    assert (finetune.loss.cross_entropy, finetune.loss.kl, finetune.loss.hidden) == (1, 0, 0)
    assert finetune.freeze == ["embeddings"]


def test_python_callers_do_not_see_their_own_stages_changed():
    stages = load_recipe("direct").stages * 2
    stages[0].mixer.window = 16
    second = stages[1].model_copy(update={"mixer": type(stages[1].mixer)(name="hedgemamba")})
    recipe = Recipe(sequence_length=32, batch_size=1, stages=[stages[0], second])
    assert (recipe.stages[1].mixer.window, second.mixer.window) == (16, 0)


def test_a_window_that_leaves_the_state_nothing_is_refused(two_stages):
    assert "'stages.0.mixer.window' 128 must be below sequence_length" in message(
        two_stages, "stages.0.mixer.window=128"
    )
    load_recipe(two_stages, ["stages.0.mixer.window=127"])
