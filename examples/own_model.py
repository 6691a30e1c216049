"""A model of one's own through a killed worker: a small decoder that knows nothing of rings or failures.

python examples/own_model.py --steps 20 --run-dir runs/own-model
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.nn import functional as F

from elastic_ring import Batch, ElasticRingTrainer, OptimConfig, RunConfig, ScalingConfig, StepConfig
from elastic_ring.data.source import StdlibText
from elastic_ring.faults import parse_faults

CONTEXT, WIDTH, HEADS = 256, 64, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        heads = self.qkv(self.norm_1(x)).unflatten(-1, (3, HEADS, -1))  # (1, S_local, 3, H, D)
        x = x + self.out(batch.attention(*heads.unbind(2)).flatten(-2))  # over the whole ring, causal
        return x + self.mlp(self.norm_2(x))


class Decoder(nn.Module):
    def __init__(self, vocab_size: int = 257) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(vocab_size, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, vocab_size)

    def forward(self, batch: Batch) -> torch.Tensor:
        x = self.token(batch.tokens) + self.place(batch.positions)  # positions of the global sequence
        for block in self.blocks:
            x = block(x, batch)
        return self.head(x)


def loss(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, int]:
    logits, targets = model(batch).flatten(0, 1), batch.targets.flatten()
    return F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum"), int((targets != -100).sum())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--run-dir", default="runs/own-model")
    args = parser.parse_args()
    result = ElasticRingTrainer(
        Decoder,
        StdlibText(CONTEXT),
        loss=loss,
        step_config=StepConfig(steps=args.steps, global_batch=4, context_tokens=CONTEXT),
        optim_config=OptimConfig(peak_lr=3e-3, total_steps=args.steps),
        scaling_config=ScalingConfig(dp=2, cp=2, spares=1, resources_per_worker={"CPU": 0.25}),
        run_config=RunConfig(
            "own-model", run_dir=args.run_dir, faults=parse_faults("kill@step=1,phase=backward,rank=3")
        ),
    ).fit()
    print(f"{result.summary['steps']} steps, {len(result.summary['recoveries'])} recovery, weights in {result.weights}")
