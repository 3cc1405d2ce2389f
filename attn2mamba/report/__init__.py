"""RUN/report.html and RUN/report.json: what runs are worth, from the files that lie in them."""

import json
from collections.abc import Sequence
from pathlib import Path

from ..quiet import quiet
from ..run import disk_errors, write_text
from .document import make_document
from .page import render


def write_report(runs: Sequence[Path], output: Path | None = None) -> Path:
    """Write report.html and report.json about one run, or several side by side, to `output` (the first run's directory
    where it is None), and return the page's path. Raises UserError for a directory that is not a run."""
    with quiet():
        document = make_document(runs, output)
        page = render(document)
    directory = output or runs[0]
    with disk_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
    write_text(directory / "report.json", json.dumps(document, indent=1, allow_nan=False))
    write_text(directory / "report.html", page)
    return directory / "report.html"
