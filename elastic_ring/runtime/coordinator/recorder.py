"""Writes a run's records to its folder: metrics, generations, status, summary; `recovery_log` has the recoveries.

No decisions here. What a restarted coordinator needs is a fact of the journal (`control.facts`).
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from elastic_ring.config import RunConfig
from elastic_ring.control.decisions.detectors import Detectors, StepMeasured
from elastic_ring.control.decisions.memory_ladder import CHANGING_BITS
from elastic_ring.control.facts import (
    BatchesLeftOut,
    CheckpointMissed,
    CheckpointWritten,
    CompiledLate,
    CorpusLengthened,
    DataAwaited,
    Fact,
    ForecastSeen,
    GenerationBegan,
    LossSpiked,
    MemoryNearlyFull,
    RankStraggled,
    ReliefsChanged,
    ResumedFrom,
    StartStage,
    StepSkipped,
    WrongResult,
)
from elastic_ring.control.messages import Build, Checkpoint, Command, Event, MemoryTight, StragglerFound, Vote
from elastic_ring.control.placement.coverage import covered, said
from elastic_ring.control.state import (
    Building,
    Change,
    Closing,
    Forming,
    State,
    end_step,
    members,
    mesh_of,
    phase_name,
    spares,
)
from elastic_ring.costs import MOST_SHARES
from elastic_ring.monitor.goodput import Goodput, seen_of, time_by_part
from elastic_ring.monitor.journal import Retried
from elastic_ring.monitor.json_files import readable_json
from elastic_ring.monitor.metrics import (
    SUMMARY_NAME,
    CheckpointEvent,
    MetricsLog,
    ResumePoint,
    Summary,
    missing_steps,
    read_metrics,
    write_json,
)
from elastic_ring.monitor.plot import draw_run
from elastic_ring.monitor.start_times import Stage, build_stages
from elastic_ring.runtime.coordinator.driver_feed import PublishedSteps
from elastic_ring.runtime.coordinator.folds.recovery_log import RecordFact, RecoveryLog
from elastic_ring.runtime.coordinator.folds.run_totals import RunTotals
from elastic_ring.runtime.coordinator.status_file import StatusFile
from elastic_ring.runtime.notices import (
    Compiled,
    Copied,
    LeftOut,
    Notice,
    NotRepeatable,
    StepRecord,
    StorageAwaited,
    Validated,
)
from elastic_ring.state.checkpoints.manifest import located
from elastic_ring.state.storage.backend import ONCE, Retries
from elastic_ring.train.guards import listed

log = logging.getLogger(__name__)

WAIT_TOLD_S = 30.0


class NodeFigures:
    """What the nodes' agents last said; nothing where nobody listens to them (`node_monitor` does)."""

    def progress(self, worker: str) -> Mapping[str, Any]:
        """A worker's present activity, and its process's memory."""
        return {}

    def pressure(self) -> Mapping[str, float]:
        """How much the node that waits most waits for memory."""
        return {}

    def host_share(self) -> float:
        """How full the fullest node is."""
        return 0.0

    def health(self) -> Mapping[str, Mapping[str, Any]]:
        """Each node's network counters and GPUs by its address, as `agent.health` reads them."""
        return {}


@dataclass(frozen=True)
class Begin:
    """`first_step`: where this attempt began; its goodput says nothing of the steps before. `identity`: the run's,
    which its checkpoints and submissions share. `planned`: what was forecast of it; the journal's end has it beside
    what was seen."""

    started_s: float = 0.0
    first_step: int = 0
    identity: str = ""
    planned: Mapping[str, float] = field(default_factory=dict)


@dataclass
class Latest:
    """What the newest steps said beside their metrics; the next ones say it again to a new coordinator.

    `work_s`: of each rank for one sequence, in the newest step that measured it. `gpu_memory`: of global rank 0, by
    kind. `copied`: the newest copies in peers' memory that are complete. `attempt_began_at`: the step that runs now.
    """

    vote: Vote | None = None
    gpu_memory: Mapping[str, int] = field(default_factory=dict)
    peak_gpu_bytes: int = 0
    work_s: Sequence[float] = ()
    copied: Copied | None = None
    attempt_began_at: float = 0.0


Reported = BatchesLeftOut | DataAwaited | LossSpiked | MemoryNearlyFull | RankStraggled | StepSkipped
"""Facts with a text that the driver shows, too."""


class RunRecorder:
    """The records of one run. `record` brings a fact into the journal; `clock` is the coordinator's; `retries` writes
    steps again that the folder refuses."""

    def __init__(self, run: RunConfig, record: RecordFact, clock: Callable[[], float], retries: Retried = ONCE) -> None:
        self._run, self._record, self._clock = run, record, clock
        self.nodes = NodeFigures()
        self.begin, self.latest, self.steps = Begin(), Latest(), PublishedSteps()
        self.metrics, self.status = MetricsLog(run.folder, retries), StatusFile(run)
        self.totals, self.recoveries = RunTotals(), RecoveryLog(run, record)
        self.detectors = Detectors(run)
        self.goodput = Goodput(0.0)
        self._said_at: dict[str, Any] = {}  # what many say at once, and when, or of which members, it was said last

    def open(self, begin: Begin) -> None:
        self.begin = begin
        self.detectors.checkpoints.restart(begin.first_step)
        lost_s = self.status.open().get("lost_s")
        self.metrics.open(begin.identity)
        kept_s = {step: s for step, s in self.metrics.step_times_s().items() if step >= begin.first_step}
        self.goodput = Goodput(begin.started_s, kept_s, lost_s)

    def is_first(self, what: str, of: Any) -> bool:
        """Whether nobody has said `what` of the same before."""
        before, self._said_at[what] = self._said_at.get(what), of
        return bool(before != of)

    # ------------------------------------------------------------ what happens

    def begin_build(self, commands: Sequence[Command]) -> Build | None:
        """The new build among the commands, if there is one. Where its members begin at a checkpoint or copies, records
        of later steps are undone: these run again."""
        build = next((command for command in commands if isinstance(command, Build)), None)
        if build is None or not self.steps.begun(build.step, (build.term, build.generation)):
            return None
        undone = self.metrics.go_back(build.step, (build.term, build.generation)) if build.goes_back else 0
        if undone:
            self.goodput.lost.add("undone", self.goodput.undone_s(build.step))
            self.goodput.undone(build.step)
            self.steps.went_back()
            if self.latest.vote is not None and self.latest.vote.step >= build.step:
                self.latest.vote = None
            self.recoveries.say(f"back to step {build.step}: {undone} recorded step(s) run again")
        return build

    def checkpoint(self, checkpoint: CheckpointEvent) -> None:
        """A checkpoint counts."""
        self._tell(CheckpointWritten(dict(checkpoint), round(time.time(), 3)))
        log.info(
            "checkpoint of step %d: %.1f MB in %.2f s, for %.3f s of which training waited: %s",
            checkpoint["step"],
            checkpoint["bytes"] / 1e6,
            checkpoint["total_s"],
            checkpoint["blocked_s"],
            checkpoint["path"],
        )

    def checkpoint_failed(self, step: int, why: str) -> None:
        """A checkpoint of a step was due, and does not count."""
        self._tell(CheckpointMissed(step, why))
        self.recoveries.say(f"no checkpoint of step {step}: {why}; training goes on")

    def publish(self, published: Sequence[Notice]) -> list[StepRecord]:
        """Takes notices, and records of committed steps, in order; recorded steps change nothing. Returns the records
        of new steps."""
        for notice in published:
            self._noticed(notice)
        new = list[StepRecord]()
        records = [notice for notice in published if isinstance(notice, StepRecord)]
        for record in self.steps.take(records, self.metrics.last_step):
            new.append(record)
            self._committed(record)
        return new

    def detect(self, record: StepRecord, state: State) -> list[StragglerFound | MemoryTight]:
        """Shows a committed step to the core's detectors; records their facts. Returns their events for the core."""
        metrics, outcome, events = record.metrics, record.outcome, list[StragglerFound | MemoryTight]()
        measured = StepMeasured(
            metrics.step,
            outcome.vote.membership_id,
            metrics.mesh,
            self._clock(),
            metrics.step_s,
            metrics.data_wait_s,
            outcome.work_s,
            outcome.memory_shares,
            self.nodes.host_share(),
            record.checkpoint_interval_s,
        )
        for finding in self.detectors.observe(measured, state):
            if isinstance(finding, StragglerFound | MemoryTight):
                events.append(finding)
            else:
                self._report(finding)
        checkpoints = self.detectors.checkpoints
        if num_intervals := checkpoints.take_report():
            self.recoveries.say(
                f"no checkpoint for {num_intervals} intervals, since step {checkpoints.step}; a loss "
                "of all holders of a shard, or of the cluster, goes back to there"
            )
        return events

    def _noticed(self, notice: Notice) -> None:
        match notice:
            case StorageAwaited(text):
                self.waits(text)
            case Validated(step, measured, took_s):
                self.metrics.validated(step, dict(measured))
                self.goodput.lost.add("validation", took_s)
            case NotRepeatable(step, reason):
                self.recoveries.bits.not_repeatable(step, reason)
            case LeftOut():
                self._left_out(notice)
            case Copied():
                self.latest.copied = notice
            case Compiled():
                self._tell(CompiledLate(notice.step, notice.worker, list(notice.names), notice.num_before))

    def stages(self, who: str, stages: Iterable[Stage]) -> None:
        """What `who` did on its way to the first step, or to being a spare."""
        for what, unix_s, took_s in stages:
            self._tell(StartStage(who, what, round(unix_s, 3), round(took_s, 3)))

    def built(self, worker: str, timings: Mapping[str, Any]) -> None:
        """A member is in its place; noted where no step has been committed with it yet."""
        if self.metrics.last_step < self.begin.first_step and "begun_unix_s" in timings:
            self.stages(worker, build_stages(timings))

    def _committed(self, record: StepRecord) -> None:
        metrics, step, now = record.metrics, record.metrics.step, self._clock()
        began, self.latest.attempt_began_at = self.latest.attempt_began_at, now
        if step == self.begin.first_step and began:
            self.stages("run", [("first step", began, now - began)])
        self.metrics.record(metrics)
        self._report_incidents(record)
        self.latest.work_s = record.outcome.work_s if any(record.outcome.work_s) else self.latest.work_s
        if record.gpu_memory:
            self.latest.gpu_memory = record.gpu_memory
            self.latest.peak_gpu_bytes = max(self.latest.peak_gpu_bytes, record.gpu_memory["peak"])
        self.goodput.committed(step, metrics.step_s)
        self.latest.vote = record.outcome.vote
        self.recoveries.committed(step, now)

    def waits(self, told: str) -> None:
        """Somebody waits for storage. Many do at once, so one speaks for all."""
        now = time.monotonic()
        if now - self._said_at.get("waits", -WAIT_TOLD_S) >= WAIT_TOLD_S:
            self._said_at["waits"] = now
            self.recoveries.say(told)

    def _report_incidents(self, record: StepRecord) -> None:
        """Reports a loss spike or skipped step, a wrong result, a frozen host, and the first experts in parts."""
        step, outcome = record.metrics.step, record.outcome
        if record.metrics.expert_parts and self.is_first("expert parts", True):
            self.recoveries.say(
                f"step {step}: one rank would have had more than {MOST_SHARES:g} times its fair share of "
                "tokens for its experts, so they come in parts there, which takes longer"
            )
        if outcome.spike:
            self._report(LossSpiked(step, outcome.spike, record.remark))
        elif record.remark:
            self._report(StepSkipped(step, record.remark))
        if outcome.finding:
            self.found_wrong(outcome.finding.told(step))
        if record.frozen_s:
            self.goodput.lost.add("frozen", record.frozen_s)
            self.recoveries.say(
                f"step {step}: for {record.frozen_s:.0f} s nothing ran on the host of "
                "rank 0 (paused, suspended or stopped); that is no time of the step"
            )

    def goes_back(self, step: int, why: str, membership_id: tuple[int, int]) -> None:
        """A spike, or a streak of skipped steps, for which everyone is to go back; every member says so."""
        if self.is_first("back", membership_id):
            self._report(LossSpiked(step, "back", f"loss spike in step {step}: {why}; the run goes back to before it"))

    def _left_out(self, left: LeftOut) -> None:
        """Batches that the order leaves out from a step on."""
        told = (
            f"from step {left.step} on the order leaves out {left.num_batches} batch(es): "
            f"sequences {listed(left.sequences)}"
        )
        self._report(BatchesLeftOut(left.step, left.num_batches, list(left.sequences), told))

    def broke_off_wrong(self, told: str, membership_id: tuple[int, int], workers: Sequence[str]) -> None:
        """As `found_wrong`, of a step that is not applied: every member of `membership_id` says so; it counts once."""
        if self.is_first("wrong", membership_id):
            self.found_wrong(told, workers)

    def found_wrong(self, told: str, workers: Sequence[str] = ()) -> None:
        """Ranks that must agree do not. `workers`: who computed wrongly and is replaced."""
        self._tell(WrongResult(told, list(workers)))
        self.recoveries.say(f"wrong result: {told}")

    def look(self, state: State) -> None:
        """Record a new generation, and a recovery if it was one."""
        self.goodput.lost.look(lost_to(state), self._clock())
        change, known = state.last_change, self.totals.generations[-1:]
        if change is None or change.resumed_at is None:
            return
        if [(began.term, began.generation) for began in known] == [(change.term, change.generation)]:
            return
        mesh = {"dp": change.mesh.dp, "cp": change.mesh.cp}
        self._tell(GenerationBegan(change.term, change.generation, mesh, change.reason))
        self._look_at_memory(state, change)
        self._look_at_corpus(state)
        if change.restored is not None and change.previous_mesh is None:
            self._resumed(change.restored)
        costs = covered(state)
        if change.previous_mesh is None and len(costs) > 1:  # there is more than one host
            self.recoveries.say(said(costs))
        self.recoveries.compare_members(change.mesh, change.members)
        if change.previous_mesh is not None and (not change.planned or change.drained):
            self.recoveries.begin(change, self.metrics.last_step + 1, self.latest.attempt_began_at)
        elif change.previous_mesh is not None:
            self.goodput.lost.add("resize", change.resumed_at - change.noticed_at)
        self.latest.attempt_began_at = max(self.latest.attempt_began_at, change.resumed_at)

    def _look_at_memory(self, state: State, change: Change) -> None:
        """Record a relief of the memory ladder more or less than in the last generation."""
        ladder, known = state.memory, self.totals.reliefs
        before = len(known[-1].reliefs) if known else 0
        if ladder.num_reliefs == before:
            return
        reliefs = list(state.options.memory_reliefs[: ladder.num_reliefs])
        why = ladder.why if ladder.num_reliefs > before else ""
        self._tell(ReliefsChanged(change.step, change.generation, ladder.num_shortages, reliefs, why))
        self.recoveries.say(f"memory ladder in force from step {change.step}: {', '.join(reliefs) or 'none'}")
        if other := [name for name in reliefs if name in CHANGING_BITS]:
            self.recoveries.bits.not_repeatable(change.step, f"reliefs of the memory ladder: {', '.join(other)}")

    def _look_at_corpus(self, state: State) -> None:
        """Record a longer manifest with its first step."""
        for version in state.corpus[self.totals.num_versions :]:
            self._tell(CorpusLengthened(version.first_step, version.uri, version.digest))
            self.recoveries.say(f"from step {version.first_step} on the corpus is {version.uri}")

    def _resumed(self, restored: Checkpoint) -> None:
        """This attempt began at a checkpoint: the newest that verified, which may be older than the one first tried."""
        uri, folder = located(self._run.storage_uri, restored.folder)
        found: ResumePoint = {"step": restored.step, "path": f"{uri.rstrip('/')}/{folder}"}
        known = self.totals.resumed_from
        planned = known[-1] if known else None
        self._tell(ResumedFrom([dict(one) for one in (*known[:-1], found)]))
        if planned and planned["step"] != found["step"]:
            self.recoveries.say(f"resumed at step {found['step']} from {found['path']}: newer ones do not verify")
        log.info("resumed at step %d from %s", found["step"], found["path"])

    def coordinator_back(self, now: float) -> None:
        """Record a coordinator restart that training did not notice."""
        self.recoveries.coordinator_back(now, self.metrics.last_step + 1, self.status.alive_at_s)

    def time_s(self, now: float) -> dict[str, float]:
        """The time of this attempt by part."""
        blocked_s = math.fsum(checkpoint["blocked_s"] for checkpoint in self.totals.checkpoints)
        kept_s, total_s = self.goodput.kept_s, self.goodput.total_s(now)
        return time_by_part(kept_s, total_s, self.goodput.lost.lost_s, blocked_s, self.recoveries.records)

    # ------------------------------------------------------------ files

    def write_status(self, state: State, *, force: bool = False, end: Mapping[str, Any] | None = None) -> None:
        """As `StatusFile.write`."""
        self.status.write(partial(self._status, state), force, end)

    def _status(self, state: State) -> dict[str, Any]:
        nodes = {w.worker: w.node for w in state.workers.values()}
        mesh = mesh_of(state)

        def person(worker: str) -> dict[str, Any]:
            known = {"worker": worker, "node": nodes.get(worker, ""), "pid": self.recoveries.bits.pid_of(worker)}
            return {**known, **self.nodes.progress(worker)}

        return {
            "run": self._run.name,
            "phase": phase_name(state),
            "term": state.term,
            "generation": state.generation,
            "mesh": {"dp": mesh.dp, "cp": mesh.cp} if mesh else {"dp": 0, "cp": 0},
            "step": self.metrics.last_step + 1,
            "total_steps": end_step(state),
            "validation": validation.to_json() if (validation := self.metrics.newest.validation) else {},
            "resumed_from": [dict(one) for one in self.totals.resumed_from],
            "members": [{"global_rank": rank, **person(w)} for rank, w in enumerate(members(state))],
            "spares": [person(w) for w in spares(state)],
            "covered": covered(state),
            "recoveries": [recovery.to_json() for recovery in self.recoveries.records[-20:]],
            "updated_unix_s": time.time(),
            "ended": False,
            "checkpoint_intervals_missed": self.detectors.checkpoints.num_intervals,
            "checkpoint_step": self.detectors.checkpoints.step,
            "data_wait_share": round(self.detectors.data.share, 3),
            "lost_s": {cause: round(s, 3) for cause, s in self.goodput.lost.lost_s.items()},
            "error": "",
            "end": {},
            "peak_gpu_bytes": self.latest.peak_gpu_bytes,
            "story": [list(pair) for pair in state.story],
        }

    def write_summary(
        self, weights_sha256: str, exact: bool, stopped: str = "", planned_steps: int | None = None
    ) -> dict[str, Any]:
        """`exact`: whether every change of the mesh so far kept its promise of the same bits. `stopped`: why a
        callback has stopped the run. `planned_steps`: those of the settings.

        One that is there was written by an earlier coordinator of this attempt, and stands.
        """
        path = self._run.folder / SUMMARY_NAME
        if summary := readable_json(path):
            return summary
        self.recoveries.finish(self._clock())
        lines, uri = read_metrics(self._run.folder), self._run.storage_uri.rstrip("/")
        elsewhere = (one["step"] for one in self.totals.resumed_from if not one["path"].startswith(f"{uri}/"))
        begun = max(elsewhere, default=0)  # what another run's folder has, this one need not have
        missing = [step for step in missing_steps(lines, self.metrics.last_step + 1) if step >= begun]
        if missing:
            self.recoveries.say(
                f"{self.metrics.path} has no lines of {len(missing)} step(s), {missing[0]} to {missing[-1]}, that this "
                "run has trained: samples_sha256 and exact are null"
            )
        now, num_steps = self._clock(), self.metrics.last_step + 1
        exact = exact and not missing and self.recoveries.bits.are_promised
        summary = Summary(
            steps=num_steps,
            losses=self.metrics.losses_hex(),
            weights_sha256=weights_sha256,
            samples_sha256=None if missing else samples_digest(lines),
            goodput=self.goodput.ratio(now),
            exact=exact and all(recovery.exact for recovery in self.recoveries.records),
            generations=self.totals.generations,
            recoveries=self.recoveries.records,
            compilations_after_step_0=self.totals.num_compiled_late,
            skipped_steps=sum(bool(line["skipped"]) for line in lines),
            lost_workers=self.recoveries.num_lost(),
            resumed_from=self.totals.resumed_from,
            checkpoints=self.totals.checkpoints,
            memory=self.totals.reliefs,
            peak_gpu_bytes=self.latest.peak_gpu_bytes,
            time_s=self.time_s(now),
            identity=self.begin.identity,
            stopped=stopped,
            planned_steps=num_steps if planned_steps is None else planned_steps,
            validation=self.metrics.newest.validation,
        ).to_json()
        # Beside the deciding thread, and no longer than a checkpoint's files are waited for.
        retries = Retries(self._run.timeouts.storage_s, lambda text: self.recoveries.say(f"the summary {text}"))
        retries(lambda: write_json(path, summary, durable=True), lambda error: not isinstance(error, OSError))
        if self.begin.planned:
            self._tell(
                ForecastSeen(dict(self.begin.planned), seen_of(list(self.metrics.step_times_s().values()), summary))
            )
        draw_run(self._run.folder, summary["recoveries"], [one["step"] for one in self.totals.resumed_from])
        return summary

    def take_lines(self, after: int) -> list[str]:
        """What happened, one line each, from index `after` on."""
        return self.recoveries.lines[after:]

    # ------------------------------------------------------------ after a restart

    def recall(self, event: Event | Fact, commands: Sequence[Command]) -> None:
        """Restore from an event of an earlier coordinator's journal."""
        self.begin_build(commands)  # died before it noted that, maybe
        if isinstance(event, Fact):
            self._saw(event)
            self.recoveries.saw(event)

    def _report(self, fact: Reported) -> None:
        """A fact, whose text the driver shows, too."""
        self._tell(fact)
        self.recoveries.say(fact.text)

    def _tell(self, fact: Fact) -> None:
        self._record(fact)
        self._saw(fact)

    def _saw(self, fact: Fact) -> None:
        self.totals.saw(fact)
        self.detectors.learn(fact)


def lost_to(state: State) -> str:
    """Of `goodput.LOSS_CAUSES` what a run's time goes to now, where that shows in its phase."""
    phase = state.phase
    if isinstance(phase, Closing) and phase.waiting:
        return "stalled"
    if isinstance(phase, Forming):
        room = sum(node.num_slots for node in state.nodes.values() if not node.draining)
        fits = room >= state.options.scaling.mesh.size
        return "waiting" if not fits else "startup" if phase.incident is None else ""
    return "startup" if isinstance(phase, Building) and phase.incident.base is None else ""


def samples_digest(lines: Iterable[Mapping[str, Any]]) -> str:
    """sha256 over the consumed-samples digests of all committed steps, in order."""
    total = hashlib.sha256()
    for line in lines:
        total.update(f"{line['step']}:{line['samples']}\n".encode())
    return total.hexdigest()
