"""`elastic-ring checkpoints`: what it prints, what it refuses, and that others can read what it exports."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import warnings
from secrets import token_hex

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import state_dict as dcp_state

from elastic_ring.cli import main as command_line
from elastic_ring.cli.checkpoints import age, main, size
from elastic_ring.errors import CheckpointDamaged
from elastic_ring.state.checkpoints import checkpoint, zero3
from elastic_ring.state.checkpoints.manifest import attempt_folder
from elastic_ring.state.storage.folder import Storage
from tests.unit.state.test_checkpoint import SHAPES, STEP, damage, save, shard_of, whole_values

Capture = pytest.CaptureFixture[str]


def test_list_shows_each_checkpoint_newest_first_and_what_does_not_count(storage, capsys):
    for step in (3, 5, 9):
        save(storage, 2, 2, step=step)
    storage.replace(f"{checkpoint.step_folder(5, 1)}/{checkpoint.COMMIT}", b"{")
    checkpoint.set_aside(storage, checkpoint.step_folder(3, 1), ["a byte is wrong"])
    storage.write(f"{attempt_folder(11, 1, token_hex(8))}/shard", [b"half"])
    assert command_line(["checkpoints", "list", storage.uri]) == 0
    header, newest, damaged, aside, left = capsys.readouterr().out.splitlines()
    assert header.split() == ["step", "lineage", "mesh", "size", "files", "saved", "folder"]
    assert re.fullmatch(rf" *9 +1 +2x2 +\d+\.\d KiB +4 +\d s ago +{storage.at('.*')}-001", newest)
    assert re.match(r" *5 +1 +damaged +.*COMMIT.json is no manifest", damaged)
    assert re.match(r"set aside: .*step-00000003.*KiB: a byte is wrong", aside)
    assert left == "in no checkpoint: 1 file(s), 4 B, 0 upload(s)"


def test_of_zero3_in_ray_train_the_newest_whole_one_is_taken_listed_and_left_to_ray_train(storage, capsys, caplog):
    def save_zero3(folder: str, files: dict[str, int] | None) -> None:
        storage.write(f"{folder}/zero3/rank_0.pt", [b"shard"])
        if files is not None:
            state = {"step": zero3.age_key(folder)[1], "num_workers": 2, "files": files}
            storage.replace(f"{folder}/{zero3.STATE}", json.dumps(state).encode())

    whole, old, undone = "checkpoint-000000020-2", "checkpoint-000000010-1", "checkpoint-000000030-1"
    save_zero3("checkpoint-000000024-2", None)
    assert zero3.newest_whole(storage, []) is None, "its writers were killed before all files were there"
    for reported, why in (("checkpoint-000000024-2", "024-2 unfinished"), (old, "010-1 is gone")):
        with pytest.raises(CheckpointDamaged, match=f"no checkpoint is whole: .*{why}"):  # not step 0 without a word
            zero3.newest_whole(storage, [reported])
    save_zero3("checkpoint-000000022-2", {"zero3/rank_0.pt": 5, "zero3/rank_1.pt": 5})
    with pytest.raises(CheckpointDamaged, match=r"000000022-2 lacks 'zero3/rank_1.pt' of 5 bytes"):
        zero3.newest_whole(storage, [])
    save_zero3(old, {})
    with pytest.raises(CheckpointDamaged):
        zero3.newest_whole(storage, [])
    assert zero3.newest_whole(storage, [old]) == (old, zero3.SavedState(10, 2)), (
        "an older version's, as Ray Train has it"
    )
    save_zero3(undone, {"zero3/rank_0.pt": 5})
    save_zero3(whole, {"zero3/rank_0.pt": 5})
    caplog.clear()
    newest = zero3.newest_whole(storage, [old])
    assert newest is not None
    assert newest[0] == whole, "a later group's is newer, whatever its step"
    (told,) = caplog.messages
    assert re.fullmatch(
        f"{whole} is taken, as newer ones are not whole: .*022-2 lacks 'zero3/rank_1.pt' of 5 bytes", told
    )

    assert command_line(["checkpoints", "list", storage.uri]) == 0
    rows = capsys.readouterr().out.splitlines()[1:]
    assert [row.split()[:2] for row in rows] == [["24", "2"], ["22", "2"], ["20", "2"], ["30", "1"], ["10", "1"]]
    assert rows[0].endswith("024-2 unfinished")
    assert rows[1].endswith("lacks 'zero3/rank_1.pt' of 5 bytes")
    assert re.fullmatch(rf" *20 +2 +2 workers +\d+ B +2 +\d s ago +{storage.at(whole)}", rows[2])
    for verb in ("verify", "prune", "export --to=/tmp"):
        assert main([*verb.split(), storage.uri]) == 2
        told = capsys.readouterr().err
        assert "is of ZeRO-3 in Ray Train: " in told
        assert ("unfinished ones remove by hand" in told) == (verb == "prune"), "Ray Train does not know them"
    assert storage.exists(old)


@pytest.mark.parametrize("how", ["flipped", "truncated", "missing"])
def test_verify_exits_with_1_and_names_the_file(storage, capsys, how):
    save(storage, 2, 2, step=3)
    newest = save(storage, 2, 2, step=5)
    assert main(["verify", storage.uri]) == 0
    damage(storage, how, newest.files[2].name)
    capsys.readouterr()
    assert main(["verify", storage.uri]) == 1
    shown = capsys.readouterr()
    assert re.match(rf".*step-00000005/.*WRONG .*\n  {newest.files[2].name} .*\n.*step-00000003/.*right", shown.out)
    assert "1 of 2 checkpoint(s) must not be used" in shown.err


def test_each_file_of_a_checkpoint_is_verified(storage, capsys):
    for file in save(storage, 2, 2).files:
        damage(storage, "flipped", file.name)
        assert main(["verify", storage.uri]) == 1
        assert f"  {file.name} has sha256" in capsys.readouterr().out
        damage(storage, "flipped", file.name)  # back
    assert main(["verify", storage.uri]) == 0


def test_prune_keeps_the_newest_and_those_asked_for(storage, capsys):
    for step in (10, 20, 25, 30, 35):
        save(storage, 1, 1, step=step)
    assert main(["prune", storage.uri, "--keep-last", "2", "--keep-every", "20"]) == 0
    assert [int(folder[17:25]) for folder in checkpoint.committed(storage)] == [35, 30, 20]
    assert "removed 2 checkpoint(s) (steps 10, 25)" in capsys.readouterr().out
    assert main(["prune", storage.uri, "--keep-last", "2", "--keep-every", "20"]) == 0
    assert "kept: steps 20, 30, 35; each lineage keeps its newest" in capsys.readouterr().out


def test_prune_keeps_the_newest_that_verifies(storage):
    for step in (3, 5, 9):
        newest = save(storage, 1, 1, step=step)
    damage(storage, "flipped", newest.files[0].name)
    assert main(["prune", storage.uri, "--keep-last", "1"]) == 0
    assert [int(folder[17:25]) for folder in checkpoint.committed(storage)] == [9, 5]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["verify", "{run}"], "no checkpoint in .*give the run's folder"),
        (["list", "{run}"], "run: there is no such folder"),
        (["list", "gs://bucket/run"], "use a folder, file:///folder or s3://bucket/prefix"),
        (["export", "{run}", "--to", "{out}"], "no such checkpoint in"),
        (["export", "{run}", "--to", "{out}", "--step", "7"], "--step 7: no such checkpoint"),
    ],
)
def test_mistakes_are_named_with_the_way_out(tmp_path, capsys, arguments, told):
    given = [word.format(run=tmp_path / "run", out=tmp_path / "out") for word in arguments]
    assert main(given) == 2
    assert re.search(told, capsys.readouterr().err)


def test_a_folder_that_this_user_may_not_read_is_no_wait(storage, tmp_path, capsys):
    assert main(["list", storage.uri]) == 0  # and its modules are imported
    closed, user, begun = tmp_path / "closed", os.geteuid(), time.monotonic()
    closed.mkdir(mode=0)
    os.seteuid(user or 65534)
    try:
        assert main(["list", str(closed)]) == 1
    finally:
        os.seteuid(user)
    assert "cannot be listed: PermissionError" in capsys.readouterr().err
    assert time.monotonic() - begun < 5.0


def test_an_export_is_not_mixed_with_other_files_and_not_made_of_a_damaged_checkpoint(storage, tmp_path, capsys):
    manifest = save(storage, 2, 1)
    target = tmp_path / "out"
    target.mkdir()
    (target / "other").write_text("")
    assert main(["export", storage.uri, "--to", str(target)]) == 2
    assert "holds other already; give an empty or a new folder" in capsys.readouterr().err
    assert main(["export", storage.uri, "--to", "s3://bucket/x", "--format", "dcp"]) == 2
    damage(storage, "flipped", manifest.files[1].name)
    assert main(["export", storage.uri, "--to", str(tmp_path / "new")]) == 1
    assert manifest.files[1].name in capsys.readouterr().err
    assert list((tmp_path / "new").iterdir()) == []


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_safetensors_hold_the_whole_parameters_in_files_of_the_size_asked_for(storage, tmp_path, optimizer):
    save(storage, 3, 2, optimizer=optimizer)
    assert main(["export", storage.uri, "--to", str(tmp_path / "out"), "--shard-mib", "1"]) == 0
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(value.numel() * 4 for value in whole_values().values())
    for name in SHAPES:
        found = load_file(tmp_path / "out" / index["weight_map"][name])[name]
        parts = [shard_of(rank, 3, optimizer=optimizer).params[name] for rank in range(3)]
        assert torch.equal(found, torch.cat(parts))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))


def test_torch_distributed_checkpoint_loads_an_export_into_a_model_and_its_optimizer(storage, tmp_path):
    save(storage, 2, 2)
    assert main(["export", storage.uri, "--to", str(tmp_path / "out"), "--format", "dcp"]) == 0
    model = Model()
    groups = [{"params": [model.embed, model.head]}, {"params": [model.norm]}]
    optimizer = torch.optim.AdamW(groups, lr=1.0)
    model_state, optimizer_state = dcp_state.get_state_dict(model, optimizer)
    state = {"model": model_state, "optim": optimizer_state, "step": 0, "counters": {"applied": 0}}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load(state, checkpoint_id=tmp_path / "out", no_dist=True)
    dcp_state.set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    shards = [shard_of(rank, 2) for rank in range(2)]
    for name, param in model.named_parameters():
        parts = [shard.params[name] for shard in shards]
        assert torch.equal(param, torch.cat(parts))
        states = [shard.optimizer.state[part] for shard, part in zip(shards, parts, strict=True)]
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(optimizer.state[param][key], torch.cat([each[key] for each in states]))
        assert optimizer.state[param]["step"] == STEP
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert (state["step"], state["counters"]["applied"]) == (STEP, STEP)


@pytest.mark.slow
def test_all_verbs_work_on_an_object_store(object_store, monkeypatch, capsys, tmp_path):
    object_store.enter(monkeypatch)
    uri = f"s3://{object_store.new_bucket()}/runs/one"
    storage = Storage(uri).open()
    for step in (3, 5, 9):
        save(storage, 2, 1, step=step)
    object_store.client().create_multipart_upload(
        Bucket=storage.root.split("/")[0], Key=f"runs/one/{attempt_folder(8, 1, token_hex(8))}/shard"
    )
    assert main(["prune", f"{uri}/", "--keep-last", "1"]) == 0
    assert "1 unfinished upload(s)" in capsys.readouterr().out
    assert main(["list", uri]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert main(["verify", uri]) == 0
    assert main(["export", uri, "--to", f"{uri}-exported"]) == 0
    assert main(["export", uri, "--to", str(tmp_path / "out"), "--format", "dcp"]) == 0
    assert main(["list", "s3://no-such-bucket/run"]) == 2
    assert "there is no bucket no-such-bucket" in capsys.readouterr().err


def test_help_needs_no_torch_and_amounts_are_told_in_readable_units():
    program = (
        "import sys\nfrom elastic_ring.cli import main\n"
        "for words in (['--help'], ['export', '--help']):\n"
        "    try:\n        main(['checkpoints', *words])\n    except SystemExit:\n        pass\n"
        "print([name for name in ('torch', 'ray', 'botocore') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=os.environ)
    assert done.stdout.strip().endswith("[]")
    assert all(verb in done.stdout for verb in ("list", "verify", "prune", "export", "--format"))
    assert [size(amount) for amount in (1023, 5 * 2**30, 2**50)] == ["1023 B", "5.0 GiB", "1,024.0 TiB"]
    assert age(0.0).endswith(" d ago")
