"""A DeepSpeed engine over two processes of gloo, without Ray."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PRELUDE = """
import math
import sys
from functools import partial
from pathlib import Path
import deepspeed.ops
import torch
import torch.distributed as dist
from elastic_ring.cli.settings import parse
from elastic_ring.cli.train import build
from elastic_ring.data.source import open_source
from elastic_ring.integrations.ray_train import Zero3Config
from elastic_ring.integrations.ray_train.engine import Zero3Engine
from elastic_ring.integrations.ray_train.rings import DatasetRows, Rings
from elastic_ring.integrations.ray_train.settings import deepspeed_config
from elastic_ring.mesh import Mesh
from elastic_ring.train.startup.check import ModelRefused
from tests.unit.train.test_check import blind_loss

dist.init_process_group("gloo")
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
SIZES = ["--model.num-layers=2", "--model.width=36", "--model.num-heads=2", "--model.num-kv-heads=2",
         "--model.head-dim=18", "--model.ffn-width=63", "--context=64", "--global-batch=2", "--optim.clip-norm=1e9"]

def made(task, mesh, zero=Zero3Config()):
    config = deepspeed_config(zero, task.step, task.optim, mesh, swap_folder=Path("unused"), universal=False,
                              largest_elements=1, pin_memory=False)
    return Zero3Engine(task, config, fill=True)
"""
MASTERS = """
task = build(parse([*SIZES, "--step.param-dtype=bfloat16"])).task
engine = made(task, Mesh(1, 2))
num_rounded = 0
for name, value in engine.whole_weights():
    expected = task.initial.tensor(name, tuple(value.shape))
    assert torch.equal(value, expected), name
    num_rounded += not torch.equal(expected, expected.bfloat16().float())
assert num_rounded > 10, "values that bfloat16 holds would prove nothing"
assert all(param.dtype == torch.bfloat16 for param in engine.module.parameters())
"""
SKIPS = """
def step(engine, rings, factor=1.0, **asked):
    for number in (1, 2):
        sample = DatasetRows(64, 257).read(number)
        piece = slice_sample(sample, rings.layout, rings.coordinate.cp_rank, sample_id=number, index_in_batch=number)
        loss, _ = task.loss(engine.module, rings.batch(piece, 0))
        engine.backward(loss * factor)
        if number == 1:
            engine.step(1e-2)
    norm = engine.gradient_norm()
    engine.step(1e-2, **asked)
    return norm

def weights(engine):
    return dict(engine.whole_weights())

def same(first, second):
    return all(torch.equal(first[name], second[name]) for name in first)

from elastic_ring.data.loader import slice_sample
task = build(parse(SIZES)).task
rings = Rings(task, Mesh(1, 2), torch.device("cpu"))
for offload in ("none", "cpu"):
    zero = Zero3Config(offload_optimizer=offload)
    engine, other = made(task, rings.mesh, zero), made(task, rings.mesh, zero)
    first, before = step(engine, rings), weights(engine)
    assert 0 < first < math.inf
    for factor in (math.nan, math.inf, 1.0):  # a step that is finite is skipped for a spike, or for its loss
        assert math.isfinite(step(engine, rings, factor, skip=True)) == (factor == 1.0)
        assert same(before, weights(engine)), (offload, factor)
    second = step(engine, rings)
    step(other, rings)
    assert step(other, rings) == second and same(weights(engine), weights(other)), "a skipped step has left something"
    clipped = step(engine, rings, clip_share=1e-9)
    assert not same(weights(engine), weights(other))
"""
CHECKS = """
from dataclasses import replace
for loss, is_right in ((task.loss, True), (blind_loss, False)):
    rings = Rings(replace(task, loss=loss), Mesh(1, 2), torch.device("cpu"))
    engine = made(task, rings.mesh)
    before = weights(engine)
    try:
        rings.check(engine, open_source(task.data))
        assert is_right
    except ModelRefused as error:
        assert not is_right and "it must attend through batch.attention" in str(error), error
    assert same(before, weights(engine))
    if is_right:
        other = made(task, rings.mesh)
        assert step(engine, rings) == step(other, rings) and same(weights(engine), weights(other))
"""
LOADS = """
import os
import shutil
from elastic_ring.errors import CheckpointDamaged
from elastic_ring.integrations.ray_train.engine import check_names, data_only

class Planted:
    def __reduce__(self):
        return os.mkdir, ("ran",)

for dtype in ("float32", "bfloat16"):
    task = build(parse([*SIZES, f"--step.param-dtype={dtype}"])).task
    rings = Rings(task, Mesh(1, 2), torch.device("cpu"))
    engine, whole = made(task, rings.mesh), Path(dtype)
    whole.mkdir(exist_ok=True)
    step(engine, rings)
    engine.save(whole)
    dist.barrier()
    before = weights(engine)
    step(engine, rings)
    engine.load(whole, 2)
    assert same(before, weights(engine))
for kind in ("model_states", "optim_states"):
    (found,) = (whole / "zero3").glob(f"*_pp_rank_{dist.get_rank()}_*{kind}.pt")
    shutil.copy(found, f"{found}.whole")
    torch.save({**torch.load(found, weights_only=False), "stranger": Planted()}, found)
    dist.barrier()
    try:
        engine.load(whole, 2)
        raise AssertionError("a stranger's file was loaded")
    except CheckpointDamaged as error:
        assert "mkdir" in str(error), error
    shutil.move(f"{found}.whole", found)
    assert not Path("ran").exists(), "its code ran"
dist.barrier()
module = engine._engine.module
names = {name for name, _ in module.named_parameters()} | set(module.state_dict())
strange = {"/etc/stranger": torch.Size([1])}
model, optim = (next((whole / "zero3").glob(f"*_pp_rank_0_*{kind}.pt")) for kind in ("model_states", "optim_states"))
in_optim = torch.load(optim, weights_only=False)["optimizer_state_dict"]
of_stage_1 = {"optimizer_state_dict": {**in_optim, "zero_stage": 1}}
without_stage = {"optimizer_state_dict": {key: value for key, value in in_optim.items() if key != "zero_stage"}}
cases = [
    (model, model.name, {"param_shapes": [strange]}),
    (model, model.name, {"ds_autoep_layers": [{}]}),
    (model, model.name, {"param_shapes": 1}),
    (model, model.name, {"module": strange}),
    (optim, optim.name, of_stage_1),
    (optim, optim.name, without_stage),
    (optim, optim.name, {"optimizer_state_dict": []}),
    (optim, "zero_pp_rank_7_mp_rank_00_optim_states.pt", of_stage_1),  # beside right ones
    (model, "mp_rank_00_model_states.pt", {}),
    (model, "layer_0_expert_0_mp_rank_00_model_states.pt", {}),
    (model, "zero_pp_rank_0_mp_rank_01_model_states.pt", {}),
]
for number, (path, name, odd) in enumerate(cases):
    other = Path(f"names-{dist.get_rank()}-{number}")
    shutil.copytree(whole / "zero3", other)
    with data_only(whole):
        check_names(other, names)
    torch.save({**torch.load(path, weights_only=False), **odd}, other / name)
    with data_only(whole):
        try:
            check_names(other, names)
            raise AssertionError(f"names of a stranger become paths: {name}, {list(odd)}")
        except CheckpointDamaged as error:
            assert name in str(error), error
dist.barrier()
ours = next((whole / "zero3").glob(f"*_pp_rank_{dist.get_rank()}_*optim_states.pt"))
state = torch.load(ours, weights_only=False)
torch.save({"optimizer_state_dict": {**state["optimizer_state_dict"], "zero_stage": 1}}, ours)
for num_saved in (2, 3):  # as it is, and by DeepSpeed's conversion
    dist.barrier()
    try:
        engine.load(whole, num_saved)
        raise AssertionError("a checkpoint of stage 1 was loaded")
    except CheckpointDamaged as error:
        assert "stage 3" in str(error), error
print("passed", dist.get_rank())
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
def test_an_engine_begins_skips_and_checks_as_the_elastic_ring_does(tmp_path: Path) -> None:
    """Masters of bfloat16 parameters have the elastic ring's values; a skipped step leaves nothing, in memory and
    offloaded; a model that attends to its own slice only is refused, and the check of a right one leaves nothing. A
    checkpoint comes back; of a stranger's nothing runs, and its names become no paths."""
    (tmp_path / "engines.py").write_text(PRELUDE + MASTERS + SKIPS + CHECKS + LOADS)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", tmp_path / "engines.py"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("passed") == 2
