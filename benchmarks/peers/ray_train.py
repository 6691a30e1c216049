"""Running a Ray Train job whose worker 3 of 4 is killed again and again: what both of Ray Train's recoveries share."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.peers import common


def train_with_kills(
    train_worker: Callable[[dict[str, Any]], None],
    name: str,
    num_kills: int,
    torch_config: Callable[[], Any],
    *,
    extra_cpus: int = 0,
    config: dict[str, Any] | None = None,
) -> list[dict[str, float]]:
    """Train on an embedded Ray with its defaults and kill a worker `num_kills` times; the phases of each recovery.

    `torch_config` is called once Ray's environment is set. Raises RuntimeError when the workers do not come back.
    """
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    kills: list[common.Kill] = []
    with tempfile.TemporaryDirectory(prefix=f"ray_train_{name}_") as folder:
        record = common.Record(Path(folder))
        num_cpus = common.NUM_WORKERS + extra_cpus
        ray.init("local", num_cpus=num_cpus, include_dashboard=False, log_to_driver=False)
        try:
            trainer = TorchTrainer(
                train_worker,
                train_loop_config={"folder": folder, **(config or {})},
                scaling_config=ScalingConfig(num_workers=common.NUM_WORKERS),
                torch_config=torch_config(),
                run_config=RunConfig(name=name, storage_path=folder, failure_config=FailureConfig(max_failures=-1)),
            )
            with common.killing(record, num_kills, kills):
                trainer.fit()
        finally:
            ray.shutdown()
        return common.timings(record, kills)
