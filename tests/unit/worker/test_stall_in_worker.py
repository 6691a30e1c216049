"""A step that stops moving is given up, and one that is only slow is not.

In a real worker's threads over real gloo, whose operations may wait for ten minutes here, as NCCL's wait for ever.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elastic_ring.config import RunConfig, ScalingConfig, Timeouts
from elastic_ring.control.messages import Build, MemberFailed, Stop, from_json, to_json
from elastic_ring.mesh import Mesh
from elastic_ring.monitor.stamps import Phase
from elastic_ring.runtime.groups.transport import translated
from elastic_ring.runtime.worker.actor import Worker
from elastic_ring.runtime.worker.coordinator_client import CommandDetails, WorkerSpec
from elastic_ring.runtime.worker.stall_watchdog import StepProgress
from tests.unit.groups.processes import Membership, connect, leave, membership

MEMBERSHIP = (1, 3)
PAIR = Mesh(1, 2)
WAIT_S = 60.0

SHORT = Timeouts(
    stopped_s=0.01,
    heart_floor_s=0.02,
    heart_cap_s=0.1,
    heart_computing_s=0.2,
    park_s=0.2,
    report_s=0.3,
    hello_s=0.5,
    build_s=0.5,
    beat_s=0.05,
    node_silent_s=0.5,
    coordinator_silent_s=1.0,
    boundary_s=5.0,
    collective_s=0.8,
)


class Notices:
    """The coordinator's handle, as the worker uses it."""

    def __init__(self) -> None:
        self.heard: queue.Queue[Any] = queue.Queue()
        self.notify = SimpleNamespace(remote=lambda data, extra: self.heard.put(from_json(data)))


class Part:
    """A member whose groups are real and whose step is what a test gives it."""

    def __init__(self, me: Any, step: Any) -> None:
        self._me, self._step = me, step
        self.applied, self.writing, self.num_moves = 7, False, 0
        self.progress, self.in_mesh = StepProgress(), True
        self.lease = SimpleNamespace(device=torch.device("cpu"))
        self.records = SimpleNamespace(after=lambda step: [])
        self.parts = self

    @property
    def aborted(self) -> bool:
        return bool(self._me.connector.aborted)

    def moved(self) -> tuple[int, ...]:
        return (self.num_moves,)

    def abort(self, paused: threading.Event, timeout_s: float) -> bool:
        return bool(self._me.connector.abort_until(paused, timeout_s))

    def train(self) -> str:
        with translated(self._me.connector):
            self._step(self._me, self)
        return "finished"

    speaks = False

    def report(self, cause: str, term: int, generation: int, kind: str) -> Any:
        return Stop(cause, "reported", term, generation, kind)


def begin_step(me: Any, step: Any, folder: str) -> None:
    """A worker with its own control thread and heart, in the middle of a generation."""
    spec = WorkerSpec(
        "w",
        "n",
        "127.0.0.1",
        f"{folder}/stamps{me.rank}",
        None,
        ScalingConfig(),
        RunConfig(timeouts=SHORT),  # type: ignore[arg-type]
    )
    me.worker = Worker(spec)
    me.worker._client.coordinator = me.notices = Notices()
    me.worker._warm = me.part = Part(me, step)
    me.worker._stamps.open()
    me.worker._stamps.stamp(7, Phase.REDUCE)
    me.worker._seen = me.worker._built = MEMBERSHIP
    me.worker._training.start()
    me.worker._is_warm.set()
    threading.Thread(target=me.worker._beat, daemon=True).start()
    order = Build("c", "w", *MEMBERSHIP, PAIR, ("w", "v"), 7, None, (), False)
    me.worker._training.give(lambda: me.worker._train(order))


def wait_for_a_peer_that_never_answers(me: Any, part: Part) -> None:
    me.groups.world.recv([torch.zeros(4)], 1 - me.rank, 7).wait()


def wait_for_what_is_no_exchange(me: Any, part: Part) -> None:
    me.never = threading.Event()
    me.never.wait(WAIT_S * 10)


def step_slowly(me: Any, part: Part) -> None:
    """Three times the limit, with a sign of life now and then and nothing computed between."""
    for _ in range(10):
        time.sleep(SHORT.stall_s / 3)
        part.num_moves += 1


def read_nonsense_after_an_abort(me: Any, part: Part) -> None:
    """As a device's: the abort ends the wait, raises nothing, and leaves nonsense that the user's code trips over."""
    while not part.aborted:
        time.sleep(0.01)
    raise ValueError("the loss is not a number")


def heard(me: Any) -> Any:
    return me.notices.heard.get(timeout=WAIT_S)


def heard_nothing_more(me: Any) -> bool:
    return bool(me.notices.heard.empty())


def told_to_stop(me: Any) -> Any:
    me.worker.command(to_json(Stop("c", "w", MEMBERSHIP[0], MEMBERSHIP[1] + 1, "abort")), CommandDetails())
    return heard(me)


@pytest.fixture(scope="module")
def pair() -> Iterator[Membership]:
    with membership(2) as made:
        yield made


@pytest.fixture
def joined(pair: Membership) -> Iterator[Membership]:
    pair.all(connect, pair.meeting(), PAIR)
    yield pair
    pair.all(leave)


@pytest.mark.parametrize("step", [wait_for_a_peer_that_never_answers, read_nonsense_after_an_abort])
def test_a_step_that_waits_for_ever_is_given_up_and_reported_as_a_peer_error(
    joined: Membership, step: Any, tmp_path: Any
) -> None:
    joined.now(0, begin_step, step, str(tmp_path))
    failure = joined.now(0, heard)
    assert isinstance(failure, MemberFailed)
    assert (failure.kind, failure.step, failure.generation) == ("peer", 7, MEMBERSHIP[1])
    report = joined.now(0, told_to_stop)
    assert (report.worker, report.generation, report.mode) == ("reported", MEMBERSHIP[1] + 1, "aborted")


def test_a_thread_that_no_abort_reaches_is_told_of_by_the_control_thread(joined: Membership, tmp_path: Any) -> None:
    """What the coordinator hears then ends in a `Stop` that this worker cannot answer, and in its death."""
    joined.now(0, begin_step, wait_for_what_is_no_exchange, str(tmp_path))
    failure = joined.now(0, heard)
    assert (failure.kind, failure.step) == ("peer", 7)
    assert "stalled in reduce" in failure.detail
    joined.now(0, let_it_go)


def let_it_go(me: Any) -> None:
    me.never.set()


def test_a_step_that_is_slow_and_moves_runs_to_its_end(joined: Membership, tmp_path: Any) -> None:
    joined.now(0, begin_step, step_slowly, str(tmp_path))
    report = joined.now(0, heard)
    assert (report.worker, report.mode) == ("reported", "finished")
    assert joined.now(0, heard_nothing_more)
