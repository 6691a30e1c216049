"""The simulated preparation of a corpus: it writes longer manifests while a run trains, which the coordinators find.

It plays the coordinator's `CorpusWatcher`, and what a run that is submitted again learns from its records. It remembers
by which manifest each committed step ran. No clock, no ray.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from elastic_ring.control.decisions.data_order import journalled, version_at
from elastic_ring.control.messages import CorpusGrew, CorpusRecalled, CorpusVersion, Vote
from elastic_ring.control.state import State
from tests.sim.invariants import require
from tests.sim.simulator.worker import Group

if TYPE_CHECKING:
    from tests.sim.simulator.simulate import Coordinator, World


class SimCorpus:
    """Manifests outlive every worker, coordinator and submission; each is longer than those before."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.num_written = 0
        self._random = random.Random(f"manifests of {world.seed}")  # its own: runs that do not grow stay as they were
        self._ran_by: dict[int, CorpusVersion | None] = {}
        self._begin: Mapping[str, Any] = {"note": "begin"}

    # ------------------------------------------------------------ the preparation and who watches it

    def write(self) -> None:
        self.num_written += 1
        for coordinator in self.world.coordinators:
            self.watched_by(coordinator)

    def watched_by(self, coordinator: Coordinator) -> None:
        """It looks now and then, and finds the longest."""
        if self.num_written:
            self.world.later(self._random.uniform(0.0, 0.5), lambda: self._find(coordinator))

    def _find(self, coordinator: Coordinator) -> None:
        state, written = coordinator.state, self.num_written
        known = max([_number(state.grown), *(_number(version) for version in state.corpus)])
        if coordinator.alive and written > known:
            self.world.advance(coordinator, CorpusGrew("g", f"manifest-{written}", str(written)))

    def recalled(self, last: Coordinator) -> CorpusRecalled:
        """What the next submission reads in the records of the one whose last coordinator this was."""
        lines = [self._begin, *map(json.loads, last.journal)]
        versions, skips = journalled(lines)
        self._begin = {
            "note": "begin",
            "corpus": [asdict(version) for version in versions],
            "skips": [asdict(skip) for skip in skips],
        }
        return CorpusRecalled("c", versions, 1 + max(self._ran_by, default=-1), skips)

    # ------------------------------------------------------------ which manifest each step ran by

    def read(self, group: Group, step: int, version: CorpusVersion | None) -> None:
        """A member of `group` reads the sequences of a step."""
        others = group.read_by.setdefault(step, version)
        require(others == version, 8, f"members read step {step} by {others} and by {version}")

    def committed(self, vote: Vote) -> None:
        """It stays the same where the step runs again, and never goes back from step to step."""
        version = self._version_of(vote)
        known = self._ran_by.setdefault(vote.step, version)
        require(known == version, 8, f"step {vote.step} ran by {known}, and again by {version}")
        before = self._ran_by.get(vote.step - 1)
        require(_number(before) <= _number(version), 8, f"step {vote.step} ran by {version} after {before}")

    def check_end(self, history: Sequence[Vote], state: State) -> None:
        """A run that replays the versions that are on record uses the same sequences."""
        for vote in history:
            told = version_at(state.corpus, vote.step)
            require(self._version_of(vote) == told, 8, f"step {vote.step} did not run by {told}, which is on record")

    def _version_of(self, vote: Vote) -> CorpusVersion | None:
        return version_at(self.world.groups[vote.membership_id].order.corpus, vote.step)


def _number(manifest: CorpusVersion | CorpusGrew | None) -> int:
    return int(manifest.digest) if manifest is not None else 0
