"""What a submission that is refused is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import GetTimeoutError

from elastic_ring import RunConfig
from elastic_ring.errors import CoordinatorLost
from elastic_ring.monitor.metrics import write_json
from elastic_ring.runtime.driver import attach
from elastic_ring.runtime.driver.attach import attempt_of, refuse_other_settings, tell_other_versions
from elastic_ring.runtime.identity import NUM_TOLD, Identity
from elastic_ring.wording import few

RECORDED: dict[str, Any] = {"digest": "a", "identity": {}, "run": {"name": "x", "faults": []}}


def test_other_versions_are_no_other_settings_and_are_told_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    there = {"torch": "2.12.0", "ray": "2.60.0", "driver": "580.1"}
    here = {"torch": "2.13.0", "ray": "2.60.0", "python": "3.12.1"}
    assert attach.differences({**RECORDED, "versions": there}, Identity(), {**RECORDED, "versions": here}) == []
    run = RunConfig("x", run_dir=str(tmp_path))
    tell_other_versions(run, here)  # of a run without a record there is nothing to say
    for recorded in (RECORDED, {**RECORDED, "versions": here}, {**RECORDED, "versions": there}):
        write_json(tmp_path / "config.json", recorded)
        tell_other_versions(run, here)
    (line,) = caplog.messages
    assert line == ("run x was recorded with other versions than this submission's: torch 2.12.0 there, 2.13.0 here")


def test_only_some_of_many_are_told() -> None:
    what = {name: "1" for name in ("a", "b", "c", "d", "e")}
    told = Identity(what).differences({})
    assert few(told, NUM_TOLD, "; ") == "a: None there, 1 here; b: None there, 1 here; c: None there, 1 here and 2 more"


def test_other_code_of_a_running_run_is_refused_where_it_says_which_it_has() -> None:
    run = RunConfig("x")
    attach.refuse_running_code(run, None, {"loss": "a"})  # an older coordinator
    attach.refuse_running_code(run, {"loss": "a"}, {"loss": "a"})
    with pytest.raises(ValueError, match="running now with other code of loss"):
        attach.refuse_running_code(run, {"loss": "b"}, {"loss": "a"})


def test_other_settings_are_refused_by_name() -> None:
    refuse_other_settings(RunConfig("x", run_dir="r"), [], "here")
    with pytest.raises(ValueError, match=r"'x' is taken by a run with other settings \(here, in step\.steps\)"):
        refuse_other_settings(RunConfig("x", run_dir="r"), ["step.steps"], "here")


@pytest.mark.parametrize(("starts", "patience"), [(True, "120"), (False, "60")])
def test_a_silent_coordinator_is_given_up_later_while_it_starts(
    starts: bool, patience: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(*_: object, **__: object) -> None:
        raise GetTimeoutError("no answer")

    now = [0.0]
    monkeypatch.setattr(attach.ray, "get", silent)
    monkeypatch.setattr(attach.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(attach.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    with pytest.raises(CoordinatorLost, match=f"does not answer within {patience} s"):
        attempt_of(Mute(), RunConfig("x", run_dir="r"), starts=starts)
    assert now[0] == pytest.approx(float(patience), abs=1.0)


class Mute:
    class identity:
        @staticmethod
        def remote() -> None:
            return None
