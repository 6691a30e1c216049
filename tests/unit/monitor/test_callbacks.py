"""Callbacks are told each event once, in order, by one driver at a time, whatever ends that driver."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from elastic_ring.config import RunConfig
from elastic_ring.integrations.trackers import EarlyStopping, KeepBest
from elastic_ring.mesh import Mesh
from elastic_ring.monitor.callbacks import (
    CALLBACKS_NAME,
    Callback,
    CallbackDelivery,
    RunInfo,
    check_callbacks,
    kept_places,
)
from elastic_ring.monitor.journal import Journal
from elastic_ring.monitor.json_files import json_bytes, read_json
from elastic_ring.monitor.metrics import JOURNAL_NAME, METRICS_NAME, STATUS_NAME, StepMetrics, read_metrics, write_json
from elastic_ring.monitor.metrics_log import MetricsLog
from elastic_ring.runtime import run_storage
from elastic_ring.runtime.coordinator.run_spec import set_aside
from tests.journals import journal_bytes
from tests.object_store.store import ObjectStore

ROOT = Path(__file__).resolve().parents[3]


class Hears(Callback):
    """Notes what it is told; raises or ends its process where it is asked to."""

    def __init__(self, name: str = "hears", raises_at: int = -1, tries_again: bool = False) -> None:
        self._name, self.raises_at, self.tries_again = name, raises_at, tries_again
        self.heard: list[Any] = []

    @property
    def name(self) -> str:
        return self._name

    def on_start(self, run: RunInfo) -> None:
        self.heard.append(("start", run.name))

    def on_step(self, metrics: StepMetrics) -> None:
        if metrics.step == self.raises_at:
            raise OSError("the disk is full")
        self.heard.append(metrics.step)

    def on_validation(self, step: int, metrics: Mapping[str, float]) -> None:
        self.heard.append((step, dict(metrics)))

    def on_recovery(self, recovery: Mapping[str, Any]) -> None:
        self.heard.append(recovery["cause"])

    def on_checkpoint(self, checkpoint: Mapping[str, Any]) -> None:
        self.heard.append(("checkpoint", checkpoint["step"]))

    def on_end(self) -> None:
        self.heard.append("end")


def step(number: int) -> StepMetrics:
    return StepMetrics(number, 2.5, 1.0, 3e-4, 64, 640.0, 0.1, False, 1, Mesh(1, 1), 1)


class Records:
    """The records of a run, as its coordinator writes them."""

    def __init__(self, folder: Path) -> None:
        self.metrics = MetricsLog(folder).open()
        self.journal = Journal(folder / JOURNAL_NAME, durable=False).open()

    def steps(self, *numbers: int) -> None:
        for number in numbers:
            self.metrics.record(step(number))

    def recovery(self, cause: str) -> None:
        self.journal.append({"note": "recovery", "recovery": {"cause": cause}, "closes": True})


@pytest.fixture
def records(tmp_path: Path) -> Records:
    return Records(tmp_path)


def telling(folder: Path, *callbacks: Callback) -> CallbackDelivery:
    return CallbackDelivery(callbacks, RunInfo("first", folder))


def test_each_event_is_told_once_over_drivers_and_new_records(tmp_path: Path, records: Records) -> None:
    heard = []
    for numbers in ((0, 1), (2,), ()):
        callback = Hears()
        with telling(tmp_path, callback) as driver:
            driver.deliver()
            records.steps(*numbers)
            driver.deliver()
            driver.deliver()
        heard += callback.heard
    assert heard == [("start", "first"), 0, 1, "end", ("start", "first"), 2, "end", ("start", "first"), "end"]


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_without_locks_of_the_file_system_events_are_told_with_a_warning(
    tmp_path, records, monkeypatch, caplog, number
):
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    callback = Hears()
    with telling(tmp_path, callback) as driver:
        records.steps(0)
        driver.deliver()
    assert callback.heard == [("start", "first"), 0, "end"]
    assert [line.message for line in caplog.records] == [
        f"{tmp_path}: its file system has no locks (flock): a second driver repeats events"
    ]


def test_a_folder_that_is_moved_away_ends_no_driver_and_is_not_made_anew(tmp_path, caplog):
    folder, callback = tmp_path / "run", Hears()
    folder.mkdir()
    records = Records(folder)
    with telling(folder, callback) as driver:
        records.steps(0)
        driver.deliver()
        folder.rename(tmp_path / "away")
        records.steps(1)
        driver.deliver()
        driver.grant(2, {"stop": "", "saves": True, "keeps": False})
        assert not folder.exists()
        (tmp_path / "away").rename(folder)
        driver.deliver()
    assert callback.heard == [("start", "first"), 0, 1, "end"]
    assert [line.levelname for line in caplog.records] == ["WARNING"]
    assert read_json(folder / CALLBACKS_NAME)["delivered"]["hears"]["step"] == 1


def test_what_comes_between_the_last_look_and_the_end_is_told_too(tmp_path: Path, records: Records) -> None:
    callback = Hears()
    with telling(tmp_path, callback) as driver:
        driver.deliver()
        records.steps(0)
    assert callback.heard == [("start", "first"), 0, "end"]


def test_a_validation_waits_for_its_step_and_what_is_not_finite_is_nan(tmp_path: Path, records: Records) -> None:
    callback = Hears()
    with telling(tmp_path, callback) as driver:
        records.metrics.validated(0, {"val_loss": float("nan")})
        driver.deliver()
        assert callback.heard == [("start", "first")]
        records.steps(0, 1)
        records.metrics.validated(1, {"val_loss": 2.25, "val_accuracy": 0.5})
        driver.deliver()
    assert callback.heard[1] == 0
    assert callback.heard[2][0] == 0
    assert callback.heard[2][1]["val_loss"] != callback.heard[2][1]["val_loss"]
    assert callback.heard[3:] == [1, (1, {"val_loss": 2.25, "val_accuracy": 0.5}), "end"]


def test_recoveries_and_checkpoints_are_told_from_the_journal(tmp_path: Path, records: Records) -> None:
    first, second = Hears(), Hears()
    with telling(tmp_path, first) as driver:
        records.recovery("rank 3 died")
        records.journal.append({"note": "checkpoint", "checkpoint": {"step": 4}})
        driver.deliver()
    with telling(tmp_path, second) as driver:
        records.recovery("rank 3 died")  # once more, in the same words
        driver.deliver()
    assert first.heard == [("start", "first"), "rank 3 died", ("checkpoint", 4), "end"]
    assert second.heard == [("start", "first"), "rank 3 died", "end"]


def test_a_line_that_its_writer_has_not_finished_is_told_once_it_has(tmp_path: Path, records: Records) -> None:
    callback, line = Hears(), journal_bytes([step(0).to_json()])
    with telling(tmp_path, callback) as driver, (tmp_path / METRICS_NAME).open("ab", buffering=0) as file:
        file.write(line[:40])
        driver.deliver()
        assert callback.heard == [("start", "first")]
        file.write(line[40:])
        driver.deliver()
        assert callback.heard == [("start", "first"), 0]


def test_a_callback_that_raises_is_told_the_next_event_and_its_error_once(
    tmp_path: Path, records: Records, caplog: pytest.LogCaptureFixture
) -> None:
    class Breaks(Hears):
        def on_step(self, metrics: StepMetrics) -> None:
            if metrics.step in (1, 2):
                raise ZeroDivisionError("a mistake")
            super().on_step(metrics)

    callback = Breaks()
    records.steps(0, 1, 2, 3)
    with telling(tmp_path, callback) as driver:
        driver.deliver()
        records.steps(4)
        driver.deliver()
        assert callback.heard == [("start", "first"), 0, 3, 4]
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert said == [
        "callback hears: on_step raised; the next event follows",
        "callback hears: on_step raised ZeroDivisionError 2 times",
    ]
    after = Hears()
    with telling(tmp_path, after) as driver:
        driver.deliver()
    assert after.heard == [("start", "first"), "end"], "what raised counts as told"


@pytest.mark.parametrize(
    ("status", "raised", "end"),
    [
        (None, None, ""),
        ({"ended": False}, None, ""),
        ({"ended": False}, KeyboardInterrupt, "stopped"),
        ({"ended": True, "end": {"error": "", "message": ""}}, None, "finished"),
        ({"ended": True, "end": {"error": "RunFailed", "message": "stopped by the user"}}, None, "stopped"),
        ({"ended": True, "end": {"error": "LossSpike", "message": "step 3"}}, None, "failed"),
    ],
)
def test_a_callback_knows_how_the_run_ended(
    tmp_path: Path, records: Records, status: dict[str, Any] | None, raised: type[BaseException] | None, end: str
) -> None:
    callback = Hears()
    if status is not None:
        (tmp_path / STATUS_NAME).write_bytes(json_bytes(status))
    with pytest.raises(raised) if raised else nullcontext(), telling(tmp_path, callback) as driver:
        driver.deliver()
        if raised:
            raise raised
    assert (callback.heard[-1], callback.end) == ("end", end)


def test_a_callback_that_tries_again_is_called_again_later_and_disturbs_no_other(
    tmp_path: Path, records: Records, caplog: pytest.LogCaptureFixture
) -> None:
    broken, whole, now = Hears("broken", raises_at=1, tries_again=True), Hears("whole"), [0.0]
    records.steps(0, 1, 2)
    with CallbackDelivery([broken, whole], RunInfo("first", tmp_path), clock=lambda: now[0]) as driver:
        pauses = []
        for _ in range(9):
            driver.deliver()
            driver.deliver()  # too early: not called
            pauses.append(driver._listeners[0].retry_at - now[0])
            now[0] += pauses[-1]
        assert pauses == [5, 10, 20, 40, 80, 160, 300, 300, 300]
        assert broken.heard == [("start", "first"), 0]
        assert whole.heard == [("start", "first"), 0, 1, 2]
        broken.raises_at = -1
        driver.deliver()
        assert broken.heard == [("start", "first"), 0, 1, 2]
    said = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(said) == 9
    assert "callback broken: on_step raised; it is called again in 5 s" in said[0].getMessage()
    assert [record.exc_info is not None for record in said] == [True, *[False] * 8], "one traceback"
    assert said[1].getMessage() == (
        "callback broken: on_step raised OSError: the disk is full; it is called again in 10 s"
    )


@pytest.mark.parametrize("wrong", [{"lr": "fast"}, {"mesh": {"dp": 0, "cp": 1}}, {"loss_hex": "2.5.1"}])
def test_a_line_that_is_no_steps_stops_no_callback(
    tmp_path: Path, records: Records, caplog: pytest.LogCaptureFixture, wrong: dict[str, Any]
) -> None:
    callback = Hears(tries_again=True)
    records.steps(0)
    records.metrics._journal.append({**step(1).to_json(), **wrong})
    records.steps(2)
    with telling(tmp_path, callback) as driver:
        driver.deliver()
    assert callback.heard == [("start", "first"), 0, 2, "end"]
    assert "the line of step 1 is no record of a run" in caplog.text


def test_what_a_broken_callback_was_not_told_is_told_by_the_next_driver(
    tmp_path: Path, records: Records, caplog: pytest.LogCaptureFixture
) -> None:
    records.steps(0, 1, 2)
    with telling(tmp_path, Hears("broken", raises_at=1, tries_again=True)) as driver:
        driver.deliver()
    assert "callback broken has not received every event: submit the run again" in caplog.text
    mended = Hears("broken")
    with telling(tmp_path, mended) as driver:
        driver.deliver()
    assert mended.heard == [("start", "first"), 1, 2, "end"]


class Unreachable(Hears):
    """Cannot open what it writes to at first."""

    is_down = True

    def on_start(self, run: RunInfo) -> None:
        if self.is_down:
            raise ConnectionError("refused")
        super().on_start(run)


def test_a_callback_that_cannot_start_starts_later(tmp_path: Path, records: Records) -> None:
    callback = Unreachable()
    records.steps(0)
    with telling(tmp_path, callback) as driver:
        driver.deliver()
        callback.is_down = False
    assert callback.heard == [("start", "first"), 0, "end"], "it is tried once more at the end"
    never = Unreachable("never")
    with telling(tmp_path, never) as driver:
        driver.deliver()
    assert never.heard == [], "what has not started is not ended"


def test_all_drivers_of_an_attempt_tell_one_id_and_a_new_attempt_has_another(tmp_path: Path, records: Records) -> None:
    ids = []

    class Asks(Callback):
        def on_start(self, run: RunInfo) -> None:
            ids.append(run.id)

    for anew in (False, False, True):
        if anew:
            set_aside(tmp_path, keep_metrics=False)
        with telling(tmp_path, Asks()) as driver:
            driver.deliver()
    assert ids[0] == ids[1] != ids[2]
    assert all(ids)


def test_of_two_drivers_one_tells_and_the_other_takes_over(tmp_path: Path, records: Records) -> None:
    one, other = Hears(), Hears()
    records.steps(0)
    with telling(tmp_path, other) as waits:
        with telling(tmp_path, one) as first:
            first.deliver()
            waits.deliver()
            assert other.heard == []
        records.steps(1)
        waits.deliver()
    assert one.heard == [("start", "first"), 0, "end"]
    assert other.heard == [("start", "first"), 1, "end"]


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.unit.monitor.test_callbacks import Hears, telling
class Dies(Hears):
    def on_step(self, metrics):
        with open(sys.argv[2], "a") as file:
            file.write(f"{metrics.step}\\n")
        if metrics.step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
with telling(Path(sys.argv[1]), Dies()) as driver:
    driver.deliver()
"""


def test_a_driver_that_is_killed_in_a_method_leaves_that_one_event_to_be_told_again(
    tmp_path: Path, records: Records
) -> None:
    records.steps(0, 1, 2, 3)
    heard = tmp_path / "heard"
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path), str(heard)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL
    assert heard.read_text().split() == ["0", "1", "2"]
    after = Hears()
    with telling(tmp_path, after) as driver:
        driver.deliver()
    assert after.heard == [("start", "first"), 2, 3, "end"]


def test_a_new_attempt_in_the_folder_is_told_from_its_beginning(tmp_path: Path, records: Records) -> None:
    records.steps(0, 1)
    with telling(tmp_path, Hears()) as driver:
        driver.deliver()
    set_aside(tmp_path, keep_metrics=False)
    Records(tmp_path).steps(0)
    callback = Hears()
    with telling(tmp_path, callback) as driver:
        driver.deliver()
    assert callback.heard == [("start", "first"), 0, "end"]


def test_an_attempt_that_goes_on_from_a_checkpoint_is_told_what_is_new(tmp_path: Path, records: Records) -> None:
    records.steps(0, 1)
    records.recovery("rank 3 died")
    records.metrics.close()
    before, ids = Hears(), []
    with telling(tmp_path, before) as driver:
        driver.deliver()
        ids.append(driver._record["id"])
    set_aside(tmp_path, keep_metrics=True)
    again = Records(tmp_path)
    again.metrics.go_back(1, (2, 1))
    again.steps(1, 2)
    again.recovery("rank 0 died")
    after = Hears()
    with telling(tmp_path, after) as driver:
        driver.deliver()
        ids.append(driver._record["id"])
    assert before.heard == [("start", "first"), 0, 1, "rank 3 died", "end"]
    assert after.heard == [("start", "first"), 2, "rank 0 died", "end"]
    assert ids[0] == ids[1]


def test_a_record_of_what_was_told_that_is_damaged_or_of_another_run_is_set_aside_and_all_is_told_again(
    tmp_path: Path, records: Records, caplog: pytest.LogCaptureFixture
) -> None:
    records.steps(0)
    others = '{"id": "a", "delivered": {"hears": {"step": 9}}, "run": "other"}'
    for number, damaged in enumerate(("{", "{}", "[]", others), 1):
        (tmp_path / CALLBACKS_NAME).write_text(damaged)
        hears = Hears()
        with telling(tmp_path, hears) as driver:
            driver.deliver()
        assert hears.heard == [("start", "first"), 0, "end"]
        assert (tmp_path / f"{CALLBACKS_NAME}.damaged-{number}").read_text() == damaged
    assert "it is set aside as callbacks.json.damaged-4, and the callbacks receive everything again" in caplog.text


def test_what_is_no_callback_and_two_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match=r"is no elastic_ring\.Callback"):
        check_callbacks([Hears])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="two are called 'one'"):
        check_callbacks([Hears("one"), Hears("one")])


@pytest.mark.slow
def test_in_an_object_store_a_driver_on_another_host_goes_on_where_the_first_one_ended(
    object_store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    object_store.enter(monkeypatch)
    run, heard = RunConfig("told", run_dir=f"s3://{object_store.new_bucket()}/told"), []
    for host, steps in (("a", (0, 1, 2)), ("b", (0, 1, 2, 3)), ("a", (0, 1, 2, 3, 4))):
        folder = tmp_path / f"{host}-{len(steps)}" if host == "b" else tmp_path / "a"
        folder.mkdir(exist_ok=True)
        (folder / METRICS_NAME).unlink(missing_ok=True)
        Records(folder).steps(*steps)
        hears = Hears()
        with CallbackDelivery(
            (hears,),
            RunInfo("told", folder, {}),
            bring=partial(run_storage.fetch_places, run, folder),
            keep=partial(run_storage.keep_places, run, folder),
        ) as telling:
            telling.deliver()
        heard.append([event for event in hears.heard if isinstance(event, int)])
    assert heard == [[0, 1, 2], [3], [4]]
    run_storage.forget_end(run, goes_on=True, was_finished=False)
    run_storage.fetch_places(run, tmp_path)
    assert json.loads((tmp_path / CALLBACKS_NAME).read_text())["delivered"]["hears"]["step"] == 4
    run_storage.forget_end(run, goes_on=False, was_finished=False)
    run_storage.fetch_places(run, tmp_path)
    assert not (tmp_path / CALLBACKS_NAME).exists()


# ------------------------------------------------------------ control


class Controls(Callback):
    """Wants a checkpoint at the first validation and the end at the second, which it counts in its state."""

    controls = True

    def on_validation(self, step: int, metrics: Mapping[str, float]) -> None:
        self.state["seen"] = self.state.get("seen", 0) + 1
        self.control.checkpoint(keep=True)
        if self.state["seen"] == 2:
            self.control.stop("seen enough")


def validated(records: Records, *numbers: int, loss: float = 2.0) -> None:
    for number in numbers:
        records.steps(number)
        records.metrics.validated(number, {"val_loss": loss})


def test_what_a_callback_wants_is_known_once_it_is_told_and_outlives_its_driver(tmp_path: Path) -> None:
    records, run = Records(tmp_path), RunInfo("run", tmp_path)
    validated(records, 1)
    with CallbackDelivery([Controls(), Hears()], run) as telling:
        assert telling.requests(2) is None
        telling.deliver()
        assert telling.requests(2) == {"stop": "", "saves": True, "keeps": True}
        assert telling.requests(4) is None
        telling.grant(2, {"stop": "", "saves": True, "keeps": True})
        assert telling.requests(2) == {"stop": "", "saves": True, "keeps": True}, "the same for members that ask again"
        validated(records, 3)
        telling.deliver()
    with CallbackDelivery([Controls(), Hears()], run) as telling:
        telling.deliver()
        assert telling.requests(4) == {"stop": "Controls: seen enough", "saves": True, "keeps": True}
        telling.grant(4, {"stop": "Controls: seen enough", "saves": False, "keeps": False})
    for was_finished, stop in ((False, "Controls: seen enough"), (True, "")):
        record = read_json(tmp_path / CALLBACKS_NAME)
        assert record is not None
        write_json(tmp_path / CALLBACKS_NAME, kept_places(record, was_finished=was_finished))
        with CallbackDelivery([Controls()], run) as telling:  # the next attempt, or a longer run
            telling.deliver()
            again = telling.requests(4)
            assert again is not None
            assert again["stop"] == stop
            assert telling.requests(2) == {"stop": "", "saves": False, "keeps": False}


class Odd(Callback):
    def on_validation(self, step: int, metrics: Mapping[str, float]) -> None:
        self.state["seen"] = 1 if step == 1 else {1, 2}


def test_what_was_to_be_kept_and_had_no_answer_is_forgotten_and_no_state_that_is_no_json_stays(tmp_path: Path) -> None:
    records, keeps, odd = Records(tmp_path), KeepBest(), Odd()
    with CallbackDelivery([keeps, odd], RunInfo("run", tmp_path)) as telling:
        validated(records, 1, loss=2.0)
        telling.deliver()
        assert odd.state == {"seen": 1}
        validated(records, 3, loss=5.0)
        telling.deliver()
        assert telling.requests(4) == {"stop": "", "saves": False, "keeps": False}
        assert odd.state == {"seen": 1}, "a set is no JSON"


def test_control_is_refused_where_training_would_not_wait(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"val_every_steps=0: the callback Controls controls"):
        check_callbacks([Controls()], validates=False)
    hears = Hears()
    Records(tmp_path)
    with CallbackDelivery([hears], RunInfo("run", tmp_path)) as telling:
        telling.deliver()
        with pytest.raises(ValueError, match="set controls = True"):
            hears.control.stop("now")
        assert telling.requests(2) is None, "it has nobody who could want something"


def test_early_stopping_and_the_best_checkpoint_follow_the_least_loss(tmp_path: Path) -> None:
    records, requests = Records(tmp_path), []
    with CallbackDelivery([EarlyStopping(patience=2, min_delta=0.05), KeepBest()], RunInfo("run", tmp_path)) as telling:
        for index, loss in enumerate((3.0, 2.5, 2.48, 2.6)):
            validated(records, index, loss=loss)
            telling.deliver()
            requests.append(telling.requests(index + 1))
            telling.grant(index + 1, requests[-1] or {})
    assert [one["keeps"] for one in requests if one] == [True, True, True, False]
    assert [bool(one["stop"]) for one in requests if one] == [False, False, False, True]
    assert requests[-1] is not None
    assert "val_loss has not improved in 2 validations; its best was 2.5000 after step 1" in requests[-1]["stop"]
    with pytest.raises(ValueError, match="patience=0"):
        EarlyStopping(patience=0)
    check_callbacks([EarlyStopping("val_accuracy"), KeepBest()], metrics=["val_loss", "val_accuracy"])
    with pytest.raises(ValueError, match=r"metric='val_accuracy': the validation has val_loss"):
        check_callbacks([EarlyStopping("val_accuracy")])


# ------------------------------------------------------------ a run that goes back


class HearsBack(Hears):
    def on_back(self, step: int, validations: Mapping[int, Mapping[str, float]]) -> None:
        self.heard.append(("back", step, [*validations]))


def losses(records: Records, **by_step: float) -> None:
    """Steps `_N` with these losses; after every second one a validation with the same loss."""
    for name, loss in by_step.items():
        number = int(name[1:])
        if number % 2:
            records.metrics.validated(number, {"val_loss": loss})
        records.metrics.record(replace(step(number), loss=loss))


def first_branch(folder: Path) -> Records:
    records = Records(folder)
    losses(records, _0=9.0, _1=4.0, _2=7.0, _3=3.0, _4=5.0, _5=1.0)
    return records


BEFORE = [("start", "first"), 0, 1, (1, {"val_loss": 4.0}), 2, 3, (3, {"val_loss": 3.0}), 4, 5, (5, {"val_loss": 1.0})]
BACK = [("back", 4, [1, 3]), 4, 5, (5, {"val_loss": 2.0}), 6]


@pytest.mark.parametrize("deliver", ["at once", "drivers", "late"])
def test_a_run_that_goes_back_is_told_from_the_step_that_differs_and_no_earlier(tmp_path: Path, deliver: str) -> None:
    """Steps 2 and 3 run again with the same result. A driver that ends in the middle is followed by another."""
    records, heard, callback = first_branch(tmp_path), [], HearsBack()
    with telling(tmp_path, callback) as driver:
        if deliver != "late":
            driver.deliver()
    heard += callback.heard
    records.metrics.go_back(2, (1, 2))
    for again in ({"_2": 7.0}, {"_3": 3.0}, {"_4": 5.5}, {"_5": 2.0}, {"_6": 4.5}):
        losses(records, **again)
        callback = HearsBack()
        if deliver == "drivers":
            with telling(tmp_path, callback) as driver:
                driver.deliver()
            heard += callback.heard[1:-1]
    if deliver == "drivers":
        assert heard == [*BEFORE, "end", *BACK]
        return
    with telling(tmp_path, callback) as driver:
        driver.deliver()
    assert heard == ([] if deliver == "late" else [*BEFORE, "end"])
    assert callback.heard == [*(BEFORE if deliver == "late" else BEFORE[:1]), *BACK, "end"]


@pytest.mark.parametrize("kept", [True, False])
def test_in_a_file_that_was_written_anew_the_branch_goes_on_from_the_numbers_of_the_steps(
    tmp_path: Path, kept: bool
) -> None:
    """A damaged metrics.jsonl is: its undamaged lines come again. Without the place, as an earlier release left it."""
    first_branch(tmp_path)
    with telling(tmp_path, HearsBack()) as driver:
        driver.deliver()
    if not kept:
        record = read_json(tmp_path / CALLBACKS_NAME)
        assert record is not None
        record["delivered"]["hears"] = {"step": 5, "validation": 5}
        write_json(tmp_path / CALLBACKS_NAME, record)
    (tmp_path / METRICS_NAME).unlink()
    records = Records(tmp_path)
    losses(records, _0=9.0, _1=4.0, _2=7.0, _3=3.0)
    records.metrics.go_back(4, (1, 2))
    losses(records, _4=5.5, _5=2.0, _6=4.5)
    callback = HearsBack()
    with telling(tmp_path, callback) as driver:
        driver.deliver()
    assert callback.heard == [("start", "first"), *BACK, "end"]


def test_early_stopping_and_the_best_checkpoint_forget_the_branch_that_does_not_count(tmp_path: Path) -> None:
    stopping, keeps = EarlyStopping(patience=2), KeepBest()
    records, run = first_branch(tmp_path), RunInfo("run", tmp_path)
    with CallbackDelivery([stopping, keeps], run) as telling:
        telling.deliver()
        assert stopping.state == keeps.state == {"best": 1.0, "step": 5, "waited": 0}
        granted = telling.requests(6)
        assert granted == {"stop": "", "saves": True, "keeps": True}
        telling.grant(6, granted)
        losses(records, _6=4.5, _7=8.0, _8=4.0, _9=8.0)
        telling.deliver()
        assert "has not improved" in (telling.requests(10) or {"stop": ""})["stop"]
        records.metrics.go_back(4, (1, 2))
        telling.deliver()
        assert telling.requests(6) is None, "the run is not there again"
        losses(records, _4=5.5)
        telling.deliver()
        assert stopping.state == {"best": 3.0, "step": 3, "waited": 0}
        assert keeps.state == {}, "retention has let the checkpoint of step 3 go for that of step 5, which is undone"
        assert telling.requests(6) is None
        losses(records, _5=3.5)
        telling.deliver()
        assert stopping.state == {"best": 3.0, "step": 3, "waited": 1}
        assert keeps.state == {"best": 3.5, "step": 5, "waited": 0}
        assert telling.requests(6) == {"stop": "", "saves": True, "keeps": True}, "the stop was of the other branch"
    assert read_metrics(tmp_path)[5]["val_loss"] == 3.5
