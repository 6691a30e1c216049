"""A Ray Train worker: meets the others, makes rings and engine, begins at the newest checkpoint, trains.

`Zero3Worker` is the argument of a training loop of one's own; `train` is the loop that runs without one.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
import torch.distributed as dist

from elastic_ring.config import Timeouts
from elastic_ring.control.decisions.loss_spikes import CLIP_SHARE, SpikeBallot
from elastic_ring.control.messages import Vote
from elastic_ring.data.filesystem import patiently
from elastic_ring.data.loader import consumed_digest
from elastic_ring.data.source import hold_out, open_source, order_of
from elastic_ring.errors import LossSpike, RunFailed, TooManySkipped
from elastic_ring.files import private_folder
from elastic_ring.integrations.ray_train import ops
from elastic_ring.integrations.ray_train.engine import Zero3Engine, write_weights
from elastic_ring.integrations.ray_train.rings import DatasetFeed, OrderedFeed, Rings
from elastic_ring.integrations.ray_train.run_records import TERM, Attempt
from elastic_ring.integrations.ray_train.settings import Zero3Config, deepspeed_config, mesh_of
from elastic_ring.mesh import Mesh
from elastic_ring.runtime.gpu.device import be_deterministic, keep_caches_private
from elastic_ring.state.checkpoints import zero3
from elastic_ring.state.checkpoints.zero3 import SavedState
from elastic_ring.state.storage.folder import Storage
from elastic_ring.train.optim import learning_rate
from elastic_ring.train.passes import sequence_seed
from elastic_ring.train.startup.check import ModelRefused
from elastic_ring.train.task import TrainingTask
from elastic_ring.train.vote import Outcome, Tally, raise_for_skips, remark_on, watch_of
from elastic_ring.train.wrap import meta_model

log = logging.getLogger(__name__)

DATASET = "train"
SHARED_MEMORY = "deepspeed_shm_comm"
Restored = tuple[ray.train.Checkpoint, SavedState]


@dataclass(frozen=True)
class Job:
    """The arguments of every worker. `records`: the handle of the `Records` actor."""

    task: TrainingTask
    zero: Zero3Config
    cp: int
    device: str
    name: str
    storage_uri: str
    records: Any
    loop: Callable[[Zero3Worker], None] | None = None
    vocab_size: int | None = None
    end_of_document: int = 0


def train_worker(config: Mapping[str, Job]) -> None:
    """The function that Ray Train runs in each worker."""
    job = config["job"]
    try:
        worker = Zero3Worker(job)
        (job.loop or train)(worker)
        worker.finish()
    except (TooManySkipped, LossSpike, ModelRefused) as error:
        # All ranks come to this alike, and a new worker group would again: they return, and the driver raises it.
        if ray.train.get_context().get_world_rank() == 0:
            ray.get(job.records.gave_up.remote(error))


def newest_checkpoint(storage_uri: str, rank: int, device: torch.device) -> Restored | None:
    """The newest whole one in the storage, the same on all ranks. Ray Train may not know it yet: its controller fetches
    reports now and then. Collective."""
    chosen: list[tuple[str, SavedState, bool] | None] = [None]
    if rank == 0:
        mode = ray.train.CheckpointConsistencyMode.COMMITTED
        reported = ray.train.get_all_reported_checkpoints(mode, timeout_s=Timeouts().report_s)
        names = [Path(each.checkpoint.path).name for each in reported]
        newest = zero3.newest_whole(Storage(storage_uri), names)
        chosen = [newest and (*newest, newest[0] in names)]
    dist.broadcast_object_list(chosen, device=device)
    if chosen[0] is None:
        return None
    (name, state, is_reported), storage = chosen[0], ray.train.get_context().get_storage()
    checkpoint = ray.train.Checkpoint(storage.build_checkpoint_path_from_name(name), storage.storage_filesystem)
    if not is_reported:  # Ray Train would never remove it; one that it has twice it removes while it is read
        metrics, mode = {"step": state.step, "num_workers": state.num_workers}, ray.train.CheckpointUploadMode.NO_UPLOAD
        ray.train.report(metrics, checkpoint=checkpoint, checkpoint_upload_mode=mode)
    return checkpoint, state


def train(worker: Zero3Worker) -> None:
    """The usual loop."""
    for step in worker.steps():
        worker.train_step(step)


class Zero3Worker:
    """One rank of a worker group: its rings, its engine and its place in the run."""

    def __init__(self, job: Job) -> None:
        """Collective; begins at the newest whole checkpoint if there is one."""
        import deepspeed.ops

        self.job, self.task = job, job.task
        context = ray.train.get_context()
        self.rank, self.size = context.get_world_rank(), context.get_world_size()
        self._local_rank = context.get_local_rank()
        torch.set_num_threads(1)
        self.mesh: Mesh = mesh_of(self.size, job.cp, self.task.step.global_batch)
        self.device = torch.device("cpu")
        if job.device == "cuda":
            self.device = ray.train.torch.get_device()
            torch.cuda.set_device(self.device)
            be_deterministic(self.task)
        keep_caches_private()
        # DeepSpeed would compile its shared-memory all-reduce for minutes, and ZeRO does not call it.
        deepspeed.ops.__compatible_ops__[SHARED_MEMORY] = False
        if job.zero.uses_nvme:
            ops.load_async_io(ops.extensions_folder())
        self.rings = Rings(self.task, self.mesh, self.device)
        self.task = self.rings.task
        resumed = newest_checkpoint(job.storage_uri, self.rank, self.device)
        self.step, self.skipped_in_a_row = 0, 0
        self._reason, self._resumed_from = "first", ""
        self._spikes = watch_of(job.zero.loss_spike, job.zero.loss_spike_actions)
        if resumed is None:
            self.engine = self._make_engine(universal=False, fill=True)
            if self.task.step.check_model:
                self.rings.check(self.engine, self.feed.source)
        else:
            checkpoint, state = resumed
            with checkpoint.as_directory() as folder:
                begun_s = time.monotonic()
                self.engine = self._make_engine(universal=state.num_workers != self.size, fill=False)
                self.engine.load(Path(folder), state.num_workers)
            self.step, self.skipped_in_a_row = state.step, state.skipped_in_a_row
            self._reason = f"from the checkpoint of {self.step} steps on {state.num_workers} workers"
            self._resumed_from = checkpoint.path
            took_s = time.monotonic() - begun_s
            log.info("rank %d: step %d, %s, restored in %.1f s", self.rank, self.step, checkpoint.path, took_s)
        self._generation: int | None = None
        self._saved_step = self.step if resumed is not None else -1

    # ------------------------------------------------------------ the loop

    def steps(self) -> Iterator[int]:
        """The steps that are left. Reports a checkpoint after each that is due, and after the last."""
        ray.get(self.job.records.join.remote(self.rank, os.getpid(), socket.gethostname()))
        dist.barrier()
        generation = torch.zeros((), dtype=torch.int64, device=self.device)
        if self.rank == 0:
            mesh, stored = {"dp": self.mesh.dp, "cp": self.mesh.cp}, Storage(self.job.storage_uri).folders()
            attempt = Attempt(step=self.step, mesh=mesh, reason=self._reason, resumed_from=self._resumed_from)
            generation.fill_(ray.get(self.job.records.begin.remote(attempt, stored)))
        dist.broadcast(generation, 0)
        self._generation = int(generation)
        for step in range(self.step, self.task.step.steps):
            yield step
            assert self.step == step + 1, f"the loop must train step {step} once"
            every = self.job.zero.checkpoint_every_steps
            if self.step == self.task.step.steps or (every and self.step % every == 0):
                self.save()

    def train_step(self, step: int) -> float:
        """Train one step over all ranks; its loss, the mean over the tokens. Collective."""
        begun_s = time.monotonic()
        slices = self.feed.slices(step)
        targets = sum(piece.num_targets for piece in slices)
        counts = torch.tensor([targets, *consumed_digest(step, slices)], dtype=torch.float64)
        num_tokens, *samples = self.rings.add(counts).tolist()
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        rate = learning_rate(step, self.task.optim, self.task.lr_schedule)
        for number, piece in enumerate(slices, start=1):
            torch.manual_seed(sequence_seed(self.task.step.seed, step, piece.sample_id, self.rings.coordinate.cp_rank))
            loss, _ = self.task.loss(self.engine.module, self.rings.batch(piece, step))
            loss_sum += loss.detach()
            # DeepSpeed averages over the ranks: the mean over all tokens is this sum's share of them, times the ranks.
            self.engine.backward(loss * (self.size / max(1.0, num_tokens)))
            if number < len(slices):
                self.engine.step(rate)
        norm = self.engine.gradient_norm() * max(1.0, num_tokens)  # of the summed loss, as the elastic ring has it
        tally = Tally(
            norm * norm,
            int(not math.isfinite(norm)),
            float(self.rings.add(loss_sum)),
            int(num_tokens),
            tuple(samples),
            spike=self._spikes.ballot(step) if self._spikes is not None else SpikeBallot(),
        )
        # The same on every rank, and judged as in the elastic ring.
        outcome = Outcome(Vote(step, tally.numbers(), (TERM, self._generation or 0)))
        self.engine.step(rate, skip=outcome.skip, clip_share=CLIP_SHARE if outcome.clips_harder else 1.0)
        self.step, self.skipped_in_a_row = step + 1, outcome.skips_in_a_row(self.skipped_in_a_row)
        if self._spikes is not None:
            self._spikes.saw(step, outcome.loss, outcome.spike)
        if self.rank == 0:
            assert self._generation is not None
            metrics = outcome.metrics(rate, time.monotonic() - begun_s, self.mesh, self._generation)
            self.job.records.step.remote(metrics, remark_on(outcome, self.feed.sample_ids))
        limit, ids, steps = self.task.optim.max_skipped, self.feed.sample_ids, self.task.step.steps
        never = self.skipped_in_a_row == self.step == steps
        raise_for_skips(outcome, self.skipped_in_a_row, limit, ids, never_applied=never, goes_back=False)
        return outcome.loss

    def save(self) -> None:
        """Report a checkpoint of the state after `self.step` steps to Ray Train. Collective; takes about 2 s."""
        if self._saved_step == self.step:
            return
        name = f"checkpoint-{self.step:09d}-{self._generation}"
        with tempfile.TemporaryDirectory(prefix="elastic-ring-zero3-") as folder:
            self.engine.save(Path(folder))
            paths = (path for path in Path(folder).rglob("*") if path.is_file())
            files = {str(path.relative_to(folder)): path.stat().st_size for path in paths}
            metrics = {"step": self.step, "num_workers": self.size}
            ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder), checkpoint_dir_name=name)
        parts: list[dict[str, int]] = [{}] * self.size
        dist.all_gather_object(parts, files)  # and every rank's files are stored
        self._saved_step = self.step
        if self.rank == 0:
            merged = {file: num_bytes for part in parts for file, num_bytes in part.items()}
            state = zero3.SavedState(self.step, self.size, self.skipped_in_a_row, merged)
            Storage(self.job.storage_uri).replace(f"{name}/{zero3.STATE}", json.dumps(vars(state)).encode())
            ray.get(self.job.records.checkpoint.remote(self.step, f"{self.job.storage_uri}/{name}"))

    def finish(self) -> None:
        """Write the weights and the summary. Collective."""
        if self.step < self.task.step.steps:
            raise RunFailed(f"the training loop returned after step {self.step} of {self.task.step.steps}")
        peak_bytes = 0  # the most memory in tensors on a GPU of this worker group
        if self.device.type != "cpu":
            most = torch.tensor(torch.cuda.max_memory_allocated(self.device), device=self.device)
            dist.all_reduce(most, dist.ReduceOp.MAX)
            peak_bytes = int(most)
        sha256 = write_weights(self.engine, Storage(self.job.storage_uri) if self.rank == 0 else None)
        if self.rank == 0:
            ray.get(self.job.records.finish.remote(sha256, peak_bytes))
        self.feed.close()
        dist.barrier()
        if self.job.zero.uses_nvme and self._local_rank == 0:
            shutil.rmtree(self.swap_folder, ignore_errors=True)

    # ------------------------------------------------------------ parts

    @cached_property
    def feed(self) -> OrderedFeed | DatasetFeed:
        """The Ray dataset's shard where the trainer has one, else the corpus in the run's order."""
        job, step = self.job, self.task.step
        if job.vocab_size is not None:
            shard = ray.train.get_dataset_shard(DATASET)
            return DatasetFeed(shard, self.rings, job.vocab_size, job.end_of_document)
        training, _ = hold_out(patiently(lambda: open_source(self.task.data)), num_sequences=0)
        return OrderedFeed(training, order_of(training, step.seed, step.global_batch), self.rings)

    @property
    def swap_folder(self) -> Path:
        """Where DeepSpeed keeps what is offloaded to NVMe on this node, while the run goes on."""
        return self.job.zero.swap_folder / self.job.name

    def _make_engine(self, *, universal: bool, fill: bool) -> Zero3Engine:
        if self.job.zero.uses_nvme and self._local_rank == 0:
            shutil.rmtree(self.swap_folder, ignore_errors=True)  # what a killed worker group left
            self.job.zero.swap_folder.mkdir(0o700, parents=True, exist_ok=True)
            private_folder(self.swap_folder)
        dist.barrier()
        config = deepspeed_config(
            self.job.zero,
            self.task.step,
            self.task.optim,
            self.mesh,
            swap_folder=self.swap_folder,
            universal=universal,
            largest_elements=max(param.numel() for param in meta_model(self.task).parameters()),
            pin_memory=self.device.type == "cuda",
        )
        return Zero3Engine(self.task, config, fill=fill)
