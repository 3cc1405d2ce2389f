"""One context and batch at a time: warm-up, then repeats of all models in turn."""

from dataclasses import dataclass
from typing import Any

from ..precision import PRECISIONS
from ..sizes import human_bytes
from .side import Side
from .worker import Unfinished

Json = dict[str, Any]

NEAR_ZERO = 16
"""Tokens of the context that stands for none: always measured, for what weights and overhead alone cost."""


SHORTER = "a shorter context was skipped: "


@dataclass(frozen=True)
class Options:
    """contexts and batches in rising order. repeats and new_tokens of each cell; max_seconds: for each model in a
    cell, warm-up included. state: precision of a student's states. data: text for the perplexity in each precision, on
    quality_tokens tokens (0: none)."""

    contexts: tuple[int, ...]
    batches: tuple[int, ...] = (1,)
    precisions: tuple[str, ...] = ("fp32",)
    new_tokens: int = 64
    repeats: int = 5
    device: str = "auto"
    max_seconds: float = 600.0
    state: str = "fp32"
    data: str = "python-docs"
    quality_tokens: int = 2048
    allow_pickle: bool = False

    def all_contexts(self) -> list[int]:
        return sorted({NEAR_ZERO, *self.contexts})


@dataclass
class CellRunner:
    """A result holds, by role, {"runs", "interleaved", "peak_bytes", "cache_bytes"} or {"skipped": why}, and the
    max_seconds that were given where they were too few for all repeats."""

    sides: dict[str, Side]
    workers: dict[str, Any]
    precision: str
    options: Options

    def unfinished(self, result: Json) -> list[str]:
        """Roles to be run, or run again: memory may be free by now, or more time be given."""
        return [role for role in self.sides if not self._is_final(result.get(role, {}))]

    def _is_final(self, result: Json) -> bool:
        complete = len(result.get("runs", [])) >= self.options.repeats
        return complete or result.get("max_seconds", 0) >= self.options.max_seconds

    def run(self, batch: int, context: int, known: Json, earlier: list[Json]) -> Json:
        """The result of a cell of which `known` is known; `earlier` are those of shorter contexts, in order."""
        found: dict[str, Json] = {}
        warm: dict[str, Json] = {}
        for role in self.unfinished(known):
            try:
                reason = self._too_large(role, batch, context, earlier)
                if reason:
                    found[role] = reason
                    continue
                warm[role] = self._timed(role, "warm_up", batch, context)
            except Unfinished as error:
                found[role] = self._skipped(error)
        found |= self._alternate(warm, batch, context)
        return known | {role: _fuller(known.get(role, {}), result) for role, result in found.items()}

    def _alternate(self, warm: dict[str, Json], batch: int, context: int) -> Json:
        """Rounds of one repeat of each, until all are done or the next round would exceed the time of one of them."""
        runs: dict[str, list[Json]] = {role: [] for role in warm}
        spent = {role: result["seconds"] for role, result in warm.items()}
        found: Json = {}

        def fits(role: str) -> bool:
            return spent[role] + warm[role]["seconds"] <= self.options.max_seconds

        for _ in range(self.options.repeats):
            if any(made and not fits(role) for role, made in runs.items()):
                break
            for role in list(runs):
                try:
                    if not fits(role):
                        raise Unfinished("no more than its warm-up fitted in --max-seconds")
                    runs[role].append(self._timed(role, "repeat", batch, context))
                    spent[role] += runs[role][-1]["seconds"]
                except Unfinished as error:
                    found[role] = self._skipped(error)
                    del runs[role]
        for role, made in runs.items():
            kept = [{name: run[name] for name in ("first", "steps", "others")} for run in made]
            found[role] = {"runs": kept, "interleaved": len(runs) > 1}
            found[role] |= {name: warm[role][name] for name in ("peak_bytes", "cache_bytes")}
            if len(made) < self.options.repeats:
                found[role]["max_seconds"] = self.options.max_seconds
        return found

    def _timed(self, role: str, method: str, batch: int, context: int) -> Json:
        vocabulary = min(side.model.config.vocab_size for side in self.sides.values())
        values = (context, batch, self.options.new_tokens, vocabulary)
        result = self.workers[role].call(method, *values, seconds=self.options.max_seconds)
        return {**result, "seconds": result["first"] + sum(result["steps"])}

    def _too_large(self, role: str, batch: int, context: int, earlier: list[Json]) -> Json | None:
        for result in earlier:
            if "skipped" in result.get(role, {}):
                why = result[role]["skipped"].removeprefix(SHORTER)
                return {**result[role], "skipped": SHORTER + why}
        element = PRECISIONS[self.precision].itemsize
        need = self.sides[role].step_bytes(context, batch, self.options.new_tokens, element)
        free = self.workers[role].call("free_bytes")
        if need > free:
            return {"skipped": f"it needs about {human_bytes(need)}, and {human_bytes(free)} are free"}
        return None

    def _skipped(self, error: Unfinished) -> Json:
        timed = "--max-seconds" in str(error)
        return {"skipped": str(error), **({"max_seconds": self.options.max_seconds} if timed else {})}


def _fuller(known: Json, found: Json) -> Json:
    """What was found, unless more repeats were known: a busier machine may fit fewer into more time."""
    if len(found.get("runs", [])) >= len(known.get("runs", [])):
        return found
    return known | {name: found[name] for name in ("max_seconds",) if name in found}
