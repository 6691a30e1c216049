"""Memory that a rank needs, by the sizes alone: `elastic-ring plan`, and the first part of a forecast.

`model.memory` counts a rank's state in bytes for each parameter of its shard (4 for the fp32 master, 8 for Adam's two
moments, 4 for the gradient; `cpu_offload` moves some to host memory), activations, gathered blocks, and the rest of the
fullest moment of a step. With the allocator's reserve, contexts and communicators the sum is compared with the memory
of common GPUs. Imports neither torch nor Ray, so that a plan comes at once.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

from elastic_ring.config import ScalingConfig, StepConfig
from elastic_ring.control.options import AUTO, parse_copies
from elastic_ring.files import size_text as size
from elastic_ring.gpus import CONTEXT_BYTES, GPUS, RESERVE
from elastic_ring.model.config import ModelConfig, active_parameters, expert_parameters, model_flops, num_parameters
from elastic_ring.model.memory import (
    GRADIENT_BYTES,
    IN_HOST_BYTES,
    MASTER_BYTES,
    MOMENTS_BYTES,
    StepMemory,
)

STATE_BYTES = MASTER_BYTES + MOMENTS_BYTES + GRADIENT_BYTES
SNAPSHOT_BYTES = MASTER_BYTES + MOMENTS_BYTES
KEPT = 2
"""Snapshots held at a time, each with its copies: the last complete one, and the one that follows it."""
RESERVED = (1.29, 1.36, 1.42)
"""The allocator's reserved memory over the peak of its tensors, P10, P50 and P90, while the GPU has room: the 1st, 3rd,
5th, ... of ten measured (benchmarks/forecast/score.py). To fit it gives back all but `RESERVE`."""
EXPANDABLE = "expandable_segments:True"
RESERVED_EXPANDABLE = (1.0, 1.09, 1.16)
"""The same with PYTORCH_CUDA_ALLOC_CONF=`EXPANDABLE` in `run.env`: of every second of nine peaks. Of the other four,
one with 12 GiB of tensors had 1.42, one 1.16 (benchmarks/results/steps, experts)."""
COMMUNICATOR_BYTES = int(0.3 * 2**30)
"""Memory of a rank's three NCCL groups: ring, replicas, all. Assumed."""
PER_HOST, MOST_RANKS = 8, 4096
"""GPUs of a host, which longer rings fill, and the longest ring that a plan tries."""
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class ModelPlan:
    """Sizes of one rank. `host_bytes`: its state in host memory; `state_bytes`: its other state; `part_bytes`: its part
    of a checkpoint. `flops`: of one sequence, forward and backward without recomputation, where attention keeps
    `density` of the causal pairs. `tokens_per_rank`: of one pass. `num_contexts`: processes that are warm on its GPU:
    its own and a standby's."""

    num_parameters: int
    num_ranks: int
    tokens_per_rank: int
    state_bytes: int
    largest_unit_bytes: int
    flops: float
    memory: StepMemory
    on_gpu: bool = False
    copies: str = "0"
    snapshot_bytes: int = 0
    host_bytes: int = 0
    part_bytes: int = 0
    sequences_per_pass: int = 1
    density: float = 1.0
    num_contexts: int = 1

    @property
    def activation_bytes(self) -> int:
        return self.memory.config.num_layers * self.memory.activations.kept_per_layer

    @property
    def gpu_bytes(self) -> int:
        """Memory of one rank's GPU at the peak of a step, without contexts and the allocator's waste; within 10 % of
        measurements (`tests/unit/model/test_memory_forecast.py`)."""
        return self.memory.device_bytes

    @property
    def needed_bytes(self) -> int:
        """Memory that one rank's GPU needs, with the allocator's reserve, contexts and communicators."""
        return self._needed(self.memory, self.num_ranks)

    def _needed(self, memory: StepMemory, num_ranks: int) -> int:
        beside = self.num_contexts * CONTEXT_BYTES + (num_ranks > 1) * COMMUNICATOR_BYTES
        return int(memory.device_bytes * (1 + RESERVE)) + memory.activations.uneven_bytes + beside

    def smallest_ring(self, gib: float) -> int | None:
        """The smallest ring, of whole hosts or within one, that fits GPUs of `gib` and divides the experts, if there
        are any; None if no ring fits."""
        config, tokens = self.memory.config, self.memory.tokens * self.memory.cp
        sizes = [1, 2, 4, *range(PER_HOST, min(MOST_RANKS, tokens) + 1, PER_HOST)]
        if config.num_experts:
            sizes = [size for size in range(1, config.num_experts + 1) if config.num_experts % size == 0]

        def fits(cp: int) -> bool:
            ring = dataclasses.replace(self.memory, cp=cp, tokens=-(-tokens // cp))
            return self._needed(ring, cp * self.num_ranks // self.memory.cp) <= gib * 2**30

        return next(iter(sizes[bisect_left(sizes, True, key=fits) :]), None)

    def reserved_bytes(self, gib: float, *, expandable: bool = False) -> tuple[int, ...]:
        """Memory that the allocator will hold on a GPU of `gib`: P10, P50, P90."""
        most = int(gib * 2**30) - self.num_contexts * CONTEXT_BYTES
        return tuple(min(int(self.gpu_bytes * x), most) for x in (RESERVED_EXPANDABLE if expandable else RESERVED))

    @property
    def floor_bytes(self) -> int:
        """Memory that a rank needs on any number of ranks: gathered units and their gradients, without activations."""
        alone = dataclasses.replace(self.memory, cp=self.num_parameters, tokens=1)
        return max(moment.num_bytes - moment.terms.get("hop buffers", 0) for moment in alone.moments)

    def margin_gib(self, gib: float) -> float:
        """Memory left on a GPU of `gib`; below 0 if the rank does not fit."""
        return gib - self.needed_bytes / 2**30

    @property
    def verdicts(self) -> dict[str, bool]:
        """Whether a rank fits a GPU, by its type."""
        return {gpu.name: self.needed_bytes <= gpu.gib * 2**30 for gpu in GPUS.values()}

    @property
    def host_terms(self) -> dict[str, int]:
        """Host memory of a rank's process, by part."""
        copies, (kind, _, _) = 0, self.copies.partition(":")
        if self.copies != "0":  # of the rank that holds most
            copies = (KEPT + (KEPT + 1 if kind == "parity" else KEPT * int(kind))) * self.snapshot_bytes
        return self.memory.host_terms(self.part_bytes, copies)

    def lines(self) -> list[str]:
        offloaded = self.memory.config.offload_activations
        checkpointed = "checkpointed " * self.memory.config.checkpoint_activations
        return [
            f"{self.num_parameters:,} parameters on {self.num_ranks} ranks, {self.tokens_per_rank:,} tokens on each"
            + (f" of {self.sequences_per_pass} sequences a pass" if self.sequences_per_pass > 1 else ""),
            *(self._experts_lines() if self.memory.config.num_experts else []),
            f"a rank holds {size(self.state_bytes)} of state and {size(self.activation_bytes)} of "
            f"{checkpointed}activations{' in host memory' * offloaded}",
            *([f"{size(self.host_bytes)} of its state wait in host memory"] if self.host_bytes else []),
            f"the largest {'part of a ' * any(self.memory.units.parts)}block is "
            f"{size(self.largest_unit_bytes)} when gathered",
            f"{self.flops:.3g} FLOP for a sequence"
            + (f", with {self.density:.3f} of attention's pairs" if self.density != 1.0 else ""),
            *([] if self.copies == "0" else [self._copies_line()]),
            *(self._gpu_lines() if self.on_gpu else []),
            f"host memory of a worker's process, about {size(sum(self.host_terms.values()))}:",
            *_table(self.host_terms),
        ]

    def _experts_lines(self) -> list[str]:
        config, number, cp = self.memory.config, self.memory.config.num_experts, self.memory.cp
        layers = config.num_layers - config.num_dense_layers
        active = self.num_parameters - num_parameters(config) + active_parameters(config)
        meet = (
            "tokens are sent to the rank that holds their experts" if self.memory.units.sent else "experts are gathered"
        )
        lines = [
            f"{active:,} of them for a token; {layers * expert_parameters(config):,} in "
            f"{layers} x {number} experts, {config.experts_per_token} for a token; {meet}"
            + (
                f"; uneven loads take up to {size(self.memory.activations.uneven_bytes)} more"
                if self.memory.units.sent
                else ""
            )
        ]
        if self.memory.units.sent and number % cp:
            even = [ranks for ranks in range(1, number + 1) if number % ranks == 0]
            nearest = sorted(sorted(even, key=lambda ranks: abs(ranks - cp))[:2])
            lines.append(
                f"cp={cp} does not divide {number} experts: some ranks hold {-(-number // cp)} and others "
                f"fewer; cp={' or '.join(map(str, nearest))} does"
            )
        return lines

    def _gpu_lines(self) -> list[str]:
        fullest, verdicts = self.memory.fullest, []
        for gpu, fits in self.verdicts.items():
            ring = self.smallest_ring(GPUS[gpu].gib)
            rings = ", nor does any ring" if ring is None else f"; the smallest ring that does is cp={ring}"
            verdicts.append(f"  {gpu:<8} {GPUS[gpu].gib:5.1f} GiB: {'fits' if fits else 'does not fit'}{rings}")
        return [
            f"a step takes most memory in {fullest.name}:",
            *_table(fullest.terms),
            f"together about {self.gpu_bytes / 2**30:.0f} GiB of a GPU, and beside it",
            f"every worker of a node, standbys too, takes about {CONTEXT_BYTES / 2**30:.1f} GiB of each of its GPUs",
            f"with {RESERVE:.0%} that the allocator holds beside tensors, and {self.num_contexts} "
            f"context{'s' * (self.num_contexts > 1)} and communicators, a rank takes {size(self.needed_bytes)}:",
            *verdicts,
            f"{size(self.floor_bytes)} of it no number of ranks takes away",
        ]

    def _copies_line(self) -> str:
        kind, _, number = self.copies.partition(":")
        keeps = (
            f"copies={self.copies}: a rank keeps {KEPT} snapshots in host memory, {size(KEPT * self.snapshot_bytes)}"
        )
        if kind == "parity":
            return (
                f"{keeps}, and one that holds the parity of a group of {number} ranks as much again; while one is "
                f"made, {size((KEPT + 1) * self.snapshot_bytes)}"
            )
        return f"{keeps}, and {size(KEPT * int(kind) * self.snapshot_bytes)} of its peers'"


def _table(terms: Mapping[str, int]) -> list[str]:
    ranked = sorted(terms.items(), key=lambda term: (-term[1], term[0]))
    return [f"  {size(num_bytes):>10}  {name}" for name, num_bytes in ranked if num_bytes]


def plan_of(
    config: ModelConfig,
    scaling: ScalingConfig,
    step: StepConfig,
    copies: str = "auto",
    *,
    saves: bool = True,
    fused_norms: bool = True,
    built_in: bool = True,
    density: float = 1.0,
    num_own: int | None = None,
    latent: int = 0,
    num_trained: int | None = None,
    optimizer: str = "adamw",
) -> ModelPlan:
    """The plan of a model on a mesh. `saves`: it takes checkpoints; `fused_norms`, `built_in`, `latent`,
    `num_trained` and `optimizer` as in `StepMemory`; `num_own`: parameters of the model, if the config does not say all
    of them."""
    if scaling.keep_activations is True and not config.offload_activations:
        config = dataclasses.replace(config, checkpoint_activations=False)
    number = num_own or num_parameters(config)
    num_active = number - num_parameters(config) + active_parameters(config)
    of_ring = -(-step.global_batch // scaling.dp)
    together = min(step.micro_batch, of_ring)
    memory = StepMemory(
        config,
        number,
        scaling.cp,
        together * step.rank_tokens(scaling.cp),
        ELEMENT_BYTES[step.param_dtype],
        scaling.cpu_offload,
        scaling.device == "cuda",
        fused_norms,
        step.experts,
        built_in,
        latent,
        num_trained,
        optimizer,
    )
    snapshot = SNAPSHOT_BYTES * memory.units.shard - MASTER_BYTES * memory.num_matrices
    in_host = IN_HOST_BYTES[scaling.cpu_offload]
    if copies == AUTO:
        copies = str(min(parse_copies(AUTO, scaling.dp).num_copies, scaling.mesh.size - 1))
    return ModelPlan(
        number,
        scaling.mesh.size,
        memory.tokens,
        (STATE_BYTES - SNAPSHOT_BYTES - in_host) * memory.units.shard + snapshot,
        (max(memory.units.parts) or memory.units.unit) * memory.element_bytes,
        model_flops(config, step.context_tokens, density, num_active),
        memory,
        scaling.device == "cuda",
        copies,
        snapshot,
        in_host * memory.units.shard,
        -(-snapshot // scaling.dp) if saves else 0,
        together,
        density,
        1 + (scaling.spares > 0),
    )
