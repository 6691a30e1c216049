"""torchtitan's Llama 3 under torchtitan's own trainer, which an ordinary step is compared with.

By its `JobConfig`: each block compiled, and the loss; FSDP2, on one GPU autocast; fused AdamW; SDPA with cuDNN first.
Ours are the sizes and the batches, which lie in the host's memory, as its trainer takes them: a step copies 128 KiB.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.harness.gpu_profile import profiled
from benchmarks.harness.gpu_runs import HF_LLAMA, RandomTokens
from benchmarks.peers.plain_llama import NUM_BATCHES, timed

RELEASE = "0.2.2"
"""The newest that runs with torch 2.11: 0.3.0 imports `DataParallelMeshDims`, which that lacks."""


@dataclass(frozen=True)
class TitanRun:
    """`checkpoint`: recompute each block, torchtitan's mode "full"; else its mode "none"."""

    context: int = 8192
    checkpoint: bool = True
    num_ranks: int = 1
    steps: int = 8
    profile: bool = False


def check_release() -> None:
    way_out = f"pip install '.[bench]', or torchtitan=={RELEASE}, torchdata, datasets and tyro"
    try:
        found = version("torchtitan")
    except PackageNotFoundError:
        raise ModuleNotFoundError(f"rows `titan` need torchtitan {RELEASE}: {way_out}") from None
    if found != RELEASE:
        raise ValueError(f"rows `titan` drive torchtitan {RELEASE}, not {found}: {way_out}")


def batches(run: TitanRun, rank: int) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
    """Without end; drawn before the first is taken."""
    source = RandomTokens(run.context, HF_LLAMA["vocab_size"])
    drawn = [source.read(index * run.num_ranks + rank).tokens[None] for index in range(NUM_BATCHES)]
    pairs = [(torch.from_numpy(x[:, :-1].copy()), torch.from_numpy(x[:, 1:].copy())) for x in drawn]
    return (({"input": tokens}, labels) for tokens, labels in itertools.cycle(pairs))


def build(run: TitanRun, rank: int, folder: str, losses: list[Tensor]) -> Any:
    """A trainer whose `losses` are sums over a rank's tokens."""
    from torchtitan.components.loss import build_cross_entropy_loss
    from torchtitan.config import JobConfig
    from torchtitan.models.llama3 import TransformerModelArgs, get_train_spec
    from torchtitan.protocols.train_spec import register_train_spec
    from torchtitan.train import Trainer

    def kept_loss(config: Any, **given: Any) -> Callable[[Tensor, Tensor], Tensor]:
        compute = build_cross_entropy_loss(config, **given)

        def loss(predicted: Tensor, labels: Tensor) -> Tensor:
            found = compute(predicted, labels)
            losses.append(found.detach())
            return found

        return loss

    spec = get_train_spec()
    spec.model_args = {
        "measured": TransformerModelArgs(
            dim=HF_LLAMA["hidden_size"],
            n_layers=HF_LLAMA["num_hidden_layers"],
            n_heads=HF_LLAMA["num_attention_heads"],
            n_kv_heads=HF_LLAMA["num_key_value_heads"],
            vocab_size=HF_LLAMA["vocab_size"],
            multiple_of=HF_LLAMA["intermediate_size"],  # the ffn's width is the next multiple above 8/3 `dim`
        )
    }
    spec.build_tokenizer_fn = spec.state_dict_adapter = None
    spec.build_dataloader_fn = lambda **given: batches(run, rank)
    spec.build_loss_fn = kept_loss
    register_train_spec("measured", spec)
    config = JobConfig()
    config.job.dump_folder = folder
    config.model.name = config.model.flavor = "measured"
    config.training.local_batch_size, config.training.seq_len = 1, run.context
    config.compile.enable = True
    config.activation_checkpoint.mode = "full" if run.checkpoint else "none"
    config.metrics.log_freq = 10**9  # of the timed steps none
    return Trainer(config)


def measure(run: TitanRun, rank: int, port: int) -> dict[str, Any]:
    check_release()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(run.num_ranks))
    losses: list[Tensor] = []
    with TemporaryDirectory() as folder:
        trainer = build(run, rank, folder, losses)
        given = trainer.batch_generator(trainer.dataloader)

        def step(index: int) -> None:
            del losses[:]
            trainer.step += 1
            trainer.gc_handler.run(trainer.step)
            trainer.train_step(given)

        row = timed(step, run.steps)
        row |= {
            "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1),
            "loss": float(losses[-1]) / run.context,
        }
        if run.profile:
            found = profiled(lambda: step(0))
            row |= {"profile": found} if rank == 0 else {}
        dist.destroy_process_group()
    return row
