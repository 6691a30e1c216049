"""The job script against a real local head: submitted, submitted again, its driver killed, stopped."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import ProxyHandler, build_opener

import psutil
import pytest
import ray
from ray._private.services import resolve_ip_for_localhost

from elastic_ring.runtime.driver import access
from elastic_ring.runtime.driver.cluster import left_behind
from tests.ray.conftest import ROOT, join, num_steps, pids, status, wait_for
from tests.signals import heed_interrupts

GCS_PORT, DASHBOARD_PORT, AGENT_PORT = 7391, 9291, 9391


def cli(*words: str, timeout_s: float = 240.0, check: bool = True) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "RAY_ADDRESS": f"http://127.0.0.1:{DASHBOARD_PORT}",
        "PYTHONPATH": str(ROOT),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    command = [sys.executable, "-m", "ray.scripts.scripts", *words]
    done = subprocess.run(command, env=environment, cwd=ROOT, timeout=timeout_s, capture_output=True, text=True)
    assert not check or done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done


@pytest.fixture(scope="module")
def head() -> Iterator[None]:
    ray.shutdown()  # the other modules' Ray
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # where `python` is ours
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "PATH": path}
    ports = f"--port={GCS_PORT} --dashboard-port={DASHBOARD_PORT} --dashboard-agent-listen-port={AGENT_PORT}"
    words = f"-m ray.scripts.scripts start --head --num-cpus=4 --block {ports}".split()
    start = [sys.executable, *words]
    process = subprocess.Popen(start, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(
        lambda: "No cluster status" not in cli("job", "list", check=False).stdout,
        lambda: cli("job", "list", check=False).returncode == 0,
    )
    join(f"127.0.0.1:{GCS_PORT}")
    yield
    ray.shutdown()
    process.send_signal(signal.SIGTERM)
    process.wait(60)


def strangers() -> dict[str, str]:
    """The environment of somebody who has been told nothing about Ray."""
    return {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH_")}


def listening(root: psutil.Process, name: str) -> list[str]:
    """HOST:PORT where the children of this name listen, by this host's own address."""
    host = resolve_ip_for_localhost("127.0.0.1")
    found = [child for child in root.children(recursive=True) if child.name() == name]
    ports = {one.laddr.port for child in found for one in child.net_connections() if one.status == psutil.CONN_LISTEN}
    return [f"{host}:{port}" for port in sorted(ports)]


@pytest.mark.slow
def test_a_stranger_runs_no_code_and_submits_no_job(head, tmp_path):
    address = f"{resolve_ip_for_localhost('127.0.0.1')}:{GCS_PORT}"
    code = f"import ray; ray.init({address!r}, log_to_driver=False); print(ray.get(ray.remote(lambda: 4).remote()))"
    without = {**strangers(), "HOME": str(tmp_path)}
    drivers = [
        subprocess.Popen(
            [sys.executable, "-c", code], env=given, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for given in (without, {**without, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "b" * 64}, dict(os.environ))
    ]
    told = [(*driver.communicate(timeout=120), driver.returncode) for driver in drivers]
    assert [(out.strip(), code) for out, _, code in told] == [("", 1), ("", 1), ("4", 0)]
    assert all("InvalidAuthToken" in errors for _, errors, _ in told[:2])
    direct = build_opener(ProxyHandler({}))
    with pytest.raises(HTTPError, match=r"40[13]"):
        direct.open(f"http://127.0.0.1:{DASHBOARD_PORT}/api/jobs/", timeout=30)


def submit(name: str, folder: Path, *options: str, steps: int = 6, wait: bool = True) -> str:
    """Submit the job script; returns what it printed, or the submission id when nobody waits."""
    job_id = f"{name}-{time.monotonic_ns()}"
    words = ["job", "submit", "--submission-id", job_id, "--working-dir", str(ROOT)]
    words += [] if wait else ["--no-wait"]
    done = cli(*words, "--", "python", *job(name, folder / name, steps), *options, check=False)
    return f"exit {done.returncode}\n{done.stdout}{done.stderr}" if wait else job_id


def job(name: str, folder: Path, steps: int) -> list[str]:
    flags = f"--context 256 --steps {steps} --run-name {name} --faults none".split()
    return ["jobs/train_1t.py", *flags, "--run-dir", str(folder)]


def driver_of(name: str) -> psutil.Process:
    """The process of the job script with this run name."""
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "jobs/train_1t.py" in words and name in words and "submit" not in words:
            return process
    raise AssertionError(f"no driver of {name}")


@pytest.mark.slow
def test_a_job_whose_driver_was_killed_goes_on_when_submitted_again(head, tmp_path):
    submit("orphan", tmp_path, "--spares", "0", "--dp", "1", steps=60, wait=False)
    folder = tmp_path / "orphan"
    wait_for(lambda: num_steps(folder) >= 2)
    driver_of("orphan").send_signal(signal.SIGKILL)
    seen = num_steps(folder)
    again = submit("orphan", tmp_path, "--spares", "0", "--dp", "1", steps=60)
    assert again.startswith("exit 0"), again[-2000:]
    assert num_steps(folder) == 60
    assert seen < 60
    generations = json.loads((folder / "summary.json").read_text())["generations"]
    assert [(g["term"], g["generation"]) for g in generations] == [(1, 1)]
    assert not list(folder.glob("attempt-*"))
    assert left_behind("orphan") == []


@pytest.mark.soak
def test_stopping_a_job_leaves_nothing_behind(head, tmp_path):
    job_id = submit("stopped", tmp_path, steps=500, wait=False)
    folder = tmp_path / "stopped"
    wait_for(lambda: num_steps(folder) >= 2)
    members = pids(folder)
    cli("job", "stop", job_id)
    wait_for(lambda: not any(map(psutil.pid_exists, members)), lambda: left_behind("stopped") == [])
    assert num_steps(folder) < 500
    told = status(folder)
    assert (told["phase"], told["members"], told["error"]) == ("ended", [], "stopped by the user")


@pytest.mark.parametrize(
    "whole_group",
    [
        pytest.param(False, id="to the driver", marks=pytest.mark.slow),
        pytest.param(True, id="to its group, as a terminal does", marks=pytest.mark.soak),
    ],
)
def test_ctrl_c_on_an_embedded_run_ends_it_with_all_its_processes(tmp_path, whole_group):
    folder = tmp_path / "interrupted"
    command = [sys.executable, *job("interrupted", folder, 500), *["--dp", "1", "--cp", "2", "--spares", "0"]]
    home = tmp_path / "home"  # of a new user: no variable, no ~/.ray
    home.mkdir()
    environment = {**strangers(), "PYTHONPATH": str(ROOT), "RAY_ADDRESS": "local", "HOME": str(home)}
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed_interrupts,
        start_new_session=True,
    )
    wait_for(lambda: num_steps(folder) >= 2)
    members = pids(folder)
    assert all(map(psutil.pid_exists, members))
    token, (store,) = home / ".ray" / "auth_token", listening(psutil.Process(process.pid), "gcs_server")
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert [access.refusal(store, shown) is None for shown in ("", token.read_text())] == [False, True]
    if whole_group:
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said[-2000:]
    assert "nothing is left running" in said
    assert not any(map(psutil.pid_exists, members))


@pytest.mark.slow
@pytest.mark.parametrize("part", [pytest.param("gcs_server", marks=pytest.mark.soak), "raylet"])
def test_a_part_of_an_embedded_ray_that_is_killed_ends_the_command_in_a_line_and_not_after_a_minute(tmp_path, part):
    folder = tmp_path / "without"
    command = [sys.executable, *job("without", folder, 4000), *["--dp", "1", "--cp", "1", "--spares", "0"]]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_ADDRESS": "local"}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: num_steps(folder) >= 2)
    parts = {child.name(): child for child in psutil.Process(process.pid).children()}
    parts[part].kill()
    begun = time.monotonic()
    _, said = process.communicate(timeout=90)
    assert process.returncode == 1, said[-2000:]
    line = f"elastic-ring train: CoordinatorLost: the Ray that this command started has lost its {part}"
    assert said.strip().splitlines()[-1].startswith(line)
    assert time.monotonic() - begun < 40.0
