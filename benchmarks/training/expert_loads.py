"""How evenly experts are loaded: `moe-laptop` trains; each layer's largest load, as a multiple of a fair one.

    python benchmarks/training/expert_loads.py                200 steps of 8 x 1,024 tokens, one process

Loads are those of the training sequences themselves, in the order in which a run takes them, summed over the last
`--over` of them: single files differ.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

if __name__ == "__main__":  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness import results
from benchmarks.harness.arguments import at_least_one, bench_parser
from elastic_ring.config import OptimConfig
from elastic_ring.data.sampling.order import Order
from elastic_ring.data.source import StdlibText
from elastic_ring.model.config import preset
from elastic_ring.model.feed_forward import MoE
from elastic_ring.model.init import Initialiser, initialise_module
from elastic_ring.model.transformer import Transformer
from elastic_ring.train.optim import is_balance, learning_rate, make_optimizer

CONTEXT, BATCH = 1024, 8


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def keep_load(seen: list[Tensor], layer: MoE, given: tuple[Tensor, ...], result: Tensor) -> None:
    with torch.no_grad():
        seen.append(layer.choose(given[0].flatten(0, 1))[0].load)


def trained_loads(steps: int) -> list[list[Tensor]]:
    """Of each layer, the loads (E,) of every training sequence in turn."""
    config = replace(preset("moe-laptop"), checkpoint_activations=False)
    model, loads = Transformer(config), list[list[Tensor]]()
    initialise_module(model, Initialiser(0, config.num_layers))
    for layer in (module for module in model.modules() if isinstance(module, MoE)):
        loads.append([])
        layer.register_forward_hook(partial(keep_load, loads[-1]))
    named: list[tuple[str, Tensor]] = list(model.named_parameters())
    rates = OptimConfig(peak_lr=3e-3, min_lr=3e-4, warmup_steps=min(10, steps), total_steps=steps)
    optimizer = make_optimizer(named, rates, {name: param.dim() for name, param in named})
    source, positions = StdlibText(CONTEXT).open(), torch.arange(CONTEXT)[None]
    order = Order(0, BATCH, source.num_sequences)
    for step in range(steps):
        optimizer.zero_grad()
        for number in order.sample_ids(step):
            tokens = torch.from_numpy(source.read(number).tokens.astype("int64"))[None]
            loss, _ = model(
                tokens[:, :-1],
                positions=positions,
                document_ids=positions.int(),
                attention=attend,
                targets=tokens[:, 1:],
            )
            (loss / (BATCH * CONTEXT)).backward()
        torch.nn.utils.clip_grad_norm_([param for name, param in named if not is_balance(name)], 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, rates) * group.get("lr_scale", 1.0)
        optimizer.step()
    return loads


def largest(loads: list[Tensor]) -> float:
    whole = torch.stack(loads).sum(0).float()
    return round(float(whole.max() / whole.mean()), 3)


def main(arguments: list[str] | None = None) -> int:
    parser: argparse.ArgumentParser = bench_parser(__doc__)
    parser.add_argument("--steps", type=at_least_one, default=200)
    parser.add_argument("--over", type=at_least_one, nargs="+", default=[80, 320], help="sequences at the end")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    loads = trained_loads(options.steps)
    rows: list[list[object]] = [["first step", *(largest(layer[:BATCH]) for layer in loads)]]
    rows += [[f"last {over} sequences", *(largest(layer[-over:]) for layer in loads)] for over in options.over]
    results.show(results.table(("largest load of", *(f"layer {index}" for index in range(len(loads)))), rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
