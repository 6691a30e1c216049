"""Training data from a manifest: the tokens that were prepared, each once, and nothing that is not what it was."""

from __future__ import annotations

import dataclasses
import json
import queue
import re
import shutil
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from elastic_ring import ElasticRingTrainer, RunConfig, ScalingConfig, StepConfig
from elastic_ring.attention.layouts.layout import make_layout
from elastic_ring.cli import train
from elastic_ring.cli.settings import parse
from elastic_ring.control.state import State
from elastic_ring.data import row_groups
from elastic_ring.data.loader import consumed_digest, samples_text, slice_sample
from elastic_ring.data.manifest import Manifest, read_manifest
from elastic_ring.data.packing import END_OF_DOCUMENT
from elastic_ring.data.prepared import Later, PreparedCorpus, PreparedTokens, apportioned, longer_manifest
from elastic_ring.data.sampling.order import share
from elastic_ring.data.source import hold_out, open_source, order_of
from elastic_ring.model.config import ModelConfig
from elastic_ring.model.transformer import Transformer
from elastic_ring.runtime.coordinator.services import CorpusWatcher
from tests.sim.simulator.options import simulated
from tests.unit.data.corpora import prepared, texts, write_jsonl

CONTEXT = 40


def stream(documents: list[str]) -> list[int]:
    return [token for text in documents for token in (*text.encode(), END_OF_DOCUMENT)]


def corpus(tmp_path: Path, context_tokens: int = 48, num: int = 120, **settings: Any) -> PreparedCorpus:
    prepared(tmp_path / "out", write_jsonl(tmp_path / "a.jsonl", texts(num)), **settings)
    return PreparedTokens.of(str(tmp_path / "out" / "manifest.json"), context_tokens).open()


@pytest.mark.parametrize("context_tokens", [7, 64, 500])
def test_sequences_are_the_prepared_tokens_in_order(tmp_path: Path, context_tokens: int) -> None:
    source = corpus(tmp_path, context_tokens)
    expected = stream(texts(120))
    starts = {0} | {i + 1 for i, token in enumerate(expected) if token == END_OF_DOCUMENT}
    assert source.num_sequences == (len(expected) - 1) // context_tokens
    for sample_id in range(source.num_sequences):
        begin = sample_id * context_tokens
        sample = source.read(sample_id)
        assert sample.tokens.tolist() == expected[begin : begin + context_tokens + 1]
        inside = {0} | {start - begin for start in starts if begin <= start < begin + context_tokens}
        assert sample.document_starts == tuple(sorted(inside))
        assert sample.ends_document == (begin + context_tokens in starts)
    with pytest.raises(ValueError, match="this part has sequences 0 to"):
        source.read(source.num_sequences)


def test_an_epoch_trains_on_every_sequence_once(tmp_path: Path) -> None:
    source = corpus(tmp_path)
    order = order_of(source, 3, 5)
    ids = [sample_id for step in range(source.num_sequences) for sample_id in order.sample_ids(step)]
    assert set(Counter(ids).values()) == {5}
    assert order_of(corpus(tmp_path), 3, 5).sample_ids(17) == order.sample_ids(17)  # as another process opens it
    assert order_of(source, 4, 5).sample_ids(17) != order.sample_ids(17)


def test_a_mixture_is_trained_on_in_proportion_and_holds_out_of_each_source(tmp_path: Path) -> None:
    one, two = write_jsonl(tmp_path / "one.jsonl", texts(100)), write_jsonl(tmp_path / "two.jsonl", texts(40, 100))
    prepared(tmp_path / "out", one, two, weights=(1.0, 3.0))
    config = PreparedTokens.of(str(tmp_path / "out" / "manifest.json"), 32)
    source = open_source(config)
    training, validation = hold_out(source, num_sequences=10)
    first = [stream(texts(100)), stream(texts(40, 100))]
    held = [first[0][:97], *(first[1][i * 32 : i * 32 + 33] for i in range(7))]
    assert validation.num_sequences == 10  # 2.5 and 7.5 of them, rounded
    assert [validation.read(i).tokens.tolist() for i in (0, 3)] == [held[0][:33], held[1]]
    assert validation.read(2).tokens.tolist() == held[0][64:97]
    order = order_of(training, 0, 8)
    used = [training.read(i).tokens[:-1].tobytes() for step in range(20) for i in order.sample_ids(step)]
    of_two = {np.array(first[1][i : i + 32]).tobytes() for i in range(0, len(first[1]) - 32, 32)}
    assert abs(sum(tokens in of_two for tokens in used) - 120) <= 4
    assert not {validation.read(i).tokens[:-1].tobytes() for i in range(10)} & set(used)
    with pytest.raises(ValueError, match="at least one sequence of each source must be left"):
        hold_out(source, num_sequences=source.num_sequences - 1)


def test_parts_add_up_and_keep_the_proportion() -> None:
    assert apportioned(10, (1.0, 3.0)) == (3, 7)
    assert apportioned(0, (1.0, 3.0)) == (0, 0)
    assert apportioned(100, (1.0, 1.0, 1.0)) == (34, 33, 33)


def test_aligned_documents_begin_at_multiples(tmp_path: Path) -> None:
    source = corpus(tmp_path, 64, align_tokens=32)
    for sample_id in range(source.num_sequences):
        sample = source.read(sample_id)
        assert all(start % 32 == 0 for start in sample.document_starts)
        assert sample.padding == END_OF_DOCUMENT
    with pytest.raises(ValueError, match="align_tokens=32 with context_tokens=48"):
        PreparedTokens.of(str(tmp_path / "out" / "manifest.json"), 48)


# ------------------------------------------------------------ reading


def test_opening_reads_no_shard_and_a_footer_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    footers: list[Any] = []
    whole = pq.read_metadata
    monkeypatch.setattr(row_groups.pq, "read_metadata", lambda file: footers.append(file) or whole(file))
    source = corpus(tmp_path)
    num_shards = read_manifest(str(tmp_path / "out" / "manifest.json")).num_shards
    assert num_shards > 3
    assert footers == []
    for sample_id in range(source.num_sequences):
        source.read(sample_id)
    assert len(footers) == num_shards


def test_what_is_read_ahead_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = corpus(tmp_path)
    loads: list[str] = []
    threads: set[str] = set()
    whole = row_groups.RowGroup.load

    def load(chunk: row_groups.RowGroup) -> Any:
        loads.append(chunk.name)
        threads.add(threading.current_thread().name)
        return whole(chunk)

    monkeypatch.setattr(row_groups.RowGroup, "load", load)
    source.read_ahead(range(source.num_sequences))
    for sample_id in range(source.num_sequences):
        source.read(sample_id)
    assert max(Counter(loads).values()) == 1
    assert any(name.startswith("elastic-ring-read-ahead") for name in threads)


def test_a_shard_that_was_swapped_damaged_or_lost_is_named(tmp_path: Path) -> None:
    corpus(tmp_path)
    shards = sorted((tmp_path / "out" / "shards").iterdir())
    kept = shards[0].read_bytes()

    def read_first() -> None:
        PreparedTokens.of(str(tmp_path / "out" / "manifest.json"), 48).open().read(0)

    shutil.copy(shards[1], shards[0])
    with pytest.raises(ValueError, match=rf"{shards[0].name}: is not the shard that the manifest names"):
        read_first()
    damaged = bytearray(kept)
    tokens = pq.read_metadata(shards[1]).row_group(0).column(0)
    damaged[tokens.data_page_offset + tokens.total_compressed_size - 5] ^= 1
    shards[0].write_bytes(damaged)
    with pytest.raises(ValueError, match=rf"{shards[0].name}: cannot be read as token shard"):
        read_first()
    shards[0].unlink()
    with pytest.raises(ValueError, match=rf"{shards[0].name}: cannot be read as token shard"):
        read_first()
    shards[0].write_bytes(kept)
    read_first()


def test_a_damaged_footer_of_a_shard_ends_no_process(tmp_path: Path) -> None:
    """Of a column whose statistics are damaged pyarrow answers nothing: it aborts."""
    corpus(tmp_path, num=9, piece_bytes=10**9)
    path = min((tmp_path / "out" / "shards").iterdir())
    whole, config = path.read_bytes(), PreparedTokens.of(str(tmp_path / "out" / "manifest.json"), 48)
    num_named, footer = 0, len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    for at in range(footer + 100, footer + 250):  # the columns of the first row group, with their statistics
        path.write_bytes(whole[:at] + b"\xf8" + whole[at + 1 :])
        try:
            config.open().read(0)
        except ValueError as error:
            num_named += path.name in str(error)
    assert num_named > 10


def test_a_row_group_without_its_number_of_tokens_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = corpus(tmp_path)
    path, other = min((tmp_path / "out" / "shards").iterdir()), tmp_path / "other"
    expected = source.read(0).tokens.tolist()
    short = pq.ParquetFile(path).read_row_group(0).slice(0, 1)
    path.rename(other)
    pq.write_table(short, path)
    footers, whole = list[Any](), pq.read_metadata

    def read_metadata(file: Any) -> Any:
        footers.append(whole(file))
        if other.exists():
            other.rename(path)  # the file that is open stays the short one
        return footers[-1]

    monkeypatch.setattr(row_groups.pq, "read_metadata", read_metadata)
    again = PreparedTokens.of(str(tmp_path / "out" / "manifest.json"), 48).open()
    assert again.read(0).tokens.tolist() == expected
    assert len(footers) == 2


# ------------------------------------------------------------ manifests that change or grow


def test_a_manifest_that_changed_under_a_run_is_refused(tmp_path: Path) -> None:
    corpus(tmp_path)
    uri = str(tmp_path / "out" / "manifest.json")
    config = PreparedTokens.of(uri, 48)
    before = config.open().fingerprint
    assert config.open().fingerprint == before
    assert PreparedTokens.of(uri, 24).open().fingerprint != before
    shutil.rmtree(tmp_path / "out")
    prepared(tmp_path / "out", write_jsonl(tmp_path / "a.jsonl", texts(121)))
    with pytest.raises(ValueError, match=r"a corpus must not change under a run"):
        config.open()
    assert PreparedTokens.of(uri, 48).open().fingerprint != before


def growing(tmp_path: Path, first_steps: tuple[int, ...], packing: Any = "stream") -> tuple[PreparedTokens, Manifest]:
    """A corpus that grew by the manifests that its preparation wrote on the way, from these steps on."""
    whole = prepared(tmp_path / "out", write_jsonl(tmp_path / "a.jsonl", texts(200)))
    uris = [*sorted(map(str, (tmp_path / "out").glob("manifest-*.json")))[1:], str(tmp_path / "out" / "manifest.json")]
    assert len(uris) > len(first_steps)
    uris = uris[-len(first_steps) - 1 :]
    later = [Later(step, uri, read_manifest(uri).digest) for step, uri in zip(first_steps, uris[1:], strict=True)]
    return dataclasses.replace(PreparedTokens.of(uris[0], CONTEXT, packing=packing), later=tuple(later)), whole


@pytest.mark.parametrize("packing", ["stream", "whole"])
def test_a_corpus_that_grows_under_a_run_keeps_its_past_and_is_used_exactly_once(tmp_path: Path, packing: str) -> None:
    config, whole = growing(tmp_path, (5, 20), packing)
    batch = 4
    grown = config.open()
    num = (whole.num_tokens - 1) // CONTEXT if packing == "stream" else grown.num_sequences
    assert grown.num_sequences == num
    order = order_of(grown, 1, batch)
    steps = [order.sample_ids(step) for step in range(2 * num // batch)]
    for known, first_step in ((0, 5), (1, 20)):
        before = dataclasses.replace(config, later=config.later[:known]).open()
        assert [order_of(before, 1, batch).sample_ids(step) for step in range(first_step)] == steps[:first_step]
        for sample_id in steps[0]:  # an id keeps its sequence
            assert before.read(sample_id).tokens.tolist() == grown.read(sample_id).tokens.tolist()
    ids = [sample_id for step in steps for sample_id in step]
    assert len(set(ids[:num])) == num
    assert len({grown.read(sample_id).tokens.tobytes() for sample_id in ids[:num]}) == num


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["stream", "whole"])
def test_what_is_held_out_stays_the_same_when_the_corpus_grows(tmp_path: Path, packing: str) -> None:
    config, _ = growing(tmp_path, (5, 20), packing)
    held = [hold_out(part.open(), num_sequences=6)[1] for part in (dataclasses.replace(config, later=()), config)]
    one, two = ([part.read(i).tokens.tolist() for i in range(part.num_sequences)] for part in held)
    assert one == two
    assert len(one) == 6
    training, _ = hold_out(config.open(), num_sequences=6)
    order = order_of(training, 1, 4)
    steps = [order.sample_ids(step) for step in range(training.num_sequences // 4)]
    used = [training.read(sample_id).tokens.tolist() for ids in steps for sample_id in ids]
    assert len({tuple(tokens) for tokens in used}) == len(used)
    assert not {tuple(tokens) for tokens in one} & {tuple(tokens) for tokens in used}


def test_a_later_manifest_of_another_preparation_is_refused(tmp_path: Path) -> None:
    config, _ = growing(tmp_path, (5,))
    other = prepared(tmp_path / "other", write_jsonl(tmp_path / "b.jsonl", texts(100, 7)))
    foreign = Later(5, str(tmp_path / "other" / "manifest.json"), other.digest)
    with pytest.raises(ValueError, match="a later manifest is of another preparation"):
        dataclasses.replace(config, later=(foreign,)).open()
    with pytest.raises(ValueError, match="the first steps must rise"):
        dataclasses.replace(config, later=(*config.later, *config.later))


def test_the_longest_manifest_is_found_and_one_that_lost_or_changed_shards_is_refused_by_name(tmp_path: Path) -> None:
    whole = prepared(tmp_path / "out", write_jsonl(tmp_path / "a.jsonl", texts(200)))
    uris = sorted(map(str, (tmp_path / "out").glob("manifest-*.json")))
    last = tmp_path / "out" / "manifest.json"
    first, second = read_manifest(uris[0]), read_manifest(uris[1])
    assert longer_manifest(uris[0], first) == (str(last), whole)
    assert longer_manifest(str(last), whole) is None
    last.unlink()
    for uri in uris[2:]:
        Path(uri).unlink()
    assert longer_manifest(uris[0], first) == (uris[1], second)
    assert longer_manifest(uris[1], second) is None
    (source,) = second.sources
    for shards, reason in (
        (source.shards[:1], r"source all has fewer shards"),
        (source.shards[1:], r"is of another preparation"),
    ):
        other = dataclasses.replace(whole, sources=(dataclasses.replace(source, shards=shards),)).sealed()
        last.write_bytes(other.to_json())
        with pytest.raises(ValueError, match=rf"manifest\.json: .*{reason}"):
            longer_manifest(uris[0 if "another" in reason else 1], first if "another" in reason else second)


@pytest.mark.parametrize(
    ("broken", "how", "reason"),
    [
        ("manifest.json", "torn", r"is no manifest.*; expected one that begins with the 8 shard\(s\) of manifest-"),
        ("manifest-000008.json", "torn", "is no manifest.*; expected the manifest in use, of digest {digest}"),
        ("manifest-000008.json", "gone", "cannot be read.*; expected the manifest in use, of digest {digest}"),
        ("manifest-000008.json", "another", "has the digest .*; expected the manifest in use, of digest {digest}"),
    ],
)
def test_a_watcher_tells_of_a_longer_manifest_once_and_of_each_fault_once(
    tmp_path: Path, broken: str, how: str, reason: str
) -> None:
    prepared(tmp_path / "out", write_jsonl(tmp_path / "a.jsonl", texts(200)))
    last, bad = tmp_path / "out" / "manifest.json", tmp_path / "out" / broken
    data, whole = PreparedTokens.of(str(tmp_path / "out" / "manifest-000008.json"), CONTEXT), bad.read_bytes()
    break_it(bad, how, 20)
    found, refused = queue.Queue[tuple[str, str]](), queue.Queue[str]()
    watcher = CorpusWatcher(data, 0.01, lambda uri, digest: found.put((uri, digest)), refused.put)
    watcher.open(State(simulated("run", 1, 1, 10)))
    told = refused.get(timeout=10)
    assert re.search(rf"training goes on with .*{re.escape(str(bad))}: {reason.format(digest=data.digest[:16])}", told)
    for num_bytes in range(30, 80, 10):  # still being written: another line of it is incomplete at each look
        break_it(bad, how, num_bytes)
        time.sleep(0.03)
    put(bad, whole)
    assert found.get(timeout=10) == (str(last), read_manifest(str(last)).digest)
    watcher.close(10)
    assert found.empty()
    assert refused.empty()


def break_it(path: Path, how: str, num_bytes: int) -> None:
    if how == "torn":
        put(path, path.read_bytes()[:-num_bytes])
    elif how == "gone":
        path.unlink(missing_ok=True)
    else:
        other = path.parent.parent / "other"
        if not other.exists():
            prepared(other, write_jsonl(other.with_suffix(".jsonl"), texts(100, 7)))
        put(path, (other / "manifest-000004.json").read_bytes())


def put(path: Path, data: bytes) -> None:
    """At once: nobody sees a part of it."""
    path.with_suffix(".new").write_bytes(data)
    path.with_suffix(".new").replace(path)


# ------------------------------------------------------------ the command line


def test_a_manifest_is_all_that_training_needs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    corpus(tmp_path, 64, align_tokens=32)
    path = tmp_path / "out" / "manifest.json"
    manifest = read_manifest(str(path))
    asked = parse(["--data", str(path), "--context", "64"])
    assert (asked.data.source, asked.data.uri, asked.data.digest) == ("prepared", str(path), manifest.digest)
    assert (asked.data.end_of_document, asked.data.align_tokens) == (256, 32)
    with caplog.at_level("INFO"):
        source = train.data_source(asked.data, asked.model, StepConfig(context_tokens=64))
    told = f"documents of up to {manifest.longest_document_tokens} tokens are packed over several sequences"
    assert caplog.text.count(told) == 1
    with caplog.at_level("INFO"):
        assert source == PreparedTokens.of(str(path), 64), "which says it, too"
        PreparedTokens.of(str(path), manifest.longest_document_tokens)
    assert caplog.text.count(told) == 2
    again = tmp_path / "again.toml"
    again.write_text(asked.toml())
    assert parse(["--config", str(again)]).data == asked.data


def test_a_model_without_a_row_for_each_token_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A factory that says nothing of its vocabulary: a pass on the meta device finds the table."""
    corpus(tmp_path, 64)
    monkeypatch.setattr("elastic_ring.trainer.ray_session", None)  # it would start Ray
    for rows, refused in ((256, r"data\.vocab_size=257 is more than the model's 256"), (257, "NoneType")):
        trainer = ElasticRingTrainer(
            partial(Transformer, ModelConfig(rows, 2, 16, 2, 1, 8, 23)),
            PreparedTokens.of(str(tmp_path / "out" / "manifest.json"), 64),
            step_config=StepConfig(context_tokens=64),
            scaling_config=ScalingConfig(dp=1, cp=1),
            run_config=RunConfig(f"rows-{rows}", run_dir=str(tmp_path / f"run-{rows}")),
        )
        with pytest.raises((ValueError, TypeError), match=refused):
            trainer.fit()


def test_the_models_vocabulary_follows_the_manifest_unless_it_was_chosen(tmp_path: Path) -> None:
    corpus(tmp_path)
    path = tmp_path / "out" / "manifest.json"
    plain = json.loads(path.read_text())
    plain["vocab_size"] = 300
    plain["digest"] = dataclasses.replace(read_manifest(str(path)), vocab_size=300).sealed().digest
    path.write_text(json.dumps(plain))
    assert parse(["--data", str(path)]).model.vocab_size == 300
    assert parse(["--data", str(path), "--model.vocab-size", "512"]).model.vocab_size == 512
    asked = parse(["--data", str(path), "--model.vocab-size", "299"])
    with pytest.raises(ValueError, match=r"has tokens of a vocabulary of 300, and the model .* model\.vocab_size=299"):
        train.data_source(asked.data, asked.model, StepConfig(context_tokens=64))


def test_settings_that_contradict_the_manifest_are_refused(tmp_path: Path) -> None:
    corpus(tmp_path)
    path = str(tmp_path / "out" / "manifest.json")
    with pytest.raises(ValueError, match=r"data\.align_tokens=128: .* has 1 \(prepare it anew with --align-tokens\)"):
        parse(["--data", path, "--align-tokens", "128"])
    with pytest.raises(ValueError, match=r"data\.end_of_document=3: .* has 256: leave it out"):
        parse(["--data", path, "--data.end-of-document", "3"])
    with pytest.raises(ValueError, match=r"data\.digest=00000000.*restore the manifest, or start a run"):
        parse(["--data", path, "--data.digest", "00000000"])
    with pytest.raises(ValueError, match="cannot be read"):
        parse(["--data", str(tmp_path / "none" / "manifest.json")])


def test_another_manifest_over_a_file_of_settings_takes_nothing_from_the_first(tmp_path: Path) -> None:
    corpus(tmp_path, 64, align_tokens=32)
    first = parse(["--data", str(tmp_path / "out" / "manifest.json")])
    file = tmp_path / "run.toml"
    file.write_text(first.toml())
    prepared(tmp_path / "out2", tmp_path / "a.jsonl")
    second = parse(["--config", str(file), "--data", str(tmp_path / "out2" / "manifest.json")])
    assert second.data.align_tokens == 1
    assert second.data.digest != first.data.digest


# ------------------------------------------------------------ exactly once, as a run records it


def consumed(source: Any, order: Any, steps: int, dp: int, planted: dict[int, int] | None = None) -> str:
    """What `samples_sha256` is made of: the digest of all slices of all steps on `dp` rings. `planted`: steps that use
    another one's batch."""
    layout = make_layout("contiguous", source.context_tokens, 1)
    limbs = np.zeros(4)
    for step in range(steps):
        ids = order.sample_ids((planted or {}).get(step, step))
        for dp_rank in range(dp):
            slices = [
                slice_sample(source.read(sample_id), layout, 0, sample_id=sample_id, index_in_batch=index)
                for index, sample_id in share(ids, dp_rank, dp)
            ]
            limbs += consumed_digest(step, slices)
    return samples_text(limbs)


def test_the_samples_digest_is_that_of_any_mesh_and_preparation_and_notices_a_planted_duplicate(tmp_path: Path) -> None:
    first = corpus(tmp_path / "one")
    again = corpus(tmp_path / "two")  # prepared once more, elsewhere
    reference = consumed(first, order_of(first, 0, 6), 12, 1)
    assert consumed(first, order_of(first, 0, 6), 12, 3) == reference
    assert consumed(again, order_of(again, 0, 6), 12, 2) == reference
    assert consumed(first, order_of(first, 0, 6), 12, 1, planted={8: 3}) != reference


@pytest.mark.parametrize("packing", ["stream", "whole"])
def test_the_samples_digest_of_a_growing_mixture_is_that_of_any_mesh(tmp_path: Path, packing: str) -> None:
    config, _ = growing(tmp_path, (5, 20), packing)
    sources = [config.open() for _ in range(2)]
    one, four = (consumed(source, order_of(source, 0, 4), 30, dp) for source, dp in zip(sources, (1, 4), strict=True))
    assert one == four
