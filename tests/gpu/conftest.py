"""Everything here needs a CUDA device and is skipped without one."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

WORKER = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
if WORKER:  # several processes share the GPUs evenly; before CUDA begins
    os.environ["CUDA_VISIBLE_DEVICES"] = str(int(WORKER) % max(1, torch.cuda.device_count()))


@pytest.fixture(autouse=True)
def memory_for_the_other_processes() -> Iterator[None]:
    yield
    if WORKER:
        torch.cuda.empty_cache()


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
