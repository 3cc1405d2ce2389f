"""What a score by length or depth means beside the teacher's: where the teacher fails, the task says nothing."""

import math
from collections import defaultdict

from .measure import Json


def calibrate(cells_student: list[Json], cells_teacher: list[Json]) -> list[Json]:
    """The student's cells, each with the teacher's accuracy in the same place as `teacher`, and `teacher_fails` where
    that is not above chance by two standard errors of guessing, all depths of a length taken together: of a depth alone
    there are so few items that luck would choose the places to compare. Cells without an accuracy, or that the teacher
    lacks, come back as they are."""
    scored = [cell for cell in cells_teacher if "accuracy" in cell]
    known = {_place(cell): cell["accuracy"] for cell in scored}
    groups: dict[frozenset, list[Json]] = defaultdict(list)
    for cell in scored:
        groups[_place(cell, "depth")].append(cell)
    marked = []
    for cell in cells_student:
        if "accuracy" in cell and _place(cell) in known:
            fails = hardly_guesses(groups[_place(cell, "depth")])
            cell = {**cell, "teacher": known[_place(cell)], "teacher_fails": fails}
        marked.append(cell)
    return marked


def hardly_guesses(cells: list[Json]) -> bool:
    """Whether guessing, with the cells' `chance` (0 if they have none), would be right as often."""
    count, chance = sum(cell["n"] for cell in cells), cells[0].get("chance", 0.0)
    accuracy = sum(cell["accuracy"] * cell["n"] for cell in cells) / count
    return accuracy <= chance + 2 * math.sqrt(chance * (1 - chance) / count)


def _place(cell: Json, *without: str) -> frozenset:
    """What is measured in a cell, apart from how it came out."""
    results = ("accuracy", "n", "items", "stderr", "chance", "beyond_training", *without)
    return frozenset((name, value) for name, value in cell.items() if name not in results)
