"""A worker's client of the coordinator: sends events and records of committed steps, and asks for planned faults
and for what the driver's callbacks want. Nothing is decided here.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from elastic_ring.config import RunConfig, ScalingConfig
from elastic_ring.control.messages import Answer, CallbacksAwaited, CauseIds, DrainRequested, to_json
from elastic_ring.runtime.notices import Notice
from elastic_ring.runtime.worker.faults import Injector
from elastic_ring.train.task import TrainingTask


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


LOOK_S = 0.05
ASK_AGAIN_S = 5.0
"""A coordinator that was killed may not have journalled the question."""


class CoordinatorClient:
    """Sends to the present coordinator. A generation may outlive the term that built it, so `term()` is called for each
    event. `coordinator` is the actor's handle, set when the worker starts."""

    def __init__(self, spec: WorkerSpec, term: Callable[[], int]) -> None:
        self._spec, self._term = spec, term
        self.coordinator: Any = None
        self._asked: Any = None
        self.cause = CauseIds(spec.worker)

    def answer(self, event: Any, extra: dict[str, Any] | None = None) -> None:
        """Send an event; `extra` is sent with it and does not affect decisions."""
        if hasattr(event, "term"):
            event = replace(event, term=self._term())
        self.coordinator.notify.remote(to_json(event), extra or {})

    def publish(self, records: Sequence[Notice]) -> None:
        """Send records of committed steps, and notices."""
        self.coordinator.publish.remote(self._spec.worker, records)

    def saved(self, part: dict[str, Any]) -> None:
        """Tell that this rank's part of a checkpoint is written, or why it is not."""
        self.coordinator.saved.remote(self._spec.worker, part)

    def ask_callbacks(self, generation: int, step: int) -> None:
        """All members wait, after the validation of `step` steps, for what the driver's callbacks want."""
        self.answer(CallbacksAwaited(self.cause(), self._spec.worker, 0, generation, step))

    def is_there(self, timeout_s: float) -> bool:
        """Whether the coordinator answers in this time. An unanswered question waits on; it is not asked again."""
        import ray

        try:
            self._asked = self._asked or self.coordinator.identity.remote()
            if not ray.wait([self._asked], timeout=timeout_s)[0]:
                return False
            asked, self._asked = self._asked, None
            ray.get(asked, timeout=timeout_s)
        except ray.exceptions.RayError:  # it is dead, or Ray cannot reach it
            self._asked = None
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
    """The wait of a member, after a validation, for what the driver's callbacks want. `answer` is called by the control
    thread, `wait` by the training thread."""

    def __init__(self, ask: Callable[[int, int], None]) -> None:
        """`ask(generation, step)` sends the question."""
        self._ask = ask
        self._answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()

    def answer(self, answer: Answer) -> None:
        self._answers.put(answer)

    def forget(self) -> None:
        """A build begins: answers that members of the last generation did not take are not this one's."""
        while not self._answers.empty():
            self._answers.get_nowait()

    def wait(self, generation: int, step: int, look: Callable[[], None], after_s: float = 0.0) -> Answer:
        """The answer for the validation after `step` steps; asks first `after_s` from now. `look` is called again and
        again, and raises where the wait is over. The control core gives up waiting for callbacks, not this."""
        asked_at = time.monotonic() - ASK_AGAIN_S + after_s
        while True:
            if time.monotonic() - asked_at >= ASK_AGAIN_S:
                asked_at = time.monotonic()
                self._ask(generation, step)
            try:
                answer = self._answers.get(timeout=LOOK_S)
            except queue.Empty:
                look()
                continue
            if answer.step == step:
                return answer
