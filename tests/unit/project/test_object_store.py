"""The object store of the tests starts once a session, ends with it, and is not skipped in silence."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
CONFTEST = "from tests.object_store.store import object_store"
MODULE = """
import os
from pathlib import Path

def test_it_answers(object_store):
    object_store.new_bucket()
    pid = (object_store.folder / f"gateway-{object_store.port}.pid").read_text()
    (Path(__file__).parent / os.environ["PYTEST_XDIST_WORKER"]).write_text(f"{object_store.folder} {pid}")
"""


def session(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text(CONFTEST)
    for number in range(2):
        (folder / f"test_{number}.py").write_text(MODULE)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": "", **variables}
    for name in {"PYTEST_XDIST_WORKER", "ELASTIC_RING_CI"} - variables.keys():
        environment.pop(name, None)
    command = [sys.executable, "-m", "pytest", "-q", "-rs", f"--rootdir={folder}", "-p", "no:cacheprovider", *arguments]
    return subprocess.run([*command, str(folder)], env=environment, capture_output=True, text=True, timeout=200)


@pytest.mark.slow
@pytest.mark.thinned(num=1)
@pytest.mark.parametrize(("ci", "told"), [({"ELASTIC_RING_CI": "1"}, "2 errors"), ({}, "2 skipped")])
def test_without_its_packages_ci_fails_and_others_are_told_why_tests_are_skipped(tmp_path, ci, told):
    done = session(tmp_path, PATH=str(tmp_path), **ci)
    assert told in done.stdout
    assert "apt-get install --no-install-recommends radosgw" in done.stdout
    assert (done.returncode == 0) is not bool(ci)


@pytest.mark.slow
def test_processes_of_one_session_share_it_and_it_ends_with_them(tmp_path, object_store):
    done = session(tmp_path, "-n", "2", "--dist", "load")
    assert "2 passed" in done.stdout, done.stdout
    (found,) = {(tmp_path / name).read_text() for name in ("gw0", "gw1")}
    folder, pid = found.split()
    assert Path(folder) != object_store.folder
    limit = time.monotonic() + 30
    while Path(folder).exists() or Path(f"/proc/{pid}/environ").exists():
        assert time.monotonic() < limit, f"{folder} or process {pid} is still there"
        time.sleep(0.2)
    assert object_store.new_bucket(), "that of this session runs"
