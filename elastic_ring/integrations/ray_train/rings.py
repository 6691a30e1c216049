"""The rings of a Ray Train worker group, the attention of a slice, and the sequences of a step.

What ElasticRingTrainer's workers rebuild in a recovery is made once here: a worker group ends with its first loss.
Sequences come in the run's own order from an indexed corpus: the samples of the elastic ring, exactly once through any
failure. Or they come from a shard of a Ray dataset, in its order; a new worker group begins an epoch anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from elastic_ring.attention.comm.exchange import HopBuffers
from elastic_ring.attention.lowering.call_plan import PlanCache
from elastic_ring.attention.options import RingOptions
from elastic_ring.config import StepConfig, Timeouts
from elastic_ring.data.loader import Loader, Slice, slice_sample
from elastic_ring.data.packing import Sample
from elastic_ring.data.sampling.order import SampleOrder, share
from elastic_ring.data.source import Source
from elastic_ring.integrations.ray_train.engine import Zero3Engine
from elastic_ring.mesh import Mesh
from elastic_ring.runtime.gpu.device import kernel_cache
from elastic_ring.train.startup.check import check_model
from elastic_ring.train.startup.kernels import KernelAgreement
from elastic_ring.train.startup.layouts import Layouts, attention_shapes
from elastic_ring.train.task import Batch, TrainingTask, attention_of, batch_of

TOKENS = "tokens"
READ_AHEAD = 16
PREFETCH_BATCHES = 2


class Rings:
    """This rank's ring, its layout and its attention."""

    def __init__(self, task: TrainingTask, mesh: Mesh, device: torch.device) -> None:
        """Collective over torch's default group, which has `mesh.size` ranks."""
        self.mesh, self.device = mesh, device
        self.coordinate = mesh.coordinate(dist.get_rank())
        limit, options = timedelta(seconds=Timeouts().collective_s), None
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options.is_high_priority_stream = True  # hops must not wait for the blocks of a kernel that is running
        groups = [
            dist.new_group(list(mesh.ring(dp_rank)), timeout=limit, pg_options=options) for dp_rank in range(mesh.dp)
        ]
        self.ring: Any = groups[self.coordinate.dp_rank] if mesh.cp > 1 else None
        if device.type == "cuda" and self.ring is not None:
            # NCCL connects at a group's first operation, for which all its ranks must come: not every hop has them all.
            dist.all_reduce(torch.zeros(1, device=device), group=self.ring)
        self._kernel_cache = kernel_cache() if device.type == "cuda" else None
        if device.type == "cuda":  # one attention kernel for all ranks; CPUs have the same one anyway
            kernels = KernelAgreement(task, device.type, self._kernel_cache)
            kernels.look(attention_shapes(task))
            task = kernels.settle(task, dist.new_group(backend="gloo"), holds=False)
        self.task = task
        self.layout = Layouts(task).choice(mesh.cp, device.type).layout
        self._buffers, self._plans = HopBuffers(), PlanCache()

    def batch(self, piece: Slice, step: int) -> Batch:
        """One sequence's slice in a step, with the ring's attention, for a loss function."""
        options = RingOptions(cache_dir=self._kernel_cache, buffers=self._buffers)
        attention = attention_of(
            self.task, piece, self.layout, self.coordinate.cp_rank, self.ring, options, plans=self._plans, step=step
        )
        return batch_of(piece, attention, self.device)

    def add(self, values: Tensor) -> Tensor:
        """The sums over all ranks. Collective."""
        summed = values.to(self.device)
        dist.all_reduce(summed)
        return summed

    def check(self, engine: Zero3Engine, source: Source | DatasetRows) -> None:
        """Raises ModelRefused where the model does not attend to all of the first sequence of `source`. Collective."""

        def add_over_a_ring(tensors: Sequence[Tensor]) -> SimpleNamespace:
            """Sums that all rings have alike; the shards of one parameter lie on all ranks."""
            for tensor in tensors:
                dist.all_reduce(tensor)
                tensor /= self.mesh.dp
            return SimpleNamespace(wait=lambda: None)

        groups = SimpleNamespace(
            mesh=self.mesh,
            global_rank=dist.get_rank(),
            ring=self.ring,
            check=lambda: None,
            launching=nullcontext,
            shard=SimpleNamespace(allreduce=add_over_a_ring, size=dist.get_world_size),
        )
        state = SimpleNamespace(
            model=engine.module,
            loader=SimpleNamespace(source=source),
            device=self.device,
            options=SimpleNamespace(kernel_cache=self._kernel_cache),
        )
        check_model(self.task, groups, state, engine.gradients_of)


# ------------------------------------------------------------ sequences
# A feed has the slices of this rank in a step, equally many on every rank, the ids of the step's samples on all rings,
# none where rows have no numbers, and a `source` with a sequence for the start-up check.


class OrderedFeed:
    """Sequences by the run's order; each ring takes its share, each rank its slice."""

    def __init__(self, source: Source, order: SampleOrder, rings: Rings) -> None:
        self._loader, self._rings = Loader(source), rings
        self.source, self.sample_ids, self.close = source, order.sample_ids, self._loader.close

    def slices(self, step: int) -> list[Slice]:
        coordinate, dp = self._rings.coordinate, self._rings.mesh.dp
        mine, following = (share(self.sample_ids(at), coordinate.dp_rank, dp) for at in (step, step + 1))
        upcoming = [sample_id for _, sample_id in (*mine, *following)]
        return [
            self._loader.load(
                sample_id,
                index,
                self._rings.layout,
                coordinate.cp_rank,
                upcoming=upcoming[place + 1 : place + 1 + READ_AHEAD],
            )
            for place, (index, sample_id) in enumerate(mine)
        ]


@dataclass(frozen=True)
class DatasetRows:
    """Stands for a Ray dataset in a task, in place of a corpus: `DatasetFeed` reads the rows. Its own sequences are for
    the start-up check, where reading a row would use it up."""

    context_tokens: int
    vocab_size: int

    @classmethod
    def of(cls, step: StepConfig, vocab_size: int) -> DatasetRows:
        return cls(step.context_tokens, vocab_size)

    def open(self) -> NoReturn:
        raise ValueError("a Ray dataset has no sequences by number: its workers read rows of their shards")

    def read(self, sample_id: int) -> Sample:
        return Sample((np.arange(self.context_tokens + 1, dtype=np.int64) + sample_id) % self.vocab_size, (0,), False)


class DatasetFeed:
    """Rows of a Ray dataset's shard (`ray.train.get_dataset_shard`), packed end to end into sequences.

    A row is a document: a list of tokens in column `tokens`. Each rank packs the rows of its own shard; the ranks of a
    ring exchange the sequences and each keeps its slice. Raises ValueError for rows of another kind.
    """

    def __init__(self, shard: Any, rings: Rings, vocab_size: int, end_of_document: int) -> None:
        global_batch, size = rings.task.step.global_batch, rings.mesh.size
        if global_batch % size:
            raise ValueError(
                f"global_batch={global_batch} is no multiple of workers={size}: each worker reads "
                "equally many sequences of a Ray dataset; change one of them"
            )
        self._each, self._rings = global_batch // size, rings
        self._samples = packed(_documents(shard, vocab_size), rings.layout.seq_len, end_of_document)
        self.source = DatasetRows(rings.layout.seq_len, vocab_size)
        self.sample_ids: Callable[[int], Sequence[int]] = lambda step: ()

    def slices(self, step: int) -> list[Slice]:
        mesh, layout, coordinate = self._rings.mesh, self._rings.layout, self._rings.coordinate
        slices = []
        for place in range(self._each):
            for cp_rank, sample in enumerate(self._exchanged(next(self._samples))):
                index = (place * mesh.dp + coordinate.dp_rank) * mesh.cp + cp_rank
                sample_id = step * self._each * mesh.size + index
                slices.append(
                    slice_sample(sample, layout, coordinate.cp_rank, sample_id=sample_id, index_in_batch=index)
                )
        return slices

    def close(self) -> None:
        """Nothing is held: Ray Data ends with the worker group."""

    def _exchanged(self, own: Sample) -> list[Sample]:
        """The sequence of each rank of the ring, in its order. Collective over the ring."""
        ring, length = self._rings.ring, len(own.tokens)
        if ring is None:
            return [own]
        starts = np.zeros(length + 1, dtype=np.int64)  # their number, whether a document ends, the starts
        starts[0], starts[1] = len(own.document_starts), own.ends_document
        starts[2 : 2 + len(own.document_starts)] = own.document_starts
        row = torch.from_numpy(np.concatenate([own.tokens, starts]))
        row = row.to("cuda" if dist.get_backend(ring) == "nccl" else "cpu")
        rows = [torch.empty_like(row) for _ in range(self._rings.mesh.cp)]
        dist.all_gather(rows, row, group=ring)
        samples = []
        for array in (each.cpu().numpy() for each in rows):
            num_starts, ends_document = array[length : length + 2]
            document_starts = array[length + 2 : length + 2 + num_starts]
            samples.append(Sample(array[:length], tuple(document_starts.tolist()), bool(ends_document)))
        return samples


def packed(documents: Iterator[NDArray[Any]], context_tokens: int, end_of_document: int) -> Iterator[Sample]:
    """Sequences as `data.packing` makes them, of documents that come one after the other."""
    tokens = np.empty(0, dtype=np.int64)
    starts: list[int] = []
    for document in documents:
        starts.append(len(tokens))
        tokens = np.concatenate([tokens, document, np.array([end_of_document], dtype=np.int64)])
        while len(tokens) > context_tokens:
            inside = sorted({0, *(start for start in starts if start < context_tokens)})
            yield Sample(tokens[: context_tokens + 1], tuple(inside), context_tokens in starts)
            tokens = tokens[context_tokens:]
            starts = [start - context_tokens for start in starts if start >= context_tokens]


def _documents(shard: Any, vocab_size: int) -> Iterator[NDArray[Any]]:
    """The rows' tokens, epoch after epoch."""
    while True:
        is_empty = True
        for batch in shard.iter_batches(batch_size=64, prefetch_batches=PREFETCH_BATCHES, batch_format="numpy"):
            if TOKENS not in batch:
                raise ValueError(
                    f"the Ray dataset has columns {', '.join(batch)}: it needs a column {TOKENS!r} of "
                    "lists of tokens; make one with Dataset.map_batches"
                )
            for row in batch[TOKENS]:
                document = np.asarray(row, dtype=np.int64)
                if document.ndim != 1 or (len(document) and not 0 <= document.min() <= document.max() < vocab_size):
                    raise ValueError(
                        f"a row of the Ray dataset's column {TOKENS!r} is no list of tokens below "
                        f"vocab_size={vocab_size}: tokenise with the model's tokenizer"
                    )
                is_empty = False
                yield document
        if is_empty:
            raise ValueError("a worker's shard of the Ray dataset has no rows: give more rows than workers")
