"""The wait of a member, after a validation, for what the driver's callbacks want."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable

from elastic_ring.control.messages import Answer

LOOK_S = 0.05
ASK_AGAIN_S = 5.0
"""A coordinator that was killed may not have journalled the question."""


class CallbackWait:
    """`answer` is called by the control thread, `wait` by the training thread."""

    def __init__(self) -> None:
        self._answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()

    def answer(self, answer: Answer) -> None:
        self._answers.put(answer)

    def wait(self, step: int, ask: Callable[[], None], look: Callable[[], None]) -> Answer:
        """The answer for the validation after `step` steps. `ask` sends the question; `look` is called again and again,
        and raises where the wait is over. The control core gives up waiting for callbacks, not this."""
        asked_at = -ASK_AGAIN_S
        while True:
            if time.monotonic() - asked_at >= ASK_AGAIN_S:
                asked_at = time.monotonic()
                ask()
            try:
                answer = self._answers.get(timeout=LOOK_S)
            except queue.Empty:
                look()
                continue
            if answer.step == step:
                return answer
