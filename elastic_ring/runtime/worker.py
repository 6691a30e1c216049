"""One worker: a Ray actor with a training thread that steps and a control thread that always answers.

The training thread carries out orders (build, train, write the weights). The control thread takes the
coordinator's commands, cancels what the training thread waits for, and reports. A worker decides nothing
about membership: it ignores what is older than the newest (term, generation) it has seen, and does the rest.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from elastic_ring.control.messages import (
    Build,
    BuildFailed,
    Finalize,
    Hello,
    Release,
    Stand,
    Status,
    Stop,
    Trouble,
    from_json,
)
from elastic_ring.monitor.stamps import StampWriter, phase_name
from elastic_ring.runtime.bits import environment_of_bits
from elastic_ring.runtime.card import WorkerCard
from elastic_ring.runtime.mail import Mail
from elastic_ring.runtime.member import Member
from elastic_ring.runtime.nccl import has_failed
from elastic_ring.runtime.stamp_folder import hold
from elastic_ring.runtime.standstill import Standstill, StoodStill, look_at_device
from elastic_ring.runtime.training_thread import TrainingThread
from elastic_ring.runtime.transport import is_transport_error
from elastic_ring.runtime.troubles import trouble_kind, trouble_text

log = logging.getLogger(__name__)

HEART_PERIOD_S = 0.1
STACKS_SHARE = 0.5  # of a start's time, of which Ray takes a part first, until one that still warms up tells where
GIVE_UP_S = 2.0  # an abort takes half a second; the coordinator's `Stop` tries again, for longer


class Worker:
    """The actor class; `runtime.cluster` gives it its resources. Constructing it starts nothing."""

    def __init__(self, card: WorkerCard) -> None:
        self.card = card
        self._mail = Mail(card, lambda: self._seen[0])
        self._commands: queue.Queue[tuple[Any, dict[str, Any]]] = queue.Queue()
        self._training = TrainingThread("training")
        self._num_left_behind = 0
        self._seen = self._built = (0, 0)
        self._activity = "spare"
        self._member: Member | None = None
        self._stamps = StampWriter(card.stamp_path)
        self._held: int | None = None  # the folder of the stamps, until this process ends
        self._standstill = Standstill(card.run.timeouts.standstill_s, self._moved)
        self._starting = threading.Lock()

    # ------------------------------------------------------------ what the coordinator calls

    def start(self, coordinator: Any) -> dict[str, Any]:
        """Become a warm spare. Returns who and where this is; asked again (by a new coordinator), only answers."""
        with self._starting:
            if self._member is None:
                # Every thread's stack into the log: a start that is given up is killed, and could tell nothing then.
                faulthandler.dump_traceback_later(STACKS_SHARE * self.card.run.timeouts.start_s)
                try:
                    self._warm_up(coordinator)
                finally:
                    faulthandler.cancel_dump_traceback_later()
        return self.describe()

    def _warm_up(self, coordinator: Any) -> None:
        torch.set_num_threads(self.card.scaling.num_threads)
        # FSDP2 warns of views once per wrapped module; it would fill the last words of every death.
        warnings.filterwarnings("ignore", message=".*returned a view.*", category=UserWarning)
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        self._mail.coordinator = coordinator
        faulthandler.register(signal.SIGUSR1, all_threads=True)  # every thread's stack into the log, on request
        self._held = hold(self._stamps.path.parent, self.card.run.timeouts.clear_s)
        self._stamps.open()
        member = Member(self.card, self._stamps, self._mail.injector(), self._mail.publish)
        member.warm_up()
        self._member = member
        self._training.start()
        threads = [(self._beat, "heart"), (self._control, "control")]
        if self.card.scaling.device == "cuda":
            threads.append((self._look_at_device, "device-watch"))
        for target, name in threads:
            threading.Thread(target=target, name=name, daemon=True).start()

    def command(self, data: dict[str, Any], extra: dict[str, Any]) -> None:
        """Take one command; carried out by the control thread, in order of arrival."""
        self._commands.put((from_json(data), extra))

    def describe(self) -> dict[str, Any]:
        """Who and where this is."""
        assert self._member is not None
        return {
            "worker": self.card.worker,
            "pid": os.getpid(),
            "node": self.card.node,
            "stamp_path": self.card.stamp_path,
            "log_path": _stderr_path(),
            "fingerprint": self._member.fingerprint,
            "environment": environment_of_bits(self.card.scaling.num_threads, self._member.environment),
            "chips": self._member.chips,
        }

    def ping(self) -> str:
        """Alive, as Ray sees it."""
        return self.card.worker

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
        if isinstance(command, StoodStill):  # by this worker itself, of a generation that may be older than the term
            self._give_up(command)
            return
        # Hello and Release speak for a term as a whole, not for a generation.
        stamp = (command.term, getattr(command, "generation", self._seen[1]))
        # What is older than the newest seen, and whatever would disturb the generation that is built already.
        late = stamp == self._built and (isinstance(command, Build) or getattr(command, "mode", "") == "abort")
        if stamp < self._seen or late:
            log.info("ignored %s of %s: seen %s, built %s", type(command).__name__, stamp, self._seen, self._built)
            return
        self._seen = stamp
        match command:
            case Release():
                log.info("released")  # the coordinator has Ray end this process
            case Hello():
                assert self._member is not None
                # What the old coordinator had been sent but had not written down is sent again.
                self._member.records.rewind(int(extra.get("published", -1)))
                self._mail.answer(Status(self._mail.cause(), self.card.worker, *self._seen, self._activity))
            case Stop(mode="boundary"):
                assert self._member is not None
                self._member.boundary_requested = True
            case Stop():
                self._abort_and_report(extra)
            case Build():
                self._build(command, extra)
            case Stand():
                self._stand()
            case Finalize():
                self._order("finished", lambda: self._finalize(command))

    def _abort_and_report(self, extra: dict[str, Any]) -> None:
        assert self._member is not None
        started = time.monotonic()
        if not self._release_training():
            log.error("training thread did not return within %.1f s of the abort", self.card.run.timeouts.park_s)
            return
        self._activity = "parked"
        log.info("parked for %s in %.3f s", self._seen, time.monotonic() - started)
        self._report("aborted", self._seen, int(extra.get("published", -1)))

    def _give_up(self, told: StoodStill) -> None:
        """End a step that no longer moves, as an exchange that failed would have ended it."""
        assert self._member is not None
        member = self._member
        if self._training.parked.is_set() or not self._standstill.holds(told):
            return
        phase = phase_name(self._stamps.phase)
        log.error("step %d of generation %d stands still in %s: %s; its groups are given up", member.applied,
                  told.generation, phase, told.why)  # fmt: skip
        # A thread that comes back tells of it itself. One that does not is left behind, or killed, at the next `Stop`.
        if not member.abort(self._training.parked, GIVE_UP_S):
            identity = (self.card.worker, told.term, told.generation)
            detail = f"stands still in {phase}: {told.why}"
            self._mail.answer(Trouble(self._mail.cause(), *identity, "peer", member.applied, detail))

    def _build(self, command: Build, extra: dict[str, Any]) -> None:
        assert self._member is not None
        # A boundary leaves the old groups up.
        if not self._release_training():
            log.error("training thread busy; cannot build %s", self._seen)
            return
        self._built = self._seen
        self._standstill.halt()
        connector = self._member.prepare(command, extra)  # from here on an abort reaches this build
        self._order("building", lambda: self._build_and_train(command, connector))

    def _stand(self) -> None:
        assert self._member is not None
        if self._member.settled:
            log.info("this process has let go of all GPUs but one: it ends, and one that can take any stands by")
            os._exit(0)  # at once: until then it counts as a spare
        if self._release_training():
            self._member.stand()
            self._activity = "spare"

    # ------------------------------------------------------------ training thread

    def _order(self, activity: str, work: Callable[[], None]) -> None:
        self._activity = activity
        self._training.give(work)

    def _release_training(self) -> bool:
        """Have the training thread return; one that is stuck for good is left behind. False: it is busy."""
        assert self._member is not None
        member = self._member
        outcome = self._training.release(member.abort, lambda: not member.writing, self.card.run.timeouts.park_s)
        if outcome == "stuck":
            log.error("the training thread waits for a message that died with its peer: it is left behind")
            self._training.leave()
            self._member.leave_behind()
            self._num_left_behind += 1
            self._training = TrainingThread(f"training-{self._num_left_behind}")
            self._training.start()
        return outcome != "busy"

    def _build_and_train(self, command: Build, connector: Any) -> None:
        assert self._member is not None
        member, identity = self._member, (self.card.worker, command.term, command.generation)
        try:
            resumed, extra = member.build(command, connector, self._mail.cause())
        except BaseException as error:  # a sys.exit in the user's code is an answer too
            if not self._training.is_this:
                return  # left behind: another thread has gone on from here
            log.warning("build of %s failed: %s", identity[1:], error, exc_info=not is_transport_error(error))
            kind = self._kind_of(error, healing=not command.fresh)
            self._park()
            if kind == "peer":
                self._mail.answer(BuildFailed(self._mail.cause(), *identity, f"{type(error).__name__}: {error}"))
            else:  # no fault of the ring's: building again with this one would not help
                self._tell_trouble(kind, error, identity, command.step)
            return
        if not self._training.is_this:
            return
        self._activity = "running"
        self._mail.answer(resumed, extra)
        if member.seated:
            self._run(command)

    def _run(self, command: Build) -> None:
        assert self._member is not None
        member, identity = self._member, (self.card.worker, command.term, command.generation)
        self._standstill.begin(identity[1:])
        try:
            kind = member.train()
        except BaseException as error:  # a sys.exit in the user's code is an answer too
            if not self._training.is_this:
                return
            kind = self._kind_of(error)
            self._park()
            log.warning("step %d broke off (%s): %s", member.applied, kind, error, exc_info=kind == "device")
            self._tell_trouble(kind, error, identity, member.applied)
            return
        finally:
            self._standstill.end(identity[1:])
        if not self._training.is_this:
            return
        self._activity = "finished" if kind == "finished" else "parked"
        self._training.park()
        self._report(kind, identity[1:], -1)

    def _finalize(self, command: Finalize) -> None:
        assert self._member is not None
        identity = (self.card.worker, command.term, command.generation)
        try:
            finalized = self._member.finalize(self._mail.cause(), *identity)
        except BaseException as error:  # a sys.exit in the user's code is an answer too
            if not self._training.is_this:
                return
            log.warning("writing the weights broke off: %s", error)
            kind = self._kind_of(error)
            self._park()
            self._tell_trouble(kind if kind in ("peer", "device") else "check", error, identity, self._member.applied)
            return
        if not self._training.is_this:
            return
        self._training.park()
        if finalized is not None:
            self._mail.answer(finalized)

    def _kind_of(self, error: BaseException, healing: bool = False) -> str:
        assert self._member is not None
        member = self._member
        kind = trouble_kind(error, lambda: has_failed(member.device), healing=healing)
        if kind in ("device", "user", "check") and member.aborted:
            return "peer"  # an abort leaves nonsense in the buffers; the probe before the report asks the device
        if kind == "device":
            member.fail_device(error)  # also for whoever does not hear of it and asks for a report
        return kind

    def _tell_trouble(self, kind: str, error: BaseException, identity: tuple[str, int, int], step: int) -> None:
        self._mail.answer(Trouble(self._mail.cause(), *identity, kind, step, trouble_text(error, kind)))

    def _park(self) -> None:
        """Parked before anyone is told, so that the answer never waits for this thread."""
        self._activity = "parked"
        self._training.park()

    # ------------------------------------------------------------ report and heart

    def _report(self, kind: str, identity: tuple[int, int], published: int) -> None:
        """What this worker holds, and its own records of steps that may not have been published yet."""
        assert self._member is not None
        records = self._member.records.after(published) if kind == "aborted" else self._member.unsent()
        self._mail.answer(self._member.report(self._mail.cause(), *identity, kind), {"records": records})

    def _beat(self) -> None:
        """Proof that this process runs and its GIL is free; a stopped or held one falls silent."""
        self._stamps.bind_thread()
        while True:
            self._stamps.touch()
            told = self._standstill.look(time.monotonic())
            if told is not None:
                self._tell_control(told)
            time.sleep(HEART_PERIOD_S)

    def _moved(self) -> tuple[int, ...]:
        assert self._member is not None
        if self._member.device.type != "cpu":
            return self._member.moved()  # a thread that waits for a GPU computes all the time
        return (*self._member.moved(), self._training.cpu_ticks)

    def _look_at_device(self) -> None:
        assert self._member is not None
        look_at_device(self._member.marks, self._standstill, self._member.exchange_error, self._tell_control)

    def _tell_control(self, told: StoodStill) -> None:
        self._commands.put((told, {}))


def _stderr_path() -> str:
    path = Path("/proc/self/fd/2")
    return str(path.readlink()) if path.is_symlink() else ""
