"""What a preset needs, printed before anything is started: built on the meta device, so that a laptop can plan 1 T.

State of a rank, in bytes for each parameter of its shard: 4 for the fp32 master, 8 for Adam's two moments, 4 for the
buffer that is summed over the rings, 4 for FSDP2's gradients; `cpu_offload` says what of it is in host memory.
Activations are what checkpointing keeps for each layer and local token: the block's input, and attention's out and lse,
in the type that is computed in. Not counted: the blocks that are gathered at the moment, one block's recomputed
activations, a chunk of logits, the communicators.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from elastic_ring.cli import train
from elastic_ring.config import ScalingConfig, StepConfig
from elastic_ring.model.config import ModelConfig, num_parameters

MOMENTS_BYTES = 8
STATE_BYTES = 4 + MOMENTS_BYTES + 4 + 4
IN_HOST_BYTES = {"none": 0, "optimizer": MOMENTS_BYTES, "all": STATE_BYTES - 4}
"""Of these, by `cpu_offload`; only the buffer that is summed over the rings never is."""
LSE_BYTES = 4
SNAPSHOT_BYTES = 4 + MOMENTS_BYTES
KEPT = 2
"""Snapshots that are held at a time, each with its copies: the last complete one, and the one that follows it."""
CONTEXT_BYTES = int(0.8 * 2**30)
"""What a process takes of a GPU that it is warm on: four standbys more made 3.2 GiB on each of four H200s
(benchmarks/results/2026-11-21-training-4xH200.json)."""


@dataclass(frozen=True)
class ModelPlan:
    """`*_bytes` are those of one rank: `host_bytes` its state in host memory, `state_bytes` its other state. `flops` is
    that of one sequence, forward and backward, recomputation not counted."""

    num_parameters: int
    num_ranks: int
    tokens_per_rank: int
    state_bytes: int
    activation_bytes: int
    largest_unit_bytes: int
    flops: float
    offloaded: bool = False
    on_gpu: bool = False
    copies: str = "0"
    snapshot_bytes: int = 0
    host_bytes: int = 0

    @property
    def gpu_bytes(self) -> int:
        """Of one rank's GPU, contexts and what the allocator cannot use aside: two blocks are gathered at a time. For
        8 B over two ranks at 128 K tokens 107.8 GiB, where 110.1 were measured."""
        kept = 0 if self.offloaded else self.activation_bytes
        return self.state_bytes + kept + 2 * self.largest_unit_bytes

    def lines(self) -> list[str]:
        gib = 2**30
        return [
            f"{self.num_parameters:,} parameters on {self.num_ranks} ranks, {self.tokens_per_rank:,} tokens on each",
            f"a rank holds {size(self.state_bytes)} of state and {size(self.activation_bytes)} of "
            f"checkpointed activations{' in host memory' * self.offloaded}",
            *([f"{size(self.host_bytes)} of its state wait in host memory"] if self.host_bytes else []),
            f"the largest block is {size(self.largest_unit_bytes)} when gathered",
            f"{self.flops:.3g} FLOP for a sequence",
            *([] if self.copies == "0" else [self._of_copies()]),
            *(
                [
                    f"together about {self.gpu_bytes / gib:.0f} GiB of a GPU, and beside it",
                    f"every worker of a node, standbys too, takes about {CONTEXT_BYTES / gib:.1f} GiB of each of its "
                    "GPUs",
                ]
                if self.on_gpu
                else []
            ),
        ]

    def _of_copies(self) -> str:
        """Host memory of a rank: the last complete snapshot and the one that follows it, and those of its peers."""
        kind, _, number = self.copies.partition(":")
        own, whole = size(KEPT * self.snapshot_bytes), size((KEPT + 1) * self.snapshot_bytes)
        if kind == "parity":
            return (
                f"copies={self.copies}: a rank keeps {KEPT} snapshots in host memory, {own}, and one that holds the "
                f"parity of a group of {number} ranks as much again; while one is made, {whole}"
            )
        held = size(KEPT * int(kind) * self.snapshot_bytes)
        return f"copies={self.copies}: a rank keeps {KEPT} snapshots in host memory, {own}, and {held} of its peers'"


def size(num_bytes: int) -> str:
    """In GiB, or in MiB where that is less than one."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


def model_flops(config: ModelConfig, context_tokens: int) -> float:
    """6 for each parameter and token (rows of a table that is only read are not multiplied), and 6 S^2 H D for each
    layer: the causal half of attention, forward + backward as 1 + 2."""
    table = 0 if config.tie_embeddings else config.vocab_size * config.width
    dense = 6.0 * (num_parameters(config) - table) * context_tokens
    return dense + 6.0 * context_tokens**2 * config.num_heads * config.head_dim * config.num_layers


def plan_of(config: ModelConfig, scaling: ScalingConfig, step: StepConfig, copies: str = "0") -> ModelPlan:
    """The plan of a model on a mesh. Raises ValueError when what is built differs from what is counted."""
    import torch

    from elastic_ring.model.transformer import Transformer

    with torch.device("meta"):
        model = Transformer(config)
    built = sum(parameter.numel() for parameter in model.parameters())
    if built != num_parameters(config):
        raise ValueError(f"the model has {built:,} parameters, its configuration says {num_parameters(config):,}")
    element = torch.finfo(getattr(torch, step.param_dtype)).bits // 8
    tokens = -(-step.context_tokens // scaling.cp)
    per_token = (config.width + config.num_heads * config.head_dim) * element + config.num_heads * LSE_BYTES
    block = sum(parameter.numel() for parameter in model.blocks[0].parameters())
    shard, in_host = -(-built // scaling.cp), IN_HOST_BYTES[scaling.cpu_offload]
    return ModelPlan(
        built, scaling.mesh.size, tokens, (STATE_BYTES - in_host) * shard,
        tokens * per_token * config.num_layers if config.checkpoint_activations else 0, block * element,
        model_flops(config, step.context_tokens), config.offload_activations, scaling.device == "cuda",
        copies, SNAPSHOT_BYTES * shard, in_host * shard,
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """`elastic-ring plan`: what `elastic-ring train --plan` prints for the same settings."""
    return train.main(["--plan", *(sys.argv[1:] if argv is None else argv)])


if __name__ == "__main__":
    sys.exit(main())
