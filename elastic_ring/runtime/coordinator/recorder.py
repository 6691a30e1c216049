"""Records what happens in a run: committed steps in metrics.jsonl, and facts in the journal.

No decisions here. What a restarted coordinator needs is a fact (`control.facts`). `run_files` writes status and
summary.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from elastic_ring.config import RunConfig
from elastic_ring.control.decisions.detectors import Detectors, StepMeasured
from elastic_ring.control.decisions.memory_ladder import CHANGING_BITS
from elastic_ring.control.facts import (
    BatchesLeftOut,
    CheckpointMissed,
    CheckpointWritten,
    CompiledLate,
    CorpusLengthened,
    Fact,
    GenerationBegan,
    LossSpiked,
    ReliefsChanged,
    ResumedFrom,
    StartStage,
    StepSkipped,
    WrongResult,
)
from elastic_ring.control.messages import (
    Build,
    Checkpoint,
    Command,
    Event,
    MemberFailed,
    MemoryTight,
    StragglerFound,
    Vote,
)
from elastic_ring.control.placement.coverage import covered, describe
from elastic_ring.control.state import (
    Building,
    Change,
    Closing,
    Forming,
    State,
)
from elastic_ring.costs import MOST_SHARES
from elastic_ring.monitor.goodput import Goodput, Stage, build_stages, time_by_part
from elastic_ring.monitor.journal import Retried
from elastic_ring.monitor.metrics import CheckpointEvent, read_status
from elastic_ring.monitor.metrics_log import MetricsLog
from elastic_ring.runtime.coordinator.folds.recovery_log import RecordFact, RecoveryLog, Timings
from elastic_ring.runtime.coordinator.folds.run_totals import Live, PublishedSteps, RunTotals
from elastic_ring.runtime.coordinator.run_spec import Clock
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
from elastic_ring.state.storage.backend import ONCE
from elastic_ring.train.vote import listed

log = logging.getLogger(__name__)

WAIT_TOLD_S = 30.0
MOST_COUNTED = 1000  # steps


@dataclass(frozen=True)
class Begin:
    """The beginning of an attempt. `first_step`: its goodput leaves earlier steps out. `identity`: of the run, its
    checkpoints and submissions. `planned`: the forecast, which the journal's end has beside the measured figures."""

    started_s: float = 0.0
    first_step: int = 0
    identity: str = ""
    planned: Mapping[str, float] = field(default_factory=dict)


class RunRecorder:
    """The records of one run. `record` brings a fact into the journal; `clock` and `term` are the coordinator's;
    `retries` writes steps again that the folder refuses."""

    def __init__(
        self, run: RunConfig, record: RecordFact, clock: Clock, retries: Retried = ONCE, term: int = 0
    ) -> None:
        self._run, self._record, self._clock = run, record, clock
        self.live, self.now = Live(), clock.whole
        self.begin, self.steps, self.metrics = Begin(), PublishedSteps(), MetricsLog(run.folder, retries)
        self.totals, self.recoveries = RunTotals(), RecoveryLog(run, record, term)
        self.detectors = Detectors(run)
        self.goodput = Goodput(0.0)
        self.newest_vote: Vote | None = None
        self._attempt_began_at: float | None = None  # of the step that runs now; None where an earlier coordinator knew
        self._alive_at: float | None = None  # when an earlier coordinator last wrote the status
        self._reported: dict[str, object] = {}  # the last report of each kind: its subject, or when it was made

    def open(self, begin: Begin) -> None:
        self.begin = begin
        self.detectors.checkpoints.restart(begin.first_step)
        status = read_status(self._run.folder) or {}
        self._alive_at, lost_s = status.get("updated_at"), status.get("lost_s")
        self.metrics.open(begin.identity)
        started_s = begin.started_s if self._clock.is_continuous else None
        self.goodput = Goodput(started_s, self.metrics.table.rows.total("step_s", begin.first_step), lost_s)

    def is_first(self, kind: str, subject: object) -> bool:
        """True for a report of a kind whose subject differs from the last one's, as many may report the same."""
        before, self._reported[kind] = self._reported.get(kind), subject
        return before != subject

    # ------------------------------------------------------------ what happens

    def begin_build(self, commands: Sequence[Command]) -> Build | None:
        """The new build among the commands, if there is one. Where its members begin at a checkpoint or copies, records
        of later steps are undone: these run again."""
        build = next((command for command in commands if isinstance(command, Build)), None)
        if build is None or not self.steps.begun(build.step, (build.term, build.generation)):
            return None
        if not build.goes_back:
            return build
        undone_s = self.metrics.table.rows.total("step_s", max(build.step, self.begin.first_step))
        if undone := self.metrics.go_back(build.step, (build.term, build.generation)):
            self.goodput.lost.add("undone", undone_s)
            self.goodput.undone(undone_s)
            self.steps.went_back()
            if self.newest_vote is not None and self.newest_vote.step >= build.step:
                self.newest_vote = None
            self.recoveries.say(f"back to step {build.step}: {undone} recorded step(s) run again")
        return build

    def checkpoint(self, checkpoint: CheckpointEvent) -> None:
        """A checkpoint counts."""
        self.tell(CheckpointWritten(dict(checkpoint), round(time.time(), 3)))
        log.info(
            "checkpoint of step %d: %.1f MB in %.2f s, for %.3f s of which training waited: %s",
            checkpoint["step"],
            checkpoint["bytes"] / 1e6,
            checkpoint["total_s"],
            checkpoint["blocked_s"],
            checkpoint["path"],
        )

    def checkpoint_failed(self, step: int, reason: str) -> None:
        """A checkpoint of a step was due, and does not count."""
        self.tell(CheckpointMissed(step, reason))
        self.recoveries.say(f"no checkpoint of step {step}: {reason}; training goes on")

    def publish(self, published: Sequence[Notice]) -> list[StepRecord]:
        """Take notices, and records of committed steps, in order. Returns the records of new steps."""
        for notice in published:
            self._take_notice(notice)
        new = list[StepRecord]()
        records = [notice for notice in published if isinstance(notice, StepRecord)]
        for record in self.steps.take(records, self.metrics.last_step):
            new.append(record)
            self._committed(record)
        return new

    def detect(self, record: StepRecord, state: State, host_share: float) -> list[StragglerFound | MemoryTight]:
        """Show a committed step to the core's detectors and record their facts. Returns their events for the core.
        `host_share`: of the memory of the fullest node."""
        metrics, outcome, events = record.metrics, record.outcome, list[StragglerFound | MemoryTight]()
        measured = StepMeasured(
            metrics.step,
            outcome.vote.membership_id,
            metrics.mesh,
            self.now(),
            metrics.step_s,
            metrics.data_wait_s,
            outcome.work_s,
            outcome.memory_shares,
            host_share,
            record.checkpoint_interval_s,
        )
        for finding in self.detectors.observe(measured, state):
            if isinstance(finding, StragglerFound | MemoryTight):
                events.append(finding)
            else:
                self._report(finding, finding.text)
        checkpoints = self.detectors.checkpoints
        if num_intervals := checkpoints.take_report():
            self.recoveries.say(
                f"no checkpoint for {num_intervals} intervals, since step {checkpoints.step}; a failure "
                "of all holders of a shard, or of the cluster, goes back to there"
            )
        return events

    def _take_notice(self, notice: Notice) -> None:
        match notice:
            case StorageAwaited(text):
                now, reported_at = time.monotonic(), self._reported.get("waits")
                # Many wait at once; the first report stands for all.
                if not isinstance(reported_at, float) or now - reported_at >= WAIT_TOLD_S:
                    self._reported["waits"] = now
                    self.recoveries.say(text)
            case Validated(step, measured, took_s, membership_id):
                if self.steps.counts(step + 1, membership_id):  # else it came late, and the run has gone back since
                    self.metrics.validated(step, dict(measured))
                self.goodput.lost.add("validation", took_s)
            case NotRepeatable(step, reason):
                self.recoveries.bits.not_repeatable(step, reason)
            case LeftOut():
                text = (
                    f"from step {notice.step} on the order leaves out {notice.num_batches} batch(es): "
                    f"sequences {listed(notice.sequences)}"
                )
                self._report(BatchesLeftOut(notice.step, notice.num_batches, list(notice.sequences), text), text)
            case Copied():
                self.live = replace(self.live, copied=notice)
            case Compiled():
                self.tell(CompiledLate(notice.step, notice.worker, list(notice.names), notice.num_before))

    def stages(self, process: str, stages: Iterable[Stage]) -> None:
        """The stages of a process on its way to the first step, or to being a spare."""
        for stage, unix_s, took_s in stages:
            self.tell(StartStage(process, stage, round(unix_s, 3), round(took_s, 3)))

    def built(self, worker: str, timings: Timings) -> None:
        """A member is in its place; noted where no step has been committed with it yet."""
        if self.metrics.last_step < self.begin.first_step and "begun_unix_s" in timings:
            self.stages(worker, build_stages(timings))

    def _committed(self, record: StepRecord) -> None:
        metrics, step, now = record.metrics, record.metrics.step, self.now()
        began, self._attempt_began_at = self._attempt_began_at, now
        if step == self.begin.first_step and began:
            self.stages("run", [("first step", began, now - began)])
        self.metrics.record(metrics)
        self._report_incidents(record)
        if any(record.outcome.work_s):
            self.live = replace(self.live, work_s=record.outcome.work_s)
        if record.gpu_memory:
            peak_bytes = max(self.live.peak_gpu_bytes, record.gpu_memory["peak"])
            self.live = replace(self.live, gpu_memory=record.gpu_memory, peak_gpu_bytes=peak_bytes)
        self.goodput.committed(metrics.step_s)
        self.newest_vote = record.outcome.vote
        self.recoveries.committed(step, now)

    def _report_incidents(self, record: StepRecord) -> None:
        """Reports a loss spike or skipped step, a wrong result, a frozen host, and the first experts in parts."""
        step, outcome = record.metrics.step, record.outcome
        if record.metrics.expert_parts and self.is_first("expert parts", True):
            self.recoveries.say(
                f"step {step}: one rank would have had more than {MOST_SHARES:g} times its fair share of "
                "tokens for its experts, so they come in parts there, which takes longer"
            )
        if outcome.spike:
            self._report(LossSpiked(step, outcome.spike, record.remark), record.remark)
        elif record.remark:
            self._report(StepSkipped(step, record.remark), record.remark)
        if outcome.finding:
            self.found_wrong(outcome.finding.describe(step))
        if record.frozen_s:
            self.goodput.lost.add("frozen", record.frozen_s)
            self.recoveries.say(
                f"step {step}: for {record.frozen_s:.0f} s nothing ran on the host of "
                "rank 0 (paused, suspended or stopped); that is no time of the step"
            )

    def member_failed(self, failure: MemberFailed) -> None:
        """A member's step broke off. All members report a wrong result, and a loss spike or a streak of skipped steps
        for which everyone is to go back; it counts once."""
        self.recoveries.member_failed(failure)
        step, membership_id = failure.step, (failure.term, failure.generation)
        if failure.kind == "corrupt" and self.is_first("wrong", membership_id):
            self.found_wrong(failure.detail, failure.accused)
        if failure.kind == "back" and self.is_first("back", membership_id):
            text = f"loss spike in step {step}: {failure.detail}; the run goes back to before it"
            self._report(LossSpiked(step, "back", text), text)

    def found_wrong(self, text: str, workers: Sequence[str] = ()) -> None:
        """Ranks that must agree do not. `workers`: those that computed wrongly and are replaced."""
        self.tell(WrongResult(text, list(workers)))
        self.recoveries.say(f"wrong result: {text}")

    def look(self, state: State) -> None:
        """Record a new generation, and a recovery if it was one."""
        self.goodput.lost.look(loss_cause(state), self.now())
        change, generations = state.last_change, self.totals.generations
        if change is None or change.resumed_at is None:
            return
        if generations and (generations[-1].term, generations[-1].generation) == (change.term, change.generation):
            return
        resumed_at = self._clock.whole_of(change.resumed_at)
        change = replace(change, noticed_at=self._clock.whole_of(change.noticed_at), resumed_at=resumed_at)
        mesh = {"dp": change.mesh.dp, "cp": change.mesh.cp}
        self.tell(GenerationBegan(change.term, change.generation, mesh, change.reason))
        self._look_at_memory(state, change)
        for version in state.corpus[self.totals.num[CorpusLengthened] :]:
            self.tell(CorpusLengthened(version.first_step, version.uri, version.digest))
            self.recoveries.say(f"from step {version.first_step} on the corpus is {version.uri}")
        if change.restored is not None and change.previous_mesh is None:
            self._resumed(change.restored)
        costs = covered(state)
        if change.previous_mesh is None:
            self.recoveries.say(describe(costs))
        self.recoveries.compare_members(change.mesh, change.members)
        if change.previous_mesh is not None and (not change.planned or change.drained):
            self.recoveries.begin(change, self.metrics.last_step + 1, self._attempt_began_at)
        elif change.previous_mesh is not None:
            self.goodput.lost.add("resize", resumed_at - change.noticed_at)
        self._attempt_began_at = max(self._attempt_began_at or resumed_at, resumed_at)

    def _look_at_memory(self, state: State, change: Change) -> None:
        """Record a relief of the memory ladder more or less than in the last generation."""
        ladder, changes = state.memory, self.totals.reliefs
        before = len(changes[-1].reliefs) if changes else 0
        if ladder.num_reliefs == before:
            return
        reliefs = list(state.options.memory_reliefs[: ladder.num_reliefs])
        reason = ladder.why if ladder.num_reliefs > before else ""
        self.tell(ReliefsChanged(change.step, change.generation, ladder.num_shortages, reliefs, reason))
        self.recoveries.say(f"memory ladder in force from step {change.step}: {', '.join(reliefs) or 'none'}")
        if other := [name for name in reliefs if name in CHANGING_BITS]:
            self.recoveries.bits.not_repeatable(change.step, f"reliefs of the memory ladder: {', '.join(other)}")

    def _resumed(self, restored: Checkpoint) -> None:
        """This attempt began at a checkpoint: the newest that verified, which may be older than the one first tried."""
        uri, folder = located(self._run.storage_uri, restored.folder)
        step, path = restored.step, f"{uri.rstrip('/')}/{folder}"
        points = self.totals.resumed_from
        self.tell(ResumedFrom([*map(dict, points[:-1]), {"step": step, "path": path}]))
        if points and points[-1]["step"] != step:
            self.recoveries.say(f"resumed at step {step} from {path}: newer ones do not verify")
        log.info("resumed at step %d from %s", step, path)

    def since_saved_s(self, state: State) -> float:
        """What the newest steps took that neither copies nor a checkpoint have."""
        saved = [checkpoint.step for checkpoint in state.checkpoints[-1:]]
        saved += [self.live.copied.step] if self.live.copied is not None else []
        return self.metrics.table.rows.total("step_s", max([self.metrics.last_step - MOST_COUNTED, *saved, 0]))

    def coordinator_back(self) -> None:
        """Record a coordinator restart that training did not notice."""
        alive_at = self._alive_at if self._clock.is_continuous else None
        self.recoveries.coordinator_back(self.now(), self.metrics.last_step + 1, alive_at)

    def time_s(self, now: float) -> dict[str, float]:
        """The time of this attempt by part."""
        blocked_s = math.fsum(checkpoint["blocked_s"] for checkpoint in self.totals.checkpoints)
        kept_s, total_s = self.goodput.kept_s, self.goodput.total_s(now)
        return time_by_part(kept_s, total_s, self.goodput.lost.lost_s, blocked_s, self.recoveries.records)

    # ------------------------------------------------------------ after a restart

    def recall(self, event: Event | Fact, commands: Sequence[Command]) -> None:
        """Restore from an event of an earlier coordinator's journal."""
        self.begin_build(commands)  # it may have died before it noted that
        if isinstance(event, Fact):
            self._saw(event)
            self.recoveries.saw(event)
            if not self._clock.is_continuous:
                self.recoveries.forget_times()

    def _report(self, fact: Fact, text: str) -> None:
        """A fact whose text the driver shows, too."""
        self.tell(fact)
        self.recoveries.say(text)

    def tell(self, fact: Fact) -> None:
        """Journal a new fact and fold it."""
        self._record(fact)
        self._saw(fact)

    def _saw(self, fact: Fact) -> None:
        self.totals.saw(fact)
        self.detectors.learn(fact)


def loss_cause(state: State) -> str:
    """The one of `goodput.LOSS_CAUSES` that takes a run's time now, as far as its phase shows it; else empty."""
    phase = state.phase
    if isinstance(phase, Closing) and phase.waiting:
        return "stalled"
    if isinstance(phase, Forming):
        room = sum(node.num_slots for node in state.nodes.values() if not node.draining)
        fits = room >= state.options.scaling.mesh.size
        return "waiting" if not fits else "startup" if phase.incident is None else ""
    return "startup" if isinstance(phase, Building) and phase.incident.base is None else ""
