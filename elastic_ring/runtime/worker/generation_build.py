"""Builds one generation in a worker's training thread: connects its groups, rolls the state forward, heals newcomers.

A newcomer gets its `cp_rank`'s live shard from a donor, or in a build that steps back a snapshot from a peer's memory,
whole or as parts of a parity. The command names the donor, who then holds the snapshot, a copy or a parity, and for a
parity the other workers of its group, whose snapshots are its remaining parts. No membership decisions here.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from elastic_ring.control.messages import Build, Heal, Resumed, SnapshotId
from elastic_ring.monitor.stamps import Phase
from elastic_ring.runtime.gpu.device import empty_cache
from elastic_ring.runtime.groups.groups import Connector, Groups, Rendezvous, forget_groups
from elastic_ring.runtime.groups.nccl import has_failed
from elastic_ring.runtime.groups.transport import LOOPBACK, translated
from elastic_ring.runtime.notices import LeftOut
from elastic_ring.runtime.worker.coordinator_client import CommandDetails
from elastic_ring.runtime.worker.copies import CopyStore
from elastic_ring.runtime.worker.member_parts import Generation, MemberParts
from elastic_ring.runtime.worker.saver import Place, open_checkpoint
from elastic_ring.runtime.worker.training_thread import error_kind, error_text
from elastic_ring.state import sealed
from elastic_ring.state.snapshot import named
from elastic_ring.state.transfer import Link, receive_shard, send_shard
from elastic_ring.train.memory import MemoryRelief, free_caches
from elastic_ring.train.startup.check import ModelRefused, check_model
from elastic_ring.train.transaction import Transaction

log = logging.getLogger(__name__)

NAMED = 4096  # so many skipped sequences are named one by one


@contextmanager
def refusing(device: torch.device) -> Iterator[None]:
    """Turns what model, loss or data raise into ModelRefused: a rebuild is no fresh start and has no check."""
    try:
        yield
    except Exception as error:
        if error_kind(error, lambda: has_failed(device)) != "user":
            raise
        problem = f"a pass of the start-up check raised {type(error).__name__}: {error}"
        raise ModelRefused(f"{problem}; mend model, loss or data\n{error_text(error)}") from error


def prepare(parts: MemberParts, command: Build, details: CommandDetails) -> None:
    """Begin the generation of this build, in the control thread, so that it can be cancelled from here on."""
    timeouts, store = parts.spec.run.timeouts, details.store
    assert store is not None, "a Build comes with its store"
    restore_s = timeouts.restore_s if command.restore is not None else 0.0  # all wait for the slowest reader
    where = Rendezvous(
        host=store.host,
        port=store.port,
        secret=store.secret,
        prefix=f"{command.term}/{command.generation}",
        address=LOOPBACK if store.host == LOOPBACK else parts.spec.address,
        timeout_s=timeouts.build_s + restore_s,
        collective_s=timeouts.collective_s,
        hosts=store.hosts,
    )
    before = parts.generation
    if before is not None:  # by now every member of it is paused or gone
        before.connector.close()
    parts.generation = Generation(command, Connector(where, parts.lease.device), details, before)
    parts.records.mark_published(details.published)
    if command.restore is not None or command.step_back is not None:
        parts.records.go_back(command.step)


class GenerationBuild:
    """One worker's part in the build of the present generation of `parts`."""

    def __init__(self, parts: MemberParts) -> None:
        self._parts, self._generation = parts, parts.now
        self._command, self._connector = self._generation.command, self._generation.connector
        self._timings, self._state = dict[str, float](), parts.transaction
        self._worker = parts.spec.worker
        self._receives = any(self._worker in heal.newcomers for heal in self._command.heals)

    def run(self, cause: str) -> tuple[Resumed, dict[str, float | str]]:
        """Connect, roll forward, heal; returns the answer and the durations. Raises any error on the way.

        `connect_s`, `roll_s` and `heal_s` add up to all of it: work while groups connect counts as `roll_s`.
        """
        begun, begun_unix_s = time.monotonic(), time.time()
        parts, generation, command, connector = self._parts, self._generation, self._command, self._connector
        state = self._state
        with self._timed("free_s"):
            self._free_last_generation()
        if parts.in_mesh:
            place = command.members.index(self._worker)
            with self._timed("device_s"):  # the GPU this worker owns, or a free one, selected in this thread
                share = -(-parts.warm.num_parameters // command.mesh.cp)
                device = parts.lease.take(place, share, parts.spec.run.timeouts.report_s, connector.raise_if_aborted)
                connector.device = device
                parts.progress.marks.move_to(device)
                state.use(device)
                if device.type == "cuda":
                    torch.cuda.set_device(device)
            generation.groups = connector.open(command.mesh, place)
            if (news := parts.warm.data.news(command.corpus, command.skips)) is not None:
                loader, order, skips = news
                state.read_from(loader, order)
                if parts.speaks:
                    left_out = [(skip, order.left_out(skip)[: NAMED + 1]) for skip in skips]
                    parts.records.publish([LeftOut(skip.first_step, skip.num_batches, ids) for skip, ids in left_out])
        opened, groups = time.monotonic(), generation.groups
        if groups is not None:
            self._enter(groups)
        entered = time.monotonic()
        if groups is not None:
            connector.join(groups)
        joined = time.monotonic()
        if command.roll_forward is not None:
            with translated(connector):
                state.roll_forward(command.roll_forward, holds=not self._receives and state.valid)
        rolled = time.monotonic()
        num_bytes = sum(self._heal(heal) for heal in command.heals if self._worker in (*heal.senders, *heal.newcomers))
        healed = time.monotonic()
        empty_cache(parts.lease.device)
        assert not parts.in_mesh or (state.valid and state.applied == command.step), (state.applied, command.step)
        starts = command.fresh and command.restore is None
        if groups is not None and starts and parts.spec.task.step.check_model:
            with self._timed("check_s"), refusing(parts.lease.device), translated(connector):
                check_model(state.task, groups, state)
        if groups is not None and (command.copy_holders or command.parity_groups):
            group = connector.host_link("copies", command.members, self._worker)
            parts.copies.begin(command, groups.global_rank, group, parts.lease.device)
        parts.stamps.stamp(command.step, Phase.IDLE)
        if groups is not None and (terms := generation.details.checkpoint) is not None:
            identity, rank = (command.term, command.generation), groups.global_rank
            generation.place = Place(*identity, command.mesh, rank, terms.attempt, terms.lineage)
            parts.saver.begin(terms, pins=parts.lease.device.type == "cuda")
        measured: dict[str, float | str] = {
            "connect_s": opened - begun + joined - entered,
            "roll_s": entered - opened + rolled - joined,
            "heal_s": healed - rolled,
            "heal_bytes": num_bytes,
            "begun_unix_s": begun_unix_s,
            "healed": self._receives,
            "pid": os.getpid(),
            "gpu": parts.lease.gpu,
            "join_s": joined - entered,
            **connector.timings,
            **self._timings,
        }
        log.info("generation %d: step %d, %s", command.generation, command.step, measured)
        return Resumed(cause, self._worker, command.term, command.generation, command.step), measured

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        begun = time.monotonic()
        yield
        self._timings[name] = time.monotonic() - begun

    def _free_last_generation(self) -> None:
        parts, command, state = self._parts, self._command, self._state
        self._generation.before, self._generation.boundary_requested = None, False
        parts.stamps.generation = command.generation
        parts.stamps.stamp(command.step, Phase.REBUILD)
        state.leave()
        with self._generation.moving_shard():  # until no thread reads the shard
            parts.copies.leave()
            parts.saver.leave()
        parts.copies.keep(command.keep, command.step_back)  # the first may be older, if more ranks hold it
        forget_groups()
        state.relief = MemoryRelief(command.memory_reliefs)
        if command.memory_reliefs:
            free_caches(parts.lease.device)

    def _enter(self, groups: Groups) -> None:
        """Wrap the module and load this worker's state while the groups connect; only `world` is used.

        An abort is noticed afterwards, and keeps the state.
        """
        command, connector, state = self._command, self._connector, self._state
        has_state, back = not command.fresh and not self._receives, command.step_back
        with translated(connector):  # a mixed ring would add in other ways, or hang over messages of other sizes
            state.task = self._parts.warm.kernels.settle(state.task, groups.world, has_state)
        with self._generation.moving_shard():  # a GPU whose last process is just ending may keep this thread waiting
            with self._timed("wrap_s"):
                keep = has_state and back is None
                state.enter(groups, (command.term, command.generation), keep=keep, nodes=command.nodes)
            if command.restore is not None:
                with self._timed("restore_s"):
                    reader = open_checkpoint(self._parts.spec.run, command.restore, self._parts.tell_waiting)
                    reader.check = connector.raise_if_aborted
                    state.restore(reader)
            elif command.fresh:
                with self._timed("values_s"):
                    state.initialise()
            elif back is not None and has_state:
                assert state.shard is not None
                with self._timed("restore_s"), state.filling():
                    self._parts.copies.store.load(back, groups.global_rank % command.mesh.cp, state.shard)

    def _heal(self, heal: Heal) -> int:
        """This worker's part in a heal, with its planned faults; returns the bytes transferred."""
        parts, generation, command, state = self._parts, self._generation, self._command, self._state
        step, rank = command.step, generation.global_rank
        parts.stamps.stamp(step, Phase.HEAL)

        def inject(role: str) -> None:
            parts.injector.check(phase="heal", step=step, rank=rank, role=role)

        worker, connector, timings = self._worker, self._connector, self._timings
        if command.step_back is not None:
            store = parts.copies.store
            return heal_from_copies(heal, command.step_back, worker, store, state, connector, inject, timings)
        return heal_over_link(heal, worker, command.members, state, generation.groups, connector, inject, timings)


def heal_over_link(
    heal: Heal,
    worker: str,
    members: Sequence[str],
    state: Transaction,
    groups: Groups | None,
    connector: Connector,
    inject: Callable[[str], None],
    timings: dict[str, float],
) -> int:
    """Send the live shard to the newcomers of this heal, or receive it; returns the bytes transferred.

    `inject(role)` is called after each chunk, for planned faults; durations are added to `timings`.
    Raises GroupAborted, PeerFailed, DigestMismatch; a newcomer's shard is not valid after any of them.
    """
    role, begun = "donor" if worker == heal.donor else "spare", time.monotonic()
    link = heal_link(heal, worker, members, groups, connector)
    timings["link_s"] = time.monotonic() - begun
    with translated(connector):
        assert state.shard is not None
        if role == "donor":
            assert state.valid
            num_bytes = send_shard(state.shard, link, after_chunk=lambda: inject(role))
        else:
            with state.filling():
                num_bytes = receive_shard(state.shard, link, after_chunk=lambda: inject(role))
    connector.retire(link)
    timings.update(link.timings)
    return num_bytes


def heal_link(heal: Heal, worker: str, members: Sequence[str], groups: Groups | None, connector: Connector) -> Link:
    """The generation's own groups if all workers of the heal hold one shard in its mesh, else a link of its own."""
    workers = (heal.donor, *heal.newcomers)
    if groups is not None and set(workers) <= set(members):
        link = groups.link([members.index(name) for name in workers])
        if link is not None:
            return link
    return connector.link(f"{heal.cp_rank}/{heal.donor}", workers, worker)


def heal_from_copies(
    heal: Heal,
    snapshot_id: SnapshotId,
    worker: str,
    store: CopyStore,
    state: Transaction,
    connector: Connector,
    inject: Callable[[str], None],
    timings: dict[str, float],
) -> int:
    """Send the snapshot to the newcomers, or receive it; returns the bytes sent to each, or received.

    `inject(role)` is called after each chunk, for planned faults. Raises GroupAborted, PeerFailed, DigestMismatch; a
    newcomer's shard is not valid after any of them.
    """
    own: Tensor | None = None  # of a parity: this worker's part
    if worker == heal.donor:
        own = store.piece(snapshot_id, heal.cp_rank, heal.parity_from)
    elif worker in heal.senders:
        own = store.own_piece(snapshot_id)
    begun = time.monotonic()
    workers = tuple(dict.fromkeys((*heal.senders, *heal.newcomers)))
    link = connector.host_link(f"copies/{heal.cp_rank}/{heal.donor}/{heal.newcomers[0]}", workers, worker)
    timings["link_s"] = time.monotonic() - begun
    with translated(connector):
        if worker in heal.newcomers:
            with state.filling():
                num_bytes = _receive(heal, snapshot_id, link, workers, own, store, state, lambda: inject("spare"))
        else:
            assert own is not None
            receivers, num_bytes = [workers.index(newcomer) for newcomer in heal.newcomers], own.numel()
            for work in [work for receiver in receivers for work in sealed.send(link, own, receiver)]:
                work.wait()
                inject("donor")
            for receiver in receivers:  # between hosts a completed send may still be in flight: wait for its receipt
                link.recv([torch.empty(1, dtype=torch.uint8)], receiver, 0).wait()
    timings["wire_s"] = time.monotonic() - begun - timings["link_s"]
    route = f"from {', '.join(heal.senders)} to {', '.join(heal.newcomers)}"
    form = "a parity and its parts" if heal.parity_from else "a copy"
    size = f"{num_bytes} bytes in {timings['wire_s']:.3f} s"
    log.warning(f"cp_rank {heal.cp_rank} of {named(snapshot_id)} went {route} as {form}: {size}")
    return num_bytes


def _receive(
    heal: Heal,
    snapshot_id: SnapshotId,
    link: Any,
    workers: Sequence[str],
    own: Tensor | None,
    store: CopyStore,
    state: Transaction,
    after_chunk: Callable[[], None],
) -> int:
    """`workers`: by their ranks in `link`; `own`: this worker's part of the parity, if it is a sender itself."""
    pieces: list[Tensor] = []
    num_bytes, senders = 0, [workers.index(sender) for sender in heal.senders]
    for rank in senders:
        if own is not None and rank == link.rank():
            pieces.append(own)
            continue
        name = f"what {workers[rank]} sent of cp_rank {heal.cp_rank} of {named(snapshot_id)}"
        pieces.append(sealed.receive(link, rank, store.buffers.take, name, after_chunk))
        num_bytes += pieces[-1].numel()
    for rank in senders:
        if own is None or rank != link.rank():
            link.send([torch.ones(1, dtype=torch.uint8)], rank, 0).wait()
    whole, *remaining = pieces
    if heal.parity_from:
        parity = whole.clone() if own is whole else whole  # it is used up, and may be needed once more
        whole = sealed.missing_piece(
            parity, remaining, f"the snapshot of cp_rank {heal.cp_rank} of {named(snapshot_id)}"
        )
    assert state.shard is not None
    store.fill(snapshot_id, heal.cp_rank, whole, state.shard)
    return num_bytes
