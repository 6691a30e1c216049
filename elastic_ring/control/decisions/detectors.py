"""Detectors over committed steps: a slow rank, memory that is nearly full, waits for data, overdue checkpoints.

The core's memory of the newest steps, beside its state, which keeps none. Findings are facts, and events on which the
core decides (`replacements`, `memory_ladder`). Pure: no clock, no torch, no I/O.

A step is as slow as its slowest rank, so step times do not show which one it is. Each rank reports in the step's vote
how long it worked, without waits for others; these times are judged over a window of minutes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from elastic_ring.config import RunConfig
from elastic_ring.control.facts import CheckpointWritten, DataAwaited, Fact, MemoryNearlyFull, RankStraggled
from elastic_ring.control.messages import CauseIds, MemoryTight, StragglerFound
from elastic_ring.control.state import State, membership_of
from elastic_ring.mesh import Mesh

MIN_STEPS = 16
"""Measured steps; fewer say too little, however long they take."""
WARM_STEPS = 2
"""The first steps of a generation: caches are cold, and something may compile."""
NUM_SAMPLES, JUDGED_EVERY = 128, 4
"""A window of very short steps keeps so many of them, and is judged at every fourth."""
QUARTILE = 0.25
"""A rank counts as slow if it was in all but this share of the steps: a busy CPU comes and goes."""
PRESSURE_STEPS = 8
"""Steps of one generation in a row that must be above the limit."""
PRESSURE_SLACK = 0.05
"""How far a share must fall below the limit before memory is found tight again in the same generation."""
STALLED = 0.2
"""A node counts as full if all its tasks wait for memory this share of the time (PSI)."""
DATA_STEPS, DATA_LIMIT = 20, 0.2
"""A wait for data is found when it takes this share of the time of so many steps in a row."""
DATA_SLACK = 0.1
"""How far the share must fall below the limit before a wait is found again."""
FIRST_INTERVAL_S = 60.0
"""Between checkpoints of a run that has not chosen its interval yet."""
TOLD_AFTER = 3
"""After so many intervals without a checkpoint comes a report; then whenever their number has doubled."""
LEAST_S = 30.0
"""Nothing is overdue before so much training: intervals of a few quick steps are shorter than a write."""


@dataclass(frozen=True)
class StepMeasured:
    """Measurements of a committed step. `work_s` and `memory_shares`: of each rank; `host_share`: of the fullest node.
    `now`: in seconds on the clock of `advance`."""

    step: int
    membership_id: tuple[int, int]
    mesh: Mesh
    now: float
    step_s: float
    data_wait_s: float = 0.0
    work_s: Sequence[float] = ()
    memory_shares: Sequence[float] = ()
    host_share: float = 0.0
    checkpoint_interval_s: float = FIRST_INTERVAL_S


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


@dataclass(frozen=True)
class Tight:
    """`place`: the device of `global_rank`, or a host. `share`: of what there is, or of the share at which the guard of
    the node kills."""

    place: Literal["device", "host"]
    share: float
    global_rank: int = -1


class PressureWatch:
    """Memory in the newest steps of one generation."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._generation: tuple[int, int] = (0, 0)
        self._num_tight = 0
        self._armed = True
        self.device_share = self.host_share = 0.0
        """The shares of the fullest device and host at the newest step; 0 if unknown."""

    def observe(self, membership_id: tuple[int, int], shares: Sequence[float], host_share: float) -> Tight | None:
        """Takes the shares of each rank and of the fullest node in a committed step. A finding comes once until there
        is room again, or in each generation."""
        if membership_id != self._generation:
            self._generation, self._num_tight, self._armed = membership_id, 0, True
        self.device_share, self.host_share = max(shares, default=0.0), host_share
        fullest = max(self.device_share, host_share)
        if fullest < self._limit:
            self._num_tight = 0
            self._armed = self._armed or fullest < self._limit - PRESSURE_SLACK
            return None
        self._num_tight += 1
        if self._num_tight < PRESSURE_STEPS or not self._armed:
            return None
        self._armed = False
        if self.device_share >= host_share:
            return Tight("device", self.device_share, max(range(len(shares)), key=lambda rank: shares[rank]))
        return Tight("host", host_share)


def host_share(used: float, guard_limit: float, pressure: Mapping[str, float]) -> float:
    """How full a node is, as a share of what its guard allows; 1 where all of its tasks wait for memory."""
    if pressure.get("full", 0.0) >= STALLED:
        return 1.0
    return used / guard_limit if guard_limit else used


class DataWatch:
    """Waits for data in the newest committed steps."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float]] = deque(maxlen=DATA_STEPS)
        self._is_armed = True

    def observe(self, step_s: float, data_wait_s: float) -> bool:
        """Takes how long a committed step lasted and waited. Returns whether to report a wait: once, until it ends."""
        self._steps.append((step_s, data_wait_s))
        is_waiting = self._is_armed and self.share >= DATA_LIMIT
        self._is_armed = not is_waiting and (self._is_armed or self.share < DATA_LIMIT - DATA_SLACK)
        return is_waiting

    @property
    def share(self) -> float:
        """Of the time of the last DATA_STEPS steps that was waited; 0 before there are so many."""
        if len(self._steps) < DATA_STEPS:
            return 0.0
        return sum(waited_s for _, waited_s in self._steps) / max(sum(step_s for step_s, _ in self._steps), 1e-9)


@dataclass
class CheckpointWatch:
    """The training since the newest checkpoint began to count. Only committed steps are training: a run that waits owes
    no checkpoint."""

    every_steps: int | None
    """Steps between checkpoints; None where `interval_s` says when one is due."""
    interval_s: float
    step: int = 0
    """How many steps the newest checkpoint contains."""
    trained_s: float = 0.0
    _applied: int = 0
    _at_s: float | None = None
    _num_reported: int = 0

    def observe(self, applied: int, now: float) -> None:
        """Takes the number of steps in the shard."""
        # A pause is one interval at most: the first step after it brings the checkpoint.
        passed_s = 0.0 if self._at_s is None else min(now - self._at_s, self.interval_s)
        self._applied, self._at_s = applied, now
        self.trained_s += passed_s

    def restart(self, step: int) -> None:
        self.step, self.trained_s, self._num_reported = step, 0.0, 0

    @property
    def num_intervals(self) -> int:
        """Intervals in training without a checkpoint that counts, for whatever reason."""
        if self.every_steps == 0 or self.trained_s < LEAST_S:
            return 0
        if self.every_steps is not None:
            return max(0, self._applied - self.step) // self.every_steps
        return int(self.trained_s / self.interval_s)

    @property
    def overdue_s(self) -> float:
        """The training time beyond two intervals without a checkpoint."""
        num = self.num_intervals
        return self.trained_s * (num - 2) / num if num > 2 else 0.0

    def take_report(self) -> int:
        """The number of intervals if a report is due, else 0."""
        num = self.num_intervals
        if num < max(TOLD_AFTER, 2 * self._num_reported):
            return 0
        self._num_reported = num
        return num


Finding = RankStraggled | StragglerFound | MemoryNearlyFull | MemoryTight | DataAwaited


class Detectors:
    """`stragglers` and `memory`: None where the run's settings have them off."""

    def __init__(self, run: RunConfig) -> None:
        self._run, self._cause = run, CauseIds("detectors")
        is_on = run.straggler != "off"
        self.stragglers = StragglerWatch(run.straggler_window_s, run.straggler_factor) if is_on else None
        self.memory = PressureWatch(run.memory_pressure_share) if run.memory_pressure != "off" else None
        self.data = DataWatch()
        config = run.checkpoint_config
        self.checkpoints = CheckpointWatch(config.every_steps, config.every_s or FIRST_INTERVAL_S)

    def learn(self, fact: Fact) -> None:
        if isinstance(fact, CheckpointWritten):
            self.checkpoints.restart(fact.checkpoint["step"])

    def status(self) -> dict[str, float]:
        """The detectors' keys of status.json."""
        return {
            "checkpoint_intervals_missed": self.checkpoints.num_intervals,
            "checkpoint_step": self.checkpoints.step,
            "data_wait_share": round(self.data.share, 3),
        }

    def observe(self, measured: StepMeasured, state: State) -> list[Finding]:
        """Facts and events that a committed step leads to. Of former members only waits for data count."""
        self.checkpoints.interval_s = measured.checkpoint_interval_s
        self.checkpoints.observe(measured.step + 1, measured.now)
        findings: list[Finding] = []
        if self.data.observe(measured.step_s, measured.data_wait_s):
            waited = round(self.data.share, 3)
            text = f"training waits for its data: {waited:.0%} of the time of the steps up to {measured.step}"
            findings.append(DataAwaited(waited, measured.step, text))
        membership, group, straggler, tight = membership_of(state), measured.membership_id, None, None
        if self.stragglers is not None:
            straggler = self.stragglers.observe(group, measured.mesh, measured.step_s, measured.work_s)
        if self.memory is not None:
            tight = self.memory.observe(group, measured.memory_shares, measured.host_share)
        if membership is None or membership.id != group:
            return findings
        if straggler is not None:
            worker = membership.members[straggler.global_rank]
            node = state.workers[worker].node if worker in state.workers else ""
            action = (
                "a spare is to take its place" if self._run.straggler == "act" else "nothing is done (straggler=log)"
            )
            text = (
                f"straggler: {worker}, rank {straggler.global_rank} on node {node}, works {straggler.ratio:.1f} times "
                f"as long for a sequence as its peers, for {self._run.straggler_window_s:g} s; {action}"
            )
            ratio = round(straggler.ratio, 3)
            findings.append(RankStraggled(worker, node, straggler.global_rank, ratio, measured.step, text))
            findings.append(StragglerFound(self._cause(), worker, straggler.ratio))
        if tight is not None:
            worker, owner = "", f"a node had {100 * tight.share:.0f} % of what its guard allows in use"
            if tight.place == "device":
                worker, share = membership.members[tight.global_rank], f"{100 * tight.share:.0f} %"
                owner = f"{worker}, rank {tight.global_rank}, had {share} of its device's memory in use"
            text = f"memory pressure: {owner} in {PRESSURE_STEPS} steps in a row"
            remark = "" if self._run.memory_pressure == "act" else "; nothing is done (memory_pressure=log)"
            rounded = round(tight.share, 4)
            findings.append(MemoryNearlyFull(tight.place, rounded, worker, measured.step, text + remark))
            findings.append(MemoryTight(self._cause(), tight.place, measured.step, text))
        return findings
