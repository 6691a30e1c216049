"""What a submission under a run's name leads to, and the questions to a coordinator that comes before it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from ray.exceptions import GetTimeoutError

from elastic_ring import RunConfig
from elastic_ring.errors import CoordinatorLost
from elastic_ring.runtime.driver import attach
from elastic_ring.runtime.driver.attach import attempt_of
from elastic_ring.runtime.driver.submission_rules import (
    Attach,
    Coordinator,
    ExistingRun,
    Refuse,
    Resume,
    Return,
    RunRecord,
    RunRequest,
    Start,
    decide_submission,
    other_versions,
)
from elastic_ring.runtime.identity import CONTENTS, VERSION, Identity, changed_files

RUN = RunConfig("x", run_dir="r")
IDENTITY = Identity({"data": "d", VERSION: CONTENTS})
REQUEST = RunRequest(RUN, IDENTITY, "digest", {"loss": "a"}, plans=[(0, 9)])
RECORD = RunRecord("x", IDENTITY, sources={"loss": "a"}, plans=[(0, 9)], steps=9)
RUNNING = Coordinator("a1", "digest", IDENTITY, {"loss": "a"}, RUN.storage_uri, False, "", False)
OTHER = Identity({"data": "other", VERSION: CONTENTS})
MANY = Identity({**IDENTITY.entries, **{name: "1" for name in "abcde"}})


def running(**changes: Any) -> ExistingRun:
    return ExistingRun(RECORD, coordinator=replace(RUNNING, **changes))


@pytest.mark.parametrize(
    ("existing", "request_", "decision"),
    [
        (ExistingRun(), REQUEST, Start()),
        (ExistingRun(RECORD), REQUEST, Start()),
        (ExistingRun(RECORD, has_checkpoint=True), REQUEST, Resume()),
        (ExistingRun(RECORD, is_whole=True), REQUEST, Return()),
        (running(), REQUEST, Attach()),
        (running(folder="link", writes_here=True), REQUEST, Attach()),
        (running(has_ended=True, sources={}, asks_callbacks=True), REQUEST, Attach()),
        (running(has_ended=True, error="CrashLoop", digest="other", folder="f", writes_here=False), REQUEST, Start()),
        (ExistingRun(RECORD), replace(REQUEST, sources={}, run=replace(RUN, code_changed=True)), Start()),
        (ExistingRun(RECORD), replace(REQUEST, sources={}, run=replace(RUN, resume="never")), Start()),
        (ExistingRun(RECORD), replace(REQUEST, plans=[(0, 9), (9, 20)]), Start()),
    ],
)
def test_a_submission_starts_goes_on_attaches_or_returns(
    existing: ExistingRun, request_: RunRequest, decision: object
) -> None:
    assert decide_submission(existing, request_) == decision


@pytest.mark.parametrize(
    ("existing", "request_", "message"),
    [
        (ExistingRun(replace(RECORD, name="y")), REQUEST, "holds run 'y', not 'x': choose another run_dir"),
        (
            ExistingRun(replace(RECORD, identity=OTHER)),
            REQUEST,
            f"run name 'x' is taken by a run with other settings (its folder {RUN.driver_folder}, in data: other "
            "there, d here): choose another name and run_dir, or submit the same settings to attach to it; for more",
        ),
        (ExistingRun(replace(RECORD, identity=OTHER)), replace(REQUEST, can_extend=False), "to attach to it"),
        (
            ExistingRun(replace(RECORD, identity=OTHER, files=[("f", "1")])),
            replace(REQUEST, files=[("f", "2")]),
            "in files of the data: changed f; data: other there",
        ),
        (
            ExistingRun(replace(RECORD, identity=MANY)),
            REQUEST,
            "c: 1 there, None here and 2 more",
        ),
        (ExistingRun(replace(RECORD, identity=Identity({"a": "b"}))), REQUEST, "an identity of another version (None)"),
        (
            ExistingRun(RECORD),
            replace(REQUEST, plans=[(0, 9), (5, 20)]),
            "optim.replanned: [(0, 9)] there, [(0",
        ),
        (ExistingRun(RECORD, is_whole=True, has_weights=False), REQUEST, "weights are not there: bring them back"),
        (ExistingRun(RECORD, other_writer="z"), REQUEST, "is being written to by run 'z' on another Ray cluster"),
        (running(digest="other"), REQUEST, "(it is running now, in nothing that is recorded: the mesh"),
        (running(digest="other", has_ended=True, identity=OTHER), REQUEST, "(it is running now, in data: other there"),
        (running(sources={"loss": "b"}), REQUEST, "is running now with other code of loss: choose another name"),
        (running(folder="f", writes_here=False), REQUEST, "is running now with run_dir='f', not "),
        (
            running(asks_callbacks=True),
            REQUEST,
            "waits after each validation for callbacks and this submission has n",
        ),
        (running(), replace(REQUEST, asks_callbacks=True), "does not wait for callbacks and this submission has some"),
        (
            ExistingRun(RECORD),
            replace(REQUEST, sources={"loss": "b", "model": "c"}),
            "other code of loss, model, and its steps so far are the result of that",
        ),
        (ExistingRun(RECORD, is_whole=True), replace(REQUEST, sources={}), "and what it has trained is the result of"),
    ],
)
def test_a_refusal_names_the_difference_and_the_ways_out(
    existing: ExistingRun, request_: RunRequest, message: str
) -> None:
    decision = decide_submission(existing, request_)
    assert isinstance(decision, Refuse)
    assert message in str(decision)
    assert decision.ways_out


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ([("a", "1"), ("b", "9"), ("d", "4")], "files of the data: changed b; gone c; new d"),
        ([("b", "2"), ("a", "1"), ("c", "3")], "files of the data: the same, in another order or cut otherwise"),
        ([], ""),
    ],
)
def test_changed_files_are_named(files: list[tuple[str, str]], told: str) -> None:
    assert changed_files([["a", "1"], ["b", "2"], ["c", "3"]], files) == told


def test_other_versions_are_named() -> None:
    recorded = {"torch": "2.12.0", "ray": "2.60.0", "driver": "580.1"}
    here = {"torch": "2.13.0", "ray": "2.60.0", "python": "3.12.1"}
    assert other_versions(recorded, here) == "torch 2.12.0 there, 2.13.0 here"
    assert other_versions({}, here) == other_versions(here, here) == ""


@pytest.mark.parametrize(("starts", "patience"), [(True, "120"), (False, "60")])
def test_a_silent_coordinator_is_given_up_later_while_it_starts(
    starts: bool, patience: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(*_: object, **__: object) -> None:
        raise GetTimeoutError("no answer")

    class Mute:
        class identity:
            @staticmethod
            def remote() -> None:
                return None

    now = [0.0]
    monkeypatch.setattr(attach.ray, "get", silent)
    monkeypatch.setattr(attach.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(attach.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    with pytest.raises(CoordinatorLost, match=f"does not answer within {patience} s"):
        attempt_of(Mute(), RUN, starts=starts)
    assert now[0] == pytest.approx(float(patience), abs=1.0)
