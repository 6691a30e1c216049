"""Preparing a corpus with Ray Data: equal digests on any number of workers, through killed workers and drivers."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import ray
import ray.data

from elastic_ring import Callback, CheckpointConfig
from elastic_ring.data.manifest import read_manifest
from elastic_ring.data.preparation import pipeline
from elastic_ring.data.preparation.inputs import Piece
from elastic_ring.data.preparation.piece import PieceRecord, PieceWorker
from elastic_ring.data.prepared import Later
from elastic_ring.data.source import PreparedTokens, order_of
from elastic_ring.errors import RunFailed
from elastic_ring.monitor.journal import read
from elastic_ring.monitor.metrics import StepMetrics
from elastic_ring.runtime.driver.cluster import left_behind
from tests.ray.conftest import ROOT, bits, ran, tiny_trainer, wait_for
from tests.unit.data.corpora import prepared, texts, texts_of, write_jsonl, write_table

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.data")  # of its own options by itself


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    write_jsonl(tmp_path / "in" / "a.jsonl", texts(150))
    write_table(tmp_path / "in" / "b.parquet", [*texts(50, 150), *texts(5)])
    return tmp_path / "in"


@pytest.mark.slow
@pytest.mark.parametrize(
    "workers", [pytest.param(1, marks=pytest.mark.soak), 2, pytest.param(4, marks=pytest.mark.soak)]
)
def test_any_number_of_workers_gives_the_same_digest(workers, corpus, tmp_path, local_ray):
    alone = prepared(tmp_path / "alone", corpus, workers=0, drop_duplicates=True)
    together = prepared(tmp_path / "together", corpus, workers=workers, drop_duplicates=True)
    assert together.digest == alone.digest
    assert together == alone
    assert texts_of(tmp_path / "together", together.sources[0]) == texts(200)


def test_a_users_mistake_in_a_worker_has_its_own_words(corpus, tmp_path, local_ray):
    (corpus / "c.jsonl").write_text("no JSON\n")
    with pytest.raises(ValueError, match=r"c\.jsonl: line 1 at byte 0 is no JSON object"):
        prepared(tmp_path / "out", corpus, workers=2)


def deadly(piece_number: int, mark: Path | None) -> type:
    """A pool worker whose process dies at a piece: the first time, where `mark` is a path; else each time."""

    class Deadly(pipeline._PoolWorker):  # local, so that it goes to the workers by value
        def __init__(self) -> None:
            super().__init__()
            whole = PieceWorker.prepare

            def prepare(worker: PieceWorker, piece: Piece) -> PieceRecord:
                if piece.number == piece_number and (mark is None or not mark.exists()):
                    if mark is not None:
                        mark.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                return whole(worker, piece)

            PieceWorker.prepare = prepare  # type: ignore[method-assign]

    return Deadly


def test_a_killed_worker_loses_and_repeats_nothing(corpus, tmp_path, local_ray, monkeypatch):
    monkeypatch.setattr(pipeline, "_PoolWorker", deadly(3, tmp_path / "died"))
    manifest = prepared(tmp_path / "out", corpus, workers=2)
    assert (tmp_path / "died").exists()
    assert texts_of(tmp_path / "out", manifest.sources[0]) == [*texts(200), *texts(5)]
    assert not (tmp_path / "out" / "attempts").exists()


@pytest.mark.slow
def test_a_piece_that_always_kills_its_worker_ends_the_preparation_by_name(corpus, tmp_path, local_ray, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(pipeline, "_PoolWorker", deadly(3, None))
        with pytest.raises(RunFailed, match=r"prepare-000-0000003 killed its process 3 times"):
            prepared(tmp_path / "out", corpus, workers=1)
    manifest = prepared(tmp_path / "out", corpus, workers=0)  # once what killed it is gone
    assert texts_of(tmp_path / "out", manifest.sources[0]) == [*texts(200), *texts(5)]


PREPARES = """
import sys, ray
from contextlib import contextmanager
from elastic_ring.data.preparation.prepare import PrepareConfig, prepare
from elastic_ring.runtime.driver import access, ray_session

@contextmanager
def cluster(num_cpus):
    with ray_session.cluster(num_cpus):
        print("answers a stranger:", access.refusal(ray.get_runtime_context().gcs_address) is None)
        yield

print(prepare(PrepareConfig((sys.argv[1],), sys.argv[2], workers=1), cluster).digest)
"""


@pytest.mark.slow
def test_a_preparation_in_python_on_a_new_machine_asks_for_a_token_of_its_user_alone(tmp_path):
    source, home = write_jsonl(tmp_path / "a.jsonl", texts(9)), tmp_path / "home"
    home.mkdir()
    given = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    environment = {**given, "HOME": str(home), "RAY_ADDRESS": "local", "PYTHONPATH": str(ROOT)}
    done = ran(sys.executable, "-c", PREPARES, str(source), str(tmp_path / "out"), env=environment, timeout_s=120.0)
    assert done.stdout.splitlines() == [
        "answers a stranger: False",
        read_manifest(str(tmp_path / "out" / "manifest.json")).digest,
    ]
    assert stat.S_IMODE((home / ".ray" / "auth_token").stat().st_mode) == 0o600


@pytest.mark.soak
def test_a_killed_driver_goes_on_from_the_command_line(tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", [text * 2_500 for text in texts(120)])  # pieces of about a second
    out = tmp_path / "out"
    words = ["--source", str(source), "--out", str(out), "--workers", "2"]
    command = [sys.executable, "-m", "elastic_ring", "data", "prepare", *words]
    environment = {**os.environ, "RAY_ADDRESS": "local", "PYTHONPATH": str(ROOT)}
    driver = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(lambda: driver.poll() is not None or any(out.glob("pieces/0*.json")))
    assert driver.poll() is None
    driver.kill()
    driver.wait(60)
    assert not (out / "manifest.json").exists()
    there = {path: path.stat().st_mtime_ns for path in (out / "pieces").glob("0*.json")}
    done = ran(*command, env=environment, cwd=ROOT, timeout_s=300.0)
    assert re.search(r"going on: \d+ of \d+ pieces are there", done.stderr)
    assert not re.search(r" E \d+ \d+\] ", done.stderr)  # Ray's lines that look like a failure
    assert {path: path.stat().st_mtime_ns for path in there} == there
    digest = done.stdout.splitlines()[-1]
    assert digest == read_manifest(str(out / "manifest.json")).digest
    again = prepared(tmp_path / "alone", source, piece_bytes=16 << 20, row_group_tokens=1 << 16)
    assert digest == again.digest


@pytest.mark.soak
def test_a_run_on_a_manifest_uses_the_same_samples_through_a_kill_and_on_another_mesh(tmp_path, local_ray):
    sources = [write_jsonl(tmp_path / f"{name}.jsonl", texts(300, start)) for name, start in (("a", 0), ("b", 300))]
    uris = []
    for workers in (0, 2):
        out = tmp_path / f"out-{workers}"
        prepared(out, *sources, weights=(2.0, 1.0), workers=workers, row_group_tokens=256)
        uris.append(str(out / "manifest.json"))
    calm = tiny_trainer(tmp_path, "calm", data=PreparedTokens.of(uris[0], 96), dp=1, cp=1, spares=0).fit()
    killed = tiny_trainer(
        tmp_path, "killed", data=PreparedTokens.of(uris[1], 96), faults="kill@step=5,phase=backward,rank=1", cp=1
    ).fit()
    assert killed.summary["recoveries"]
    assert killed.summary["samples_sha256"] == calm.summary["samples_sha256"]
    config = json.loads((killed.path / "config.json").read_text())
    assert config["data"]["digest"] == read_manifest(uris[1]).digest


class Growth(Callback):
    """Lets the preparation go on once the run trains, and the run hurry once it has the whole corpus."""

    def __init__(self, more: threading.Event, journal: Path, gate: Path) -> None:
        self.more, self.journal, self.gate = more, journal, gate

    def on_step(self, metrics: StepMetrics) -> None:
        if metrics.step >= 2:
            self.more.set()
        if any(version["uri"].endswith("manifest.json") for version in versions_of(self.journal)):
            self.gate.touch()


def versions_of(journal: Path) -> list[dict[str, Any]]:
    return [line for line in read(journal) if line.get("note") == "corpus"]


@pytest.mark.slow
def test_training_begins_while_preparation_goes_on_and_a_run_that_replays_it_has_equal_bits(
    tmp_path, train, monkeypatch
):
    more, whole = threading.Event(), PieceWorker.prepare

    def held(worker: PieceWorker, piece: Piece) -> PieceRecord:
        assert piece.number < 4 or more.wait(120)
        return whole(worker, piece)

    monkeypatch.setattr(PieceWorker, "prepare", held)
    out, gate, folder = tmp_path / "out", tmp_path / "gate", tmp_path / "run"
    source = write_jsonl(tmp_path / "a.jsonl", texts(300))
    preparing = threading.Thread(target=prepared, args=(out, source))
    preparing.start()
    beginning = str(out / "manifest-000004.json")
    wait_for(Path(beginning).exists)
    data = PreparedTokens.of(beginning, 96)
    mesh, kept = {"cp": 1, "steps": 32, "gate": gate}, CheckpointConfig(every_steps=2, keep_last=16)
    killed = train(
        "growing",
        data=data,
        faults="kill@step=26,phase=backward,rank=1",
        **mesh,
        callbacks=(Growth(more, folder / "journal.jsonl", gate),),
        run={"run_dir": str(folder), "corpus_look_s": 0.2, "checkpoint_config": kept},
    )
    preparing.join(60)
    assert sum(killed["lost_workers"].values()) == 1
    found = versions_of(folder / "journal.jsonl")
    later = tuple(Later(one["first_step"], one["uri"], one["digest"]) for one in found)
    assert later[-1].uri == str(out / "manifest.json")
    grown = dataclasses.replace(data, later=later)
    assert max(order_of(grown.open(), 0, 6).sample_ids(26)) >= data.open().num_sequences
    calm = train("replayed", data=grown, spares=0, **mesh)
    checkpoint = f"{folder}/checkpoints/step-00000002/lineage-000"
    assert later[0].first_step > 2, "the resumed run is told of no manifest by its checkpoint"
    again = {"run_dir": str(tmp_path / "again"), "resume": checkpoint, "corpus_look_s": 0.2}
    resumed = train("resumed", data=data, spares=0, **mesh, run=again)
    assert versions_of(tmp_path / "again" / "journal.jsonl") == found
    assert bits(calm) == bits(resumed) == bits(killed)
    assert resumed["resumed_from"][-1]["step"] == 2


@pytest.mark.slow
def test_a_run_whose_manifest_changed_is_refused_when_it_goes_on(tmp_path, local_ray):
    source = write_jsonl(tmp_path / "a.jsonl", texts(300))
    prepared(tmp_path / "out", source)
    uri = str(tmp_path / "out" / "manifest.json")
    config = PreparedTokens.of(uri, 96)
    shutil.rmtree(tmp_path / "out")
    write_jsonl(source, texts(301))
    prepared(tmp_path / "out", source)
    with pytest.raises(ValueError, match="a corpus must not change under a run"):
        tiny_trainer(tmp_path, "changed", data=config, dp=1, cp=1, spares=0).fit()
    assert left_behind("changed") == []


@pytest.mark.slow
def test_a_ray_dataset_is_trained_on_as_the_same_documents_in_a_file(tmp_path, local_ray):
    source = write_jsonl(tmp_path / "a.jsonl", texts(300))
    manifest = prepared(tmp_path / "out", source, piece_bytes=16 << 20, row_group_tokens=1 << 16)
    blocks = ray.data.from_items([{"text": text} for text in texts(300)], override_num_blocks=7)
    slowest_first = blocks.map_batches(late, batch_size=None)
    result = tiny_trainer(tmp_path, "given", data=slowest_first, dp=1, cp=1, spares=0, steps=3).fit()
    config = json.loads((result.path / "config.json").read_text())["data"]
    assert config["digest"] == manifest.digest
    assert config["uri"] == str(tmp_path / "given-data" / "tokens" / "manifest.json")


def late(batch: dict[str, Any]) -> dict[str, Any]:
    """The first block is the last to be ready."""
    time.sleep(0.5 if batch["text"][0].startswith("0:") else 0.0)
    return batch
