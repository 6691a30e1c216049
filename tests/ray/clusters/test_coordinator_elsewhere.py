"""A coordinator comes back where its local records are not, as on another node: an object store has them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import ray

from elastic_ring import CheckpointConfig
from elastic_ring.runtime.driver.cluster import NAMESPACE, actor_name, left_behind
from tests.object_store.store import ObjectStore
from tests.ray.conftest import tiny_trainer, wait_for

STEPS = 10
SAME = ("losses", "weights_sha256", "samples_sha256")


@pytest.fixture
def ray_with_credentials(object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Processes of a Ray that started before would not have them."""
    for name, value in object_store.environment.items():
        monkeypatch.setenv(name, value)
    ray.shutdown()
    ray.init(address="local", num_cpus=8, namespace=NAMESPACE, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.mark.slow
def test_a_coordinator_that_starts_without_its_local_records_goes_on_from_the_store_and_loses_no_bit(
    ray_with_credentials: None, object_store: ObjectStore, tmp_path: Path
) -> None:
    mesh = {"dp": 2, "cp": 1, "spares": 1, "steps": STEPS}
    calm = tiny_trainer(tmp_path, "calm", **{**mesh, "spares": 0}).fit().summary
    gate = tmp_path / "gate"
    moved = tiny_trainer(
        tmp_path, "moved", **mesh, gate=gate, gate_s=1.0, faults="kill@step=7,phase=backward,rank=1",
        run={"run_dir": f"s3://{object_store.new_bucket()}/runs/moved",
             "checkpoint_config": CheckpointConfig(every_steps=3)},
    )  # fmt: skip
    folder = moved.run_config.folder
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(moved.fit)
        path = folder / "metrics.jsonl"
        wait_for(lambda: path.exists() and path.read_bytes().count(b"loss_hex") > 2)
        coordinator = ray.get_actor(actor_name("moved", "coordinator"), namespace=NAMESPACE)
        process = psutil.Process(ray.get(coordinator.identity.remote())["pid"])
        process.suspend()
        shutil.rmtree(folder)
        process.kill()
        gate.touch()
        summary = done.result().summary
    assert left_behind("moved") == []
    assert {key: summary[key] for key in SAME} == {key: calm[key] for key in SAME}
    causes = [recovery["cause"] for recovery in summary["recoveries"]]
    assert any("the coordinator died" in cause for cause in causes), causes
    assert {recovery["steps_undone"] for recovery in summary["recoveries"]} == {0}
    assert [one["step"] for one in summary["checkpoints"]][-1] == 9
