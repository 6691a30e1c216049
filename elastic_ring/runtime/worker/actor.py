"""The worker: a Ray actor with a training thread and a control thread that never blocks on training.

The training thread builds, trains and writes the weights. The control thread handles the coordinator's commands,
aborts what the training thread waits for, and reports. No membership decisions here: commands older than the newest
(term, generation) seen are ignored, all others are carried out.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import queue
import signal
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

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
from elastic_ring.runtime.worker.coordinator_client import CoordinatorClient, WorkerSpec
from elastic_ring.runtime.worker.env_fingerprint import environment_fingerprint
from elastic_ring.runtime.worker.error_classifier import error_kind, error_text
from elastic_ring.runtime.worker.member import Member
from elastic_ring.runtime.worker.stall_watchdog import StallDetected, StallWatchdog, look_at_device
from elastic_ring.runtime.worker.start_reports import StartWork, start_reports
from elastic_ring.runtime.worker.training_thread import TrainingThread
from elastic_ring.train.memory import drop_frames
from elastic_ring.train.vote import ComputedWrongly, MustGoBack

log = logging.getLogger(__name__)

HEART_PERIOD_S = 0.1
STACKS_SHARE = 0.5  # of a start's time: then a worker that still warms up logs its stacks; Ray takes a part first
GIVE_UP_S = 2.0  # an abort takes half a second; the coordinator's `Stop` tries again, for longer


class Worker:
    """The actor class; `runtime.driver.cluster` gives it its resources. Constructing it starts nothing."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self._client = CoordinatorClient(spec, lambda: self._seen[0])
        self._commands: queue.Queue[tuple[Any, dict[str, Any]]] = queue.Queue()
        self._training = TrainingThread("training")
        self._num_abandoned = 0
        self._seen = self._built = (0, 0)
        self._activity = "spare"
        self._warm: Member | None = None
        self._stamps = StampWriter(spec.stamp_path)
        self._held: int | None = None  # the folder of the stamps, until this process ends
        self._stall_watchdog = StallWatchdog(spec.run.timeouts.stall_s, self._moved)
        self._starting, self._start_work = threading.Lock(), StartWork()
        self._attempt = ""  # of the submission for whose members this process speaks, as global rank 0

    @property
    def _member(self) -> Member:
        """Of a warm worker."""
        assert self._warm is not None
        return self._warm

    # ------------------------------------------------------------ what the coordinator calls

    def start(self, coordinator: Any) -> dict[str, Any]:
        """Become a warm spare, once. Returns `describe()`; a new coordinator calls it again."""
        with self._starting:
            if self._warm is None:
                # Dump every thread's stack into the log: a start that takes too long is killed.
                faulthandler.dump_traceback_later(STACKS_SHARE * self.spec.run.timeouts.start_s)
                try:
                    self._client.coordinator = coordinator
                    start_s = self.spec.run.timeouts.start_s
                    with start_reports(self._client, self.spec.worker, start_s, self._start_work):
                        self._warm_up(coordinator, self._start_work)
                finally:
                    faulthandler.cancel_dump_traceback_later()
        return self.describe()

    def _warm_up(self, coordinator: Any, work: StartWork) -> None:
        check_arrived(self.spec.run.env, environment())
        keep_caches_private()
        torch.set_num_threads(self.spec.scaling.num_threads)
        # FSDP2 warns of views once per wrapped module, which would fill the log tail of every death.
        warnings.filterwarnings("ignore", message=".*returned a view.*", category=UserWarning)
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        raise_open_files()
        self._client.coordinator = coordinator
        faulthandler.register(signal.SIGUSR1, all_threads=True)  # every thread's stack into the log, on request
        self._held = hold(self._stamps.path.parent, self.spec.run.timeouts.clear_s)
        self._stamps.open()
        client = self._client
        member = Member(self.spec, self._stamps, client.injector(), client.publish, client.saved, client.ask_callbacks)
        member.start_work = work
        member.warm_up()
        self._warm = member
        self._training.start()
        TermGuard(self.spec.run, self._own_claim, self._client.is_there).start()
        threads = [(self._beat, "heart"), (self._control, "control")]
        if self.spec.scaling.device == "cuda":
            threads.append((self._look_at_device, "device-watch"))
        for target, name in threads:
            threading.Thread(target=target, name=name, daemon=True).start()

    def _own_claim(self) -> TermClaim | None:
        return TermClaim(self._seen[0], self._attempt) if self._attempt else None

    def command(self, data: dict[str, Any], extra: dict[str, Any]) -> None:
        """Take one command; carried out by the control thread, in order of arrival."""
        self._commands.put((from_json(data), extra))

    def describe(self) -> dict[str, Any]:
        """Identity, paths and environment of this worker."""
        return {
            "worker": self.spec.worker,
            "pid": os.getpid(),
            "node": self.spec.node,
            "stamp_path": self.spec.stamp_path,
            "log_path": _stderr_path(),
            "fingerprint": self._member.warm.data.fingerprint,
            "environment": environment_fingerprint(self.spec.scaling.num_threads, self._member.warm.environment),
            "gpus": self._member.warm.gpus,
            "stages": self._start_work.stages.ended,
            "limits": host.limits(str(Path(_stderr_path()).parent)),
        }

    def generation(self) -> int:
        """The last that this worker was built into; 0 if it never was."""
        return self._built[1]

    def ping(self) -> str:
        """Show that the actor answers Ray calls."""
        return self.spec.worker

    # ------------------------------------------------------------ control thread

    def _control(self) -> None:
        while True:
            command, extra = self._commands.get()
            try:
                self._obey(command, extra)
            except Exception:
                # The control thread must live: without it this worker can only be killed.
                log.exception("command %s failed", type(command).__name__)

    def _obey(self, command: Any, extra: dict[str, Any]) -> None:
        if isinstance(command, StallDetected):  # by this worker itself, of a generation that may be older than the term
            self._abort_stalled(command)
            return
        # Hello and Release have a term but no generation.
        stamp = (command.term, getattr(command, "generation", self._seen[1]))
        # Late: a repeated Build, or the abort that preceded the Build of this generation.
        late = stamp == self._built and (isinstance(command, Build) or getattr(command, "mode", "") == "abort")
        if stamp < self._seen or late:
            log.info(
                "ignored %s of (term, generation) %s: newest seen %s, built %s",
                type(command).__name__,
                stamp,
                self._seen,
                self._built,
            )
            return
        self._seen = stamp
        match command:
            case Release() if command.wrong:
                log.error("%s", command.wrong)
                if self._warm is not None:
                    self._warm.fail_device(ComputedWrongly(command.wrong))
                os._exit(0)
            case Release():
                log.info("released")  # the coordinator has Ray end this process
            case Hello():
                # What the old coordinator had been sent but had not written down is sent again.
                self._member.records.rewind(int(extra.get("published", -1)))
                self._client.answer(Status(self._client.cause(), self.spec.worker, *self._seen, self._activity))
            case Stop(mode="boundary"):
                self._member.request_boundary()
            case Stop(mode="save"):
                self._member.save_soon()
            case Answer():
                self._member.callback_wait.answer(command)
            case Stop():
                self._abort_and_report(extra)
            case Build():
                self._build(command, extra)
            case Standby():
                self._become_spare()
            case Finalize():
                self._order("finished", lambda: self._finalize(command))

    def _abort_and_report(self, extra: dict[str, Any]) -> None:
        started = time.monotonic()
        if not self._release_training():
            log.error("training thread did not return within %.1f s of the abort", self.spec.run.timeouts.park_s)
            return
        self._activity = "paused"
        log.info("paused for %s in %.3f s", self._seen, time.monotonic() - started)
        self._report("aborted", self._seen, int(extra.get("published", -1)))

    def _abort_stalled(self, told: StallDetected) -> None:
        """Abort a stalled step, as a failed exchange would."""
        member = self._member
        if self._training.paused.is_set() or not self._stall_watchdog.holds(told):
            return
        phase = phase_name(self._stamps.phase)
        log.error(
            "step %d of generation %d stalled in %s: %s; its process groups are aborted",
            member.applied,
            told.generation,
            phase,
            told.why,
        )
        # A thread that returns reports by itself. One that does not is abandoned, or killed, at the next `Stop`.
        if not member.abort(self._training.paused, GIVE_UP_S):
            identity = (self.spec.worker, told.term, told.generation)
            detail = f"stalled in {phase}: {told.why}"
            self._client.answer(MemberFailed(self._client.cause(), *identity, "peer", member.applied, detail))

    def _build(self, command: Build, extra: dict[str, Any]) -> None:
        # A boundary leaves the old groups up.
        if not self._release_training():
            log.error("training thread busy; cannot build %s", self._seen)
            return
        self._built = self._seen
        speaks = command.members[0] == self.spec.worker
        self._attempt = str((extra.get("checkpoint") or {}).get("attempt", "")) if speaks else ""
        self._stall_watchdog.halt()
        self._member.prepare(command, extra)  # from here on an abort reaches this build
        self._order("building", lambda: self._build_and_train(command))

    def _become_spare(self) -> None:
        self._attempt = ""
        if self._member.released:
            log.info("this process has released all GPUs but one: it exits, and a new spare starts")
            os._exit(0)  # at once: until then it counts as a spare
        if self._release_training():
            self._member.become_spare()
            self._activity = "spare"

    # ------------------------------------------------------------ training thread

    def _order(self, activity: str, work: Callable[[], None]) -> None:
        self._activity = activity
        self._training.give(work)

    def _release_training(self) -> bool:
        """Make the training thread return; a stuck one is abandoned. False if it is busy."""
        member = self._member
        outcome = self._training.release(member.abort, lambda: not member.writing, self.spec.run.timeouts.park_s)
        if outcome == "stuck":
            log.error("abandons the training thread, which waits for a message of a dead peer")
            self._training.leave()
            self._member.abandon_groups()
            self._num_abandoned += 1
            self._training = TrainingThread(f"training-{self._num_abandoned}")
            self._training.start()
        return outcome != "busy"

    def _build_and_train(self, command: Build) -> None:
        member, identity = self._member, (self.spec.worker, command.term, command.generation)
        try:
            resumed, extra = member.build(self._client.cause())
        except BaseException as error:  # a sys.exit in the user's code is an answer too
            if not self._training.is_this:
                return  # abandoned: another thread has taken over
            log.warning("build of %s failed: %s", identity[1:], error, exc_info=not is_transport_error(error))
            receives = any(self.spec.worker in heal.newcomers for heal in command.heals)
            kind = self._kind_of(error, healing=receives)
            self._pause()
            if kind == "peer":
                self._client.answer(BuildFailed(self._client.cause(), *identity, f"{type(error).__name__}: {error}"))
            else:  # not a peer's failure: building again with this worker would not help
                self._report_failure(kind, error, identity, command.step)
            return
        if not self._training.is_this:
            return
        self._activity = "running"
        self._client.answer(resumed, extra)
        if member.in_mesh:
            self._run(command)

    def _run(self, command: Build) -> None:
        member, identity = self._member, (self.spec.worker, command.term, command.generation)
        self._stall_watchdog.begin(identity[1:])
        try:
            kind = member.train()
        except BaseException as error:  # a sys.exit in the user's code is an answer too
            if not self._training.is_this:
                return
            kind = self._kind_of(error)
            self._pause()
            log.warning("step %d broke off (%s): %s", member.applied, kind, error, exc_info=kind == "device")
            self._report_failure(kind, error, identity, member.applied)
            return
        finally:
            self._stall_watchdog.end(identity[1:])
        if not self._training.is_this:
            return
        self._activity = "finished" if kind == "finished" else "paused"
        self._training.pause()
        self._report(kind, identity[1:], -1)

    def _finalize(self, command: Finalize) -> None:
        identity = (self.spec.worker, command.term, command.generation)
        try:
            finalized = self._member.finalize(self._client.cause(), *identity)
        except BaseException as error:  # a sys.exit in the user's code is an answer too
            if not self._training.is_this:
                return
            log.warning("writing the weights broke off: %s", error)
            kind = self._kind_of(error)
            self._pause()
            self._report_failure(
                kind if kind in ("peer", "device", "storage") else "check", error, identity, self._member.applied
            )
            return
        if not self._training.is_this:
            return
        self._training.pause()
        if finalized is not None:
            self._client.answer(finalized)

    def _kind_of(self, error: BaseException, healing: bool = False) -> str:
        member = self._member
        kind = error_kind(error, lambda: has_failed(member.device), healing=healing)
        if kind in ("device", "user", "check", "memory", "storage") and member.aborted:
            return "peer"  # an abort leaves garbage in the buffers; the device is probed before the report
        if kind == "device":
            member.fail_device(error)  # reports must say so even if this message is lost
        if isinstance(error, ComputedWrongly) and self.spec.worker in member.names_of(error.ranks):
            member.fail_device(error)  # no other process takes this GPU
        return kind

    def _report_failure(self, kind: str, error: BaseException, identity: tuple[str, int, int], step: int) -> None:
        if kind == "memory":
            drop_frames(error)  # first: the text needs memory, too
        text = error_text(error, kind)
        accused = self._member.names_of(error.ranks) if isinstance(error, ComputedWrongly) else ()
        suspects = self._member.names_of(error.differs) if isinstance(error, ComputedWrongly) else ()
        first_step = -1
        if isinstance(error, MustGoBack):
            first_step, step = error.facts["first_step"], error.facts["step"]
        failed = MemberFailed(self._client.cause(), *identity, kind, step, text, accused, first_step, suspects)
        self._client.answer(failed)

    def _pause(self) -> None:
        """Pause before the report is sent, so that the next order never waits for this thread."""
        self._activity = "paused"
        self._training.pause()

    # ------------------------------------------------------------ report and heart

    def _report(self, kind: str, identity: tuple[int, int], published: int) -> None:
        """Send this worker's state, and its records of steps that may not have been published yet."""
        records = self._member.records.after(published) if kind == "aborted" else self._member.unsent()
        self._client.answer(self._member.report(self._client.cause(), *identity, kind), {"records": records})

    def _beat(self) -> None:
        """Heartbeat: shows that this process runs and that its GIL is free."""
        self._stamps.bind_thread()
        while True:
            self._stamps.touch()
            self._member.progress.pauses.beat()
            told = self._stall_watchdog.look(time.monotonic())
            if told is not None:
                self._tell_control(told)
            time.sleep(HEART_PERIOD_S)

    def _moved(self) -> tuple[int, ...]:
        if self._member.device.type != "cpu":
            return self._member.moved()  # waiting for a GPU is a busy wait: CPU time proves nothing
        return (*self._member.moved(), self._training.cpu_ticks)

    def _look_at_device(self) -> None:
        look_at_device(
            self._member.progress.marks, self._stall_watchdog, self._member.exchange_error, self._tell_control
        )

    def _tell_control(self, told: StallDetected) -> None:
        self._commands.put((told, {}))


def check_arrived(asked: Mapping[str, str], own: Mapping[str, str]) -> None:
    """Raises RunFailed if this process was started without variables of `run.env`."""
    if missing := sorted(asked.keys() - own.keys()):
        raise RunFailed(
            f"run.env: {', '.join(missing)} did not reach this worker: a runtime_env with nsight, rocprof_sys, "
            "image_uri or container starts Python its own way; give them in env_vars of that runtime_env"
        )


def _stderr_path() -> str:
    path = Path("/proc/self/fd/2")
    return str(path.readlink()) if path.is_symlink() else ""
