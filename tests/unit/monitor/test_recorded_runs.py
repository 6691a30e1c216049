"""The journals of recorded runs replay and fold to the summaries and statuses that the runs wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elastic_ring.control.coordination import replay, standing
from elastic_ring.control.facts import fact_of
from elastic_ring.control.state import Ended, State
from elastic_ring.monitor.metrics import METRICS_NAME, RECOVERY_KEYS, Recovery
from elastic_ring.runtime.coordinator import run_files
from elastic_ring.runtime.coordinator.folds.recovery_log import RecoveryLog
from elastic_ring.runtime.coordinator.recorder import Begin, RunRecorder
from elastic_ring.runtime.coordinator.run_files import RunFiles
from elastic_ring.runtime.coordinator.run_spec import Clock
from tests.unit.monitor.recorded_runs import OF_A_MACHINE, RECORDED, RUNS, STEPS, RecordedRun

OF_CLOCKS = {"goodput", "time_s"}
"""Keys of a summary whose clocks no record holds."""
OF_ITS_WRITING = {
    "phase",
    "updated_unix_s",
    "updated_at",
    "ended",
    "end",
    "lost_s",
    "data_wait_share",
    "checkpoint_intervals_missed",
}
"""Keys of a status that the end changes, or that the coordinator measures as it writes."""
Json = dict[str, Any]


def without(content: Json, keys: set[str]) -> Json:
    assert keys <= content.keys()
    return {key: value for key, value in content.items() if key not in keys}


@pytest.fixture(params=RUNS)
def run(request: pytest.FixtureRequest) -> RecordedRun:
    return RecordedRun.read(request.param)


def replayed(run: RecordedRun) -> State:
    return replay(run.options, standing(run.journal))


def recalled(run: RecordedRun, folder: Path) -> RunFiles:
    """The records of a coordinator that starts anew when the run has ended."""
    config = run.run_config(folder)
    (folder / METRICS_NAME).write_bytes(run.files[METRICS_NAME])
    recorder = RunRecorder(config, lambda note: None, Clock(lambda: 0.0, 0.0))
    recorder.open(Begin(identity=run.summary["identity"]))
    replay(run.options, standing(run.journal), recorder.recall)
    return RunFiles(config, recorder)


def test_the_events_replay_to_the_same_commands_and_the_recorded_end(run: RecordedRun) -> None:
    state, status = replayed(run), run.status
    assert isinstance(state.phase, Ended)
    assert (state.term, state.generation) == (status["term"], status["generation"])


def test_journal_and_metrics_fold_to_the_recorded_summary(
    run: RecordedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_files, "draw_run", lambda *arguments: None)
    state, summary = replayed(run), run.summary
    again = recalled(run, tmp_path).write_summary(
        summary["weights_sha256"], state.promise == "bit-exact", planned_steps=STEPS
    )
    assert without(again, OF_CLOCKS) == without(summary, OF_CLOCKS)


def test_journal_and_metrics_fold_to_the_recorded_status(run: RecordedRun, tmp_path: Path) -> None:
    again, status = recalled(run, tmp_path).status(replayed(run)), run.status
    status["recoveries"] = [Recovery.from_json(line).to_json() for line in status["recoveries"]]  # with all its fields
    assert without(again, OF_ITS_WRITING) == without(status, OF_ITS_WRITING)


def test_the_facts_fold_to_the_recorded_recoveries(run: RecordedRun) -> None:
    recoveries = RecoveryLog(run.options.run, lambda note: None)
    for line in standing(run.journal):
        if (fact := fact_of(line)) is not None:
            recoveries.saw(fact)
    assert [{key: getattr(recovery, key) for key in RECOVERY_KEYS} for recovery in recoveries.records] == run.summary[
        "recoveries"
    ]
    assert recoveries.num_lost() == run.summary["lost_workers"]


def test_the_runs_are_what_their_names_say() -> None:
    summaries = {name: RecordedRun.read(name).summary for name in RUNS}
    actions = {name: [recovery["action"] for recovery in summary["recoveries"]] for name, summary in summaries.items()}
    assert actions["plain"] == []
    assert actions["kill"] == ["spare took its place"]
    assert actions["drain"] == ["drained"]
    assert actions["lost-coordinator"] == ["coordinator restarted from its journal"]
    assert [generation["mesh"]["dp"] for generation in summaries["growth"]["generations"]] == [2, 1, 2]
    assert len(summaries["plain"]["checkpoints"]) > 1
    assert summaries["plain"]["validation"]


def test_the_records_are_small_and_name_no_machine() -> None:
    assert sum(path.stat().st_size for path in RECORDED.rglob("*.gz")) < 500_000
    texts = [content.decode() for name in RUNS for content in RecordedRun.read(name).files.values()]
    assert [OF_A_MACHINE.findall(text) for text in texts if OF_A_MACHINE.search(text)] == []
