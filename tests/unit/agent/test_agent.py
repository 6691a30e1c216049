"""A node agent of a host with GPUs tells of a death when it begins, and again when its cause is known."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastic_ring.config import Timeouts
from elastic_ring.monitor.stamps import Phase, StampWriter
from elastic_ring.runtime.agent import agent as agent_module
from elastic_ring.runtime.agent.agent import AgentSpec, Link, NodeAgent
from elastic_ring.runtime.agent.messages import BadGpus, Death, FromAgent, Watch
from elastic_ring.runtime.gpu.leases import failure_record_path


class JsonConnection:
    """What the agent says, kept; nothing is ever said to it."""

    def __init__(self) -> None:
        self.said: list[FromAgent] = []
        self._ends = os.pipe()

    def fileno(self) -> int:
        return self._ends[0]

    def send(self, message: FromAgent) -> bool:
        self.said.append(message)
        return True

    def deaths(self) -> list[str]:
        return [message.how for message in self.said if isinstance(message, Death)]

    def close(self) -> None:
        for end in self._ends:
            os.close(end)


def linked(connection: Any) -> Link:
    """To a coordinator on another node."""
    return Link(connection, 0, is_here=False, echoed_at=0.0)


@pytest.fixture
def line() -> Iterator[JsonConnection]:
    made = JsonConnection()
    yield made
    made.close()


@pytest.mark.parametrize("forgotten", [False, True])
def test_a_death_is_told_when_it_begins_and_its_cause_follows(
    tmp_path: Path, line: JsonConnection, forgotten: bool
) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        stamps = StampWriter(tmp_path / "stamp").open()
        stamps.stamp(7, Phase.BACKWARD)
        agent: Any = NodeAgent(AgentSpec("node", Timeouts(), early=True))
        agent._exits.open()
        agent._link = linked(line)
        agent._watch_worker(Watch("w", process.pid, str(stamps.path), ""))
        agent._look()
        assert line.deaths() == []
        process.kill()
        while not line.deaths():
            agent._look()
        first = next(message for message in line.said if isinstance(message, Death))
        assert (first.step, first.phase) == (7, "backward")
        if forgotten:  # the coordinator is done with this worker; it still wants to know what happened
            agent._forget("w")
        while line.deaths()[-1] != "killed by SIGKILL":
            agent._look()
        # The kernel may be done before the first look: then the cause is the first news.
        assert line.deaths() in (["its process is ending", "killed by SIGKILL"], ["killed by SIGKILL"])
        assert not agent._watched
        stamps.close(unlink=False)


def test_without_gpus_a_death_is_told_once(tmp_path: Path, line: JsonConnection) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        agent: Any = NodeAgent(AgentSpec("node", Timeouts()))
        agent._exits.open()
        agent._link = linked(line)
        agent._watch_worker(Watch("w", process.pid, str(tmp_path / "no"), ""))
        process.kill()
        while not line.deaths():
            agent._look()
        agent._look()
        assert line.deaths() == ["killed by SIGKILL"]


def test_gpus_that_failed_twice_are_told_once_and_again_when_the_mark_is_gone(
    tmp_path: Path, line: JsonConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_module, "FOLDER", tmp_path)
    agent: Any = NodeAgent(AgentSpec("node", Timeouts(), early=True))
    agent._exits.open()
    agent._link = linked(line)
    agent._gpus.add("GPU-a")  # as the spec of a worker names it; GPU-b is no GPU of this run's
    agent._report_bad_gpus()
    for name in ("GPU-a", "GPU-b"):
        for pid in (1, 2):
            with failure_record_path(tmp_path, name).open("a") as mark:
                mark.write(json.dumps({"pid": pid, "started": 1, "unix_s": time.time(), "why": "dead"}) + "\n")
            agent._report_bad_gpus()
    agent._report_bad_gpus()
    failure_record_path(tmp_path, "GPU-a").unlink()
    agent._report_bad_gpus()
    assert [message.names for message in line.said if isinstance(message, BadGpus)] == [("GPU-a",), ()]


def test_an_agent_learns_its_nodes_gpus_from_the_workers_that_it_watches(tmp_path: Path, line: JsonConnection) -> None:
    agent: Any = NodeAgent(AgentSpec("node", Timeouts(), early=True))
    agent._exits.open()
    spec = Watch("w", os.getpid(), str(tmp_path / "stamp"), "")
    agent._watch_worker(replace(spec, gpus=("GPU-a",)))
    agent._watch_worker(replace(spec, worker="v"))
    assert agent._gpus == {"GPU-a"}
    agent._exits.unwatch("w"), agent._exits.unwatch("v")
