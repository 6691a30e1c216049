"""The coordinator: a detached Ray actor that runs the control core. Ray restarts it when it dies.

Events from workers, agents, Ray and the clock go into one queue. One thread takes them out, calls the pure core,
writes event and commands to the journal, then sends the commands. A restarted process claims a higher term, replays
the journal and asks all workers for their status. No decisions here.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, cast

import ray

from elastic_ring.config import CheckpointConfig, environment
from elastic_ring.control.capacity.scaling import can_save
from elastic_ring.control.capacity.worker_pool import vacant_nodes
from elastic_ring.control.coordination import Decision, advance, journal_line, next_deadline, replay, term_note
from elastic_ring.control.decisions import data_order
from elastic_ring.control.facts import Fact, ResumedFrom
from elastic_ring.control.messages import (
    CallbacksAnswered,
    CauseIds,
    CheckpointDue,
    CheckpointsKnown,
    CoordinatorStarted,
    CorpusGrew,
    CorpusRecalled,
    Event,
    Finalized,
    MemberFailed,
    NodeJoined,
    NodeLost,
    NodesListed,
    Published,
    Release,
    Report,
    Resumed,
    ScaleRequested,
    Tick,
    WorkerLost,
    WorkerReady,
    WorkerStarting,
    from_json,
)
from elastic_ring.control.phases import awaits_newest, is_newest_answer
from elastic_ring.control.placement.coverage import patience_s
from elastic_ring.control.state import Building, Ended, Reconnecting, Running, State, members, phase_name, waiting_for
from elastic_ring.errors import IllegalTransition, JournalDamaged, OtherFormat, RunFailed, StaleMessage, TermLost
from elastic_ring.monitor.goodput import Stages
from elastic_ring.runtime.agent.messages import Death, Said
from elastic_ring.runtime.agent.rpc import raise_open_files
from elastic_ring.runtime.coordinator.checkpoints import PRIOR_FAILURE_S, Writer
from elastic_ring.runtime.coordinator.dispatch import Dispatcher
from elastic_ring.runtime.coordinator.folds.recovery_log import LinesHeard
from elastic_ring.runtime.coordinator.inbox import (
    Abandoned,
    AgentAttached,
    CallbacksSaid,
    CheckpointCounts,
    CheckpointFailed,
    CheckpointsListed,
    DemandNoted,
    DriverFeed,
    FaultAsked,
    Happened,
    Inbox,
    News,
    NodeBeat,
    SavesAs,
    StepsPublished,
    WorkerFound,
)
from elastic_ring.runtime.coordinator.node_monitor import NodeMonitor
from elastic_ring.runtime.coordinator.recorder import Begin, RunRecorder
from elastic_ring.runtime.coordinator.run_files import RunFiles
from elastic_ring.runtime.coordinator.run_spec import Clock, RunSpec, control_options
from elastic_ring.runtime.coordinator.services import (
    CorpusWatcher,
    DemandKeeper,
    MetricsExporter,
    Services,
    step_flops,
)
from elastic_ring.runtime.coordinator.shutdown import FOLDER_IS_AWAY, EndReport, Shutdown, unfinished
from elastic_ring.runtime.coordinator.startup import (
    RESTART_PAUSE_S,
    FailedStarts,
    begin_note,
    open_run,
    open_when_stored,
    refuse_unknown_workers,
)
from elastic_ring.runtime.coordinator.term_storage import StorageWait, TermStorage
from elastic_ring.runtime.driver import submission_rules
from elastic_ring.runtime.driver.cluster import (
    NAMESPACE,
    Cluster,
    actor_name,
    built_generation,
    left_behind,
    num_started,
)
from elastic_ring.runtime.notices import CheckpointLeftOut, CheckpointPart, Notice
from elastic_ring.runtime.ray_head import is_kept, warn_if_shorter
from elastic_ring.runtime.terms import Terms
from elastic_ring.runtime.worker.coordinator_client import WorkerDescription
from elastic_ring.runtime.worker.faults import SLOW_SAVE_S, inject_into_coordinator
from elastic_ring.runtime.worker.saver import CheckpointTerms

log = logging.getLogger(__name__)

TICK_S = 0.5
JOURNAL_CUT = (
    "{} was cut or replaced: training goes on, but a new coordinator would end the run, as it could not tell what was "
    "decided; submitted again, the run goes on from its newest checkpoint"
)
FINAL = (JournalDamaged, OtherFormat, IllegalTransition, RunFailed, TermLost)  # starting once more would not help


class Coordinator:
    """The actor class: calls of workers and drivers go into the queue of the deciding thread.

    The constructor starts that thread, because Ray restarts an actor only by calling it."""

    def __init__(self, run_spec: RunSpec) -> None:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        self.run_spec = run_spec
        self._decider = Decider(run_spec, is_restart=ray.get_runtime_context().was_current_actor_reconstructed)
        threading.Thread(target=self._decider.run, name="decide", daemon=True).start()

    # ------------------------------------------------------------ called by workers

    def notify(self, event: dict[str, Any], extra: dict[str, Any]) -> None:
        """An event of a worker."""
        decoded: Any = from_json(event)
        self._decider.queue.put(Happened(decoded, extra))

    def publish(self, records: list[Notice]) -> None:
        """Committed steps from global rank 0."""
        self._decider.queue.put(StepsPublished(records))

    def saved(self, part: CheckpointPart | CheckpointLeftOut) -> None:
        """A worker's part of a checkpoint is written, or failed."""
        self._decider.queue.put(part)

    def fault(self, index: int, worker: str) -> bool:
        """True if this planned fault may fire now: once, and again for a worker that had no answer."""
        return self._decider.grant_fault(index, worker)

    # ------------------------------------------------------------ called by drivers

    def identity(self) -> submission_rules.Coordinator:
        """This run and process, for a driver that finds the name taken."""
        run_spec, end = self.run_spec, self._decider.driver_feed.ended
        return submission_rules.Coordinator(
            run_spec.attempt,
            run_spec.digest,
            run_spec.identity,
            run_spec.sources,
            run_spec.run.storage_uri,
            end is not None,
            "" if end is None else end["error"],
            run_spec.task.asks_callbacks,
            is_kept(environment()),
            os.getpid(),
            run=replace(run_spec.run, checkpoint_config=self._decider.saves_as),
        )

    def save_as(self, config: CheckpointConfig) -> None:
        """Intervals and retention of checkpoints from now on."""
        limit_s = self.run_spec.run.checkpoint_config.fail_after_s
        self._decider.queue.put(SavesAs(replace(config, fail_after_s=limit_s)))

    def renew(self) -> None:
        """Renew the driver's lease."""
        self._decider.driver_feed.renew()

    def follow(self, after_step: int, heard: LinesHeard = LinesHeard(), generation: int = 0) -> News:  # noqa: B008
        """Steps and lines that are new for a driver, as `DriverFeed.news` and after those that it has `heard`; also
        renews its lease."""
        self._decider.driver_feed.renew()
        news, lines = self._decider.driver_feed.news(after_step, generation), list[str]()
        if self._decider.is_ready:
            lines, heard = self._decider.recorder.recoveries.news(heard)
        return {**news, "lines": lines, "heard": heard}

    def scale(self, max_dp: int | None, spares: int | None) -> None:
        """At most `max_dp` rings and `spares` spares from now on. Raises: ValueError for what cannot be."""
        scaling, batch = self.run_spec.scaling, self.run_spec.task.step.global_batch
        if max_dp is not None and not scaling.min_dp <= max_dp <= batch:
            raise ValueError(
                f"max_dp={max_dp}: must be from min_dp={scaling.min_dp} to global_batch={batch}, as every ring needs a "
                "sequence in each step"
            )
        if spares is not None and spares < 0:
            raise ValueError(f"spares={spares}: must be 0 or more")
        self._decider.put(Happened(ScaleRequested(self._decider.cause(), max_dp, spares)))

    def answer(self, step: int, stop: str, saves: bool, keeps: bool) -> bool:
        """The answer of a driver's callbacks after all events up to the validation of `step` steps, as
        `CallbacksAnswered`. Returns whether it counts; a late one must come again at the next validation."""
        counts: queue.Queue[bool] = queue.Queue()
        event = CallbacksAnswered(self._decider.cause(), step, stop, saves, keeps)
        self._decider.queue.put(CallbacksSaid(event, counts))
        try:
            return counts.get(timeout=self.run_spec.run.timeouts.hello_s)
        except queue.Empty:  # the run has ended meanwhile, or its journal waits for a disk
            return False

    def abandon(self, reason: str) -> None:
        """End the run now: clear everything at once."""
        self._decider.storage_wait.give_up()
        self._decider.queue.put(Abandoned(reason))

    def stop(self, reason: str) -> None:
        """End the run after a checkpoint, within `stop_save_s`; at once where writing it takes longer."""
        threading.Timer(self.run_spec.run.timeouts.stop_save_s, self.abandon, (reason,)).start()
        self._decider.queue.put(Abandoned(reason, saves=True))


class Decider:
    """The deciding thread: opens the run, takes events, applies the core, journals, sends commands."""

    storage: TermStorage
    recorder: RunRecorder
    files: RunFiles
    node_monitor: NodeMonitor
    dispatch: Dispatcher
    services: Services
    state: State

    def __init__(self, run_spec: RunSpec, *, is_restart: bool) -> None:
        self.run_spec, self.is_restart, self.is_ready = run_spec, is_restart, False
        self.own_name = actor_name(run_spec.run.name, "coordinator")
        self.clock, self.queue, self.driver_feed = Clock(), Inbox(), DriverFeed()
        self.storage_wait = StorageWait(run_spec.run, self.clock)
        self.shutdown = Shutdown(self)
        self.cause = CauseIds("coordinator")
        self.num_read = 0  # lines of the journal
        self.saves_as, self._saves_unsent = run_spec.run.checkpoint_config, False

    def run(self) -> None:
        stages = Stages("its process and imports")
        limit_s = self.run_spec.run.checkpoint_config.fail_after_s
        failed_starts = FailedStarts(self.own_name, self.run_spec.attempt, limit_s)
        try:
            stages.begin("claims a term, opens the run")
            self._open()
            if self.is_restart:
                failed_starts.forget()
            stages.begin("")
            self.is_ready = True
            if not self.is_restart:
                self.recorder.stages("driver", self.run_spec.stages)
                self.recorder.stages("coordinator", stages.ended)
            self._decide(CoordinatorStarted(self.cause(), self.storage.watch.own.term, self.num_read))
            resume = self.run_spec.resume
            if resume.checkpoints and not self.is_restart:
                self._decide(CheckpointsKnown(self.cause(), resume.checkpoints))
            if resume.corpus or resume.num_steps or resume.skips:  # again, where one that died did not come to it
                self._decide(CorpusRecalled(self.cause(), resume.corpus, resume.num_steps, resume.skips))
            self.services.corpus.open(self.state)
            ticked_at = 0.0
            while self.driver_feed.ended is None:
                ticked_at = self._take(ticked_at)
        except StaleMessage as error:
            log.warning("%s", error)
            os._exit(1)  # its successor decides now; nothing may be cleared behind its back
        except TermLost as error:
            self.shutdown.lose(error)
        except BaseException as error:
            log.exception("the coordinator fails")
            is_starting = self.is_restart and not self.is_ready
            if is_starting and not isinstance(error, FINAL) and failed_starts.allow(error):
                # Training goes on without a coordinator: a storage that is away for a while must not end it.
                time.sleep(RESTART_PAUSE_S)
                os._exit(1)
            self.shutdown.fail(error)

    def _open(self) -> None:
        raise_open_files()
        run_spec, run = self.run_spec, self.run_spec.run
        options, terms = control_options(run_spec), Terms(run, excludes=run_spec.resume.excludes)
        opened = open_when_stored(
            run,
            lambda: open_run(
                run_spec,
                terms.open(),
                is_restart=self.is_restart,
                clear=self.shutdown.clear_actors,
                remaining=lambda: left_behind(run.name, keep=self.own_name),
                built=lambda: built_generation(run.name, run.timeouts.hello_s),
            ),
            is_restart=self.is_restart,
        )

        def author(writer: Writer) -> Writer:
            """The writer of manifests, with what it gets from the records and the state of the run."""
            return replace(
                writer,
                resumed_from=lambda: self.recorder.totals.resumed_from,
                data=lambda: {name: [*map(asdict, getattr(self.state, name))] for name in ("corpus", "skips")},
                inject=self._inject_into_commit,
            )

        self.storage = TermStorage.of(run_spec, opened.claim, terms, self.storage_wait, self.put, author)
        self.storage.watch.open()
        self.clock.go_on(opened.lines)
        self.note({**term_note(opened.term, opened.num_written), **self.clock.origin()})
        self.recorder = RunRecorder(run, self.note, self.clock, self.storage_wait, opened.term)
        self.files = RunFiles(run, self.recorder, self.storage.journal.sync)
        self.storage_wait.tell = say = self.recorder.recoveries.say
        begin = opened.begin
        if begin is None:
            begin = begin_note(run_spec, self.clock.whole())
            self.note(begin)
        self.storage.mirror.open()  # not before: this journal replaces the one of an earlier submission in the store
        self.recorder.open(Begin(begin["now"], run_spec.resume.step, begin.get("identity", ""), run_spec.planned))
        self.shutdown.report = EndReport(say)
        self.recorder.totals.saw(ResumedFrom([*run_spec.resume.resumed_from]))
        for remark in opened.remarks:
            say(remark)
        self.state, self.num_read = replay(options, opened.lines, self.recorder.recall), opened.num_written
        refuse_unknown_workers(run, opened, self.state.num_started, num_started(run.name))
        if opened.lag:
            self.recorder.recoveries.bits.end(opened.lag)
        address, me = ray.util.get_node_ip_address(), ray.get_actor(self.own_name, namespace=NAMESPACE)
        self.node_monitor = NodeMonitor(run_spec, self.put, secrets.token_hex(16))
        self.node_monitor.open(address)
        cluster = Cluster(run, run_spec.scaling, run_spec.task)
        self.dispatch = Dispatcher(run_spec, address, cluster, self.node_monitor, me, self.put)
        self.dispatch.open()
        self.dispatch.recall(self.state)
        if run.checkpoint_config.is_on or run_spec.resume.checkpoints or run_spec.resume.lineage:
            self.storage.checkpoints.open()
            self._save_as(*[CheckpointConfig(**line["saves_as"]) for line in opened.lines if "saves_as" in line][-1:])
            if self.state.callbacks.kept is not None:  # one that died may not have written that
                self.storage.checkpoints.keep(self.state.callbacks.kept)
        self.services = Services(
            CorpusWatcher(
                run_spec.task.data,
                run.corpus_look_s,
                grew=lambda uri, digest: self.put(Happened(CorpusGrew(self.cause(), uri, digest))),
                refused=lambda text: self.put(Said(text)),
            ),
            DemandKeeper(run.name, run_spec.scaling, self.put, self.node_monitor.listed),
            MetricsExporter(run, self.recorder, step_flops(run_spec.task)),
        )
        self.services.demand.open(goes_on=any(line.get("note") == "demand" for line in opened.lines))

    def _take(self, ticked_at: float) -> float:
        """Handle due deadlines, then one queued event, so that neither can starve the other. Returns the time of the
        last tick."""
        now = self.clock()
        due = min(ticked_at + TICK_S, next_deadline(self.state) or math.inf)
        if now >= due:
            ticked_at = now
            self._on_time()
            if self.driver_feed.ended is not None:  # the run is over, so queued events no longer count
                return ticked_at
        try:
            message = self.queue.get(timeout=max(0.0, due - now) + 1e-3)
        except queue.Empty:
            return ticked_at
        self._handle(message)
        return ticked_at

    def _on_time(self) -> None:
        self.storage.watch.check()  # first: this process may have been frozen for long
        self._end_if_nobody_answers()
        if self.driver_feed.ended is not None:
            return
        if self.storage.journal.is_cut():
            self.note({"note": "cut"})
            self.recorder.recoveries.say(JOURNAL_CUT.format(self.storage.journal.path))
        self._decide(Tick(self.cause()))
        waits = waiting_for(self.state, self.clock())
        if self.recorder.is_first("waits for", waits) and waits:
            self.recorder.recoveries.say(waits)
        num_committed, where = self.recorder.metrics.last_step + 1, self.run_spec.run.storage_uri
        self.shutdown.report.doing(unfinished(self.state, num_committed, where, self.recorder.live.workers))
        self.shutdown.report.look()
        if self.driver_feed.silent_s > self.run_spec.run.timeouts.lease_s:
            self._handle(Abandoned(f"no driver for {self.run_spec.run.timeouts.lease_s:.0f} s"))
        limit_s = self.run_spec.run.checkpoint_config.fail_after_s
        if self._checkpoints_failing_s > limit_s:  # at each tick, as a store that hangs raises nothing
            reason = self.recorder.totals.last_checkpoint_missed or "nobody has said why"
            limit = f"{limit_s:g} s (checkpoint.fail_after_s={limit_s:g})"
            self.shutdown.finish("StorageFailed", f"no checkpoint could be written for {limit}; last: {reason}")
        # After a checkpoint that was not written the next one is not left to an interval of an hour.
        if isinstance(self.state.phase, Running) and (
            self._saves_unsent or self.storage.checkpoints.tries.take_retry()
        ):
            self._saves_unsent = False
            self._decide(CheckpointDue(self.cause()))  # it brings new intervals to rank 0, too
        self.node_monitor.be_patient(patience_s(self.state, self.recorder.since_saved_s(self.state)))
        self._refresh()  # a step may take longer than the age at which status calls a run silent
        self.services.metrics.export(self.state)
        self.services.demand.look(self.state)
        self.node_monitor.vacate(vacant_nodes(self.state))

    def _handle(self, message: Any) -> None:
        match message:
            case Happened(event, extra):
                self._on_event(event, extra)
            case StepsPublished(records):
                self._publish(records)
            case CallbacksSaid(event, counts):
                self._decide(event)
                is_taken = is_newest_answer(self.state, event)
                if is_taken and event.keeps:
                    self.storage.checkpoints.keep(event.step)
                if is_taken and event.stop:
                    self.recorder.recoveries.say(f"stopped by a callback after {event.step} steps: {event.stop}")
                counts.put(is_taken)
            case FaultAsked(index, worker, answer):
                fired = self.recorder.recoveries.fired.get(index)
                if fired is None:
                    self.recorder.recoveries.fault_fired(index, worker, self.clock.whole())
                answer.put(fired is None or fired.worker == worker)
                if fired is None:  # this process's own faults fire once, or it would die of one at each start
                    inject_into_coordinator(self.run_spec.run.faults[index].kind)
            case NodeBeat(node):
                self.node_monitor.echo(node)
            case Abandoned(reason, saves):
                if not (saves and self._saves_first(reason)):  # then it must not wait for the journal
                    self.shutdown.finish("RunFailed", reason, None, **self._saved())
            case AgentAttached(node, reconnect_s):
                lease_s = self.run_spec.run.timeouts.lease_s
                # Once, of a node that Ray ends before the driver gives up, where the head can come back at all.
                if reconnect_s < lease_s and is_kept(environment()) and self.recorder.is_first("ends early", True):
                    warning = warn_if_shorter(f"all processes of node {node}", reconnect_s, lease_s)
                    self.recorder.recoveries.add_line(warning)
            case WorkerFound(described):
                self.dispatch.watch(described)
            case Death():
                self.recorder.recoveries.died(message)
                detail = "\n".join([f"{message.how} in {message.phase} of step {message.step}", *message.log_lines])
                place = (message.step, message.phase, message.signal)
                self._on_event(WorkerLost(self.cause(), message.worker, message.reason, detail, *place), {})
            case CheckpointPart(step, is_repeated=True) if step == self.recorder.totals.newest_checkpoint_step:
                pass  # it counts since before this coordinator
            case CheckpointPart() | CheckpointLeftOut():
                self.storage.checkpoints.written(message)
                self._commit_checkpoints()
            case CheckpointCounts(checkpoint):
                self.recorder.checkpoint(checkpoint)
                goes_back = isinstance(self.state.phase, Building) and self.state.phase.order.goes_back
                if (
                    not goes_back and data_order.pending_rollback(self.state) is None
                ):  # else older ones are still needed
                    self.storage.checkpoints.clean(checkpoint["step"])
                last_step, reason = self.driver_feed.stopping
                if (step := checkpoint["step"]) > last_step:
                    self.shutdown.finish("RunFailed", reason, saved_step=step)
            case CheckpointsListed(checkpoints):
                write_s = self.recorder.totals.checkpoints[-1]["total_s"] if self.recorder.totals.checkpoints else 0.0
                self._decide(CheckpointsKnown(self.cause(), checkpoints, write_s))
            case SavesAs(config):
                self._save_as(config)
            case CheckpointFailed(step, reason):
                self.recorder.checkpoint_failed(step, reason)
            case Said(text):
                self.recorder.recoveries.say(text)
            case DemandNoted(text, num_workers):
                self.note({"note": "demand", "now": self.clock(), "text": text, "num_workers": num_workers})
                self.recorder.recoveries.say(text)

    def _save_as(self, *configs: CheckpointConfig) -> None:
        for config in configs:
            self.saves_as = self.storage.checkpoints.stored.config = config
            self.recorder.detectors.checkpoints.every_steps = config.every_steps
            if self.is_ready:  # else an earlier coordinator has noted it
                self.note({"note": "saves_as", "now": self.clock(), "saves_as": vars(config)})
                self.recorder.recoveries.say(f"checkpoints from now on as a submission has them: {config}")
            self._saves_unsent = True

    def _on_event(self, event: Event, extra: Mapping[str, Any]) -> None:
        match event:
            case MemberFailed():
                self.recorder.member_failed(event)
                order = self.state.phase.order if isinstance(self.state.phase, Building) else None
                restore = None if order is None else order.restore
                is_its = order is not None and (event.term, event.generation) == (order.term, order.generation)
                if event.kind == "checkpoint" and is_its and restore is not None:
                    self.storage.checkpoints.damaged(restore.folder, event.detail)
            case Resumed():
                self.recorder.recoveries.resumed(event.worker, extra)
                self.recorder.built(event.worker, extra)
            case WorkerReady():
                described = cast(WorkerDescription, extra)
                self.recorder.recoveries.worker_started(event.worker, event.pid, described["environment"])
                self.recorder.stages(event.worker, described["stages"])
                self.dispatch.watch(described)
                for line in self.node_monitor.failing_limits(event.worker, described["limits"]):
                    self.recorder.recoveries.say(line)
            case Report():
                self._publish(extra.get("records", []))
            case WorkerLost():
                self.dispatch.lost(event.worker)
            case NodeLost():
                self.recorder.recoveries.still_s[event.node] = extra.get("still_s", 0.0)
                for worker in [w.worker for w in self.state.workers.values() if w.node == event.node]:
                    self.dispatch.lost(worker)
            case Finalized():
                self.dispatch.weights_sha256 = event.weights_sha256
        self._decide(event)

    def grant_fault(self, index: int, worker: str) -> bool:
        """As `Coordinator.fault`; called by other threads."""
        answer: queue.Queue[bool] = queue.Queue()
        self.queue.put(FaultAsked(index, worker, answer))
        return answer.get(timeout=self.run_spec.run.timeouts.hello_s)

    def _inject_into_commit(self, step: int) -> None:
        """Called by the thread of the checkpoints between the last file of a checkpoint and its manifest."""
        for index, fault in enumerate(self.run_spec.run.faults):
            if fault.phase == "commit" and fault.step == step and self.grant_fault(index, "coordinator"):
                log.warning("planned fault %s fires in pid %d", fault, os.getpid())
                time.sleep(SLOW_SAVE_S)

    def _commit_checkpoints(self) -> None:
        """Commit a checkpoint whose parts are written and whose steps are on record, on disk."""
        self.recorder.metrics.sync()
        self.storage.checkpoints.look(self.recorder.metrics.last_step)

    def _end_if_nobody_answers(self) -> None:
        """End the run if its term is unreadable for `fail_after_s`: it may be another submission's by now."""
        run, silent_s, is_away = self.run_spec.run, self.storage.watch.silent_s(), self.storage.watch.is_away
        limit_s, folder_is_away = run.checkpoint_config.fail_after_s, FOLDER_IS_AWAY.format(run.folder)
        if self.recorder.is_first("folder", is_away) and is_away:
            goes_on = f"training goes on for at most {limit_s:g} s (checkpoint.fail_after_s), or to its last step"
            self.recorder.recoveries.say(f"{folder_is_away}: put it back; {goes_on}")
        if silent_s > limit_s and is_away:
            self.shutdown.finish("StorageFailed", f"{folder_is_away}, for {silent_s:.0f} s")
        elif silent_s > limit_s:
            self.shutdown.finish(
                "StorageFailed",
                f"the storage {run.storage_uri} has not answered for {silent_s:.0f} s whether another submission has "
                f"taken the run (checkpoint.fail_after_s={limit_s:g})",
            )

    @property
    def _checkpoints_failing_s(self) -> float:
        """For how long no checkpoint could be written, for whatever reason, even an unreported one."""
        return max(self.storage.checkpoints.tries.failing_s, self.recorder.detectors.checkpoints.overdue_s)

    def _saves_first(self, reason: str) -> bool:
        """Ask for a checkpoint before the end, if need be in place of the step under way; False if there is no step to
        save or no time for it."""
        last, within_s = self.recorder.metrics.newest.step, self.run_spec.run.timeouts.stop_save_s
        is_new = last is not None and last.step >= self.recorder.begin.first_step
        if last is None or not is_new or self._saved() or not can_save(self.state, within_s):
            return False
        if not self.driver_feed.stopping[1]:  # a second driver's stop waits for the first one's checkpoint
            self.driver_feed.stopping = last.step, reason
        self._decide(CheckpointDue(self.cause(), at_once=last.step_s + self.state.write_s > within_s))
        return True

    def _saved(self) -> dict[str, int]:
        """The newest checkpoint, if it has all steps on record."""
        steps = [checkpoint.step for checkpoint in self.state.checkpoints[-1:]]
        return {"saved_step": steps[0]} if steps and steps[0] > self.recorder.metrics.last_step else {}

    def _publish(self, records: Sequence[Notice]) -> None:
        self.storage.watch.check()
        committed = self.recorder.publish(records)
        self.driver_feed.publish([record.metrics for record in committed])
        if committed:
            newest = self.recorder.newest_vote
            if newest is not None and not isinstance(self.state.phase, Running):
                self._decide(Published(self.cause(), newest))
            if self.storage.checkpoints.has_parts:
                self._commit_checkpoints()
            for record in committed:
                for finding in self.recorder.detect(record, self.state, self.node_monitor.readings.host_share()):
                    self._decide(finding)
            self._refresh()

    def _decide(self, event: Event) -> None:
        """Apply an event, after the newest published vote if a quorum may follow."""
        if self.driver_feed.ended is not None:
            return
        newest = self.recorder.newest_vote
        if newest is not None and newest != self.state.newest_vote:
            # Any other event may lead to a quorum, which the newest published result must then be part of; or to a
            # checkpoint, for which the step under way must be known.
            pool = NodeJoined | NodesListed | ScaleRequested | WorkerStarting | WorkerReady
            starts_none = isinstance(event, Tick | Published | pool | Resumed | CheckpointsKnown)
            if not starts_none or awaits_newest(self.state, newest, self.clock()):
                self._apply(Published(self.cause(), newest))
        self._apply(event)

    def _apply(self, event: Event) -> None:
        """Have the core decide; journal the event before its commands leave."""
        now, before = self.clock(), self.state
        decision: Decision = advance(before, event, now)
        self.state = decision.state
        is_training = isinstance(self.state.phase, Running)
        self.storage_wait.stands_since = "" if is_training else f"the run is {phase_name(self.state)}"
        if not isinstance(event, Tick) or decision.commands or decision.state is not before:
            # What leads to no command need not be on disk yet: the next line that does takes it along.
            self.storage.journal.append(journal_line(event, decision, now), sync=bool(decision.commands))
        if not isinstance(event, Tick) or decision.commands:
            log.info("%s %s -> %s", event.cause, type(event).__name__, decision.reason)
        if decision.commands:
            self.storage.watch.check()
        build = self.recorder.begin_build(decision.commands)
        if build is not None and (gap := self.recorder.metrics.begin_at(build.step)):
            self.recorder.recoveries.say(gap)
        if build is not None and build.goes_back:
            self.storage.checkpoints.gone_back(build.step, (build.term, build.generation))
        for command in decision.commands:
            if isinstance(command, Release) and command.wrong:
                self.recorder.found_wrong(command.wrong, [command.worker])
        num_losses, resume = sum(self.recorder.recoveries.num_lost().values()), self.run_spec.resume
        mean_s = (self.clock.whole() - self.recorder.begin.started_s + PRIOR_FAILURE_S) / (1 + num_losses)
        wants_first = not (self.recorder.totals.checkpoints or resume.checkpoints)
        terms = CheckpointTerms(self.run_spec.attempt, resume.lineage, mean_s, wants_first, self.saves_as)
        self.dispatch.send(decision.commands, self.recorder.metrics.last_step, terms)
        if not isinstance(self.state.phase, Building):
            self.dispatch.end_meeting()
        if isinstance(before.phase, Reconnecting) and isinstance(self.state.phase, Running):
            self.recorder.coordinator_back()
        self.recorder.look(self.state)
        self._refresh()
        if isinstance(self.state.phase, Ended) and self.driver_feed.ended is None:
            end = self.state.phase.end
            self.shutdown.finish(end.error, end.message, dict(end.facts))

    # ------------------------------------------------------------ small parts

    def put(self, message: Any) -> None:
        if isinstance(message, NodeBeat) and self.storage_wait.is_waiting:
            self.node_monitor.echo(message.node)  # for the deciding thread, which is no hang
            return
        if isinstance(message, Death) and message.worker in members(self.state):
            self.storage_wait.loses(message.worker)
        self.queue.put(message)

    def note(self, note: Fact | Mapping[str, Any]) -> None:
        if isinstance(note, Fact):
            now = self.clock()
            note = journal_line(note, advance(self.state, note, now), now)
        # With the term, as notes of a replaced coordinator do not count.
        self.storage.journal.append({"term": self.storage.watch.own.term, **note})

    def _refresh(self) -> None:
        if self.files.is_status_due() and not self.storage.watch.is_away:
            self.read_live()
            with self.storage_wait.declared():
                self.files.write_status(self.state)
        self.driver_feed.outline(self.state)

    def read_live(self) -> None:
        live = replace(
            self.recorder.live,
            now=self.clock.whole(),
            driver_silent_s=self.driver_feed.silent_s,
            checkpoint_failing_s=self._checkpoints_failing_s,
        )
        self.recorder.live = self.node_monitor.live(live)
