"""Packing, the training stream, and the held-out split."""

import json
import random

import numpy as np
import pytest
import torch

from attn2mamba.data import Blocks, BlockStream, open_data
from attn2mamba.errors import UserError
from attn2mamba.sources import load_texts, parse_source
from attn2mamba.store import Documents, open_store

WORDS = ["the", "cat", "sat", "on", "mat", "and", "dog", "log"]


def write_corpus(path, documents, seed=0, words=(3, 60)):
    rng = random.Random(seed)
    texts = [" ".join(rng.choices(WORDS, k=rng.randint(*words))) + f" {seed}/{i}" for i in range(documents)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


@pytest.fixture
def corpus(tmp_path):
    return write_corpus(tmp_path / "corpus.jsonl", 200)


def all_ids(blocks):
    return torch.cat([block["input_ids"] for block in blocks])


def contents(blocks):
    return {tuple(block["input_ids"].tolist()) for block in blocks}


@pytest.fixture
def packed(corpus, tiny_tokenizer, tmp_path):
    documents = Documents(open_store(parse_source(corpus), tiny_tokenizer, tmp_path / "cache"))
    n = documents.lengths
    return Blocks(documents, np.stack([np.arange(len(n)), np.zeros_like(n), n], 1), 32)


def test_every_document_and_every_block_begins_with_the_bos(corpus, bos_tokenizer, tmp_path):
    """Where the tokenizer puts one: in a block that starts inside a document it stands in place of the first token."""
    bos = bos_tokenizer.bos_token_id
    stream, held_out = open_data([corpus], bos_tokenizer, 32, cache_dir=tmp_path)
    for blocks in (stream.blocks[0], held_out):
        for block in blocks:
            ids, numbers = block["input_ids"], block["document_ids"]
            starts = torch.cat([torch.tensor([True]), numbers[1:] != numbers[:-1]])
            assert torch.equal(ids == bos, starts)


def test_blocks_are_the_documents_end_to_end(packed, corpus, tiny_tokenizer):
    eos = tiny_tokenizer.eos_token_id
    expected = [id for text in load_texts(corpus) for id in [*tiny_tokenizer.encode(text), eos]]
    assert packed.tokens == len(expected)
    assert len(packed) == len(expected) // 32
    assert all_ids(packed).tolist() == expected[: len(packed) * 32]


def test_document_ids_count_from_zero_and_step_after_each_eos(packed, tiny_tokenizer):
    for block in packed:
        assert block["input_ids"].dtype == block["document_ids"].dtype == torch.int64
        assert block["input_ids"].shape == block["document_ids"].shape == (32,)
        ends = (block["input_ids"] == tiny_tokenizer.eos_token_id).long()
        assert torch.equal(block["document_ids"], ends.cumsum(0) - ends)


def test_index_out_of_range(packed):
    with pytest.raises(IndexError):
        packed[len(packed)]


def test_a_batch_is_a_pure_function_of_its_numbers(corpus, tmp_path, tiny_tokenizer):
    other = write_corpus(tmp_path / "other.jsonl", 100, seed=1)

    def fresh():
        return open_data([f"{corpus}=0.5", f"{other}=2"], tiny_tokenizer, 32, seed=3)[0]

    whole = fresh().batch(0, 20)
    for stream in (fresh(), fresh()):
        stream.batch(1_000, 2)
        part = stream.batch(10, 4)
        for key in ("input_ids", "document_ids"):
            assert torch.equal(part[key], whole[key][10:14])


def test_every_epoch_visits_each_block_once_in_a_new_order(packed):
    stream, n = BlockStream([packed], [1.0], seed=0), len(packed)
    epochs = [stream.batch(epoch * n, n)["input_ids"] for epoch in range(3)]
    for epoch in epochs:
        assert {tuple(row.tolist()) for row in epoch} == contents(packed)
    assert not torch.equal(epochs[0], epochs[1])


def test_the_seed_decides_the_order(packed):
    first, again, other = (BlockStream([packed], [1.0], seed).batch(0, 8)["input_ids"] for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_weights_are_kept_and_each_source_is_gone_through_evenly(corpus, tmp_path, tiny_tokenizer, monkeypatch):
    monkeypatch.setattr("attn2mamba.data.PAGE", 64)  # pages must not show
    other = write_corpus(tmp_path / "other.jsonl", 300, seed=1)
    stream, _ = open_data([f"{corpus}=3", f"{other}=1"], tiny_tokenizer, 32)
    rows = [tuple(row.tolist()) for row in stream.batch(0, 2_000)["input_ids"]]
    blocks = contents(stream.blocks[0])
    mine = [row for row in rows if row in blocks]
    assert 0.71 < len(mine) / len(rows) < 0.79
    visits = [mine.count(row) for row in blocks]
    assert max(visits) - min(visits) == 1


def test_without_weights_sources_count_by_their_size(corpus, tmp_path, tiny_tokenizer):
    stream, _ = open_data([corpus, write_corpus(tmp_path / "o.jsonl", 400, seed=1)], tiny_tokenizer, 32)
    sizes = [len(blocks) for blocks in stream.blocks]
    assert stream.weights == pytest.approx([size / sum(sizes) for size in sizes])


def test_a_mixture_with_and_without_weights_is_refused(corpus, tiny_tokenizer):
    with pytest.raises(UserError, match="'python-docs' has no weight"):
        open_data([f"{corpus}=1", "python-docs"], tiny_tokenizer, 32)


def spans(blocks):
    return {tuple(blocks._documents[d][a:b].tolist()) for d, a, b in blocks._spans}


def test_held_out_documents_are_whole_and_not_trained_on(corpus, tiny_tokenizer):
    stream, held = open_data([corpus], tiny_tokenizer, 32)
    total = stream.blocks[0].tokens + held.tokens
    whole = {(*tiny_tokenizer.encode(text), tiny_tokenizer.eos_token_id) for text in load_texts(corpus)}
    assert spans(held) <= whole
    assert spans(stream.blocks[0]) == whole - spans(held)
    assert total == sum(len(tiny_tokenizer.encode(text)) + 1 for text in load_texts(corpus))
    assert 64 <= held.tokens <= 0.021 * total + 64


def test_the_split_depends_neither_on_seed_nor_on_file_order(tmp_path, tiny_tokenizer):
    for name, seed in (("x", 0), ("y", 1)):
        (tmp_path / name).mkdir()
        write_corpus(tmp_path / name / "1.jsonl", 100, seed=seed)
        write_corpus(tmp_path / name / "2.jsonl", 100, seed=1 - seed)
    splits = [
        open_data([str(tmp_path / name)], tiny_tokenizer, 16, seed=seed)[1]
        for name, seed in (("x", 0), ("x", 5), ("y", 0))
    ]
    texts = [all_ids(held).tolist() for held in splits]
    assert texts[0] == texts[1]
    assert splits[0].tokens == splits[2].tokens
    assert spans(splits[0]) == spans(splits[2])


def test_one_long_document_gives_its_tail(tmp_path, tiny_tokenizer):
    (tmp_path / "book.txt").write_text(" ".join(random.Random(0).choices(WORDS, k=2_000)))
    stream, held = open_data([str(tmp_path / "book.txt")], tiny_tokenizer, 16)
    ids = [*tiny_tokenizer.encode((tmp_path / "book.txt").read_text()), tiny_tokenizer.eos_token_id]
    train = all_ids(stream.blocks[0]).tolist()
    assert train == ids[: len(train)]
    assert len(train) <= len(ids) - held.tokens
    assert all_ids(held).tolist() == ids[len(ids) - held.tokens :][: len(held) * 16]
    assert len(held) >= 2


def test_copies_of_a_held_out_document_are_not_trained_on(tmp_path, tiny_tokenizer):
    write_corpus(tmp_path / "a.jsonl", 100)
    write_corpus(tmp_path / "b.jsonl", 100)
    stream, held = open_data([str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")], tiny_tokenizer, 16)
    for part in spans(held):
        for blocks in stream.blocks:
            assert not any(trained[-len(part) :] == part for trained in spans(blocks))


def test_validation_data_of_ones_own(corpus, tmp_path, tiny_tokenizer):
    own = write_corpus(tmp_path / "own.jsonl", 20, seed=9)
    stream, held = open_data([corpus], tiny_tokenizer, 32, validation=[own])
    assert held.tokens == sum(len(tiny_tokenizer.encode(text)) + 1 for text in load_texts(own))
    assert stream.blocks[0].tokens == sum(len(tiny_tokenizer.encode(text)) + 1 for text in load_texts(corpus))


def test_too_little_text_says_what_would_do(tmp_path, tiny_tokenizer):
    path = write_corpus(tmp_path / "few.jsonl", 10)
    total = sum(len(tiny_tokenizer.encode(text)) + 1 for text in load_texts(path))
    with pytest.raises(UserError) as caught:
        open_data([path], tiny_tokenizer, 1024)
    message = str(caught.value)
    assert f"has {total} tokens; sequence_length 1024 needs at least 3072" in message
    shorter = int(message.rpartition("--set sequence_length=")[2])
    stream, held = open_data([path], tiny_tokenizer, shorter)
    assert len(stream.blocks[0]) >= 1 and len(held) >= 1


def test_too_little_validation_text(corpus, tmp_path, tiny_tokenizer):
    (tmp_path / "v.txt").write_text("the cat")
    with pytest.raises(UserError, match=r"v.txt' has \d+ tokens; sequence_length 32 needs at least 32; use more"):
        open_data([corpus], tiny_tokenizer, 32, validation=[str(tmp_path / "v.txt")])


def test_no_data_at_all(tiny_tokenizer):
    with pytest.raises(UserError, match="no DATA given"):
        open_data([], tiny_tokenizer, 32)
