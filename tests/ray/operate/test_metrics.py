"""A running run's metrics at the endpoint that Prometheus reads: each of the table, and no other."""

from __future__ import annotations

import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import ray
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.parser import text_string_to_metric_families

from deploy.monitoring.make_dashboard import OF_RAY
from elastic_ring.config import CheckpointConfig
from elastic_ring.runtime.coordinator.folds.metrics_table import PREFIX, TABLE
from tests.ray.conftest import ALONE, tiny_trainer, wait_for

NAME = "measured"
NOT_HERE = {  # of GPUs, or of models of experts
    "elastic_ring_expert_load_ratio",
    "elastic_ring_hop_latency_seconds",
    "elastic_ring_mfu_ratio",
    *(m.name for m in TABLE if m.name.startswith(("elastic_ring_gpu_", "elastic_ring_network_infiniband_"))),
}
"""And of InfiniBand."""


def scrape() -> dict[str, Family]:
    """The metrics at the endpoint of this Ray's only node, by name."""
    (node,) = ray.nodes()
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    with urllib.request.urlopen(url, timeout=30.0) as answer:
        return {family.name: family for family in text_string_to_metric_families(answer.read().decode())}


def of_run(families: dict[str, Family]) -> dict[str, Family]:
    """Those of the run: what other tests' runs have left at the endpoint does not count."""
    return {
        name: family
        for name, family in families.items()
        if name.startswith(f"{PREFIX}elastic_ring") and any(s.labels.get("run") == NAME for s in family.samples)
    }


def value(family: Family, **labels: str) -> float:
    wanted = {"run": NAME, **labels}
    (found,) = {s.value for s in family.samples if wanted.items() <= s.labels.items()}
    return found


@pytest.mark.slow
def test_a_running_run_exports_every_metric_of_the_table_and_no_other(local_ray, tmp_path):
    gate = tmp_path / "gate"
    trainer = tiny_trainer(
        tmp_path,
        NAME,
        steps=100,
        faults="kill@step=2,phase=backward,rank=0",
        gate=gate,
        global_batch=2,
        **{**ALONE, "dp": 2},
    )
    trainer.run_config = replace(
        trainer.run_config, checkpoint_config=CheckpointConfig(every_steps=1), copies="1", copy_every_steps=1
    )
    trainer.task = replace(trainer.task, step=replace(trainer.task.step, val_every_steps=4))
    wanted = {metric.exported_name for metric in TABLE if metric.name not in NOT_HERE}
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(trainer.fit)
        try:
            wait_for(lambda: run.done() or set(of_run(scrape())) >= wanted)
            assert not run.done(), "the run ended before its metrics could be seen"
            families = scrape()
            found = of_run(families)
        finally:
            gate.touch()
        summary = run.result().summary
    assert set(found) == wanted
    for metric in TABLE:
        if metric.name in NOT_HERE:
            continue
        family = found[metric.exported_name]
        assert (family.type, family.documentation) == (metric.kind, metric.meaning)
        own = [sample for sample in family.samples if sample.labels["run"] == NAME]
        values = {sample.labels[metric.label] for sample in own if metric.values}
        assert values if isinstance(metric.values, str) else values == set(metric.values), metric.name
        assert not {"run", "cause", "part"} & set(own[0].labels) - set(metric.labels), metric.name
    assert value(found["ray_elastic_ring_recoveries"], cause="died") == 1
    assert value(found["ray_elastic_ring_lost_workers"], cause="died") == 1
    assert value(found["ray_elastic_ring_planned_steps"]) == 100
    assert value(found["ray_elastic_ring_recovery_sum_seconds"], part="total") == summary["recoveries"][0]["total_s"]
    assert abs(value(found["ray_elastic_ring_last_commit_timestamp_seconds"]) - time.time()) < 120.0
    assert {name for name in OF_RAY if "_gp" not in name and "_gram" not in name} <= set(families)
    wait_for(lambda: value(scrape()["ray_elastic_ring_phase"], part="ended") == 1.0)
    assert value(scrape()["ray_elastic_ring_failed"]) == 0.0
