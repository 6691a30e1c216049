"""The learning rate of runs on trained weights: a default, another run's, or the one on record. A setting wins."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from elastic_ring import ElasticRingTrainer, OptimConfig
from elastic_ring.cli import train
from elastic_ring.cli.settings import parse
from elastic_ring.monitor.metrics import write_json
from elastic_ring.train.optim import learning_rate

FLAGS = ["--preset", "laptop", "--context", "64", "--dp", "1", "--cp", "1"]


def rates(optim: OptimConfig) -> tuple[float, float, int]:
    return optim.peak_lr, optim.min_lr, optim.warmup_steps


def test_a_model_folder_takes_a_small_rate_and_a_run_on_record_keeps_the_one_that_it_began_with(tmp_path: Path) -> None:
    folder = [*FLAGS, "--model-folder", "llama", "--run-dir", str(tmp_path / "run"), "--steps"]
    asked = parse([*folder, "90"])
    assert rates(asked.optim) == (2e-5, 2e-6, 3)
    (tmp_path / "config.toml").write_text(asked.toml())
    from_file = parse(["--config", str(tmp_path / "config.toml"), "--steps", "1000"])
    assert rates(from_file.optim) == (2e-5, 2e-6, 30), "its length follows the steps"
    assert rates(parse([*folder, "200", "--lora", "r=4"]).optim) == (1e-4, 1e-5, 6)
    assert rates(parse([*folder, "90", "--optim.peak-lr", "1e-3"]).optim) == (1e-3, 1e-4, 3)
    assert rates(parse([*folder, "90", "--optim.min-lr=0", "--optim.warmup-steps=0"]).optim) == (2e-5, 0.0, 0)
    assert rates(parse([*FLAGS, "--steps", "90"]).optim) == (3e-3, 3e-4, 10), "a preset's model begins anew"
    before = {"peak_lr": 3e-3, "min_lr": 3e-4, "warmup_steps": 10, "total_steps": 90}
    (tmp_path / "run").mkdir()
    write_json(tmp_path / "run" / "config.json", {"step": {"steps": 90}, "optim": before})
    for more in (["90"], ["120", "--extend"]):
        asked = parse([*folder, *more])
        assert (rates(asked.optim), asked.optim.total_steps) == ((3e-3, 3e-4, 10), 90)
    elsewhere = [*folder[:-2], str(tmp_path / "next"), "--resume"]
    for path in (tmp_path / "run", tmp_path / "run" / "checkpoints" / "step-00000010" / "lineage-000"):
        assert rates(parse([*elsewhere, str(path)]).optim) == (3e-3, 3e-4, 10), "checkpoints share its identity"


def ended(run: Path, steps: int = 40, min_lr: float | None = None, **settings: Any) -> OptimConfig:
    """A run's folder as it is at its end after `steps` of 60."""
    asked = parse([*FLAGS, "--steps", "60", "--optim.peak-lr", "1e-3", "--run-dir", str(run)])
    task = train.build(asked).task
    optim = asked.optim if min_lr is None else dataclasses.replace(asked.optim, min_lr=min_lr)
    trainer = ElasticRingTrainer(
        task.model, task.data, step_config=task.step, optim_config=optim, run_config=asked.run, **settings
    )
    trainer._write_config()
    write_json(run / "summary.json", {"steps": steps})
    save_file(dict(trainer.task.model().state_dict()), run / "weights.safetensors", metadata={"sha256": ""})
    return optim


def usual_rate(step: int) -> float:
    return 0.5


def test_weights_of_another_run_go_on_at_its_rate_unless_that_is_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    optim = ended(tmp_path / "a")
    second = [*FLAGS, "--steps", "100", "--run-dir", str(tmp_path / "second"), "--from"]
    trainer = train.build(parse([*second, str(tmp_path / "a")]))
    at_end = learning_rate(40, optim)
    assert 1e-4 < at_end < 1e-3
    assert trainer.task.optim.peak_lr == at_end
    assert trainer.task.optim.min_lr == pytest.approx(at_end / 10)
    assert trainer.task.optim.warmup_steps == 3
    assert f"peak_lr = {at_end!r}" in trainer.config_files["config.toml"]
    assert f"(the rate of step 40 of {tmp_path / 'a'}; --optim.peak-lr sets another)" in caplog.text
    trainer._write_config()
    ended(tmp_path / "a", min_lr=0.0)
    again = train.build(parse([*second, str(tmp_path / "a")]))
    assert again.task.optim == trainer.task.optim, "its own record wins over what the other run says now"
    for name in ("of 0", "by a function", "without a record"):
        if name == "of 0":
            ended(tmp_path / name, steps=60, min_lr=0.0)
        else:
            ended(tmp_path / name, lr_schedule=usual_rate)
        if name == "without a record":
            (tmp_path / name / "config.json").unlink()
        third = [*FLAGS, "--steps", "100", "--run-dir", str(tmp_path / "third"), "--from", str(tmp_path / name)]
        assert rates(train.build(parse(third)).task.optim) == (2e-5, 2e-6, 3)
        assert train.build(parse([*third, "--optim.peak-lr", "5e-5"])).task.optim.peak_lr == 5e-5
