"""One rank of a large ring on one GPU: its true sizes, exchanges that move nothing. Its peak beside the plan's.

`python benchmarks/training/one_rank.py --preset 1t --cp 320 --layers 1` shards as a ring of `cp` would, through torch's
fake process group, and runs forward and backward passes of a rank's tokens. Parameters, gathered parts, gradients on
their way and activations have the sizes that they have in the ring; values are not those of a training. Hops of K/V are
left out, of the measurement and of the plan: a rank attends to its own tokens. Adam's moments are left out, too.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from elastic_ring.attention.layouts.layout import make_layout
from elastic_ring.attention.patterns.pattern import Pattern
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
    step = PRESETS["1b"]()["step"]  # in bfloat16 over fp32 masters
    task = TrainingTask(partial(Transformer, config), StdlibText(64), step, OptimConfig())
    model = ModuleMaker(task, device).wrap(init_device_mesh(device.type, (cp,)))
    params = local_params(model)
    with torch.no_grad():
        for param in params.values():
            param.fill_(1e-3)
    gradient = Gradient.like(params, device)
    gradient.attach(model, in_host=False)
    attention = RingAttention(plan(Pattern(), make_layout("contiguous", tokens, 1)), 0, None)
    ids = torch.arange(tokens, device=device)[None]
    batch = Batch(ids % config.vocab_size, ids % config.vocab_size, ids, torch.zeros_like(ids).int(), attention)
    seconds = []
    for _ in range(passes):
        begun = time.perf_counter()
        gradient.begin()
        gradient.begin_pass()
        loss, _ = task.loss(model, batch)
        loss.backward()
        gradient.end()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(round(time.perf_counter() - begun, 2))
    on_gpu = device.type == "cuda"
    return {
        "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else 0,
        "reserved_bytes": torch.cuda.max_memory_reserved() if on_gpu else 0,
        "retries": torch.cuda.memory_stats()["num_alloc_retries"] if on_gpu else 0,
        "pass_s": seconds,
        "units": sum(1 for module in model.modules() if hasattr(module, "unshard")),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="1t")
    parser.add_argument("--cp", type=int, default=320)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--context", type=int, default=1_048_576)
    parser.add_argument("--vocab", type=int, help="a small one shows the blocks' peak, not the tables'")
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    device, tokens = torch.device(asked.device), -(-asked.context // asked.cp)
    config = PRESETS[asked.preset]()["model"]
    config = dataclasses.replace(config, num_layers=asked.layers, vocab_size=asked.vocab or config.vocab_size)
    dist.init_process_group("fake", rank=0, world_size=asked.cp, store=FakeStore())
    name, terms = planned(config, asked.cp, tokens)
    wanted = sum(terms.values())
    print(
        f"{asked.layers} layers, {tokens:,} tokens, cp {asked.cp}; plan: {wanted / GIB:.2f} GiB in {name}:", flush=True
    )
    for term, size in sorted(terms.items(), key=lambda item: -item[1]):
        print(f"  {size / GIB:7.2f}  {term}")
    found = measured(config, asked.cp, tokens, asked.passes, device)
    peak, reserved = found["peak_bytes"], found["reserved_bytes"]
    print(f"measured {peak / GIB:.2f} GiB, {peak / wanted:.3f} of the plan; reserved {reserved / GIB:.2f} GiB: {found}")
    if asked.out is not None:
        asked.out.write_text(json.dumps({**vars(asked), "out": "", "plan": terms, "moment": name, **found}) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
