"""lm-evaluation-harness's tasks by name, with their data from local folders or the hub."""

import contextlib
import difflib
import functools
import importlib.util
import io
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets

from ..errors import UserError

FEW_SHOT_SEED = 1234
"""The harness's own."""


def is_installed() -> bool:
    return importlib.util.find_spec("lm_eval") is not None


@functools.cache
def manager() -> Any:
    if not is_installed():
        raise UserError("tasks of lm-evaluation-harness need it installed: pip install lm-eval")
    from lm_eval.tasks import TaskManager

    return TaskManager()


def expand(name: str, others: Sequence[str] = ()) -> list[str]:
    """The tasks and groups that a name of the harness stands for: a tag, or a group without a figure of its own, stands
    for its members. Raises UserError, with the nearest names, `others` among them, for one it does not know."""
    entry = manager().task_index.get(name)
    if entry is None:
        raise unknown(name, [*others, *manager().all_tasks])
    if entry.kind.name == "TAG":
        return sorted(entry.tags)
    members = entry.cfg["task"] if entry.kind.name == "GROUP" and "aggregate_metric_list" not in entry.cfg else []
    if members and all(isinstance(member, str) for member in members):
        return [part for member in members for part in expand(member)]
    return [name]


def unknown(name: str, known: list[str]) -> UserError:
    near = difflib.get_close_matches(name, known, n=3)
    hint = f"did you mean {' or '.join(repr(n) for n in near)}?" if near else "see docs/evaluation.md"
    return UserError(f"no task is called '{name}'; {hint}")


def load_tasks(name: str, data_root: Path | None) -> dict[str, Any]:
    """Task objects with their data and few-shot settings. Raises UserError where data or a package is missing, or the
    task needs more than text (images, code that is run)."""
    text_alone = UserError(f"task '{name}' runs generated code or needs images or sound; choose one of text alone")
    if (manager().task_index[name].cfg or {}).get("unsafe_code"):
        raise text_alone
    try:
        with silence(), local_datasets(data_root):
            tasks = manager().load([name])["tasks"]
    except UserError:
        raise
    except ImportError as error:
        raise UserError(f"task '{name}' needs a package that is not installed ({error})") from error
    except Exception as error:  # the hub, its cache and its readers share no base class
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(
            f"task '{name}': its data cannot be loaded ({reason}); check the network or give --data-root"
        ) from error
    for task in tasks.values():
        if getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
            raise text_alone
        if task.config.num_fewshot is None:
            task.set_config("num_fewshot", 0)
        task.set_fewshot_seed(FEW_SHOT_SEED)
    return tasks


@contextlib.contextmanager
def local_datasets(root: Path | None) -> Iterator[None]:
    """Inside, data sets are read from folders below `root` named as on the hub; without a root, from the hub."""
    original = datasets.load_dataset

    def load(path: str, *args: Any, **options: Any) -> Any:
        folder = root / path if root else Path(path)
        if not folder.is_dir():
            raise UserError(f"'{root}' holds no {path}; give another --data-root, or none to use the hub")
        return original(str(folder), *args, **options)

    datasets.load_dataset = original if root is None else load
    try:
        yield
    finally:
        datasets.load_dataset = original


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Without the harness's warnings and progress bars, which are about its own steps."""
    logger, bars = logging.getLogger("lm_eval"), datasets.is_progress_bar_enabled()
    level = logger.level
    logger.setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)
        if bars:
            datasets.enable_progress_bars()
