"""The plain loop that an ordinary step is compared with: transformers, autocast, fused AdamW, DDP or FSDP2.

Driven as the documentation of transformers and torch drives them: gradient checkpointing by
`gradient_checkpointing_enable`, attention by torch's SDPA or, for packed documents, by torch's `varlen_attn` through
transformers' `AttentionInterface`; Liger's kernels by `apply_liger_kernel_to_llama`. Batches lie on the GPU before the
clock starts.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.harness.gpu_profile import profiled
from benchmarks.harness.gpu_runs import HF_LLAMA, RandomTokens

NUM_BATCHES = 8


@dataclass(frozen=True)
class PlainRun:
    """`parallel`: "ddp" or "fsdp". `checkpoint`: recompute each layer. `document_tokens`: as of `RandomTokens`; 0: one
    document, through SDPA."""

    context: int = 8192
    document_tokens: int = 0
    parallel: str = "ddp"
    compile: bool = False
    liger: bool = False
    checkpoint: bool = True
    num_ranks: int = 1
    steps: int = 8
    profile: bool = False


def batches(run: PlainRun, rank: int, device: torch.device) -> list[dict[str, Any]]:
    source = RandomTokens(run.context, HF_LLAMA["vocab_size"], run.document_tokens)
    made = []
    for index in range(NUM_BATCHES):
        sample = source.read(index * run.num_ranks + rank)
        tokens = torch.from_numpy(sample.tokens[None]).to(device)
        starts = [*sample.document_starts, run.context]
        positions = torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(starts)])
        cuts = torch.tensor(starts, dtype=torch.int32, device=device)
        longest = max(b - a for a, b in itertools.pairwise(starts))
        batch = {
            "input_ids": tokens[:, :-1],
            "labels": tokens[:, :-1],
            "shift_labels": tokens[:, 1:],
            "position_ids": positions[None].to(device),
        }
        made.append(batch | ({"cuts": cuts, "longest": longest} if run.document_tokens else {}))
    return made


def varlen(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, *, cuts: Tensor, longest: int, **unused: Any
) -> tuple[Tensor, None]:
    from torch.nn.attention.varlen import varlen_attn

    takes, groups = signature(varlen_attn).parameters, q.size(1) // k.size(1)
    # In bf16 whatever autocast left them in, as transformers' own integration of FlashAttention does.
    q, k, v = (x.transpose(1, 2).flatten(0, 1).to(torch.bfloat16) for x in (q, k, v))
    how: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in takes else {"is_causal": True}
    if "enable_gqa" in takes:
        how["enable_gqa"] = True
    else:
        k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    out: Any = varlen_attn(q, k, v, cuts, cuts, longest, longest, **how)
    return out[None], None


def build(run: PlainRun, device: torch.device) -> nn.Module:
    from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

    if run.liger:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama()
    AttentionInterface.register("varlen", varlen)
    how = "varlen" if run.document_tokens else "sdpa"
    config = LlamaConfig(**{name: value for name, value in HF_LLAMA.items() if name != "model_type"})
    with device:
        model: Any = LlamaForCausalLM._from_config(config, dtype=torch.float32, attn_implementation=how)
    if run.checkpoint:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.config.use_cache = False
    return model.train()


def distributed(run: PlainRun, model: Any, device: torch.device) -> nn.Module:
    if run.parallel == "fsdp":
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in model.model.layers:
            fully_shard(layer, mp_policy=policy)
        return fully_shard(model, mp_policy=policy)
    if run.num_ranks == 1:
        return model
    return nn.parallel.DistributedDataParallel(model, device_ids=[device.index], gradient_as_bucket_view=True)


def measure(run: PlainRun, rank: int, port: int) -> dict[str, Any]:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("nccl", rank=rank, world_size=run.num_ranks, device_id=device)
    given = batches(run, rank, device)
    model = distributed(run, build(run, device), device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    called = torch.compile(model) if run.compile else model
    losses = []

    def step(index: int) -> None:
        with torch.autocast("cuda", torch.bfloat16, enabled=run.parallel != "fsdp"):
            loss = called(**given[index % NUM_BATCHES]).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())

    row = timed(step, run.steps)
    row |= {"peak_gib": round(torch.cuda.max_memory_allocated(device) / 2**30, 1), "loss": float(losses[-1])}
    if run.profile:
        found = profiled(lambda: step(0))
        row |= {"profile": found} if rank == 0 else {}
    dist.destroy_process_group()
    return row


def timed(step: Callable[[int], None], num_steps: int) -> dict[str, Any]:
    """Seconds of the first step, which compiles, and the median of those after the third."""
    seconds = []
    for index in range(num_steps):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        step(index)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    steady = seconds[3:]
    return {
        "first_s": round(seconds[0], 2),
        "step_s": round(median(steady), 4),
        "spread": round((max(steady) - min(steady)) / median(steady), 3),
    }
