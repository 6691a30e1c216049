"""While the last records are written the coordinator goes on answering: silence would cost it its life."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import queue
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_ring.config import RunConfig
from elastic_ring.control.coordination import standing, term_note
from elastic_ring.control.decisions.terms import TermClaim
from elastic_ring.control.state import Finishing
from elastic_ring.errors import JournalDamaged, RunFailed
from elastic_ring.monitor.journal import Journal, read
from elastic_ring.runtime.agent import stamp_dir
from elastic_ring.runtime.agent.stamp_dir import hold
from elastic_ring.runtime.coordinator import shutdown
from elastic_ring.runtime.coordinator.actor import Decider
from elastic_ring.runtime.coordinator.checkpoints import CheckpointKeeper, Writer
from elastic_ring.runtime.coordinator.folds.run_totals import Live
from elastic_ring.runtime.coordinator.inbox import (
    Abandoned,
    CheckpointCounts,
    DriverFeed,
    End,
    FaultAsked,
    Inbox,
    NodeBeat,
    StepsPublished,
)
from elastic_ring.runtime.coordinator.recorder import Begin, RunRecorder
from elastic_ring.runtime.coordinator.resume import Resume
from elastic_ring.runtime.coordinator.run_files import RunFiles
from elastic_ring.runtime.coordinator.run_spec import Clock
from elastic_ring.runtime.coordinator.services import MetricsExporter, Services
from elastic_ring.runtime.coordinator.shutdown import LONG_S, EndReport, aside, conclude, unfinished
from elastic_ring.runtime.coordinator.term_storage import StorageWait, TermStorage
from elastic_ring.runtime.run_storage import Mirror
from elastic_ring.runtime.terms import Terms, TermWatch
from tests.object_store.proxy import DELAY_S, faulty_proxy
from tests.unit.coordinator.builders import training


def test_beats_are_echoed_and_faults_refused_while_the_end_is_being_written():
    coordinator_client: Inbox = queue.Queue()
    answer: queue.Queue[bool] = queue.Queue()
    echoed = threading.Event()

    def work() -> dict[str, Any]:
        coordinator_client.put(FaultAsked(0, "w-0", answer))
        coordinator_client.put(CheckpointCounts({"step": 3}))
        coordinator_client.put(NodeBeat("node"))
        assert echoed.wait(30.0), "the end could not be written while nobody echoed"
        return {"error": ""}

    nodes: list[str] = []
    saved: list[Any] = []

    def echo(node: str) -> None:
        nodes.append(node)
        echoed.set()

    assert aside(work, coordinator_client, echo, saved.append) == {"error": ""}
    assert nodes == ["node"]
    assert saved == [{"step": 3}]
    assert answer.get(timeout=30.0) is False


def test_a_checkpoint_that_is_posted_last_is_known_when_the_work_is_done():
    """The summary that follows has it."""
    events: Inbox = queue.Queue()
    posted, saved = threading.Event(), list[Any]()

    def work() -> dict[str, Any]:
        events.put(NodeBeat("node"))
        events.put(CheckpointCounts({"step": 3}))
        posted.set()
        return {"error": ""}

    def echo(node: str) -> None:
        assert posted.wait(30.0)
        time.sleep(0.2)  # the work returns meanwhile

    assert aside(work, events, echo, saved.append) == {"error": ""}
    assert saved == [{"step": 3}]


def test_a_user_who_stops_the_end_waits_for_none_of_it():
    events: Inbox = queue.Queue()
    events.put(Abandoned("stopped by the user"))
    hangs = threading.Event()
    assert aside(lambda: {"error": str(hangs.wait(60.0))}, events, lambda node: None, lambda saved: None) is None
    hangs.set()


def test_the_end_says_what_it_is_busy_with_once_that_takes_long(caplog):
    caplog.set_level("INFO")
    told: list[str] = []
    now = [0.0]
    report = EndReport(told.append, lambda: now[0])
    for at_s, doing in ((0.0, ""), (1.0, "a"), (1.5 + LONG_S, "a"), (2.0 + LONG_S, "a"), (9.0, "b"), (9.5, "")):
        now[0] = at_s
        report.doing(doing)
        report.look()
    assert told == ["ending: a"]
    assert [line for line in caplog.messages if line.startswith("the end of the run")] == [
        "the end of the run: a, 8.0 s",
        "the end of the run: b, 0.5 s",
    ]


def test_what_a_run_whose_steps_are_done_still_writes_is_named_by_rank_and_place():
    running = training()
    phases: Any = {"w-0": {"phase": "save"}}
    assert unfinished(running, 3, "/runs/over", phases) == ""
    assert unfinished(running, 4, "/runs/over", phases) == "1 rank(s) still write the last checkpoint"
    finishing = dataclasses.replace(running, phase=Finishing(running.phase.membership, 0.0))
    assert unfinished(finishing, 4, "/runs/over", phases) == "ring 0 writes the weights to /runs/over"


class Nobody:
    """Whoever else the coordinator speaks to, and hears nothing from."""

    weights_sha256 = ""

    def live(self, live: Live) -> Live:
        return live

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **options: None


@pytest.fixture
def deciding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The work of a coordinator's deciding thread, in a run that trains; no Ray, no workers."""
    monkeypatch.setattr(stamp_dir, "SHARED_MEMORY", tmp_path / "shm")
    timers: list[Any] = []
    monkeypatch.setattr(shutdown.threading, "Timer", lambda *args: timers.append(args) or Nobody())
    (tmp_path / "shm").mkdir()
    run = RunConfig("over", run_dir=str(tmp_path / "run"))
    run.folder.mkdir()
    spec: Any = SimpleNamespace(run=run, attempt="0123456789", scaling=None, task=None, resume=Resume())
    made: Any = Decider(spec, is_restart=True)
    made.timers, made.clock = timers, Clock(lambda: 100.0, 0.0)
    made.shutdown.clear_actors = lambda: []
    terms, journal = Terms(run), Journal(run.folder / "journal.jsonl", durable=True).open()
    watch = TermWatch(run, terms.claim("0123456789"), terms)
    checkpoints = CheckpointKeeper(run, Resume(), Writer(1, ""), made.put)
    made.storage = TermStorage(journal, watch, Mirror(run, 1), checkpoints)
    made.recorder = RunRecorder(run, made.note, made.clock)
    made.files, made.storage_wait = RunFiles(run, made.recorder), StorageWait(run, Clock())
    made.recorder.open(Begin())
    made.shutdown.report = EndReport(made.recorder.recoveries.say)
    made.node_monitor, made.dispatch, others = Nobody(), Nobody(), Nobody()
    made.services = Services(others, others, MetricsExporter(run, made.recorder))
    made.state = training()
    made.files.write_status(made.state)
    return made


def status(deciding: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((deciding.run_spec.run.folder / "status.json").read_text())
    return found


def test_nothing_is_decided_in_the_turn_in_which_the_clock_has_ended_the_run(deciding, monkeypatch):
    """The driver was killed and its lease is over; a worker that lives still has published meanwhile."""
    monkeypatch.setattr(DriverFeed, "silent_s", 1e9)
    deciding.is_ready = True
    deciding.shutdown.clear_actors = lambda: deciding.queue.put(StepsPublished([])) or []
    deciding._publish = lambda records: pytest.fail("of a run that is over")
    assert status(deciding)["ended"] is False
    deciding._take(0.0)
    assert deciding.driver_feed.ended["message"] == "no driver for 60 s"
    assert (status(deciding)["ended"], status(deciding)["members"]) == (True, [])
    assert deciding.queue.qsize() == 1


@pytest.mark.parametrize(
    ("error", "told"),
    [(JournalDamaged("line 1"), True), (OSError(5, "Input/output error"), True), (RunFailed("it has finished"), False)],
)
def test_a_coordinator_that_cannot_open_its_run_ends_it_in_the_status_unless_the_folder_is_not_its_own(
    deciding, error, told
):
    deciding.is_restart = isinstance(error, JournalDamaged | RunFailed)  # after any other it would start once more

    def fail() -> None:
        raise error

    deciding._open = fail
    deciding.run()
    assert deciding.driver_feed.ended["error"] == "RunFailed"
    found = status(deciding)
    assert (found["ended"], found["members"] == [], found["error"] != "") == (told, told, told)
    assert found["end"] == ({name: deciding.driver_feed.ended[name] for name in found["end"]} if told else {})
    assert found["end"].get("attempt") == ("0123456789" if told else None)
    assert [after_s for after_s, _ in deciding.timers] == [60.0], "its name and its process are free after the lease"


def test_a_full_disk_at_the_start_is_told_with_the_folder_and_the_way_out(deciding):
    deciding.is_restart = False

    def fail() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    deciding._open = fail
    deciding.run()
    folder = deciding.run_spec.run.folder
    assert deciding.driver_feed.ended["message"].startswith(f"run folder '{folder}': its disk is full")
    assert "Free space there, or give another folder" in deciding.driver_feed.ended["message"]


def test_an_end_whose_records_cannot_be_written_is_in_the_status_all_the_same(deciding, monkeypatch):
    def fail(*_: object) -> None:
        raise RuntimeError("no picture")

    monkeypatch.setattr(deciding.files, "write_summary", fail)
    deciding.recorder.metrics = SimpleNamespace(last_step=3)  # the last one
    end: End = {"error": "", "message": "", "facts": {}, "attempt": "a"}
    ended = conclude(end, deciding.recorder, deciding.files, deciding.state, "")
    assert (ended["error"], ended["message"]) == ("RunFailed", "; then RuntimeError: no picture")
    deciding.files.write_status(deciding.state)
    assert (status(deciding)["ended"], status(deciding)["end"]) == (True, ended)


@pytest.mark.parametrize("ready", [True, False])
@pytest.mark.parametrize("cleared", [True, False])
def test_a_runs_own_stamps_go_once_its_actors_have_gone(deciding, ready, cleared):
    folder = stamp_dir.stamp_folder("over", deciding.run_spec.attempt)
    os.close(hold(folder, 30.0))
    (folder / "w-0.stamp").touch()

    def clear() -> list[str]:
        """A worker that is just starting makes its folder and its stamps before Ray gets to it."""
        os.close(hold(folder, 30.0))
        (folder / "w-1.stamp").touch()
        if not cleared:
            raise ConnectionError("Ray is away")
        return []

    deciding.shutdown.clear_actors = clear
    if ready:
        deciding.is_ready = True
    assert (deciding.shutdown.cleared() == []) is cleared
    assert list(folder.parent.iterdir()) == []


def test_beats_are_answered_for_a_deciding_thread_that_waits_for_the_runs_folder(deciding):
    """Its agent would take it for hung after 15 s, and kill it."""
    heard: list[str] = []
    deciding.node_monitor = SimpleNamespace(echo=heard.append)
    with deciding.storage_wait.declared():
        deciding.put(NodeBeat("node"))
    assert (heard, deciding.queue.qsize()) == (["node"], 0)
    deciding.put(NodeBeat("node"))
    assert (heard, deciding.queue.qsize()) == (["node"], 1), "else it answers by itself, or is hung"


@pytest.mark.parametrize("moment", ["on time", "at the end"])
def test_a_coordinator_whose_run_is_taken_over_tells_its_driver_and_writes_nothing_more(deciding, moment):
    deciding._open = lambda: None
    deciding._decide = lambda event: None
    killed: list[str] = []
    deciding.dispatch.kill_everyone = lambda: killed.append("all")
    folder = deciding.run_spec.run.folder

    def take_over() -> None:
        (folder / "terms" / "000002").write_text('{"attempt": "fedcba", "host": "elsewhere"}')
        for name in ("status.json", "journal.jsonl"):
            (folder / name).write_text("the other's")

    if moment == "on time":
        take_over()
    else:
        deciding._take = lambda ticked_at: (take_over(), deciding.shutdown.finish("", ""))
    deciding.run()
    assert deciding.driver_feed.ended["error"] == "TermLost"
    for named in ("run over", "elsewhere", "term 2", "term 1", "submit this command again"):
        assert named in deciding.driver_feed.ended["message"]
    assert deciding.driver_feed.ended["facts"]["host"] == "elsewhere"
    assert {(folder / name).read_text() for name in ("status.json", "journal.jsonl")} == {"the other's"}
    assert not (folder / "summary.json").exists()
    assert killed


@pytest.mark.slow
@pytest.mark.parametrize("is_taken", [False, True])
def test_an_end_that_a_user_stopped_while_the_store_was_slow_writes_its_records_unless_the_run_is_anothers_by_then(
    deciding, object_store, monkeypatch, is_taken
):
    with faulty_proxy(object_store.port) as proxy:
        object_store.enter(monkeypatch, AWS_ENDPOINT_URL=proxy.endpoint)
        in_store = RunConfig("over", run_dir=f"s3://{object_store.new_bucket()}/runs")
        terms = Terms(in_store).open()
        watch = TermWatch(in_store, terms.claim("0123456789"), terms)
        deciding.storage = dataclasses.replace(deciding.storage, watch=watch)
        proxy.fault = lambda method, path: "delay" if "terms" in path else None
        deciding.is_ready = True
        deciding.queue.put(Abandoned("stopped by the user"))
        if is_taken:
            Terms(in_store).open().claim("fedcba")
        folder = deciding.run_spec.run.folder
        (folder / "status.json").write_text("the other's")
        begun = time.monotonic()
        deciding.shutdown.finish("", "")
        assert time.monotonic() - begun < DELAY_S, "nobody waits"
        assert deciding.driver_feed.ended["message"].startswith("stopped while its last records were being written")
        for thread in [one for one in threading.enumerate() if one.name.startswith("conclude")]:
            thread.join(60.0)
    assert ((folder / "status.json").read_text() == "the other's") is is_taken


def test_a_run_whose_storage_tells_nothing_of_terms_ends_after_fail_after_s(deciding):
    deciding.storage.watch.silent_s = lambda: 3601.0
    deciding._end_if_nobody_answers()
    assert deciding.driver_feed.ended["error"] == "StorageFailed"
    assert (
        "has not answered for 3601 s whether another submission has taken the run"
        in deciding.driver_feed.ended["message"]
    )


def test_a_note_of_a_replaced_coordinator_does_not_count(deciding):
    deciding.note(term_note(1, 0))
    deciding.storage.journal.append(term_note(2, 1))  # its successor has read one line
    deciding.note({"note": "checkpoint", "of": "the old one"})
    deciding.storage.watch.own = TermClaim(2, "")
    deciding.note({"note": "checkpoint", "of": "the new one"})
    lines = standing(read(deciding.run_spec.run.folder / "journal.jsonl"))
    assert [line["of"] for line in lines if "of" in line] == ["the new one"]
