"""Records recoveries: losses, their causes, and how long each phase took.

From `State.last_change` and the workers' timings it makes the `recoveries` of the summary and log lines. No decisions
here. It is a fold over facts: what a restarted coordinator needs changes only in `saw`.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

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
from elastic_ring.control.state import Change
from elastic_ring.faults import Fault
from elastic_ring.mesh import Mesh
from elastic_ring.monitor.report import recovery_line
from elastic_ring.runtime.agent.messages import Death

log = logging.getLogger(__name__)

RecordFact = Callable[[Fact], None]


class RecoveryLog:
    """`record` brings a fact into the journal. Times are on the coordinator's clock."""

    def __init__(self, run: RunConfig, record: RecordFact) -> None:
        self._run, self._record = run, record
        self.records: list[dict[str, Any]] = []
        self.lines: list[str] = []
        self.fired: dict[int, FaultFired] = {}
        self.deaths: dict[str, Death] = {}
        self._started: dict[str, WorkerStarted] = {}
        self.same_environment = True
        self._open_faults: list[int] = []
        self._open: dict[str, Any] | None = None
        self._own_failures: dict[str, str] = {}
        self._own_failure_kinds: list[str] = []
        self._timings: dict[str, dict[str, Any]] = {}
        self._reference: Mapping[str, Any] | None = None
        self._places: list[str] = []  # the GPU of each rank of the last generation; none on CPUs

    # ------------------------------------------------------------ what happens

    def pid_of(self, worker: str) -> int:
        """0 for one that has not been heard of."""
        return self._started[worker].pid if worker in self._started else 0

    def fault_fired(self, index: int, worker: str, now: float) -> None:
        self._tell(FaultFired(index, worker, now))

    def worker_started(self, worker: str, pid: int, environment: Mapping[str, Any]) -> None:
        self._tell(WorkerStarted(worker, pid, dict(environment)))

    def died(self, death: Death) -> None:
        """An agent's notice of a death. A second one of the same worker has the cause, unknown when the exit began."""
        known = self.deaths.get(death.worker)
        if known is not None:
            self.deaths[death.worker] = replace(known, reason=death.reason, how=death.how, signal=death.signal)
            return
        self.deaths[death.worker] = death
        for line in death.log_lines:
            log.warning("log tail of %s: %s", death.worker, line)

    def resumed(self, worker: str, timings: Mapping[str, Any]) -> None:
        self._timings[worker] = dict(timings)

    def member_failed(self, worker: str, kind: str, step: int, detail: str) -> None:
        """A member's step broke off: what to say of it if nobody turns out to be dead."""
        what = (detail.strip().splitlines() or [""])[-1]
        did = {
            "user": "raised",
            "device": "had a device error",
            "memory": "ran out of memory",
            "corrupt": "did not agree with the others",
            "back": "went back on purpose",
        }.get(kind, "lost a peer")
        self._own_failures[worker] = f"{did} in step {step} ({what})"
        self._own_failure_kinds.append(kind)

    def gpu(self) -> str:
        """The name of the workers' GPUs; empty on CPUs, and where workers have different ones."""
        names = {str(one.environment.get("gpu", "")) for one in self._started.values()}
        return names.pop() if len(names) == 1 else ""

    def num_lost(self) -> dict[str, int]:
        """How many members were lost, by reason: "node lost", "died", "hung" and so on."""
        return dict(sum((Counter(record.get("lost", {})) for record in self.records), Counter()))

    def unfired(self, first_step: int = 0) -> list[Fault]:
        """Planned faults from `first_step` on that never fired; those before it were an earlier attempt's."""
        planned = enumerate(self._run.faults)
        return [fault for index, fault in planned if index not in self.fired and fault.step >= first_step]

    def compare_environments(self, members: Sequence[str]) -> None:
        """Equal bits are promised among machines equal to the first member's only; a run with others says so."""
        known = {worker: self._started[worker].environment for worker in members if worker in self._started}
        if self._reference is None and known:
            self._tell(FirstEnvironment(dict(next(iter(known.values())))))
        reference = self._reference or {}
        odd = {worker: found for worker, found in known.items() if found != reference}
        if not odd:
            return
        worker, found = next(iter(odd.items()))
        pairs = [
            f"{key} {found.get(key)} instead of {reference.get(key)}"
            for key in {**reference, **found}
            if found.get(key) != reference.get(key)
        ]
        self._no_equal_bits(f"{worker} is another machine than the first member ({', '.join(pairs)})")

    def compare_places(self, mesh: Mesh, members: Sequence[str]) -> None:
        """Sums over three or more ranks are promised in the same order only while every rank keeps its GPU: NCCL
        orders the ranks of a group by where their GPUs sit."""
        before = self._places if len(self._places) == len(members) else [""] * len(members)
        told = [str(self._timings.get(worker, {}).get("gpu", "")) for worker in members]
        # Some workers may have reported their GPU to the old coordinator only.
        gpus = [gpu or known for gpu, known in zip(told, before, strict=True)]
        if gpus == self._places or not any(gpus):
            return
        self._tell(PlacesKnown(gpus))
        moved = [rank for rank, gpu in enumerate(gpus) if before[rank] and gpu != before[rank]]
        if moved and max(mesh.dp, mesh.cp) > 2:
            rank = moved[0]
            self._no_equal_bits(f"rank {rank} computes on GPU {gpus[rank]} and did on {before[rank]}")

    def not_repeatable(self, step: int, what: str) -> None:
        """A member computed something in step `step` whose bits do not come again."""
        self._no_equal_bits(f"what is computed is not repeatable ({what}; first seen in step {step})")

    def _no_equal_bits(self, why: str) -> None:
        """Noted once; from then on no recovery counts as exact."""
        if not self.same_environment:
            return
        self._tell(BitsUnequal(why))
        self.say(f"{why}: from here on the run promises the same samples, not the same bits")

    # ------------------------------------------------------------ a recovery from its beginning to its end

    def begin(self, change: Change, num_published: int, attempt_began_at: float = math.inf) -> None:
        """The ring has closed again; `num_published` steps are in the metrics. The attempt that broke off had begun at
        `attempt_began_at`; infinity: nobody knows."""
        assert change.resumed_at is not None
        faults = sorted(self._open_faults)
        fault_at = min([self.fired[i].now for i in faults], default=change.noticed_at)
        heal_s = max([self._timings.get(w, {}).get("heal_s", 0.0) for w in change.newcomers], default=0.0)
        begun = {
            "step": change.step_rerun if change.step_rerun is not None else change.step,
            "faults": [str(self._run.faults[i]) for i in faults],
            "cause": self._cause(change),
            "kind": self._kind(change),
            "action": change.action,
            "detect_s": max(0.0, change.noticed_at - fault_at),
            "close_s": max(0.0, change.resumed_at - change.noticed_at - heal_s),
            "heal_s": heal_s,
            "broken_off_s": max(0.0, fault_at - attempt_began_at) if change.step_rerun is not None else 0.0,
            "steps_undone": max(change.steps_undone, num_published - change.step, 0),
            "steps_rerun": change.steps_undone + (1 if change.step_rerun is not None else 0),
            "source": change.source,
            "survivor_pids_kept": self._survivors_kept(change),
            "phases": self._phases(change.newcomers),
            "exact": change.promise == "bit-exact" and self.same_environment,
            "lost": dict(Counter(lost.reason for lost in change.lost if lost.global_rank is not None)),
            "_fault_at": fault_at,
            "_resumed": change.resumed_at,
            "_step": change.step,
        }
        self._own_failures.clear()
        self._own_failure_kinds.clear()
        self._tell(RingClosed(begun if self._open is None else merged(self._open, begun)))

    def committed(self, step: int, now: float) -> None:
        """The first step that commits after a recovery ends it."""
        if self._open is not None and step >= self._open["_step"]:
            self.finish(now)

    def finish(self, now: float) -> None:
        """Close the open recovery, if any. `now`: seconds on the coordinator's clock."""
        if self._open is None:
            return
        record = {key: value for key, value in self._open.items() if not key.startswith("_")}
        record["rerun_s"] = now - self._open["_resumed"]
        record["total_s"] = now - self._open["_fault_at"]
        self._add(record, closes=True)

    def coordinator_back(self, now: float, step: int, alive_at_s: float | None) -> None:
        """A new coordinator found the mesh at work: nothing of the training was lost.

        The old one died when a planned fault hit it, else some time after its last sign of life.
        """
        last_s = now if alive_at_s is None else alive_at_s
        fault_at = min((self.fired[i].now for i in self._open_faults), default=last_s)
        self._add(
            {
                "step": step,
                "cause": "the coordinator died",
                "kind": "coordinator",
                "faults": [str(self._run.faults[i]) for i in sorted(self._open_faults)],
                "action": "coordinator restarted from its journal",
                "detect_s": 0.0,
                "close_s": now - fault_at,
                "heal_s": 0.0,
                "rerun_s": 0.0,
                "total_s": now - fault_at,
                "steps_undone": 0,
                "steps_rerun": 0,
                "source": "replica",
                "survivor_pids_kept": True,
                "exact": True,
            },
            closes=False,
        )

    # ------------------------------------------------------------ the fold

    def _tell(self, fact: Fact) -> None:
        self._record(fact)
        self.saw(fact)

    def saw(self, fact: Fact) -> None:
        """A fact, new or from the journal of an earlier coordinator."""
        match fact:
            case FaultFired():
                self.fired[fact.index] = fact
                self._open_faults.append(fact.index)
            case WorkerStarted():
                self._started[fact.worker] = fact
            case FirstEnvironment():
                self._reference = fact.environment
            case PlacesKnown():
                self._places = list(fact.places)
            case BitsUnequal():
                self.same_environment = False
            case RingClosed():
                self._open = dict(fact.recovery)
                self._open_faults.clear()
            case RecoveryEnded():
                self.records.append(dict(fact.recovery))
                self.lines.append(recovery_line(fact.recovery))
                if fact.closes:
                    self._open = None
                else:
                    self._open_faults.clear()

    # ------------------------------------------------------------ parts

    def _survivors_kept(self, change: Change) -> bool:
        """Whether everyone who was not lost is in the mesh again, as the same process. A mesh of another size
        has other members; there only the processes are compared."""
        same = all(self._timings.get(w, {}).get("pid", self.pid_of(w)) == self.pid_of(w) for w in change.survivors)
        if change.mesh != change.previous_mesh:
            return same
        num_gone = sum(loss.global_rank is not None for loss in change.lost) + len(change.drained)
        return same and len(change.survivors) >= change.mesh.size - num_gone

    def _phases(self, newcomers: Sequence[str]) -> dict[str, float]:
        """The parts of building and healing, by name, each as long as the slowest newcomer took for it (without a
        newcomer: the slowest member)."""
        told = [self._timings[worker] for worker in newcomers or self._timings if worker in self._timings]
        names = dict.fromkeys(name for timings in told for name in timings if name.endswith(("_s", "_bytes")))
        return {name: max(float(timings.get(name, 0.0)) for timings in told) for name in names}

    def _add(self, record: dict[str, Any], *, closes: bool) -> None:
        self._tell(RecoveryEnded(record, closes))
        log.warning("%s", recovery_line(record))

    def say(self, line: str) -> None:
        """To the log and to followers."""
        log.warning("%s", line)
        self.lines.append(line)

    def _cause(self, change: Change) -> str:
        parts = []
        for loss in change.lost:
            death = self.deaths.get(loss.worker)
            who = f"rank {loss.global_rank}" if loss.global_rank is not None else f"newcomer {loss.worker}"
            where = f" in {death.phase} of step {death.step}" if death else ""
            # Of a worker that was killed for its device the signal says nothing.
            why = loss.detail if loss.reason in OF_ONE_DEVICE or death is None else death.how
            parts.append(f"{who} {loss.reason}{where} ({why})")
        parts += [f"{worker} drained" for worker in change.drained]
        parts += [] if parts else [f"{worker} {text}" for worker, text in self._own_failures.items()]
        return "; ".join(parts) or change.reason

    def _kind(self, change: Change) -> str:
        """The cause in a word of `metrics_table.CAUSES`. An error of the user's code, or a lack of memory, breaks the
        exchanges of its peers, whose reports may come first."""
        if change.lost:
            return change.lost[0].reason
        if change.drained:
            return "drained"
        return next((kind for kind in ("user", "memory", "corrupt") if kind in self._own_failure_kinds), "peer")


def merged(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Merge two recoveries; the second began before a step had committed after the first."""
    return {
        **second,
        "faults": first["faults"] + second["faults"],
        "cause": f"{first['cause']}; {second['cause']}",
        "kind": first["kind"],
        "detect_s": first["detect_s"] + second["detect_s"],
        "close_s": first["close_s"] + second["close_s"],
        "heal_s": first["heal_s"] + second["heal_s"],
        "broken_off_s": first.get("broken_off_s", 0.0) + second["broken_off_s"],
        "steps_undone": max(first["steps_undone"], second["steps_undone"]),
        "steps_rerun": max(first["steps_rerun"], second["steps_rerun"]),
        "source": min(first["source"], second["source"]),  # the lower relief
        "survivor_pids_kept": first["survivor_pids_kept"] and second["survivor_pids_kept"],
        "phases": second["phases"],
        "exact": first["exact"] and second["exact"],
        "lost": dict(Counter(first["lost"]) + Counter(second["lost"])),
        "_fault_at": first["_fault_at"],
    }
