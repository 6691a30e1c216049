"""A lack of memory on real processes: survived with the same bits, and told by its name."""

from __future__ import annotations

import ctypes
import resource
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from elastic_ring import ElasticRingTrainer, OptimConfig, RunConfig, ScalingConfig, StepConfig
from elastic_ring.data.source import StdlibText
from elastic_ring.model.config import ModelConfig
from elastic_ring.model.init import Initialiser
from elastic_ring.model.loss import language_model_loss
from elastic_ring.model.transformer import Transformer
from tests.ray.conftest import check_records

# Each of two ranks keeps about 12 MiB a layer where it recomputes nothing.
WIDE = ModelConfig(257, 12, 64, 4, 2, 16, 2048, checkpoint_activations=False)
CONTEXT, STEPS = 1024, 5
ROOM_BYTES = 80 << 20
M_MMAP_THRESHOLD = -3


@dataclass
class LimitedLoss:
    """The usual loss. From the third step on one process, the first that makes the file `claim`, may have no more
    than ROOM_BYTES beyond what it has then."""

    claim: str = ""
    num_calls: int = 0

    def __call__(self, model: Any, batch: Any) -> tuple[Any, int]:
        self.num_calls += 1
        if self.num_calls == 1:  # what is freed goes back at once, so that the limit counts what is used
            ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)
        if self.claim and self.num_calls == 3:
            self._limit()
        return language_model_loss(model, batch)

    def _limit(self) -> None:
        try:
            Path(self.claim).touch(exist_ok=False)
        except FileExistsError:
            return
        status = Path("/proc/self/status").read_text()
        (data_kib,) = (int(line.split()[1]) for line in status.splitlines() if line.startswith("VmData:"))
        resource.setrlimit(resource.RLIMIT_DATA, ((data_kib << 10) + ROOM_BYTES, resource.RLIM_INFINITY))


def trained(folder: Path, name: str, loss: LimitedLoss) -> dict[str, Any]:
    trainer = ElasticRingTrainer(
        partial(Transformer, WIDE), StdlibText(CONTEXT), loss=loss, initial=Initialiser(0, WIDE.num_layers),
        step_config=StepConfig(steps=STEPS, global_batch=1, context_tokens=CONTEXT, check_model=False),
        optim_config=OptimConfig(peak_lr=1e-2, min_lr=1e-3, warmup_steps=1, total_steps=STEPS),
        scaling_config=ScalingConfig(dp=1, cp=2, spares=0),
        run_config=RunConfig(name=name, run_dir=str(folder / name), progress=False),
    )  # fmt: skip
    result = trainer.fit()
    check_records(trainer, result)
    return result.summary


@pytest.mark.slow
def test_a_step_that_runs_out_of_memory_runs_again_with_less_and_changes_no_bit(
    local_ray: None, tmp_path: Path
) -> None:
    calm = trained(tmp_path, "roomy", LimitedLoss())
    claim = tmp_path / "claim"
    summary = trained(tmp_path, "tight", LimitedLoss(str(claim)))
    assert claim.exists()
    assert (summary["losses"], summary["weights_sha256"]) == (calm["losses"], calm["weights_sha256"])
    assert (calm["memory"], calm["recoveries"]) == ([], [])
    assert [change["rungs"] for change in summary["memory"]] == [["caches"], ["caches", "recompute"]]
    assert {change["step"] for change in summary["memory"]} == {2}
    assert all("you tried to allocate" in change["why"] for change in summary["memory"])
    recoveries = summary["recoveries"]
    assert all("ran out of memory in step 2" in recovery["cause"] for recovery in recoveries)
    assert all(recovery["survivor_pids_kept"] and recovery["steps_undone"] == 0 for recovery in recoveries)
    assert summary["lost_workers"] == {}
    assert summary["exact"]
