"""What is read of a run's folder beside its checkpoints and journal, where a stranger wrote it: see
`test_strangers_files`, whose fence and bounds hold here."""

from __future__ import annotations

import json
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ring.cli.forecasts.seen import read_run
from elastic_ring.config import RunConfig
from elastic_ring.data.preparation.prepare import PREPARATION
from elastic_ring.errors import RecordDamaged
from elastic_ring.monitor import callbacks
from elastic_ring.monitor.journal import Flaw, Journal, read, salvage_file
from elastic_ring.monitor.json_files import json_bytes
from elastic_ring.monitor.metrics_log import StepTable, rebuild_metrics
from elastic_ring.monitor.result import Result
from elastic_ring.runtime.coordinator.resume import find_resume
from elastic_ring.runtime.driver import attach
from elastic_ring.runtime.driver.submission import read_record
from elastic_ring.runtime.identity import Identity
from elastic_ring.runtime.run_storage import growing
from elastic_ring.runtime.terms import Terms
from elastic_ring.state.storage.folder import Storage
from tests.journals import journal_bytes
from tests.unit.data.corpora import prepared, texts, write_jsonl
from tests.unit.state.test_checkpoint import save
from tests.unit.state.test_strangers_files import (
    SUMMARY,
    _audited,  # noqa: F401  fixtures
    _bounded,  # noqa: F401
    fenced,
    few,
    odd_journal,
    wrong,
    wrong_bytes,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


def odd_json(right: dict[str, Any]) -> st.SearchStrategy[bytes]:
    """A record of a run with something wrong in it, with its right digest or without one; or damage."""
    changed = wrong(right).map(lambda one: json_bytes(one) if isinstance(one, dict) else json.dumps(one).encode())
    return st.one_of(changed, wrong_bytes(json_bytes(right)))


def odd_lines(right: list[dict[str, Any]]) -> st.SearchStrategy[bytes]:
    return st.one_of(wrong(right).map(odd_journal), wrong_bytes(journal_bytes(right)))


# ---------------------------------------------------------------- whose run it is, and where it goes on


@few
@given(data=st.data())
def test_terms(folder, data):
    at = folder / f"terms-{secrets.token_hex(8)}"
    (at / "terms").mkdir(parents=True)
    claim = {"attempt": "a", "host": "h", "unix_s": 1.0, "id": "x"}
    names = ["000001", "000002", "000002.withdrawn", "000000", "9" * 12, "9" * 200, "\u0660" * 6, "000003.damaged"]
    for name in data.draw(st.lists(st.sampled_from(names), unique=True, min_size=1)):
        path = at / "terms" / name
        kind = data.draw(st.sampled_from(["right", "odd", "odd", "pipe", "folder", "link"]))
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()
        elif kind == "link":
            path.symlink_to(at / "none")
        else:
            right = json.dumps(claim).encode()
            path.write_bytes(right if kind == "right" else data.draw(st.one_of(odd_json(claim), wrong_bytes(right))))
    run = RunConfig("r", run_dir=str(at))
    with fenced(at):
        terms = Terms(run).open()
        newest = terms.newest()
        terms.has_claimed("b")
        terms.follows(newest.term)
        own = terms.claim("b")
        assert own.term > newest.term
        assert terms.newest() == own
        terms.withdraw(own)
        terms.newest()


IDENTITY = Identity({"step.seed": "0"})
BEGAN = {"from": ["checkpoints/step-00000005/lineage-001"], "identity": IDENTITY.digest}


@few
@given(data=st.data())
def test_records_of_lineages_and_of_what_earlier_submissions_decided(folder, data):
    at = folder / "lineages-run"
    storage = Storage(str(at))
    if not at.exists():
        save(storage, 2, 1)
    name = data.draw(st.sampled_from(["000", "001", "007", "9" * 200]))
    storage.replace(f"lineages/{name}.json", data.draw(odd_json(BEGAN)))
    lines = [
        {"note": "begin", "lineage": 1, "num_steps": 1, "skips": [], "corpus": [], "identity": IDENTITY.digest},
        {"event": {"type": "x"}, "now": 1.0, "term": 1, "commands": [{"type": "Build", "corpus": []}], "reason": "r"},
        {"step": 0, "loss_hex": "0x1p0"},
    ]
    for file in ("journal.jsonl", "metrics.jsonl"):
        storage.replace(file, data.draw(odd_lines(lines)))
    for resume in ("auto", "5"):
        with fenced(at):
            find_resume(RunConfig("r", run_dir=str(at), resume=resume), IDENTITY, grows=True)
    storage.remove_folder("lineages")


@few
@given(data=st.data())
def test_pieces_of_records_in_a_storage(folder, data):
    storage = Storage(str(folder / "pieces"))
    storage.replace("records/CURRENT.json", data.draw(odd_json({"term": 1, "unix_s": 1.0})))
    for name in data.draw(
        st.lists(st.sampled_from(["journal.jsonl-000001-", "journal.jsonl-x-7", f"a-{'9' * 150}-1"]), min_size=1)
    ):
        storage.replace(f"records/{name}", data.draw(st.binary(max_size=20)))
    with fenced(Path(storage.root)):
        growing(storage, "journal.jsonl")
    storage.remove_folder("records")


# ---------------------------------------------------------------- how a run ended, and what it told

STEP = {
    "step": 0,
    "loss": 1.0,
    "loss_hex": "0x1p0",
    "grad_norm": 1.0,
    "lr": 0.1,
    "num_tokens": 8,
    "tokens_per_s": 8.0,
    "step_s": 1.0,
    "skipped": False,
    "generation": 1,
    "mesh": {"dp": 1, "cp": 1},
    "num_members": 1,
}
OF_A_RUN = SUMMARY | {"checkpoints": [{"path": "p", "step": 1}], "time_s": {"train": 1.0}, "peak_gpu_bytes": 7}


@few
@given(data=st.data())
def test_the_end_the_steps_and_what_callbacks_were_told(folder, data):
    at = folder / "ended"
    at.mkdir(exist_ok=True)
    status = {"run": "r", "ended": True, "end": {"error": "E", "message": "m", "attempt": "a"}, "updated_unix_s": 1.0}
    told = {"id": "i", "run": "r", "delivered": {"Callback": {"step": 0, "recovery": 1}}}
    notes = [{"note": "recovery", "recovery": {"cause": "c"}}, {"note": "checkpoint", "checkpoint": {"path": "p"}}]
    lines = [STEP, {"step": 0, "val_loss": 1.0}, {"step": 1, "note": "goes back", "build": [1, 1]}]
    (at / "status.json").write_bytes(data.draw(odd_json(status)))
    (at / "summary.json").write_bytes(data.draw(odd_json(OF_A_RUN)))
    (at / "callbacks.json").write_bytes(data.draw(odd_json(told)))
    (at / "metrics.jsonl").write_bytes(data.draw(odd_lines(lines)))
    (at / "journal.jsonl").write_bytes(data.draw(odd_lines(notes)))
    run = RunConfig("r", run_dir=str(at))
    with fenced(at):
        callbacks.end_of(at)
    with fenced(at):
        attach.end_on_record(run, "a")
    with fenced(at):
        attach.other_writer(run)
    with fenced(at), callbacks.CallbackDelivery([callbacks.Callback()], callbacks.RunInfo("r", at)) as telling:
        telling.deliver()
    with fenced(at):
        Result(dict(OF_A_RUN), at).metrics  # noqa: B018  reads
    with fenced(at):
        flaws = list[Flaw]()
        with StepTable.load(at / "metrics.jsonl", flaws) as table:
            list(rebuild_metrics(table, flaws, "identity", 1 << 10)[1])
            table.rows.missing(0, 1 << 10)
    with fenced(at):
        list(read(at / "journal.jsonl"))


@few
@given(data=st.data())
def test_settings_of_a_run_as_a_submission_a_forecast_and_an_export_read_them(folder, data):
    export = pytest.importorskip("elastic_ring.integrations.transformers.export")
    at = folder / "settings"
    at.mkdir(exist_ok=True)
    model = {"vocab_size": 257, "num_layers": 2, "width": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    config = {
        "run": {"name": "r"},
        "digest": "d",
        "identity": {"data": "x"},
        "places": {},
        "files": [["a", "b"]],
        "step": {"context_tokens": 8, "param_dtype": "float32"},
        "model": {**model, "ffn_width": 64},
        "data": {"source": "TokenShards", "vocab_size": 257, "end_of_document": 256},
        "pattern": "",
    }
    (at / "config.json").write_bytes(data.draw(odd_json(config)))
    with suppress(FileNotFoundError):
        (at / "huggingface.json").unlink()
    if data.draw(st.booleans()):
        own = {"folder": "f", "config": {"model_type": "llama"}}
        (at / "huggingface.json").write_bytes(data.draw(odd_json(own)))
    with fenced(at):
        read_record(at)
    with fenced(at):
        export._Trained.read(at, None, None)
    (at / "summary.json").write_bytes(data.draw(odd_json(OF_A_RUN)))
    (at / "config.toml").write_text('preset = "laptop"\n')
    (at / "metrics.jsonl").write_bytes(data.draw(odd_lines([STEP])))
    with fenced(at):
        read_run(at)


@few
@given(data=st.data())
def test_what_a_preparation_that_was_stopped_has_left(folder, data):
    out, source = folder / "prepared", folder / "in.jsonl"
    write_jsonl(source, texts(9))
    if not out.exists():
        prepared(out, source, drop_duplicates=True)
    (out / "manifest.json").unlink(missing_ok=True)
    records = sorted((out / "pieces").glob("*.json"))
    path = data.draw(st.sampled_from([out / PREPARATION, *records]))
    right = path.read_bytes()
    path.write_bytes(data.draw(st.one_of(wrong(json.loads(right)).map(json.dumps).map(str.encode), wrong_bytes(right))))
    with fenced(folder):
        prepared(out, source, drop_duplicates=True)
    path.write_bytes(right)


def test_a_journal_that_is_a_pipe_or_longer_than_any_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "long").open("wb") as file:
        file.truncate(1 << 42)
    for name in ("pipe", "long"):
        for reader in (salvage_file, lambda path: list(read(path)), lambda path: Journal(path).open().close()):
            with pytest.raises(RecordDamaged, match=r"no regular file|more than"):
                reader(tmp_path / name)
