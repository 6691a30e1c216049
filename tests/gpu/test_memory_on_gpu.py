"""The twin of `tests/ray/operate/test_memory.py` on a GPU: a ballast tensor takes memory in the middle of a run.

How much room a step needs with each relief depends on torch and on the kernels. So the room shrinks from run to run
until the last relief, `offload`, has been in force in a run that ended; every run that ends has the calm one's bits.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import runs
from benchmarks.harness.gpu_runs import TIMEOUTS, QuickInitial, RandomTokens
from elastic_ring import ElasticRingTrainer, OptimConfig, RunConfig, ScalingConfig, StepConfig
from elastic_ring.errors import OutOfMemory
from elastic_ring.model.config import preset
from elastic_ring.model.loss import language_model_loss
from elastic_ring.model.transformer import Transformer

CONTEXT, STEPS = 16384, 9
MODEL = replace(preset("100m"), checkpoint_activations=False)
MIB = 1 << 20
ROOMS_MIB = (4096, 2048, *range(1280, 0, -256))
BALLAST_AT_CALL = 7
"""By then steps are committed and the optimizer has its state; a worker that starts passes through the loss, too."""


@dataclass
class BallastLoss:
    """The usual loss. In one call, a tensor takes all of the GPU's free memory but `room_bytes`, for good."""

    room_bytes: int = 0
    num_calls: int = 0
    ballast: list[torch.Tensor] = field(default_factory=list)

    def __call__(self, model: Any, batch: Any) -> tuple[Any, int]:
        self.num_calls += 1
        if self.room_bytes and self.num_calls == BALLAST_AT_CALL:
            device = batch.tokens.device
            torch.cuda.empty_cache()
            free_bytes, _ = torch.cuda.mem_get_info(device)
            self.ballast.append(torch.empty(free_bytes - self.room_bytes, dtype=torch.uint8, device=device))
        return language_model_loss(model, batch)


def trained(folder: Path, room_bytes: int) -> dict[str, Any] | None:
    """The summary; None where the run ended for want of memory."""
    name = f"room-{room_bytes // MIB}"
    trainer = ElasticRingTrainer(
        partial(Transformer, MODEL),
        RandomTokens(CONTEXT, MODEL.vocab_size),
        loss=BallastLoss(room_bytes),
        initial=QuickInitial(MODEL.num_layers),
        step_config=StepConfig(
            steps=STEPS, global_batch=1, context_tokens=CONTEXT, param_dtype="bfloat16", check_model=False
        ),
        optim_config=OptimConfig(peak_lr=3e-4, min_lr=3e-5, warmup_steps=2, total_steps=STEPS),
        scaling_config=ScalingConfig(dp=1, cp=1, spares=0, device="cuda", resources_per_worker={"CPU": 1.0}),
        run_config=RunConfig(name, run_dir=str(folder / name), progress=False, timeouts=TIMEOUTS),
    )
    try:
        return trainer.fit().summary
    except OutOfMemory:
        return None


def test_a_ballast_on_the_gpu_costs_no_bit_while_a_relief_is_left(tmp_path):
    seen = set[str]()
    with runs.local_ray(num_cpus=4):
        calm = trained(tmp_path, 0)
        assert calm is not None
        for room_mib in ROOMS_MIB:
            summary = trained(tmp_path, room_mib * MIB)
            reliefs = summary["memory"][-1]["reliefs"] if summary and summary["memory"] else []
            print(
                f"room {room_mib} MiB: {'ended' if summary else 'OutOfMemory'}, reliefs {', '.join(reliefs) or 'none'}"
            )
            if summary is None:
                break
            assert (summary["losses"], summary["weights_sha256"]) == (calm["losses"], calm["weights_sha256"])
            assert summary["lost_workers"] == {}
            assert all(one["survivor_pids_kept"] and one["steps_undone"] == 0 for one in summary["recoveries"])
            seen.update(reliefs)
            if "offload" in reliefs:
                break
    assert seen >= {"caches", "recompute", "offload"}
