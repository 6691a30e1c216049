"""Signals: the first clears the run, the next ends this command at once, and each says what is left; a lost head."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import ray
from ray.dashboard.modules.job.job_supervisor import JobSupervisor

from deploy.drills.local_cluster import using
from elastic_ring.config import RunConfig, Timeouts
from elastic_ring.runtime.driver import access, ray_session, session
from elastic_ring.runtime.driver.access import is_listening
from elastic_ring.runtime.driver.ray_session import OUTLAST_S, outlast_head
from elastic_ring.runtime.driver.session import interruptible
from elastic_ring.runtime.ray_head import RECONNECT, is_kept, reconnect_s, warn_if_shorter
from tests.signals import heeding_hangups

ROOT = Path(__file__).parents[3]
LEAVES = """
import sys, threading
from elastic_ring.runtime.driver.ray_session import leaving
from tests.signals import heeding_hangups
try:
    with leaving():
        print("leaves", flush=True)
        threading.Event().wait(60.0)
except KeyboardInterrupt as stopped:
    print(stopped)
"""


def interrupted(run: RunConfig, number: signal.Signals = signal.SIGTERM) -> str:
    try:
        with interruptible(run, "attempt"):
            os.kill(os.getpid(), number)
            signal.pause()
    except KeyboardInterrupt as stopped:
        return str(stopped)
    raise AssertionError("the signal was swallowed")


def test_a_second_interrupt_ends_at_once_and_says_that_the_run_is_still_being_cleared(tmp_path, monkeypatch):
    def again(*_: object, saves: bool) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(session, "_stopped", again)
    told = interrupted(RunConfig("twice", run_dir=str(tmp_path)))
    assert told.startswith("stopped at once; the coordinator goes on clearing the run by itself")


def test_a_hangup_lets_a_run_save_unless_this_process_was_started_to_ignore_it(tmp_path, monkeypatch):
    monkeypatch.setattr(session, "_stopped", lambda *_, saves: f"saves: {saves}")
    run = RunConfig("hangup", run_dir=str(tmp_path))
    with heeding_hangups():
        numbers = (signal.SIGHUP, signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
        messages = [interrupted(run, number) for number in numbers]
    assert messages == ["saves: True", "saves: True", "saves: True", "saves: False"]
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interruptible(run, "attempt"), ray_session.leaving():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_ctrl_c_counts_in_a_process_that_a_script_started_in_the_background(tmp_path, monkeypatch):
    monkeypatch.setattr(session, "_stopped", lambda *_, saves: f"saves: {saves}")
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert interrupted(RunConfig("background", run_dir=str(tmp_path)), signal.SIGINT) == "saves: False"
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_handler_of_the_users_for_sigusr1_stays(tmp_path):
    handler = lambda number, frame: None  # noqa: E731
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with interruptible(RunConfig("handler", run_dir=str(tmp_path)), "attempt"):
            assert signal.getsignal(signal.SIGUSR1) is handler
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_process_that_has_left_ray_starts_no_other_one_to_clear_its_run(tmp_path, monkeypatch):
    monkeypatch.setattr(ray, "init", lambda *_, **__: pytest.fail("Ray is started"))
    run = RunConfig("left", run_dir=str(tmp_path))
    assert "no coordinator" in session._cleared(run, "attempt", [object()], threading.Event(), saves=True)
    assert session.end_run(run, "it has lost its driver") == ""


def test_the_time_for_the_last_checkpoint_is_less_than_ray_and_a_pod_give_a_driver():
    of_pods = [
        int(line.split()[1])
        for path in (ROOT / "deploy").rglob("*.yaml")
        for line in path.read_text().splitlines()
        if "terminationGracePeriodSeconds:" in line
    ]
    assert Timeouts().stop_save_s < min(JobSupervisor.DEFAULT_RAY_JOB_STOP_WAIT_TIME_S, *of_pods)


def test_where_the_head_is_gone_nothing_waits_for_it(tmp_path, monkeypatch):
    monkeypatch.setattr(session, "head_is_gone", lambda: True)
    assert "the head of the Ray cluster is gone" in interrupted(RunConfig("gone", run_dir=str(tmp_path)))


def test_a_wrong_token_is_a_wrong_setting_not_a_busy_host(tmp_path, monkeypatch):
    """Ray reads it before it starts anything."""
    (tmp_path / "empty").touch()
    for name in ("empty", "none"):
        wrong = {access.MODE: "token", access.TOKEN: "", access.TOKEN_FILE: str(tmp_path / name)}
        told = rf"no token.*{name}.*set RAY_AUTH_TOKEN_PATH to a file that has one"
        with using(wrong), pytest.raises(ValueError, match=told):
            ray_session._start_local(1)
    assert not ray.is_initialized()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_while_ray_is_being_left_a_signal_ends_the_wait_and_leaves_python_alive(number):
    """A notebook's kernel outlives a second Ctrl-C."""
    with subprocess.Popen([sys.executable, "-c", LEAVES], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"leaves\n"
        process.send_signal(number)
        assert process.stdout.read().startswith(f"stopped while Ray was left (signal {int(number)})".encode())
        assert process.wait(timeout=30.0) == 0


def test_a_ray_of_which_a_part_is_gone_is_left_within_a_bound_and_with_a_word(monkeypatch, caplog):
    over = threading.Event()
    monkeypatch.setattr(ray, "shutdown", lambda: over.wait(60.0))
    monkeypatch.setattr(ray_session, "LEAVE_S", 0.1)
    ray_session.leave_ray()
    assert "Ray has not let this command go within 0.1 s" in caplog.text
    over.set()


@pytest.mark.parametrize("name", ["gcs_server", "raylet"])
def test_the_end_of_a_part_of_the_ray_that_this_process_has_started_is_noticed(tmp_path, name):
    assert access.ended_part(access.own_parts()) == ""
    shutil.copy("/bin/sleep", tmp_path / name)
    with subprocess.Popen([tmp_path / name, "60"]) as started:
        parts = access.own_parts()
        assert {part: process.pid for part, process in parts.items()} == {name: started.pid}
        assert access.ended_part(parts) == ""
        started.kill()
        os.waitid(os.P_PID, started.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie, as a child of Ray's
        assert access.ended_part(parts) == name


# ---------------------------------------------------------------------------------- a head of the cluster that is lost


def test_ray_keeps_a_driver_for_longer_than_it_waits_itself_unless_the_user_says_otherwise(monkeypatch):
    for lease_s, expected_s in ((300.0, 300 + OUTLAST_S), (5.0, 60 + OUTLAST_S)):
        monkeypatch.setenv(RECONNECT, "")
        monkeypatch.delenv(RECONNECT)
        outlast_head(lease_s)
        assert reconnect_s(os.environ) == expected_s
    monkeypatch.setenv(RECONNECT, "40")
    outlast_head(300.0)
    assert reconnect_s(os.environ) == 40


def test_a_process_that_ray_ends_before_the_lease_is_over_is_told_with_the_way_out(caplog):
    assert warn_if_shorter("this driver", 60.0, 60.0) == ""
    told = warn_if_shorter("all processes of node ab", 60.0, 299.5)
    assert "may be away for 60 s only, not for timeouts.lease_s=299.5" in told
    assert f"ends all processes of node ab. Set {RECONNECT}=300 or more" in told
    assert caplog.messages == [told]


def test_a_wrong_value_names_its_variable():
    assert reconnect_s({}) == 60
    with pytest.raises(ValueError, match=f"{RECONNECT}='soon'"):
        reconnect_s({RECONNECT: "soon"})


def test_a_head_with_rocksdb_or_redis_keeps_its_state():
    assert is_kept({"RAY_gcs_storage": "rocksdb"})
    assert is_kept({"RAY_REDIS_ADDRESS": "10.0.0.1:6379"})
    assert not is_kept({})
    assert not is_kept({"RAY_gcs_storage": "memory", "RAY_REDIS_ADDRESS": ""})


def test_a_head_counts_as_away_when_nobody_listens_at_its_address():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert is_listening(address)
    assert not is_listening(address)
