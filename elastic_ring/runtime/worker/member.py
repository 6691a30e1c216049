"""The training side of a worker: trains to a boundary, the end or an abort, and writes the weights.

It runs in the training thread; the control thread calls `abort` and `report`. No membership decisions here.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from elastic_ring.control.messages import Finalize, Finalized, Report, Resumed
from elastic_ring.monitor.metrics import JOURNAL_NAME
from elastic_ring.monitor.stamps import Phase, StampWriter
from elastic_ring.runtime.gpu.cuda_contexts import ContextReleaser
from elastic_ring.runtime.groups.groups import forget_groups
from elastic_ring.runtime.groups.transport import translated
from elastic_ring.runtime.notices import StepRecord, Validated
from elastic_ring.runtime.worker.coordinator_client import ASK_AGAIN_S, CallbackWait, WorkerSpec
from elastic_ring.runtime.worker.faults import Injector
from elastic_ring.runtime.worker.generation_build import GenerationBuild
from elastic_ring.runtime.worker.member_parts import Generation, MemberParts, Publish
from elastic_ring.runtime.worker.saver import SendPart
from elastic_ring.state.storage.folder import Storage
from elastic_ring.train.optim import learning_rate
from elastic_ring.train.passes import Local, validate
from elastic_ring.train.vote import Flag, Outcome, remark_on
from elastic_ring.train.weights import gather_weights

log = logging.getLogger(__name__)

BECOME_SPARE_S = 10.0  # for a node's GPU to be empty before the next process may take it
SAVED_S = 5.0  # for the part that is being written to be done


class Member:
    """The training state of one worker process, as its control thread and its training thread use it."""

    def __init__(
        self,
        spec: WorkerSpec,
        stamps: StampWriter,
        injector: Injector,
        publish: Publish,
        saved: SendPart = lambda part: None,
        ask_callbacks: Callable[[int, int], None] = lambda generation, step: None,
    ) -> None:
        self._spec = spec
        self.parts = MemberParts(spec, stamps, injector, publish, saved)
        self.callback_wait = CallbackWait(ask_callbacks)
        self.context_releaser = ContextReleaser(spec.scaling.release_contexts and spec.scaling.device == "cuda")
        self._abandoned: list[tuple[Generation | None, nn.Module | None]] = []

    # ------------------------------------------------------------ control thread

    @property
    def applied(self) -> int:
        return self.parts.transaction.applied

    def moved(self) -> tuple[int, ...]:
        """Numbers that grow while a step moves; read by any thread, at any time."""
        progress = self.parts.progress
        return self.parts.stamps.num_stamps, progress.marks.num_passed, progress.num_data_waits

    def exchange_error(self) -> str:
        """The error of a broken link in the current groups; empty if there is none."""
        generation = self.parts.generation
        return "" if generation is None else generation.connector.exchange_error()

    @property
    def writing(self) -> bool:
        """Whether the shard is being written or moved; that thread must not be abandoned: it would write later."""
        generation = self.parts.generation
        return (generation is not None and generation.is_moving_shard) or self.parts.transaction.held.applying

    def abort(self, paused: threading.Event, timeout_s: float) -> bool:
        """Abort the exchanges that the training thread waits for. Returns whether it is `paused` within `timeout_s`."""
        if self.parts.generation is None:
            return paused.wait(timeout_s)
        return self.parts.generation.connector.abort_until(paused, timeout_s)

    def abandon_groups(self) -> None:
        """Keep the groups that an abandoned thread waits in: freeing them would block."""
        self._abandoned.append((self.parts.generation, self.parts.transaction.model))
        self.parts.transaction.leave()

    def report(self, cause: str, term: int, generation: int, kind: str) -> Report:
        """The state that this worker holds; call it only while the training thread is paused."""
        state = self.parts.transaction.held
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
            healthy=self.parts.lease.healthy(),
            last_vote=state.last,
            gradient_membership_id=state.gradient_membership_id,
            copies=self.parts.copies.store.held(),
            state_id=state.valid_id,
        )

    def become_spare(self) -> None:
        """Drop all state and release the GPU and its memory."""
        parts = self.parts
        connector = None if parts.generation is None else parts.generation.connector
        parts.generation = None  # with its groups, which the next lines free
        self.context_releaser.left_mesh()
        parts.copies.clear()
        parts.saver.clear()
        parts.transaction.drop()
        forget_groups()
        if connector is not None:
            connector.close()
            if not connector.wait_closed(BECOME_SPARE_S):
                log.warning("groups of the old generation still hold memory after %.0f s", BECOME_SPARE_S)
        del connector
        parts.lease.give_back()

    # ------------------------------------------------------------ training thread

    def build(self, cause: str) -> tuple[Resumed, dict[str, float | str]]:
        """As `GenerationBuild.run`."""
        return GenerationBuild(self.parts).run(cause)

    def train(self) -> str:
        """As `StepLoop.run`."""
        return StepLoop(self.parts, self.callback_wait, self.context_releaser).run()

    def finalize(self, cause: str, command: Finalize) -> Finalized | None:
        """Ring 0 gathers and writes the weights; its first rank digests them."""
        parts, run = self.parts, self._spec.run
        parts.stamps.stamp(self.applied, Phase.FINALIZE)
        # A storage that is away is waited for once, here: half of the coordinator's limit for all of it.
        wait_s = run.timeouts.finalize_s / 2
        storage = Storage(run.storage_uri, timeout_s=wait_s, anchor=JOURNAL_NAME, tell=parts.tell_waiting)
        storage.open(write=False)
        with translated(parts.now.connector):
            digest = gather_weights(parts.transaction, parts.now.joined, storage)
        parts.stamps.stamp(self.applied, Phase.IDLE)
        if digest is None:
            return None
        return Finalized(cause, self._spec.worker, command.term, command.generation, digest)


class StepLoop:
    """Steps of one generation: validates, saves, copies and records between them."""

    def __init__(self, parts: MemberParts, callback_wait: CallbackWait, context_releaser: ContextReleaser) -> None:
        self._parts, self._generation, self._state = parts, parts.now, parts.transaction
        self._task, self._saver, self._copies = parts.spec.task, parts.saver, parts.copies
        self._callback_wait, self._context_releaser = callback_wait, context_releaser

    def run(self) -> str:
        """Step until a boundary or the end; returns `boundary` or `finished`. Raises the error of a failed step."""
        parts, state, steps = self._parts, self._state, self._task.step.steps
        is_deterministic = self._task.step.deterministic or not parts.lease.gpu
        parts.notices.compilations.before_steps()  # the warm-up and the build
        with translated(self._generation.connector):
            assert state.shard is not None
            self._copies.first(state.shard)
            if self._generation.command.saves and state.applied:
                self._save_now()
            while state.applied < steps:
                step = state.applied
                parts.watch("idle", step)
                if self._validate_if_due(step) and self._stops_at(step):
                    return self._finished()
                begun = time.monotonic()
                # A step's result is published once the next one is under way.
                if parts.speaks:
                    parts.records.send(through=step - 1)
                boundary = self._generation.boundary_requested
                record, flags = partial(self._record, begun), partial(self._flags, step + 1)
                outcome, local = state.run(step, boundary=boundary, flags=flags, cut_off=record)
                parts.stamps.waited_for_data(local.data_wait_s)
                self._prepare_host_memory()
                self._copies.after_step(state.shard, outcome)
                record(outcome, local)
                self._save(outcome)
                parts.notices.after_step(step, is_deterministic)
                if outcome.boundary and state.applied < steps:
                    return "boundary"
                if not (self._copies.pinning.is_running or self._saver.pinning.is_running):  # it touches every context
                    at = self._generation.command.generation, step, self._generation.global_rank
                    self._context_releaser.committed(parts.lease.device, *at)
            if self._validate_if_due(state.applied):
                self._stops_at(state.applied)
        return self._finished()

    def _finished(self) -> str:
        self._parts.stamps.stamp(self._state.applied, Phase.SAVE)
        if not self._saver.wait(self._parts.spec.run.timeouts.finalize_s / 2):
            log.warning("the last checkpoint's part is not written yet; the run ends without it")
        return "finished"

    def _validate_if_due(self, step: int) -> bool:
        """Returns whether there was a validation."""
        if not self._task.step.validates_after(step):
            return False
        begun, data = time.monotonic(), self._parts.warm.data
        self._parts.stamps.stamp(step, Phase.VALIDATE)
        measured = validate(self._state, data.held_out_loader, data.held_out)
        if self._parts.speaks:
            took_s = time.monotonic() - begun
            self._parts.records.publish([Validated(step - 1, measured, took_s, self._state.now.id)])
        return True

    def _stops_at(self, step: int) -> bool:
        """Whether the driver's callbacks end the run at this validation. Saves where they want a checkpoint, and before
        the end."""
        if not self._task.asks_callbacks:
            return False
        command = self._generation.command
        if self._parts.speaks:
            self._parts.records.send(through=step - 1)
        # Global rank 0 asks for all; the others only if its answer, sent to all, was lost on its way to them.
        after_s = 0.0 if command.members[0] == self._parts.spec.worker else ASK_AGAIN_S
        answer = self._callback_wait.wait(command.generation, step, self._parts.wait_for_peers, after_s)
        is_saved = self._saver.newest == (step, command.term, command.generation)  # by the schedule
        if (answer.stops or answer.saves) and not is_saved:
            self._save_now()
        return answer.stops

    def _flags(self, applied: int) -> Flag:
        """This rank's flags in the vote of the step that makes `applied`."""
        copies = self._copies.flags(applied)
        if self._generation.place is None:
            return copies
        return copies | self._saver.flags(applied, self._task.step.steps, self._generation.global_rank)

    def _record(self, begun: float, outcome: Outcome, local: Local) -> None:
        generation = self._generation
        took_s, frozen_s = time.monotonic() - begun, self._parts.progress.pauses.within_s(begun)
        lr = learning_rate(outcome.vote.step, self._task.optim, self._task.lr_schedule)
        step_s = max(1e-9, took_s - frozen_s)
        metrics = replace(
            outcome.metrics(lr, step_s, generation.joined.mesh, generation.command.generation),
            data_wait_s=local.data_wait_s,
            expert_load_max=outcome.expert_load or None,
            expert_parts=local.expert_parts,
            **local.hops.figures(),  # their CUDA events completed before the vote
        )
        remark = remark_on(outcome, self._state.sample_ids)
        interval_s = self._saver.schedule.interval_s
        self._parts.records.add(StepRecord(metrics, outcome, interval_s, remark, frozen_s, gpu_memory()))

    def _prepare_host_memory(self) -> None:
        """Pin memory for copies and checkpoints, once in a generation, and not before its first step: the optimizer's
        moments begin there."""
        generation, state = self._generation, self._state
        if generation.is_host_memory_prepared:
            return
        generation.is_host_memory_prepared = True
        assert state.shard is not None
        self._copies.prepare(state.shard)
        if generation.place is not None:
            self._saver.prepare(state.shard, state.shapes, generation.place)

    def _save(self, outcome: Outcome) -> None:
        """Save after a step whose vote requested it; training waits for the copy only, and before the next apply."""
        state, place = self._state, self._generation.place
        if outcome.checkpoint_missed and place is not None:
            self._saver.missed(place, state.applied)
        if outcome.checkpoint and place is not None:
            assert state.shard is not None
            self._parts.watch("save", state.applied)
            self._saver.save(state.shard, state.shapes, place)

    def _save_now(self) -> None:
        """Save between two steps: a node is about to leave, or the callbacks want a checkpoint."""
        state, place = self._state, self._generation.place
        if place is None or not self._saver.wait(SAVED_S):
            log.warning("no checkpoint of step %d: none are taken, or the last is still being written", state.applied)
            return
        assert state.shard is not None
        self._prepare_host_memory()
        self._parts.watch("save", state.applied)
        self._saver.save(state.shard, state.shapes, place)


def gpu_memory() -> dict[str, int]:
    """Bytes of this process's GPU that torch holds, by kind; {} without a GPU. Takes 0.1 ms on an H200."""
    if not torch.cuda.is_initialized():
        return {}
    stats = torch.cuda.memory_stats()
    return {
        "allocated": stats["allocated_bytes.all.current"],
        "reserved": stats["reserved_bytes.all.current"],
        "fragmented": stats["inactive_split_bytes.all.current"],
        "peak": stats["allocated_bytes.all.peak"],
    }
