"""Whether one rank is slower than its peers, and what follows. Pure: no clock, no torch, no I/O.

A step is as slow as its slowest rank, so step times do not show which one it is. Each rank reports in the step's vote
how long it worked, without waits for others. The coordinator judges these times over a window of minutes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from elastic_ring.control.capacity import worker_pool
from elastic_ring.control.messages import StragglerFound
from elastic_ring.control.state import Running, State, able_to_form
from elastic_ring.control.transition import Transition
from elastic_ring.mesh import Mesh

MIN_STEPS = 16
"""Measured steps; fewer say too little, however long they take."""
WARM_STEPS = 2
"""The first steps of a generation: caches are cold, and something may compile."""
NUM_SAMPLES, JUDGED_EVERY = 128, 4
"""A window of very short steps keeps so many of them, and is judged at every fourth."""
QUARTILE = 0.25
"""A rank counts as slow if it was in all but this share of the steps: a busy CPU comes and goes."""


@dataclass(frozen=True)
class Straggler:
    """`ratio`: how many times as long as its peers the rank worked, in three quarters of the steps at least."""

    global_rank: int
    ratio: float


def ratios(work_s: Sequence[float], mesh: Mesh) -> tuple[float, ...]:
    """How many times as long as its peers each rank worked in one step; none if a rank has not measured it.

    Peers are all other ranks, and also those of the same cp_rank, whose slices cost the same: the slower ones count.
    """
    if len(work_s) != mesh.size or mesh.size < 2 or min(work_s) <= 0:
        return ()
    peers_s = _medians_of_others(work_s)
    for cp_rank in range(mesh.cp if mesh.dp > 1 else 0):
        alike = mesh.replicas(cp_rank)
        for rank, median_s in zip(alike, _medians_of_others([work_s[rank] for rank in alike]), strict=True):
            peers_s[rank] = max(peers_s[rank], median_s)
    return tuple(own_s / peer_s for own_s, peer_s in zip(work_s, peers_s, strict=True))


def _medians_of_others(values: Sequence[float]) -> list[float]:
    """For each of at least two values the median of the others, as `statistics.median` gives it. Sorts once."""
    ordered = sorted(values)
    half, is_odd = divmod(len(ordered) - 1, 2)
    medians = []
    for value in values:
        place = bisect_left(ordered, value)
        upper = ordered[half + (half >= place)]
        medians.append(upper if is_odd else (ordered[half - 1 + (half - 1 >= place)] + upper) / 2)
    return medians


def judge(window: Sequence[Sequence[float]], factor: float) -> Straggler | None:
    """The slowest rank of a window of `ratios`, if it was `factor` times as slow as its peers nearly all the time."""
    if not window:
        return None
    lower = [sorted(ranks)[int(QUARTILE * len(window))] for ranks in zip(*window, strict=True)]
    rank = max(range(len(lower)), key=lambda each: lower[each])
    return Straggler(rank, lower[rank]) if lower[rank] >= factor else None


class StragglerWatch:
    """The newest steps of one generation: at least `window_s` of them, and MIN_STEPS; of short ones NUM_SAMPLES."""

    def __init__(self, window_s: float, factor: float) -> None:
        self._window_s, self._factor = window_s, factor
        self._steps: deque[tuple[float, tuple[float, ...]]] = deque()
        self._generation: tuple[int, int] = (0, 0)
        self._num_seen = self._num_samples = 0
        self._span_s = self._passed_s = 0.0
        self.slowest = 1.0
        """The ratio of the slowest rank in the newest measured step."""

    def observe(
        self, membership_id: tuple[int, int], mesh: Mesh, step_s: float, work_s: Sequence[float]
    ) -> Straggler | None:
        """Takes a committed step: its duration and each rank's own work, in seconds. A straggler is returned once; then
        a new window begins."""
        if membership_id != self._generation:
            self._begin(membership_id)
        self._num_seen += 1
        if self._num_seen <= WARM_STEPS:
            return None
        self._passed_s += step_s
        sample = ratios(work_s, mesh)
        if not sample:
            return None
        self.slowest = max(sample)
        if self._passed_s < self._window_s / NUM_SAMPLES:
            return None
        # A sample stands for all time since the one before; samples that the window does not need are dropped.
        self._steps.append((self._passed_s, sample))
        self._span_s, self._passed_s = self._span_s + self._passed_s, 0.0
        self._num_samples += 1
        while len(self._steps) > MIN_STEPS and self._span_s - self._steps[0][0] >= self._window_s:
            self._span_s -= self._steps.popleft()[0]
        is_due = self._num_samples % JUDGED_EVERY == 0 and len(self._steps) >= MIN_STEPS
        if not is_due or self._span_s < self._window_s * (1 - 1e-9):
            return None
        straggler = judge([step for _, step in self._steps], self._factor)
        if straggler is not None:
            self._begin(membership_id)
        return straggler

    def _begin(self, membership_id: tuple[int, int]) -> None:
        self._generation, self._num_seen, self._num_samples = membership_id, 0, 0
        self._span_s, self._passed_s, self.slowest = 0.0, 0.0, 1.0
        self._steps.clear()


# ---------------------------------------------------------------- what the core does about it


def replace_straggler(ctx: Transition, event: StragglerFound) -> None:
    """A spare takes the member's place at the next boundary; without one nothing changes: slow beats fewer."""
    phase = ctx.phase
    if not isinstance(phase, Running) or event.worker not in phase.membership.rank_of:
        ctx.explain(f"{event.worker} trains no more")
        return
    if ctx.state.workers[event.worker].draining or not can_replace(ctx.state, event.worker):
        ctx.explain(f"{event.worker} is {event.ratio:.1f} times as slow as its peers, and there is no spare for it")
        return
    if ctx.options.run.straggler != "act":
        ctx.explain(f"{event.worker} is {event.ratio:.1f} times as slow as its peers; straggler=log")
        return
    avoid(ctx, event.worker)
    worker_pool.drain(ctx, [event.worker])
    ctx.explain(f"{event.worker} is {event.ratio:.1f} times as slow as its peers: a spare takes its place")


def can_replace(state: State, worker: str) -> bool:
    """Whether the mesh keeps its size without this member."""
    phase = state.phase
    assert isinstance(phase, Running)
    return len([name for name in able_to_form(state) if name != worker]) >= phase.membership.mesh.size


def avoid(ctx: Transition, worker: str) -> None:
    """Hire on this worker's node, and take spares from it, only where no other node is left."""
    node = ctx.state.nodes.get(ctx.state.workers[worker].node)
    if node is not None and not node.avoided:
        ctx.put_nodes({node.node: replace(node, avoided=True)})
