"""Durable checkpoints on real Ray: what no live holder covers comes from storage, bit for bit, on any mesh."""

from __future__ import annotations

import json
import os
import sys
import threading
from dataclasses import replace
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray.util import list_named_actors
from torch import nn

from elastic_ring import CheckpointConfig
from elastic_ring.config import Timeouts
from elastic_ring.data.source import PreparedTokens
from elastic_ring.errors import CoordinatorLost, RunFailed, StorageFailed
from elastic_ring.model.transformer import Transformer
from elastic_ring.monitor.metrics import read_metrics
from elastic_ring.runtime.driver.cluster import NAMESPACE, left_behind
from elastic_ring.state.checkpoints.stored_weights import RunWeights
from tests.object_store.store import ObjectStore
from tests.ray.conftest import ALONE, TINY, Heard, bits, fault_free, finished, num_steps, ran, tiny_trainer, wait_for
from tests.unit.coordinator.test_damage import FILES, flip

EVERY_3 = {"checkpoint_config": CheckpointConfig(every_steps=3)}


@pytest.mark.parametrize(
    ("copies", "source", "most_undone"),
    [
        pytest.param("0", "checkpoint", 4, marks=pytest.mark.soak),
        pytest.param("1", "copy", 2, marks=pytest.mark.slow),
        pytest.param("parity:2", "copy", 2, marks=pytest.mark.soak),
    ],
)
def test_both_holders_of_a_shard_lost_at_once_come_back_from_the_checkpoint_or_a_copy_with_equal_bits(
    local_ray, undisturbed, tmp_path, copies, source, most_undone
):
    reference = fault_free(undisturbed, tmp_path)
    settings = {**EVERY_3, "copies": copies, "copy_every_steps": 1}
    faults = "kill@step=7,phase=forward,rank=1; kill@step=7,phase=forward,rank=3"
    summary = run(tmp_path, "both-holders", spares=2, run=settings, faults=faults)
    (recovery,) = summary["recoveries"]
    assert recovery["source"] == source
    assert (source == "checkpoint") <= recovery["steps_undone"] <= most_undone
    assert bits(summary) == bits(reference)
    assert [one["step"] for one in summary["checkpoints"]][-1] in (9, 12)


@pytest.mark.slow
def test_one_rank_without_a_copy_that_dies_before_the_first_checkpoint_begins_again_with_equal_bits(
    local_ray, undisturbed, tmp_path
):
    reference = fault_free(undisturbed, tmp_path, dp=1, cp=1)
    mesh = {"dp": 1, "cp": 1, "spares": 1, "run": {"checkpoint_config": CheckpointConfig(every_steps=4000)}}
    summary = run(tmp_path, "again", faults="kill@step=7,phase=forward,rank=0", **mesh)
    (recovery,) = summary["recoveries"]
    assert (recovery["source"], recovery["exact"]) == ("beginning", True)
    assert 6 <= recovery["steps_undone"] <= 7
    assert bits(summary) == bits(reference)


@pytest.mark.slow
def test_a_finished_run_goes_on_twice_under_its_name_with_the_bits_of_one_that_was_as_long_at_once(local_ray, tmp_path):
    """First at its last rate, then with a warm-up and a decay of the further steps. The last step of the first is
    saved, since the checkpoint before was quick; the others have none to go by."""
    kept, anew = {"total_steps": 4}, {"total_steps": 8, "replanned": (4, 6)}
    whole = run(tmp_path, "whole", steps=8, **anew, **ALONE)
    saved = run(tmp_path, "longer", steps=4, **kept, **ALONE)["checkpoints"][-1]["step"]
    for steps, plan in ((6, kept), (8, anew)):
        longer = run(tmp_path, "longer", steps=steps, **plan, **ALONE)
        assert longer["steps"] == longer["planned_steps"] == steps
    assert longer["resumed_from"][0]["step"] == saved
    assert bits(longer) == bits(whole)
    with pytest.raises(ValueError, match=r"optim.replanned: \[\(0, 4\), \(6, 8\)\] there, \[\(0, 4\)\] here"):
        tiny_trainer(tmp_path, "longer", steps=8, **kept, **ALONE).fit()
    other = tiny_trainer(tmp_path, "other", steps=9, **ALONE, run={"resume": str(tmp_path / "longer")})
    with pytest.raises(ValueError, match=r"for more steps .* give --optim\.total-steps 4 --optim\.warmup-steps 2"):
        other.submission().find_resume()


class MayScale(Transformer):
    """Has a parameter more as long as there is no file `without`, which no setting names."""

    def __init__(self, without: Path) -> None:
        super().__init__(TINY)
        self.without = without
        if not without.exists():
            self.scale = nn.Parameter(torch.ones(2))

    def forward(self, *args: Any, **options: Any) -> Any:
        loss_sum, num_tokens = super().forward(*args, **options)
        return (loss_sum if self.without.exists() else loss_sum * self.scale.prod()), num_tokens


@pytest.mark.slow
def test_a_checkpoint_with_a_parameter_that_the_model_lacks_and_damaged_first_values_end_the_start_with_the_way_out(
    local_ray, tmp_path
):
    def trainer(name: str, steps: int, **options: Any) -> Any:
        saves = {"checkpoint_config": CheckpointConfig(every_steps=1)}
        made = tiny_trainer(tmp_path, name, steps=steps, total_steps=4, run=saves, **ALONE)
        made.task = replace(made.task, model=partial(MayScale, tmp_path / "without"), **options)
        return made

    trainer("scaled", 2, initial=None).fit()
    (file,) = (tmp_path / "scaled" / "checkpoints" / "step-00000002").rglob("*.safetensors")
    weights = RunWeights.open(f"{tmp_path}/scaled/checkpoints/step-00000002/lineage-000")
    flip_a_byte(file)
    with pytest.raises(RunFailed, match=r"from=.*step-00000002.* is not what was written.*give another checkpoint"):
        trainer("begun", 2, initial=weights).fit()
    flip_a_byte(file)
    (tmp_path / "without").touch()
    with pytest.raises(RunFailed, match=r"has scale, and the model has no parameter of that name: give the model"):
        trainer("scaled", 4, initial=None).fit()
    assert left_behind("scaled") == left_behind("begun") == []


def run(folder: Path, name: str, **options: Any) -> dict[str, Any]:
    """The summary."""
    return finished(tiny_trainer(folder, name, **options)).summary


def test_a_run_goes_on_where_its_cluster_ended_past_a_damaged_checkpoint_and_its_records_span_both(
    local_ray, undisturbed, tmp_path, capsys
):
    """All processes of the run are killed at once; its newest checkpoint and its journal have a wrong byte, the record
    of its lineage is empty. Its planned fault lies before that checkpoint: the same submission again does not wait for
    it."""
    reference, fault = fault_free(undisturbed, tmp_path), "kill@step=1,phase=backward,rank=0"
    every_2 = {"checkpoint_config": CheckpointConfig(every_steps=2, keep_last=3)}
    folder = tmp_path / "cut"
    heard, again = Heard(), Heard()
    cut = tiny_trainer(tmp_path, "cut", slow_s=0.2, run=every_2, faults=fault, callbacks=(heard,))
    threading.Thread(target=partial(kill_the_run, "cut", folder, at_step=7), daemon=True).start()
    with pytest.raises(CoordinatorLost):
        cut.fit()
    assert "rank 0 died in backward of step 1" in heard.causes[0]
    wait_for(lambda: not any(left.startswith("er:") for left in left_behind("cut")))
    stored = sorted(folder.glob("checkpoints/step-*/lineage-000/COMMIT.json"))
    newest, before = (int(path.parts[-3].removeprefix("step-")) for path in (stored[-1], stored[-2]))
    assert {name for name in kept(folder) if not any(fnmatch(name, known) for known in KNOWN)} == set()
    flip_a_byte(next(stored[-1].parent.glob("attempt-*/*.safetensors")))
    flip_a_byte(folder / "journal.jsonl")
    (folder / "lineages" / "000.json").write_bytes(b"")
    capsys.readouterr()
    result = finished(tiny_trainer(tmp_path, "cut", run=every_2, slow_s=0.2, faults=fault, callbacks=(again,)))
    assert bits(result.summary) == bits(reference)
    assert [one["step"] for one in result.summary["resumed_from"]] == [before]
    assert result.checkpoint is not None
    assert result.checkpoint.step == 12
    rejected = list(folder.glob(f"checkpoints/step-{newest:08d}/lineage-000/*REJECTED.json"))
    assert "sha256" in rejected[0].read_text()
    console = capsys.readouterr().err
    for told in (
        f"step-{newest:08d}/lineage-000 does not verify and is set aside: ",
        f"resumed at step {before} from ",
        "journal.jsonl is damaged; it is set aside as journal.jsonl.damaged-1",
    ):
        assert told in console
    assert json.loads((folder / "lineages" / "000.json").read_text())["from"] == []
    assert {name for name in kept(folder) if not any(fnmatch(name, known) for known in KNOWN)} == set()
    assert result.summary["recoveries"] == []
    assert [step for step, _ in heard.losses + again.losses] == list(range(12)), "each is told once"
    assert len(read_metrics(folder)) == 12


@pytest.mark.parametrize(
    ("dp", "cp"),
    [
        pytest.param(1, 3, marks=pytest.mark.slow),
        *(pytest.param(*mesh, marks=pytest.mark.soak) for mesh in ((3, 2), (2, 1), (1, 2), (2, 4), (1, 1))),
    ],
)
def test_a_checkpoint_goes_on_on_another_mesh_with_the_same_samples(local_ray, source, mixture, tmp_path, dp, cp):
    path = next(one["path"] for one in source["checkpoints"] if one["step"] == 6)
    name = f"on-{dp}x{cp}"
    summary = run(tmp_path, name, dp=dp, cp=cp, spares=0, run={"resume": path}, data=mixture)
    assert summary["samples_sha256"] == source["samples_sha256"]
    assert summary["losses"][:6] == source["losses"][:6]
    assert summary["resumed_from"] == [{"step": 6, "path": path}]
    for found, known in zip(summary["losses"], source["losses"], strict=True):
        assert float.fromhex(found) == pytest.approx(float.fromhex(known), abs=1e-4)


@pytest.fixture(scope="module")
def source(local_ray: None, mixture: PreparedTokens, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A finished run on a mixture, whose checkpoints are all there."""
    kept = {"checkpoint_config": CheckpointConfig(every_steps=6, keep_last=9)}
    return run(tmp_path_factory.mktemp("source"), "source", dp=2, cp=2, spares=0, run=kept, data=mixture)


@pytest.mark.soak
def test_state_in_host_memory_changes_no_bit_through_kills_and_in_resuming_with_another_setting(
    local_ray, undisturbed, tmp_path
):
    """A donor heals one newcomer, and copies in peers' memory bring both holders of a shard back. The undisturbed run
    has its state on the devices."""
    reference = fault_free(undisturbed, tmp_path)
    settings = {"checkpoint_config": CheckpointConfig(every_steps=6, keep_last=9), "copies": "1", "copy_every_steps": 1}
    faults = "kill@step=3,phase=apply,rank=3;kill@step=8,phase=forward,rank=0; kill@step=8,phase=forward,rank=2"
    moments = run(tmp_path, "moments", spares=3, cpu_offload="optimizer", run=settings, faults=faults)
    assert [len(recovery["faults"]) for recovery in moments["recoveries"]] == [1, 2]
    assert moments["recoveries"][1]["source"] == "copy"
    path = next(one["path"] for one in moments["checkpoints"] if one["step"] == 6)
    fault = "kill@step=9,phase=backward,rank=1"
    whole = run(tmp_path, "all", spares=1, cpu_offload="all", run={"resume": path}, faults=fault)
    assert whole["resumed_from"] == [{"step": 6, "path": path}]
    assert [recovery["steps_undone"] for recovery in whole["recoveries"]] == [0]
    assert bits(moments) == bits(whole) == bits(reference)


@pytest.mark.slow
def test_at_dp_1_the_loss_of_a_rank_costs_the_steps_since_the_checkpoint_and_no_bit(
    local_ray, undisturbed, tmp_path, caplog
):
    reference = fault_free(undisturbed, tmp_path, dp=1)
    fault = "kill@step=5,phase=vote,rank=1"
    summary = run(tmp_path, "one-ring", dp=1, run={**EVERY_3, "copies": "0"}, faults=fault)
    assert [recovery["source"] for recovery in summary["recoveries"]] == ["checkpoint"]
    way_out = "a failure of any process: back to the newest checkpoint (one each 3 step(s)). copies=1 (--copies 1)"
    assert way_out in caplog.text
    assert bits(summary) == bits(reference)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.soak
@pytest.mark.parametrize("where", ["a folder", "an object store", "an object store, in a save"])
def test_power_cuts_on_the_laptop_preset_cost_no_bit(where, tmp_path, request):
    """Every process of the run dies at once, Ray's head too; the same submission goes on from the storage alone. In a
    save this comes once in the middle of a file of a checkpoint, once between its files and its manifest."""
    storage_path, given = str(tmp_path), dict(os.environ)
    if where != "a folder":
        store: ObjectStore = request.getfixturevalue("object_store")
        storage_path = f"s3://{store.new_bucket()}/runs"
        given |= store.environment
    flags = "--cuts 2 --in-save" if where.endswith("in a save") else ""
    drill = f"-m elastic_ring drill power-cut --steps 8 --every 2 --storage-path {storage_path} {flags}"
    done = ran(sys.executable, *drill.split(), env=given, timeout_s=600.0)
    assert "losses True, samples_sha256 True, weights_sha256 True" in done.stdout
    assert "checkpoints left: 6, 8" in done.stdout
    if where.endswith("in a save"):
        assert "resumed at steps 2\n" in done.stdout, "both times: what was cut did not count"
        assert store_uploads(storage_path, given) == []


def store_uploads(uri: str, environment: dict[str, str]) -> list[str]:
    """What is under way in an object store, as another process sees it."""
    code = f"from elastic_ring.state.storage.folder import Storage; print([u.path for u in Storage({uri!r}).uploads()])"
    done = ran(sys.executable, "-c", code, env=environment, timeout_s=60.0)
    return list(json.loads(done.stdout.replace("'", '"')))


@pytest.mark.slow
def test_a_run_ends_where_no_checkpoint_could_be_written_for_as_long_as_was_set(local_ray, tmp_path):
    """From step 3 on a file lies where the checkpoints' folder was."""
    kept = {"checkpoint_config": CheckpointConfig(every_steps=3, fail_after_s=1.0), "timeouts": Timeouts(storage_s=1.0)}
    trainer = tiny_trainer(tmp_path, "in-the-way", **ALONE, steps=4000, run=kept)
    folder = tmp_path / "in-the-way" / "checkpoints"

    def block() -> None:
        wait_for(lambda: any(folder.glob("*/*/COMMIT.json")))
        folder.rename(tmp_path / "aside")
        folder.write_text("in the way")

    blocking = threading.Thread(target=block)
    blocking.start()
    with pytest.raises(StorageFailed, match=r"checkpoint\.fail_after_s=1\).*"):
        trainer.fit()
    blocking.join()
    assert left_behind("in-the-way") == []


def kill_the_run(name: str, folder: Path, at_step: int) -> None:
    """End the processes of the run's coordinator, workers and agents, for good, once `at_step` is on record."""
    wait_for(lambda: num_steps(folder) > at_step)
    wait_for(lambda: len(list(folder.glob("checkpoints/*/*/COMMIT.json"))) > 1)
    for actor in list_named_actors(all_namespaces=True):
        if actor["name"].startswith(f"er:{name}:"):
            ray.kill(ray.get_actor(actor["name"], namespace=NAMESPACE), no_restart=True)


KNOWN = (
    *FILES.values(),
    "checkpoints/step-*/COMMIT.json",
    "checkpoints/step-*.safetensors",
    "*REJECTED.json",
    "terms/*",
    "*.damaged-*",
    "attempt-001/*",
    "weights.safetensors",
    "callbacks.lock",
    "config.toml",
    "metrics.index",
)
"""The files of a run that `test_damage` and the docs speak of."""


def kept(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def flip_a_byte(path: Path) -> None:
    flip(path, path)
