"""Fixtures that several rooms' tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_ring.state.storage.folder import Storage
from tests.object_store.proxy import FaultyProxy, faulty_proxy
from tests.object_store.store import ObjectStore
from tests.unit.attention.attention_rings import ThreadRings, one_thread


@pytest.fixture(scope="module")
def rings() -> Iterator[ThreadRings]:
    """Gloo groups of threads, of every size, on one core."""
    with one_thread():
        yield ThreadRings()


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    """A run's folder."""
    return Storage(str(tmp_path / "run")).open()


@pytest.fixture
def proxy(object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """Between this process and the object store; `fault` says which requests fail, and how."""
    with faulty_proxy(object_store.port) as proxy:
        object_store.enter(monkeypatch, AWS_ENDPOINT_URL=proxy.endpoint)
        yield proxy
