"""The loop that elastic_ring is measured against: the same model and mathematics on static groups, and nothing else.

FSDP2 inside a ring, ring attention, one fp32 all-reduce of the gradient over the rings, one small all-reduce
for clipping and logging, AdamW on the local shards. Stock `torch.distributed` groups that nobody can abort;
no coordinator, agent, vote record, digest, stamp, planned fault, publishing or reseeding. The gate at which
both loops take turns is here too.
"""

from __future__ import annotations

import math
import os
import time
from multiprocessing.connection import Client, Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.harness.worker_notes import StepWatch, WorkerNotes
from elastic_ring.attention.comm.exchange import HopBuffers
from elastic_ring.attention.options import RingOptions
from elastic_ring.attention.patterns.sparse import Pattern
from elastic_ring.attention.plan.schedule import plan
from elastic_ring.attention.ring import RingAttention
from elastic_ring.data.loader import Loader
from elastic_ring.data.sampling.order import Order, share
from elastic_ring.data.source import open_source
from elastic_ring.mesh import Mesh
from elastic_ring.train.optim import learning_rate, make_optimizer
from elastic_ring.train.startup.layouts import Layouts
from elastic_ring.train.task import Batch, LossFunction, TrainingTask, batch_of
from elastic_ring.train.wrap import ModuleMaker, local_of, local_params, trained_shapes


class Gate:
    """One rank's connection to `Turns`, which decides who runs. Connects at the first wait."""

    def __init__(self, address: tuple[str, int], key: bytes, side: str) -> None:
        self._address, self._key, self._side = address, key, side
        self._connection: Connection[Any, Any] | None = None

    def wait(self) -> None:
        """Report that this rank has arrived, and wait for its side's next turn."""
        if self._connection is None:
            self._connection = Client(self._address, authkey=self._key)
        self._connection.send(self._side)
        self._connection.recv()


class GatedLoss:
    """A loss that waits at the gate before every `sequences_per_block`-th sequence: pauses the product between two
    steps without its knowledge. With `repeats`, as with several rings, a sequence that comes twice in a row is counted
    once: now and then the product computes one again, to compare. That costs a wait for the device each time."""

    def __init__(
        self,
        loss: LossFunction,
        gate: Gate,
        sequences_per_block: int,
        notes: WorkerNotes | None = None,
        *,
        repeats: bool = True,
    ) -> None:
        self._loss, self._gate, self._sequences_per_block = loss, gate, sequences_per_block
        self._repeats = repeats
        self._notes = notes
        self._watch: StepWatch | None = None
        self._num_sequences = 0
        self._newest: Tensor | None = None

    def __call__(self, model: Any, batch: Batch) -> tuple[Tensor, int | Tensor]:
        if batch.tokens.is_meta:  # a standby asks what the model's attention looks like; nothing is trained
            return self._loss(model, batch)
        if not self._repeats or self._newest is None or not torch.equal(batch.tokens, self._newest):
            if self._num_sequences % self._sequences_per_block == 0:
                self._pause()
            self._note_step()
            self._num_sequences += 1
            self._newest = batch.tokens.clone() if self._repeats else None
        return self._loss(model, batch)

    def _pause(self) -> None:
        if self._watch is not None:
            self._watch.pause()
        self._gate.wait()

    def _note_step(self) -> None:
        if self._notes is not None:
            self._watch = self._watch or self._notes.begin()
            self._watch.step()


def _urgent(kind: str) -> Any:
    if kind == "cpu":
        return None
    options = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = True
    return options


class PlainWorker:
    """One rank of the plain loop; a Ray actor like its rival. Without a gate it takes no turns."""

    def __init__(self, task: TrainingTask, mesh: Mesh, rank: int, gate: Gate | None, kind: str = "cpu") -> None:
        self._task, self._mesh, self._rank, self._gate = task, mesh, rank, gate
        self._device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)

    def pid(self) -> int:
        return os.getpid()

    def run(self, port: int, num_blocks: int, block_steps: int) -> list[tuple[float, float]]:
        """Train; (commit time, loss) of each step."""
        torch.set_num_threads(1)
        self._set_up(port)
        done = []
        for step in range(num_blocks * block_steps):
            if step % block_steps == 0:
                self._wait()
            loss = self._step(step)
            done.append((time.monotonic(), loss))
        self._wait()
        return done

    def _wait(self) -> None:
        if self._gate is not None:
            self._gate.wait()

    def _set_up(self, port: int) -> None:
        task, mesh = self._task, self._mesh
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        kind = self._device.type
        if kind == "cuda":
            torch.cuda.set_device(self._device)
            if task.step.deterministic:
                torch.use_deterministic_algorithms(True, warn_only=True)
                torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        dist.init_process_group(
            "nccl" if kind == "cuda" else "gloo",
            store=store,
            rank=self._rank,
            world_size=mesh.size,
            device_id=self._device if kind == "cuda" else None,
        )
        groups = init_device_mesh(kind, (mesh.dp, mesh.cp), mesh_dim_names=("dp", "cp"))
        # Hops go before kernels that are running, as in the product.
        rings = [dist.new_group(list(mesh.ring(dp_rank)), pg_options=_urgent(kind)) for dp_rank in range(mesh.dp)]
        self._coordinate = mesh.coordinate(self._rank)
        self._ring, self._replicas = rings[self._coordinate.dp_rank], groups["dp"].get_group()
        maker = ModuleMaker(task, self._device)
        self._model = maker.wrap(groups["cp"])
        with torch.no_grad():
            maker.first_values(self._model, self._coordinate.cp_rank, mesh.cp)
        params = local_params(self._model)
        self._params = list(params.values())
        ndims = {name: len(shape) for name, shape in trained_shapes(self._model, None).items()}
        self._optimizer = make_optimizer(list(params.items()), task.optim, ndims)
        self._flat = torch.zeros(sum(p.numel() for p in self._params), device=self._device)
        self._views = [
            v.view_as(p) for v, p in zip(self._flat.split([p.numel() for p in self._params]), self._params, strict=True)
        ]
        source = open_source(task.data)
        self._loader, self._order = Loader(source), Order(task.step.seed, task.step.global_batch, source.num_sequences)
        self._buffers = HopBuffers()
        self._layout = Layouts(task).choice(mesh.cp, self._device.type).layout

    def _step(self, step: int) -> float:
        loss_sum, num_tokens = self._compute(step)
        for view, param in zip(self._views, self._model.parameters(), strict=True):
            view.copy_(local_of(param.grad))
            param.grad = None
        dist.all_reduce(self._flat, group=self._replicas)
        norm_sq = torch.linalg.vector_norm(self._flat).double().square()
        counted = torch.tensor(float(num_tokens), dtype=torch.float64, device=self._device)
        sums = torch.stack([norm_sq / self._mesh.dp, loss_sum, counted])
        dist.all_reduce(sums)
        all_norm_sq, all_loss, total = sums.tolist()
        norm, mean_loss = math.sqrt(all_norm_sq) / total, all_loss / total
        clip = self._task.optim.clip_norm
        self._flat.mul_((1.0 if clip is None or norm <= clip else clip / norm) / total)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(step, self._task.optim)
        for view, local in zip(self._views, self._params, strict=True):
            local.grad = view
        self._optimizer.step()
        return mean_loss

    def _compute(self, step: int) -> tuple[Tensor, Tensor]:
        loss_sum, num_tokens = torch.zeros(2, dtype=torch.float64, device=self._device).unbind()
        mine, following = (
            share(self._order.sample_ids(of), self._coordinate.dp_rank, self._mesh.dp) for of in (step, step + 1)
        )
        for i, (index, sample_id) in enumerate(mine):
            upcoming = [later for _, later in (*mine[i + 1 :], *following)]
            piece = self._loader.load(sample_id, index, self._layout, self._coordinate.cp_rank, upcoming=upcoming)
            schedule = plan(Pattern(causal=True, document_starts=piece.document_starts), self._layout)
            config = self._task.step
            attention = RingAttention(
                schedule,
                self._coordinate.cp_rank,
                self._ring,
                RingOptions(backend=config.kernel or None, deterministic=config.deterministic, buffers=self._buffers),
            )
            batch = batch_of(piece, attention, self._device)
            loss, num_targets = self._task.loss(self._model, batch)
            loss.backward()
            loss_sum += loss.detach()
            num_tokens += num_targets
        return loss_sum, num_tokens
