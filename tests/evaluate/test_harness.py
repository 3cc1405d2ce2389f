"""lm-evaluation-harness's tasks through our adapter: the definition, any batch, the harness's own prompts."""

import json
import math
from pathlib import Path

import datasets
import lm_eval.tasks
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from lm_eval.api.instance import Instance

from attn2mamba import convert
from attn2mamba.errors import UserError
from attn2mamba.evaluate import harness, harness_model, harness_tasks
from attn2mamba.evaluate.harness import HarnessTask
from attn2mamba.evaluate.harness_model import HarnessModel
from attn2mamba.evaluate.harness_tasks import expand, load_tasks
from attn2mamba.evaluate.measure import Subject
from attn2mamba.evaluate.options import SuiteOptions

WORDS = ["the cat", "a dog", "the mat and the log", "cat", "dog", "sat on the log"]
ARC = [
    {
        "id": str(i),
        "question": f"What sat on the {'mat' if i % 2 else 'log'} number {i}?",
        "choices": {"text": [WORDS[(i + k) % 6] for k in range(3 + i % 2)], "label": list("ABCD")[: 3 + i % 2]},
        "answerKey": "ABC"[i % 3],
    }
    for i in range(7)
]
LAMBADA = [{"text": f"the cat sat on the {'mat ' * (i % 3)}and the dog sat on the log"} for i in range(5)]
PAGES = [
    {"page": f" = Title {i} = \n the cat sat on the mat , and the dog @-@ log {'sat ' * 9 * i}. \n"} for i in range(3)
]
GSM8K = [{"question": f"What is {i} and {i}?", "answer": f"{i} and {i} is {2 * i}.\n#### {2 * i}"} for i in range(9)]


def write(root, name, config, **splits):
    folder = root / name / config
    folder.mkdir(parents=True)
    files = "".join(f"  - split: {split}\n    path: {config}/{split}.parquet\n" for split in splits)
    readme = root / name / "README.md"
    before = readme.read_text().removesuffix("---\n") if readme.exists() else "---\nconfigs:\n"
    readme.write_text(f"{before}- config_name: {config}\n  data_files:\n{files}---\n")
    for split, rows in splits.items():
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{split}.parquet")


REAL_MANAGER = harness_tasks.manager
TASKS = ("arc", "lambada", "wikitext", "gsm8k", "piqa", "humaneval", "mmlu/default")


@pytest.fixture(scope="module", autouse=True)
def _setting(tmp_path_factory):
    """A cache of the module's own, and an index of a few tasks: that of all takes the harness many seconds."""
    folders = [str(Path(lm_eval.tasks.__file__).parent / name) for name in TASKS]
    manager = lm_eval.tasks.TaskManager(include_defaults=False, include_path=folders)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
        patch.setattr(harness_tasks, "manager", lambda: manager)
        yield


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    path = tmp_path_factory.mktemp("hub")
    write(path, "allenai/ai2_arc", "ARC-Easy", train=ARC[:1], validation=ARC[:1], test=ARC)
    write(path, "EleutherAI/lambada_openai", "default", test=LAMBADA)
    write(path, "EleutherAI/wikitext_document_level", "wikitext-2-raw-v1", train=PAGES, validation=PAGES, test=PAGES)
    write(path, "openai/gsm8k", "main", train=GSM8K, test=GSM8K[:4])
    return path


def subject(model, tokenizer):
    return Subject("teacher", "tiny", model, tokenizer, "fp32", "print")


@pytest.fixture(scope="module")
def teacher(tiny_teacher, tiny_tokenizer):
    return subject(tiny_teacher("llama", vocab_size=len(tiny_tokenizer)), tiny_tokenizer)


@pytest.fixture(scope="module")
def student(teacher, randomise):
    return subject(randomise(convert(teacher.model, {"name": "hedgemamba"})[0].eval()), teacher.tokenizer)


@pytest.fixture(scope="module")
def with_bos(tiny_teacher, bos_tokenizer):
    return subject(tiny_teacher("llama", vocab_size=len(bos_tokenizer)), bos_tokenizer)


def naive(who, prompt: str, continuation: str) -> tuple[float, bool]:
    """One token at a time, a forward each."""
    encode = lambda text: who.tokenizer(text).input_ids  # noqa: E731
    whole, context = encode(prompt + continuation), encode(prompt)
    total, greedy = 0.0, True
    for position in range(len(context), len(whole)):
        with torch.no_grad():
            row = who.model(torch.tensor([whole[:position]]), use_cache=False).logits[0, -1].double()
        total += float(row.log_softmax(-1)[whole[position]])
        greedy &= int(row.argmax()) == whole[position]
    return total, greedy


def requests(kind: str, *arguments) -> list[Instance]:
    return [Instance(kind, {}, args, 0, ("task", i, 1)) for i, args in enumerate(arguments)]


PAIRS = [("the cat", " sat"), ("the cat", " sat on the mat"), ("the cat", " dog"), ("a", "b"), ("the cat sat ", "on")]


@pytest.mark.parametrize("who", ["teacher", "student", "with_bos"])
def test_log_likelihoods_are_the_definition_whatever_shares_a_forward(request, monkeypatch, who):
    who = request.getfixturevalue(who)
    expected = [naive(who, prompt.rstrip(), prompt[len(prompt.rstrip()) :] + more) for prompt, more in PAIRS]
    for tokens in (1, 16, 4096):
        monkeypatch.setattr("attn2mamba.evaluate.harness_model.TOKENS_PER_FORWARD", tokens)
        found = HarnessModel(who, 4).loglikelihood(requests("loglikelihood", *PAIRS), disable_tqdm=True)
        for (value, greedy), (wanted, is_greedy) in zip(found, expected, strict=True):
            assert value == pytest.approx(wanted, abs=1e-4) and greedy == is_greedy


def test_a_continuation_is_greedy_where_every_token_is_the_likeliest():
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 1.0]])
    likelihood, greedy = harness_model._score(logits, torch.tensor([1, 0]))
    expected = logits.log_softmax(-1)
    assert greedy and likelihood == pytest.approx(float(expected[0, 1] + expected[1, 0]))
    assert not harness_model._score(logits, torch.tensor([1, 2]))[1]


@pytest.mark.parametrize("who", ["teacher", "with_bos"])
def test_an_empty_context_is_the_bos_or_eos(request, who):
    who = request.getfixturevalue(who)
    model = HarnessModel(who, 4)
    (found,) = model.loglikelihood(requests("loglikelihood", ("", "the cat")), disable_tqdm=True)
    first = who.tokenizer.bos_token_id if who.tokenizer.bos_token_id is not None else who.tokenizer.eos_token_id
    ids = [first, *who.tokenizer("the cat", add_special_tokens=False).input_ids]
    with torch.no_grad():
        rows = who.model(torch.tensor([ids]), use_cache=False).logits[0].double().log_softmax(-1)
    assert found[0] == pytest.approx(sum(float(rows[i, ids[i + 1]]) for i in range(len(ids) - 1)), abs=1e-4)


@pytest.mark.parametrize("who", ["teacher", "with_bos"])
def test_a_long_prompt_loses_its_beginning_but_for_the_bos(request, monkeypatch, who):
    who = request.getfixturevalue(who)
    model = HarnessModel(who, 4)
    model.max_length = 8
    text = "the cat sat on the mat and the dog sat on the log"
    (found,) = model.loglikelihood(requests("loglikelihood", (text, " the cat")), disable_tqdm=True)
    start, ids = model.start, who.tokenizer(text + " the cat", add_special_tokens=False).input_ids
    kept = ids[-9:] if start is None else [start, *ids[-8:]]
    count = len(ids) - len(who.tokenizer(text, add_special_tokens=False).input_ids)
    with torch.no_grad():
        rows = who.model(torch.tensor([kept]), use_cache=False).logits[0].double().log_softmax(-1)
    expected = sum(float(rows[i - 1, kept[i]]) for i in range(len(kept) - count, len(kept)))
    assert found[0] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("who", ["teacher", "with_bos"])
def test_rolling_scores_every_token_once(request, monkeypatch, who):
    who = request.getfixturevalue(who)
    text = "the cat sat on the mat and the dog sat on the log"
    (whole,) = HarnessModel(who, 4).loglikelihood_rolling(requests("loglikelihood_rolling", (text,)))
    first = who.tokenizer.bos_token or who.tokenizer.eos_token
    ids = who.tokenizer(first + text, add_special_tokens=False).input_ids
    with torch.no_grad():
        rows = who.model(torch.tensor([ids]), use_cache=False).logits[0].double().log_softmax(-1)
    assert whole == pytest.approx(sum(float(rows[i, ids[i + 1]]) for i in range(len(ids) - 1)), abs=1e-4)
    monkeypatch.setattr("attn2mamba.evaluate.harness_model.ROLLING_TOKENS", 6)
    (cut,) = HarnessModel(who, 4).loglikelihood_rolling(requests("loglikelihood_rolling", (text,)))
    assert math.isfinite(cut) and cut != pytest.approx(whole)


def test_generation_stops_at_the_stop_strings_in_any_batch(teacher):
    asked = [("the cat", {"until": ["zzz"], "max_gen_toks": 9}), ("a dog", {"until": ["zzz"], "max_gen_toks": 9})]
    asked += [("the log", {"until": ["zzz"], "max_gen_toks": 4}), ("mat", {"until": ["zzz"], "max_gen_toks": 9})]
    texts = [HarnessModel(teacher, n).generate_until(requests("generate_until", *asked)) for n in (1, 4)]
    assert texts[0] == texts[1] and all(texts[0])
    stop = texts[0][0][2:4]
    (cut,) = HarnessModel(teacher, 1).generate_until(
        requests("generate_until", ("the cat", {"until": [stop], "max_gen_toks": 9}))
    )
    assert cut == texts[0][0].partition(stop)[0]
    with pytest.raises(UserError, match="samples"):
        settings = {"until": [], "do_sample": True, "temperature": 0.7}
        HarnessModel(teacher, 1).generate_until(requests("generate_until", ("a", settings)))


def run(name, who, root, limit=None, batch_size=4):
    measure = HarnessTask(name, name, SuiteOptions(root, limit, batch_size=batch_size))
    results = {unit: json.loads(json.dumps(measure.run(who, unit))) for unit in measure.units(who)}
    return measure, results


@pytest.mark.parametrize("who", ["teacher", "student"])
def test_multiple_choice_by_the_harness_prompts(request, root, who):
    who = request.getfixturevalue(who)
    measure, results = run("arc_easy", who, root)
    right, normed = [], []
    for row in ARC:
        prompt, choices = f"Question: {row['question']}\nAnswer:", row["choices"]["text"]
        scores = [naive(who, prompt, " " + choice)[0] for choice in choices]
        gold = row["choices"]["label"].index(row["answerKey"])
        right.append(float(max(range(len(scores)), key=scores.__getitem__) == gold))
        by_length = [score / len(choice) for score, choice in zip(scores, choices, strict=True)]
        normed.append(float(max(range(len(scores)), key=by_length.__getitem__) == gold))
    (result,) = results.values()
    assert result["scores"] == {"acc": right, "acc_norm": normed}
    figures = measure.figures(results)
    assert (figures["acc"].value, figures["acc"].n) == (sum(right) / 7, 7)
    assert measure.cells(results)[0]["chance"] == pytest.approx((4 / 3 + 3 / 4) / 7)
    assert measure.differences(results, results)["acc_norm"].p == 1.0


def test_options_name_what_results_depend_on(root):
    found = HarnessTask("arc_easy", "arc_easy", SuiteOptions(root)).options()
    assert found["harness"] == lm_eval.__version__
    assert found["tasks"]["arc_easy"]["few_shot"] == 0 and len(found["tasks"]["arc_easy"]["data"]) == 16
    assert HarnessTask("arc_easy", "arc_easy", SuiteOptions(root, 3, batch_size=1)).options() == found


def test_units_are_the_same_for_every_limit(root, teacher, monkeypatch):
    """So that a first look is not measured again."""
    monkeypatch.setattr("attn2mamba.evaluate.harness.DOCUMENTS", 3)
    measure, whole = run("arc_easy", teacher, root)
    assert list(whole) == ["arc_easy:0-3", "arc_easy:3-6", "arc_easy:6-7"]
    _, part = run("arc_easy", teacher, root, limit=3)
    assert part == {"arc_easy:0-3": whole["arc_easy:0-3"]}
    assert measure.run(teacher, "arc_easy:3-6") == whole["arc_easy:3-6"]


def test_perplexities_are_ratios_of_sums(root, teacher):
    measure, results = run("lambada_openai", teacher, root)
    words = [naive(teacher, *row["text"].rsplit(" ", 1)[0:1], " " + row["text"].rsplit(" ", 1)[1]) for row in LAMBADA]
    figures = measure.figures(results)
    assert figures["perplexity"].value == pytest.approx(math.exp(-sum(w for w, _ in words) / 5), rel=1e-4)
    assert figures["acc"].value == sum(greedy for _, greedy in words) / 5
    measure, results = run("wikitext", teacher, root)
    figures = measure.figures(results)
    (unit,) = results.values()
    total = sum(value for value, _ in unit["scores"]["word_perplexity"])
    words = sum(count for _, count in unit["scores"]["word_perplexity"])
    assert figures["word_perplexity"].value == pytest.approx(math.exp(-total / words))
    assert figures["bits_per_byte"].value == pytest.approx(math.log2(figures["byte_perplexity"].value))
    assert measure.differences(results, results)["word_perplexity"].p == 1.0


def test_few_shot_examples_are_the_same_however_units_are_cut(root, teacher, monkeypatch):
    prompts = []

    def note(self, asked, disable_tqdm=False):
        prompts.append([request.args[0] for request in asked])
        return ["#### 2" for _ in asked]

    monkeypatch.setattr(HarnessModel, "generate_until", note)
    _, whole = run("gsm8k", teacher, root)
    monkeypatch.setitem(harness.UNIT_DOCUMENTS, "generate_until", 1)
    measure, cut = run("gsm8k", teacher, root)
    assert prompts[0] == [prompt for unit in prompts[1:] for prompt in unit]
    assert prompts[0][0].count("Question:") == 6
    assert measure.figures(whole) == measure.figures(cut)
    assert measure.figures(cut)["exact_match,strict-match"].value == 0.25


def test_names(root):
    assert expand("ai2_arc") == ["arc_challenge", "arc_easy"]
    assert expand("mmlu") == ["mmlu"]
    with pytest.raises(UserError, match="no task is called 'arc_esy'; did you mean 'arc_easy'"):
        expand("arc_esy")
    with pytest.raises(UserError, match="holds no baber/piqa"):
        load_tasks("piqa", root)
    with pytest.raises(UserError, match="runs generated code"):
        load_tasks("humaneval", root)


def test_a_group_is_the_documents_of_its_tasks(root, teacher, monkeypatch):
    both = load_tasks("arc_easy", root) | {"again": load_tasks("arc_easy", root)["arc_easy"]}
    monkeypatch.setattr("attn2mamba.evaluate.harness.load_tasks", lambda name, data_root: both)
    measure, results = run("group", teacher, root, limit=2)
    assert list(results) == ["arc_easy:0-2", "again:0-2"]
    assert measure.figures(results)["acc"].n == 4
    assert [row["task"] for row in measure.cells(results)] == ["arc_easy", "again"]


def test_the_harness_is_not_installed(monkeypatch):
    monkeypatch.setattr(harness_tasks, "is_installed", lambda: False)
    monkeypatch.setattr(harness_tasks, "manager", REAL_MANAGER.__wrapped__)
    with pytest.raises(UserError, match=r"pip install lm-eval"):
        expand("arc_easy")


@pytest.mark.slow
def test_agrees_with_the_harness_own_adapter(root, teacher):
    """HFLM pads on the right and has the tokenizer's BOS, which ours lacks here, so that both begin with the EOS."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    other = HFLM(pretrained=teacher.model, tokenizer=teacher.tokenizer, batch_size=3)
    names = ["arc_easy", "lambada_openai", "wikitext"]
    with harness_tasks.local_datasets(root), harness_tasks.silence():
        found = lm_eval.simple_evaluate(other, tasks=names, bootstrap_iters=0)["results"]
    for name in names:
        measure, results = run(name, teacher, root)
        for metric, figure in measure.figures(results).items():
            assert figure.value == pytest.approx(found[name][f"{metric},none"], rel=1e-4)
