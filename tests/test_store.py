"""The token store: written once, whole or not at all."""

import errno

import pyarrow as pa
import pytest

from attn2mamba import store
from attn2mamba.errors import UserError
from attn2mamba.sources import parse_source
from attn2mamba.store import Documents, open_store


@pytest.fixture
def source(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "the cat sat"}\n{"text": "on the mat"}\n')
    return parse_source(str(tmp_path / "a.jsonl"))


def test_documents_end_with_eos(source, tiny_tokenizer, tmp_path):
    documents = Documents(open_store(source, tiny_tokenizer, tmp_path / "cache"))
    eos = tiny_tokenizer.eos_token_id
    assert [list(documents[i]) for i in range(len(documents))] == [
        [*tiny_tokenizer.encode(text, add_special_tokens=False), eos] for text in ("the cat sat", "on the mat")
    ]
    assert documents.lengths.tolist() == [len(documents[0]), len(documents[1])]


def test_tokenised_once(source, tiny_tokenizer, tmp_path, monkeypatch):
    first = open_store(source, tiny_tokenizer, tmp_path / "cache")
    monkeypatch.setattr(store, "_tokenize", None)
    assert open_store(source, tiny_tokenizer, tmp_path / "cache").equals(first)


def test_padding_set_by_a_caller_changes_nothing(source, tiny_tokenizer, tmp_path):
    before = store.tokenizer_fingerprint(tiny_tokenizer)
    tiny_tokenizer(["a", "longer text"], padding=True, truncation=True, max_length=4)
    assert store.tokenizer_fingerprint(tiny_tokenizer) == before


def test_a_killed_run_leaves_nothing_that_is_read(source, tiny_tokenizer, tmp_path, monkeypatch):
    def killed(texts, tokenizer):
        yield next(tokenize(texts, tokenizer))
        raise KeyboardInterrupt

    tokenize = store._tokenize
    monkeypatch.setattr(store, "_tokenize", killed)
    with pytest.raises(KeyboardInterrupt):
        open_store(source, tiny_tokenizer, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
    monkeypatch.setattr(store, "_tokenize", tokenize)
    (tmp_path / "cache" / "leftover.tmp").write_bytes(b"half")
    assert open_store(source, tiny_tokenizer, tmp_path / "cache").num_rows == 2


@pytest.mark.parametrize("keep", [0, 10, -20])
def test_a_broken_store_is_rebuilt(source, tiny_tokenizer, tmp_path, keep):
    whole = open_store(source, tiny_tokenizer, tmp_path / "cache").to_pylist()
    (path,) = (tmp_path / "cache").iterdir()
    path.write_bytes(path.read_bytes()[:keep])
    assert open_store(source, tiny_tokenizer, tmp_path / "cache").to_pylist() == whole


def test_disk_full(source, tiny_tokenizer, tmp_path, monkeypatch):
    def full(texts, tokenizer):
        yield next(tokenize(texts, tokenizer))
        raise OSError(errno.ENOSPC, "No space left on device")

    tokenize = store._tokenize
    monkeypatch.setattr(store, "_tokenize", full)
    with pytest.raises(UserError, match=r"No space left on device.*free some space"):
        open_store(source, tiny_tokenizer, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_cache_that_is_not_a_directory(source, tiny_tokenizer, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="ATTN2MAMBA_CACHE"):
        open_store(source, tiny_tokenizer, tmp_path / "file")


def test_a_tokenizer_without_eos_is_refused(source, tiny_tokenizer, tmp_path):
    bare = type(tiny_tokenizer)(tokenizer_object=tiny_tokenizer.backend_tokenizer)
    with pytest.raises(UserError, match="no EOS token"):
        open_store(source, bare, tmp_path / "cache")


def test_a_long_document_is_one_document(tiny_tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(store, "PIECE_CHARACTERS", 50)
    text = "the cat sat on the mat\n" * 20 + "x" * 200
    (tmp_path / "a.txt").write_text(text)
    table = open_store(parse_source(str(tmp_path / "a.txt")), tiny_tokenizer, tmp_path / "cache")
    assert table.num_rows == 1
    assert tiny_tokenizer.decode(table["input_ids"][0].as_py()[:-1]) == text


def test_batches_become_chunks_of_one_table(source, tiny_tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(store, "BATCH_CHARACTERS", 1)
    table = open_store(source, tiny_tokenizer, tmp_path / "cache")
    documents = Documents(pa.concat_tables([table, table]))
    assert table.column("input_ids").num_chunks == 2
    assert documents[1].tolist() == documents[3].tolist() == table["input_ids"][1].as_py()
