"""What is said of a machine and of its operators, so that a promise of equal bits is worth something."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from importlib import metadata

import pytest
import torch

from elastic_ring.runtime.worker import env_fingerprint
from elastic_ring.runtime.worker.env_fingerprint import (
    NondeterminismLog,
    driver_version,
    environment_fingerprint,
    packages,
    variables,
    versions,
)


@pytest.fixture
def nondeterminism_log() -> Iterator[NondeterminismLog]:
    heard = NondeterminismLog()
    with warnings.catch_warnings():
        heard.listen()
        torch.use_deterministic_algorithms(True, warn_only=True)
        yield heard
    torch.use_deterministic_algorithms(False)
    logging.getLogger("py.warnings").removeFilter(heard)
    logging.captureWarnings(False)


def test_an_operator_without_a_repeatable_form_is_heard_once_and_logged_once(
    nondeterminism_log: NondeterminismLog, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        torch.zeros(4).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))
    assert nondeterminism_log.take() == ["put_ does not have a deterministic implementation"]
    assert len([record for record in caplog.records if "put_" in record.getMessage()]) == 1
    torch.zeros(4).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))
    assert nondeterminism_log.take() == []


def test_one_in_a_backward_pass_is_heard_though_all_of_these_come_from_one_place(
    nondeterminism_log: NondeterminismLog,
) -> None:
    for name in ("first", "second"):
        warnings.warn(f"{name}_backward_cuda does not have a deterministic implementation, but", stacklevel=1)
    warnings.warn("Memory Efficient attention defaults to a non-deterministic algorithm. To", stacklevel=1)
    warnings.filterwarnings("default", message="of another kind")
    warnings.warn("of another kind", stacklevel=1)
    assert nondeterminism_log.take() == [
        "first_backward_cuda does not have a deterministic implementation",
        "second_backward_cuda does not have a deterministic implementation",
        "Memory Efficient attention defaults to a non-deterministic algorithm",
    ]


@pytest.mark.parametrize(
    ("texts", "version"),
    [
        (["NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Mon Jan 27 03:40:10 2025\n", "1.2"], "570.86.15"),
        (["NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build"], "580.65.06"),
        (["", "570.86.15\n"], "570.86.15"),
        (["", ""], ""),
    ],
)
def test_the_driver_is_what_its_module_says(texts: list[str], version: str) -> None:
    assert driver_version(texts) == version


def test_packages_and_variables_are_those_that_kernels_and_sums_depend_on() -> None:
    found = packages()
    assert all(metadata.version(name) == version for name, version in found.items())
    assert variables({"NCCL_ALGO": "Ring", "NCCL_DEBUG": "INFO", "HOME": "x"}) == {"NCCL_ALGO": "Ring"}


def test_two_machines_differ_where_their_gpus_do() -> None:
    same, other = ({"gpu": name, "nccl": "2.28.9", "attention": "flash 1.0"} for name in ("one", "two"))
    assert (
        environment_fingerprint(1, same) == environment_fingerprint(1, dict(same)) != environment_fingerprint(1, other)
    )
    assert "gpu" not in environment_fingerprint(1)


def test_versions_are_those_of_what_is_installed_here() -> None:
    assert {**versions("cpu"), "elastic_ring": ""} == {
        "elastic_ring": "",
        "python": ".".join(map(str, sys.version_info[:3])),
        "ray": metadata.version("ray"),
        "torch": torch.__version__,
    }


def test_versions_leave_out_what_is_not_here_and_ask_for_the_gpus_where_there_are_any(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def installed(distribution: str) -> str:
        if distribution == "elastic-ring":
            raise metadata.PackageNotFoundError(distribution)
        return f"{distribution} 9.9"

    monkeypatch.setattr(env_fingerprint.metadata, "version", installed)
    monkeypatch.setattr(env_fingerprint, "gpu_versions", lambda: {"driver": "580.1", "cuda": "13.0", "nccl": ""})
    on_cpus = {"python": ".".join(map(str, sys.version_info[:3])), "ray": "ray 9.9", "torch": torch.__version__}
    assert versions("cpu") == on_cpus
    assert versions("cuda") == {**on_cpus, "driver": "580.1", "cuda": "13.0"}
    assert list(versions("cuda")) == ["cuda", "driver", "python", "ray", "torch"]
