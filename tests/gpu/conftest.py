"""Everything here needs a CUDA device and is skipped without one."""

from __future__ import annotations

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "tests/gpu/" in item.nodeid:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
