"""Final weights are written whole, from exchanges that nobody gave up, or not at all; no rank holds all of them."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from elastic_ring.errors import ElasticRingError, GroupAborted, StorageFailed
from elastic_ring.mesh import Mesh
from elastic_ring.model.transformer import Transformer
from elastic_ring.monitor.result import Result
from elastic_ring.runtime.groups.nccl import LaunchGate
from elastic_ring.runtime.groups.transport import translated
from elastic_ring.state.checkpoints.stored_weights import StoredWeights
from elastic_ring.state.checkpoints.weight_files import MAX_FILE_BYTES, WEIGHTS, WEIGHTS_FOLDER, WEIGHTS_INDEX
from elastic_ring.state.storage.backend import StoredFile
from elastic_ring.state.storage.folder import Storage
from elastic_ring.train import weights
from elastic_ring.train.weights import gather_weights, load_weights
from tests.unit.groups.processes import Membership, abort, membership
from tests.unit.train.tiny_task import MODEL, begin, make_task, weights_sha256

RING = Mesh(1, 2)
SMALL = 2000
"""Bytes of a file: the tiny model then lies in several, and its largest tensors in files of their own."""


@pytest.fixture(scope="module")
def two() -> Iterator[Membership]:
    with membership(2) as made:
        yield made


def files_in(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def index_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / WEIGHTS_INDEX).read_text())
    return found


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """As any reader of safetensors finds them through the index."""
    files = {file: load_file(folder / file) for file in set(index_of(folder)["weight_map"].values())}
    found = {name: files[file].pop(name) for name, file in index_of(folder)["weight_map"].items()}
    assert not any(files.values()), "the index names every tensor"
    return found


# ---------------------------------------------------------------- what is written


def test_several_files_and_one_file_hold_the_same_bits_under_the_same_digest(two, tmp_path):
    one, several = tmp_path / "one", tmp_path / "several"
    two.all(begin, two.meeting(), RING, make_task())
    digest, none = two.all(weights_sha256, str(one))
    assert (len(digest), none) == (64, None)
    assert files_in(one) == [WEIGHTS]
    assert two.all(weights_sha256, str(several), SMALL) == [digest, None]

    expected, found = load_file(one / WEIGHTS), tensors_of(several)
    assert expected.keys() == found.keys() == dict(Transformer(MODEL).named_parameters()).keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    total = hashlib.sha256(b"".join(found[name].numpy().tobytes() for name in sorted(found)))
    metadata = index_of(several)["metadata"]
    assert total.hexdigest() == metadata["sha256"] == digest
    assert metadata["total_size"] == sum(value.nbytes for value in found.values())

    files = sorted(metadata["file_sha256"])
    assert files_in(several) == sorted([*files, WEIGHTS_INDEX])
    assert len(files) > 4, "each rank has written several"
    for number, file in enumerate(files, 1):
        assert file.endswith(f"/weights-{number:05d}-of-{len(files):05d}.safetensors")
        assert hashlib.sha256((several / file).read_bytes()).hexdigest() == metadata["file_sha256"][file]
        held = load_file(several / file)
        assert len(held) == 1 or sum(value.nbytes for value in held.values()) <= SMALL


@pytest.mark.slow
def test_weights_in_an_object_store_are_read_by_their_address(object_store, monkeypatch, tmp_path):
    object_store.enter(monkeypatch)
    uri = f"s3://{object_store.new_bucket()}/runs/one"
    with membership(2) as made:
        made.all(set_environment, object_store.environment)
        made.all(begin, made.meeting(), RING, make_task())
        digest, _ = made.all(weights_sha256, str(tmp_path))
        assert made.all(weights_sha256, uri) == [digest, None]
        assert [name for name, _ in Storage(uri).names()] == [WEIGHTS]
        for _ in range(2):
            assert made.all(weights_sha256, uri, SMALL) == [digest, None]
    storage, loaded, expected = Storage(uri), Transformer(MODEL), load_file(tmp_path / WEIGHTS)
    weight_map = json.loads(storage.read(WEIGHTS_INDEX))["weight_map"]
    assert {name for name, _ in storage.names()} == {WEIGHTS_INDEX, *weight_map.values()}
    load_weights(loaded, uri)
    assert all(torch.equal(value, expected[name]) for name, value in loaded.named_parameters())


def set_environment(me: Any, values: dict[str, str]) -> None:
    os.environ.update(values)


# ---------------------------------------------------------------- what a rank holds


def held_at_most(me: Any, folder: str, max_file_bytes: int) -> int:
    """The most bytes of gathered tensors that were alive in this process at one moment."""
    held = [0, 0]

    def freed(num_bytes: int) -> None:
        held[0] -= num_bytes

    def counted(gathered: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def count(*args: Any) -> Tensor:
            found = gathered(*args)
            num_bytes = found.untyped_storage().nbytes()
            held[0] += num_bytes
            held[1] = max(held)
            weakref.finalize(found, freed, num_bytes)
            return found

        return count

    original = weights._Gather.tensor
    weights._Gather.tensor = counted(original)  # type: ignore[method-assign]
    try:
        gather_weights(me.state, me.groups, Storage(folder), max_file_bytes)
    finally:
        weights._Gather.tensor = original  # type: ignore[method-assign]
    assert held[0] == 0, "nothing stays in memory"
    return held[1]


def test_no_rank_holds_more_than_one_tensor_and_one_of_its_files(two, tmp_path):
    two.all(begin, two.meeting(), RING, make_task())
    sizes = {name: value.nbytes for name, value in Transformer(MODEL).named_parameters()}
    padding = MODEL.width * 4  # uneven rows are gathered padded
    one = two.all(held_at_most, str(tmp_path / "one"), MAX_FILE_BYTES)
    assert one[0] >= sum(sizes.values()) > one[1], "a single file is held whole by its writer only"
    most = max(SMALL, *sizes.values()) + max(sizes.values()) + padding
    several = two.all(held_at_most, str(tmp_path / "several"), SMALL)
    assert max(several) <= most < sum(sizes.values())


# ---------------------------------------------------------------- what was given up


def give_up_at(me: Any, launch: int) -> None:
    """As an abort of NCCL's groups does that comes after a launch: the exchange ends, and nothing is raised."""
    launches = iter(range(1 << 30))

    def check() -> None:
        if next(launches) == launch:
            me.connector.aborted = True

    me.connector.gate = LaunchGate(check)


@pytest.mark.slow
def test_weights_from_an_aborted_gather_are_not_written(two, tmp_path):
    num_tensors = len(dict(Transformer(MODEL).named_parameters()))
    for max_file_bytes in (MAX_FILE_BYTES, SMALL):
        folder = tmp_path / str(max_file_bytes)
        for launch in (0, num_tensors // 2, num_tensors, num_tensors + 1):
            two.all(begin, two.meeting(), RING, make_task())
            two.now(0, give_up_at, launch)
            for rank in (0, 1):
                two.start(rank, weights_sha256, str(folder), max_file_bytes)
            with pytest.raises(GroupAborted):
                two.result(0)
            two.now(1, abort)
            with suppress(ElasticRingError, RuntimeError):  # if the last exchange was the one that was given up
                assert two.result(1) is None
            assert not (folder / WEIGHTS_INDEX).exists()
            if launch < num_tensors:
                assert not (folder / WEIGHTS).exists()
            assert not list(folder.rglob(".*")), "what is half written is removed"
        two.all(begin, two.meeting(), RING, make_task())
        two.all(weights_sha256, str(folder), max_file_bytes)
        assert files_in(folder) == ([WEIGHTS] if max_file_bytes == MAX_FILE_BYTES else whole(folder))


def whole(folder: Path) -> list[str]:
    return sorted({WEIGHTS_INDEX, *index_of(folder)["weight_map"].values()})


class KilledWriting(Storage):
    """Its process is killed in the middle of the second file."""

    num_written = 0

    def write(self, name: str, chunks: Iterable[bytes | memoryview]) -> StoredFile:
        self.num_written += 1
        if self.num_written < 2:
            return super().write(name, chunks)
        rest = iter(chunks)
        return super().write(name, chain([bytes(next(rest)) * (1 << 20)], self._killed()))

    def _killed(self) -> Iterator[bytes]:
        os.kill(os.getpid(), signal.SIGKILL)
        yield b""


def killed_writing(me: Any, folder: str, max_file_bytes: int) -> None:
    gather_weights(me.state, me.groups, KilledWriting(folder), max_file_bytes)


def gathered(me: Any, folder: str, max_file_bytes: int) -> str | None:
    with translated(me.connector):
        return gather_weights(me.state, me.groups, Storage(folder), max_file_bytes)


@pytest.mark.slow
def test_a_rank_that_is_killed_as_it_writes_leaves_no_index_and_the_next_attempt_removes_its_files(tmp_path):
    with membership(2) as killed:
        killed.all(begin, killed.meeting(), RING, make_task())
        killed.start(0, gathered, str(tmp_path), SMALL)
        killed.start(1, killed_writing, str(tmp_path), SMALL)
        with pytest.raises(ElasticRingError):
            killed.result(0)
    left = files_in(tmp_path)
    assert left, "the killed rank has written something"
    assert WEIGHTS_INDEX not in left
    with pytest.raises(ValueError, match="written when a run completes"):
        StoredWeights.open(tmp_path)
    (tmp_path / f".{WEIGHTS}.1234").write_bytes(b"half")
    with membership(2) as made:
        made.all(begin, made.meeting(), RING, make_task())
        made.all(weights_sha256, str(tmp_path), SMALL)
    assert files_in(tmp_path) == whole(tmp_path)
    assert not {*left} & {*files_in(tmp_path)}
    assert len(list((tmp_path / WEIGHTS_FOLDER).iterdir())) == 1


def test_files_that_rank_0_does_not_see_are_named_and_do_not_count(two, tmp_path):
    two.all(begin, two.meeting(), RING, make_task())
    two.start(0, weights_sha256, str(tmp_path / "here"), SMALL)
    two.start(1, weights_sha256, str(tmp_path / "there"), SMALL)
    with pytest.raises(StorageFailed, match=r"weights-00002-of-.* has no bytes here.*all workers must see"):
        two.result(0)
    assert two.result(1) is None
    assert WEIGHTS_INDEX not in files_in(tmp_path / "here")


def test_a_file_that_cannot_be_written_is_named(two, tmp_path):
    (tmp_path / WEIGHTS_FOLDER).write_text("a file where the folder should be")
    two.all(begin, two.meeting(), RING, make_task())
    for rank in (0, 1):
        two.start(rank, weights_sha256, str(tmp_path), SMALL)
    with pytest.raises(StorageFailed, match=r"weights-00001-of-.* cannot be written"):
        two.result(0)
    two.now(1, abort)
    with pytest.raises((ElasticRingError, RuntimeError)):
        two.result(1)
    assert files_in(tmp_path) == [WEIGHTS_FOLDER]


# ---------------------------------------------------------------- what is loaded


class Tied(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.token, self.head = nn.Embedding(6, width), nn.Linear(width, 6, bias=False)
        self.head.weight = self.token.weight


def test_weights_that_are_tied_load_strictly_from_the_one_name_that_is_stored(tmp_path):
    path = tmp_path / "weights.safetensors"
    model, loaded = Tied(), Tied()
    save_file(dict(model.named_parameters()), path)
    load_weights(loaded, path)
    assert torch.equal(loaded.head.weight, model.token.weight)
    assert loaded.head.weight is loaded.token.weight
    with pytest.raises(ValueError, match=r"holds other parameters than a Tied: token.weight has shape \(6, 4\)"):
        load_weights(Tied(5), path)
    with pytest.raises(ValueError, match=r"than a Linear: weight is missing; bias is missing; token.weight is unknown"):
        load_weights(nn.Linear(4, 6), path)
    with pytest.raises(ValueError, match="cannot be read as weights"):
        load_weights(loaded, tmp_path / "none")
    with pytest.raises(ValueError, match="cannot be read as safetensors: there is no such file"):
        load_weights(loaded, tmp_path / "none.safetensors")


def test_weights_in_several_files_load_by_folder_and_by_index(two, tmp_path):
    two.all(begin, two.meeting(), RING, make_task())
    two.all(weights_sha256, str(tmp_path), SMALL)
    expected = tensors_of(tmp_path)
    assert Result({}, tmp_path).weights == tmp_path / WEIGHTS_INDEX
    for where in (tmp_path, str(tmp_path), tmp_path / WEIGHTS_INDEX, f"file://{tmp_path}"):
        loaded = Transformer(MODEL).to(torch.bfloat16)
        load_weights(loaded, where)
        assert all(torch.equal(value, expected[name].bfloat16()) for name, value in loaded.named_parameters())
    moved = shutil.move(tmp_path, tmp_path.with_name("moved"))
    assert StoredWeights.open(moved).shapes == {name: tuple(value.shape) for name, value in expected.items()}


@pytest.mark.parametrize("max_file_bytes", [MAX_FILE_BYTES, SMALL])
def test_hugging_faces_library_loads_the_weights_as_they_lie(two, tmp_path, max_file_bytes):
    hub = pytest.importorskip("huggingface_hub")
    two.all(begin, two.meeting(), RING, make_task())
    two.all(weights_sha256, str(tmp_path), max_file_bytes)
    theirs, ours = Transformer(MODEL), Transformer(MODEL)
    found = hub.load_torch_model(theirs, tmp_path, strict=True, filename_pattern="weights{suffix}.safetensors")
    assert not found.missing_keys
    load_weights(ours, tmp_path)
    for (name, value), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(value, other), name


def test_damaged_weights_are_refused_by_name(two, tmp_path):
    two.all(begin, two.meeting(), RING, make_task())
    two.all(weights_sha256, str(tmp_path), SMALL)
    index, file = tmp_path / WEIGHTS_INDEX, tmp_path / index_of(tmp_path)["weight_map"]["embedding.weight"]
    text, data = index.read_text(), file.read_bytes()
    for damaged in (data[:-4], data + b"\0", b"\xff" * 8 + data[8:], data[:8] + b"[" + data[9:], b""):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=rf"{file.name}: cannot be read as safetensors"):
            load_weights(Transformer(MODEL), tmp_path)
    file.unlink()
    with pytest.raises(ValueError, match=rf"{file.name}: cannot be read as safetensors: there is no such file"):
        load_weights(Transformer(MODEL), tmp_path)
    file.write_bytes(data)
    for wrong, what in (
        (text.replace('"weights/', '"../weights/'), "which is not in its folder"),
        (text.replace('"embedding.weight"', '"other"'), "other is not in weights/"),
        (text[:-9], "cannot be read as an index of weights"),
        ("[]", "cannot be read as an index of weights"),
    ):
        index.write_text(wrong)
        with pytest.raises(ValueError, match=what):
            load_weights(Transformer(MODEL), index)
