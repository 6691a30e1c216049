"""Runs on GPUs through Ray: state that outlives its members, and experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from elastic_ring import CheckpointConfig, ElasticRingTrainer, OptimConfig, Result, RunConfig, ScalingConfig, StepConfig
from elastic_ring.config import Timeouts
from elastic_ring.data.source import StdlibText
from elastic_ring.experts import compute
from elastic_ring.experts.compute import Order, grouped_linear, product_kind
from elastic_ring.model.config import ModelConfig
from elastic_ring.model.init import Initialiser
from elastic_ring.model.transformer import Transformer
from elastic_ring.runtime.driver.cluster import left_behind
from tests.ray.conftest import bits, join

SMALL = ModelConfig(257, 2, 64, 4, 2, 16, 128)
STEPS, CONTEXT = 8, 256
# Kernels that are compiled hold a process's GIL for seconds at a first start.
PATIENT = Timeouts(heart_floor_s=15.0, heart_cap_s=25.0, build_s=300.0, start_s=300.0)


@pytest.fixture(autouse=True)
def own_ray() -> Iterator[None]:
    """A Ray with all GPUs of this host, and a CPU for each worker."""
    ray.shutdown()
    join(num_cpus=8)
    yield
    ray.shutdown()


def run(
    folder: Path,
    name: str,
    device: str,
    *,
    cp: int,
    spares: int = 0,
    model: ModelConfig = SMALL,
    experts: Any = "auto",
    **settings: Any,
) -> Result:
    """A run of a small decoder in bfloat16, which kernels of both kinds of device take."""
    computes: Any = {"param_dtype": "bfloat16", "check_model": False, "experts": experts}
    step = StepConfig(steps=STEPS, global_batch=2, context_tokens=CONTEXT, **computes)
    trainer = ElasticRingTrainer(
        partial(Transformer, model),
        StdlibText(CONTEXT),
        step_config=step,
        initial=Initialiser(0, SMALL.num_layers),
        optim_config=OptimConfig(peak_lr=1e-3, min_lr=1e-4, warmup_steps=2, total_steps=STEPS),
        scaling_config=ScalingConfig(dp=1, cp=cp, spares=spares, device=device, resources_per_worker={"CPU": 1.0}),  # type: ignore[arg-type]
        run_config=RunConfig(name, run_dir=str(folder / name), progress=False, timeouts=PATIENT, **settings),
    )
    result = trainer.fit()
    assert left_behind(name) == []
    return result


def one_ring_comes_back_from_a_copy(folder: Path, device: str) -> None:
    none = CheckpointConfig(every_steps=0)
    calm = run(folder, "calm", device, cp=2, checkpoint_config=none).summary
    copies = {"spares": 1, "copies": "1", "copy_every_steps": 1, "faults": "kill@step=4,phase=backward,rank=1"}
    killed = run(folder, "killed", device, cp=2, checkpoint_config=none, **copies).summary
    (recovery,) = killed["recoveries"]
    assert (recovery["source"], recovery["exact"]) == ("copy", True)
    assert recovery["steps_undone"] <= 2, "twice the steps between copies"
    assert bits(killed) == bits(calm)


def a_checkpoint_of_a_cpu_goes_on(folder: Path, device: str) -> None:
    every_4 = CheckpointConfig(every_steps=4, keep_last=9)
    source = run(folder, "source", "cpu", cp=2, checkpoint_config=every_4).summary
    path = next(one["path"] for one in source["checkpoints"] if one["step"] == 4)
    found = run(folder, "resumed", device, cp=1, resume=path).summary
    assert found["resumed_from"] == [{"step": 4, "path": path}]
    assert found["samples_sha256"] == source["samples_sha256"]
    assert found["losses"][:4] == source["losses"][:4]
    for here, there in zip(found["losses"][4:], source["losses"][4:], strict=True):
        assert float.fromhex(here) == pytest.approx(float.fromhex(there), rel=1e-2), "bfloat16 kernels of two kinds"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_one_ring_of_two_gpus_that_loses_a_rank_goes_on_from_the_copy_with_equal_bits(tmp_path):
    one_ring_comes_back_from_a_copy(tmp_path, "cuda")


def test_a_checkpoint_that_cpus_wrote_goes_on_on_a_gpu(tmp_path):
    a_checkpoint_of_a_cpu_goes_on(tmp_path, "cuda")


# ------------------------------------------------------------------------------------------------------------- experts


EXPERTS = replace(SMALL, num_experts=5, experts_per_token=2, expert_width=32, shared_width=32)


def test_a_grouped_product_and_its_gradients_repeat_a_hundred_times():
    torch.manual_seed(0)
    tokens = torch.randn(4096, 1024, dtype=torch.bfloat16, device="cuda")
    order = Order.of(torch.rand(4096, 64, device="cuda").topk(8).indices % 61, 64)  # the last three have no rows
    weight = torch.randn(64, 768, 1024, dtype=torch.bfloat16, device="cuda")
    assert product_kind(order.spread(tokens), weight) == "grouped"
    first = None
    for _ in range(100):
        leaves = [tokens.clone().requires_grad_(), weight.clone().requires_grad_()]
        out = order.gather(
            grouped_linear(order.spread(leaves[0]), leaves[1], order.ends), torch.rand(4096, 8, device="cuda") * 0 + 0.5
        )
        found = [out.detach(), *torch.autograd.grad(out.float().square().sum(), leaves)]
        first = first or found
        assert all(torch.equal(one, other) for one, other in zip(first, found, strict=True))
    assert first is not None
    rows = order.spread(tokens)
    torch.testing.assert_close(
        grouped_linear(rows, weight, order.ends), compute._loop(rows, weight, order.ends), rtol=2e-2, atol=0.5
    )
    assert not first[2][61:].any()


@pytest.mark.parametrize("cut", [1, 20, 47])
def test_products_of_some_experts_have_the_bits_that_they_have_among_all(cut):
    """As rows come in parts (`experts.exchange`)."""
    torch.manual_seed(0)
    order = Order.of(torch.rand(4096, 64, device="cuda").topk(8).indices % 61, 64)
    rows = torch.randn(order.rows.numel(), 1024, dtype=torch.bfloat16, device="cuda")
    weight = torch.randn(64, 768, 1024, dtype=torch.bfloat16, device="cuda")
    slope, end = torch.randn(rows.size(0), 768, dtype=torch.bfloat16, device="cuda"), int(order.ends[cut - 1])

    def computed(some: slice, experts: slice, ends: torch.Tensor) -> list[torch.Tensor]:
        leaves = [rows[some].clone().requires_grad_(), weight[experts].clone().requires_grad_()]
        out = grouped_linear(*leaves, ends)
        return [out.detach(), *torch.autograd.grad(out, leaves, slope[some])]

    first = computed(slice(0, end), slice(0, cut), order.ends[:cut])
    last = computed(slice(end, None), slice(cut, None), order.ends[cut:] - end)
    whole = computed(slice(None), slice(None), order.ends)
    for parts, expected in zip(zip(first, last, strict=True), whole, strict=True):
        assert torch.equal(torch.cat(parts), expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_ring_of_two_gpus_that_loses_a_rank_before_an_exchange_of_experts_changes_no_bit(tmp_path):
    settings: dict[str, Any] = {
        "model": EXPERTS,
        "experts": "send",
        "checkpoint_config": CheckpointConfig(every_steps=0),
    }
    calm = run(tmp_path, "calm", "cuda", cp=2, **settings).summary
    faults = "kill@step=3,phase=dispatch,hop=3,rank=1; kill@step=6,phase=combine,hop=1,rank=0"
    settings |= {"spares": 2, "copies": "1", "copy_every_steps": 1, "faults": faults}
    killed = run(tmp_path, "killed", "cuda", cp=2, **settings).summary
    assert len(killed["recoveries"]) == 2
    assert bits(killed) == bits(calm)
