"""Tasks of lm-evaluation-harness, by the harness's own task files and metrics, one slice of documents at a time."""

import copy
import functools
import hashlib
import json
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from .harness_tasks import load_tasks, silence
from .measure import Difference, Figure, Json, Measure, Subject, mean_figure, paired
from .options import SuiteOptions
from .ratios import BITS, EXPONENTIAL, Scale, ratio_difference, ratio_figure

UNIT_DOCUMENTS = {"generate_until": 10, "loglikelihood_rolling": 5}
DOCUMENTS = 50
RATIOS: dict[str, Scale] = {"perplexity": EXPONENTIAL, "weighted_perplexity": EXPONENTIAL, "bits_per_byte": BITS}
"""The harness's aggregations of log-likelihoods, alone or with a weight."""


class HarnessTask(Measure):
    """A task of the harness, or a group, whose figures are then over the documents of all its tasks."""

    version = 1
    any_tokenizer = True

    def __init__(self, name: str, task: str, options: SuiteOptions) -> None:
        self.name, self.task = name, task
        self.limit, self.data_root, self.batch_size = options.limit, options.data_root, options.batch_size
        self._requests: dict[str, list[list[Any]]] = {}

    @functools.cached_property
    def tasks(self) -> dict[str, Any]:
        """The harness's task objects, by name, with their data."""
        return load_tasks(self.task, self.data_root)

    @property
    def kind(self) -> str:  # type: ignore[override]
        generated = any(task.OUTPUT_TYPE == "generate_until" for task in self.tasks.values())
        return "generation" if generated else "likelihood"

    @functools.cached_property
    def documents(self) -> dict[str, list[Any]]:
        return {name: list(task.eval_docs) for name, task in self.tasks.items()}

    def options(self) -> Json:
        return self._options

    @functools.cached_property
    def _options(self) -> Json:
        import lm_eval

        tasks = {
            name: {
                "version": str(task.VERSION),
                "few_shot": task.config.num_fewshot,
                "data": digest(self.documents[name]),
            }
            for name, task in self.tasks.items()
        }
        return {"harness": lm_eval.__version__, "tasks": tasks}

    def units(self, subject: Subject) -> list[str]:
        found = []
        for name, documents in self.documents.items():
            count = len(documents) if self.limit is None else min(self.limit, len(documents))
            step = UNIT_DOCUMENTS.get(self.tasks[name].OUTPUT_TYPE, DOCUMENTS)
            found += [f"{name}:{start}-{min(start + step, count)}" for start in range(0, count, step)]
        return found

    def run(self, subject: Subject, unit: str) -> Json:
        from .harness_model import HarnessModel

        name, _, span = unit.rpartition(":")
        start, stop = map(int, span.split("-"))
        model, chosen = HarnessModel(subject, self.batch_size), self.requests(name)[start:stop]
        instances = [instance for group in chosen for instance in group]
        by_kind: dict[str, list[Any]] = defaultdict(list)
        for instance in instances:
            by_kind[instance.request_type] += [instance] * instance.repeats
        with silence():
            for kind, asked in by_kind.items():
                for instance, response in zip(asked, getattr(model, kind)(asked), strict=True):
                    instance.resps.append(response)
            return self._judge(name, chosen, self.documents[name][start:stop])

    def requests(self, name: str) -> list[list[Any]]:
        """Fresh requests of each document, in order. All up to the limit are built at once, since few-shot examples
        are drawn one document after another."""
        if name not in self._requests:
            task, groups = self.tasks[name], defaultdict(list)
            with silence():
                task.build_all_requests(limit=self.limit)
            for instance in task.instances:
                groups[instance.doc_id].append(instance)
            self._requests[name] = [sorted(group, key=lambda i: i.idx) for _, group in sorted(groups.items())]
        return [[_fresh(instance) for instance in group] for group in self._requests[name]]

    def _judge(self, name: str, chosen: list[list[Any]], documents: list[Any]) -> Json:
        """The task's own filters and metrics; scores by metric, with the filter's name where there are several."""
        task, scores, kinds = self.tasks[name], defaultdict(list), {}
        task._instances = [instance for group in chosen for instance in group]
        task.apply_filters()
        for filter_name in task._instances[0].filtered_resps:
            for document, group in zip(documents, chosen, strict=True):
                metrics = task.process_results(document, [i.filtered_resps[filter_name] for i in group])
                for metric, value in metrics.items():
                    full = metric if filter_name == "none" else f"{metric},{filter_name}"
                    scores[full].append(_plain(value))
                    kinds[full] = _kind(task, metric)
        found: Json = {"scores": dict(scores), "kinds": kinds}
        if task.OUTPUT_TYPE == "multiple_choice":
            found["chance"] = sum(1 / len(group) for group in chosen)
        return found

    def figures(self, results: dict[str, Json]) -> dict[str, Figure]:
        found = {}
        for metric, (kind, scores) in joined(results).items():
            if kind == "mean":
                found[metric] = mean_figure(scores)
            elif kind in RATIOS:
                found[metric] = ratio_figure(*_ratio(scores), RATIOS[kind])
            elif len(self.tasks) == 1:
                (task,) = self.tasks.values()
                found[metric] = Figure(float(task.aggregation()[metric.split(",")[0]](scores)), len(scores))
        return found

    def differences(self, results: dict[str, Json], teacher: dict[str, Json]) -> dict[str, Difference]:
        found, reference = {}, joined(teacher)
        for metric, (kind, scores) in joined(results).items():
            if metric in reference and kind == "mean":
                found[metric] = paired(scores, reference[metric][1])
            elif metric in reference and kind in RATIOS:
                found[metric] = ratio_difference(_ratio(scores), _ratio(reference[metric][1]), RATIOS[kind])
        return found

    def cells(self, results: dict[str, Json]) -> list[Json]:
        """One row a task: documents, chance of a guess (multiple choice), mean of each metric that is a mean."""
        by_task: dict[str, dict[str, Json]] = defaultdict(dict)
        for unit, result in results.items():
            by_task[unit.rpartition(":")[0]][unit] = result
        rows = []
        for name, units in by_task.items():
            means = {m: mean_figure(scores).value for m, (kind, scores) in joined(units).items() if kind == "mean"}
            count = max(len(scores) for _, scores in joined(units).values())
            chances = [result["chance"] for result in units.values() if "chance" in result]
            rows.append({"task": name, "n": count, **({"chance": sum(chances) / count} if chances else {}), **means})
        return rows


def joined(results: dict[str, Json]) -> dict[str, tuple[str, list[Any]]]:
    """Metric -> (kind, its scores over all units)."""
    found: dict[str, tuple[str, list[Any]]] = {}
    for result in results.values():
        for metric, scores in result["scores"].items():
            found.setdefault(metric, (result["kinds"][metric], []))[1].extend(scores)
    return found


def _ratio(scores: list[Any]) -> tuple[list[float], list[float]]:
    """(-log-likelihood, weight) of each item."""
    pairs = [score if isinstance(score, list) else (score, 1.0) for score in scores]
    return [-float(likelihood) for likelihood, _ in pairs], [float(weight) for _, weight in pairs]


def _kind(task: Any, metric: str) -> str:
    """How the harness makes a figure of the metric: mean, one of RATIOS, or other."""
    name = getattr(task.aggregation().get(metric), "__name__", "mean")
    return name if name == "mean" or name in RATIOS else "other"


def _plain(value: Any) -> Any:
    """A metric's value for one document as JSON has it."""
    if isinstance(value, tuple | list):
        return [_plain(x) for x in value]
    value = value.tolist() if hasattr(value, "tolist") else value
    return float(value) if isinstance(value, bool) else value


def _fresh(instance: Any) -> Any:
    other = copy.copy(instance)
    other.resps, other.filtered_resps = [], {}
    return other


def digest(documents: list[Any]) -> str:
    total = hashlib.sha256()
    for document in documents:
        total.update(json.dumps(document, sort_keys=True, default=str).encode())
    return total.hexdigest()[:16]


def factory(name: str) -> Callable[[SuiteOptions], Measure]:
    """Of the measure of one task or group; `lm:NAME` is the harness's NAME where another measure has that name too."""
    return lambda options: HarnessTask(name, name.removeprefix("lm:"), options)
