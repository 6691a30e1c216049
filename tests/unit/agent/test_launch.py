"""Variables that may be secret: kept by a node's agent for this user alone, and there when a worker's Python starts."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from ray.runtime_env import RuntimeEnv

from elastic_ring.config import Timeouts
from elastic_ring.errors import PeerFailed, RunFailed
from elastic_ring.runtime.agent.agent import AgentSpec, NodeAgent
from elastic_ring.runtime.agent.stamp_dir import VARIABLES, hold, remove_stale
from elastic_ring.runtime.driver.cluster import AgentAnswers
from elastic_ring.runtime.worker.actor import check_arrived

SECRET = "hunter2 $(id) 'quoted'\nline"
AS_RAY_DOES = """
import sys
from ray._private.runtime_env.context import RuntimeEnvContext
from ray.core.generated.common_pb2 import Language
RuntimeEnvContext(py_executable=sys.argv[1]).exec_worker(sys.argv[2:], Language.PYTHON)
"""
WORKER = """
import json, os, sys
with open("/proc/self/cmdline") as file:
    print(json.dumps([os.environ["A.TOKEN"], os.environ["KEPT"], sys.flags.dont_write_bytecode, sys.argv[1:],
                      os.getpid(), file.read()]))
"""


def test_a_worker_starts_with_the_variables_that_its_agent_keeps_for_this_user_alone(tmp_path: Path) -> None:
    folder, script = tmp_path / "elastic_ring-run-11111111", tmp_path / "worker.py"
    script.write_text(WORKER)
    agent: Any = NodeAgent(AgentSpec("node", Timeouts()))
    for value in ("an earlier one", SECRET):
        command = agent.keep_variables(str(folder), {"A.TOKEN": value, "PYTHONDONTWRITEBYTECODE": "1"})
    assert RuntimeEnv(py_executable=command)["py_executable"] == command
    words = [sys.executable, "-c", AS_RAY_DOES, command, str(script), "--with=a blank"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env={**os.environ, "KEPT": "kept"}) as process:
        told = json.loads(process.communicate(timeout=60)[0])
    assert told[:5] == [SECRET, "kept", 1, ["--with=a blank"], process.pid]
    assert "hunter2" not in told[5] + command
    assert (folder.stat().st_mode & 0o777, (folder / VARIABLES).stat().st_mode & 0o777) == (0o700, 0o600)
    assert remove_stale(tmp_path) == [], "the agent holds it"
    os.close(agent._locks[folder])
    assert remove_stale(tmp_path) == [folder.name]


@pytest.mark.parametrize(("python", "flags"), [("", 0), (f"{shlex.quote(sys.executable)} -O", 1)])
def test_values_name_others_as_in_ray_s_env_vars_and_a_jobs_own_python_is_kept(
    tmp_path: Path, python: str, flags: int
) -> None:
    folder, script = tmp_path / "elastic_ring-run-11111111", tmp_path / "worker.py"
    script.write_text("import os, sys; print(os.environ['ONE'], os.environ['TWO'], sys.flags.optimize)")
    agent: Any = NodeAgent(AgentSpec("node", Timeouts()))
    command = agent.keep_variables(str(folder), {"ONE": "${KEPT}/a${NOT_SET}", "TWO": "$ONE:$5"}, python)
    words = [sys.executable, "-c", AS_RAY_DOES, command, str(script)]
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "KEPT": "kept"}, timeout=60)
    assert done.stdout.split() == ["kept/a", "kept/a:$5", str(flags)], done.stderr
    os.close(agent._locks[folder])


def test_an_agent_that_is_late_is_waited_for_once() -> None:
    answers, asked, hung = AgentAnswers(0.2), list[str](), Future[str]()

    def ask() -> Future[str]:
        asked.append("asked")
        return hung

    begun = time.monotonic()
    for _ in range(20):
        with pytest.raises(PeerFailed, match="the agent of node n does not answer"):
            answers.get("n", ask)
    assert time.monotonic() - begun < 20 * 0.2
    hung.set_result("python")
    assert answers.get("n", ask) == "python"
    assert asked == ["asked"]
    assert answers.get("n", ask) == "python"
    assert asked == ["asked"] * 2, "a new agent has nothing kept yet"


def test_a_worker_without_a_variable_that_was_asked_for_says_so() -> None:
    check_arrived({"A": "1"}, {"A": "", "B": ""})
    with pytest.raises(RunFailed, match=r"run\.env: B, C did not reach this worker.*nsight"):
        check_arrived({"C": "s", "B": "s", "A": "s"}, {"A": ""})


def test_a_folder_that_somebody_else_made_gets_no_secret(tmp_path: Path) -> None:
    folder = tmp_path / "elastic_ring-run-11111111"
    folder.mkdir(mode=0o755)
    with pytest.raises(ValueError, match="not a folder of this user alone"):
        hold(folder, 1.0)
