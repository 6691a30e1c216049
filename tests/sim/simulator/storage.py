"""The simulated storage: which parts of checkpoints are written, which checkpoints count, which are damaged.

It plays the coordinator's `CheckpointKeeper` too. No clock, no ray.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from elastic_ring.control.messages import Build, Checkpoint, CheckpointsKnown, Vote

if TYPE_CHECKING:
    from tests.sim.simulator.simulate import World


WRITE_S = 5.0
"""What a checkpoint is said to take: more than some notices leave."""


@dataclass
class Stored:
    """A checkpoint that counts, what is in it, and since when (virtual seconds)."""

    checkpoint: Checkpoint
    history: tuple[Vote, ...]
    since_s: float
    damaged: bool = False


class SimStorage:
    """Checkpoints outlive every worker and coordinator."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.stored: list[Stored] = []
        self._parts: dict[tuple[int, int, int], set[str]] = {}
        self._oldest = (0, 0)  # (term, generation): what older members wrote was given up

    def written(self, order: Build, worker: str, history: tuple[Vote, ...]) -> None:
        """One member's part; the last one of a step makes the checkpoint count."""
        step, identity = len(history), (order.term, order.generation)
        parts = self._parts.setdefault((step, *identity), set())
        parts.add(worker)
        known = [stored.checkpoint.step for stored in self.stored]
        if identity < self._oldest or set(order.members) != parts or step in known:
            return
        folder = f"step-{step}/attempt-{order.term}-{order.generation}"
        self.stored.append(Stored(Checkpoint(step, folder, order.mesh), history, self.world.now))
        self.stored.sort(key=lambda stored: stored.checkpoint.step)
        self.tell()

    def gone_back(self, order: Build) -> None:
        """A build goes back to a checkpoint or a snapshot: what was to come after it is given up."""
        self._oldest = max(self._oldest, (order.term, order.generation))
        self.stored = [stored for stored in self.stored if stored.checkpoint.step <= order.step]
        self.tell()

    def tell(self) -> None:
        event = CheckpointsKnown("k", tuple(stored.checkpoint for stored in self.stored), WRITE_S)
        self.world.tell(event, reliable=True)

    def damage(self) -> None:
        """A byte of the newest checkpoint flips."""
        if self.stored:
            self.stored[-1].damaged = True

    def history(self, checkpoint: Checkpoint) -> tuple[Vote, ...] | None:
        """What a worker reads; None for what does not verify or is not there."""
        found = [stored for stored in self.stored if stored.checkpoint == checkpoint and not stored.damaged]
        return found[0].history if found else None
