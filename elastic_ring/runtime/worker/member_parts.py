"""The parts of one member: kept from its warm-up to its end, with its present generation.

No stepping and no building here: `member` and `generation_build` do that with these parts.
"""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from elastic_ring.control.messages import BatchSkip, Build, CorpusVersion
from elastic_ring.data.filesystem import patiently
from elastic_ring.data.loader import Loader
from elastic_ring.data.prepared import with_versions
from elastic_ring.data.sampling.order import SampleOrder, SkippingOrder, by_batch
from elastic_ring.data.sampling.validation import ValidationSource, open_sets, with_sets
from elastic_ring.data.source import Source, fingerprinted, hold_out, open_source, order_of
from elastic_ring.errors import GroupAborted
from elastic_ring.faults import EXCHANGES
from elastic_ring.monitor.stamps import Phase, StampWriter
from elastic_ring.runtime.gpu.device import (
    DeviceLease,
    be_deterministic,
    kernel_cache,
    newcomer_bytes,
    poison,
    visible_gpus,
    warm_devices,
)
from elastic_ring.runtime.groups.groups import Connector, Groups
from elastic_ring.runtime.notices import Compiled, Notice, NotRepeatable, StepRecord, StorageAwaited
from elastic_ring.runtime.worker.coordinator_client import CommandDetails, StartWork, WorkerSpec
from elastic_ring.runtime.worker.copies import Copies
from elastic_ring.runtime.worker.env_fingerprint import Environment, NondeterminismLog, gpu_environment
from elastic_ring.runtime.worker.faults import Injector
from elastic_ring.runtime.worker.saver import Place, Saver, SendPart
from elastic_ring.runtime.worker.stall_watchdog import StepProgress
from elastic_ring.train.memory import MemoryGauge
from elastic_ring.train.startup.compilations import EVENTS, CompileWatch
from elastic_ring.train.startup.kernels import KernelAgreement
from elastic_ring.train.startup.layouts import attention_shapes
from elastic_ring.train.startup.warm import warm_up
from elastic_ring.train.task import TrainingTask
from elastic_ring.train.transaction import Transaction, TransactionOptions
from elastic_ring.train.vote import watch_of
from elastic_ring.train.wrap import num_frozen, num_parameters

log = logging.getLogger(__name__)

ABORTABLE = ("idle", "forward", "backward", "reduce", "update", *EXCHANGES)
KEPT_RECORDS = 16384
Publish = Callable[[Sequence[Notice]], None]
T = TypeVar("T")


class MemberData:
    """The data of one worker process: the corpus as it grows, the order of its sequences, and held-out sequences.

    `look` is called while a read takes long, and raises to end it; `tell` gets a line when storage is waited for, for
    at most `patience_s`. The constructor reads.
    """

    def __init__(
        self, task: TrainingTask, patience_s: float, look: Callable[[], None], tell: Callable[[str], None]
    ) -> None:
        self._task, self._patience_s, self._look, self._tell = task, patience_s, look, tell
        source, fingerprint = self._patiently(lambda: fingerprinted(task.data))
        self._training, held_out = hold_out(source, num_sequences=task.num_held_out)
        opened = self._patiently(lambda: open_sets(task.validation))
        self.fingerprint = with_sets(fingerprint, opened)
        sources = {name: source for name, (source, _) in opened.items()}
        self.held_out = ValidationSource(task.validation, held_out, sources)
        self.held_out_loader = self._loader(self.held_out, num_ahead=1)
        self._reads: tuple[tuple[CorpusVersion, ...], tuple[BatchSkip, ...]] = ((), ())

    def begin(self) -> tuple[Loader, SampleOrder]:
        """The loader and order of the corpus with which the run began, without skipped batches."""
        return self._loader(self._training), self._order()

    def news(
        self, versions: tuple[CorpusVersion, ...], skips: tuple[BatchSkip, ...]
    ) -> tuple[Loader, SkippingOrder, Sequence[BatchSkip]] | None:
        """The loader and order for a corpus that has grown or skips more since the last call, and the new `skips`; None
        if nothing changed. The held-out sequences stay the same.

        Raises ValueError for a changed manifest.
        """
        if (versions, skips) == self._reads:
            return None
        if versions:
            data = with_versions(self._task.data, by_batch(versions, skips))
            source = self._patiently(lambda: open_source(data))
            self._training, _ = hold_out(source, num_sequences=self._task.num_held_out)
        new = [skip for skip in skips if skip not in self._reads[1]]
        loader, order = self._loader(self._training), SkippingOrder(self._order(), skips)
        self._reads = versions, skips  # last: a failed read is tried again in the next build
        return loader, order, new

    def _order(self) -> SampleOrder:
        return order_of(self._training, self._task.step.seed, self._task.step.global_batch)

    def _loader(self, source: Source, num_ahead: int = 0) -> Loader:
        num_ahead = num_ahead or self._task.step.micro_batch
        return Loader(source, self._look, num_ahead, patience_s=self._patience_s, tell=self._tell)

    def _patiently(self, read: Callable[[], T]) -> T:
        return patiently(read, self._patience_s, self._tell)


class StepRecords:
    """The newest KEPT_RECORDS records of committed steps; `publish` hands some to the coordinator. Global rank 0
    publishes its own; the other ranks keep theirs in case it dies.

    The training thread adds and publishes; the control thread reads, and sets the published step.
    """

    def __init__(self, publish: Publish) -> None:
        self.publish = publish
        self._records: list[StepRecord] = []
        self._published = -1
        self._lock = threading.Lock()  # `_published`: read and moved on by the training thread, set by the other

    def add(self, record: StepRecord) -> None:
        while self._records and self._records[-1].metrics.step >= record.metrics.step:
            self._records.pop()  # of an attempt that was cut off
        self._records.append(record)
        del self._records[:-KEPT_RECORDS]

    def send(self, through: int) -> None:
        """Publish the records that have not been, up to step `through`."""
        with self._lock:
            ready = [record for record in self._records if self._published < record.metrics.step <= through]
            if ready:
                self.publish(ready)
                self._published = ready[-1].metrics.step

    def go_back(self, step: int) -> None:
        """Go back to a checkpoint: `step` runs next; records of it and of later steps do not count."""
        with self._lock:
            self._records = [record for record in self._records if record.metrics.step < step]
            self._published = step - 1

    def after(self, step: int) -> list[StepRecord]:
        """Records of committed steps newer than `step`."""
        return [record for record in self._records if record.metrics.step > step]

    def unsent(self) -> list[StepRecord]:
        """Records that `send` has not published yet."""
        return self.after(self._published)

    def mark_published(self, published: int) -> None:
        """The coordinator has the steps up to `published`, from any worker."""
        with self._lock:
            self._published = max(self._published, published)

    def rewind(self, published: int) -> None:
        """A new coordinator has the steps up to `published` only."""
        with self._lock:
            self._published = published


class StepNotices:
    """Publishes nondeterministic operators and compilations of a step, which should have neither."""

    def __init__(self, worker: str, publish: Publish) -> None:
        self._worker, self._publish = worker, publish
        self.nondeterminism, self.compilations = NondeterminismLog(), CompileWatch()

    def after_step(self, step: int, deterministic: bool) -> None:
        """`deterministic`: the run asks for such operators, or its device has no others."""
        reasons = self.nondeterminism.take()
        if step == 0 and not deterministic:
            reasons.append("deterministic=False")
        if reasons:
            self._publish([NotRepeatable(step, "; ".join(reasons))])
        later, before = self.compilations.of_step(step)
        if later or before is not None:
            self._publish([Compiled(step, self._worker, later, before or 0)])


@dataclass
class Generation:
    """One membership of this process: made with its connector, dropped whole.

    `before`: the last generation, until the training thread frees it, which may take a while. A worker that only gives
    its state away has no `groups`. `place`: of this rank's checkpoints, if it saves any.
    """

    command: Build
    connector: Connector
    details: CommandDetails
    before: Generation | None = None
    groups: Groups | None = None
    place: Place | None = None
    is_host_memory_prepared: bool = False
    is_moving_shard: bool = False
    boundary_requested: bool = False

    @property
    def joined(self) -> Groups:
        """The groups, of which this worker is a member."""
        assert self.groups is not None
        return self.groups

    @property
    def global_rank(self) -> int:
        """-1 outside of the groups."""
        return -1 if self.groups is None else self.groups.global_rank

    @contextmanager
    def moving_shard(self) -> Iterator[None]:
        """Inside, the training thread must not be abandoned: the rest of the move would follow later."""
        self.is_moving_shard = True
        try:
            yield
        finally:
            self.is_moving_shard = False


@dataclass(frozen=True)
class Warmed:
    """Results of a worker's warm-up. `num_parameters`: of the healed state; frozen parameters count by their bytes.
    `gpus`: names of the GPUs that this process sees. `environment`: of `gpu_environment`."""

    data: MemberData
    kernels: KernelAgreement
    transaction: Transaction
    num_parameters: int
    gpus: list[str]
    environment: Environment


class MemberParts:
    """One worker's parts and its present generation; a spare has no generation."""

    def __init__(
        self, spec: WorkerSpec, stamps: StampWriter, injector: Injector, publish: Publish, saved: SendPart
    ) -> None:
        self.spec, self.stamps, self.injector = spec, stamps, injector
        self.records = StepRecords(publish)
        self.notices = StepNotices(spec.worker, publish)
        self.progress, self.start_work = StepProgress(), StartWork()
        self.copies = Copies(spec.run, spec.worker, lambda copied: publish([copied]) if self.speaks else None)
        self.saver = Saver(
            spec.run, saved, lambda step, rank: injector.check(phase="upload", step=step, rank=rank), self.tell_waiting
        )
        scaling = spec.scaling
        self.lease = DeviceLease(scaling.device, spec.run.name, state_bytes=newcomer_bytes(scaling.cpu_offload))
        self.generation: Generation | None = None
        self.warm: Warmed
        """From `warm_up` on."""

    @property
    def transaction(self) -> Transaction:
        return self.warm.transaction

    @property
    def now(self) -> Generation:
        """The present generation of a member."""
        assert self.generation is not None
        return self.generation

    @property
    def speaks(self) -> bool:
        """Whether this is global rank 0, which publishes for all."""
        return self.generation is not None and self.generation.global_rank == 0

    @property
    def in_mesh(self) -> bool:
        return self.generation is not None and self.spec.worker in self.generation.command.members

    @property
    def aborted(self) -> bool:
        """Whether the groups of the present generation have been aborted."""
        return self.generation is not None and self.generation.connector.aborted

    def warm_up(self) -> None:
        """Open the data, and run a tiny model once: first calls are slow."""
        EVENTS.listener = self.announce_compilation
        spec, run, scaling, begin = self.spec, self.spec.run, self.spec.scaling, self.start_work.begin
        task, on_gpus = spec.task, scaling.device == "cuda"
        begin("opens the data")
        data = MemberData(task, run.timeouts.storage_s, self.wait_for_peers, self.tell_waiting)
        cache = kernel_cache() if on_gpus else None
        kernels = KernelAgreement(task, scaling.device, cache)
        options = TransactionOptions(
            kernel_cache=cache,
            spikes=watch_of(run.loss_spike, run.loss_spike_actions),
            gauge=MemoryGauge() if run.memory_pressure != "off" else None,
            corruption=run.corruption,
            check_every_steps=run.corruption_every_steps,
            cpu_offload=scaling.cpu_offload,
            keeps_activations=scaling.keep_activations is True,
        )
        transaction = Transaction(task, *data.begin(), self.watch, options)
        transaction.before_apply = self._before_apply
        self.injector.flip = transaction.flips.plan
        self.injector.poison = lambda: poison(self.lease.device)
        begin("runs a small model once")
        transaction.warm_up(scaling.cp, scaling.device)
        warm_up(task)
        # Frozen parameters take 4 bytes each, and count as so many fewer whose state is healed.
        frozen = 4 * num_frozen(task) // newcomer_bytes(scaling.cpu_offload)
        gpus, environment = list[str](), Environment()
        if on_gpus:
            be_deterministic(task)
            seen = visible_gpus()
            begin(f"{len(seen)} device(s): contexts, kernels' tests, first runs")
            warmed = warm_devices(task, seen, scaling.cp)
            gpus, self.lease.avoided = [gpu.name for gpu in seen], warmed.failed
            environment = gpu_environment(warmed.kernels)
            self.notices.nondeterminism.listen()
            kernels.look(attention_shapes(task))
        self.warm = Warmed(data, kernels, transaction, num_parameters(task) + frozen, gpus, environment)
        # Freeze long-lived objects, so that the collection in `forget_groups` takes milliseconds.
        gc.collect()
        gc.freeze()
        begin("")

    def watch(self, phase: str, step: int, hop: int | None = None) -> None:
        """Stamp progress and inject planned faults. Faults in forward and backward fire at a hop. Exchanges of experts
        are parts of forward and backward, and have no stamp."""
        if phase not in EXCHANGES:
            self.stamps.stamp(step, Phase[phase.upper()], -1 if hop is None else hop)
        if self.lease.device.type == "cuda":
            self.progress.marks.leave()
        if phase in ABORTABLE:
            self._raise_if_aborted()
        if phase in ("forward", "backward") and hop is None:
            return
        rank = -1 if self.generation is None else self.generation.global_rank
        self.injector.check(phase=phase, step=step, rank=rank, hop=hop)

    def wait_for_peers(self) -> None:
        """Called in each wait for data or callbacks: no stall of this rank; the waiting peers have a limit too."""
        self.progress.num_data_waits += 1
        self._raise_if_aborted()

    def _raise_if_aborted(self) -> None:
        """Compute and data reads do not notice an abort; without this check a long one would look like a hang."""
        if self.aborted:
            raise GroupAborted("aborted between two exchanges")

    def _before_apply(self) -> None:
        self.copies.before_apply()
        self.saver.before_apply()

    def tell_waiting(self, text: str) -> None:
        """Show this worker's wait for storage on the console; called by any thread."""
        self.records.publish([StorageAwaited(f"{self.spec.worker} {text}")])

    def announce_compilation(self, name: str) -> None:
        """Stamp that this process is about to compile `name`, or with "" that it has."""
        self.start_work.compiling = name
        if name:
            self.stamps.compile_begins()
            log.info("compiling %s", name)
        else:
            self.stamps.compile_ended()
