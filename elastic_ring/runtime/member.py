"""A worker's training side: its part in one generation after another.

Builds groups on order, rolls forward, heals, steps until a boundary, the end or an abort, and says what it
holds. It runs in the training thread; `abort`, `report` and `prepare` belong to the control thread.
"""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from elastic_ring.control.messages import Build, Finalized, Heal, Report, Resumed
from elastic_ring.data.loader import Loader
from elastic_ring.data.order import Order
from elastic_ring.data.source import hold_out, open_source
from elastic_ring.errors import GroupAborted
from elastic_ring.monitor.stamps import Phase, StampWriter
from elastic_ring.runtime.bits import Oddities, gpu_environment
from elastic_ring.runtime.card import WorkerCard
from elastic_ring.runtime.contexts import Settling
from elastic_ring.runtime.devices import (
    KERNEL_CACHE,
    DeviceClaim,
    be_deterministic,
    let_go_of_cache,
    visible_chips,
    warm_devices,
)
from elastic_ring.runtime.groups import Connector, Groups, Rendezvous
from elastic_ring.runtime.healing import heal_over_link, links_ahead
from elastic_ring.runtime.injection import Injector
from elastic_ring.runtime.records import StepRecords, record_of
from elastic_ring.runtime.registry import forget_groups
from elastic_ring.runtime.standstill import DeviceMarks
from elastic_ring.runtime.transport import translated
from elastic_ring.train.check import check_model
from elastic_ring.train.compiling import CompileWatch, compiled_by, rehearse_model, report_compiled
from elastic_ring.train.kernels import KernelChoice
from elastic_ring.train.optim import learning_rate
from elastic_ring.train.transaction import Local, Transaction
from elastic_ring.train.vote import Outcome
from elastic_ring.train.warm import attention_shapes, warm_up
from elastic_ring.train.weights import gather_weights
from elastic_ring.train.wrap import num_parameters

log = logging.getLogger(__name__)

STAND_S = 10.0  # for a node's GPU to be empty before the next process may take it
ABORTABLE = ("idle", "forward", "backward", "reduce")


class Member:
    """The training state of one worker process and what it does in the mesh."""

    def __init__(
        self, card: WorkerCard, stamps: StampWriter, injector: Injector, publish: Callable[[list[dict[str, Any]]], None]
    ) -> None:
        self._card = card
        self._stamps = stamps
        self._injector = injector
        self._publish = publish
        self.boundary_requested = False
        self.marks = DeviceMarks()
        self._num_data_waits = 0
        self.device_failed = False  # said so itself: a probe may still pass
        self._connector: Connector | None = None
        self._groups: Groups | None = None
        self._command: Build | None = None
        self.records = StepRecords(publish)
        self._left_behind: list[tuple[Any, ...]] = []
        self._claim = DeviceClaim(card.scaling.device, card.run.name)
        self._settling = Settling(card.scaling.release_contexts and card.scaling.device == "cuda")
        self.chips: list[str] = []  # names of the GPUs that this process sees
        self.environment: dict[str, Any] = {}  # what its bits depend on, beside what every worker tells
        self._oddities = Oddities()
        self._timings: dict[str, float] = {}  # of the build under way
        self._entering = False
        self._kernels = KernelChoice(card.task, card.scaling.device, KERNEL_CACHE)

    def warm_up(self) -> None:
        """Open the data and do once, on something tiny, what is slow the first time."""
        task, step = self._card.task, self._card.task.step
        source = open_source(task.data)
        self.fingerprint = source.fingerprint
        training, validation = hold_out(source, num_sequences=step.num_val_sequences if step.val_every_steps else 0)
        self._val_loader = Loader(validation, self._while_data_comes)
        order = Order(step.seed, step.global_batch, training.num_sequences)
        cache = KERNEL_CACHE if self._card.scaling.device == "cuda" else None
        self._transaction = Transaction(task, Loader(training, self._while_data_comes), order, self._watch, cache)
        self._transaction.warm_up(self._card.scaling.cp, self._card.scaling.device)
        warm_up(task)
        self._num_parameters = num_parameters(task)
        if self._card.scaling.device == "cuda":
            be_deterministic(task)
            seen = visible_chips()
            warmed = warm_devices(task, seen, self._card.scaling.cp)
            self.chips, self._claim.avoided = [chip.name for chip in seen], warmed.failed
            self.environment = gpu_environment(warmed.kernels)
            self._oddities.listen()
            self._kernels.look(attention_shapes(task))
        else:
            rehearse_model(task, torch.device("cpu"), self._card.scaling.cp)
        self.environment.update(compiled_by(task, self._card.scaling.device))
        # What is here now stays: `forget_groups` has only what came later to look through, in milliseconds.
        gc.collect()
        gc.freeze()

    # ------------------------------------------------------------ control thread

    @property
    def applied(self) -> int:
        return self._transaction.applied

    @property
    def settled(self) -> bool:
        """Whether this process has let go of all GPUs but its own."""
        return self._settling.settled

    @property
    def device(self) -> torch.device:
        return self._claim.device

    def moved(self) -> tuple[int, ...]:
        """Numbers that grow while a step moves; read by any thread, at any time."""
        return self._stamps.num_stamps, self.marks.num_passed, self._num_data_waits

    def exchange_error(self) -> str:
        """What a group of the generation under way knows of a broken link; empty if nothing."""
        connector = self._connector
        return "" if connector is None else connector.exchange_error()

    @property
    def aborted(self) -> bool:
        """Whether the groups of the generation under way have been given up."""
        return self._connector is not None and self._connector.aborted

    @property
    def writing(self) -> bool:
        """Whether the shard is being written or moved: the thread that does it is not to be left behind in a wait, for
        it would go on where it was."""
        return self._entering or self._transaction.applying

    def prepare(self, command: Build, extra: dict[str, Any]) -> Connector:
        """A connector for this build, known before the training thread starts so that it can be cancelled."""
        timeouts = self._card.run.timeouts
        where = Rendezvous(
            host=extra["store_host"], port=extra["store_port"],
            prefix=f"{command.term}/{command.generation}", address=self._card.address,
            timeout_s=timeouts.build_s, collective_s=timeouts.collective_s,
        )  # fmt: skip
        self._let_go()
        self._connector = Connector(where, self._claim.device)
        self.records.heard(int(extra.get("published", -1)))
        return self._connector

    def abort(self, parked: threading.Event, timeout_s: float) -> bool:
        """Release the training thread from whatever it waits for; whether it is `parked` in time."""
        if self._connector is None:
            return parked.wait(timeout_s)
        return self._connector.abort_until(parked, timeout_s)

    def leave_behind(self) -> None:
        """Give the present groups to a thread that waits in them for ever: freeing them would wait for it."""
        self._left_behind.append((self._groups, self._connector, self._transaction.model))
        self._transaction.leave()

    def fail_device(self, error: BaseException) -> None:
        """This worker's GPU has erred under it: reports say so, and whoever would take it next is warned."""
        self.device_failed = True
        self._claim.erred(error)

    def report(self, cause: str, term: int, generation: int, kind: str) -> Report:
        """What this worker holds; call it only while the training thread is parked."""
        state = self._transaction
        return Report(
            cause, self._card.worker, term, generation, kind,
            applied=state.applied,
            vote=state.held.vote if state.held is not None else None,
            shard=state.shard.cp_rank if state.valid and state.shard is not None else None,
            has_gradient=state.has_gradient,
            healthy=not self.device_failed and self._claim.healthy(),
            last_vote=state.last,
            gradient_cast=state.gradient_cast,
        )  # fmt: skip

    def unsent(self) -> list[dict[str, Any]]:
        """What global rank 0 has not published yet; the other ranks' records are only for emergencies."""
        if self._groups is None or self._groups.global_rank != 0:
            return []
        return self.records.unsent()

    # ------------------------------------------------------------ building a generation

    @property
    def seated(self) -> bool:
        return self._command is not None and self._card.worker in self._command.seats

    def build(self, command: Build, connector: Connector, cause: str) -> tuple[Resumed, dict[str, Any]]:
        """Connect, roll forward, heal; returns the answer and the durations. Raises what breaks on the way.

        `connect_s`, `roll_s` and `heal_s` add up to all of it: what is done while groups connect counts as `roll_s`.
        """
        begun = time.monotonic()
        worker, state = self._card.worker, self._transaction
        self._timings, self._command, self.boundary_requested, self._groups = {}, command, False, None
        self._stamps.generation = command.generation
        self._stamps.stamp(command.step, Phase.REBUILD)
        state.leave()
        forget_groups()
        self._timings["free_s"] = time.monotonic() - begun
        if self.seated:
            self._take_device(connector)
            self._timings["device_s"] = time.monotonic() - begun - self._timings["free_s"]
            self._groups = connector.open(command.mesh, command.seats.index(worker), links_ahead(command, worker))
        opened = time.monotonic()
        receives = [heal for heal in command.heals if worker in heal.newcomers]
        if self._groups is not None:
            self._enter(command, self._groups, connector, holds=not command.fresh and not receives)
        entered = time.monotonic()
        if self._groups is not None:
            connector.join(self._groups)
        joined = time.monotonic()
        if command.roll_forward is not None and not receives and state.valid:
            state.roll_forward(command.roll_forward)
        rolled = time.monotonic()
        mine = [heal for heal in command.heals if worker in (heal.donor, *heal.newcomers)]
        num_bytes = sum(self._heal(heal, connector) for heal in mine)
        healed = time.monotonic()
        let_go_of_cache(self._claim.device)
        assert not self.seated or (state.valid and state.applied == command.step), (state.applied, command.step)
        if self._groups is not None and command.fresh and self._card.task.step.check_model:
            with translated(connector):
                check_model(state.task, self._groups, state)
        self._stamps.stamp(command.step, Phase.IDLE)
        timings = {
            "connect_s": opened - begun + joined - entered, "roll_s": entered - opened + rolled - joined,
            "heal_s": healed - rolled,
            "heal_bytes": num_bytes, "healed": bool(receives), "pid": os.getpid(), "chip": self._claim.chip,
            **connector.timings, **self._timings,
        }  # fmt: skip
        log.info("generation %d: step %d, %s", command.generation, command.step, timings)
        return Resumed(cause, worker, command.term, command.generation, command.step), timings

    def _take_device(self, connector: Connector) -> None:
        """The GPU this worker holds, or one that is free; the current device belongs to a thread."""
        assert self._command is not None
        place, share = self._command.seats.index(self._card.worker), -(-self._num_parameters // self._command.mesh.cp)
        device = self._claim.take(place, share, self._card.run.timeouts.report_s, connector.raise_if_aborted)
        connector.device = device
        self.marks.move_to(device)
        self._transaction.use(device)
        if device.type == "cuda":
            torch.cuda.set_device(device)

    def _enter(self, command: Build, groups: Groups, connector: Connector, *, holds: bool) -> None:
        """The module, wrapped, with this worker's values in it, while the groups connect: only `world` is used. An
        abort meanwhile is noticed after, and what was held is still held then."""
        state = self._transaction
        with translated(connector):  # a mixed ring would add in other ways, or hang over messages of other sizes
            state.task = self._kernels.settle(state.task, groups.world, holds)
        self._entering = True  # a GPU whose last process is just ending may keep this thread waiting
        try:
            state.enter(groups, (command.term, command.generation), keep=holds)
            if command.fresh:
                state.initialise()
        finally:
            self._entering = False

    def _heal(self, heal: Heal, connector: Connector) -> int:
        """This worker's part in a heal; planned faults have their moment in it."""
        assert self._command is not None
        step, rank = self._command.step, self._groups.global_rank if self._groups is not None else -1
        self._stamps.stamp(step, Phase.HEAL)

        def strike(role: str) -> None:
            self._injector.check(phase="heal", step=step, rank=rank, role=role)

        return heal_over_link(heal, self._card.worker, self._transaction, connector, strike, self._timings)

    def stand(self) -> None:
        """Become a spare without state, and give the GPU back with its memory: the next process there may need all."""
        connector = self._connector
        self._command, self._groups = None, None
        self._settling.stood()
        self._transaction.drop()
        forget_groups()
        self._let_go()
        if connector is not None and not connector.wait_closed(STAND_S):
            log.warning("groups of the old generation still hold memory after %.0f s", STAND_S)
        del connector
        self._claim.give_back()

    def _let_go(self) -> None:
        """Every member of the old generation is parked or gone by now: nobody waits on its connections."""
        if self._connector is not None:
            self._connector.close()
        self._connector = None

    # ------------------------------------------------------------ stepping

    def train(self) -> str:
        """Step until a boundary or the end; returns `boundary` or `finished`. Raises what breaks a step off."""
        assert self._command is not None
        assert self._groups is not None
        assert self._connector is not None
        state, step_config, compiled = self._transaction, self._card.task.step, CompileWatch()
        with translated(self._connector):
            while state.applied < step_config.steps:
                step, begun = state.applied, time.monotonic()
                self._watch("idle", step)
                self._validate_if_due(step)
                # A step's result is published once the next one is under way.
                self._send(through=step - 1)
                outcome, local = state.run(step, boundary=self.boundary_requested)
                self._record(outcome, local, time.monotonic() - begun)
                self._tell_oddities(step)
                report_compiled(compiled, step)
                if outcome.boundary and state.applied < step_config.steps:
                    return "boundary"
                self._settling.committed(self.device, self._command.generation, step, self._groups.global_rank)
            self._validate_if_due(state.applied)
        return "finished"

    def finalize(self, cause: str, worker: str, term: int, generation: int) -> Finalized | None:
        """Ring 0 gathers the weights; its first rank writes and digests them."""
        assert self._groups is not None
        assert self._connector is not None
        self._stamps.stamp(self.applied, Phase.FINALIZE)
        with translated(self._connector):
            digest = gather_weights(self._transaction, self._groups, self._card.run.folder / "weights.safetensors")
        self._stamps.stamp(self.applied, Phase.IDLE)
        return None if digest is None else Finalized(cause, worker, term, generation, digest)

    def _validate_if_due(self, step: int) -> None:
        config = self._card.task.step
        if not config.val_every_steps or step == 0 or (step % config.val_every_steps and step != config.steps):
            return
        self._stamps.stamp(step, Phase.VALIDATE)
        loss = self._transaction.validate(self._val_loader, config.num_val_sequences)
        if self._groups is not None and self._groups.global_rank == 0:
            self._publish([{"step": step - 1, "val_loss": loss}])

    def _tell_oddities(self, step: int) -> None:
        """What this member heard of operators whose bits do not come again; on GPUs the task may ask for such."""
        heard = self._oddities.take()
        if step == 0 and self._claim.chip and not self._card.task.step.deterministic:
            heard.append("deterministic=False")
        if heard:
            self._publish([{"step": step, "not_repeatable": "; ".join(heard)}])

    def _record(self, outcome: Outcome, local: Local, step_s: float) -> None:
        assert self._groups is not None
        assert self._command is not None
        lr = learning_rate(outcome.vote.step, self._card.task.optim)
        self.records.add(record_of(outcome, local, self._groups.mesh, self._command.generation, lr, step_s))

    def _send(self, through: int) -> None:
        if self._groups is not None and self._groups.global_rank == 0:
            self.records.send(through)

    def _watch(self, phase: str, step: int, hop: int | None = None) -> None:
        """Stamp progress; give planned faults their moment. Backward's own faults strike at its first hop."""
        self._stamps.stamp(step, Phase[phase.upper()], -1 if hop is None else hop)
        if self.device.type == "cuda":
            self.marks.leave()
        if phase in ABORTABLE:
            self._raise_if_aborted()
        if phase in ("forward", "backward") and hop is None:
            return
        rank = self._groups.global_rank if self._groups is not None else -1
        self._injector.check(phase=phase, step=step, rank=rank, hop=hop)

    def _while_data_comes(self) -> None:
        """A source that takes long is no standstill of this rank; whoever waits for this rank has a limit too."""
        self._num_data_waits += 1
        self._raise_if_aborted()

    def _raise_if_aborted(self) -> None:
        """Computing and reading do not notice an abort by themselves; a long one would look like a hang."""
        if self.aborted:
            raise GroupAborted("aborted between two exchanges")
