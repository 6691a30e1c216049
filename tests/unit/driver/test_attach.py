"""What a submission under a run's name leads to, the questions to a coordinator before it, and how a run has ended."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import GetTimeoutError

from elastic_ring import ElasticRingTrainer
from elastic_ring.config import CheckpointConfig, RunConfig, ScalingConfig, StepConfig, Timeouts
from elastic_ring.control.messages import CorpusVersion
from elastic_ring.data.prepared import Later, PreparedTokens
from elastic_ring.data.source import order_of
from elastic_ring.errors import CoordinatorLost, CrashLoop, StorageFailed, UserCodeFailed
from elastic_ring.model.config import preset
from elastic_ring.model.transformer import Transformer
from elastic_ring.monitor.metrics import STATUS_NAME, SUMMARY_NAME, write_json
from elastic_ring.runtime.coordinator.dispatch import Dispatcher
from elastic_ring.runtime.coordinator.run_spec import RunSpec
from elastic_ring.runtime.driver import attach, follow
from elastic_ring.runtime.driver.attach import attempt_of, end_on_record
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
    live_changes,
    other_versions,
)
from elastic_ring.runtime.identity import CONTENTS, VERSION, Identity, changed_files
from tests.journals import journal_bytes
from tests.unit.data.corpora import prepared, texts, write_jsonl

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
def test_a_submission_starts_goes_on_attaches_or_returns(existing, request_, decision):
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
        (ExistingRun(replace(RECORD, identity=MANY)), REQUEST, "c: 1 there, None here and 2 more"),
        (ExistingRun(replace(RECORD, identity=Identity({"a": "b"}))), REQUEST, "an identity of another version (None)"),
        (ExistingRun(RECORD), replace(REQUEST, plans=[(0, 9), (5, 20)]), "optim.replanned: [(0, 9)] there, [(0"),
        (ExistingRun(RECORD, is_whole=True, has_weights=False), REQUEST, "weights are not there: bring them back"),
        (ExistingRun(RECORD, other_writer="z"), REQUEST, "is being written to by run 'z' on another Ray cluster"),
        (running(digest="other"), REQUEST, "(it is running now, in nothing that is recorded: the mesh"),
        (running(digest="other", has_ended=True, identity=OTHER), REQUEST, "(it is running now, in data: other there"),
        (running(sources={"loss": "b"}), REQUEST, "is running now with other code of loss: choose another name"),
        (running(folder="f", writes_here=False), REQUEST, "is running now with run_dir='f', not "),
        (running(asks_callbacks=True), REQUEST, "waits after each validation for callbacks and this submission has n"),
        (running(), replace(REQUEST, asks_callbacks=True), "does not wait for callbacks and this submission has some"),
        (
            ExistingRun(RECORD),
            replace(REQUEST, sources={"loss": "b", "model": "c"}),
            "other code of loss, model, and its steps so far are the result of that",
        ),
        (ExistingRun(RECORD, is_whole=True), replace(REQUEST, sources={}), "and what it has trained is the result of"),
    ],
)
def test_a_refusal_names_the_difference_and_the_ways_out(existing, request_, message):
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
def test_changed_files_are_named(files, told):
    assert changed_files([["a", "1"], ["b", "2"], ["c", "3"]], files) == told


def test_settings_that_a_live_run_takes_over_and_those_that_it_does_not_are_told_apart():
    running = replace(RUN, env={"A": "1", "B": "2"}, copies="1")
    assert live_changes(running, RUN) == ([], []), "what the start has settled is no difference"
    often = CheckpointConfig(every_steps=7, keep_every=70, fail_after_s=9.0)
    slow = Timeouts(storage_s=99.0)
    asked = replace(RUN, checkpoint_config=often, timeouts=slow, progress=False, env={"A": "2"}, corruption="off")
    assert live_changes(running, asked) == (
        ["checkpoint.every_steps=7 (it has None)", "checkpoint.keep_every=70 (it has 0)"],
        [
            "corruption=off (it has log)",
            "checkpoint.fail_after_s=9.0 (it has 3600.0)",
            "timeouts.storage_s=99.0 (it has 60.0)",
            "env",
        ],
    )
    none = replace(RUN, checkpoint_config=CheckpointConfig(every_steps=0))
    assert live_changes(running, none) == ([], ["checkpoint.every_steps=0 (it has None)"])


def test_other_versions_are_named():
    recorded = {"torch": "2.12.0", "ray": "2.60.0", "driver": "580.1"}
    here = {"torch": "2.13.0", "ray": "2.60.0", "python": "3.12.1"}
    assert other_versions(recorded, here) == "torch 2.12.0 there, 2.13.0 here"
    assert other_versions({}, here) == other_versions(here, here) == ""


@pytest.mark.parametrize(("starts", "patience"), [(True, "120"), (False, "60")])
def test_a_silent_coordinator_is_given_up_later_while_it_starts(starts, patience, monkeypatch):
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


def test_an_end_is_believed_of_the_attempt_that_was_followed_only(tmp_path):
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


def grown_run(folder: Path) -> tuple[ElasticRingTrainer, CorpusVersion]:
    """A trainer on the beginning of a corpus, and the version by which it grows at step 5."""
    manifest = prepared(folder / "out", write_jsonl(folder / "a.jsonl", texts(300)))
    data = PreparedTokens.of(str(folder / "out" / "manifest-000004.json"), 96)
    run, step = RunConfig("loop", run_dir=str(folder / "run")), StepConfig(steps=8, global_batch=6, context_tokens=96)
    trainer = ElasticRingTrainer(partial(Transformer, preset("laptop")), data, run_config=run, step_config=step)
    return trainer, CorpusVersion(5, str(folder / "out" / "manifest.json"), manifest.digest)


def test_a_finished_run_that_is_submitted_again_says_so_where_no_log_is_set_up(tmp_path, monkeypatch, capsys):
    follower = follow.Follower(grown_run(tmp_path)[0].submission(), ())
    monkeypatch.setattr(type(follower._submission), "finished_summary", lambda submission: {"steps": 8})
    result = follower.finished()
    assert result is not None
    assert capsys.readouterr().err == f"run loop is finished already; its summary is in {tmp_path / 'run'}\n"


def test_a_crash_loop_and_a_mistake_of_the_users_name_the_batch_by_the_manifest_of_its_step(tmp_path, monkeypatch):
    trainer, version = grown_run(tmp_path)
    data: Any = trainer.task.data
    result_of = follow.Follower(trainer.submission(), ()).result
    order = order_of(replace(data, later=(Later(*asdict(version).values()),)).open(), 0, 6)
    corpus = json.dumps([asdict(version)])
    for step, of in ((4, str(data)), (6, f"{version.uri} (which holds from step 5 on)")):
        facts = {"step": str(step), "corpus": corpus}
        with pytest.raises(CrashLoop) as caught:
            result_of({"error": "CrashLoop", "message": "3 times", "facts": facts})
        ids = order.sample_ids(step)
        named = ", ".join(map(str, ids))
        assert caught.value.facts == {"step": str(step), "samples": ids}
        assert caught.value.message == f"3 times\nThe batch of that step is sequences {named} of {of}"
    assert max(ids) >= data.open().num_sequences, "else the first manifest would name them as well"
    mistake = {"error": "UserCodeFailed", "message": "Traceback", "facts": {"step": "6", "corpus": corpus}}
    with pytest.raises(UserCodeFailed, match=f"^Traceback\nThe batch of that step is sequences {named} of "):
        result_of(mistake)
    Path(version.uri).unlink()
    loop = {"error": "CrashLoop", "message": "3 times"}
    with pytest.raises(CrashLoop, match=r"The batch of that step cannot be named: .*manifest\.json: cannot be read"):
        result_of({**loop, "facts": {"step": "6", "corpus": corpus}})

    def away(task: Any) -> Any:
        raise StorageFailed("the store is away")

    monkeypatch.setattr(follow, "training_order", away)
    with pytest.raises(CrashLoop, match="The batch of that step cannot be named: the store is away"):
        result_of({**loop, "facts": {"step": "6", "corpus": corpus}})


def test_a_submission_whose_later_manifest_is_gone_is_refused_before_anything_starts(tmp_path):
    trainer, version = grown_run(tmp_path)
    begin = {"note": "begin", "lineage": 0, "corpus": [asdict(version)], "num_steps": 6}
    trainer.run_config.folder.mkdir()
    (trainer.run_config.folder / "journal.jsonl").write_bytes(journal_bytes([begin]))
    found = trainer.submission().find_resume()
    assert (found.corpus, found.num_steps) == ((version,), 6)
    Path(version.uri).unlink()
    with pytest.raises(ValueError, match=r"manifest\.json: cannot be read"):
        trainer.submission().find_resume()
    (trainer.run_config.folder / "journal.jsonl").write_text("?\n{}\n")
    assert "journal.jsonl is damaged: which sequences" in trainer.submission().find_resume().damaged["journal.jsonl"]


class Refusing:
    """What the dispatcher calls to start a worker, when the call itself raises."""

    def start_worker(self, *arguments: Any) -> None:
        raise ValueError("resources must not contain the key 'memory'")


def test_a_start_that_is_refused_at_the_call_is_told_with_its_reason():
    told: list[Any] = []
    run_spec = RunSpec(RunConfig("refused", run_dir="nowhere"), ScalingConfig(), None, "a", "", "")  # type: ignore[arg-type]
    cluster: Any = Refusing()
    dispatch = Dispatcher(run_spec, "", cluster, None, None, told.append)
    dispatch._start_on("w3", None)
    (lost,) = [happened.event for happened in told]
    assert (lost.worker, lost.reason) == ("w3", "start-failed")
    assert "must not contain the key 'memory'" in lost.detail
