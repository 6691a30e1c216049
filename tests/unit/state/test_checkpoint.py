"""A checkpoint is whole or does not count, and comes back bit for bit on any mesh. Real files."""

from __future__ import annotations

import dataclasses
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from secrets import token_hex

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from elastic_ring.cli.train import _weights_on_record
from elastic_ring.config import RunConfig
from elastic_ring.errors import CheckpointDamaged, StorageFailed, WeightsDamaged
from elastic_ring.monitor.metrics import write_json
from elastic_ring.state.checkpoints import checkpoint, retention
from elastic_ring.state.checkpoints.checkpoint import Reader
from elastic_ring.state.checkpoints.manifest import Manifest, attempt_folder, file_name
from elastic_ring.state.checkpoints.stored_weights import RunWeights
from elastic_ring.state.header import Counters
from elastic_ring.state.safetensors import safetensors_chunks
from elastic_ring.state.shard import Shard
from elastic_ring.state.storage.folder import Storage
from tests.object_store.store import ObjectStore

SHAPES = {"embed": (10, 4), "norm": (3,), "head": (7, 2, 2)}
STEP = 5


def whole_values() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def shard_of(cp_rank: int, cp: int, *, steps: int = STEP, optimizer: str = "adamw") -> Shard:
    """A rank's slices of one model after some optimizer steps, as FSDP2 would have cut them."""
    params = {}
    for name, value in whole_values().items():
        start, stop = checkpoint.rows_of(tuple(value.shape), cp_rank, cp)
        params[name] = value[start:stop].clone()
    groups = [
        {"params": [params["embed"], params["head"]], "weight_decay": 0.1},
        {"params": [params["norm"]], "weight_decay": 0.0},
    ]
    made: torch.optim.Optimizer
    if optimizer == "adamw":
        made = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95))
    else:
        made = torch.optim.SGD(groups, lr=0.01, momentum=0.9)
    shard = Shard(cp_rank, params, made)
    for step in range(steps):
        gradients = {name: (value * (step + 1)).sin() for name, value in shard.params.items()}
        shard.apply(gradients, 0.01)
        shard.advance(skipped=False)
    return shard


def save(
    storage: Storage, cp: int, dp: int, *, step: int = STEP, lineage: int = 1, optimizer: str = "adamw"
) -> Manifest:
    folder = attempt_folder(step, lineage, token_hex(8))
    files = []
    for cp_rank in range(cp):
        for part in range(dp):
            shard = shard_of(cp_rank, cp, optimizer=optimizer)
            described = checkpoint.describe(shard, SHAPES, dp)
            files.append(checkpoint.write_part(storage, folder, checkpoint.take(shard, described, part)))
    meta = shard.meta()
    manifest = Manifest(step, lineage, 1, "identity", folder, cp, dp, tuple(files), described, meta)
    assert checkpoint.commit(storage, manifest)
    return manifest


@pytest.fixture(params=["folder", "s3"])
def either(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Storage:
    """A folder, or a real object store."""
    if request.param == "folder":
        return Storage(str(tmp_path / "run")).open()
    store: ObjectStore = request.getfixturevalue("object_store")
    store.enter(monkeypatch)
    return Storage(f"s3://{store.new_bucket()}/run").open()


def same(one: Shard, other: Shard) -> bool:
    left, right = one.tensors(), other.tensors()
    return (
        list(left) == list(right)
        and all(torch.equal(left[name], right[name]) for name in left)
        and one.meta() == other.meta()
    )


@pytest.mark.parametrize(("cp", "dp", "to_cp"), [(2, 1, 2), (2, 3, 2), (2, 2, 3), (4, 1, 1), (1, 2, 4), (3, 1, 2)])
def test_a_checkpoint_comes_back_bit_for_bit_on_any_mesh(storage, cp, dp, to_cp):
    save(storage, cp, dp)
    (folder,) = checkpoint.committed(storage)
    manifest = checkpoint.read_manifest(storage, folder)
    for cp_rank in range(to_cp):
        found = shard_of(cp_rank, to_cp, steps=0)
        Reader(storage, manifest).fill(found, to_cp)
        names = sorted(found.params)
        assert Reader(storage, manifest).unknown(names[1:]) == names[:1], "one that a model has no longer"
        assert Reader(storage, manifest).unknown(names) == []
        assert same(found, shard_of(cp_rank, to_cp))
        assert found.counters == Counters(applied=STEP)


@pytest.mark.parametrize("either", ["folder", pytest.param("s3", marks=pytest.mark.slow)], indirect=True)
def test_training_goes_on_from_it_as_if_nothing_had_been(either):
    manifest = save(either, 2, 2)
    found = shard_of(1, 2, steps=0)
    Reader(either, manifest).fill(found, 2)
    for shard in (found, other := shard_of(1, 2)):
        shard.apply({name: value.cos() for name, value in shard.params.items()}, 0.02)
    assert same(found, other)


def test_files_are_plain_safetensors(storage):
    manifest = save(storage, 2, 1)
    read = load_file(storage.at(manifest.files[0].name))
    assert torch.equal(read["params/embed"], shard_of(0, 2).params["embed"])


def test_each_ring_writes_its_part_once(storage):
    """Together the parts hold every tensor exactly once, and none of them nearly all."""
    shard = shard_of(0, 2)
    described = checkpoint.describe(shard, SHAPES, 3)
    parts = [checkpoint.take(shard, described, part) for part in range(3)]
    names = [name for part in parts for name in part.tensors]
    assert sorted(names) == sorted(shard.tensors())
    assert all(part.tensors for part in parts)


def test_buffers_are_used_again(storage):
    shard = shard_of(0, 2)
    described = checkpoint.describe(shard, SHAPES, 1)
    first = checkpoint.take(shard, described, 0)
    again = checkpoint.take(shard, described, 0, first)
    assert all(again.tensors[name].data_ptr() == tensor.data_ptr() for name, tensor in first.tensors.items())


# ---------------------------------------------------------------- what must never count


def damage(storage: Storage, how: str, name: str) -> None:
    data = bytearray(storage.read(name))
    if how == "missing":
        storage.remove(name)
        return
    if how == "truncated":
        del data[-1]
    else:
        data[len(data) // 2] ^= 1
    storage.replace(name, data)


@pytest.mark.parametrize("how", ["flipped", "truncated", "missing"])
@pytest.mark.parametrize("index", [0, 1])
def test_a_damaged_file_is_named_and_not_loaded(either, how, index):
    manifest = save(either, 2, 1)
    name = manifest.files[index].name
    damage(either, how, name)
    assert [line.split()[0] for line in checkpoint.wrong_files(either, manifest)] == [name]
    with pytest.raises((CheckpointDamaged, StorageFailed), match=Path(name).name):
        Reader(either, manifest).fill(shard_of(index, 2, steps=0), 2)


@pytest.mark.parametrize("place", ["header", "value"])
def test_a_wrong_byte_of_a_whole_tensor_in_another_ranks_file_is_damage_and_not_the_users_mistake(storage, place):
    manifest = save(storage, 2, 1)
    name, steps = manifest.files[1].name, "optimizer/norm/step"
    assert manifest.tensors[steps].whole
    data = bytearray(storage.read(name))
    length = int.from_bytes(data[:8], "little")
    begin = json.loads(data[8 : 8 + length])[steps]["data_offsets"][0]
    data[8 + length + begin if place == "value" else 8 + data[8:].index(steps.encode())] ^= 4
    storage.replace(name, bytes(data))
    with pytest.raises(CheckpointDamaged, match=Path(name).name):
        Reader(storage, manifest).tensor(steps, 0, 3)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 1}', '{"format": 1, "files": [{}], "sha256": "0"}'])
def test_a_damaged_manifest_is_refused(storage, text):
    save(storage, 1, 1)
    (folder,) = checkpoint.committed(storage)
    storage.replace(f"{folder}/{checkpoint.COMMIT}", text.encode())
    with pytest.raises(CheckpointDamaged, match="COMMIT"):
        checkpoint.read_manifest(storage, folder)


def test_a_flipped_bit_anywhere_in_a_manifest_and_a_cut_anywhere_is_found(storage):
    data = save(storage, 1, 1).to_json()
    for index in range(len(data)):
        flipped = bytearray(data)
        flipped[index] ^= 1 << index % 8
        for wrong in (bytes(flipped), data[:index]):
            with pytest.raises(CheckpointDamaged, match="here is n"):
                Manifest.from_json(wrong, "here")


def rewritten(storage: Storage, manifest: Manifest, **changes: object) -> str:
    """The folder of a checkpoint whose manifest a stranger wrote, with the right digest."""
    folder = checkpoint.step_folder(manifest.step, manifest.lineage)
    storage.replace(f"{folder}/{checkpoint.COMMIT}", dataclasses.replace(manifest, **changes).to_json())  # type: ignore[arg-type]
    return folder


def test_a_manifest_with_numbers_or_names_that_cannot_be_is_refused_by_all_who_read_it(storage):
    manifest = save(storage, 2, 1)
    first, *others = manifest.files
    embed, meta = manifest.tensors["params/embed"], dataclasses.asdict(manifest.meta)
    strangers: list[dict[str, object]] = [
        *({"cp": cp} for cp in (0, -1, 1 << 40, 1, 3, True)),
        *({"num_parts": num_parts} for num_parts in (0, 7)),
        *({"folder": folder} for folder in ("../precious", "/", f"{manifest.folder}/../../../../..")),
        {"term": -1},
        {"files": (dataclasses.replace(first, name=f"{manifest.folder}/../../../x"), *others)},
        {"files": (dataclasses.replace(first, num_bytes=-1), *others)},
        {"files": ()},
        {"files": manifest.files[:1]},
        *(
            {"tensors": {**manifest.tensors, "params/embed": dataclasses.replace(embed, **change)}}
            for change in ({"shape": (1 << 50, 4)}, {"shape": (-1, 4)}, {"shape": ()}, {"dtype": "F1"}, {"part": 1})
        ),
        {"tensors": {"embed": embed}},
        {"meta": {}},
        {"meta": {**meta, "groups": [{}]}},
        *({"meta": {**meta, "counters": counters}} for counters in ({"applied": -1}, {"other": 1})),
        *({"run": run} for run in ({"corpus": [{"first_step": "0"}]}, {"places": ["/"]}, {"skips": [{"x": 1}]})),
    ]
    for changes in strangers:
        folder = rewritten(storage, manifest, **changes)
        with pytest.raises(CheckpointDamaged, match="is no manifest"):
            checkpoint.read_manifest(storage, folder)
        assert checkpoint.wrong_with(storage, folder), changes
    folder = rewritten(storage, manifest, tensors={**manifest.tensors, "params/en/de": embed})
    assert "params/en/de" in checkpoint.read_manifest(storage, folder).tensors  # torch allows such a name
    storage.replace(f"{folder}/{checkpoint.COMMIT}", b"[" * 100_000)
    with pytest.raises(CheckpointDamaged, match="deeper than"):
        checkpoint.read_manifest(storage, folder)


@pytest.mark.parametrize("whole_files", [True, False])
def test_a_file_that_holds_less_of_a_tensor_than_the_manifest_says_is_named_and_nothing_is_made_up(
    storage, whole_files
):
    """A row that is spread over the others, bytes that nobody wrote: each would be weights of nobody."""
    manifest = save(storage, 2, 1)
    real = load_file(storage.at(manifest.files[1].name))
    for name, odd in {
        "params/embed": real["params/embed"][:1],
        "params/norm": torch.zeros(0),
        "params/head": real["params/head"][0],
        "optimizer/embed/exp_avg": real["optimizer/embed/exp_avg"].double(),
    }.items():
        storage.replace(manifest.files[1].name, safetensors_chunks({**real, name: odd}))
        file = storage.digest(manifest.files[1].name)
        folder = rewritten(storage, manifest, files=(manifest.files[0], file))
        assert not checkpoint.wrong_with(storage, folder), "each digest is right"
        found = Reader(storage, checkpoint.read_manifest(storage, folder), whole_files=whole_files)
        for cp in (1, 2):
            with pytest.raises(
                CheckpointDamaged, match=rf"shard-00001-part-00000.*holds .* of {name}: its manifest says"
            ):
                found.tensor(name, cp - 1, cp)
    header = b'{"params/embed":{"dtype":"F32","shape":[5,4],"data_offsets":[0,0]}}'
    storage.replace(manifest.files[1].name, [len(header).to_bytes(8, "little") + header])
    file = storage.digest(manifest.files[1].name)
    only = {"params/embed": manifest.tensors["params/embed"]}
    folder = rewritten(storage, manifest, files=(manifest.files[0], file), tensors=only)
    with pytest.raises(CheckpointDamaged, match=r"shard-00001.*params/embed.* in other than its bytes"):
        Reader(storage, checkpoint.read_manifest(storage, folder), whole_files=whole_files).tensor("params/embed", 0, 1)


def test_a_stranger_s_settings_of_the_optimizer_and_shapes_of_another_model_are_refused(storage):
    manifest = save(storage, 2, 1)
    groups = tuple({**group, "lr": "fast"} for group in manifest.meta.groups)
    folder = rewritten(storage, manifest, meta=dataclasses.replace(manifest.meta, groups=groups))
    with pytest.raises(CheckpointDamaged, match="lr='fast'"):
        Reader(storage, checkpoint.read_manifest(storage, folder)).fill(shard_of(0, 2, steps=0), 2)
    other = shard_of(0, 2, steps=0)
    other.params["norm"] = torch.zeros(5)
    with pytest.raises(CheckpointDamaged, match=r"norm in shape \[2\], the model \[5\]"):
        Reader(storage, manifest).fill(other, 2)


def test_with_its_manifest_a_checkpoint_is_gone_and_the_one_before_it_counts(either):
    older = save(either, 1, 1, step=3)
    save(either, 1, 1, step=5)
    damage(either, "missing", f"{checkpoint.step_folder(5, 1)}/{checkpoint.COMMIT}")
    assert checkpoint.committed(either) == [checkpoint.step_folder(3, 1)]
    assert not list(checkpoint.wrong_files(either, older))


def test_of_writers_of_different_terms_one_commits_a_step_and_the_others_are_told(either):
    manifest = save(either, 1, 1, step=3)

    def of_term(term: int) -> Manifest:
        folder = attempt_folder(5, 1, token_hex(8))
        files = tuple(dataclasses.replace(file, name=file_name(folder, 0, 0)) for file in manifest.files)
        return dataclasses.replace(manifest, step=5, term=term, folder=folder, files=files)

    writers = [of_term(term) for term in range(1, 9)]
    with ThreadPoolExecutor(len(writers)) as pool:
        won = list(pool.map(lambda each: checkpoint.commit(either, each), writers))
    assert won.count(True) == 1
    found = checkpoint.read_manifest(either, checkpoint.step_folder(5, 1))
    assert (found.term, found.folder) == (writers[won.index(True)].term, writers[won.index(True)].folder)
    assert not checkpoint.commit(either, dataclasses.replace(manifest, step=5, term=99)), "an old one that wakes up"


def test_one_that_was_set_aside_no_longer_counts_and_keeps_its_files(either):
    older = save(either, 1, 1, step=3)
    newer = save(either, 1, 1, step=9)
    assert [name.split("/")[1] for name in checkpoint.committed(either)] == ["step-00000009", "step-00000003"]
    checkpoint.set_aside(either, checkpoint.step_folder(9, 1), ["a byte is wrong"])
    assert checkpoint.committed(either) == [checkpoint.step_folder(3, 1)]
    assert not list(checkpoint.wrong_files(either, newer)), "the files are still there"
    assert not list(checkpoint.wrong_files(either, older))


def test_the_newest_lineage_comes_first(storage):
    save(storage, 1, 1, step=9, lineage=1)
    save(storage, 1, 1, step=2, lineage=2)
    assert checkpoint.committed(storage) == [checkpoint.step_folder(2, 2), checkpoint.step_folder(9, 1)]


# ---------------------------------------------------------------- what cannot be saved, and for how long it stays


def test_an_optimizer_that_keeps_objects_is_refused():
    shard = shard_of(0, 1)
    shard.optimizer.param_groups[0]["hook"] = object()
    with pytest.raises(ValueError, match=r"AdamW: hook of group 0 is a builtins.object"):
        shard.meta()


def test_the_interval_follows_young_and_daly():
    assert retention.interval_s(10.0, 20_000.0) == pytest.approx(622.5, abs=0.1)
    assert retention.interval_s(100.0, 1.0) == 100.0


def test_retention_keeps_the_newest_and_every_nth():
    assert retention.superfluous([10, 20, 30, 40, 50], keep_last=2, keep_every=0) == [10, 20, 30]
    assert retention.superfluous([10, 20, 30, 40, 50], keep_last=1, keep_every=20) == [10, 30]


def test_first_values_of_another_run_stay_those_on_record_and_a_damaged_one_is_refused(tmp_path):
    source, own = (Storage(str(tmp_path / name)).open() for name in ("source", "own"))
    manifest = save(source, 2, 1)
    first = RunWeights.open(source.uri)
    write_json(tmp_path / "own" / "config.json", {"from": first.record})
    save(source, 2, 1, step=STEP + 1)
    assert RunWeights.open(source.uri) != first, "the run has saved again"
    run = RunConfig("own", storage_path=str(tmp_path))
    assert _weights_on_record(source.uri, run) == first
    assert _weights_on_record(str(tmp_path / "another"), run) is None
    assert _weights_on_record(source.uri, dataclasses.replace(run, resume="never")) is None
    assert RunWeights.of_record(source.uri, {**first.record, "folder": "checkpoints/../../x"}) is None

    path = Path(source.at(manifest.files[0].name))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    damaged, whole = (
        RunWeights.open(f"{source.uri}/{first.folder}"),
        [shard_of(rank, 2).params["embed"] for rank in (0, 1)],
    )
    assert torch.equal(damaged.tensor("embed", (10, 4), (6, 9)), torch.cat(whole)[6:9]), "of the other file alone"
    with pytest.raises(WeightsDamaged, match=r"is not what was written.*give another checkpoint"):
        damaged.tensor("embed", (10, 4), (3, 9))
    path.write_bytes(data[:-1])
    with pytest.raises(ValueError, match=r"is damaged .*cut off.*give another checkpoint"):
        RunWeights.open(f"{source.uri}/{first.folder}")
    shutil.rmtree(source.uri)
    with pytest.raises(ValueError, match="from="):
        _weights_on_record(source.uri, run)
    save(own, 2, 1)
    assert _weights_on_record(source.uri, run) == first, "a run with checkpoints of its own needs no other's"
