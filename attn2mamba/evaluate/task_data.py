"""Rows of hub data sets: from a folder laid out like the hub, else from the hub."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ..errors import UserError


def read_rows(data_root: Path | None, name: str, config: str, split: str, limit: int | None = None) -> list[Any]:
    """The first `limit` rows of a split as dicts: of DATA_ROOT/NAME/CONFIG/SPLIT*.parquet, or of the hub's data set
    where no root is given. Raises UserError where they cannot be read."""
    if data_root is None:
        return _from_hub(name, config, split, limit)
    folder = data_root / name / config
    files = sorted(folder.glob(f"{split}*.parquet"))
    if not files:
        below = next((path for path in data_root.glob(f"*/{name}") if path.is_dir()), None)
        mend = f"give --data-root {below.parents[1]}" if below else f"put {name} there or leave --data-root out"
        raise UserError(f"no {split}*.parquet in '{folder}'; {mend}")
    try:
        rows = [row for file in files for row in pq.read_table(file).to_pylist()]
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"cannot read {split}*.parquet in '{folder}' ({str(error).splitlines()[0]})") from error
    return rows[:limit]


def read_texts(data_root: Path | None, name: str, config: str, split: str, limit: int | None = None) -> list[str]:
    """The column `text` of `read_rows`. Raises UserError where it is missing or empty, too."""
    texts = [row.get("text") for row in read_rows(data_root, name, config, split, limit)]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise UserError(f"{name}, split {split}, has no texts in a column `text`; fetch the data set again")
    return texts


def _from_hub(name: str, config: str, split: str, limit: int | None) -> list[Any]:
    import datasets

    try:
        rows = datasets.load_dataset(name, config, split=split)
    except Exception as error:  # the hub, its cache and its readers share no base class
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(f"data set '{name}' cannot be loaded from the hub ({reason}); give --data-root") from error
    return list(rows.select(range(len(rows) if limit is None else min(limit, len(rows)))))


def rows_digest(rows: list[Any]) -> str:
    """Short name of these very rows, for a measure's options."""
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()[:16]
