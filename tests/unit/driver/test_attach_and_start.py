"""How a run ended, read from its folder by a driver that came late; and a start that is refused at the call itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from elastic_ring.config import RunConfig, ScalingConfig
from elastic_ring.monitor.metrics import STATUS_NAME, SUMMARY_NAME, write_json
from elastic_ring.runtime.coordinator.dispatch import Dispatcher
from elastic_ring.runtime.coordinator.run_spec import RunSpec
from elastic_ring.runtime.driver.attach import end_on_record


def test_an_end_is_believed_of_the_attempt_that_was_followed_only(tmp_path: Path) -> None:
    run = RunConfig("late", run_dir=str(tmp_path))
    assert end_on_record(run, "a") is None
    write_json(tmp_path / STATUS_NAME, {"ended": False, "end": {}})
    assert end_on_record(run, "a") is None, "a coordinator that died on the way has ended nothing"
    end = {"error": "ShardLost", "message": "no holder of cp_rank 1", "facts": {"cp_rank": "1"}, "attempt": "a"}
    write_json(tmp_path / STATUS_NAME, {"ended": True, "end": end})
    assert end_on_record(run, "a") == end
    assert end_on_record(run, "b") is None, "an earlier attempt's end is not this one's"
    write_json(tmp_path / SUMMARY_NAME, {"steps": 3})
    found = end_on_record(run, "b")
    assert found is not None
    assert (found["error"], found["summary"]) == ("", {"steps": 3})


class Refusing:
    """What the dispatcher calls to start a worker, when the call itself raises."""

    def start_worker(self, *arguments: Any) -> None:
        raise ValueError("resources must not contain the key 'memory'")


def test_a_start_that_is_refused_at_the_call_is_told_with_its_reason() -> None:
    told: list[tuple[str, Any]] = []
    run_spec = RunSpec(RunConfig("refused", run_dir="nowhere"), ScalingConfig(), None, "a", "", 0.0, "")  # type: ignore[arg-type]
    cluster: Any = Refusing()
    dispatch = Dispatcher(run_spec, "", cluster, None, None, lambda kind, body: told.append((kind, body)))
    dispatch._start_on("w3", None)
    ((kind, lost),) = told
    assert (kind, lost.worker, lost.reason) == ("event", "w3", "start-failed")
    assert "must not contain the key 'memory'" in lost.detail
