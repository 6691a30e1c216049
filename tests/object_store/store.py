"""The object store of the tests: a real one, Ceph's gateway, started once a session by `ceph.sh`.

Under pytest-xdist its processes share the store: the first one that asks starts it, and it ends with the process that
controls them, whichever way that ends. Without the packages the tests fail where ELASTIC_RING_CI is set; elsewhere they
are skipped.
"""

from __future__ import annotations

import fcntl
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("ceph.sh")
PROGRAMS = ("radosgw", "ceph-mon", "ceph-osd")
INSTALL = "apt-get install --no-install-recommends radosgw ceph-mon ceph-osd"
KEY = "elastic-ring"


@dataclass
class ObjectStore:
    """A gateway of the store in `folder`. Others of the same store may run beside it."""

    folder: Path
    port: int
    _owner: list[str] = field(default_factory=list)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """What a client's process needs, of any language."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": KEY,
            "AWS_REGION": "us-east-1",
        }

    def enter(self, patch: pytest.MonkeyPatch, **more: str) -> None:
        """This process, and those that it starts, are clients with these variables more."""
        for name, value in {**self.environment, **more}.items():
            patch.setenv(name, value)

    def client(self) -> Any:
        """One of our own, to prepare and to look behind the code under test."""
        from botocore.config import Config
        from botocore.session import Session

        return Session().create_client(
            "s3",
            endpoint_url=self.endpoint,
            region_name="us-east-1",
            aws_access_key_id=KEY,
            aws_secret_access_key=KEY,
            config=Config(request_checksum_calculation="when_required"),
        )

    def new_bucket(self) -> str:
        """A bucket that nobody else uses."""
        name = f"test-{secrets.token_hex(6)}"
        self.client().create_bucket(Bucket=name)
        return name

    def start(self) -> None:
        """Start what does not run."""
        command = [str(SCRIPT), "start", str(self.folder), str(self.port), *self._owner]
        done = subprocess.run(command, capture_output=True, text=True, timeout=180)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"

    def kill(self) -> None:
        """SIGKILL to this gateway."""
        os.kill(int((self.folder / f"gateway-{self.port}.pid").read_text()), signal.SIGKILL)

    def stop(self) -> None:
        """End all processes of the store."""
        subprocess.run([str(SCRIPT), "stop", str(self.folder)], check=True, timeout=60)

    def another_gateway(self) -> ObjectStore:
        """A gateway of the same store for one test, which may kill it."""
        found = ObjectStore(self.folder, free_ports(1))
        found.start()
        return found


def free_ports(num_ports: int) -> int:
    """The first of so many free ports, below those from which the kernel takes the ends of connections."""
    for first in random.sample(range(21_000, 30_000), 100):
        try:
            for port in range(first, first + num_ports):
                with socket.socket() as found:
                    found.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first
    raise AssertionError("100 ports in a row are taken")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def shared_store(folder: Path, session_pid: int) -> ObjectStore:
    """The session's store, started if this is the first process that asks."""
    with locked(folder / "object-store.lock"):
        record = folder / "object-store.port"
        if not record.exists():
            store = ObjectStore(folder / "object-store", free_ports(2), [str(session_pid)])
            store.start()
            record.write_text(str(store.port))
        return ObjectStore(folder / "object-store", int(record.read_text()))


@pytest.fixture(scope="session")
def object_store(tmp_path_factory: pytest.TempPathFactory) -> ObjectStore:
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        reason = f"no {', '.join(missing)} here, which the tests on an object store need: {INSTALL}"
        if "ELASTIC_RING_CI" in os.environ:
            pytest.fail(reason)
        pytest.skip(reason)
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        return shared_store(folder.parent, os.getppid())
    return shared_store(folder, os.getpid())
