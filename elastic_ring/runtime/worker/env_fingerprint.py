"""The environment that bitwise results depend on, besides the inputs, and the versions for a run's records.

No decision is made here.
"""

from __future__ import annotations

import logging
import platform
import re
import warnings
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import torch

from elastic_ring.config import environment

_DRIVER_FILES = (Path("/proc/driver/nvidia/version"), Path("/sys/module/nvidia/version"))
_VERSION = re.compile(r"\b\d+\.\d+(?:\.\d+)?\b")
_PACKAGES = (
    "flash-attn-4",
    "flash-attn",
    "liger-kernel",
    "nvidia-cutlass-dsl",
    "triton",
    "nvidia-cublas",
    "nvidia-cublas-cu12",
)
_VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NCCL_NVLS_ENABLE",
    "NCCL_MIN_NCHANNELS",
    "NCCL_MAX_NCHANNELS",
    "NCCL_COLLNET_ENABLE",
    "NCCL_TOPO_FILE",
    "NCCL_GRAPH_FILE",
    "NVIDIA_TF32_OVERRIDE",
)
"""Environment variables that can change the order or the precision of sums."""
Environment = dict[str, str | int | None]
_WORDS = "deterministic implementation|non-?deterministic|not deterministic"
_NOT_REPEATABLE = re.compile(_WORDS, re.IGNORECASE)
_AFTERWARDS = re.compile(r", but\b|\. |\(Triggered|\n")


def environment_fingerprint(num_threads: int, gpus: Mapping[str, str | int | None] | None = None) -> Environment:
    """The environment that decides bits besides the inputs: if equal on two machines, results are equal. `gpus`: of
    `gpu_environment`, on a machine that has some."""
    return {
        "torch": torch.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "machine": platform.machine(),
        "mkl": torch.backends.mkl.is_available(),
        "num_threads": num_threads,
        **(gpus or {}),
    }


def gpu_environment(kernels: Mapping[str, str]) -> Environment:
    """The GPUs, the driver, the libraries, and `kernels` by their use, for a worker on GPUs."""
    names = {torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())}
    return {
        "gpu": ", ".join(sorted(names)),
        **gpu_versions(),
        "cudnn": torch.backends.cudnn.version(),
        **packages(),
        **variables(environment()),
        **kernels,
    }


def versions(device: str) -> dict[str, str]:
    """Versions that a run on this kind of device uses, as found in this process; missing ones are left out."""
    present = {"python": platform.python_version(), "torch": torch.__version__}
    for name, distribution in (("elastic_ring", "elastic-ring"), ("ray", "ray")):
        with suppress(metadata.PackageNotFoundError):  # a checkout that is not installed has no version
            present[name] = metadata.version(distribution)
    if device == "cuda":
        present.update((name, version) for name, version in gpu_versions().items() if version)
    return dict(sorted(present.items()))


def gpu_versions() -> dict[str, str]:
    """Versions of CUDA, the driver and NCCL; empty strings for the missing ones."""
    has_nccl, texts = torch.distributed.is_nccl_available(), []
    for path in _DRIVER_FILES:
        with suppress(OSError):
            texts.append(path.read_text(errors="replace"))
    return {
        "driver": driver_version(texts),
        "cuda": str(torch.version.cuda or ""),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else "",
    }


def driver_version(texts: list[str]) -> str:
    """The first version number in the texts of the kernel module; empty if there is none."""
    return next((match.group() for text in texts if (match := _VERSION.search(text))), "")


def variables(of: Mapping[str, str]) -> dict[str, str]:
    return {name: of[name] for name in _VARIABLES if name in of}


def packages() -> dict[str, str]:
    """Versions of the installed packages that provide kernels."""
    present = {}
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            present[name] = metadata.version(name)
    return present


class NondeterminismLog(logging.Filter):
    """Collects torch's warnings about operators without a deterministic form, and logs each once.

    Models with such an operator train, but are not bit-exact, which the run reports.
    """

    def __init__(self) -> None:
        super().__init__()
        self._logged: set[str] = set()
        self._new: list[str] = []

    def listen(self) -> None:
        """Send warnings of the whole process to the log, and filter them."""
        logging.captureWarnings(True)
        warnings.filterwarnings("always", message=f".*(?:{_WORDS})")
        logging.getLogger("py.warnings").addFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if not _NOT_REPEATABLE.search(text):
            return True
        operator = _AFTERWARDS.split(text.partition("Warning: ")[2] or text)[0]  # without the source location
        if operator in self._logged:
            return False
        self._logged.add(operator)
        self._new.append(operator)
        return True

    def take(self) -> list[str]:
        """The warnings since the last call."""
        new, self._new = self._new, []
        return new
