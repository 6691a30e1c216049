"""What a coordinator starts from: the journal of its own attempt, or a folder that it makes room in."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_ring.config import RunConfig, ScalingConfig, StepConfig
from elastic_ring.control.messages import Checkpoint
from elastic_ring.errors import CoordinatorLost, JournalDamaged, RunFailed, TermLost
from elastic_ring.mesh import Mesh
from elastic_ring.monitor.json_files import json_bytes
from elastic_ring.runtime.coordinator.resume import Resume
from elastic_ring.runtime.coordinator.run_spec import RunSpec, control_options
from elastic_ring.runtime.coordinator.startup import Startup, open_run
from elastic_ring.runtime.terms import Terms
from tests.journals import journal_bytes


def run_spec(folder: Path, attempt: str, submitted_unix_s: float = 50.0) -> RunSpec:
    task: Any = SimpleNamespace(step=StepConfig(steps=1))
    return RunSpec(RunConfig("opened", run_dir=str(folder)), ScalingConfig(), task, attempt, "", submitted_unix_s, "")


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
