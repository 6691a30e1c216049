"""Fixtures that several rooms' tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.attention.attention_rings import ThreadRings, one_thread


@pytest.fixture(scope="module")
def rings() -> Iterator[ThreadRings]:
    """Gloo groups of threads, of every size, on one core."""
    with one_thread():
        yield ThreadRings()
