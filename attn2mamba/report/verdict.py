"""The verdict in a sentence, from rules that are written down here and shown in the report."""

from enum import StrEnum

from .numbers import INTERVAL, MEASURED, NOT_FINITE, Json, Number, human

KEPT_RATIO, NEAR_RATIO = 1.05, 1.25
KEPT_RECALL, SOME_RECALL = 0.9, 0.5
MARGIN = 0.02
"""Accuracy, as a share of all items, that may be lost with the quality kept."""

LEAST_ITEMS = 30
"""Below that an interval from a normal distribution says little."""

RULES = (
    f"Perplexity: kept up to {KEPT_RATIO:.2f} x the teacher's, mostly kept up to {NEAR_RATIO:.2f} x, lost beyond.",
    f"Task accuracy: kept where the 95 % interval of the mean paired difference lies above minus {100 * MARGIN:.0f} "
    f"points, lost where it lies below, open where it contains that bound or the items are fewer than {LEAST_ITEMS}.",
    "Quality is the worse of the two; where tasks were not scored, the verdict speaks of perplexity alone.",
    f"Recall: kept from {KEPT_RECALL:.0%} of the teacher's, partly kept from {SOME_RECALL:.0%}, lost below; counted "
    "over guessing, where the teacher itself does better than guessing.",
    "Memory and speed are those at 32,768 tokens, one sequence. What was reckoned and not measured says so.",
)


class Grade(StrEnum):
    """How much of something the student keeps."""

    KEPT = "kept"
    MOST = "most"
    OPEN = "open"
    LOST = "lost"
    UNKNOWN = "not measured"


WORSE = (Grade.KEPT, Grade.MOST, Grade.OPEN, Grade.LOST)


def grade_perplexity(ratio: Number) -> Grade:
    if ratio.value is None:
        return Grade.LOST if ratio.note == NOT_FINITE else Grade.UNKNOWN
    return Grade.KEPT if ratio.value <= KEPT_RATIO else Grade.MOST if ratio.value <= NEAR_RATIO else Grade.LOST


def grade_accuracy(difference: Json | None) -> Grade:
    """By the 95 % interval of the mean difference: one that is not significant is what few items always give."""
    if difference is None:
        return Grade.UNKNOWN
    if difference["stderr"] is None or difference["n"] < LEAST_ITEMS:
        return Grade.OPEN
    reach = INTERVAL * difference["stderr"]
    if difference["value"] - reach >= -MARGIN:
        return Grade.KEPT
    return Grade.LOST if difference["value"] + reach < -MARGIN else Grade.OPEN


def grade_quality(ratio: Number, difference: Json | None) -> Grade:
    known = [g for g in (grade_perplexity(ratio), grade_accuracy(difference)) if g is not Grade.UNKNOWN]
    return max(known, key=WORSE.index) if known else Grade.UNKNOWN


def grade_recall(kept: Number) -> Grade:
    if kept.value is None:
        return Grade.UNKNOWN
    return Grade.KEPT if kept.value >= KEPT_RECALL else Grade.MOST if kept.value >= SOME_RECALL else Grade.LOST


QUALITY = {
    Grade.KEPT: "keeps the quality",
    Grade.MOST: "keeps most of the quality",
    Grade.OPEN: "may keep the quality (these items cannot tell)",
    Grade.LOST: "loses the quality",
}
PERPLEXITY = {
    Grade.KEPT: "keeps the perplexity",
    Grade.MOST: "comes near the perplexity",
    Grade.LOST: "loses the perplexity",
}
"""In place of QUALITY where nothing else was measured."""

RECALL = {Grade.KEPT: "keeps the recall", Grade.MOST: "keeps part of the recall", Grade.LOST: "loses the recall"}


def verdict(name: str, card: dict[str, Number], difference: Json | None) -> str:
    """One sentence on a run; `card` as `document.scorecard` makes it, difference as `quality.task_accuracy`."""
    quality, recall = grade_quality(card["perplexity_ratio"], difference), grade_recall(card["recall_kept"])
    parts = [_kept(quality, recall, card, difference)]
    parts += [x for x in (_memory(card), _speed(card)) if x]
    unknown = [word for word, key in UNKNOWN.items() if card[key].value is None and card[key].note != NOT_FINITE]
    if difference is None:
        unknown.insert(0, "task accuracy")
    if parts == [""]:
        return f"{name}: nothing was measured yet."
    sentence = f"{name} " + "; ".join(part for part in parts if part)
    return f"{sentence}. Not measured: {', '.join(unknown)}." if unknown else f"{sentence}."


UNKNOWN = {
    "perplexity": "perplexity_ratio",
    "recall": "recall_kept",
    "memory at 32k": "memory_at_32k",
    "speed at 32k": "speed_up_at_32k",
}


def _kept(quality: Grade, recall: Grade, card: dict[str, Number], difference: Json | None) -> str:
    """What is kept of quality and recall, joined by `and` where both are, or neither is."""
    parts = [_quality(quality, card["perplexity_ratio"], difference)]
    kept = card["recall_kept"].value
    if kept is not None:
        parts.append(f"{RECALL[recall]} ({human(kept, 'share')} of the teacher's)")
    word = "and" if (quality is Grade.LOST) == (recall is Grade.LOST) else "but"
    return f" {word} ".join(part for part in parts if part)


def _quality(grade: Grade, ratio: Number, difference: Json | None) -> str:
    where = f"{ratio.text} the teacher's{f' on {ratio.note}' if ratio.note else ''}"
    if ratio.note == NOT_FINITE:
        return f"{QUALITY[grade]} (its perplexity is not finite)"
    if difference is None:
        return "" if grade is Grade.UNKNOWN else f"{PERPLEXITY[grade]} ({where})"
    accuracy = f"accuracy {human(difference['value'], 'points', difference['stderr'])}"
    accuracy += f" on {difference['of'].removeprefix('items of ')}: {grade_accuracy(difference)}"
    return f"{QUALITY[grade]} ({accuracy if ratio.value is None else f'perplexity {where}; {accuracy}'})"


def _memory(card: dict[str, Number]) -> str:
    factor = card["memory_factor_at_32k"].value
    if factor is None:
        return ""
    times, way = _times(max(factor, 1 / factor)), "less" if factor >= 1 else "more"
    return f"at 32,768 tokens its state takes {times} {way} memory than a KV cache (reckoned)"


def _speed(card: dict[str, Number]) -> str:
    number, context = card["speed_up_at_32k"], "32,768 tokens"
    doubt = "" if number.note == MEASURED else f" ({number.note})"
    if number.value is None:
        number, doubt = card["speed_up_measured"], ""
        context = number.note
    if number.value is None:
        return ""
    how = f"{_times(number.value)} as fast as" if number.value >= 1 else f"{_times(1 / number.value)} slower than"
    return f"after {context} it decodes {how} its teacher{doubt}"


def _times(factor: float) -> str:
    return f"{factor:.0f} x" if factor >= 10 else f"{factor:.1f} x"
