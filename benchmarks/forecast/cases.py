"""Cases whose answer is known: what they tell of themselves, the seconds of a step that were seen, and where.

Cases alternate between the half that efficiencies are fitted on and the half that is reported only.
"""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_ring.cli.forecasts.attention import attention_of, read
from elastic_ring.config import ScalingConfig, StepConfig
from elastic_ring.forecast.sizing.step_time import COMPILED, DENSE, Job, job_of
from elastic_ring.model.config import EXPERT_FIELDS, ModelConfig, preset

FOUNDRY = Path(__file__).with_name("foundry.csv")
MPT = {
    "125m": (12, 768, 12),
    "350m": (24, 1024, 16),
    "760m": (24, 1536, 12),
    "1b": (24, 2048, 16),
    "3b": (32, 2560, 20),
    "7b": (32, 4096, 32),
    "13b": (40, 5120, 40),
    "30b": (48, 7168, 56),
    "70b": (80, 8192, 64),
}
"""(layers, width, heads) by name."""
MPT_VOCAB = 50_368


@dataclass(frozen=True)
class Case:
    """`software` names the efficiency class with the GPU's architecture; `fitted`: its half."""

    name: str
    source: str
    gpu: str
    software: str
    job: Job
    seen_s: float
    fitted: bool


def foundry() -> Iterator[Case]:
    """G2. Every second of the rows is fitted."""
    with FOUNDRY.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    for index, row in enumerate(rows):
        layers, width, heads = MPT[row["model"]]
        tokens, gpus = int(row["micro"]) * int(row["seq"]), int(row["gpus"])
        job = Job(
            layers=layers,
            width=width,
            heads=heads,
            kv_heads=heads,
            head_dim=width // heads,
            block=12.0 * width**2,
            head=float(MPT_VOCAB * width),
            vocab=MPT_VOCAB,
            ffn=8.0 * width,
            num_parameters=float(row["parameters"]),
            tokens=tokens,
            seq=int(row["seq"]),
            passes=int(row["accum"]),
            shard_ranks=gpus,
            recompute="all" if row["recompute"] == "1" else "none",
            grad_bytes=2,
        )
        seen = tokens * int(row["accum"]) / float(row["tokens_s_gpu"])
        name = f"G2 {row['gpu']} {row['model']} {row['seq']} x {gpus}"
        yield Case(name, "mosaicml/llm-foundry", row["gpu"], "fsdp-fa2", job, seen, index % 2 == 0)


HF_SIZES: dict[str, Any] = {
    "vocab_size": 32_000,
    "num_layers": 22,
    "num_heads": 16,
    "head_dim": 128,
    "ffn_width": 5_632,
    "tie_embeddings": False,
}
STEPS, EXPERTS = "steps/2026-11-28-ordinary-step-2xH100.md", "experts/2026-11-28-experts-4xH200.md"
# (model, tokens of a sequence, dp, cp, sequences, GPU, other settings, seconds, where in benchmarks/results)
OWN: list[tuple[str, int, int, int, int, str, dict[str, Any], float, str]] = [
    ("1b", 131_072, 2, 2, 2, "H200", {}, 5.040, "training/2026-11-21-training-4xH200.md"),
    ("1b", 131_072, 1, 2, 1, "H200", {}, 4.992, "training/bench_overhead-gpu-1b-1x2-2026-11-22.txt"),
    ("8b", 131_072, 1, 2, 1, "H200", {}, 21.557, "training/bench_overhead-gpu-8b-2026-11-22.txt"),
    ("8b", 131_072, 2, 2, 2, "H200", {}, 21.664, "training/bench_overhead-gpu-8b-2x2-2026-11-22.txt"),
    ("1b", 65_536, 1, 1, 1, "H200", {}, 3.111, "training/2026-11-24-state-in-host-memory-H200.md"),
    ("1b", 65_536, 1, 2, 1, "H200", {}, 1.621, "gpu_runs/2026-11-24-ninth-run-2xH200.md"),
    ("1b", 32_768, 1, 1, 1, "H200", {}, 1.098, "gpu_runs/2026-11-22-fifth-run-H200.md"),
    ("1b", 32_768, 1, 1, 1, "H200", {"compiled": True}, 1.040, "gpu_runs/2026-11-22-fifth-run-H200.md"),
    ("1b", 32_768, 2, 2, 2, "H200", {}, 0.589, "training/2026-11-21-training-4xH200.md"),
    ("1b", 32_768, 1, 2, 1, "H100-80", {}, 0.617, "gpu_runs/2026-11-25-tenth-run-2xH100.md"),
    (
        "1b",
        65_536,
        1,
        1,
        1,
        "H200",
        {"cpu_offload": "optimizer"},
        3.304,
        "training/2026-11-24-state-in-host-memory-H200.md",
    ),
    ("1b", 131_072, 1, 2, 1, "H200", {"pattern": "bigbird:52,0,52"}, 2.212, "gpu_runs/2026-11-21-second-run-H200.md"),
    ("8b", 131_072, 1, 2, 1, "H200", {"cpu_offload": "optimizer"}, 22.93, "gpu_runs/2026-11-24-ninth-run-2xH200.md"),
    ("8b", 131_072, 1, 2, 1, "H200", {"cpu_offload": "all"}, 23.50, "gpu_runs/2026-11-24-ninth-run-2xH200.md"),
    ("1b", 131_072, 1, 2, 1, "H100-80", {}, 5.11, "gpu_runs/2026-11-25-tenth-run-2xH100.md"),
    ("1b", 8_192, 2, 1, 2, "H100-80", {}, 0.212, STEPS),
    ("hf", 8_192, 2, 1, 2, "H100-80", {}, 0.227, STEPS),
    ("hf", 8_192, 2, 1, 2, "H100-80", {"recompute": "none"}, 0.192, STEPS),
    ("hf", 8_192, 1, 1, 1, "H100-80", {}, 0.220, "steps/2026-11-27-ordinary-step-H100.md"),
    ("experts", 16_384, 1, 2, 1, "H200", {"experts": "send"}, 0.384, EXPERTS),
    ("experts", 16_384, 1, 2, 1, "H200", {"experts": "gather"}, 0.362, EXPERTS),
    ("experts", 16_384, 1, 2, 1, "H200", {"experts": "send"}, 0.385, EXPERTS),
    ("dense", 16_384, 1, 2, 1, "H200", {}, 0.249, EXPERTS),
    ("experts", 131_072, 1, 2, 1, "H200", {"experts": "gather"}, 4.70, EXPERTS),
    ("experts", 131_072, 1, 2, 1, "H200", {"experts": "send"}, 4.97, EXPERTS),
    ("dense", 131_072, 1, 2, 1, "H200", {}, 4.31, EXPERTS),
]


def model_of(name: str) -> ModelConfig:
    """A preset, the Llama of `benchmarks.harness.gpu_runs`, or eight layers of Qwen3-30B-A3B's shape, with experts or
    with a feed-forward part of equal active FLOP."""
    if name == "hf":
        return dataclasses.replace(preset("1b"), **HF_SIZES)
    if name not in ("experts", "dense"):
        return preset(name)
    found = dataclasses.replace(preset("30b-a3b"), num_layers=8)
    none: dict[str, Any] = dict.fromkeys(EXPERT_FIELDS, 0)
    return found if name == "experts" else dataclasses.replace(found, ffn_width=8 * 768, **none)


def own() -> Iterator[Case]:
    """Steps of this project's own runs (G9), flash-attn-4."""
    for index, (name, context, dp, cp, batch, gpu, other, seen, where) in enumerate(OWN):
        scaling = ScalingConfig(dp=dp, cp=cp, device="cuda", cpu_offload=other.get("cpu_offload", "none"))
        step = StepConfig(
            steps=1,
            global_batch=batch,
            context_tokens=context,
            param_dtype="bfloat16",
            experts=other.get("experts", "auto"),
        )
        model, pattern = model_of(name), other.get("pattern")
        kept = DENSE if pattern is None else attention_of(read(pattern, model), model, step, model.num_kv_heads)(cp)
        job = job_of(model, scaling, step, kept)
        before = COMPILED if other.get("compiled") else 1.0
        fused = job.fused if where.startswith(("steps", "experts")) else before  # Liger's kernels came with these
        job = dataclasses.replace(job, fused=fused, recompute=other.get("recompute", job.recompute))
        told = ", ".join(f"{key}={value}" for key, value in other.items())
        yield Case(
            f"G9 {gpu} {name} {context} dp {dp} cp {cp} {told}".rstrip(),
            where,
            gpu,
            "elastic-ring",
            job,
            seen,
            index % 2 == 0,
        )


def llama_8b() -> Job:
    """Llama-3.1 8B, to be given its tokens and mesh."""
    return job_of(
        preset("8b"),
        ScalingConfig(dp=1, cp=1, device="cuda"),
        StepConfig(steps=1, global_batch=1, context_tokens=8192, param_dtype="bfloat16"),
    )


def published() -> Iterator[Case]:
    """G1 (nothing recomputed, compiled kernels around attention) and G3 (selective recomputation: every second layer).
    None is fitted."""
    base = dataclasses.replace(llama_8b(), recompute="none", fused=1.0)
    for gpus, seen in ((8, 12.78), (32, 13.00), (128, 13.16)):
        job = dataclasses.replace(base, tokens=4096, cp=2, passes=32, shard_ranks=gpus, fused=COMPILED)
        yield Case(f"G1 8B 8K cp 2 x {gpus}", "NVIDIA/dgxc-benchmarking 1b9bb6b", "H100-80", "vendor", job, seen, False)
    for compiled, rate in ((False, 5762), (True, 6667)):
        job = dataclasses.replace(
            base, tokens=16_384, shard_ranks=8, recompute="half", fused=COMPILED if compiled else 1.0
        )
        yield Case(
            f"G3 8B 8K x 8{' compiled' * compiled}",
            "pytorch/torchtitan, llama3_h100_202412",
            "H100-96-500W",
            "fsdp-fa2",
            job,
            16_384 / rate,
            False,
        )


def all_cases() -> list[Case]:
    return [*foundry(), *own(), *published()]
