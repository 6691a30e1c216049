"""What a run leaves in its folder: metrics, generations, recoveries, status, summary.

It turns the control core's facts (`State.last_change`) and the workers' timings into the records that people
read. It decides nothing. Facts that a restarted coordinator must know again go into the journal as notes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from elastic_ring.config import RunConfig
from elastic_ring.control.messages import Vote
from elastic_ring.control.state import Change, State, describe, members, mesh_of, phase_name, spares
from elastic_ring.faults import Fault
from elastic_ring.mesh import Mesh
from elastic_ring.monitor.metrics import (
    STATUS_NAME,
    Goodput,
    MetricsLog,
    StepMetrics,
    build_summary,
    read_metrics,
    write_json,
    write_summary,
)
from elastic_ring.monitor.picture import draw_run
from elastic_ring.monitor.report import recovery_line

log = logging.getLogger(__name__)

STATUS_PERIOD_S = 1.0


class Chronicle:
    """The records of one run. `note` appends to the journal; `clock` is the coordinator's."""

    def __init__(self, run: RunConfig, note: Callable[[dict[str, Any]], None], clock: Callable[[], float]) -> None:
        self._run, self._note, self._clock = run, note, clock
        self.folder: Path = run.folder
        self.metrics = MetricsLog(self.folder)
        self.generations: list[dict[str, Any]] = []
        self.recoveries: list[dict[str, Any]] = []
        self.fired: dict[int, float] = {}
        self.fired_by: dict[int, str] = {}
        self.deaths: dict[str, dict[str, Any]] = {}
        self.pids: dict[str, int] = {}
        self.last_vote: Vote | None = None
        self._open_faults: list[int] = []
        self._open: dict[str, Any] | None = None
        self._waiting: dict[int, Mapping[str, Any]] = {}
        self._casts: list[tuple[int, tuple[int, int]]] = []
        self._troubles: dict[str, str] = {}
        self._troubles_of: dict[str, str] = {}
        self._timings: dict[str, dict[str, Any]] = {}
        self._seen_change: tuple[int, int, bool] | None = None
        self._alive_at_s: float | None = None
        self._environments: dict[str, Mapping[str, Any]] = {}
        self.same_environment = True
        self._status_at = 0.0
        self.started_s = 0.0
        self._lines: list[str] = []

    def open(self, started_s: float) -> None:
        self.started_s = started_s
        status = self.folder / STATUS_NAME
        if status.exists():
            self._alive_at_s = json.loads(status.read_text())["updated_unix_s"]
        self.metrics.open()
        self._goodput = Goodput(started_s, self.metrics.step_times_s())

    # ------------------------------------------------------------ what happens

    def fault_fired(self, index: int, worker: str, now: float) -> None:
        self.fired[index], self.fired_by[index] = now, worker
        self._open_faults.append(index)
        self._note({"note": "fault", "index": index, "worker": worker, "now": now})

    def worker_started(self, worker: str, pid: int, environment: Mapping[str, Any]) -> None:
        """`environment`: what the bits of a result depend on besides its inputs (`runtime.worker`)."""
        self.pids[worker] = pid
        self._environments[worker] = dict(environment)
        self._note({"note": "worker", "worker": worker, "pid": pid, "environment": dict(environment)})

    def resumed(self, worker: str, timings: Mapping[str, Any]) -> None:
        self._timings[worker] = dict(timings)

    def begun(self, step: int, cast: tuple[int, int]) -> None:
        """The members of generation `cast` (term, generation) were told to begin at `step`."""
        self._casts.append((step, cast))

    def counts(self, record: Mapping[str, Any]) -> bool:
        """Whether a step's record is of the members that committed it: the last that began at it or before.

        Others gave the step up, and it ran, or will run, once more; their record may come late.
        """
        casts = [cast for first_step, cast in self._casts if first_step <= record["step"]]
        return bool(casts) and tuple(record["cast"]) == casts[-1]

    def publish(self, records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Committed steps, in order; those that are known already change nothing. Returns what was new."""
        # Calls of one worker may overtake each other on their way.
        self._waiting.update({record["step"]: record for record in records if self.counts(record)})
        self._waiting = {step: r for step, r in self._waiting.items() if step > self.metrics.last_step}
        new: list[Mapping[str, Any]] = []
        while (record := self._waiting.pop(self.metrics.last_step + 1, None)) is not None and self.counts(record):
            new.append(record)
            now = self._clock()
            mesh = Mesh(record["dp"], record["cp"])
            step_s = max(record["step_s"], 1e-9)
            self.metrics.record(
                StepMetrics(
                    step=record["step"], loss=record["loss"], grad_norm=record["grad_norm"], lr=record["lr"],
                    num_tokens=record["num_tokens"], tokens_per_s=record["num_tokens"] / step_s,
                    step_s=step_s, skipped=record["skipped"], generation=record["generation"], mesh=mesh,
                    num_members=mesh.size, hop_bytes=record["hop_bytes"], exposed_hop_wait_s=record["hop_wait_s"],
                    samples=samples_text(record["samples"]), val_loss=record.get("val_loss"),
                    committed_monotonic_s=record["committed_monotonic_s"],
                )
            )  # fmt: skip
            self._goodput.committed(record["step"], record["step_s"])
            self.last_vote = Vote(record["step"], tuple(record["vote"]), tuple(record["cast"]))
            self._close_recovery(record["step"], now)
        return new

    def look(self, state: State) -> None:
        """Take note of a new generation, and of a recovery when it is one."""
        change = state.last_change
        if change is None or (change.term, change.generation, change.resumed_at is not None) == self._seen_change:
            return
        self._seen_change = (change.term, change.generation, change.resumed_at is not None)
        if change.resumed_at is None:
            return
        generation = {
            "term": change.term, "generation": change.generation,
            "mesh": {"dp": change.mesh.dp, "cp": change.mesh.cp}, "reason": change.reason,
        }  # fmt: skip
        self.generations.append(generation)
        self._note({"note": "generation", **generation})
        self._compare_environments(change.seats)
        if change.previous_mesh is not None and (not change.planned or change.drained):
            self._begin_recovery(change)

    def _compare_environments(self, seats: Sequence[str]) -> None:
        """Equal bits are promised among equal machines only; where they differ the run says so."""
        known = {worker: self._environments[worker] for worker in seats if worker in self._environments}
        first = next(iter(known.values()), {})
        odd = {worker: found for worker, found in known.items() if found != first}
        if odd and self.same_environment:
            self.same_environment = False
            worker, found = next(iter(odd.items()))
            told = ", ".join(f"{key} {found.get(key)} instead of {first[key]}" for key in first
                             if found.get(key) != first[key])  # fmt: skip
            self._say(f"{worker} is another machine than the first member ({told}): from here on the run promises the "
                      "same samples, not the same bits")  # fmt: skip

    def trouble(self, worker: str, kind: str, step: int, detail: str) -> None:
        """A member's step broke off: what to say of it if nobody turns out to be dead."""
        what = (detail.strip().splitlines() or [""])[-1]
        self._troubles[worker] = f"{'raised' if kind == 'user' else 'lost a peer'} in step {step} ({what})"

    def coordinator_back(self, now: float) -> None:
        """A new coordinator found the mesh at work: nothing of the training was lost.

        The old one died when a planned fault struck it, else some time after its last sign of life.
        """
        last_s = now if self._alive_at_s is None else self._alive_at_s
        struck = min((self.fired[i] for i in self._open_faults), default=last_s)
        self._add_recovery({
            "step": self.metrics.last_step + 1, "cause": "the coordinator died",
            "faults": [str(self._run.faults[i]) for i in sorted(self._take_faults())],
            "action": "coordinator restarted from its journal", "detect_s": 0.0, "close_s": now - struck, "heal_s": 0.0,
            "rerun_s": 0.0, "total_s": now - struck, "steps_undone": 0, "steps_rerun": 0,
            "survivor_pids_kept": True, "exact": True,
        })  # fmt: skip

    # ------------------------------------------------------------ recoveries

    def _begin_recovery(self, change: Change) -> None:
        assert change.resumed_at is not None
        faults = self._take_faults()
        struck = min([self.fired[i] for i in faults], default=change.noticed_at)
        heal_s = max([self._timings.get(w, {}).get("heal_s", 0.0) for w in change.newcomers], default=0.0)
        texts = [str(self._run.faults[i]) for i in sorted(faults)]
        kept = all(self._timings.get(w, {}).get("pid", self.pids.get(w)) == self.pids.get(w) for w in change.survivors)
        earlier, self._troubles_of = self._open, dict(self._troubles)
        self._troubles.clear()
        self._open = {
            "step": change.step_rerun if change.step_rerun is not None else change.step,
            "faults": texts,
            "cause": self._cause(change),
            "action": change.action,
            "detect_s": max(0.0, change.noticed_at - struck),
            "close_s": max(0.0, change.resumed_at - change.noticed_at - heal_s),
            "heal_s": heal_s,
            "steps_undone": max(0, self.metrics.last_step + 1 - change.step),
            "steps_rerun": 1 if change.step_rerun is not None else 0,
            "survivor_pids_kept": kept,
            "exact": change.promise == "bit-exact" and self.same_environment,
            "_struck": struck,
            "_resumed": change.resumed_at,
            "_step": change.step,
        }
        if earlier is not None:
            self._open = merged(earlier, self._open)
        self._note({"note": "resumed", "recovery": self._open})

    def _close_recovery(self, step: int, now: float) -> None:
        """The first step that commits after a recovery ends it."""
        if self._open is None or step < self._open["_step"]:
            return
        self._finish_recovery(now)

    def _finish_recovery(self, now: float) -> None:
        assert self._open is not None
        record = {key: value for key, value in self._open.items() if not key.startswith("_")}
        record["rerun_s"] = now - self._open["_resumed"]
        record["total_s"] = now - self._open["_struck"]
        self._open = None
        self._add_recovery(record)

    def _add_recovery(self, record: dict[str, Any]) -> None:
        self.recoveries.append(record)
        self._note({"note": "recovery", "recovery": record})
        self._say(recovery_line(record))

    def _say(self, line: str) -> None:
        """To the log and to whoever follows."""
        log.warning("%s", line)
        self._lines.append(line)

    def _cause(self, change: Change) -> str:
        parts = []
        for loss in change.lost:
            death = self.deaths.get(loss.worker, {})
            who = f"rank {loss.global_rank}" if loss.global_rank is not None else f"newcomer {loss.worker}"
            where = f" in {death['phase']} of step {death['step']}" if death else ""
            parts.append(f"{who} {loss.reason}{where} ({death.get('how', loss.detail)})")
        parts += [f"{worker} drained" for worker in change.drained]
        parts += [] if parts else [f"{worker} {text}" for worker, text in self._troubles_of.items()]
        return "; ".join(parts) or change.reason

    def _take_faults(self) -> list[int]:
        taken, self._open_faults = self._open_faults, []
        return taken

    # ------------------------------------------------------------ files

    def write_status(self, state: State, *, force: bool = False, error: str = "", ended: bool = False) -> None:
        now = time.monotonic()
        if not force and now - self._status_at < STATUS_PERIOD_S:
            return
        self._status_at = now
        mesh, nodes = mesh_of(state), {w.worker: w.node for w in state.workers.values()}

        def person(worker: str) -> dict[str, Any]:
            return {"worker": worker, "node": nodes.get(worker, ""), "pid": self.pids.get(worker, 0)}

        write_json(self.folder / STATUS_NAME, {
            "run": self._run.name, "phase": phase_name(state), "term": state.term, "generation": state.generation,
            "mesh": {"dp": mesh.dp, "cp": mesh.cp} if mesh else {"dp": 0, "cp": 0},
            "step": self.metrics.last_step + 1, "total_steps": state.options.total_steps,
            "members": [{"global_rank": rank, **person(w)} for rank, w in enumerate(members(state))],
            "spares": [person(w) for w in spares(state)],
            "recoveries": self.recoveries[-20:], "updated_unix_s": time.time(), "ended": ended, "error": error,
            "story": describe(state)["story"],
        })  # fmt: skip

    def write_summary(self, weights_sha256: str, exact: bool) -> dict[str, Any]:
        """`exact`: whether every change of the mesh so far kept its promise of the same bits."""
        if self._open is not None:
            self._finish_recovery(self._clock())
        summary = build_summary(
            losses_hex=self.metrics.losses_hex(),
            weights_sha256=weights_sha256,
            samples_sha256=samples_digest(self.folder),
            goodput=self._goodput.ratio(self._clock()),
            exact=exact and self.same_environment and all(recovery["exact"] for recovery in self.recoveries),
            generations=self.generations,
            recoveries=self.recoveries,
        )
        write_summary(self.folder, summary)
        draw_run(self.folder, self.recoveries)
        return summary

    def take_lines(self, after: int) -> list[str]:
        """What happened, one line each, from index `after` on."""
        return self._lines[after:]

    def unfired(self) -> list[Fault]:
        return [fault for index, fault in enumerate(self._run.faults) if index not in self.fired]

    # ------------------------------------------------------------ after a restart

    def recall(self, line: Mapping[str, Any]) -> None:
        """Take back what an earlier coordinator wrote in the journal."""
        for order in [c for c in line.get("commands", ()) if c["type"] == "Build"][:1]:
            self.begun(order["step"], (order["term"], order["generation"]))
        match line.get("note"):
            case "fault":
                self.fired[line["index"]], self.fired_by[line["index"]] = line["now"], line["worker"]
                self._open_faults.append(line["index"])
            case "worker":
                self.pids[line["worker"]] = line["pid"]
                self._environments[line["worker"]] = line["environment"]
            case "generation":
                self.generations.append({k: line[k] for k in ("term", "generation", "mesh", "reason")})
                self._seen_change = (line["term"], line["generation"], True)
            case "recovery":
                self.recoveries.append(line["recovery"])
                self._lines.append(recovery_line(line["recovery"]))
                self._open_faults.clear()
                self._open = None
            case "resumed":
                self._open = dict(line["recovery"])
                self._open_faults.clear()


def merged(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """One recovery of two, the second of which struck before a step had committed after the first."""
    return {
        **second,
        "faults": first["faults"] + second["faults"],
        "cause": f"{first['cause']}; {second['cause']}",
        "detect_s": first["detect_s"] + second["detect_s"],
        "close_s": first["close_s"] + second["close_s"],
        "heal_s": first["heal_s"] + second["heal_s"],
        "steps_undone": max(first["steps_undone"], second["steps_undone"]),
        "steps_rerun": max(first["steps_rerun"], second["steps_rerun"]),
        "survivor_pids_kept": first["survivor_pids_kept"] and second["survivor_pids_kept"],
        "exact": first["exact"] and second["exact"],
        "_struck": first["_struck"],
    }


def samples_text(limbs: Sequence[float]) -> str:
    """A step's consumed-samples digest: two 64-bit sums in hexadecimal."""
    low_a, high_a, low_b, high_b = (int(limb) for limb in limbs)
    return f"{(low_a + (high_a << 32)) % 2**64:016x}{(low_b + (high_b << 32)) % 2**64:016x}"


def samples_digest(folder: Path) -> str:
    """sha256 over the consumed-samples digests of all committed steps, in order."""
    total = hashlib.sha256()
    for line in read_metrics(folder):
        total.update(f"{line['step']}:{line['samples']}\n".encode())
    return total.hexdigest()
