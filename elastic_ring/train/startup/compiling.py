"""Compiling outside the steps: find a compiler, compile the model while a worker warms up, count later compilations.

No step and no model in here; the model decides what is compiled (`model.fused_ops`).
"""

from __future__ import annotations

import logging
import re
import shutil
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from elastic_ring.config import environment
from elastic_ring.data.sampling.order import pass_sizes
from elastic_ring.train.memory import is_out_of_memory
from elastic_ring.train.startup.compile_events import EVENTS
from elastic_ring.train.startup.layouts import Layouts
from elastic_ring.train.task import TrainingTask

log = logging.getLogger(__name__)

WAY_OUT = "or train without: compile_blocks=False, no --compile"
REASON_CHARACTERS = 400


Find = Callable[[str], str | None]
"""Names what is missing to compile for a device, 'cpu' or 'cuda', and how to install it; None if nothing is."""


def find_compiler(device: str) -> str | None:
    """torch.compile writes C++ for a CPU, and Triton for a GPU, whose launcher is compiled from C. Both need Python's
    headers."""
    if device == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler

        try:
            get_cpp_compiler()
        except Exception as error:  # the type differs between versions of torch
            return f"there is no C++ compiler ({type(error).__name__}): install g++, or name one in CXX"
    else:
        from torch.utils._triton import has_triton_package

        if not has_triton_package():
            return "there is no Triton: install the triton package of this torch"
        named = environment().get("CC")
        if not any(shutil.which(name) for name in ([named] if named else ["gcc", "clang"])):
            return "there is no C compiler, which Triton needs: install gcc, or name one in CC"
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        return "there is no Python.h: install Python's development files"
    return None


def check_compiler(device: str, find: Find = find_compiler) -> None:
    """Raises ValueError where `find` says that nothing can be compiled for `device`."""
    missing = find(device)
    if missing is not None:
        raise ValueError(f"compile_blocks=True on device={device!r}: {missing}; {WAY_OUT}")


def compiles(task: TrainingTask) -> bool:
    """Whether some part of the model asks for torch.compile, by an attribute `compile_blocks`."""
    with torch.device("meta"):
        return any(getattr(module, "compile_blocks", False) for module in task.model().modules())


def check_compiles(task: TrainingTask, device: str, find: Find = find_compiler) -> None:
    """`check_compiler` for a task whose model asks for it."""
    if compiles(task):
        check_compiler(device, find)


def compiled_by(task: TrainingTask, device: str) -> dict[str, str]:
    """The compilers that determine the bits of compiled code, by name; empty where nothing is compiled."""
    if not compiles(task):
        return {}
    if device != "cpu":
        import triton

        return {"compiler": f"triton {triton.__version__}"}  # the package's name is not the same everywhere
    from torch._inductor.cpp_builder import get_compiler_version_info, get_cpp_compiler

    described = str(get_compiler_version_info(get_cpp_compiler()))
    version = re.search(r"(gcc|clang) version [^_]+", described)
    return {"compiler": version[0] if version else described}


def slice_lengths(task: TrainingTask, cp: int, device_type: str) -> tuple[int, ...]:
    """The different numbers of tokens that a rank of a ring may hold in a pass, ascending."""
    layout, sizes = Layouts(task).choice(cp, device_type).layout, pass_sizes(task.step)
    return tuple(sorted({layout.num_tokens(cp_rank) * size for cp_rank in range(cp) for size in sizes} - {0}))


def warm_up_model(task: TrainingTask, device: torch.device, cp: int, find: Find = find_compiler) -> None:
    """Compile the model's kernels now, on `device`, for every slice length that a place on the ring may get.

    Calls the model's `warm_up_kernels(lengths, device, dtype, validates=...)`, if it has one. Raises ValueError where
    no compiler works. Running out of memory on a shared GPU is not an error: the first step compiles then, and logs it.
    """
    if not compiles(task):
        return
    check_compiler(device.type, find)
    with torch.device("meta"):
        model = task.model()
    warm_up_kernels: Callable[..., None] | None = getattr(model, "warm_up_kernels", None)
    if warm_up_kernels is None:
        log.warning(
            "%s compiles parts of itself and has no warm_up_kernels(): the first step compiles", type(model).__name__
        )
        return
    begun, watch, lengths = time.monotonic(), CompileWatch(), slice_lengths(task, cp, device.type)
    dtype = getattr(torch, task.step.param_dtype)
    try:
        with torch.enable_grad():
            warm_up_kernels(lengths, device, dtype, validates=bool(task.step.val_every_steps))
    except Exception as error:
        if is_out_of_memory(error):
            log.warning("%s: too little memory to compile beside others, the first step will: %s", device, error)
        elif isinstance(error, torch._dynamo.exc.TorchDynamoException | torch._inductor.exc.CppCompileError):
            told = str(error).strip().split("\n\n")[0]
            raise ValueError(
                f"compile_blocks=True on device={device.type!r}: torch.compile failed ({told}); {WAY_OUT}"
            ) from error
        else:
            raise
    log.info(
        "%s: compiled %d functions for slices of %s tokens in %.1f s",
        device,
        len(watch.news()),
        lengths,
        time.monotonic() - begun,
    )


class CompileWatch:
    """Counts what this process compiles from now on: flash-attn-4's and Triton's kernels and torch.compile's functions.

    A kernel that is loaded from its compiler's cache on disk counts too: the process had not met that variant before.
    """

    def __init__(self) -> None:
        EVENTS.attach()
        self.count = 0
        self._num_events = len(EVENTS.names)
        self._num_graphs = _num_graphs()
        self._since_us = time.time_ns() // 1000

    def news(self) -> list[str]:
        """The name of each kernel and function compiled since the last call; for a function of torch.compile also why
        what was compiled before did not fit."""
        EVENTS.attach()
        kernels = EVENTS.names[self._num_events :]
        self._num_events += len(kernels)
        found = [*kernels, *self._functions()]
        self.count += len(found)
        return found

    def _functions(self) -> list[str]:
        number, since_us = _num_graphs() - self._num_graphs, self._since_us
        if number <= 0:
            return []
        self._num_graphs, self._since_us = self._num_graphs + number, time.time_ns() // 1000
        found = [
            _describe(entry)
            for entry in torch._dynamo.utils.get_compilation_metrics()
            if entry.is_forward is not False and not entry.is_runtime and (entry.start_time_us or 0) >= since_us
        ]
        return found if len(found) == number else [*found[:number], *["?"] * (number - len(found))]


def report_compiled(watch: CompileWatch, step: int) -> list[str]:
    """What was compiled since the last call, with one warning: a step that compiles is slow, and every rank waits."""
    news = watch.news()
    if news:
        log.warning("step %d compiled %d more: %s; the warm-up did not cover it", step, len(news), "; ".join(news))
    return news


def _describe(entry: Any) -> str:
    reason = " ".join((entry.recompile_reason or "for the first time").split())
    return f"{entry.co_name} ({reason[:REASON_CHARACTERS]})"


def _num_graphs() -> int:
    dynamo = _dynamo()
    return 0 if dynamo is None else int(dynamo.utils.counters["stats"]["unique_graphs"])


def _dynamo() -> Any:
    """torch's compiler if anything has loaded it: where nothing has, nothing was compiled."""
    return sys.modules.get("torch._dynamo")
