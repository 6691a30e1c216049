"""Everything here needs a CUDA device and is skipped without one."""

from __future__ import annotations

import pytest
import torch


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/gpu/" not in item.nodeid:
            continue
        item.add_marker(pytest.mark.gpu)
        # The kernels' compilers warn of their own deprecations, which are not errors of ours.
        item.add_marker(pytest.mark.filterwarnings("default"))
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
