"""The training side of a worker: builds groups, rolls forward, heals, and trains to a boundary, the end or an abort.

It runs in the training thread; the control thread calls `abort`, `report` and `prepare`. No membership decisions here.
"""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from elastic_ring.control.messages import BatchSkip, Build, CorpusVersion, Finalized, Heal, Report, Resumed
from elastic_ring.errors import GroupAborted
from elastic_ring.faults import EXCHANGES
from elastic_ring.monitor.stamps import Phase, StampWriter
from elastic_ring.runtime.gpu.cuda_contexts import ContextReleaser
from elastic_ring.runtime.gpu.device import (
    DeviceLease,
    be_deterministic,
    empty_cache,
    kernel_cache,
    newcomer_bytes,
    poison,
    visible_gpus,
    warm_devices,
)
from elastic_ring.runtime.groups.groups import Connector, Groups, Rendezvous
from elastic_ring.runtime.groups.registry import forget_groups
from elastic_ring.runtime.groups.sockets import LOOPBACK
from elastic_ring.runtime.groups.transport import translated
from elastic_ring.runtime.notices import Copied, LeftOut, StepRecord, StorageAwaited, Validated
from elastic_ring.runtime.worker.coordinator_client import ASK_AGAIN_S, CallbackWait, WorkerSpec
from elastic_ring.runtime.worker.copies import Copies
from elastic_ring.runtime.worker.env_fingerprint import gpu_environment
from elastic_ring.runtime.worker.faults import Injector
from elastic_ring.runtime.worker.heals import heal_from_copies, heal_over_link, takes_part
from elastic_ring.runtime.worker.member_data import MemberData
from elastic_ring.runtime.worker.saver import Place, Saver, open_checkpoint
from elastic_ring.runtime.worker.stall_watchdog import StepProgress
from elastic_ring.runtime.worker.start_reports import StartWork
from elastic_ring.runtime.worker.step_records import Publish, StepNotices, StepRecords, gpu_memory
from elastic_ring.state.storage.folder import Storage
from elastic_ring.train.guards import remark_on, watch_of
from elastic_ring.train.memory_gauge import MemoryGauge
from elastic_ring.train.memory_relief import MemoryRelief, free_caches
from elastic_ring.train.optim import learning_rate
from elastic_ring.train.startup.check import check_model
from elastic_ring.train.startup.compilations import EVENTS
from elastic_ring.train.startup.kernels import KernelAgreement
from elastic_ring.train.startup.warm import attention_shapes, warm_up
from elastic_ring.train.transaction import Local, Transaction, TransactionOptions
from elastic_ring.train.vote import Flag, Outcome
from elastic_ring.train.weights import gather_weights
from elastic_ring.train.wrap import num_frozen, num_parameters

log = logging.getLogger(__name__)

BECOME_SPARE_S = 10.0  # for a node's GPU to be empty before the next process may take it
SAVED_S = 5.0  # for the part that is being written to be done
NAMED = 4096  # so many sequences that are left out are named one by one
ABORTABLE = ("idle", "forward", "backward", "reduce", *EXCHANGES)


@dataclass
class Generation:
    """What belongs to one membership in this process: made with its connector, dropped whole. `told`: by the
    coordinator with the build; `before`: the last generation, until the training thread frees it, which may take a
    while; `timings`: of the build. A worker that only gives its state away joins no `groups`; `place`: of this rank's
    checkpoints, where some are taken. `entering`: the shard is being moved, or others still read it."""

    command: Build
    connector: Connector
    told: Mapping[str, Any]
    before: Generation | None = None
    timings: dict[str, float] = field(default_factory=dict)
    groups: Groups | None = None
    place: Place | None = None
    is_host_memory_prepared: bool = False
    entering: bool = False
    boundary_requested: bool = False

    @property
    def joined(self) -> Groups:
        """Its groups, of which this worker is a member."""
        assert self.groups is not None
        return self.groups

    @property
    def global_rank(self) -> int:
        """-1 outside of the groups."""
        return -1 if self.groups is None else self.groups.global_rank


@dataclass(frozen=True)
class Warmed:
    """What a worker's warm-up makes. `num_parameters`: whose state is healed, with what is frozen counted as so many.
    `gpus`: names of the GPUs that this process sees; `environment`: what its bits depend on, beside every worker's
    report."""

    data: MemberData
    kernels: KernelAgreement
    transaction: Transaction
    num_parameters: int
    gpus: list[str]
    environment: dict[str, Any]


class Member:
    """The training state of one worker process and what it does in the mesh."""

    def __init__(
        self,
        spec: WorkerSpec,
        stamps: StampWriter,
        injector: Injector,
        publish: Publish,
        saved: Callable[[dict[str, Any]], None] = lambda part: None,
        ask_callbacks: Callable[[int, int], None] = lambda generation, step: None,
    ) -> None:
        self._spec = spec
        self._stamps = stamps
        self._injector = injector
        self.records = StepRecords(publish)
        self.progress = StepProgress()
        self.start_work = StartWork()
        self._saver = Saver(
            spec.run, saved, lambda step, rank: injector.check(phase="upload", step=step, rank=rank), self._tell_waiting
        )
        self._copies = Copies(spec.run, spec.worker, self._publish_copies)
        self._generation: Generation | None = None
        self.callback_wait = CallbackWait(ask_callbacks)
        self._abandoned: list[tuple[Any, ...]] = []
        self._device_lease = DeviceLease(
            spec.scaling.device, spec.run.name, state_bytes=newcomer_bytes(spec.scaling.cpu_offload)
        )
        self._context_releaser = ContextReleaser(spec.scaling.release_contexts and spec.scaling.device == "cuda")
        self._notices = StepNotices(spec.worker, publish)
        self.warm: Warmed
        """From `warm_up` on."""

    def warm_up(self) -> None:
        """Open the data, and run a tiny model once: first calls are slow."""
        EVENTS.listener = self._announce_compilation
        task = self._spec.task
        self.start_work.begin("opens the data")
        run = self._spec.run
        data = MemberData(task, run.timeouts.storage_s, self._while_others_work, self._tell_waiting)
        scaling, on_gpus = self._spec.scaling, self._spec.scaling.device == "cuda"
        cache = kernel_cache() if on_gpus else None
        kernels = KernelAgreement(task, scaling.device, cache)
        transaction = Transaction(task, *data.begin(), self._watch, self._options(cache))
        transaction.before_apply = self._before_apply
        self._injector.flip = transaction.plan_flip
        self._injector.poison = lambda: poison(self.device)
        self.start_work.begin("runs a small model once")
        transaction.warm_up(scaling.cp, scaling.device)
        warm_up(task)
        # What is frozen takes 4 bytes a parameter, counted as so many fewer whose state is healed.
        frozen = 4 * num_frozen(task) // newcomer_bytes(scaling.cpu_offload)
        gpus, environment = list[str](), dict[str, Any]()
        if on_gpus:
            be_deterministic(task)
            seen = visible_gpus()
            self.start_work.begin(f"{len(seen)} device(s): contexts, kernels' tests, first runs")
            warmed = warm_devices(task, seen, scaling.cp)
            gpus, self._device_lease.avoided = [gpu.name for gpu in seen], warmed.failed
            environment = gpu_environment(warmed.kernels)
            self._notices.listen()
            kernels.look(attention_shapes(task))
        self.warm = Warmed(data, kernels, transaction, num_parameters(task) + frozen, gpus, environment)
        # Freeze long-lived objects, so that the collection in `forget_groups` takes milliseconds.
        gc.collect()
        gc.freeze()
        self.start_work.begin("")

    def _options(self, cache: Path | None) -> TransactionOptions:
        run, scaling = self._spec.run, self._spec.scaling
        return TransactionOptions(
            kernel_cache=cache,
            spikes=watch_of(run.loss_spike, run.loss_spike_actions),
            gauge=MemoryGauge() if run.memory_pressure != "off" else None,
            corruption=run.corruption,
            check_every_steps=run.corruption_every_steps,
            cpu_offload=scaling.cpu_offload,
            keeps_activations=scaling.keep_activations is True,
        )

    def _tell_waiting(self, text: str) -> None:
        """For the console; called in any thread."""
        self.records.publish([StorageAwaited(f"{self._spec.worker} {text}")])

    # ------------------------------------------------------------ control thread

    @property
    def _transaction(self) -> Transaction:
        return self.warm.transaction

    @property
    def applied(self) -> int:
        return self._transaction.applied

    @property
    def released(self) -> bool:
        """Whether this process has released all GPUs but its own."""
        return self._context_releaser.released

    @property
    def device(self) -> torch.device:
        return self._device_lease.device

    def moved(self) -> tuple[int, ...]:
        """Numbers that grow while a step moves; read by any thread, at any time."""
        return self._stamps.num_stamps, *self.progress.moved()

    def exchange_error(self) -> str:
        """The error of a broken link in the current groups; empty if there is none."""
        generation = self._generation
        return "" if generation is None else generation.connector.exchange_error()

    @property
    def aborted(self) -> bool:
        """Whether the groups of the present generation have been aborted."""
        generation = self._generation
        return generation is not None and generation.connector.aborted

    @property
    def writing(self) -> bool:
        """Whether the shard is being written or moved; that thread must not be abandoned: it would write later."""
        generation = self._generation
        return (generation is not None and generation.entering) or self._transaction.applying

    def prepare(self, command: Build, extra: dict[str, Any]) -> None:
        """Begin the generation of this build, before the training thread builds it, so that it can be cancelled."""
        timeouts, host = self._spec.run.timeouts, extra["store_host"]
        self.callback_wait.forget()
        restore_s = timeouts.restore_s if command.restore is not None else 0.0  # the others wait for the slowest reader
        where = Rendezvous(
            host=host,
            port=extra["store_port"],
            secret=extra["store_secret"],
            prefix=f"{command.term}/{command.generation}",
            address=LOOPBACK if host == LOOPBACK else self._spec.address,
            timeout_s=timeouts.build_s + restore_s,
            collective_s=timeouts.collective_s,
            hosts=tuple(extra.get("hosts", ())),
        )
        before = self._generation
        if before is not None:  # by now every member of it is paused or gone
            before.connector.close()
        self._generation = Generation(command, Connector(where, self._device_lease.device), extra, before)
        self.records.mark_published(int(extra.get("published", -1)))
        if command.restore is not None or command.step_back is not None:
            self.records.go_back(command.step)

    def abort(self, paused: threading.Event, timeout_s: float) -> bool:
        """Abort what the training thread waits for. Returns whether it is `paused` within `timeout_s`."""
        if self._generation is None:
            return paused.wait(timeout_s)
        return self._generation.connector.abort_until(paused, timeout_s)

    def abandon_groups(self) -> None:
        """Keep the groups that an abandoned thread waits in: freeing them would block."""
        self._abandoned.append((self._generation, self._transaction.model))
        self._transaction.leave()

    def names_of(self, ranks: Sequence[int]) -> tuple[str, ...]:
        """The workers of these ranks."""
        return tuple(self._now.command.members[rank] for rank in ranks)

    def fail_device(self, error: BaseException) -> None:
        """Record that this worker's GPU failed: for its reports, and for the next process that would take it."""
        self._device_lease.erred(error)

    def report(self, cause: str, term: int, generation: int, kind: str) -> Report:
        """What this worker holds; call it only while the training thread is paused."""
        state = self._transaction
        return Report(
            cause,
            self._spec.worker,
            term,
            generation,
            kind,
            applied=state.applied,
            vote=state.unapplied.vote if state.unapplied is not None else None,
            shard=state.shard.cp_rank if state.valid and state.shard is not None else None,
            has_gradient=state.has_gradient,
            healthy=self._device_lease.healthy(),
            last_vote=state.last,
            gradient_membership_id=state.gradient_membership_id,
            copies=self._copies.held(),
            state_id=state.state_id,
        )

    def unsent(self) -> list[StepRecord]:
        """Records that global rank 0 has not published; empty on other ranks."""
        return self.records.unsent() if self._speaks else []

    # ------------------------------------------------------------ building a generation

    @property
    def _now(self) -> Generation:
        """The present generation; spares have none."""
        assert self._generation is not None
        return self._generation

    @property
    def _speaks(self) -> bool:
        """Whether this is global rank 0, which speaks for all."""
        return self._generation is not None and self._generation.global_rank == 0

    @property
    def in_mesh(self) -> bool:
        return self._generation is not None and self._spec.worker in self._generation.command.members

    def build(self, cause: str) -> tuple[Resumed, dict[str, Any]]:
        """Connect, roll forward, heal; returns the answer and the durations. Raises what breaks on the way.

        `connect_s`, `roll_s` and `heal_s` add up to all of it: what is done while groups connect counts as `roll_s`.
        """
        begun, begun_unix_s = time.monotonic(), time.time()
        worker, state, generation = self._spec.worker, self._transaction, self._now
        generation.before, generation.boundary_requested = None, False
        command, connector, timings = generation.command, generation.connector, generation.timings
        self._stamps.generation = command.generation
        self._stamps.stamp(command.step, Phase.REBUILD)
        state.leave()
        self._end_copies()
        self._copies.keep(command.keep, command.step_back)  # the first may be older, if more hold it
        forget_groups()
        state.relief = MemoryRelief(command.memory_reliefs)
        if command.memory_reliefs:
            free_caches(self.device)
        timings["free_s"] = time.monotonic() - begun
        if self.in_mesh:
            self._take_device(connector)
            timings["device_s"] = time.monotonic() - begun - timings["free_s"]
            generation.groups = connector.open(command.mesh, command.members.index(worker))
            self._read_corpus(command.corpus, command.skips)
        opened = time.monotonic()
        receives = [heal for heal in command.heals if worker in heal.newcomers]
        groups = generation.groups
        if groups is not None:
            self._enter(generation, groups, holds=not command.fresh and not receives)
        entered = time.monotonic()
        if groups is not None:
            connector.join(groups)
        joined = time.monotonic()
        timings["join_s"] = joined - entered
        if command.roll_forward is not None and not receives and state.valid:
            state.roll_forward(command.roll_forward)
        rolled = time.monotonic()
        mine = [heal for heal in command.heals if takes_part(heal, worker)]
        num_bytes = sum(self._heal(heal, connector) for heal in mine)
        healed = time.monotonic()
        empty_cache(self._device_lease.device)
        assert not self.in_mesh or (state.valid and state.applied == command.step), (state.applied, command.step)
        starts = command.fresh and command.restore is None
        if groups is not None and starts and self._spec.task.step.check_model:
            checking = time.monotonic()
            with translated(connector):
                check_model(state.task, groups, state)
            timings["check_s"] = time.monotonic() - checking
        if groups is not None and (command.copy_holders or command.parity_groups):
            group = connector.host_link("copies", command.members, worker)
            self._copies.begin(command, groups.global_rank, group, self.device)
        self._stamps.stamp(command.step, Phase.IDLE)
        if groups is not None and (told := generation.told.get("checkpoint")):
            generation.place = Place.of(command, groups.global_rank, told)
            self._saver.begin(told, pins=self.device.type == "cuda")
        measured = {
            "connect_s": opened - begun + joined - entered,
            "roll_s": entered - opened + rolled - joined,
            "heal_s": healed - rolled,
            "heal_bytes": num_bytes,
            "begun_unix_s": begun_unix_s,
            "healed": bool(receives),
            "pid": os.getpid(),
            "gpu": self._device_lease.gpu,
            **connector.timings,
            **timings,
        }
        log.info("generation %d: step %d, %s", command.generation, command.step, measured)
        return Resumed(cause, worker, command.term, command.generation, command.step), measured

    def _read_corpus(self, versions: tuple[CorpusVersion, ...], skips: tuple[BatchSkip, ...]) -> None:
        if (news := self.warm.data.news(versions, skips)) is None:
            return
        loader, order, new = news
        self._transaction.read_from(loader, order)
        if self._speaks:
            named = [(skip, order.left_out(skip)[: NAMED + 1]) for skip in new]
            self.records.publish([LeftOut(one.first_step, one.num_batches, ids) for one, ids in named])

    def _take_device(self, connector: Connector) -> None:
        """Take the GPU this worker owns, or a free one, and select it in this thread."""
        command = self._now.command
        place, share = command.members.index(self._spec.worker), -(-self.warm.num_parameters // command.mesh.cp)
        device = self._device_lease.take(place, share, self._spec.run.timeouts.report_s, connector.raise_if_aborted)
        connector.device = device
        self.progress.marks.move_to(device)
        self._transaction.use(device)
        if device.type == "cuda":
            torch.cuda.set_device(device)

    def _enter(self, generation: Generation, groups: Groups, *, holds: bool) -> None:
        """Wrap the module and load this worker's state while the groups connect; only `world` is used.

        An abort is noticed afterwards, and keeps the state.
        """
        command, connector, timings = generation.command, generation.connector, generation.timings
        state = self._transaction
        with translated(connector):  # a mixed ring would add in other ways, or hang over messages of other sizes
            state.task = self.warm.kernels.settle(state.task, groups.world, holds)
        generation.entering = True  # a GPU whose last process is just ending may keep this thread waiting
        try:
            back = command.step_back
            keep = holds and back is None
            wrapping = time.monotonic()
            state.enter(groups, (command.term, command.generation), keep=keep, nodes=command.nodes)
            timings["wrap_s"] = (filling := time.monotonic()) - wrapping
            if command.restore is not None:
                begun = time.monotonic()
                reader = open_checkpoint(self._spec.run, command.restore, self._tell_waiting)
                reader.check = connector.raise_if_aborted
                state.restore(reader)
                timings["restore_s"] = time.monotonic() - begun
            elif command.fresh:
                state.initialise()
                timings["values_s"] = time.monotonic() - filling
            elif back is not None and holds:
                begun = time.monotonic()
                assert state.shard is not None
                with state.filling():
                    self._copies.load(back, groups.global_rank % command.mesh.cp, state.shard)
                timings["restore_s"] = time.monotonic() - begun
        finally:
            generation.entering = False

    def _end_copies(self) -> None:
        """Until no thread reads the shard. Not to be abandoned meanwhile: the rest of the build would follow later."""
        generation = self._now
        generation.entering = True
        try:
            self._copies.leave()
            self._saver.leave()
        finally:
            generation.entering = False

    def _heal(self, heal: Heal, connector: Connector) -> int:
        """This worker's part in a heal, with its planned faults."""
        generation = self._now
        step, rank = generation.command.step, generation.global_rank
        self._stamps.stamp(step, Phase.HEAL)

        def inject(role: str) -> None:
            self._injector.check(phase="heal", step=step, rank=rank, role=role)

        worker, state, back = self._spec.worker, self._transaction, generation.command.step_back
        if back is not None:
            return heal_from_copies(heal, back, worker, self._copies, state, connector, inject, generation.timings)
        members, groups = generation.command.members, generation.groups
        return heal_over_link(heal, worker, members, state, groups, connector, inject, generation.timings)

    def request_boundary(self) -> None:
        """Stop after the step that the next vote agrees on. Called by the control thread."""
        if self._generation is not None:
            self._generation.boundary_requested = True

    def save_soon(self) -> None:
        """The next checkpoint is due at once. Called by the control thread."""
        self._saver.schedule.ask()

    def become_spare(self) -> None:
        """Drop all state and release the GPU and its memory."""
        connector = None if self._generation is None else self._generation.connector
        self._generation = None  # with its groups, which the next lines free
        self._context_releaser.left_mesh()
        self._copies.clear()
        self._saver.clear()
        self._transaction.drop()
        forget_groups()
        if connector is not None:
            connector.close()
            if not connector.wait_closed(BECOME_SPARE_S):
                log.warning("groups of the old generation still hold memory after %.0f s", BECOME_SPARE_S)
        del connector
        self._device_lease.give_back()

    # ------------------------------------------------------------ stepping

    def train(self) -> str:
        """Step until a boundary or the end; returns `boundary` or `finished`. Raises what breaks a step off."""
        generation = self._now
        state, step_config = self._transaction, self._spec.task.step
        self._notices.before_steps()  # the warm-up and the build
        with translated(generation.connector):
            assert state.shard is not None
            self._copies.first(state.shard)
            if generation.command.saves and state.applied:
                self._save_state()
            while state.applied < step_config.steps:
                step = state.applied
                self._watch("idle", step)
                if self._validate_if_due(step) and self._stops_at(step):
                    return self._finished()
                begun = time.monotonic()
                # A step's result is published once the next one is under way.
                self._send(through=step - 1)
                outcome, local = state.run(
                    step,
                    boundary=generation.boundary_requested,
                    flags=partial(self._flags, step),
                )
                self._stamps.waited_for_data(local.data_wait_s)
                self._prepare_host_memory()
                self._copies.after_step(state.shard, outcome)
                self._record(outcome, local, time.monotonic() - begun, self.progress.pauses.within_s(begun))
                self._save(outcome)
                self._notices.after_step(step, step_config.deterministic or not self._device_lease.gpu)
                if outcome.boundary and state.applied < step_config.steps:
                    return "boundary"
                self._release_contexts(step)
            if self._validate_if_due(state.applied):
                self._stops_at(state.applied)
        return self._finished()

    def _finished(self) -> str:
        self._stamps.stamp(self.applied, Phase.SAVE)
        if not self._saver.wait(self._spec.run.timeouts.finalize_s / 2):
            log.warning("the last checkpoint's part is not written yet; the run ends without it")
        return "finished"

    def _release_contexts(self, step: int) -> None:
        """Not while memory is pinned, which touches every context."""
        if not (self._copies.pinning.is_running or self._saver.pinning.is_running):
            self._context_releaser.committed(self.device, self._now.command.generation, step, self._now.global_rank)

    def _before_apply(self) -> None:
        self._copies.before_apply()
        self._saver.before_apply()

    def _flags(self, step: int) -> Flag:
        copies = self._copies.flags(step + 1)
        if self._now.place is None:
            return copies
        return copies | self._saver.flags(step + 1, self._spec.task.step.steps, self._now.global_rank)

    def _save(self, outcome: Outcome) -> None:
        """Save after a step whose vote requested it; training waits for the copy only, and before the next apply."""
        state, place = self._transaction, self._now.place
        if outcome.checkpoint_missed and place is not None:
            self._saver.missed(place, state.applied)
        if outcome.checkpoint and place is not None:
            assert state.shard is not None
            self._watch("save", state.applied)
            self._saver.save(state.shard, state.shapes, place)

    def _prepare_host_memory(self) -> None:
        """For copies and checkpoints of this generation; not before the first step: the optimizer's moments begin
        there."""
        generation = self._now
        if generation.is_host_memory_prepared:
            return
        generation.is_host_memory_prepared = True
        state = self._transaction
        assert state.shard is not None
        self._copies.prepare(state.shard)
        if generation.place is not None:
            self._saver.prepare(state.shard, state.shapes, generation.place)

    def _save_state(self) -> None:
        """Save at the beginning of this generation: a node is about to leave, and the step that ran was given up."""
        state, place = self._transaction, self._now.place
        if place is None or not self._saver.wait(SAVED_S):
            log.warning("no checkpoint of step %d: none are taken, or the last is still being written", state.applied)
            return
        assert state.shard is not None
        self._prepare_host_memory()
        self._watch("save", state.applied)
        self._saver.save(state.shard, state.shapes, place)

    def finalize(self, cause: str, worker: str, term: int, generation: int) -> Finalized | None:
        """Ring 0 gathers and writes the weights; its first rank digests them."""
        now = self._now
        self._stamps.stamp(self.applied, Phase.FINALIZE)
        run = self._spec.run
        # A storage that is away is waited for once, here: half of what the coordinator gives for all of it.
        wait_s = run.timeouts.finalize_s / 2
        storage = Storage(run.storage_uri, timeout_s=wait_s, tell=self._tell_waiting).open(write=False)
        with translated(now.connector):
            digest = gather_weights(self._transaction, now.joined, storage)
        self._stamps.stamp(self.applied, Phase.IDLE)
        return None if digest is None else Finalized(cause, worker, term, generation, digest)

    def _stops_at(self, step: int) -> bool:
        """Whether the driver's callbacks end the run at this validation. Saves where they want a checkpoint, and before
        the end."""
        if not self._spec.task.asks_callbacks:
            return False
        command = self._now.command
        self._send(through=step - 1)
        # Global rank 0 asks for all; the others only where its answer, sent to all, was lost on its way to them.
        after_s = 0.0 if command.members[0] == self._spec.worker else ASK_AGAIN_S
        answer = self.callback_wait.wait(command.generation, step, self._while_others_work, after_s)
        is_saved = self._saver.newest == (step, command.term, command.generation)  # by the schedule
        if (answer.stops or answer.saves) and not is_saved:
            self._save_state()
        return answer.stops

    def _validate_if_due(self, step: int) -> bool:
        """Returns whether there was a validation."""
        if not self._spec.task.step.validates_after(step):
            return False
        begun = time.monotonic()
        self._stamps.stamp(step, Phase.VALIDATE)
        found = self._transaction.validate(self.warm.data.held_out_loader, self.warm.data.held_out)
        if self._speaks:
            self.records.publish([Validated(step - 1, found, time.monotonic() - begun)])
        return True

    def _publish_copies(self, figures: dict[str, Any]) -> None:
        """Called in the thread of an exchange; global rank 0 speaks for all."""
        if self._speaks:
            self.records.publish([Copied(figures)])

    def _announce_compilation(self, name: str) -> None:
        """Stamp that this process is about to compile `name`, or with "" that it has."""
        self.start_work.compiling = name
        if name:
            self._stamps.compile_begins()
            log.info("compiling %s", name)
        else:
            self._stamps.compile_ended()

    def _record(self, outcome: Outcome, local: Local, took_s: float, frozen_s: float) -> None:
        generation = self._now
        lr = learning_rate(outcome.vote.step, self._spec.task.optim, self._spec.task.lr_schedule)
        step_s = max(1e-9, took_s - frozen_s)
        metrics = replace(
            outcome.metrics(lr, step_s, generation.joined.mesh, generation.command.generation),
            data_wait_s=local.data_wait_s,
            expert_load_max=outcome.expert_load or None,
            expert_parts=local.expert_parts,
            **local.hops.figures(),  # their CUDA events completed before the vote
        )
        remark = remark_on(outcome, self._transaction.sample_ids)
        interval_s = self._saver.schedule.interval_s
        self.records.add(StepRecord(metrics, outcome, interval_s, remark, frozen_s, gpu_memory()))

    def _send(self, through: int) -> None:
        if self._speaks:
            self.records.send(through)

    def _watch(self, phase: str, step: int, hop: int | None = None) -> None:
        """Stamp progress and inject planned faults. Faults in forward and backward fire at a hop. Exchanges of experts
        are parts of forward and backward: no stamp says so."""
        if phase not in EXCHANGES:
            self._stamps.stamp(step, Phase[phase.upper()], -1 if hop is None else hop)
        if self.device.type == "cuda":
            self.progress.marks.leave()
        if phase in ABORTABLE:
            self._raise_if_aborted()
        if phase in ("forward", "backward") and hop is None:
            return
        rank = -1 if self._generation is None else self._generation.global_rank
        self._injector.check(phase=phase, step=step, rank=rank, hop=hop)

    def _while_others_work(self) -> None:
        """A slow data source, or a slow callback, is no stall of this rank; the ranks that wait for it have a limit
        too."""
        self.progress.num_data_waits += 1
        self._raise_if_aborted()

    def _raise_if_aborted(self) -> None:
        """Compute and data reads do not notice an abort; without this check a long one would look like a hang."""
        if self.aborted:
            raise GroupAborted("aborted between two exchanges")
