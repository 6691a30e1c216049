"""Loops over a model with experts, for `bench_experts`: transformers under FSDP2, and DeepSpeed's AutoEP.

Driven as their documentation drives them: experts by `experts_implementation="grouped_mm"`, layers recomputed by
`gradient_checkpointing_enable`, attention by torch's SDPA; AutoEP by the section `expert_parallel` of its config, with
ZeRO 2, bf16 and torch's AdamW. DeepSpeed 0.19.8 knows the registry of transformers 5.17, not that of 5.24. The ranks
split the batch, not the sequence: each has one of its own, as long as a rank's slice of ours. The model is Qwen3-MoE,
which has no shared experts. Batches lie on the device before the clock starts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.harness.gpu_runs import RandomTokens
from elastic_ring.model.config import ModelConfig

NUM_BATCHES, NUM_WARM, RATE, CLIP = 8, 3, 3e-4, 1.0


@dataclass(frozen=True)
class MoeRun:
    """`context`: tokens of each rank."""

    system: Literal["transformers", "autoep"]
    sizes: ModelConfig
    context: int
    num_ranks: int = 2
    steps: int = 8
    cpu: bool = False


def measure(asked: MoeRun, rank: int, port: int) -> dict[str, Any]:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank))
    os.environ.update(WORLD_SIZE=str(asked.num_ranks), **({"DS_ACCELERATOR": "cpu"} if asked.cpu else {}))
    device = torch.device("cpu") if asked.cpu else torch.device("cuda", rank)
    if not asked.cpu:
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if asked.cpu else "nccl", device_id=None if asked.cpu else device)
    given, losses = batches(asked, rank, device), list[Tensor]()
    step = (autoep if asked.system == "autoep" else plain)(asked, device)
    seconds = []
    for index in range(asked.steps):
        _synchronise(asked)
        begun = time.perf_counter()
        losses.append(step(given[index % NUM_BATCHES]))
        _synchronise(asked)
        seconds.append(time.perf_counter() - begun)
    steady = seconds[NUM_WARM:]
    peak_bytes = 0 if asked.cpu else torch.cuda.max_memory_allocated(device)
    row = {
        "first_s": round(seconds[0], 2),
        "step_s": round(median(steady), 4),
        "spread": round((max(steady) - min(steady)) / median(steady), 3),
        "peak_gib": round(peak_bytes / 2**30, 1),
        "loss": float(losses[-1]),
    }
    dist.barrier()
    dist.destroy_process_group()
    return row


def batches(asked: MoeRun, rank: int, device: torch.device) -> list[dict[str, Tensor]]:
    source = RandomTokens(asked.context, asked.sizes.vocab_size, 0)
    samples = [source.read(index * asked.num_ranks + rank) for index in range(NUM_BATCHES)]
    whole = [torch.from_numpy(sample.tokens[None]).to(device) for sample in samples]
    return [{"input_ids": one[:, :-1], "labels": one[:, :-1], "shift_labels": one[:, 1:]} for one in whole]


def build(asked: MoeRun, device: torch.device) -> Any:
    """fp32 on `device`, every layer recomputed."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = asked.sizes
    config = Qwen3MoeConfig(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.width,
        intermediate_size=sizes.ffn_width,
        num_hidden_layers=sizes.num_layers,
        num_attention_heads=sizes.num_heads,
        num_key_value_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        moe_intermediate_size=sizes.expert_width,
        num_experts=sizes.num_experts,
        num_experts_per_tok=sizes.experts_per_token,
        norm_topk_prob=True,
        max_position_embeddings=max(32_768, asked.context),
        rope_theta=sizes.rope_theta,
        use_cache=False,
    )
    with device:
        model: Any = Qwen3MoeForCausalLM._from_config(
            config, dtype=torch.float32, attn_implementation="sdpa", experts_implementation="grouped_mm"
        )
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def plain(asked: MoeRun, device: torch.device) -> Callable[[dict[str, Tensor]], Tensor]:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = build(asked, device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step(batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = model(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def autoep(asked: MoeRun, device: torch.device) -> Callable[[dict[str, Tensor]], Tensor]:
    import deepspeed

    engine, *_ = deepspeed.initialize(
        model=build(asked, device),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": CLIP,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 2},
            "optimizer": {
                "type": "AdamW",
                "params": {"lr": RATE, "betas": [0.9, 0.95], "weight_decay": 0.1, "torch_adam": True},
            },
            "expert_parallel": {"enabled": True, "autoep_size": asked.num_ranks, "preset_model": "qwen3_moe"},
        },
    )

    def step(batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def _synchronise(asked: MoeRun) -> None:
    if not asked.cpu:
        torch.cuda.synchronize()
