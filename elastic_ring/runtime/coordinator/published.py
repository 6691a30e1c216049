"""Steps as global rank 0 publishes them: which records count, and in which order. No decisions, no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

StepRecord = Mapping[str, Any]


class PublishedSteps:
    """Calls of one worker may overtake each other on their way, and one of a step that was given up may come late."""

    def __init__(self) -> None:
        self._waiting: dict[int, StepRecord] = {}
        self._builds: list[tuple[int, tuple[int, int]]] = []

    def begun(self, step: int, membership_id: tuple[int, int]) -> bool:
        """The members `membership_id`, (term, generation), were ordered to begin at `step`; whether that is new."""
        if self._builds and self._builds[-1] == (step, membership_id):
            return False
        self._builds.append((step, membership_id))
        return True

    def went_back(self) -> None:
        self._waiting.clear()

    def take(self, steps: Iterable[StepRecord], last_step: int) -> Iterator[StepRecord]:
        """Those of `steps` and of earlier calls that follow `last_step` without a gap."""
        self._waiting.update({record["step"]: record for record in steps if self.counts(record)})
        self._waiting = {step: record for step, record in self._waiting.items() if step > last_step}
        while (found := self._waiting.pop(last_step + 1, None)) is not None and self.counts(found):
            last_step += 1
            yield found

    def counts(self, record: StepRecord) -> bool:
        """Whether a step's record is of the members that committed it: the last that began at it or before."""
        ids = [known for first_step, known in self._builds if first_step <= record["step"]]
        return bool(ids) and tuple(record["membership_id"]) == ids[-1]
