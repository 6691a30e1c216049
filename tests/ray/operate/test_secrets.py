"""Values of `run.env` reach the workers before they import anything, and no log, no argument and no file for others."""

from __future__ import annotations

import json
import os
import sys

import pytest

from tests.ray.conftest import ROOT, ran

SECRET = "hunter2 $(id) 'quoted'\nline"
RUN = """
import json, os, sys
from functools import partial
from pathlib import Path

import ray

from elastic_ring import ElasticRingTrainer, OptimConfig, RunConfig, ScalingConfig, StepConfig
from elastic_ring.data.source import StdlibText
from elastic_ring.model.loss import language_model_loss
from elastic_ring.model.transformer import Transformer
from tests.ray.conftest import ALONE, TINY

FOLDER = Path(sys.argv[1])
SECRET = os.environ.pop("TESTS_SECRET")


def looking_loss(model, batch):
    needle = os.environ["A.TOKEN"][:7].encode()  # this text itself is an argument
    told = b" ".join(path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists())
    shared = [path for path in Path("/dev/shm").rglob("*") if path.is_file() and path.stat().st_mode & 0o077
              and path.stat().st_size < 1 << 20 and needle in path.read_bytes()]
    # `sys.flags` shows what was there when Python started.
    found = {"env": os.environ["A.TOKEN"], "argued": needle in told, "shared": len(shared),
             "at_once": sys.flags.dont_write_bytecode}
    (FOLDER / "found.json").write_text(json.dumps(found))
    return language_model_loss(model, batch)


ray.init(address="local", num_cpus=4, namespace="elastic_ring", include_dashboard=False, log_to_driver=False)
env = {"A.TOKEN": SECRET, "PYTHONDONTWRITEBYTECODE": "1"}
ElasticRingTrainer(
    partial(Transformer, TINY), StdlibText(96), step_config=StepConfig(steps=1, global_batch=1, context_tokens=96),
    optim_config=OptimConfig(warmup_steps=0, total_steps=1), loss=looking_loss, scaling_config=ScalingConfig(**ALONE),
    run_config=RunConfig("secrets", run_dir=str(FOLDER / "run"), env=env, progress=False),
).fit()
logs = Path(ray._private.worker._global_node.get_logs_dir_path())
left = [str(path) for folder in (logs, FOLDER) for path in folder.rglob("*")
        if path.is_file() and path.name != "found.json" and SECRET[:7].encode() in path.read_bytes()]
print(json.dumps({**json.loads((FOLDER / "found.json").read_text()), "left": left}))
"""


@pytest.mark.slow
def test_a_secret_variable_is_there_when_a_worker_starts_and_nobody_else_can_read_it(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TESTS_SECRET": SECRET}
    done = ran(sys.executable, "-c", RUN, str(tmp_path), env=environment)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {"env": SECRET, "argued": False, "shared": 0, "at_once": 1, "left": []}
    assert "hunter2" not in done.stderr
