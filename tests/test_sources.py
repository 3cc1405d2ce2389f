"""What DATA strings name, and what each broken one says."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from attn2mamba.errors import UserError
from attn2mamba.sources import load_texts, parse_source

TEXTS = ["first document\nof two lines\n", "second — with a dash"]


def jsonl(rows) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def error_of(data) -> str:
    with pytest.raises(UserError) as caught:
        list(load_texts(str(data)))
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("extension", [".txt", ".raw"])
@pytest.mark.parametrize("pack", [None, gzip.compress, zstandard.compress])
def test_a_text_file_is_one_document(tmp_path, extension, pack):
    suffix = {None: "", gzip.compress: ".gz", zstandard.compress: ".zst"}[pack]
    path = tmp_path / f"wiki.test{extension}{suffix}"
    path.write_bytes(pack(TEXTS[0].encode()) if pack else TEXTS[0].encode())
    assert list(load_texts(str(path))) == TEXTS[:1]


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstandard.compress])
def test_jsonl_is_one_document_a_line(tmp_path, pack):
    path = tmp_path / f"a.jsonl{ {bytes: '', gzip.compress: '.gz', zstandard.compress: '.zst'}[pack] }"
    path.write_bytes(pack(jsonl({"id": 1, "text": text} for text in TEXTS).encode()))
    assert list(load_texts(str(path))) == TEXTS


def test_the_only_string_column_of_parquet_is_the_text(tmp_path):
    pq.write_table(pa.table({"n": [1, 2], "content": TEXTS}), tmp_path / "a.parquet")
    assert list(load_texts(str(tmp_path / "a.parquet"))) == TEXTS


def test_text_goes_before_other_string_columns(tmp_path):
    pq.write_table(pa.table({"source": ["a", "b"], "text": TEXTS}), tmp_path / "a.parquet")
    assert list(load_texts(str(tmp_path / "a.parquet"))) == TEXTS


def test_directories_are_read_recursively_in_order_and_other_files_left_alone(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / ".cache").mkdir()
    (tmp_path / "b.txt").write_text("bee")
    (tmp_path / "sub" / "a.txt").write_text("ay")
    (tmp_path / "README.md").write_text("not data")
    (tmp_path / ".cache" / "c.txt").write_text("hidden")
    assert list(load_texts(str(tmp_path))) == ["bee", "ay"]


def test_globs(tmp_path):
    for name in ("a1.txt", "a2.txt", "b.txt"):
        (tmp_path / name).write_text(name)
    assert list(load_texts(f"{tmp_path}/a*.txt")) == ["a1.txt", "a2.txt"]


def test_blank_documents_are_skipped(tmp_path):
    (tmp_path / "a.jsonl").write_text(jsonl([{"text": " \n"}, {"text": "kept"}, {"text": None}]) + "\n\n")
    assert list(load_texts(str(tmp_path / "a.jsonl"))) == ["kept"]


def test_python_docs_is_one_document_a_topic():
    texts = list(load_texts("python-docs"))
    assert len(texts) > 50
    assert any("lambda" in text for text in texts)


def test_weights(tmp_path):
    (tmp_path / "lang=en.txt").write_text("x")
    assert parse_source(f"{tmp_path}/=0.7").weight == 0.7
    assert parse_source("python-docs=2").weight == 2
    assert parse_source("python-docs").weight is None
    assert parse_source(str(tmp_path / "lang=en.txt")).weight is None


@pytest.mark.parametrize("weight", ["0", "-1", "nan", "inf", "much", ""])
def test_a_weight_must_be_a_positive_number(weight):
    assert f"'{weight}' must be a number above 0" in error_of(f"python-docs={weight}")


def test_identity_changes_with_the_content(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one")
    before = parse_source(str(path)).identity
    path.write_text("three")
    assert parse_source(str(path)).identity != before


def test_missing_path(tmp_path):
    message = error_of(tmp_path / "nowhere" / "a.txt")
    assert "no such file or directory" in message and "python-docs" in message
    assert "no such file" in error_of("nowhere.jsonl")
    assert "no such file" in error_of("./nowhere")


def test_hub_failure_is_one_line():
    message = error_of("nobody-at-all/no-such-set")
    assert "hub" in message and "check the name and the network" in message


def test_unsupported_extension(tmp_path):
    (tmp_path / "a.csv").write_text("x,y")
    assert "unsupported file type; use .txt" in error_of(tmp_path / "a.csv")
    assert "holds no file that is .txt" in error_of(tmp_path)
    assert "matches no file that is .txt" in error_of(f"{tmp_path}/*.csv")


@pytest.mark.parametrize("content", [b"", b" \n\n"])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_no_text_at_all(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    assert "holds no text" in error_of(tmp_path / name)


@pytest.mark.parametrize(
    ("second", "what"),
    [(b'{"text": "cut', "not JSON"), (b'{"text": "\xff"}', "not valid UTF-8"), (b"[1]", "not a JSON object")],
)
def test_jsonl_errors_name_file_and_line(tmp_path, second, what):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"text": "fine"}\n' + second)
    message = error_of(path)
    assert "bad.jsonl' line 2" in message and what in message


def test_jsonl_text_must_be_a_string(tmp_path):
    (tmp_path / "bad.jsonl").write_text(jsonl([{"text": "fine"}, {"text": 3}]))
    assert "line 2: 'text' is not a string" in error_of(tmp_path / "bad.jsonl")


def test_no_text_column_names_those_found(tmp_path):
    (tmp_path / "a.jsonl").write_text(jsonl([{"question": "why", "answer": "so"}]))
    pq.write_table(pa.table({"n": [1], "m": [2.0]}), tmp_path / "a.parquet")
    assert "question, answer" in error_of(tmp_path / "a.jsonl")
    assert "n, m" in error_of(tmp_path / "a.parquet")


@pytest.mark.parametrize("name", ["a.parquet", "a.txt.gz", "a.jsonl.zst"])
def test_broken_files_are_named(tmp_path, name):
    (tmp_path / name).write_bytes(b"none of these formats, but long enough to look like a file")
    assert name in error_of(tmp_path / name)


@pytest.mark.parametrize(("name", "pack"), [("a.txt.gz", gzip.compress), ("a.txt.zst", zstandard.compress)])
def test_truncated_files_are_named(tmp_path, name, pack):
    whole = pack(b"".join(b"line %d\n" % i for i in range(10_000)))
    (tmp_path / name).write_bytes(whole[: len(whole) // 2])
    assert name in error_of(tmp_path / name)


def test_not_utf8(tmp_path):
    (tmp_path / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    assert "latin.txt' is not valid UTF-8 at byte 3" in error_of(tmp_path / "latin.txt")
