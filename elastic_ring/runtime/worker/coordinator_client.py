"""A worker's client of the coordinator: sends events, records of steps and reports of its start, and asks for planned
faults and for the decisions of the driver's callbacks. Nothing is decided here.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, TypedDict

import psutil

from elastic_ring.config import RunConfig, ScalingConfig
from elastic_ring.control.messages import (
    Answer,
    CallbacksAwaited,
    CauseIds,
    DrainRequested,
    WorkerStarting,
    to_json,
)
from elastic_ring.monitor.goodput import Stage, Stages
from elastic_ring.runtime.doctor.verdicts import HostReport
from elastic_ring.runtime.groups.transport import StoreAddress
from elastic_ring.runtime.notices import CheckpointLeftOut, CheckpointPart, Notice, StepRecord
from elastic_ring.runtime.worker.faults import Injector
from elastic_ring.runtime.worker.saver import CheckpointTerms
from elastic_ring.train.task import TrainingTask

LOOK_S = 0.05
ASK_AGAIN_S = 5.0
"""A coordinator that was killed may not have journalled the question."""
REPORTS_A_LIMIT = 10
CHANGES_S = 2.0
"""The shortest time between two extra reports of a worker's work."""

Extra = Mapping[str, float | str | list[StepRecord]]
"""Sent beside an event, and no part of a decision: figures of a build, or records of steps."""


@dataclass(frozen=True)
class WorkerSpec:
    """Constructor argument of `Worker`."""

    worker: str
    node: str
    address: str
    stamp_path: str
    task: TrainingTask
    scaling: ScalingConfig
    run: RunConfig


@dataclass(frozen=True)
class CommandDetails:
    """Sent beside a command, and no part of a decision. `published`: the last step whose record the coordinator has.
    A `Build` also has `store`, where its ranks meet, and `checkpoint`."""

    published: int = -1
    store: StoreAddress | None = None
    checkpoint: CheckpointTerms | None = None


class WorkerDescription(TypedDict):
    """Identity, paths and environment of a warm worker, with the stages of its start."""

    worker: str
    pid: int
    node: str
    stamp_path: str
    log_path: str
    fingerprint: str
    environment: dict[str, str | int | bool | None]
    gpus: list[str]
    stages: list[Stage]
    limits: HostReport


class CoordinatorClient:
    """Sends to the present coordinator. A generation may outlive the term that built it, so `term()` is called for each
    event. `coordinator` is the actor's handle, set when the worker starts."""

    def __init__(self, spec: WorkerSpec, term: Callable[[], int]) -> None:
        self._spec, self._term = spec, term
        self.coordinator: Any = None
        self._unanswered: Any = None
        self.cause = CauseIds(spec.worker)

    def answer(self, event: Any, extra: Extra | None = None) -> None:
        """Send an event, in the present term."""
        if hasattr(event, "term"):
            event = replace(event, term=self._term())
        self.coordinator.notify.remote(to_json(event), extra or {})

    def publish(self, records: Sequence[Notice]) -> None:
        """Send records of committed steps, and notices."""
        self.coordinator.publish.remote(records)

    def saved(self, part: CheckpointPart | CheckpointLeftOut) -> None:
        """Send that this rank's part of a checkpoint is written, or why it is not."""
        self.coordinator.saved.remote(part)

    def ask_callbacks(self, generation: int, step: int) -> None:
        """Ask for the decision of the driver's callbacks; all members wait for it after the validation of `step`
        steps."""
        self.answer(CallbacksAwaited(self.cause(), self._spec.worker, 0, generation, step))

    def is_there(self, timeout_s: float) -> bool:
        """Whether the coordinator answers in this time. An unanswered question waits on; it is not asked again."""
        import ray

        try:
            self._unanswered = self._unanswered or self.coordinator.identity.remote()
            if not ray.wait([self._unanswered], timeout=timeout_s)[0]:
                return False
            question, self._unanswered = self._unanswered, None
            ray.get(question, timeout=timeout_s)
        except ray.exceptions.RayError:  # it is dead, or Ray cannot reach it
            self._unanswered = None
            return False
        return True

    def injector(self) -> Injector:
        """Planned faults, each of which the coordinator grants once."""
        import ray

        timeout_s = self._spec.run.timeouts.hello_s

        def ask(index: int) -> bool:
            return bool(ray.get(self.coordinator.fault.remote(index, self._spec.worker), timeout=timeout_s))

        def notify(kind: str) -> None:
            if kind == "drain":
                self.answer(DrainRequested(self.cause(), self._spec.worker))

        return Injector(self._spec.run.faults, ask, notify)


class CallbackWait:
    """A member's wait, after a validation, for the decision of the driver's callbacks. The control thread calls
    `answers.put`, the training thread `wait`. `ask(generation, step)` sends the question."""

    def __init__(self, ask: Callable[[int, int], None]) -> None:
        self._ask = ask
        self.answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()

    def forget(self) -> None:
        """Drop answers to members of an earlier generation."""
        while not self.answers.empty():
            self.answers.get_nowait()

    def wait(self, generation: int, step: int, look: Callable[[], None], after_s: float = 0.0) -> Answer:
        """The answer for the validation after `step` steps; asks first `after_s` from now. `look` is called again and
        again, and raises to end the wait. The control core gives up waiting for callbacks, not this."""
        asked_at = time.monotonic() - ASK_AGAIN_S + after_s
        while True:
            if time.monotonic() - asked_at >= ASK_AGAIN_S:
                asked_at = time.monotonic()
                self._ask(generation, step)
            try:
                answer = self.answers.get(timeout=LOOK_S)
            except queue.Empty:
                look()
                continue
            if answer.step == step:
                return answer


class StartWork:
    """The present work of a starting worker: the warm-up thread writes it, the reports' thread reads it."""

    def __init__(self) -> None:
        self.stages = Stages("its process and imports")
        self.compiling = ""
        self.begin("first calls")

    def begin(self, stage: str) -> None:
        """With an empty text the worker is warm."""
        self.stage = stage
        self.stages.begin(stage)

    def __str__(self) -> str:
        return f"compiles {self.compiling}" if self.compiling else self.stage


@contextmanager
def start_reports(client: CoordinatorClient, worker: str, start_s: float, work: StartWork) -> Iterator[None]:
    """Report the work and the CPU time of a starting worker inside the context: progress earns it time.

    A thread sends the reports, several times within `start_s` and when the work changes.
    """
    over = threading.Event()

    def report() -> None:
        while True:
            begun, doing, compiles = time.monotonic(), str(work), bool(work.compiling)
            client.answer(WorkerStarting(client.cause(), worker, cpu_used_s(), doing, compiles))
            period_s = start_s / REPORTS_A_LIMIT
            while (left_s := begun + period_s - time.monotonic()) > 0 and (
                str(work) == doing or time.monotonic() < begun + CHANGES_S
            ):
                if over.wait(min(CHANGES_S, left_s)):
                    return
            if over.is_set():
                return

    thread = threading.Thread(target=report, name="start-reports", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def cpu_used_s() -> float:
    """CPU seconds of this process and its children: compilers are processes of their own."""
    ended = os.times()
    total_s = time.process_time() + ended.children_user + ended.children_system
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            times = child.cpu_times()
            total_s += times.user + times.system
    return total_s
