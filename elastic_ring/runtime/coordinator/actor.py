"""The coordinator: a detached Ray actor that runs the control core. Ray restarts it when it dies.

Events from workers, agents, Ray and the clock go into one queue. One thread takes them out, calls the pure core,
writes event and commands to the journal, then sends the commands. A restarted process claims a higher term, replays
the journal and asks all workers for their status. No decisions here.
"""

from __future__ import annotations

import dataclasses
import errno
import logging
import math
import os
import queue
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray

from elastic_ring.config import environment
from elastic_ring.control.capacity.scaling import can_save
from elastic_ring.control.capacity.worker_pool import vacant_nodes
from elastic_ring.control.coordination import Decision, advance, next_deadline
from elastic_ring.control.decisions import callbacks, data_order
from elastic_ring.control.decisions.terms import TermClaim, Unanswered
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
from elastic_ring.control.phases import awaits_newest
from elastic_ring.control.replay import journal_line, replay, term_note
from elastic_ring.control.state import Building, Ended, Reconnecting, Running, State, waiting_for
from elastic_ring.errors import IllegalTransition, JournalDamaged, RunFailed, StaleMessage, StorageFailed, TermLost
from elastic_ring.monitor.journal import Journal
from elastic_ring.monitor.metrics import JOURNAL_NAME, storage_error
from elastic_ring.monitor.start_times import Stages
from elastic_ring.runtime.agent.messages import Death, Said
from elastic_ring.runtime.agent.rpc import raise_open_files
from elastic_ring.runtime.agent.stamp_dir import remove, stamp_folder
from elastic_ring.runtime.coordinator.checkpoints import PRIOR_FAILURE_S, CheckpointKeeper, Writer
from elastic_ring.runtime.coordinator.corpus_watcher import CorpusWatcher
from elastic_ring.runtime.coordinator.demand import DemandKeeper
from elastic_ring.runtime.coordinator.dispatch import Dispatcher
from elastic_ring.runtime.coordinator.driver_feed import DriverFeed
from elastic_ring.runtime.coordinator.inbox import (
    Abandoned,
    AgentAttached,
    CallbacksSaid,
    CheckpointCounts,
    CheckpointFailed,
    CheckpointsListed,
    DemandNoted,
    FaultAsked,
    Happened,
    Inbox,
    NodeBeat,
    PartSaved,
    StepsPublished,
    WorkerFound,
)
from elastic_ring.runtime.coordinator.metrics_exporter import MetricsExporter, step_flops
from elastic_ring.runtime.coordinator.node_monitor import NodeMonitor
from elastic_ring.runtime.coordinator.recorder import Begin, RunRecorder
from elastic_ring.runtime.coordinator.run_spec import Clock, RunSpec, checkpoint_facts, control_options
from elastic_ring.runtime.coordinator.shutdown import EndReport, aside, conclude, unfinished
from elastic_ring.runtime.coordinator.startup import MOST_FAILED_STARTS, Startup, num_failed_starts, open_run
from elastic_ring.runtime.coordinator.status_file import write_end
from elastic_ring.runtime.coordinator.storage_wait import StorageWait
from elastic_ring.runtime.driver.cluster import NAMESPACE, Cluster, actor_name, built_generation, clear, left_behind
from elastic_ring.runtime.notices import CheckpointLeftOut, CheckpointPart, Notice
from elastic_ring.runtime.ray_head import is_kept, warn_if_shorter
from elastic_ring.runtime.run_storage import Mirror
from elastic_ring.runtime.terms import Terms, TermWatch
from elastic_ring.runtime.worker.env_fingerprint import versions
from elastic_ring.runtime.worker.faults import SLOW_SAVE_S, inject_into_coordinator
from elastic_ring.runtime.worker.saver import CheckpointTerms

log = logging.getLogger(__name__)

TICK_S = 0.5
RESTART_PAUSE_S = 1.0
FINAL = (JournalDamaged, IllegalTransition, RunFailed, TermLost)  # starting once more would not help


@dataclass(frozen=True)
class TermStorage:
    """What a coordinator writes under its term, and the watch for a newer one."""

    journal: Journal
    watch: TermWatch
    mirror: Mirror
    checkpoints: CheckpointKeeper

    def abandon(self) -> None:
        """The run is another submission's: write nothing more."""
        self.checkpoints.abandon()
        self.mirror.abandon()


@dataclass(frozen=True)
class Services:
    """What a run has beside training."""

    corpus: CorpusWatcher
    demand: DemandKeeper
    metrics: MetricsExporter


class Coordinator:
    """The actor class. The constructor starts the deciding thread, because Ray restarts an actor only by calling it."""

    def __init__(self, run_spec: RunSpec) -> None:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        self.run_spec = run_spec
        self.clock = Clock()
        self.storage_wait = StorageWait(run_spec.run, self.clock)
        self._queue: Inbox = queue.Queue()
        self.driver_feed = DriverFeed()
        self._cause = CauseIds("coordinator")
        self._is_restart = ray.get_runtime_context().was_current_actor_reconstructed
        self._ready = threading.Event()
        threading.Thread(target=self._main, name="decide", daemon=True).start()

    # ------------------------------------------------------------ called by workers

    def notify(self, event: dict[str, Any], extra: dict[str, Any]) -> None:
        """An event of a worker."""
        decoded: Any = from_json(event)
        self._queue.put(Happened(decoded, extra))

    def publish(self, worker: str, records: list[Notice]) -> None:
        """Committed steps from global rank 0."""
        self._queue.put(StepsPublished(records))

    def saved(self, worker: str, part: CheckpointPart | CheckpointLeftOut) -> None:
        """A worker's part of a checkpoint is written, or is not, and why."""
        self._queue.put(PartSaved(part))

    def fault(self, index: int, worker: str) -> bool:
        """Whether this planned fault may fire now; true once, and again for a worker that had no answer."""
        answer: queue.Queue[bool] = queue.Queue()
        self._queue.put(FaultAsked(index, worker, answer))
        return answer.get(timeout=self.run_spec.run.timeouts.hello_s)

    # ------------------------------------------------------------ called by drivers

    def identity(self) -> dict[str, Any]:
        """Who this is, for a driver that found the name taken."""
        run_spec = self.run_spec
        return {
            "digest": run_spec.digest,
            "what": dict(run_spec.identity.what),
            "places": dict(run_spec.identity.places),
            "sources": dict(run_spec.sources),
            "attempt": run_spec.attempt,
            "pid": os.getpid(),
            "folder": run_spec.run.storage_uri,
            "ended": self.driver_feed.ended,
            "head_is_kept": is_kept(environment()),
            "asks_callbacks": run_spec.task.asks_callbacks,
        }

    def renew(self) -> None:
        """Renew the driver's lease."""
        self.driver_feed.renew()

    def follow(self, after_step: int, after_line: int) -> dict[str, Any]:
        """Steps and lines that are new for a driver; also renews its lease."""
        self.driver_feed.renew()
        news = self.driver_feed.news(after_step)
        return {**news, "lines": self.recorder.take_lines(after_line) if self._ready.is_set() else []}

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
        self._put(Happened(ScaleRequested(self._cause(), max_dp, spares)))

    def answer(self, step: int, stop: str, saves: bool, keeps: bool) -> bool:
        """What a driver's callbacks want after all events up to the validation of `step` steps: see
        `CallbacksAnswered`. Returns whether it counts; an answer that is late must come again at the next
        validation."""
        counts: queue.Queue[bool] = queue.Queue()
        event = CallbacksAnswered(self._cause(), step, stop, saves, keeps)
        self._queue.put(CallbacksSaid(event, counts))
        try:
            return counts.get(timeout=self.run_spec.run.timeouts.hello_s)
        except queue.Empty:  # the run has ended meanwhile, or its journal waits for a disk
            return False

    def abandon(self, reason: str) -> None:
        """End the run now: clear everything at once."""
        self.storage_wait.give_up()
        self._queue.put(Abandoned(reason))

    def stop(self, reason: str) -> None:
        """End the run after a checkpoint, within `stop_save_s`; at once where step and writing take longer."""
        threading.Timer(self.run_spec.run.timeouts.stop_save_s, self.abandon, (reason,)).start()
        self._queue.put(Abandoned(reason, saves=True))

    # ------------------------------------------------------------ the deciding thread

    def _main(self) -> None:
        stages = Stages("its process and imports", self.run_spec.submitted_unix_s)
        num_failed = partial(num_failed_starts, self._own_name, self.run_spec.attempt)
        try:
            stages.begin("claims a term, opens the run")
            self._open()
            if self._is_restart:
                num_failed(None)
            stages.begin("")
            self._ready.set()
            if not self._is_restart:
                self.recorder.stages("driver", self.run_spec.stages)
                self.recorder.stages("coordinator", stages.ended)
            self._decide(CoordinatorStarted(self._cause(), self.storage.watch.own.term))
            if self.run_spec.resume.checkpoints and not self._is_restart:
                self._decide(CheckpointsKnown(self._cause(), self.run_spec.resume.checkpoints))
            resume = self.run_spec.resume
            if resume.corpus or resume.num_steps or resume.skips:  # again, where one that died did not come to it
                self._decide(CorpusRecalled(self._cause(), resume.corpus, resume.num_steps, resume.skips))
            self.services.corpus.open(self.state)
            ticked_at = 0.0
            while self.driver_feed.ended is None:
                ticked_at = self._take(ticked_at)
        except StaleMessage as error:
            log.warning("%s", error)
            os._exit(1)  # its successor decides now; nothing may be cleared behind its back
        except TermLost as error:
            self._lose(error)
        except BaseException as error:
            log.exception("the coordinator fails")
            is_starting = self._is_restart and not self._ready.is_set()
            if is_starting and not isinstance(error, FINAL) and num_failed(error) < MOST_FAILED_STARTS:
                # Training goes on without a coordinator: a storage that is away for a while must not end it.
                time.sleep(RESTART_PAUSE_S)
                os._exit(1)
            self._fail(error)

    def _lose(self, lost: TermLost) -> None:
        """The run is another submission's: end the members, tell the driver, and write nothing more."""
        log.error("%s", lost.message)
        end = {"error": "TermLost", "message": lost.message, "facts": lost.facts, "attempt": self.run_spec.attempt}
        if self._ready.is_set():
            self.dispatch.kill_everyone()
            self.storage.abandon()
            self.services.metrics.export(self.state, self.driver_feed.silent_s, self.clock(), failed=True)
        self.driver_feed.ended = {**end, "left_behind": self._cleared()}
        self._vanish_later()

    def _fail(self, error: BaseException) -> None:
        message = f"{type(error).__name__}: {error}"
        if isinstance(error, StorageFailed):
            message = error.message
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES):
            message = storage_error(self.run_spec.run.folder, error)
        kind = "StorageFailed" if isinstance(error, StorageFailed) else "RunFailed"
        end = {"error": kind, "message": message, "facts": {}}
        try:
            # Before it could open the run, RunFailed says that the folder is another submission's, or a finished run's.
            if not self._ready.is_set() and not isinstance(error, RunFailed):
                write_end(self.run_spec.run, {**end, "attempt": self.run_spec.attempt})
            self._finish(end)
        except TermLost as lost:
            self._lose(lost)
        except BaseException:
            # A driver would ask a process without a deciding thread for ever; a successor ends the run.
            log.exception("could not report the end")
            time.sleep(RESTART_PAUSE_S)
            os._exit(1)

    def _open(self) -> None:
        raise_open_files()
        run_spec = self.run_spec
        options = control_options(run_spec)
        terms = Terms(run_spec.run, excludes=run_spec.resume.excludes)
        opened = self._opened(terms)
        self.storage = self._term_storage(opened.claim, terms)
        self.storage.watch.open()
        self._note(term_note(opened.term, opened.num_written))
        self.recorder = RunRecorder(run_spec.run, self._note, self.clock, self.storage_wait)
        self.storage_wait.tell = self.recorder.recoveries.say
        begin = opened.begin or self._begun()
        self.storage.mirror.open()  # not before: this journal replaces the one of an earlier submission in the store
        self.recorder.open(Begin(begin["now"], run_spec.resume.step, begin.get("identity", ""), run_spec.planned))
        self._end_report = EndReport(self.recorder.recoveries.say)
        self.recorder.totals.saw(ResumedFrom([*run_spec.resume.resumed_from]))
        for told in opened.told:
            self.recorder.recoveries.say(told)
        self.state: State = replay(options, opened.lines, self.recorder.recall)
        address, me = ray.util.get_node_ip_address(), ray.get_actor(self._own_name, namespace=NAMESPACE)
        self.node_monitor = NodeMonitor(run_spec, self._put, secrets.token_hex(16))
        self.node_monitor.open(address)
        self.recorder.nodes = self.node_monitor
        cluster = Cluster(run_spec.run, run_spec.scaling, run_spec.task)
        self.dispatch = Dispatcher(run_spec, address, cluster, self.node_monitor, me, self._put)
        self.dispatch.open()
        self.dispatch.recall(self.state)
        if run_spec.run.checkpoint_config.is_on or run_spec.resume.checkpoints or run_spec.resume.lineage:
            self.storage.checkpoints.open()
            if self.state.callbacks.kept is not None:  # one that died may not have written that
                self.storage.checkpoints.keep(self.state.callbacks.kept)
        self.services = self._services()
        self.services.demand.open(goes_on=any(line.get("note") == "demand" for line in opened.lines))

    def _services(self) -> Services:
        run_spec = self.run_spec
        run, scaling = run_spec.run, run_spec.scaling
        return Services(
            CorpusWatcher(
                run_spec.task.data,
                run.corpus_look_s,
                grew=lambda uri, digest: self._put(Happened(CorpusGrew(self._cause(), uri, digest))),
                refused=lambda told: self._put(Said(told)),
            ),
            DemandKeeper(run.name, scaling, lambda note: self._put(DemandNoted(note)), self.node_monitor.listed),
            MetricsExporter(run, self.recorder, lambda: self._checkpoints_failing_s, step_flops(run_spec.task)),
        )

    def _begun(self) -> dict[str, Any]:
        """Journal that this submission begins."""
        run_spec = self.run_spec
        begin = {
            "note": "begin",
            "attempt": run_spec.attempt,
            "now": self.clock(),
            "run": run_spec.run.name,
            "identity": run_spec.identity.digest,
            "versions": versions(run_spec.scaling.device),
            **run_spec.resume.journalled(),
        }
        self._note(begin)
        return begin

    def _term_storage(self, claim: TermClaim, terms: Terms) -> TermStorage:
        run_spec, run = self.run_spec, self.run_spec.run
        journal = Journal(run.folder / JOURNAL_NAME, durable=True, retries=self.storage_wait).open()
        watch = TermWatch(run, claim, terms)
        mirror = Mirror(run, claim.term, watch.look)
        writer = Writer(
            claim.term,
            run_spec.identity.digest,
            checkpoint_facts(run_spec),
            run_spec.attempt,
            resumed_from=lambda: self.recorder.totals.resumed_from,
            data=lambda: {
                name: [dataclasses.asdict(one) for one in getattr(self.state, name)] for name in ("corpus", "skips")
            },
            recorded=mirror.flush,
            inject=self._inject_into_commit,
        )
        checkpoints = CheckpointKeeper(run, run_spec.resume, writer, self._put, watch.look)
        return TermStorage(journal, watch, mirror, checkpoints)

    def _opened(self, terms: Terms) -> Startup:
        """The run as `open_run` opens it. While its storage is away a coordinator that was started again waits, since
        training goes on; for `fail_after_s` at most."""
        run, silence = self.run_spec.run, Unanswered(longest_turn_s=math.inf)
        while True:
            silence.tick(time.monotonic(), is_heard=False)
            try:
                return open_run(
                    self.run_spec,
                    terms.open(),
                    is_restart=self._is_restart,
                    clear=self._clear,
                    others=lambda: left_behind(run.name, keep=self._own_name),
                    built=lambda: built_generation(run.name, run.timeouts.hello_s),
                )
            except StorageFailed as error:
                if not self._is_restart:
                    raise
                if silence.silent_s > run.checkpoint_config.fail_after_s:
                    limit = f"checkpoint.fail_after_s={run.checkpoint_config.fail_after_s:g}"
                    raise RunFailed(
                        f"no term could be claimed for {silence.silent_s:.0f} s ({limit}): {error}"
                    ) from error
                log.warning("could not claim a term yet; tries again: %s", error)
                time.sleep(RESTART_PAUSE_S)

    def _clear(self) -> list[str]:
        """Remove every actor and placement group of the run but this; the names of those that stay."""
        return clear(self.run_spec.run.name, keep=self._own_name, timeout_s=self.run_spec.run.timeouts.clear_s)

    @property
    def _own_name(self) -> str:
        return actor_name(self.run_spec.run.name, "coordinator")

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
            message = self._queue.get(timeout=max(0.0, due - now) + 1e-3)
        except queue.Empty:
            return ticked_at
        self._handle(message)
        return ticked_at

    def _on_time(self) -> None:
        self.storage.watch.check()  # first: this process may have been frozen for long
        self._end_if_nobody_answers()
        if self.driver_feed.ended is not None:
            return
        self._decide(Tick(self._cause()))
        told = waiting_for(self.state, self.clock())
        if self.recorder.is_first("waits for", told) and told:
            self.recorder.recoveries.say(told)
        num_committed, where = self.recorder.metrics.last_step + 1, self.run_spec.run.storage_uri
        self._end_report.doing(unfinished(self.state, num_committed, where, self.node_monitor.progress))
        self._end_report.look()
        if self.driver_feed.silent_s > self.run_spec.run.timeouts.lease_s:
            self._handle(Abandoned(f"no driver for {self.run_spec.run.timeouts.lease_s:.0f} s"))
        self._end_if_checkpoints_fail()
        self._retry_checkpoint()
        self._refresh()  # a step may take longer than the age at which status calls a run silent
        self.services.metrics.export(self.state, self.driver_feed.silent_s, self.clock())
        self.services.demand.look(self.state)
        self.node_monitor.vacate(vacant_nodes(self.state))

    def _handle(self, message: Any) -> None:
        match message:
            case Happened(event, extra):
                self._on_event(event, extra)
            case StepsPublished(records):
                self._publish(records)
            case CallbacksSaid(event, counts):
                self._on_answer(event, counts)
            case FaultAsked():
                self._on_fault(message)
            case NodeBeat(node):
                self.node_monitor.echo(node)
            case Abandoned(reason, saves):
                if not (saves and self._saves_first(reason)):  # then it must not wait for the journal
                    self._finish({"error": "RunFailed", "message": reason, "facts": {}})
            case AgentAttached(node, reconnect_s):
                self._check_reconnect(node, reconnect_s)
            case WorkerFound(described):
                self.dispatch.watch(described)
            case Death():
                self._on_death(message)
            case PartSaved(part):
                self.storage.checkpoints.written(part)
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
                    self._finish({"error": "RunFailed", "message": reason, "facts": {}, "saved_step": step})
            case CheckpointsListed(known):
                write_s = self.recorder.totals.checkpoints[-1]["total_s"] if self.recorder.totals.checkpoints else 0.0
                self._decide(CheckpointsKnown(self._cause(), known, write_s))
            case CheckpointFailed(step, why):
                self.recorder.checkpoint_failed(step, why)
            case Said(text):
                self.recorder.recoveries.say(text)
            case DemandNoted(note):
                self._note({"note": "demand", "now": self.clock(), **note})
                self.recorder.recoveries.say(note["text"])

    def _on_event(self, event: Event, extra: Mapping[str, Any]) -> None:
        if isinstance(event, MemberFailed):
            self.recorder.recoveries.member_failed(event)
            if event.kind == "corrupt":
                self.recorder.broke_off_wrong(event.detail, (event.term, event.generation), event.accused)
            if event.kind == "back":
                self.recorder.goes_back(event.step, event.detail, (event.term, event.generation))
        if isinstance(event, Resumed):
            self.recorder.recoveries.resumed(event.worker, extra)
            self.recorder.built(event.worker, extra)
        if isinstance(event, WorkerReady):
            self.recorder.recoveries.worker_started(event.worker, event.pid, extra.get("environment", {}))
            self.recorder.stages(event.worker, extra.get("stages", ()))
            self.node_monitor.watch_worker(event.worker, event.node, extra)
            for line in self.node_monitor.failing_limits(event.worker, extra["limits"]):
                self.recorder.recoveries.say(line)
        if isinstance(event, Report):
            self._publish(extra.get("records", []))
        if isinstance(event, WorkerLost):
            self.dispatch.lost(event.worker)
        if isinstance(event, NodeLost):
            for worker in [w.worker for w in self.state.workers.values() if w.node == event.node]:
                self.dispatch.lost(worker)
        if isinstance(event, MemberFailed) and event.kind == "checkpoint" and isinstance(self.state.phase, Building):
            order = self.state.phase.order
            if order.restore is not None and (event.term, event.generation) == (order.term, order.generation):
                self.storage.checkpoints.damaged(order.restore.folder, event.detail)
        if isinstance(event, Finalized):
            self.dispatch.weights_sha256 = event.weights_sha256
        self._decide(event)

    def _on_death(self, death: Death) -> None:
        self.recorder.recoveries.died(death)
        detail = "\n".join([f"{death.how} in {death.phase} of step {death.step}", *death.log_lines])
        place = (death.step, death.phase, death.signal)
        self._on_event(WorkerLost(self._cause(), death.worker, death.reason, detail, *place), {})

    def _on_fault(self, asked: FaultAsked) -> None:
        recoveries, index = self.recorder.recoveries, asked.index
        fired = recoveries.fired.get(index)
        if fired is None:
            recoveries.fault_fired(index, asked.worker, self.clock())
        asked.answer.put(fired is None or fired.worker == asked.worker)
        if fired is None:  # this process's own faults fire once, or it would die of one at each start
            inject_into_coordinator(self.run_spec.run.faults[index].kind)

    def _on_answer(self, event: CallbacksAnswered, counts: queue.Queue[bool]) -> None:
        self._decide(event)
        is_taken = callbacks.is_taken(self.state, event)
        if is_taken and event.keeps:
            self.storage.checkpoints.keep(event.step)
        if is_taken and event.stop:
            self.recorder.recoveries.say(f"stopped by a callback after {event.step} steps: {event.stop}")
        counts.put(is_taken)

    def _inject_into_commit(self, step: int) -> None:
        """Asked by the thread of the checkpoints between the last file of a checkpoint and its manifest."""
        for index, fault in enumerate(self.run_spec.run.faults):
            if fault.phase == "commit" and fault.step == step and self.fault(index, "coordinator"):
                log.warning("planned fault %s fires in pid %d", fault, os.getpid())
                time.sleep(SLOW_SAVE_S)

    def _check_reconnect(self, node: str, reconnect_s: float) -> None:
        """Tell of the first node that Ray ends before the driver gives up, where the head can come back at all."""
        lease_s = self.run_spec.run.timeouts.lease_s
        if reconnect_s < lease_s and is_kept(environment()) and self.recorder.is_first("ends early", True):
            told = warn_if_shorter(f"all processes of node {node}", reconnect_s, lease_s)
            self.recorder.recoveries.lines.append(told)

    def _commit_checkpoints(self) -> None:
        """Commit a checkpoint whose parts are written and whose steps are on record, on disk."""
        self.recorder.metrics.sync()
        self.storage.checkpoints.look(self.recorder.metrics.last_step)

    def _retry_checkpoint(self) -> None:
        """After a checkpoint that was not written the next one is not left to an interval of an hour."""
        if isinstance(self.state.phase, Running) and self.storage.checkpoints.tries.take_retry():
            self._decide(CheckpointDue(self._cause()))

    def _end_if_nobody_answers(self) -> None:
        """A run whose term nobody can read may be another submission's by now."""
        limit_s, silent_s = self.run_spec.run.checkpoint_config.fail_after_s, self.storage.watch.silent_s()
        is_away = self.storage.watch.is_away
        if self.recorder.is_first("folder", is_away) and is_away:
            told = f"training goes on for at most {limit_s:g} s (checkpoint.fail_after_s), or to its last step"
            self.recorder.recoveries.say(f"{self._folder_is_away}: put it back; {told}")
        if silent_s > limit_s:
            told = (
                f"the storage {self.run_spec.run.storage_uri} has not answered for {silent_s:.0f} s whether another "
                f"submission has taken the run (checkpoint.fail_after_s={limit_s:g})"
            )
            told = f"{self._folder_is_away}, for {silent_s:.0f} s" if is_away else told
            self._finish({"error": "StorageFailed", "message": told, "facts": {}})

    @property
    def _folder_is_away(self) -> str:
        return f"the run's folder {self.run_spec.run.folder} was moved, removed or unmounted with its records"

    @property
    def _checkpoints_failing_s(self) -> float:
        """For how long no checkpoint could be written, for whatever reason, even an unreported one."""
        return max(self.storage.checkpoints.tries.failing_s, self.recorder.detectors.checkpoints.overdue_s)

    def _end_if_checkpoints_fail(self) -> None:
        """Checked at each tick, as a store that hangs raises nothing."""
        limit_s = self.run_spec.run.checkpoint_config.fail_after_s
        if self._checkpoints_failing_s > limit_s:
            told = (
                f"no checkpoint could be written for {limit_s:g} s (checkpoint.fail_after_s={limit_s:g}); last: "
                f"{self.recorder.totals.last_checkpoint_missed or 'nobody has said why'}"
            )
            self._finish({"error": "StorageFailed", "message": told, "facts": {}})

    def _saves_first(self, reason: str) -> bool:
        """Ask for a checkpoint before the end, if there is a step to save and time for it."""
        last, within_s = self.recorder.metrics.newest.step, self.run_spec.run.timeouts.stop_save_s
        if last is None or last.step < self.recorder.begin.first_step:
            return False
        if not can_save(self.state, last.step_s, within_s):
            return False
        if not self.driver_feed.stopping[1]:  # a second driver's stop waits for the first one's checkpoint
            self.driver_feed.stopping = last.step, reason
        self._decide(CheckpointDue(self._cause()))
        return True

    def _publish(self, records: Sequence[Notice]) -> None:
        self.storage.watch.check()
        committed = self.recorder.publish(records)
        self.driver_feed.publish([record.metrics for record in committed])
        if committed:
            newest = self.recorder.latest.vote
            if newest is not None and not isinstance(self.state.phase, Running):
                self._decide(Published(self._cause(), newest))
            if self.storage.checkpoints.has_parts:
                self._commit_checkpoints()
            for record in committed:
                for finding in self.recorder.detect(record, self.state):
                    self._decide(finding)
            self._refresh()

    def _decide(self, event: Event) -> None:
        """Apply an event, after the newest published vote if a quorum may follow."""
        if self.driver_feed.ended is not None:
            return
        newest = self.recorder.latest.vote
        if (
            newest is not None
            and newest != self.state.newest_vote
            and (starts_closing(event) or awaits_newest(self.state, newest, self.clock()))
        ):
            self._one(Published(self._cause(), newest))
        self._one(event)

    def _one(self, event: Event) -> None:
        now, before = self.clock(), self.state
        decision: Decision = advance(before, event, now)
        self.state = decision.state
        if not isinstance(event, Tick) or decision.commands or decision.state is not before:
            # What leads to no command need not be on disk yet: the next line that does takes it along.
            self.storage.journal.append(journal_line(event, decision, now), sync=bool(decision.commands))
        if not isinstance(event, Tick) or decision.commands:
            log.info("%s %s -> %s", event.cause, type(event).__name__, decision.reason)
        if decision.commands:
            self.storage.watch.check()
        build = self.recorder.begin_build(decision.commands)
        if build is not None:
            self.recorder.metrics.begin_at(build.step)
        if build is not None and build.goes_back:
            self.storage.checkpoints.gone_back(build.step, (build.term, build.generation))
        for left in [one for one in decision.commands if isinstance(one, Release) and one.wrong]:
            self.recorder.found_wrong(left.wrong, [left.worker])
        self.dispatch.send(decision.commands, self.recorder.metrics.last_step, self._checkpoint_terms())
        if not isinstance(self.state.phase, Building):
            self.dispatch.end_meeting()
        if isinstance(before.phase, Reconnecting) and isinstance(self.state.phase, Running):
            self.recorder.coordinator_back(now)
        self.recorder.look(self.state)
        self._refresh()
        if isinstance(self.state.phase, Ended) and self.driver_feed.ended is None:
            end = self.state.phase.end
            self._finish({"error": end.error, "message": end.message, "facts": dict(end.facts)})

    def _checkpoint_terms(self) -> CheckpointTerms:
        num_losses = sum(self.recorder.recoveries.num_lost().values())
        seen_s = self.clock() - self.recorder.begin.started_s
        mean_s = (seen_s + PRIOR_FAILURE_S) / (1 + num_losses)
        resume = self.run_spec.resume
        wants_first = not (self.recorder.totals.checkpoints or resume.checkpoints)
        return CheckpointTerms(self.run_spec.attempt, resume.lineage, mean_s, wants_first)

    # ------------------------------------------------------------ the end

    def _finish(self, end: dict[str, Any]) -> None:
        """Write the last records, clear everything, and let the driver know."""
        if self.driver_feed.ended is not None:
            return
        end = {**end, "attempt": self.run_spec.attempt}
        if not self._ready.is_set():  # it may be a restart, so there may be workers
            self.driver_feed.ended = {**end, "left_behind": self._cleared()}
            self._vanish_later()
            return
        weights_sha256 = self.dispatch.weights_sha256
        beside = self._queue, self.node_monitor.echo, self.recorder.checkpoint, self._end_report.look
        # The summary counts the last checkpoint.
        settled = aside(lambda: self._settle(end), *beside)
        end = settled or end
        concluded = settled and aside(lambda: self._conclude(end, weights_sha256), *beside)
        if settled is None:  # nobody waits for the last records, but they are written
            alone = partial(self._conclude_unawaited, end, weights_sha256)
            threading.Thread(target=alone, name="conclude", daemon=True).start()
        if concluded is None:
            told = "stopped while its last records were being written: submit it again to have them"
            concluded = {**end, "error": end["error"] or "RunFailed", "message": end["message"] or told}
        end = concluded
        self.storage.watch.close()
        self._end_report.doing("")
        self.services.metrics.export(self.state, self.driver_feed.silent_s, self.clock(), failed=bool(end["error"]))
        begun = time.monotonic()
        end["left_behind"] = self._cleared()
        log.info("the end of the run: processes and placement groups removed, %.1f s", time.monotonic() - begun)
        self.driver_feed.ended = end
        log.info("ended: %s", end)
        self._vanish_later()

    def _refuse_if_replaced(self) -> None:
        """This process may have been frozen for long."""
        try:
            self.storage.watch.look()
        except StorageFailed as error:
            log.warning("could not find out whether a newer coordinator exists: %s", error)

    def _settle(self, end: dict[str, Any]) -> dict[str, Any]:
        self._refuse_if_replaced()
        if self.storage.watch.is_away and not end["error"]:
            message = f"{self._folder_is_away}. Put it back and submit again: it goes on from its newest checkpoint"
            end = {**end, "error": "StorageFailed", "message": message, "facts": {}}
        doing, where = self._end_report.doing, self.run_spec.run.storage_uri
        doing(f"the last checkpoint's manifest, and clearing up, in {where}")
        if not self.storage.checkpoints.close(self.run_spec.run.timeouts.clear_s, prunes=not end.get("error")):
            log.warning("the storage of the checkpoints does not answer at the end of the run")
        return end

    def _conclude(self, end: dict[str, Any], weights_sha256: str) -> dict[str, Any]:
        doing, where = self._end_report.doing, self.run_spec.run.storage_uri
        doing("summary and plot")
        self.storage.watch.check()
        end = conclude(end, self.recorder, self.state, weights_sha256)
        doing(f"the last records go to {where}")
        self.storage.mirror.close(self.run_spec.run.timeouts.clear_s)
        return end

    def _conclude_unawaited(self, end: dict[str, Any], weights_sha256: str) -> None:
        """Beside the rest of the end, whose question for a newer term may still be on its way: ask by itself."""
        try:
            self._refuse_if_replaced()
            self._conclude(end, weights_sha256)
        except (StaleMessage, TermLost) as error:
            log.warning("the last records are not written: %s", error)

    def _cleared(self) -> list[str]:
        """Clear the run; the names of what is left. A failure to clear does not change how the run ended."""
        try:
            if self._ready.is_set():
                self.node_monitor.close()
                self.dispatch.kill_everyone()
                self.services.corpus.close(TICK_S)
                self.services.demand.close(self.run_spec.run.timeouts.clear_s)
                self.dispatch.close()  # nothing that was queued may start after the clearing
            return self._clear()
        except Exception as error:
            log.exception("could not clear the run")
            return [f"perhaps all of it: clearing failed with {type(error).__name__}: {error}"]
        finally:
            # Last, because a starting worker would recreate it. On other hosts the next run's agents remove it.
            with suppress(OSError):
                remove(stamp_folder(self.run_spec.run.name, self.run_spec.attempt))

    def _vanish_later(self) -> None:
        """Keep the end for a driver that asks within the lease; then free the name and the process."""
        me = partial(ray.get_actor, self._own_name, namespace=NAMESPACE)
        threading.Timer(self.run_spec.run.timeouts.lease_s, lambda: ray.kill(me(), no_restart=True)).start()

    # ------------------------------------------------------------ small parts

    def _put(self, message: Any) -> None:
        if isinstance(message, NodeBeat) and self.storage_wait.is_waiting:
            self.node_monitor.echo(message.node)  # for the deciding thread, which is no hang
            return
        self._queue.put(message)

    def _note(self, note: Fact | Mapping[str, Any]) -> None:
        if isinstance(note, Fact):
            now = self.clock()
            note = journal_line(note, advance(self.state, note, now), now)
        # With the term, as one of a replaced coordinator does not count.
        self.storage.journal.append({"term": self.storage.watch.own.term, **note})

    def _refresh(self) -> None:
        with self.storage_wait.declared():
            self.recorder.write_status(self.state)
        self.driver_feed.outline(self.state)


def starts_closing(event: Event) -> bool:
    """Whether this event may lead to a quorum, which the newest published result must then be part of; or to a
    checkpoint, for which the step under way must be known."""
    pool = NodeJoined | NodesListed | ScaleRequested | WorkerStarting | WorkerReady
    return not isinstance(event, Tick | Published | pool | Resumed | CheckpointsKnown)
