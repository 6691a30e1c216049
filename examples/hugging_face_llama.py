"""A Llama of Hugging Face transformers through a killed worker. Needs `pip install transformers`, downloads nothing.

python examples/hugging_face_llama.py --steps 20 --run-dir runs/hugging-face-llama
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from elastic_ring import Batch, ElasticRingTrainer, OptimConfig, RunConfig, ScalingConfig, StepConfig
from elastic_ring.data.source import StdlibText
from elastic_ring.faults import parse_faults

CONTEXT = 256


def ring_attention(_: nn.Module, q: Any, k: Any, v: Any, mask: Any, *, ring: Any, **unused: Any) -> tuple[Any, None]:
    return ring(*(heads.transpose(1, 2) for heads in (q, k, v))), None  # (B, H, S, D) -> (B, S, H, D)


def llama() -> nn.Module:
    from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

    AttentionInterface.register("elastic_ring", ring_attention)  # here, so that every worker's process does it
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=257, hidden_size=64, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=CONTEXT, attn_implementation="elastic_ring",
    ))  # fmt: skip


def loss(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, int]:
    out = model(batch.tokens, position_ids=batch.positions, ring=batch.attention, use_cache=False)
    targets = batch.targets.flatten()
    loss = F.cross_entropy(out.logits.flatten(0, 1).float(), targets, ignore_index=-100, reduction="sum")
    return loss, int((targets != -100).sum())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--run-dir", default="runs/hugging-face-llama")
    args = parser.parse_args()
    result = ElasticRingTrainer(
        llama,
        StdlibText(CONTEXT),
        loss=loss,
        step_config=StepConfig(steps=args.steps, global_batch=4, context_tokens=CONTEXT),
        optim_config=OptimConfig(peak_lr=3e-3, total_steps=args.steps),
        scaling_config=ScalingConfig(dp=2, cp=2, spares=1, resources_per_worker={"CPU": 0.25}),
        run_config=RunConfig(
            "hugging-face-llama", run_dir=args.run_dir, faults=parse_faults("kill@step=1,phase=backward,rank=3")
        ),
    ).fit()
    print(f"{result.summary['steps']} steps, {len(result.summary['recoveries'])} recovery, weights in {result.weights}")
