"""While the last records are written the coordinator goes on answering: silence would cost it its life."""

from __future__ import annotations

import json
import os
import queue
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_ring.config import RunConfig
from elastic_ring.control.options import ControlOptions
from elastic_ring.control.state import Crew, Running, State, Worker
from elastic_ring.errors import JournalDamaged, RunFailed
from elastic_ring.mesh import Mesh
from elastic_ring.monitor.journal import Journal
from elastic_ring.runtime import coordinator, stamp_folder
from elastic_ring.runtime.audience import Audience
from elastic_ring.runtime.chronicle import Chronicle
from elastic_ring.runtime.coordinator import Coordinator
from elastic_ring.runtime.ending import aside, conclude
from elastic_ring.runtime.stamp_folder import hold


def test_beats_are_echoed_and_faults_refused_while_the_end_is_being_written() -> None:
    mail: queue.Queue[tuple[str, Any, dict[str, Any]]] = queue.Queue()
    answer: queue.Queue[bool] = queue.Queue()
    echoed = threading.Event()

    def work() -> dict[str, Any]:
        mail.put(("fault", 0, {"answer": answer}))
        mail.put(("beat", "node", {}))
        assert echoed.wait(30.0), "the end could not be written while nobody echoed"
        return {"error": ""}

    nodes: list[str] = []

    def echo(node: str) -> None:
        nodes.append(node)
        echoed.set()

    assert aside(work, mail, echo) == {"error": ""}
    assert nodes == ["node"]
    assert answer.get(timeout=30.0) is False


class Nobody:
    """Whoever else the coordinator speaks to, and hears nothing from."""

    weights_sha256 = ""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **options: None


@pytest.fixture
def deciding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A coordinator's own parts, the deciding thread's work among them, in a run that trains; no Ray, no workers."""
    monkeypatch.setattr(stamp_folder, "SHARED_MEMORY", tmp_path / "shm")
    monkeypatch.setattr(coordinator.threading, "Timer", lambda *args: Nobody())
    (tmp_path / "shm").mkdir()
    made: Any = object.__new__(Coordinator)
    run = RunConfig("over", str(tmp_path / "run"))
    run.folder.mkdir()
    made.charter = SimpleNamespace(run=run, attempt="0123456789", scaling=None, task=None)
    made._queue, made.audience, made._ready = queue.Queue(), Audience(), threading.Event()
    made._ended, made._causes, made._ticked_at, made._told_waiting, made._term = None, 0, 0.0, "", 1
    made._is_restart, made.clock = True, lambda: 100.0
    made._clear = lambda: []
    made.journal = Journal(run.folder / "journal.jsonl", durable=True).open()
    made.chronicle = Chronicle(run, made._note, made.clock)
    made.chronicle.open(0.0)
    made.lookout, made.dispatch = Nobody(), Nobody()
    workers = {name: Worker(name, "node", "ready", 0.0) for name in ("w-0", "w-1")}
    crew = Crew(1, 1, Mesh(2, 1), ("w-0", "w-1"), 0)
    made.state = State(ControlOptions("over", 2, 1, 4), Running(crew), 1, 1, workers)
    made.chronicle.write_status(made.state, force=True)
    return made


def status(deciding: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((deciding.charter.run.folder / "status.json").read_text())
    return found


def test_nothing_is_decided_in_the_turn_in_which_the_clock_has_ended_the_run(
    deciding: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver was killed and its lease is over; a worker that lives still has published meanwhile."""
    monkeypatch.setattr(Audience, "silent_s", 1e9)
    deciding._ready.set()
    deciding._clear = lambda: deciding._queue.put(("publish", [], {"worker": "w-0"})) or []
    deciding._publish = lambda records: pytest.fail("of a run that is over")
    assert status(deciding)["ended"] is False
    deciding._take()
    assert deciding._ended["message"] == "no driver for 60 s"
    assert (status(deciding)["ended"], status(deciding)["members"]) == (True, [])
    assert deciding._queue.qsize() == 1


@pytest.mark.parametrize(
    ("error", "told"),
    [(JournalDamaged("line 1"), True), (OSError(5, "Input/output error"), True), (RunFailed("it has finished"), False)],
)
def test_a_coordinator_that_cannot_open_its_run_ends_it_in_the_status_unless_the_folder_is_not_its_own(
    deciding: Any, error: Exception, told: bool
) -> None:
    deciding._is_restart = isinstance(error, JournalDamaged | RunFailed)  # after any other it would start once more

    def fail() -> None:
        raise error

    deciding._open = fail
    deciding._main()
    assert deciding._ended["error"] == "RunFailed"
    found = status(deciding)
    assert (found["ended"], found["members"] == [], found["error"] != "") == (told, told, told)
    assert found["end"] == ({name: deciding._ended[name] for name in found["end"]} if told else {})
    assert found["end"].get("attempt") == ("0123456789" if told else None)


def test_an_end_whose_records_cannot_be_written_is_in_the_status_all_the_same(
    deciding: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no picture")

    monkeypatch.setattr(deciding.chronicle, "write_summary", fail)
    deciding.chronicle.metrics = SimpleNamespace(last_step=3)  # the last one
    end = {"error": "", "message": "", "facts": {}, "attempt": "a"}
    ended = conclude(end, deciding.chronicle, deciding.state, "")
    assert (ended["error"], ended["message"]) == ("RunFailed", "; then RuntimeError: no picture")
    deciding.chronicle.write_status(deciding.state, force=True)
    assert (status(deciding)["ended"], status(deciding)["end"]) == (True, ended)


@pytest.mark.parametrize("ready", [True, False])
@pytest.mark.parametrize("cleared", [True, False])
def test_a_runs_own_stamps_go_once_its_actors_have_gone(deciding: Any, ready: bool, cleared: bool) -> None:
    folder = stamp_folder.stamp_folder("over", deciding.charter.attempt)
    os.close(hold(folder, 30.0))
    (folder / "w-0.stamp").touch()

    def clear() -> list[str]:
        """A worker that is just starting makes its folder and its stamps before Ray gets to it."""
        os.close(hold(folder, 30.0))
        (folder / "w-1.stamp").touch()
        if not cleared:
            raise ConnectionError("Ray is away")
        return []

    deciding._clear = clear
    if ready:
        deciding._ready.set()
    assert (deciding._cleared() == []) is cleared
    assert list(folder.parent.iterdir()) == []
