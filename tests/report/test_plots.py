"""Ticks and labels of plots, and error bars."""

import re

import pytest

from attn2mamba.report.panels import Drawer
from attn2mamba.report.plots import Axis, Line, lines, log_ticks
from attn2mamba.report.recall_panels import _bars, recall_groups

BYTES, SECONDS = Axis("", log=True, kind="bytes"), Axis("seconds", log=True)


def tick_texts(axis: Axis, values: list[float]) -> list[str]:
    """Labels of the y axis."""
    svg = lines("plot", "plot", [Line(1, [16.0, 512.0][: len(values)], values)], Axis("", True, "tokens"), axis)
    return [text for text in re.findall("<text[^>]*>([^<]+)</text>", svg) if text not in ("16", "512", axis.label)]


@pytest.mark.parametrize("values", [[9e6, 1.1e8], [6e6, 6e6], [2.0**23, 2.0**23], [5e5, 3e10], [2.1e6, 3.9e6]])
def test_bytes_have_powers_of_two(values):
    texts = tick_texts(BYTES, values)
    assert 3 <= len(texts) <= 7
    assert all(re.fullmatch(r"(1|2|4|8|16|32|64|128|256|512) (B|KiB|MiB|GiB)", text) for text in texts)


@pytest.mark.parametrize("values", [[0.22, 6.4], [0.35, 5.0], [120e-3, 200e-3], [1.0, 1.01], [3.0], [1e-3, 5e3]])
def test_every_axis_has_several_ticks(values):
    assert len(tick_texts(SECONDS, values)) >= 2
    assert len(log_ticks(min(values), max(values), "plain")) >= 3


def test_a_wide_tick_does_not_push_the_label_out():
    svg = lines("plot", "plot", [Line(1, [0, 1], [0.99981, 1.00012])], Axis("layer", kind="whole"), Axis("factor"))
    place = re.search(r"<text([^>]*)>factor</text>", svg)[1]
    assert "rotate(-90" not in place and "text-anchor: middle" not in place
    assert float(re.search(r'x="([\d.]+)"', place)[1]) > 0


def recall_run(cells: list[dict]) -> dict:
    part = {"kind": "recall", "by_role": {"student": cells}, "precision": {"student": "fp32"}, "command": "c"}
    return {"name": "run", "teacher": "t", "models": {}, "cells": {"copying": part}}


def test_bars_are_standard_errors_over_items():
    cell = {"distance": 64, "size": 32, "accuracy": 0.5, "n": 124, "items": 4, "stderr": 0.2, "chance": 0.03}
    alone = {**cell, "distance": 128, "items": 1, "stderr": None}
    assert _bars([cell, alone]) == ([0.3, 0.5], [0.7, 0.5])
    [group] = recall_groups(Drawer([recall_run([cell, {**alone, "items": 2}])]))
    assert group.sources == ["n = 2 to 4 strings each; bars are one standard error over them, fp32"]
    [group] = recall_groups(Drawer([recall_run([alone])]))
    assert group.sources == ["n = 1 strings each, fp32"]
    old = {name: x for name, x in cell.items() if name not in ("items", "stderr")}
    [group] = recall_groups(Drawer([recall_run([old])]))
    assert _bars([old]) == ([0.5], [0.5]) and group.sources == ["n = 124 answers each, fp32"]
