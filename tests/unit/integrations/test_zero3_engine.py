"""A DeepSpeed engine over two processes of gloo, without Ray."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
MASTERS = """
import sys
from pathlib import Path
import torch
import torch.distributed as dist
from elastic_ring.cli.settings import parse
from elastic_ring.cli.train import build
from elastic_ring.integrations.ray_train import Zero3Config, ops
from elastic_ring.integrations.ray_train.engine import Zero3Engine, largest_parameter
from elastic_ring.integrations.ray_train.settings import deepspeed_config
from elastic_ring.mesh import Mesh

dist.init_process_group("gloo")
ops.without_shared_memory()
task = build(parse(["--model.num-layers=2", "--model.width=36", "--model.num-heads=2", "--model.num-kv-heads=2",
                    "--model.head-dim=18", "--model.ffn-width=63", "--context=64", "--step.param-dtype=bfloat16"])).task
config = deepspeed_config(Zero3Config(), task.step, task.optim, Mesh(1, 2), swap_folder=Path("unused"), universal=False,
                          largest_elements=largest_parameter(task), pin_memory=False)
engine = Zero3Engine(task, config, fill=True)
num_rounded = 0
for name, value in engine.whole_weights():
    expected = task.initial.tensor(name, tuple(value.shape))
    assert torch.equal(value, expected), name
    num_rounded += not torch.equal(expected, expected.bfloat16().float())
assert num_rounded > 10, "values that bfloat16 holds would prove nothing"
assert all(param.dtype == torch.bfloat16 for param in engine.module.parameters())
print("equal", dist.get_rank())
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
def test_masters_of_bfloat16_parameters_begin_with_the_values_that_the_elastic_rings_have(tmp_path: Path) -> None:
    (tmp_path / "masters.py").write_text(MASTERS)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", tmp_path / "masters.py"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("equal") == 2
