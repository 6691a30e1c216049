"""One rank of a large ring on one GPU: its true sizes, exchanges that move nothing. Its peak beside the plan's.

`python benchmarks/training/one_rank.py --preset 1t --rows 1:320:1024` (layers, ranks of the ring, rows of the tables,
which are the preset's if left out) shards as such a ring would, through torch's fake process group, and runs forward
and backward passes of a rank's tokens. Parameters, gathered parts, gradients on their way and activations have the
sizes that they have in the ring; values are not those of a training. Hops of K/V are left out, of the measurement and
of the plan: a rank attends to its own tokens. Adam's moments are left out, too.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore

from elastic_ring.attention.kernels.registry import named
from elastic_ring.attention.layouts.layout import make_layout
from elastic_ring.attention.options import RingOptions
from elastic_ring.attention.patterns.sparse import Pattern
from elastic_ring.attention.plan.schedule import plan
from elastic_ring.attention.ring import RingAttention
from elastic_ring.cli.settings import PRESETS
from elastic_ring.data.source import StdlibText
from elastic_ring.model.config import ModelConfig, num_parameters
from elastic_ring.model.memory import StepMemory
from elastic_ring.model.transformer import Transformer
from elastic_ring.train.gradient import Gradient
from elastic_ring.train.optim import OptimConfig
from elastic_ring.train.task import Batch, TrainingTask
from elastic_ring.train.wrap import ModuleMaker, local_params

GIB = 2**30
LEFT_OUT = ("hop buffers",)
MANY = 10
"""Layers from which on one pass is enough."""


def planned(config: ModelConfig, cp: int, tokens: int) -> tuple[str, dict[str, int]]:
    """The fullest moment of the passes, and its parts."""
    memory = StepMemory(config, num_parameters(config), cp, tokens, 2, "optimizer")
    found = [
        (moment.name, {name: size for name, size in moment.terms.items() if name not in LEFT_OUT})
        for moment in memory.moments
        if moment.name != "the update"
    ]
    return max(found, key=lambda one: sum(one[1].values()))


def measured(config: ModelConfig, cp: int, tokens: int, passes: int, device: torch.device) -> dict[str, Any]:
    """Bytes of tensors and of the allocator at the peak, and the seconds of each pass."""
    step, begun = PRESETS["1b"]()["step"], time.perf_counter()  # in bfloat16 over fp32 masters
    task = TrainingTask(partial(Transformer, config), StdlibText(64), step, OptimConfig())
    model = ModuleMaker(task, device).wrap(init_device_mesh(device.type, (cp,)))
    params = local_params(model)
    with torch.no_grad():
        for param in params.values():
            param.fill_(1e-3)
    gradient = Gradient.like(params, device)
    gradient.attach(model, in_host=False)
    schedule = plan(Pattern(), make_layout("contiguous", tokens, 1))
    kernel = "aten-flash" if device.type == "cuda" else "aten-cpu"  # needs no compiler
    attention = RingAttention(schedule, 0, None, RingOptions(backend=named(kernel)))
    ids = torch.arange(tokens, device=device)[None]
    batch = Batch(ids % config.vocab_size, ids % config.vocab_size, ids, torch.zeros_like(ids).int(), attention)
    seconds = [time.perf_counter() - begun]
    print(f"wrapped after {seconds[0]:.1f} s", flush=True)
    for _ in range(passes):
        begun = time.perf_counter()
        gradient.begin()
        gradient.begin_pass()
        loss, _ = task.loss(model, batch)
        print(f"forward launched after {time.perf_counter() - begun:.1f} s", flush=True)
        loss.backward()
        gradient.end()
        loss.item()  # waits for the device
        seconds.append(time.perf_counter() - begun)
    gradient.detach()
    return {"units": sum(isinstance(module, FSDPModule) for module in model.modules()), "seconds": seconds}


def row(asked: argparse.Namespace, text: str) -> dict[str, Any]:
    """Plan and measure one row."""
    layers, cp, *table = (int(part) for part in text.split(":"))
    device, tokens = torch.device(asked.device), -(-asked.context // cp)
    config = PRESETS[asked.preset]()["model"]
    config = dataclasses.replace(config, num_layers=layers, vocab_size=(table or [config.vocab_size])[0])
    name, terms = planned(config, cp, tokens)
    wanted = sum(terms.values())
    print(f"{layers} layers, cp {cp}, {tokens:,} tokens; plan: {wanted / GIB:.2f} GiB in {name}:", flush=True)
    for term, size in sorted(terms.items(), key=lambda item: -item[1])[:12]:
        print(f"  {size / GIB:7.2f}  {term}")
    dist.init_process_group("fake", rank=0, world_size=cp, store=FakeStore())
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    found = measured(config, cp, tokens, asked.passes if layers < MANY else 1, device)
    dist.destroy_process_group()
    if device.type == "cuda":
        stats = torch.cuda.memory_stats()
        found["peak_bytes"], found["reserved_bytes"] = (
            stats["allocated_bytes.all.peak"],
            stats["reserved_bytes.all.peak"],
        )
        peak, reserved = found["peak_bytes"], found["reserved_bytes"]
        print(f"measured {peak / GIB:.2f} GiB, {peak / wanted:.3f} of the plan; reserved {reserved / GIB:.2f} GiB")
    print([round(each, 2) for each in found["seconds"]], found["units"], "units", flush=True)
    return {"row": text, "plan": terms, "moment": name, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="1t")
    parser.add_argument("--rows", nargs="+", default=["1:320:1024", "1:320", "136:640"])
    parser.add_argument("--context", type=int, default=1_048_576)
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    rows = []
    for text in asked.rows:
        rows.append(row(asked, text))
        gc.collect()
        if asked.out is not None:
            asked.out.write_text(json.dumps(rows) + "\n")


if __name__ == "__main__":
    main()
