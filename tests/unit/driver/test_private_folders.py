"""Folders whose names can be foreseen, on a host with other users: made for one user alone, or refused."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from elastic_ring.cli import train
from elastic_ring.config import RunConfig, environment
from elastic_ring.files import private_folder, user_folder
from elastic_ring.integrations.ray_train import ops
from elastic_ring.integrations.ray_train.run_records import Records
from elastic_ring.integrations.ray_train.settings import Zero3Config
from elastic_ring.runtime.gpu import device

PLACES: dict[str, Callable[[], Path]] = {
    "a coordinator's records of a run on an object store": lambda: RunConfig("r", storage_path="s3://b/runs").folder,
    "a driver's": lambda: RunConfig("r", storage_path="s3://b/runs").driver_folder,
    "NVMe swap": lambda: Zero3Config().swap_folder,
}
CACHES: dict[str, Callable[[], Path]] = {
    "proofs of kernels": lambda: device.kernel_cache() or Path("none"),
    "compiled kernels": lambda: compiled(),
}
ALL = {**PLACES, **CACHES}


def compiled() -> Path:
    device.keep_caches_private()
    return Path(environment()["TORCHINDUCTOR_CACHE_DIR"])


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host's folders for temporary files and for shared memory, and no word of the user's own on caches."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(device, "SHARED_MEMORY", tmp_path)
    for name in device.COMPILERS:
        monkeypatch.setitem(environment(), name, "")
        monkeypatch.delitem(environment(), name)
    return tmp_path


@pytest.mark.parametrize("place", ALL.values(), ids=list(ALL))
def test_each_place_is_inside_a_folder_of_this_user_alone(shared, place):
    before = os.umask(0)
    try:
        where = place()
        where.mkdir(parents=True, exist_ok=True)
    finally:
        os.umask(before)
    top = shared / where.relative_to(shared).parts[0]
    assert top == user_folder(shared)
    assert stat.filemode(top.stat().st_mode) == "drwx------"
    assert place() == where, "and it is found again"


def _submitted(folder: Path) -> None:
    train.build(train.parse(["--run-dir", str(folder)])).submission().write_record()


RUN_FOLDERS: dict[str, Callable[[Path], object]] = {
    "a driver's": _submitted,
    "ZeRO-3's": Records,
    "NVMe swap of one's own": ops.check_swap_folder,
}


@pytest.mark.parametrize("make", RUN_FOLDERS.values(), ids=list(RUN_FOLDERS))
def test_a_run_s_new_folder_is_of_one_user_and_one_that_is_there_keeps_its_mode(tmp_path, make):
    (tmp_path / "open").mkdir(0o755)
    before = os.umask(0o022)
    try:
        for name in ("runs/new", "open"):
            with suppress(ValueError):  # of a file system without direct I/O
                make(tmp_path / name)
    finally:
        os.umask(before)
    modes = {name: stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("runs", "runs/new", "open")}
    assert modes == {"runs": 0o755, "runs/new": 0o700, "open": 0o755}


@pytest.mark.parametrize("place", PLACES.values(), ids=list(PLACES))
def test_a_link_that_somebody_planted_there_is_refused(shared, place):
    (shared / "precious").mkdir(mode=0o700)
    (shared / f"elastic_ring-{os.geteuid()}").symlink_to(shared / "precious")
    with pytest.raises(ValueError, match=r"not a folder of this user alone.*remove it, .*or set TMPDIR"):
        place().mkdir(parents=True, exist_ok=True)
    assert not list((shared / "precious").iterdir())


def test_a_planted_name_costs_a_cache_and_no_worker(shared, caplog, monkeypatch):
    (shared / f"elastic_ring-{os.geteuid()}").mkdir(mode=0o755)
    assert device.kernel_cache() is None
    own = compiled().parent
    assert (own.parent, own.stat().st_mode & 0o777) == (shared, 0o700)
    assert {Path(environment()[name]).parent for name in device.COMPILERS} == {own}
    assert len(caplog.records) == 2
    monkeypatch.setattr(device, "user_folder", lambda *_: pytest.fail("every variable is set"))
    assert compiled().parent == own


def test_the_way_out_is_one_for_that_folder(tmp_path, monkeypatch):
    (tmp_path / "shm" / f"elastic_ring-{os.geteuid()}").mkdir(parents=True, mode=0o755)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    with pytest.raises(ValueError, match=r"remove it, or have its owner or root do so$"):
        user_folder(tmp_path / "shm")


def test_a_folder_that_is_anothers_or_open_to_others_is_refused(tmp_path):
    folder = private_folder(tmp_path / "own")
    assert private_folder(folder) == folder
    for mode in (0o710, 0o702, 0o1777):
        folder.chmod(mode)
        with pytest.raises(ValueError, match="not a folder of this user alone"):
            private_folder(folder)
    folder.chmod(0o700)
    if os.getuid() == 0:
        os.chown(folder, 65534, 65534)
        with pytest.raises(ValueError, match="owner 65534"):
            private_folder(folder)
    (tmp_path / "file").touch(mode=0o600)
    with pytest.raises(ValueError, match="not a folder of this user alone"):
        private_folder(tmp_path / "file")
