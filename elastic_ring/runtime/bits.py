"""What the bits of a result depend on besides its inputs: found out by each worker, compared by `runtime.recoveries`;
and the versions of a run, for its records.

A promise of equal bits is worth what was looked at. No decision is made here.
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
from typing import Any

import torch

from elastic_ring.config import environment

_DRIVER_FILES = (Path("/proc/driver/nvidia/version"), Path("/sys/module/nvidia/version"))
_VERSION = re.compile(r"\b\d+\.\d+(?:\.\d+)?\b")
_PACKAGES = ("flash-attn-4", "flash-attn", "nvidia-cutlass-dsl", "triton", "nvidia-cublas", "nvidia-cublas-cu12")
_VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO", "NCCL_PROTO", "NCCL_NVLS_ENABLE", "NCCL_MIN_NCHANNELS",
    "NCCL_MAX_NCHANNELS", "NCCL_COLLNET_ENABLE", "NCCL_TOPO_FILE", "NCCL_GRAPH_FILE", "NVIDIA_TF32_OVERRIDE",
)  # fmt: skip
"""Of the environment: what can change the order in which numbers are added up, or the type in which."""
_WORDS = "deterministic implementation|non-?deterministic|not deterministic"
_NOT_REPEATABLE = re.compile(_WORDS, re.IGNORECASE)
_AFTERWARDS = re.compile(r", but\b|\. |\(Triggered|\n")


def environment_of_bits(num_threads: int, gpus: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What the bits of a result depend on besides its inputs: equal on two machines, equal results. `gpus`: as of
    `gpu_environment`, where there are any."""
    return {
        "torch": torch.__version__, "cpu": torch.backends.cpu.get_cpu_capability(), "machine": platform.machine(),
        "mkl": torch.backends.mkl.is_available(), "num_threads": num_threads,
        **(gpus or {}),
    }  # fmt: skip


def gpu_environment(kernels: Mapping[str, str]) -> dict[str, Any]:
    """Of a worker on GPUs: the chips, the driver, the libraries, and `kernels`, by what each is used for."""
    names = {torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())}
    return {
        "gpu": ", ".join(sorted(names)), **gpu_versions(),
        "cudnn": torch.backends.cudnn.version(), **packages(), **variables(environment()), **kernels,
    }  # fmt: skip


def versions(device: str) -> dict[str, str]:
    """What a run on this kind of device is run with, as this process finds it; what is not here is left out."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name, distribution in (("elastic_ring", "elastic-ring"), ("ray", "ray")):
        with suppress(metadata.PackageNotFoundError):  # a checkout that is not installed has no version
            found[name] = metadata.version(distribution)
    if device == "cuda":
        found.update((name, version) for name, version in gpu_versions().items() if version)
    return dict(sorted(found.items()))


def gpu_versions() -> dict[str, str]:
    """Of CUDA, the driver and NCCL; empty for what this machine, or this build of torch, has not."""
    has_nccl = torch.distributed.is_nccl_available()
    return {
        "driver": driver_version([_text(path) for path in _DRIVER_FILES]), "cuda": str(torch.version.cuda or ""),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else "",
    }


def driver_version(texts: list[str]) -> str:
    """The first version named in what the kernel's module says of itself; empty where none is."""
    return next((found.group() for text in texts if (found := _VERSION.search(text))), "")


def packages() -> dict[str, str]:
    """The versions of installed packages that kernels come from; a package that is missing is left out."""
    found = {}
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def variables(of: Mapping[str, str]) -> dict[str, str]:
    return {name: of[name] for name in _VARIABLES if name in of}


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


class Oddities(logging.Filter):
    """Hears torch's warnings of operators that have no repeatable form, each once, and leaves each in the log once.

    Models with such an operator train; but their bits do not come again, and that is to be told.
    """

    def __init__(self) -> None:
        super().__init__()
        self._known: set[str] = set()
        self._new: list[str] = []

    def listen(self) -> None:
        """From now on, in the whole process: warnings go to the log."""
        logging.captureWarnings(True)
        warnings.filterwarnings("always", message=f".*(?:{_WORDS})")
        logging.getLogger("py.warnings").addFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if not _NOT_REPEATABLE.search(text):
            return True
        told = _AFTERWARDS.split(text.partition("Warning: ")[2] or text)[0]  # without the place in the code
        if told in self._known:
            return False
        self._known.add(told)
        self._new.append(told)
        return True

    def take(self) -> list[str]:
        """What was heard since the last time."""
        heard, self._new = self._new, []
        return heard
