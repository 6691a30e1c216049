"""Everything here needs a CUDA device and is skipped without one."""

from __future__ import annotations

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/gpu/" not in item.nodeid:
            continue
        # The kernels' compilers warn of their own deprecations, which are not errors of ours.
        item.add_marker(pytest.mark.filterwarnings("default"))
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
