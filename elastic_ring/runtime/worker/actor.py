"""The worker: a Ray actor with a training thread and a control thread that never blocks on training.

The training thread builds, trains and writes the weights. The control thread, in which Ray calls `command`, carries out
the coordinator's commands, aborts what the training thread waits for, and reports; a build goes on in the training
thread, because the control thread must be free to abort it. No membership decisions here: commands older than the
newest (term, generation) seen are ignored, all others are carried out.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from elastic_ring.config import environment
from elastic_ring.control.decisions.terms import TermClaim
from elastic_ring.control.messages import (
    Answer,
    Build,
    BuildFailed,
    Finalize,
    Hello,
    MemberFailed,
    Release,
    Standby,
    Status,
    Stop,
    from_json,
)
from elastic_ring.errors import RunFailed
from elastic_ring.monitor.stamps import StampWriter, phase_name
from elastic_ring.runtime.agent.rpc import raise_open_files
from elastic_ring.runtime.agent.stamp_dir import hold
from elastic_ring.runtime.doctor import host
from elastic_ring.runtime.gpu.device import keep_caches_private
from elastic_ring.runtime.groups.nccl import has_failed
from elastic_ring.runtime.groups.transport import is_transport_error
from elastic_ring.runtime.terms import TermGuard
from elastic_ring.runtime.worker.coordinator_client import (
    CommandDetails,
    CoordinatorClient,
    WorkerDescription,
    WorkerSpec,
    start_reports,
)
from elastic_ring.runtime.worker.env_fingerprint import environment_fingerprint
from elastic_ring.runtime.worker.generation_build import prepare
from elastic_ring.runtime.worker.member import Member
from elastic_ring.runtime.worker.stall_watchdog import StallDetected, StallWatchdog, look_at_device
from elastic_ring.runtime.worker.training_thread import TrainingThread, error_kind, error_text
from elastic_ring.train.memory import drop_frames
from elastic_ring.train.vote import ComputedWrongly, MustGoBack

log = logging.getLogger(__name__)

HEART_PERIOD_S = 0.1
STACKS_SHARE = 0.5  # of a start's time: then a worker that still warms up logs its stacks; Ray takes a part first
CONTROL = "control"  # Ray's concurrency group of `Worker.command`: one thread
GIVE_UP_S = 2.0  # an abort takes half a second; the coordinator's `Stop` tries again, for longer
BROKE_OFF = {
    "build": "the build broke off",
    "train": "training broke off",
    "finalize": "writing the weights broke off",
}
T = TypeVar("T")


class Worker:
    """One worker process: warms up, then carries out the coordinator's commands. `runtime.driver.cluster` gives it its
    resources; constructing it starts nothing."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self._client = CoordinatorClient(spec, lambda: self._seen[0])
        self._training = TrainingThread("training")
        self._num_abandoned = 0
        self._seen = self._built = (0, 0)
        self._activity = "spare"
        self._warm: Member | None = None
        self._stamps = StampWriter(spec.stamp_path)
        self._folder_lock: int | None = None  # on the folder of the stamps, until this process ends
        self._stall_watchdog = StallWatchdog(spec.run.timeouts.stall_s, self._moved)
        self._starting, self._is_warm = threading.Lock(), threading.Event()
        self._controls = threading.Lock()  # held by the thread that carries out a command, or ends a stall
        self._attempt = ""  # of the submission for whose members this process speaks, as global rank 0

    @property
    def _member(self) -> Member:
        """Of a warm worker."""
        assert self._warm is not None
        return self._warm

    # ------------------------------------------------------------ what the coordinator calls

    def start(self, coordinator: Any) -> WorkerDescription:
        """Become a warm spare, once. Returns `describe()`; a new coordinator calls it again."""
        with self._starting:
            if self._warm is None:
                # Dump every thread's stack into the log: a start that takes too long is killed.
                start_s, client = self.spec.run.timeouts.start_s, self._client
                faulthandler.dump_traceback_later(STACKS_SHARE * start_s)
                try:
                    client.coordinator = coordinator
                    injector = client.injector()
                    callbacks = client.publish, client.saved, client.ask_callbacks
                    member = Member(self.spec, self._stamps, injector, *callbacks)
                    with start_reports(client, self.spec.worker, start_s, member.parts.start_work):
                        self._warm_up(member)
                finally:
                    faulthandler.cancel_dump_traceback_later()
        return self.describe()

    def _warm_up(self, member: Member) -> None:
        check_arrived(self.spec.run.env, environment())
        keep_caches_private()
        torch.set_num_threads(self.spec.scaling.num_threads)
        # FSDP2 warns of views once per wrapped module, which would fill the log tail of every death.
        warnings.filterwarnings("ignore", message=".*returned a view.*", category=UserWarning)
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        raise_open_files()
        faulthandler.register(signal.SIGUSR1, all_threads=True)  # every thread's stack into the log, on request
        self._folder_lock = hold(self._stamps.path.parent, self.spec.run.timeouts.clear_s)
        self._stamps.open()
        member.parts.warm_up()
        self._warm = member
        self._training.start()

        TermGuard(
            self.spec.run,
            lambda: TermClaim(self._seen[0], self._attempt) if self._attempt else None,
            self._client.is_there,
        ).start()
        self._is_warm.set()
        threads: list[tuple[Callable[[], None], str]] = [(self._beat, "heart")]
        if self.spec.scaling.device == "cuda":
            marks = member.parts.progress.marks
            look = partial(look_at_device, marks, self._stall_watchdog, member.exchange_error, self._abort_stalled)
            threads.append((look, "device-watch"))
        for target, name in threads:
            threading.Thread(target=target, name=name, daemon=True).start()

    def command(self, data: dict[str, Any], details: CommandDetails) -> None:
        """Carry out one command. Called in the concurrency group CONTROL alone, whose one thread keeps the order."""
        self._is_warm.wait()
        command = from_json(data)
        try:
            with self._controls:
                self._obey(command, details)
        except Exception:
            log.exception("command %s failed", type(command).__name__)

    def describe(self) -> WorkerDescription:
        """Identity, paths and environment of this worker."""
        stderr = Path("/proc/self/fd/2")
        log_path, parts = str(stderr.readlink()) if stderr.is_symlink() else "", self._member.parts
        return {
            "worker": self.spec.worker,
            "pid": os.getpid(),
            "node": self.spec.node,
            "stamp_path": self.spec.stamp_path,
            "log_path": log_path,
            "fingerprint": parts.warm.data.fingerprint,
            "environment": environment_fingerprint(self.spec.scaling.num_threads, parts.warm.environment),
            "gpus": parts.warm.gpus,
            "stages": parts.start_work.stages.ended,
            "limits": host.limits(str(Path(log_path).parent)),
        }

    def generation(self) -> int:
        """The last that this worker was built into; 0 if it never was."""
        return self._built[1]

    def ping(self) -> str:
        """Show that the actor answers Ray calls."""
        return self.spec.worker

    # ------------------------------------------------------------ control thread

    def _obey(self, command: Any, details: CommandDetails) -> None:
        # Hello and Release have a term but no generation.
        stamp = (command.term, getattr(command, "generation", self._seen[1]))
        # Late: a repeated Build, or the abort that preceded the Build of this generation.
        late = stamp == self._built and (isinstance(command, Build) or getattr(command, "mode", "") == "abort")
        if stamp < self._seen or late:
            name = type(command).__name__
            log.info(f"ignored {name} of (term, generation) {stamp}: newest seen {self._seen}, built {self._built}")
            return
        self._seen = stamp
        match command:
            case Release() if command.wrong:
                log.error("%s", command.wrong)
                if self._warm is not None:
                    self._warm.parts.lease.erred(ComputedWrongly(command.wrong))
                os._exit(0)
            case Release():
                log.info("released")  # the coordinator has Ray end this process
            case Hello():
                # The old coordinator may have received records that it did not write down: they are sent again.
                self._member.parts.records.rewind(details.published)
                self._member.parts.saver.repeat()
                self._client.answer(Status(self._client.cause(), self.spec.worker, *self._seen, self._activity))
            case Stop(mode="boundary"):  # it stops after the step that the next vote agrees on
                if (generation := self._member.parts.generation) is not None:
                    generation.boundary_requested = True
            case Stop(mode="save"):
                self._member.parts.saver.schedule.ask(details.checkpoint)
            case Answer():
                self._member.callback_wait.answers.put(command)
            case Stop():
                started = time.monotonic()
                if not self._release_training():
                    log.error(f"training thread did not return within {self.spec.run.timeouts.park_s} s of the abort")
                    return
                self._activity = "paused"
                log.info("paused for %s in %.3f s", self._seen, time.monotonic() - started)
                self._report("aborted", self._seen, details.published)
            case Build():
                self._build(command, details)
            case Standby():
                self._attempt = ""
                if self._member.context_releaser.released:
                    log.info("this process has released all GPUs but one: it exits, and a new spare starts")
                    os._exit(0)  # at once: until then it counts as a spare
                if self._release_training():
                    self._member.become_spare()
                    self._activity = "spare"
            case Finalize():
                self._activity = "finished"
                self._training.give(lambda: self._finalize(command))

    def _abort_stalled(self, stall: StallDetected) -> None:
        """Abort a stalled step, as a failed exchange would, in a thread of its own: whoever saw it must go on looking.
        Its generation may be older than the term."""

        def abort() -> None:
            member = self._member
            with self._controls:
                if self._training.paused.is_set() or not self._stall_watchdog.holds(stall):
                    return
                phase, at = phase_name(self._stamps.phase), f"step {member.applied} of generation {stall.generation}"
                log.error(f"{at} stalled in {phase}: {stall.why}; its process groups are aborted")
                # A thread that returns reports by itself. Another one is abandoned, or killed, at the next `Stop`.
                if not member.abort(self._training.paused, GIVE_UP_S):
                    identity = (self.spec.worker, stall.term, stall.generation)
                    detail = f"stalled in {phase}: {stall.why}"
                    self._client.answer(MemberFailed(self._client.cause(), *identity, "peer", member.applied, detail))

        threading.Thread(target=abort, name="stall", daemon=True).start()

    def _build(self, command: Build, details: CommandDetails) -> None:
        # A boundary leaves the old groups up.
        if not self._release_training():
            log.error("training thread busy; cannot build %s", self._seen)
            return
        self._built = self._seen
        speaks = command.members[0] == self.spec.worker
        self._attempt = details.checkpoint.attempt if speaks and details.checkpoint is not None else ""
        self._stall_watchdog.halt()
        self._member.callback_wait.forget()
        prepare(self._member.parts, command, details)  # from here on an abort reaches this build
        self._activity = "building"
        self._training.give(lambda: self._build_and_train(command))

    def _release_training(self) -> bool:
        """Make the training thread return; a stuck one is abandoned. False if it is busy."""
        member = self._member
        outcome = self._training.release(member.abort, lambda: not member.writing, self.spec.run.timeouts.park_s)
        if outcome == "stuck":
            log.error("abandons the training thread, which waits for a message of a dead peer")
            self._training.abandon()
            member.abandon_groups()
            self._num_abandoned += 1
            self._training = TrainingThread(f"training-{self._num_abandoned}")
            self._training.start()
        return outcome != "busy"

    # ------------------------------------------------------------ training thread

    def _build_and_train(self, command: Build) -> None:
        built = self._carry_out("build", command, lambda: self._member.build(self._client.cause()))
        if built is None:
            return
        self._activity = "running"
        self._client.answer(*built)
        if self._member.parts.in_mesh:
            self._train(command)

    def _train(self, command: Build) -> None:
        membership_id = (command.term, command.generation)
        self._stall_watchdog.begin(membership_id)
        try:
            kind = self._carry_out("train", command, self._member.train)
        finally:
            self._stall_watchdog.end(membership_id)
        if kind is None:
            return
        self._activity = "finished" if kind == "finished" else "paused"
        self._training.pause()
        self._report(kind, membership_id, -1)

    def _finalize(self, command: Finalize) -> None:
        finalized = self._carry_out("finalize", command, lambda: self._member.finalize(self._client.cause(), command))
        if finalized is not None:
            self._training.pause()
            self._client.answer(finalized)

    def _carry_out(self, order: str, command: Build | Finalize, work: Callable[[], T]) -> T | None:
        """The result of `work`; None if it failed, which is reported, or if this thread has been abandoned."""
        try:
            result = work()
        except BaseException as error:  # a sys.exit in the user's code is an answer too
            if self._training.is_this:
                self._report_failure(order, command, error)
            return None
        return result if self._training.is_this else None

    def _report_failure(self, order: str, command: Build | Finalize, error: BaseException) -> None:
        parts, lease, worker = self._member.parts, self._member.parts.lease, self.spec.worker
        healing = isinstance(command, Build) and any(worker in heal.newcomers for heal in command.heals)
        kind = error_kind(error, lambda: has_failed(lease.device), healing=healing and order == "build")
        accused: tuple[str, ...] = ()
        suspects: tuple[str, ...] = ()
        if isinstance(error, ComputedWrongly):
            members = parts.now.command.members
            accused, suspects = (tuple(members[rank] for rank in ranks) for ranks in (error.ranks, error.differs))
        if kind in ("device", "user", "check", "memory", "storage") and parts.aborted:
            kind = "peer"  # an abort leaves garbage in the buffers; the device is probed before the report
        elif kind == "device" or worker in accused:
            lease.erred(error)  # reports must say so even if this message is lost, and no other process takes this GPU
        if order == "finalize" and kind not in ("peer", "device", "storage"):
            kind = "check"
        # Pause before the report is sent, so that the next order never waits for this thread.
        self._activity = "paused"
        self._training.pause()
        identity, step = (worker, command.term, command.generation), self._member.applied
        if order == "build" and isinstance(command, Build):
            step = command.step
        shows_stack = kind == "device" or (order == "build" and not is_transport_error(error))
        log.warning("%s at step %d (%s): %s", BROKE_OFF[order], step, kind, error, exc_info=shows_stack)
        if order == "build" and kind == "peer":  # in other cases a build with this worker would fail again
            self._client.answer(BuildFailed(self._client.cause(), *identity, f"{type(error).__name__}: {error}"))
            return
        if kind == "memory":
            drop_frames(error)  # first: the text needs memory, too
        first_step = -1
        if isinstance(error, MustGoBack):
            first_step, step = error.facts["first_step"], error.facts["step"]
        text = error_text(error, kind)
        failed = MemberFailed(self._client.cause(), *identity, kind, step, text, accused, first_step, suspects)
        self._client.answer(failed)

    # ------------------------------------------------------------ report and heart

    def _report(self, kind: str, identity: tuple[int, int], published: int) -> None:
        """Send this worker's state, and its records of steps that may not have been published yet."""
        member, parts = self._member, self._member.parts
        records = parts.records.unsent() if parts.speaks else []
        if kind == "aborted":
            records = parts.records.after(published)
        self._client.answer(member.report(self._client.cause(), *identity, kind), {"records": records})

    def _beat(self) -> None:
        """Heartbeat: shows that this process runs and that its GIL is free."""
        self._stamps.bind_thread()
        while True:
            self._stamps.touch()
            self._member.parts.progress.pauses.beat()
            stall = self._stall_watchdog.look(time.monotonic())
            if stall is not None:
                self._abort_stalled(stall)
            time.sleep(HEART_PERIOD_S)

    def _moved(self) -> tuple[int, ...]:
        moved = self._member.moved()
        if self._member.parts.lease.device.type != "cpu":
            return moved  # waiting for a GPU is a busy wait: CPU time proves nothing
        return (*moved, self._training.cpu_ticks)


def check_arrived(variables: Mapping[str, str], own: Mapping[str, str]) -> None:
    """Raises RunFailed if this process was started without `variables` of `run.env`."""
    if missing := sorted(variables.keys() - own.keys()):
        raise RunFailed(
            f"run.env: {', '.join(missing)} did not reach this worker: a runtime_env with nsight, rocprof_sys, "
            "image_uri or container starts Python its own way; give them in env_vars of that runtime_env"
        )
