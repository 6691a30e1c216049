"""Records recoveries: losses, their causes, and how long each phase took; and whether equal bits are still promised.

A fold over facts: what a restarted coordinator needs changes only in `saw`. No decisions here.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from elastic_ring.config import RunConfig
from elastic_ring.control.decisions.crash_loop import OF_ONE_DEVICE
from elastic_ring.control.facts import (
    BitsUnequal,
    Fact,
    FaultFired,
    FirstEnvironment,
    PlacesKnown,
    RecoveryEnded,
    RingClosed,
    WorkerStarted,
)
from elastic_ring.control.messages import MemberFailed
from elastic_ring.control.state import Change
from elastic_ring.faults import Fault
from elastic_ring.mesh import Mesh
from elastic_ring.monitor.metrics import Recovery
from elastic_ring.monitor.report import recovery_line
from elastic_ring.runtime.agent.messages import Death

log = logging.getLogger(__name__)

RecordFact = Callable[[Fact], None]
Timings = Mapping[str, float | str]
"""Seconds and bytes of the parts of a member's build, and its `pid` and `gpu`."""
Environment = Mapping[str, str | int | bool | None]
"""What the bits of a result depend on besides its inputs (`runtime.worker.env_fingerprint`)."""
BROKE_OFF = {
    "user": "raised",
    "device": "had a device error",
    "memory": "ran out of memory",
    "corrupt": "did not agree with the others",
    "back": "went back on purpose",
}
"""By the kind of a `MemberFailed`."""


class DriverLine(NamedTuple):
    """`is_recovery`: from a fact, so that a restarted coordinator has it again."""

    text: str
    is_recovery: bool = False


class LinesHeard(NamedTuple):
    """The lines that a driver has: of recoveries, and the rest of the coordinator of `term`."""

    num_recoveries: int = 0
    term: int = 0
    num_rest: int = 0


@dataclass(frozen=True)
class OpenRecovery:
    """A recovery whose ring has closed, until a step from `step` on commits. Times: on the coordinator's clock, None
    where that was another host's."""

    recovery: Recovery
    fault_at: float | None
    resumed_at: float | None
    step: int

    def to_json(self) -> dict[str, Any]:
        times = {"_fault_at": self.fault_at, "_resumed": self.resumed_at, "_step": self.step}
        return {**self.recovery.to_json(), **times}

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> OpenRecovery:
        return cls(Recovery.from_json(line), line["_fault_at"], line["_resumed"], line["_step"])

    def close(self, now: float) -> Recovery:
        rerun_s, total_s = (None if at is None else now - at for at in (self.resumed_at, self.fault_at))
        return replace(self.recovery, rerun_s=rerun_s, total_s=total_s)


class EqualBits:
    """Decides whether a run still promises equal bits: workers' environments and GPUs, unrepeatable computations."""

    def __init__(self, tell: Callable[[Fact], None], say: Callable[[str], None]) -> None:
        self._tell, self._say = tell, say
        self.are_promised = True
        self._started: dict[str, WorkerStarted] = {}
        self._reference: Environment | None = None
        self._places: list[str] = []  # the GPU of each rank of the last generation; none on CPUs

    def saw(self, fact: Fact) -> None:
        match fact:
            case WorkerStarted():
                self._started[fact.worker] = fact
            case FirstEnvironment():
                self._reference = fact.environment
            case PlacesKnown():
                self._places = list(fact.places)
            case BitsUnequal():
                self.are_promised = False

    def pid_of(self, worker: str) -> int:
        """0 for a worker that has not started."""
        return self._started[worker].pid if worker in self._started else 0

    def gpu(self) -> str:
        """The name of the workers' GPUs; empty on CPUs, and where workers have different ones."""
        names = {str(started.environment.get("gpu", "")) for started in self._started.values()}
        return names.pop() if len(names) == 1 else ""

    def compare_environments(self, members: Sequence[str]) -> None:
        """End the promise where a member's environment is not that of the first member."""
        environments = {w: self._started[w].environment for w in members if w in self._started}
        if self._reference is None and environments:
            self._tell(FirstEnvironment(dict(next(iter(environments.values())))))
        reference = self._reference or {}
        for worker, environment in environments.items():
            if environment != reference:
                pairs = [
                    f"{key} {environment.get(key)} instead of {reference.get(key)}"
                    for key in {**reference, **environment}
                    if environment.get(key) != reference.get(key)
                ]
                self.end(f"{worker} is another machine than the first member ({', '.join(pairs)})")
                return

    def compare_places(self, mesh: Mesh, reported: Sequence[str]) -> None:
        """End the promise where a rank has moved to another GPU and a sum has three or more ranks: NCCL orders the
        ranks of a group by where their GPUs sit. `reported`: each rank's GPU, empty if unknown."""
        before = self._places if len(self._places) == len(reported) else [""] * len(reported)
        # Some workers may have reported their GPU to the old coordinator only.
        gpus = [gpu or last for gpu, last in zip(reported, before, strict=True)]
        if gpus == self._places or not any(gpus):
            return
        self._tell(PlacesKnown(gpus))
        moved = [rank for rank, gpu in enumerate(gpus) if before[rank] and gpu != before[rank]]
        if moved and max(mesh.dp, mesh.cp) > 2:
            self.end(f"rank {moved[0]} computes on GPU {gpus[moved[0]]} and did on {before[moved[0]]}")

    def not_repeatable(self, step: int, reason: str) -> None:
        """A member computed something in step `step` whose bits do not come again."""
        self.end(f"what is computed is not repeatable ({reason}; first seen in step {step})")

    def end(self, reason: str) -> None:
        """Noted once; from then on no recovery counts as exact."""
        if self.are_promised:
            self._tell(BitsUnequal(reason))
            self._say(f"{reason}: from here on the run promises the same samples, not the same bits")


class RecoveryLog:
    """The recoveries of a run, and the lines that its log and drivers get. `record` brings a fact into the journal;
    `term` is the coordinator's."""

    def __init__(self, run: RunConfig, record: RecordFact, term: int = 0) -> None:
        self._run, self._record, self._term = run, record, term
        self.records: list[Recovery] = []
        self._lines: list[DriverLine] = []
        self.fired: dict[int, FaultFired] = {}
        self.deaths: dict[str, Death] = {}
        self.still_s: dict[str, float] = {}  # of hung workers and silent nodes, from their last sign of life
        self.bits = EqualBits(self._tell, self.say)
        self._open_faults: list[int] = []
        self._open: OpenRecovery | None = None
        self._failures: list[MemberFailed] = []  # since the last recovery
        self._timings: dict[str, Timings] = {}

    # ------------------------------------------------------------ what happens

    def fault_fired(self, index: int, worker: str, now: float) -> None:
        self._tell(FaultFired(index, worker, now))

    def worker_started(self, worker: str, pid: int, environment: Environment) -> None:
        self._tell(WorkerStarted(worker, pid, dict(environment)))

    def died(self, death: Death) -> None:
        """An agent's notice of a death. A second one of the same worker has the cause, unknown when the exit began."""
        first = self.deaths.get(death.worker)
        if first is not None:
            self.deaths[death.worker] = replace(first, reason=death.reason, how=death.how, signal=death.signal)
            return
        self.deaths[death.worker], self.still_s[death.worker] = death, death.still_s
        for line in death.log_lines:
            log.warning("log tail of %s: %s", death.worker, line)

    def resumed(self, worker: str, timings: Timings) -> None:
        self._timings[worker] = timings

    def member_failed(self, failure: MemberFailed) -> None:
        """A member's step broke off: the cause of the recovery if nobody turns out to be dead."""
        self._failures.append(failure)

    def num_lost(self) -> dict[str, int]:
        """How many members were lost, by reason: "node lost", "died", "hung" and so on."""
        return dict(sum((Counter(recovery.lost) for recovery in self.records), Counter()))

    def unfired(self, first_step: int = 0) -> list[Fault]:
        """Planned faults from `first_step` on that never fired; those before it were an earlier attempt's."""
        planned = enumerate(self._run.faults)
        return [fault for index, fault in planned if index not in self.fired and fault.step >= first_step]

    def compare_members(self, mesh: Mesh, members: Sequence[str]) -> None:
        """Whether equal bits are still promised among the members of a new generation."""
        self.bits.compare_environments(members)
        self.bits.compare_places(mesh, [str(self._timings.get(worker, {}).get("gpu", "")) for worker in members])

    # ------------------------------------------------------------ a recovery from its beginning to its end

    def begin(self, change: Change, num_published: int, attempt_began_at: float | None = None) -> None:
        """The ring has closed again; `num_published` steps are in the metrics. The attempt that broke off had begun at
        `attempt_began_at`; None if unknown."""
        assert change.resumed_at is not None
        faults = sorted(self._open_faults)
        names = [lost.node if lost.reason == "node lost" else lost.worker for lost in change.lost]
        still_s = max([self.still_s.get(name, 0.0) for name in names], default=0.0)
        fault_at: float | None
        fault_at = began_at = min([self.fired[i].now for i in faults], default=change.noticed_at - still_s)
        heal_s = max([float(self._timings.get(w, {}).get("heal_s", 0.0)) for w in change.newcomers], default=0.0)
        is_rerun = change.step_rerun is not None
        recovery = Recovery(
            step=change.step if change.step_rerun is None else change.step_rerun,
            faults=[str(self._run.faults[i]) for i in faults],
            cause=self._cause(change),
            action=change.action,
            detect_s=max(0.0, change.noticed_at - began_at),
            close_s=max(0.0, change.resumed_at - change.noticed_at - heal_s),
            heal_s=heal_s,
            steps_undone=max(change.steps_undone, num_published - change.step, 0),
            steps_rerun=change.steps_undone + is_rerun,
            source=change.source,
            survivor_pids_kept=self._survivors_kept(change),
            exact=change.promise == "bit-exact" and self.bits.are_promised,
            kind=self._kind(change),
            broken_off_s=max(0.0, began_at - attempt_began_at) if is_rerun and attempt_began_at is not None else 0.0,
            phases=self._phases(change.newcomers),
            lost=dict(Counter(lost.reason for lost in change.lost if lost.global_rank is not None)),
        )
        self._failures.clear()
        if self._open is not None:
            fault_at, recovery = self._open.fault_at, self._open.recovery.merge(recovery)
        self._tell(RingClosed(OpenRecovery(recovery, fault_at, change.resumed_at, change.step).to_json()))

    def committed(self, step: int, now: float) -> None:
        """The first step that commits after a recovery ends it."""
        if self._open is not None and step >= self._open.step:
            self.finish(now)

    def finish(self, now: float) -> None:
        """Close the open recovery, if any. `now`: seconds on the coordinator's clock."""
        if self._open is not None:
            self._add(self._open.close(now), closes=True)

    def coordinator_back(self, now: float, step: int, alive_at: float | None) -> None:
        """A new coordinator found the mesh at work: nothing of the training was lost.

        The old one died when a planned fault hit it, else some time after its last sign of life at `alive_at`; None if
        unknown.
        """
        fault_at = min((self.fired[i].now for i in self._open_faults), default=alive_at)
        took_s = None if alive_at is None or fault_at is None else max(0.0, now - fault_at)
        recovery = Recovery(
            step=step,
            faults=[str(self._run.faults[i]) for i in sorted(self._open_faults)],
            cause="the coordinator died",
            kind="coordinator",
            action="coordinator restarted from its journal",
            detect_s=0.0,
            close_s=took_s,
            heal_s=0.0,
            rerun_s=0.0,
            total_s=took_s,
            steps_undone=0,
            steps_rerun=0,
            source="replica",
            survivor_pids_kept=True,
            exact=True,
        )
        self._add(recovery, closes=False)

    def forget_times(self) -> None:
        """The open recovery began on another clock."""
        if self._open is not None:
            self._open = replace(self._open, fault_at=None, resumed_at=None)

    def _add(self, recovery: Recovery, *, closes: bool) -> None:
        self._tell(RecoveryEnded(recovery.to_json(), closes))
        log.warning("%s", self.lines[-1])

    @property
    def lines(self) -> list[str]:
        return [line.text for line in self._lines]

    def add_line(self, text: str) -> None:
        """To drivers."""
        self._lines.append(DriverLine(text))

    def news(self, heard: LinesHeard) -> tuple[list[str], LinesHeard]:
        """The lines that a driver lacks which has `heard` so far, and what it has then. For any thread."""
        first = {True: heard.num_recoveries, False: heard.num_rest if heard.term == self._term else 0}
        num, new = {True: 0, False: 0}, list[str]()
        for text, is_recovery in self._lines[:]:
            num[is_recovery] += 1
            if num[is_recovery] > first[is_recovery]:
                new.append(text)
        return new, LinesHeard(num[True], self._term, num[False])

    def say(self, line: str) -> None:
        """To the log and to drivers."""
        log.warning("%s", line)
        self.add_line(line)

    # ------------------------------------------------------------ the fold

    def _tell(self, fact: Fact) -> None:
        self._record(fact)
        self.saw(fact)

    def saw(self, fact: Fact) -> None:
        """A fact, new or from the journal of an earlier coordinator. Raises: TypeError, KeyError for a damaged one."""
        self.bits.saw(fact)
        match fact:
            case FaultFired():
                self.fired[fact.index] = fact
                self._open_faults.append(fact.index)
            case RingClosed():
                self._open = OpenRecovery.from_json(fact.recovery)
                self._open_faults.clear()
            case RecoveryEnded():
                self.records.append(Recovery.from_json(fact.recovery))
                self._lines.append(DriverLine(recovery_line(self.records[-1]), is_recovery=True))
                if fact.closes:
                    self._open = None
                else:
                    self._open_faults.clear()

    # ------------------------------------------------------------ parts

    def _survivors_kept(self, change: Change) -> bool:
        """Whether everyone who was not lost is in the mesh again, as the same process. A mesh of another size
        has other members; there only the processes are compared."""
        pids = {worker: self.bits.pid_of(worker) for worker in change.survivors}
        same = all(self._timings.get(worker, {}).get("pid", pid) == pid for worker, pid in pids.items())
        num_lost = sum(loss.global_rank is not None for loss in change.lost) + len(change.drained)
        return same and (change.mesh != change.previous_mesh or len(pids) >= change.mesh.size - num_lost)

    def _phases(self, newcomers: Sequence[str]) -> dict[str, float]:
        """The parts of building and healing, by name, each as long as the slowest newcomer took for it (without a
        newcomer: the slowest member)."""
        reported = [self._timings[worker] for worker in newcomers or self._timings if worker in self._timings]
        names = dict.fromkeys(name for timings in reported for name in timings if name.endswith(("_s", "_bytes")))
        return {name: max(float(timings.get(name, 0.0)) for timings in reported) for name in names}

    def _cause(self, change: Change) -> str:
        parts = []
        for loss in change.lost:
            death = self.deaths.get(loss.worker)
            name = f"rank {loss.global_rank}" if loss.global_rank is not None else f"newcomer {loss.worker}"
            where = f" in {death.phase} of step {death.step}" if death else ""
            # Of a worker that was killed for its device the signal says nothing.
            reason = loss.detail if loss.reason in OF_ONE_DEVICE or death is None else death.how
            parts.append(f"{name} {loss.reason}{where} ({reason})")
        parts += [f"{worker} drained" for worker in change.drained]
        by_worker = {} if parts else {failure.worker: failure for failure in self._failures}
        for worker, failure in by_worker.items():
            last_line = (failure.detail.strip().splitlines() or [""])[-1]
            text = f"{BROKE_OFF.get(failure.kind, 'lost a peer')} in step {failure.step} ({last_line})"
            parts.append(f"{worker} {text}")
        return "; ".join(parts) or change.reason

    def _kind(self, change: Change) -> str:
        """The cause in a word of `metrics_table.CAUSES`. An error of the user's code, or a lack of memory, breaks the
        exchanges of its peers, whose reports may come first."""
        if change.lost:
            return change.lost[0].reason
        if change.drained:
            return "drained"
        kinds = {failure.kind for failure in self._failures}
        return next((kind for kind in ("user", "memory", "corrupt") if kind in kinds), "peer")
