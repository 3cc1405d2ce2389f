"""A saved model is whole: it reloads bit for bit, with the package or without, and its code needs nothing else."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

import attn2mamba
from attn2mamba.convert import convert

PACKAGE = Path(attn2mamba.__file__).parent
STUDENT_FILES = {path.name for path in (PACKAGE / "student").glob("*.py")} - {"__init__.py"}
MODELS = {
    "tied": ("llama", {"name": "hedgemamba", "window": 5}, []),
    "untied": ("gpt_neox", {"name": "hedgemamba"}, []),
    "hybrid": ("gemma3_text", {"name": "hedgehog"}, "sliding"),
}
IDS = torch.arange(1, 31)[None]

# What a machine without the package does with each directory: load, run, generate, save again, load that.
ELSEWHERE = """
import json, sys, torch
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "attn2mamba":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Hidden())
from transformers import AutoModelForCausalLM
results = {}
for directory in sys.argv[1:]:
    ids = torch.arange(1, 31)[None]
    expected = torch.load(directory + "/../" + directory.rpartition("/")[2] + ".pt")
    model = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True)
    with torch.no_grad():
        equal = torch.equal(model(ids).logits, expected["logits"])
        tokens = model.generate(ids, max_new_tokens=5, min_new_tokens=5, do_sample=False, pad_token_id=0)
        model.save_pretrained(directory + "-again")
        again = AutoModelForCausalLM.from_pretrained(directory + "-again", trust_remote_code=True)
        saved_again = torch.equal(again(ids).logits, expected["logits"])
    results[directory.rpartition("/")[2]] = {
        "module": type(model).__module__,
        "equal": equal,
        "generates": torch.equal(tokens, expected["tokens"]),
        "equal when saved again": saved_again,
    }
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def students(tiny_teacher, randomise):
    found = {}
    for name, (family, mixer, keep) in MODELS.items():
        teacher = tiny_teacher(family)
        teacher.generation_config.repetition_penalty = 1.25
        found[name] = randomise(convert(teacher, mixer, keep)[0]).eval()
    return found


@pytest.fixture(scope="module")
def saved(students, tmp_path_factory) -> Path:
    """A directory with one saved model for each of MODELS."""
    root = tmp_path_factory.mktemp("saved")
    for name, student in students.items():
        student.save_pretrained(root / name)
    return root


@pytest.fixture(scope="module")
def elsewhere(students, saved) -> dict[str, dict]:
    for name, student in students.items():
        tokens = student.generate(IDS, max_new_tokens=5, min_new_tokens=5, do_sample=False, pad_token_id=0)
        torch.save({"logits": logits(student), "tokens": tokens}, saved / f"{name}.pt")
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {
        "HF_MODULES_CACHE": str(saved / "modules")
    }
    command = [sys.executable, "-I", "-c", ELSEWHERE, *(str(saved / name) for name in MODELS)]
    done = subprocess.run(command, cwd=saved, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model(IDS).logits


def tensor_names(directory: Path) -> list[str]:
    names = []
    for path in directory.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            names += file.keys()
    return names


@pytest.mark.parametrize("name", MODELS)
def test_reloads_bit_for_bit(students, saved, name):
    model = AutoModelForCausalLM.from_pretrained(saved / name)
    assert type(model) is type(students[name])
    assert torch.equal(logits(model), logits(students[name]))
    assert model.config.base().to_dict() == students[name].config.base().to_dict()
    assert (model.config.mixer, model.config.layers) == (
        students[name].config.mixer,
        students[name].config.layers,
    )
    assert model.generation_config.repetition_penalty == 1.25


@pytest.mark.parametrize("name", MODELS)
def test_reloads_where_the_package_is_not(elsewhere, name):
    result = elsewhere[name]
    assert result.pop("module").startswith("transformers_modules.")
    assert result == {"equal": True, "generates": True, "equal when saved again": True}


@pytest.mark.parametrize("suffix", ["", "-again"])
@pytest.mark.parametrize("name", MODELS)
def test_a_directory_holds_its_code_and_only_safetensors(elsewhere, saved, name, suffix):
    files = {path.name for path in (saved / f"{name}{suffix}").iterdir()}
    assert {name for name in files if name.endswith(".py")} == STUDENT_FILES
    assert files - STUDENT_FILES == {"config.json", "generation_config.json", "model.safetensors"}
    config = json.loads((saved / f"{name}{suffix}" / "config.json").read_text())
    assert config["auto_map"] == {
        "AutoConfig": "configuration_attn2mamba.Attn2MambaConfig",
        "AutoModelForCausalLM": "modeling_attn2mamba.Attn2MambaForCausalLM",
    }
    assert config["architectures"] == ["Attn2MambaForCausalLM"]


def test_tied_embeddings_are_saved_once_and_stay_tied(saved, tiny_teacher):
    names = tensor_names(saved / "tied")
    assert len([n for n in names if "embed" in n or "lm_head" in n]) == 1
    model = AutoModelForCausalLM.from_pretrained(saved / "tied")
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    mixers = sum(p.numel() for n, p in model.named_parameters() if ".mixer." in n)
    assert model.num_parameters() - mixers == tiny_teacher("llama").num_parameters()


def test_untied_embeddings_stay_apart(saved):
    assert len([n for n in tensor_names(saved / "untied") if "embed" in n or "lm_head" in n]) == 2
    model = AutoModelForCausalLM.from_pretrained(saved / "untied")
    assert model.get_output_embeddings().weight is not model.get_input_embeddings().weight


@pytest.mark.parametrize("name", MODELS)
def test_shards(students, tmp_path, name):
    students[name].save_pretrained(tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(students[name]))


def test_16_bit_weights_reload_as_they_are(tiny_teacher, randomise, tmp_path):
    student = randomise(convert(tiny_teacher("llama", dtype=torch.bfloat16), {"name": "hedgemamba"})[0]).eval()
    assert {p.dtype for p in student.parameters()} == {torch.bfloat16}
    student.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert torch.equal(logits(model), logits(student))


def imports(path: Path) -> tuple[set[str], set[str]]:
    """Top-level names of other packages, and our own modules, that a file imports anywhere in it."""
    others, ours = set(), set()
    inside = path.relative_to(PACKAGE.parent).with_suffix("").parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = [*inside[: len(inside) - node.level]] if node.level else []
            base += (node.module or "").split(".") if node.module else []
            modules = (
                [".".join(base)] if len(base) > 1 or not node.level else [f"{base[0]}.{a.name}" for a in node.names]
            )
        else:
            continue
        for module in modules:
            top, _, rest = module.partition(".")
            (ours if top == "attn2mamba" else others).add(rest if top == "attn2mamba" else top)
    return others, ours


@pytest.mark.parametrize("name", sorted(STUDENT_FILES))
def test_the_code_of_a_checkpoint_needs_only_torch_and_transformers(name):
    others, ours = imports(PACKAGE / "student" / name)
    assert others <= {"torch", "transformers", *sys.stdlib_module_names}
    assert {f"{module.removeprefix('student.')}.py" for module in ours} <= STUDENT_FILES


DATA = {"errors", "counts", "recipe_file", "store", "sources"}
MAY_IMPORT = {
    "student": {"student"},
    "probe": {"student", "errors"},
    "convert": {"student", "errors", "probe", "sizes"},
    "losses": {"student", "errors"},
    "recipe": DATA,
    "recipe_file": DATA,
    "counts": DATA,
    "data": DATA,
    "sources": DATA,
    "store": DATA,
}
MUST_NOT_IMPORT = {
    "evaluate": {"stages", "train", "cli"},
    "bench": {"stages", "train", "cli"},
    "stages": {"train", "cli"},
    "train": {"cli"},
}


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_one_way(path):
    place = path.relative_to(PACKAGE).with_suffix("").parts[0]
    ours = {module.partition(".")[0] for module in imports(path)[1]}
    if place in MAY_IMPORT:
        assert ours <= MAY_IMPORT[place]
    assert not ours & MUST_NOT_IMPORT.get(place, set())
