"""Signals: a run that is ended by one, what it saves first, where it goes on; a member that one stops for a moment."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from elastic_ring import CheckpointConfig, ElasticRingTrainer
from elastic_ring.config import Timeouts
from elastic_ring.runtime.driver.cluster import left_behind
from tests.ray.conftest import ALONE, fault_free, num_steps, tiny_trainer, wait_for
from tests.signals import heeding_hangups


def trainer_of(folder: Path, name: str, stop_save_s: float, **options: Any) -> ElasticRingTrainer:
    """Of a run that is slow until there is a file `gate`. No checkpoint is due before its end."""
    settings = {"checkpoint_config": CheckpointConfig(every_steps=4000), "timeouts": Timeouts(stop_save_s=stop_save_s)}
    return tiny_trainer(folder, name, gate=folder / "gate", run=settings, **{"gate_s": 0.04, **options}, **ALONE)


def stopped_by(number: signal.Signals, folder: Path, name: str, stop_save_s: float, **options: Any) -> tuple[str, int]:
    """What the driver says of a run that gets this signal after three steps; how many steps were on record then."""
    trainer = trainer_of(folder, name, stop_save_s, **options)
    counts: list[int] = []

    def send() -> None:
        wait_for(lambda: num_steps(folder / name) >= 3)
        counts.append(num_steps(folder / name))
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=send)
    thread.start()
    with heeding_hangups(), pytest.raises(KeyboardInterrupt) as stopped:
        trainer.fit()
    thread.join()
    assert left_behind(name) == []
    return str(stopped.value), counts[0]


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.slow)])
def test_a_run_that_gets_a_stop_signal_saves_its_steps_and_the_next_submission_goes_on_from_them(
    local_ray, undisturbed, tmp_path, number
):
    reference = fault_free(undisturbed, tmp_path, dp=1, cp=1)
    message, num_steps = stopped_by(number, tmp_path, "saved", stop_save_s=30.0)
    match = re.fullmatch(r"stopped, with a checkpoint of step (\d+); nothing is left running", message)
    assert match is not None, message
    step = int(match[1])
    assert num_steps <= step < 12
    (commit,) = (tmp_path / "saved").glob("checkpoints/*/*/COMMIT.json")
    assert commit.parent.parent.name == f"step-{step:08d}"
    (tmp_path / "gate").touch()
    summary = trainer_of(tmp_path, "saved", 30.0).fit().summary
    assert [one["step"] for one in summary["resumed_from"]] == [step]
    assert (summary["losses"], summary["weights_sha256"]) == (reference["losses"], reference["weights_sha256"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "stop_save_s"), [(signal.SIGTERM, 0.01), pytest.param(signal.SIGINT, 30.0, marks=pytest.mark.soak)]
)
def test_ctrl_c_and_a_step_that_takes_longer_than_there_is_time_end_a_run_at_once(
    local_ray, tmp_path, number, stop_save_s
):
    message, _ = stopped_by(number, tmp_path, "at-once", stop_save_s)
    saved = ", without a new checkpoint (timeouts.stop_save_s=0.01)" if number == signal.SIGTERM else ""
    assert message == f"stopped{saved}; nothing is left running"
    assert not list((tmp_path / "at-once").glob("checkpoints/*/*/COMMIT.json"))


@pytest.mark.slow
def test_a_step_that_takes_longer_than_there_is_time_is_given_up_for_a_checkpoint_of_those_before(local_ray, tmp_path):
    message, num_steps = stopped_by(signal.SIGTERM, tmp_path, "given-up", 8.0, gate_s=4.0, steps=40)
    match = re.fullmatch(r"stopped, with a checkpoint of step (\d+); nothing is left running", message)
    assert match is not None, message
    assert num_steps <= int(match[1]) <= num_steps + 1


@pytest.mark.slow
def test_a_second_signal_waits_for_no_checkpoint(local_ray, tmp_path, caplog):
    caplog.set_level("INFO")
    gate = tmp_path / "gate"
    gate.touch()
    trainer = trainer_of(tmp_path, "twice", 30.0, steps=4000, gate_s=4.0)

    def send() -> None:
        wait_for(lambda: num_steps(tmp_path / "twice") >= 3)
        gate.unlink()  # the step under way does not end soon
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for(lambda: "stopping: after a checkpoint" in caplog.text)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=send)
    thread.start()
    with pytest.raises(KeyboardInterrupt, match="stopped at once; the coordinator goes on clearing"):
        trainer.fit()
    thread.join()
    begun = time.monotonic()
    wait_for(lambda: left_behind("twice") in ([], ["er:twice:coordinator"]))
    assert time.monotonic() - begun < 20.0, "sooner than stop_save_s"


@pytest.mark.slow
def test_the_last_holder_of_a_shard_that_is_stopped_for_a_moment_is_waited_for(local_ray, tmp_path):
    trainer = trainer_of(tmp_path, "pulse", 2.0, steps=60, gate_s=0.3)

    def pulse() -> None:
        wait_for(lambda: num_steps(tmp_path / "pulse") >= 3)
        time.sleep(2.0)  # by then the agent knows what its end costs
        (member,) = json.loads((tmp_path / "pulse" / "status.json").read_text())["members"]
        for _ in range(3):
            os.kill(member["pid"], signal.SIGSTOP)
            time.sleep(0.6)
            os.kill(member["pid"], signal.SIGCONT)
            time.sleep(0.4)
        (tmp_path / "gate").touch()

    thread = threading.Thread(target=pulse)
    thread.start()
    summary = trainer.fit().summary
    thread.join()
    assert (summary["steps"], summary["recoveries"]) == (60, [])
