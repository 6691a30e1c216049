"""What the GPU benches share: random tokens, cheap initial values, trainers of a preset or of a Hugging Face Llama.

Speed does not depend on the tokens' values; a sequence that is one document is the whole causal triangle.
"""

from __future__ import annotations

import math
import subprocess
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from elastic_ring import ElasticRingTrainer, OptimConfig, RunConfig, ScalingConfig, StepConfig
from elastic_ring.config import CpuOffload, Timeouts
from elastic_ring.costs import Placement
from elastic_ring.data.packing import Sample
from elastic_ring.gpus import GPUS
from elastic_ring.model.config import EXPERT_FIELDS, ModelConfig, model_flops, preset
from elastic_ring.model.transformer import Transformer

# Kernels that are compiled, and modules that are loaded, hold a process's GIL for seconds at a first start.
TIMEOUTS = Timeouts(heart_floor_s=15.0, heart_cap_s=25.0, build_s=300.0, start_s=300.0)
BLOCK_ELEMENTS = (1 << 22) + 3
COPY_BYTES = 4 << 30
PEAK_FLOPS = GPUS["H200"].peak_flops


DOCUMENT_SPREAD = 1.2
"""Sigma of the logarithm of documents' lengths; web text has about that."""
HF = "hf-llama"
HF_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 22,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32_000,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": False,
}
"""1.17 B parameters."""


@dataclass(frozen=True)
class RandomTokens:
    """Sequences of random tokens, each one document, or packed ones of `document_tokens` in the mean."""

    context_tokens: int
    vocab_size: int
    document_tokens: int = 0
    num_sequences: int = 1 << 12
    fingerprint: str = "random tokens"

    def open(self) -> RandomTokens:
        return self

    def read(self, sample_id: int) -> Sample:
        draw = np.random.default_rng(sample_id)
        tokens = draw.integers(self.vocab_size, size=self.context_tokens + 1)
        return Sample(tokens, self._starts(draw) if self.document_tokens else (0,))

    def _starts(self, draw: np.random.Generator) -> tuple[int, ...]:
        middle = math.log(self.document_tokens) - DOCUMENT_SPREAD**2 / 2
        starts = [0]
        while starts[-1] < self.context_tokens:
            starts.append(starts[-1] + max(16, round(draw.lognormal(middle, DOCUMENT_SPREAD))))
        return tuple(starts[:-1])


@dataclass(frozen=True)
class QuickInitial:
    """Repeats one block of normal numbers: drawing billions would take longer than the measurement."""

    num_layers: int

    def tensor(self, name: str, shape: Sequence[int], rows: tuple[int, int] | None = None) -> Tensor:
        start, stop = rows if rows is not None else (0, shape[0])
        kept = (stop - start, *shape[1:])
        if len(shape) < 2:
            return torch.ones(kept)
        block = torch.empty(BLOCK_ELEMENTS).normal_(0.0, 0.02, generator=torch.Generator().manual_seed(0))
        at = (zlib.crc32(name.encode()) + start * math.prod(shape[1:])) % BLOCK_ELEMENTS
        num_elements = math.prod(kept)
        times = -(-num_elements // BLOCK_ELEMENTS)
        flat = torch.roll(block, -at).repeat(times)[:num_elements].view(kept)
        return (
            flat / math.sqrt(2 * self.num_layers)
            if name.endswith(("output.weight", "down.weight", "experts.down"))
            else flat
        )


@dataclass(frozen=True)
class GpuRun:
    """The settings of a run on GPUs."""

    preset: str = "1b"
    """A preset's name, or "hf-llama" for `HF_LLAMA` through the door of transformers."""
    context: int = 8192
    batch: int = 4
    cp: int = 2
    dp: int = 2
    spares: int = 1
    deterministic: bool = True
    kernel: str = ""
    checkpoint: bool = True
    offload: bool = False
    pattern: str = ""
    release_contexts: bool = True
    cpu_offload: CpuOffload = "none"
    document_tokens: int = 0
    num_layers: int = 0
    """In place of the preset's; 0: all of them."""
    vocab_size: int = 0
    """In place of the preset's; 0: that."""
    linears: Literal["native", "fp8"] = "native"
    experts: Placement = "auto"
    optimizer: Literal["adamw", "muon"] = "adamw"
    dense: bool = False
    """In place of a preset's experts, a feed-forward part of equal active FLOP."""

    @property
    def model(self) -> ModelConfig:
        """The sizes; of a preset also how it computes."""
        if self.preset == HF:
            return self.hugging_face.sizes()
        found = replace(
            preset(self.preset),
            checkpoint_activations=self.checkpoint,
            offload_activations=self.offload,
        )
        if self.num_layers:
            found = replace(found, num_layers=self.num_layers)
        if self.vocab_size:
            found = replace(found, vocab_size=self.vocab_size)
        if self.dense:
            ffn_width = found.experts_per_token * found.expert_width + found.shared_width
            none: dict[str, Any] = dict.fromkeys(EXPERT_FIELDS, 0)
            found = replace(found, ffn_width=ffn_width, **none)
        return found

    @property
    def hugging_face(self) -> Any:
        from elastic_ring.integrations.transformers import ring_model

        return ring_model(HF_LLAMA, checkpoint_activations=self.checkpoint)

    def trainer(self, folder: Path, name: str, steps: int, faults: str = "") -> ElasticRingTrainer:
        step = StepConfig(
            steps=steps,
            global_batch=self.batch,
            context_tokens=self.context,
            sequences_per_pass=1,
            param_dtype="bfloat16",
            check_model=False,
            deterministic=self.deterministic,
            kernel=self.kernel,
            experts=self.experts,
            linears=self.linears,
        )
        return ElasticRingTrainer(
            self.hugging_face if self.preset == HF else partial(Transformer, self.model),
            RandomTokens(self.context, self.model.vocab_size, self.document_tokens),
            step_config=step,
            optim_config=OptimConfig(
                peak_lr=3e-4,
                min_lr=3e-5,
                warmup_steps=min(10, steps),
                total_steps=steps,
                optimizer=self.optimizer,
            ),
            scaling_config=ScalingConfig(
                dp=self.dp,
                cp=self.cp,
                spares=self.spares,
                device="cuda",
                resources_per_worker={"CPU": 1.0},
                keep_activations=False,
                release_contexts=self.release_contexts,
                cpu_offload=self.cpu_offload,
            ),
            run_config=RunConfig(name, run_dir=str(folder / name), faults=faults, progress=False, timeouts=TIMEOUTS),  # type: ignore[arg-type]
            initial=QuickInitial(self.model.num_layers),
            pattern=self.pattern or None,
        )


def utilisation(run: GpuRun, step_s: float) -> float:
    """Model FLOPs (recomputation does not count) over what the GPUs could do in a step's time."""
    return model_flops(run.model, run.context) * run.batch / (run.dp * run.cp) / step_s / PEAK_FLOPS


def link_rate() -> float:
    """GB/s of a copy from one GPU's memory to another's, the best of five."""
    source = torch.ones(COPY_BYTES, dtype=torch.uint8, device="cuda:0")
    target = torch.empty_like(source, device="cuda:1")
    rates = []
    for _ in range(5):
        _synchronize()
        begun = time.monotonic()
        target.copy_(source)
        _synchronize()
        rates.append(COPY_BYTES / (time.monotonic() - begun) / 1e9)
    del source, target
    torch.cuda.empty_cache()
    return max(rates)


def _synchronize() -> None:
    for index in (0, 1):
        torch.cuda.synchronize(index)


def device_memory_mib() -> list[int]:
    """Memory in use on each GPU, by all processes."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return [int(line) for line in subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()]


def process_memory_mib(pid: int) -> int | None:
    """Memory of one process on all GPUs; None where nvidia-smi does not list it, as in some containers."""
    command = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    found = [used.strip() for each, _, used in (line.partition(",") for line in lines) if each.strip() == str(pid)]
    return sum(map(int, found)) if found and all(used.isdigit() for used in found) else None


def described(run: GpuRun) -> dict[str, Any]:
    return {
        **vars(run),
        "gpu": torch.cuda.get_device_name(0),
        "gpus": torch.cuda.device_count(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }
