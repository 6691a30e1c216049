"""What counts after writers were killed, what stays, and what is removed: in a folder and in a real object store."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex

import pytest

from elastic_ring.cli.checkpoints import main
from elastic_ring.errors import StorageFailed
from elastic_ring.state.checkpoints import checkpoint, retention
from elastic_ring.state.checkpoints.manifest import FORMAT, attempt_folder
from elastic_ring.state.storage.folder import Storage
from tests.object_store.store import ObjectStore
from tests.unit.state.test_checkpoint import damage, save

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(params=["folder", pytest.param("s3", marks=pytest.mark.slow)])
def uri(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "folder":
        return str(tmp_path / "run")
    store: ObjectStore = request.getfixturevalue("object_store")
    store.enter(monkeypatch)
    return f"s3://{store.new_bucket()}/run"


@contextmanager
def writers(uri: str, seed: int) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.unit.state.kill_writers", uri, str(seed)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.slow
def test_of_writers_killed_at_ten_random_moments_only_whole_checkpoints_count_and_prune_removes_the_rest(uri, capsys):
    seed = random.randrange(10**6)
    told: list[int] = []
    storage, num_left = Storage(uri), 0
    with writers(uri, seed) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for _ in range(10):
            process.stdin.write("\n")
            process.stdin.flush()
            told += [int(step) for step in process.stdout.readline().split()]
            steps = [int(folder.split("/")[1].removeprefix("step-")) for folder in checkpoint.committed(storage)]
            assert set(told) <= set(steps), f"seed {seed}: a commit that was told is gone"
            newest = checkpoint.committed(storage)[:1]
            assert [checkpoint.wrong_with(storage, folder) for folder in newest] == [[]] * len(newest)
            left = retention.leftovers(storage, 0.0)
            num_left += bool(left.files or left.uploads)
    assert num_left, f"seed {seed}: no kill came in the middle of a checkpoint"
    save(storage, 1, 1, step=10_000)
    assert main(["verify", uri]) == 0
    assert main(["prune", uri, "--keep-last", "2", "--unfinished-after-s", "0"]) == 0
    kept = [checkpoint.read_manifest(storage, folder) for folder in checkpoint.committed(storage)]
    assert [manifest.step for manifest in kept] == [10_000, max(steps)]
    files = {file.name for manifest in kept for file in manifest.files}
    commits = {f"{checkpoint.step_folder(manifest.step, 1)}/{checkpoint.COMMIT}" for manifest in kept}
    assert {name for name, _ in storage.names()} == files | commits
    assert storage.uploads() == []
    assert len(storage.folders(checkpoint.FOLDER)) == 2, "no empty folder stays"


# ---------------------------------------------------------------- what is whole, and what stays


def test_what_is_not_whole_is_named_and_what_is_whole_is_not(storage):
    manifests = {step: save(storage, 2, 1, step=step) for step in (3, 5, 7, 9)}
    damage(storage, "flipped", manifests[9].files[1].name)
    storage.replace(f"{checkpoint.step_folder(7, 1)}/{checkpoint.COMMIT}", b"{")
    wrong = {folder: checkpoint.wrong_with(storage, folder) for folder in checkpoint.committed(storage)}
    assert [len(wrong[checkpoint.step_folder(step, 1)]) for step in (9, 7, 5, 3)] == [1, 1, 0, 0]
    assert manifests[9].files[1].name in wrong[checkpoint.step_folder(9, 1)][0]


def test_a_newer_format_is_not_passed_over(storage):
    save(storage, 1, 1, step=3)
    newer = dataclasses.replace(save(storage, 1, 1, step=5), format=FORMAT + 1)
    storage.replace(f"{checkpoint.step_folder(5, 1)}/{checkpoint.COMMIT}", newer.to_json())
    with pytest.raises(ValueError, match=r"step-00000005.*newer elastic_ring"):
        checkpoint.wrong_with(storage, checkpoint.step_folder(5, 1))


@pytest.mark.parametrize(
    ("how", "read_bytes"), [("truncated", False), ("missing", False), ("flipped", True), ("flipped", False)]
)
def test_retention_never_removes_the_last_that_is_whole(storage, how, read_bytes):
    for step in (1, 2, 3, 4, 5):
        manifest = save(storage, 1, 1, step=step)
        if step > 2:
            damage(storage, how, manifest.files[0].name)
    # By its size a flipped file is whole: the keeper says which step it has read.
    read_back = 2 if how == "flipped" and not read_bytes else None
    assert retention.prune(storage, 2, 0, read_bytes=read_bytes, read_back=read_back) == [1, 3]
    assert [int(folder[17:25]) for folder in checkpoint.committed(storage)] == [5, 4, 2]
    assert retention.prune(storage, 2, 0, read_bytes=read_bytes, read_back=read_back) == []


def test_retention_is_of_each_lineage(storage):
    for lineage in (1, 2):
        for step in (1, 2, 3):
            save(storage, 1, 1, step=step, lineage=lineage)
    assert retention.prune(storage, 2, 0, lineage=2) == [1]
    assert sorted(retention.prune(storage, 1, 0)) == [1, 2, 2]
    assert storage.folders(checkpoint.FOLDER) == ["step-00000003"]


# ---------------------------------------------------------------- what is left over


def attempt(storage: Storage, step: int, lineage: int = 1) -> str:
    name = f"{attempt_folder(step, lineage, token_hex(8))}/shard-00000-part-00000.safetensors"
    storage.write(name, [b"half"])
    return name


def test_an_attempt_is_left_over_when_another_or_a_newer_one_was_committed_or_nothing_was_added_for_long(storage):
    under_way = attempt(storage, 9)
    save(storage, 1, 1, step=5)
    lost, older = attempt(storage, 5), attempt(storage, 4)
    of_older_lineage = attempt(storage, 100, lineage=0)
    partial = f"{checkpoint.step_folder(4, 1)}/.{checkpoint.COMMIT}.0123abcd"
    storage.replace(partial, b"{")
    storage.replace("checkpoints/notes.txt", b"of somebody else")
    assert {entry.path for entry in retention.leftovers(storage).files} == {lost, older, of_older_lineage, partial}
    found = retention.leftovers(storage, 0.0)
    assert {entry.path for entry in found.files} == {lost, older, of_older_lineage, partial, under_way}
    assert found.num_bytes == 4 * 4 + 1
    retention.remove_leftovers(storage, found, 0.0)
    assert retention.leftovers(storage, 0.0) == retention.Leftovers()
    assert "checkpoints/notes.txt" in dict(storage.names())
    assert storage.folders(checkpoint.FOLDER) == ["step-00000005"]
    assert [checkpoint.wrong_with(storage, folder) for folder in checkpoint.committed(storage)][:1] in ([], [[]])


@pytest.mark.parametrize("ahead_s", [-7200.0, 7200.0])
def test_how_long_nothing_was_added_is_by_the_clock_of_the_storage_and_not_of_this_host(tmp_path, monkeypatch, ahead_s):
    storage, real = Storage(str(tmp_path)).open(), time.time
    under_way, old = attempt(storage, 9), attempt(storage, 7)
    (tmp_path / "checkpoints/step-00000008").mkdir()
    os.utime(tmp_path / old, (real() - 4000.0,) * 2)
    monkeypatch.setattr(time, "time", lambda: real() + ahead_s)
    left = retention.leftovers(storage)
    assert [entry.path for entry in left.files] == [old]
    retention.remove_leftovers(storage, left)
    assert [*dict(storage.names())] == [under_way]
    kept = ["step-00000007", "step-00000008", "step-00000009"]
    assert storage.folders("checkpoints") == kept, "a run may begin to write into one that has just become empty"


def test_on_a_full_disk_what_a_newer_checkpoint_replaces_is_removed_and_nothing_counts_as_old(tmp_path, monkeypatch):
    storage = Storage(str(tmp_path)).open()
    replaced, _ = attempt(storage, 3), save(storage, 1, 1, step=5)
    under_way = attempt(storage, 9)
    os.utime(tmp_path / under_way, (1.0, 1.0))

    def full(*_: object, **__: object) -> None:
        raise StorageFailed("no space left")

    monkeypatch.setattr(Storage, "replace", full)
    left = retention.leftovers(storage)
    assert [entry.path for entry in left.files] == [replaced]
    retention.remove_leftovers(storage, left)
    assert replaced not in dict(storage.names())


def test_what_was_set_aside_stays_until_it_is_asked_for(storage, capsys):
    save(storage, 1, 1, step=3)
    wrong = save(storage, 1, 1, step=5)
    checkpoint.set_aside(storage, checkpoint.step_folder(5, 1), ["a byte is wrong"])
    save(storage, 1, 1, step=5)  # again, and right
    assert retention.leftovers(storage, 0.0) == retention.Leftovers()
    (found,) = retention.set_aside_checkpoints(storage)
    assert found == retention.SetAside(checkpoint.step_folder(5, 1), ("a byte is wrong",), wrong.num_bytes)
    assert main(["prune", storage.uri]) == 0
    assert retention.set_aside_checkpoints(storage) == [found]
    assert main(["prune", storage.uri, "--rejected"]) == 0
    assert retention.set_aside_checkpoints(storage) == []
    assert wrong.files[0].name not in dict(storage.names())
    assert [checkpoint.wrong_with(storage, folder) for folder in checkpoint.committed(storage)][:1] in ([], [[]])
    assert len(checkpoint.committed(storage)) == 2


@pytest.mark.parametrize("named", ["../precious", "{}/../../../../../precious", "{}/..", "{}", "", "{}/other", "/", 7])
def test_what_a_record_names_is_removed_only_where_it_is_an_attempt_of_its_own_step(storage, named):
    """Records and manifests may be a stranger's: what they name must not go with them."""
    folder = checkpoint.step_folder(5, 1)
    precious = Path(storage.root).parent / "precious" / "thesis.tex"
    precious.parent.mkdir()
    precious.write_text("years of work")
    save(storage, 1, 1, step=3)
    name = named.format(folder) if isinstance(named, str) else named
    record = json.dumps({"reasons": ["mine"], "manifest": json.dumps({"folder": name})})
    storage.replace(f"{folder}/0-{checkpoint.REJECTED}", record.encode())
    storage.replace(f"{folder}/other/kept", b"")
    before = dict(storage.names(checkpoint.FOLDER))
    assert retention.set_aside_checkpoints(storage)[0].num_bytes == 0
    assert main(["prune", storage.uri, "--rejected"]) == 0
    assert precious.read_text() == "years of work"
    assert set(before) - set(dict(storage.names(checkpoint.FOLDER))) == {f"{folder}/0-{checkpoint.REJECTED}"}
