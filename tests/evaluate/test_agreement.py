"""Agreement with the teacher: against its definition, through the runner, and what it refuses."""

import io

import pytest
import torch

from attn2mamba.convert import convert
from attn2mamba.errors import UserError
from attn2mamba.evaluate import agreement
from attn2mamba.evaluate.agreement import Agreement, binned_kl, compare, keep_top
from attn2mamba.evaluate.measure import Figure, Subject
from attn2mamba.evaluate.openings import OPENINGS, opening_ids
from attn2mamba.evaluate.options import SuiteOptions
from attn2mamba.evaluate.results import Results
from attn2mamba.evaluate.runner import Candidate, evaluate
from attn2mamba.progress import Steps


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(agreement, "NEW_TOKENS", 8)
    monkeypatch.setattr(agreement, "UNIT", 2)


@pytest.fixture(scope="module")
def subjects(tiny_teacher, tiny_tokenizer, randomise):
    """Teacher and student, the head with twenty rows that are no token."""
    teacher = tiny_teacher("llama", vocab_size=len(tiny_tokenizer) + 20)
    student = randomise(convert(teacher, {"name": "hedgemamba", "window": 16})[0]).eval()
    models = {"teacher": teacher, "student": student}
    return {role: Subject(role, role, model, tiny_tokenizer, "fp32", role) for role, model in models.items()}


def run(subjects, roles, directory, measure=None, batch_size=8):
    measure = measure or Agreement(SuiteOptions(limit=3, batch_size=batch_size))
    candidates = [Candidate(role, lambda role=role: subjects[role]) for role in roles]
    return evaluate(candidates, [measure], Results(directory), Steps(io.StringIO()), "test")["measures"]["agreement"]


def test_equals_the_definition(subjects, tiny_tokenizer, tmp_path):
    report = run(subjects, ["student", "teacher"], tmp_path)
    models, known = {r: s.model for r, s in subjects.items()}, len(tiny_tokenizer)
    wanted = {"token_agreement": 0.0, "kl": 0.0, "common_prefix": 0.0}
    for text in OPENINGS[:3]:
        prompt, said = opening_ids(tiny_tokenizer, text), {}
        for role, model in models.items():
            ids = list(prompt)
            while len(ids) < len(prompt) + 8 and (len(ids) == len(prompt) or ids[-1] != tiny_tokenizer.eos_token_id):
                with torch.no_grad():
                    ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1, :known].argmax()))
            said[role] = ids[len(prompt) :]
        theirs = said["teacher"]
        with torch.no_grad():
            ids = torch.tensor([prompt + theirs[:-1]])
            p, q = (
                models[role](ids, use_cache=False).logits[0, len(prompt) - 1 :, :known].double().log_softmax(-1)
                for role in ("teacher", "student")
            )
        wanted["token_agreement"] += float((q.argmax(-1) == torch.tensor(theirs)).double().mean()) / 3
        wanted["kl"] += float((p.exp() * (p - q)).sum(-1).mean()) / 3
        pairs = enumerate(zip(*said.values(), strict=False))
        wanted["common_prefix"] += next((i for i, (a, b) in pairs if a != b), len(theirs)) / 3
    found = {metric: figure["value"] for metric, figure in report["figures"]["student"].items()}
    assert found["token_agreement"] == pytest.approx(wanted["token_agreement"])
    assert found["common_prefix"] == pytest.approx(wanted["common_prefix"])
    assert 0.8 * wanted["kl"] < found["kl"] <= wanted["kl"]  # 64 tokens of 277 and the rest: a lower bound
    teacher = {metric: figure["value"] for metric, figure in report["figures"]["teacher"].items()}
    assert teacher["token_agreement"] == teacher["same_text"] == 1.0 and 0 <= teacher["kl"] < 1e-5
    assert report["differences"]["student"]["kl"]["n"] == 3


def test_kept_log_probabilities():
    """With every token in a bin the KL is whole, float16 or not; the likeliest tokens alone give a lower bound."""
    torch.manual_seed(0)
    p, q = (torch.randn(5, 40).double().mul(3).log_softmax(-1) for _ in range(2))
    whole = (p.exp() * (p - q)).sum(-1)
    assert torch.allclose(binned_kl(keep_top(p), q), whole, rtol=2e-3)
    p, q = (torch.randn(5, 1000).double().mul(3).log_softmax(-1) for _ in range(2))
    whole = (p.exp() * (p - q)).sum(-1)
    found = binned_kl(keep_top(p), q)
    assert (found < whole).all() and (found > 0.7 * whole).all()
    assert binned_kl(keep_top(p), p).abs().max() < 1e-6


@pytest.mark.parametrize(
    ("tokens", "prefix", "same"), [([1, 2, 3], 3, 1), ([1, 2, 4], 2, 0), ([9, 2, 3], 0, 0), ([1, 2], 2, 0)]
)
def test_common_prefix(tokens, prefix, same):
    distribution = torch.eye(5).double()[[1, 2, 0]].mul(9).log_softmax(-1)
    scores = compare({"continuation": [1, 2, 3], **keep_top(distribution)}, distribution, tokens)
    assert scores["common_prefix"] == prefix and scores["same_text"] == same
    assert scores["token_agreement"] == pytest.approx(2 / 3)


def test_what_is_known_is_not_run_again_and_batches_do_not_matter(subjects, tmp_path, monkeypatch):
    first = run(subjects, ["teacher", "student"], tmp_path)
    assert run(subjects, ["teacher", "student"], tmp_path / "one", batch_size=1)["figures"] == first["figures"]
    used = Agreement(SuiteOptions(limit=3))
    monkeypatch.setattr(Agreement, "run", lambda *_: pytest.fail("ran again"))
    assert run(subjects, ["teacher", "student"], tmp_path) == first
    assert run(subjects, ["teacher", "student"], tmp_path, used) == first
    assert run(subjects, ["teacher", "student"], tmp_path, used) == first  # a measure that has met the teacher before


def test_another_teacher_is_another_comparison(subjects, tiny_teacher, tiny_tokenizer, tmp_path):
    first = run(subjects, ["teacher", "student"], tmp_path)
    model = tiny_teacher("llama", seed=3, vocab_size=len(tiny_tokenizer))
    others = {**subjects, "teacher": Subject("teacher", "other", model, tiny_tokenizer, "fp32", "other")}
    second = run(others, ["teacher", "student"], tmp_path)
    assert second["figures"]["student"] != first["figures"]["student"]


def test_needs_a_teacher_with_the_same_tokens(subjects, bos_tokenizer, tmp_path):
    with pytest.raises(UserError, match="compares with a teacher"):
        run(subjects, ["student"], tmp_path)
    student = subjects["student"]
    strange = Subject("student", "s", student.model, bos_tokenizer, "fp32", "strange")
    report = run(
        {**subjects, "student": strange}, ["teacher", "student"], tmp_path
    )  # left out, with what else there is
    assert report["figures"]["student"] == {}


def test_a_teacher_at_odds_with_itself(subjects):
    measure = Agreement(SuiteOptions(limit=2))
    assert measure.complaint({"token_agreement": Figure(0.999, 2)}) is None
    assert "for 50% of the tokens" in (measure.complaint({"token_agreement": Figure(0.5, 2)}) or "")
