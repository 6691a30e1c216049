"""Documents packed whole: none is cut that fits, each counted token is trained once an epoch, and behind its prompt."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elastic_ring.attention.layouts.layout import make_layout
from elastic_ring.cli.data_settings import data_source
from elastic_ring.cli.settings import parse
from elastic_ring.data.document_index import INDEX, DocumentIndex, edges_of, index_file, read_index
from elastic_ring.data.loader import IGNORE, slice_sample
from elastic_ring.data.manifest import Manifest, PreparedSource, Shard, digest_of, read_manifest
from elastic_ring.data.packing import END_OF_DOCUMENT
from elastic_ring.data.preparation.piece import ShardWriter
from elastic_ring.data.prepared import PreparedCorpus, PreparedTokens
from elastic_ring.data.source import Source, hold_out, open_source, order_of
from elastic_ring.data.tokenizer import BYTE_TOKENIZER
from elastic_ring.data.whole import parts_of, place
from elastic_ring.state.storage.folder import Storage
from tests.unit.data.corpora import prepared, texts, tokens_of, write_jsonl

Document = list[tuple[int, bool]]


def chats(num: int, mean_tokens: int = 230, seed: int = 0) -> Iterator[tuple[list[int], list[bool]]]:
    """(tokens, whether each counts) of conversations of one to three answers, lognormal in length."""
    rng = np.random.default_rng(seed)
    for number in range(num):
        size = int(rng.lognormal(np.log(mean_tokens) - 0.32, 0.8)) + 8
        cuts = np.sort(rng.choice(np.arange(1, size), 2 * int(rng.integers(1, 4)) - 1, replace=False))
        counted = np.searchsorted(cuts, np.arange(size), side="right") % 2 == 1
        yield (
            [*(number >> shift & 255 for shift in (16, 8, 0)), *rng.integers(0, 256, size - 3).tolist()],
            counted.tolist(),
        )


def written(folder: Path, documents: Sequence[tuple[list[int], list[bool]]], align_tokens: int = 1) -> Manifest:
    """A corpus of these documents, written as preparations write them, without their templates."""
    writer = ShardWriter(Storage(str(folder)).open(), "000-000", BYTE_TOKENIZER, 512, align_tokens, masked=True)
    for tokens, counted in documents:
        writer.add(np.array(tokens, dtype=np.int32), np.array([*counted, False]))
    source = PreparedSource("all", None, writer.close())
    sizes = 257, END_OF_DOCUMENT, "tokens", 512, align_tokens, BYTE_TOKENIZER.sha256
    manifest = Manifest(*sizes, (source,), writer.longest_tokens, is_complete=True).sealed()
    (folder / "manifest.json").write_bytes(manifest.to_json())
    return manifest


def trained(source: Source, sample_id: int, cp: int = 2) -> list[Document]:
    """(token, whether it is a target) of each document of a sequence, as the ranks of a ring have them."""
    sample, context = source.read(sample_id), source.context_tokens
    layout, targets = make_layout("zigzag", context, cp), np.zeros(context + 1, dtype=np.int64)
    targets[0] = IGNORE
    for rank in range(cp):
        piece = slice_sample(sample, layout, rank, sample_id=sample_id, index_in_batch=0)
        targets[piece.positions[0].numpy() + 1] = piece.targets[0].numpy()
    assert all(target in (IGNORE, token) for target, token in zip(targets, sample.tokens, strict=True))
    starts = [*sample.document_starts, *([context] if sample.ends_document else []), context + 1]
    pairs = list(zip(sample.tokens.tolist(), (targets != IGNORE).tolist(), strict=True))
    return [pairs[begin:end] for begin, end in pairwise(starts)]


def without_padding(documents: list[Document]) -> list[Document]:
    return [part for part in documents if {token for token, _ in part} != {END_OF_DOCUMENT}]


@pytest.mark.parametrize("align_tokens", [1, 16])
def test_of_300_chats_none_is_cut_and_every_counted_token_is_trained_once_an_epoch_behind_its_prompt(
    tmp_path: Path, align_tokens: int
) -> None:
    conversations = list(chats(300))
    written(tmp_path, conversations, align_tokens)
    source = open_source(PreparedTokens.of(str(tmp_path / "manifest.json"), 4096))
    order, seen = order_of(source, 3, 4), list[Document]()
    for step in range(-(-source.num_sequences // 4)):
        for sample_id in order.sample_ids(step)[: source.num_sequences - 4 * step]:
            sample = source.read(sample_id)
            assert all(start % align_tokens == 0 for start in sample.document_starts)
            seen += without_padding(trained(source, sample_id))
    expected = [
        [*zip(tokens, counted, strict=True), *[(END_OF_DOCUMENT, False)] * (align_tokens - len(tokens) % align_tokens)]
        for tokens, counted in conversations
    ]
    assert sorted(seen) == sorted(expected)


def test_sequences_of_3000_chats_have_at_most_2_percent_padding() -> None:
    lengths = np.array([len(tokens) + 1 for tokens, _ in chats(3000)])
    assert 200 < lengths.mean() < 260
    index = DocumentIndex(lengths, {}, np.array([3000]))
    placed = place(index, [3000], 2048, align_tokens=1, window_tokens=1 << 16, long="leave_out")
    assert 1 - placed.lengths.sum() / (len(placed.ends) * 2049) < 0.02
    held = placed.lengths[: placed.ends[9]]  # what would be held out is like the rest
    assert abs(held.mean() / lengths[lengths <= 2049].mean() - 1) < 0.3


def test_parts_of_long_conversations_have_each_turn_once_behind_its_prompt_and_what_there_is_room_for() -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        edges = np.cumsum(rng.integers(1, 60, 2 * int(rng.integers(1, 12))))
        room, length = int(rng.integers(20, 200)), int(edges[-1]) + 2
        turns = list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
        prompts = [0, *(end for _, end in turns[:-1])]
        parts = list(parts_of(length, edges, room))
        counted = [
            position
            for part in parts
            for begin, end in turns
            for position in range(max(begin, part.first), min(end, part.stop))
        ]
        fits = [turn for turn, prompt in zip(turns, prompts, strict=True) if turn[1] - prompt <= room]
        assert counted == [position for begin, end in fits for position in range(begin, end)]
        assert sum(part.num_counted for part in parts) == len(counted)
        for part in parts:
            assert part.stop - part.start <= room
            assert part.start in prompts
            assert part.start <= prompts[[begin for begin, _ in turns].index(part.first)]
            earlier = [prompt for prompt in prompts if prompt < part.start]
            assert not earlier or part.stop - earlier[-1] > room, "more of the conversation had room"


@pytest.mark.parametrize("long_documents", ["cut", "leave_out"])
def test_long_conversations_are_cut_at_turns_or_left_out_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, long_documents: Any
) -> None:
    conversations = list(chats(200))
    manifest = written(tmp_path, conversations)
    with caplog.at_level("INFO"):
        data = PreparedTokens.of(str(tmp_path / "manifest.json"), 256, long_documents=long_documents)
    source, kept, num_long, num_left_out = data.open(), Counter[int](), 0, 0
    for number, (tokens, counted) in enumerate(conversations):
        edges, is_long = edges_of(np.array(counted)).tolist(), len(tokens) > 256
        num_long += is_long
        for prompt, begin, end in zip([0, *edges[1::2]], edges[::2], edges[1::2], strict=False):
            fits = not is_long or (long_documents == "cut" and end - prompt <= 257)
            kept.update((number, position) for position in range(begin, end) if fits)
            num_left_out += (end - begin) * (not fits)
    found = Counter[Any]()
    flat = {bytes(tokens): number for number, (tokens, _) in enumerate(conversations)}
    for sample_id in range(source.num_sequences):
        for part in without_padding(trained(source, sample_id)):
            content = bytes(token for token, _ in part if token != END_OF_DOCUMENT)
            (whole,) = [tokens for tokens in flat if content in tokens]
            begin = whole.index(content)
            found.update((flat[whole], begin + at) for at, (_, is_target) in enumerate(part) if is_target)
    assert found == kept
    how = "cut at turns" if long_documents == "cut" else "left out"
    assert f"; {num_long} ({num_long / 200:.1%}) are longer and {how}: " in caplog.text
    assert f"counted tokens, and {num_left_out:,} are left out" in caplog.text
    assert manifest.num_counted == found.total() + num_left_out


@pytest.mark.parametrize("align_tokens", [1, 8])
def test_plain_documents_are_packed_whole_where_that_is_chosen_and_long_ones_lose_no_target(
    tmp_path: Path, align_tokens: int
) -> None:
    manifest = prepared(tmp_path / "out", write_jsonl(tmp_path / "a.jsonl", texts(120)), align_tokens=align_tokens)
    uri = str(tmp_path / "out" / "manifest.json")
    assert PreparedTokens.of(uri, 64).packing == "stream"
    source = PreparedTokens.of(uri, 64, packing="whole").open()
    targets, expected = Counter[tuple[int, ...]](), Counter[tuple[int, ...]]()
    for sample_id in range(source.num_sequences):
        for part in trained(source, sample_id):
            tokens = tuple(token for token, _ in part)
            targets.update(tokens[at - 1 : at + 1] for at, (_, is_target) in enumerate(part) if is_target)
    for document in tokens_of(tmp_path / "out", manifest.sources[0]):
        pairs = pairwise(document)
        expected.update(pair for pair in pairs if align_tokens == 1 or pair != (END_OF_DOCUMENT,) * 2)
    assert targets == expected


def test_a_corpus_of_before_keeps_its_stream_and_its_digests(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    manifest = written(tmp_path, list(chats(20)))
    uri, plain = str(tmp_path / "manifest.json"), dataclasses.asdict(manifest)
    assert PreparedTokens.of(uri, 128).packing == "whole"
    for shard in plain["sources"][0]["shards"]:
        del shard["index_sha256"]
    assert digest_of(plain) == manifest.digest
    Path(uri).write_text(json.dumps(plain))
    data = PreparedTokens.of(uri, 128)
    assert "prepare the corpus anew to pack them whole" in caplog.text
    facts = ["prepared", 128, [manifest.digest], [0]]
    assert data.open().fingerprint == hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    assert data == PreparedTokens(128, uri, manifest.digest, 257)
    with pytest.raises(ValueError, match="was prepared without the lengths of its documents: prepare it anew"):
        PreparedTokens.of(uri, 128, packing="whole")


def test_an_index_that_is_lost_or_another_one_is_named_and_packing_is_in_the_fingerprint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    written(tmp_path, list(chats(200)))
    uri, data = str(tmp_path / "manifest.json"), PreparedTokens.of(str(tmp_path / "manifest.json"), 512)
    ends = np.cumsum([len(tokens) + 1 for tokens, _ in chats(200)])
    cut = [any(begin < edge < end - 1 for edge in range(0, end, 512)) for begin, end in pairwise([0, *ends.tolist()])]
    others = [PreparedTokens.of(uri, 512, packing="stream"), PreparedTokens.of(uri, 512, long_documents="leave_out")]
    assert f"context_tokens=512: {sum(cut) / 200:.1%} of the conversations are cut where" in caplog.text
    assert len({each.open().fingerprint for each in (data, *others)}) == 3
    first = min((tmp_path / "index").iterdir())
    kept = first.read_bytes()
    first.write_bytes(kept[:-1] + b"x")
    with pytest.raises(ValueError, match=rf"index/{first.name}: is not the index that the manifest names"):
        data.open()
    first.unlink()
    with pytest.raises(ValueError, match=rf"index/{first.name}: cannot be read"):
        data.open()
    first.write_bytes(kept)
    corpus: PreparedCorpus = data.open()
    (stream,) = corpus.streams
    stream.placed.starts[:] += 1  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="has other documents than its index"):
        corpus.read(0)


def test_a_mixture_of_whole_documents_holds_out_of_each_source(tmp_path: Path) -> None:
    one, two = write_jsonl(tmp_path / "one.jsonl", texts(100)), write_jsonl(tmp_path / "two.jsonl", texts(40, 100))
    prepared(tmp_path / "out", one, two, weights=(1.0, 3.0))
    source = open_source(PreparedTokens.of(str(tmp_path / "out" / "manifest.json"), 400, packing="whole"))
    training, validation = hold_out(source, num_sequences=4)
    held = {validation.read(i).tokens.tobytes() for i in range(4)}
    order = order_of(training, 0, 8)
    used = {training.read(i).tokens.tobytes() for step in range(40) for i in order.sample_ids(step)}
    assert len(held) == 4
    assert len(used) == training.num_sequences == source.num_sequences - 4
    assert not held & used


def test_packing_is_a_setting_of_prepared_data(tmp_path: Path) -> None:
    manifest = written(tmp_path, list(chats(20)))
    uri = str(tmp_path / "manifest.json")
    for flags, packing in (([], "whole"), (["--packing", "stream"], "stream")):
        settings = parse(["--data", uri, "--context", "128", *flags])
        data: Any = data_source(settings.data, settings.model, settings.step)
        assert (data.packing, data.digest, data.long_documents) == (packing, manifest.digest, "cut")
    settings = parse(["--packing", "whole"])
    with pytest.raises(ValueError, match="only a prepared corpus has the lengths of its documents"):
        data_source(settings.data, settings.model, settings.step)
    assert read_manifest(uri).has_index


@pytest.mark.parametrize(
    ("lengths", "edges"),
    [
        ([2**62, 10], [[], []]),
        ([-4, 44], [[], []]),
        ([20, 20], None),
        ([20, 10, 10], [[], [], []]),
        ([30, 10], [[4, 2], []]),
        ([30, 10], [[4, 60], []]),
        ([30, 10], [[4], []]),
    ],
)
def test_an_index_of_other_documents_is_refused_by_name(tmp_path: Path, lengths: list[int], edges: Any) -> None:
    data = index_file(lengths, None if edges is None else [np.array(each, dtype=np.int64) for each in edges])
    (tmp_path / INDEX).mkdir()
    (tmp_path / INDEX / "a.parquet").write_bytes(data)
    sha256 = hashlib.sha256(data).hexdigest()
    shard = Shard("a.parquet", 2, 40, "", 1, "", num_counted=4, index_sha256=sha256)
    with pytest.raises(ValueError, match=r"index/a\.parquet: (cannot be read as an index|the counted tokens)"):
        read_index(str(tmp_path / "manifest.json"), PreparedSource("a", None, (shard,)), 25)
