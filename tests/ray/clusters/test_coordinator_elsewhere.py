"""A coordinator comes back where its local records are not, as on another node: an object store has them."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import psutil
import pytest
import ray

from elastic_ring import CheckpointConfig
from elastic_ring.data.source import PreparedTokens
from elastic_ring.runtime.driver.cluster import NAMESPACE, actor_name, left_behind
from tests.object_store.store import ObjectStore
from tests.ray.conftest import ALONE, bits, join, num_steps, tiny_trainer, wait_for
from tests.ray.fork_server import ForkServer
from tests.unit.data.corpora import prepared, texts, write_jsonl

STEPS = 10


@pytest.fixture
def ray_with_credentials(
    fork_server: ForkServer, object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Processes of a Ray that started before would not have them."""
    object_store.enter(monkeypatch)
    ray.shutdown()
    with fork_server.forking():
        join(num_cpus=8)
    yield
    ray.shutdown()


@pytest.mark.slow
def test_a_coordinator_that_starts_without_its_local_records_goes_on_from_the_store_and_loses_no_bit(
    ray_with_credentials, object_store, tmp_path
):
    mesh = {"dp": 2, "cp": 1, "spares": 1, "steps": STEPS}
    calm = tiny_trainer(tmp_path, "calm", **{**mesh, "spares": 0}).fit().summary
    gate = tmp_path / "gate"
    moved = tiny_trainer(
        tmp_path,
        "moved",
        **mesh,
        gate=gate,
        gate_s=1.0,
        faults="kill@step=7,phase=backward,rank=1",
        run={
            "run_dir": f"s3://{object_store.new_bucket()}/runs/moved",
            "checkpoint_config": CheckpointConfig(every_steps=3),
        },
    )
    folder = moved.run_config.folder
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(moved.fit)
        wait_for(lambda: num_steps(folder) > 2)
        coordinator = ray.get_actor(actor_name("moved", "coordinator"), namespace=NAMESPACE)
        process = psutil.Process(ray.get(coordinator.identity.remote()).pid)
        process.suspend()
        shutil.rmtree(folder)
        process.kill()
        gate.touch()
        summary = done.result().summary
    assert left_behind("moved") == []
    assert bits(summary) == bits(calm)
    causes = [recovery["cause"] for recovery in summary["recoveries"]]
    assert any("the coordinator died" in cause for cause in causes), causes
    assert {recovery["steps_undone"] for recovery in summary["recoveries"]} == {0}
    assert [one["step"] for one in summary["checkpoints"]][-1] == 9


@pytest.mark.slow
def test_a_run_that_moves_to_another_folder_and_to_an_object_store_ends_with_the_bits_of_one_that_stayed(
    ray_with_credentials, object_store, tmp_path, caplog
):
    """Its data and its own folder move together, between two submissions."""
    caplog.set_level(logging.INFO)
    a, b, bucket = tmp_path / "a", tmp_path / "b", object_store.new_bucket()
    prepared(a / "tokens", write_jsonl(tmp_path / "input.jsonl", texts(200)))

    def summary(where: str, steps: int, name: str = "mover") -> dict[str, Any]:
        data = PreparedTokens.of(f"{where}/tokens/manifest.json", 96)
        every_4 = {"run_dir": f"{where}/{name}", "checkpoint_config": CheckpointConfig(every_steps=4)}
        trainer = tiny_trainer(tmp_path, name, **ALONE, steps=12, data=data, run=every_4)
        trainer.task = replace(trainer.task, step=replace(trainer.task.step, steps=steps))  # of the same schedule
        return dict(trainer.fit().summary)

    stayed = summary(str(a), 12, "stayed")
    summary(str(a), 4)
    a.rename(b)
    summary(str(b), 8)
    for path in (path for path in b.rglob("*") if path.is_file()):
        object_store.client().put_object(Bucket=bucket, Key=str(path.relative_to(b)), Body=path.read_bytes())
    shutil.rmtree(b)
    moved = summary(f"s3://{bucket}", 12)
    assert bits(moved) == bits(stayed)
    assert [one["step"] for one in moved["resumed_from"]] == [4, 8]
    told = [line for line in caplog.messages if "goes on with the same contents elsewhere: data was at" in line]
    assert len(told) == 2
