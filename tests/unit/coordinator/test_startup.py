"""What a coordinator starts from: the journal of its own attempt, or a folder that it makes room in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_ring.config import RunConfig, ScalingConfig, StepConfig
from elastic_ring.control.messages import Checkpoint
from elastic_ring.errors import CoordinatorLost, JournalDamaged, RunFailed, TermLost
from elastic_ring.mesh import Mesh
from elastic_ring.monitor.json_files import json_bytes
from elastic_ring.runtime import run_storage
from elastic_ring.runtime.coordinator.resume import Resume
from elastic_ring.runtime.coordinator.run_spec import RunSpec, control_options
from elastic_ring.runtime.coordinator.startup import Reading, Startup, open_run, refuse_to_begin
from elastic_ring.runtime.terms import Terms
from tests.journals import journal_bytes
from tests.unit.monitor.recorded_runs import RecordedRun


def run_spec(folder: Path, attempt: str) -> RunSpec:
    task: Any = SimpleNamespace(step=StepConfig(steps=1))
    return RunSpec(RunConfig("opened", run_dir=str(folder)), ScalingConfig(), task, attempt, "", "")


def test_a_start_on_gpus_waits_for_its_spares_whose_warm_up_would_run_beside_its_first_steps(tmp_path):
    on_cpus = run_spec(tmp_path, "a")
    on_gpus = replace(on_cpus, scaling=ScalingConfig(device="cuda"))
    assert [control_options(made).waits_for_spares for made in (on_cpus, on_gpus)] == [False, True]


def opened(made: RunSpec, *, is_restart: bool = False, remaining: list[str] | None = None, built: int = 0) -> Startup:
    also: Any = {"remaining": lambda: remaining or [], "clear": list, "built": lambda: built}
    return open_run(made, Terms(made.run), is_restart=is_restart, **also)


def begun(folder: Path, attempt: str, now: float = 10.0) -> None:
    """A journal as a first coordinator leaves it."""
    notes = [
        {"note": "term", "term": 1, "num_lines": 0},
        {"note": "begin", "attempt": attempt, "now": now, "run": "opened"},
    ]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "journal.jsonl").write_bytes(journal_bytes(notes))


def test_an_empty_folder_is_a_first_beginning_and_terms_rise(tmp_path):
    terms = [opened(run_spec(tmp_path / "new", "a")).term for _ in range(3)]
    assert terms == [1, 2, 3]
    assert opened(run_spec(tmp_path / "new", "a")).begin is None


def test_the_journal_of_the_same_attempt_is_gone_on_with(tmp_path):
    begun(tmp_path, "a")
    found = opened(run_spec(tmp_path, "a"), is_restart=True, remaining=["er:opened:w-1"])
    assert (found.num_written, found.begin and found.begin["now"]) == (2, 10.0)
    assert (tmp_path / "journal.jsonl").exists()


def test_another_attempts_records_are_set_aside_and_nothing_of_them_is_read(tmp_path):
    begun(tmp_path, "a")
    found = opened(run_spec(tmp_path, "b"))
    assert (found.num_written, found.lines) == (0, ())
    assert (tmp_path / "attempt-001" / "journal.jsonl").exists()
    assert not (tmp_path / "journal.jsonl").exists()


def test_a_resumed_attempt_goes_on_with_the_metrics_and_with_nothing_else(tmp_path):
    begun(tmp_path, "a")
    (tmp_path / "metrics.jsonl").write_bytes(journal_bytes([{"step": 0}]))
    (tmp_path / "status.json").write_bytes(json_bytes({}))
    made = replace(run_spec(tmp_path, "b"), resume=Resume(0, (Checkpoint(1, "f", Mesh(1, 1)),)))
    assert opened(made).lines == ()
    assert (tmp_path / "metrics.jsonl").read_bytes() == journal_bytes([{"step": 0}])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["attempt-001", "metrics.jsonl", "terms"]


def test_a_restart_gives_way_to_a_later_submission_and_to_workers_of_a_journal_that_it_cannot_see(tmp_path):
    for now in (99.0, 10.0):  # the other host's clock
        begun(tmp_path / "taken", "b", now=now)
        with pytest.raises(TermLost, match=r"has claimed term 1, .*this submission had begun before"):
            opened(run_spec(tmp_path / "taken", "a"), is_restart=True)
    known = replace(run_spec(tmp_path / "taken", "a"), follows="b")
    assert opened(known, is_restart=True).term == 2, "its driver had seen that journal: of a run that had ended"
    with pytest.raises(CoordinatorLost, match="its journal is not in"):
        opened(run_spec(tmp_path / "elsewhere", "a"), is_restart=True, remaining=["er:opened:w-1"])
    with pytest.raises(JournalDamaged, match=r"no journal of run opened is in .*workers have built generation 7"):
        opened(run_spec(tmp_path / "elsewhere", "a"), is_restart=True, remaining=["er:opened:w-1"], built=7)
    assert not (tmp_path / "elsewhere").exists(), "nothing remakes a folder that was moved away"


def test_a_finished_run_and_actors_that_stay_are_no_beginning(tmp_path):
    (tmp_path / "summary.json").write_bytes(json_bytes({"steps": 1}))
    with pytest.raises(RunFailed, match="has finished"):
        opened(run_spec(tmp_path, "a"))
    made = run_spec(tmp_path / "held", "a")
    with pytest.raises(RunFailed, match="an earlier attempt's actors do not go: er:opened:w-1"):
        open_run(made, Terms(made.run), is_restart=False, remaining=list, clear=lambda: ["er:opened:w-1"])
    assert not (tmp_path / "terms").exists(), "refused before a term is claimed"
    assert sorted(path.name for path in (tmp_path / "held" / "terms").iterdir()) == ["000001", "000001.withdrawn"]


def edits(lines: list[bytes]) -> Iterator[tuple[str, int, list[bytes]]]:
    """A journal with each line deleted, doubled, swapped with the next, and cut before it."""
    for k in range(len(lines)):
        yield "deleted", k, lines[:k] + lines[k + 1 :]
        yield "doubled", k, lines[: k + 1] + lines[k:]
        yield "swapped", k, [*lines[:k], *reversed(lines[k : k + 2]), *lines[k + 2 :]]
        yield "cut", k, lines[:k]


@pytest.mark.parametrize("name", ["kill", "lost-coordinator"])
def test_a_recorded_journal_with_any_line_deleted_doubled_swapped_or_cut_is_refused(tmp_path, name):
    """Or it gives the same state: never another one."""
    recorded, folder = RecordedRun.read(name), tmp_path / name
    lines, path = recorded.files["journal.jsonl"].splitlines(keepends=True), folder / "journal.jsonl"
    (begin,) = [line for line in recorded.journal if line.get("note") == "begin"]
    made = replace(run_spec(folder, begin["attempt"]), run=recorded.run_config(folder))
    folder.mkdir()
    (folder / "status.json").write_bytes(json_bytes({**recorded.status, "journal_lines": len(lines)}))

    def read(data: list[bytes]) -> list[Any]:
        path.write_bytes(b"".join(data))
        refuse = partial(refuse_to_begin, made, is_restart=True, remaining=list, built=lambda: 1)
        reading = Reading(made, refuse)
        reading.read()
        return reading.lines

    whole = read(lines)
    assert len(whole) == len(lines) > 90
    for edit, k, left in edits(lines):
        if left == lines:  # the last one has no next
            assert read(left) == whole
            continue
        with pytest.raises(JournalDamaged, match=str(folder)):
            pytest.fail(f"line {k} {edit}: {read(left) == whole}")


def test_a_copy_in_a_store_that_lacks_the_newest_lines_is_gone_on_with_and_says_so(tmp_path, monkeypatch):
    """Its coordinator's node was lost within a second of them."""
    begun(tmp_path, "a")
    (tmp_path / "status.json").write_bytes(json_bytes({"journal_lines": 4}))
    made = run_spec(tmp_path, "a")
    with pytest.raises(JournalDamaged, match=r"journal\.jsonl ends after line 2, and 4 had been written.*newest check"):
        opened(made, is_restart=True)
    monkeypatch.setattr(RunConfig, "is_remote", True)
    monkeypatch.setattr(RunConfig, "folder", tmp_path)
    monkeypatch.setattr(run_storage, "fetch", lambda *_, **__: None)
    assert "ends after line 2, and 4" in opened(made, is_restart=True).lag
