"""Builds a submission's `TrainingTask` from a trainer's arguments, and checks it before anything starts.

Asked by every door: the trainer, ZeRO-3, the drills. Nothing that needs a Ray cluster belongs here.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, BinaryIO

import ray
from ray import cloudpickle

from elastic_ring.attention.kernels.registry import covering
from elastic_ring.attention.patterns.layers import LayerPatterns
from elastic_ring.attention.patterns.parse import parse_pattern
from elastic_ring.config import (
    OptimConfig,
    RunConfig,
    ScalingConfig,
    StepConfig,
    check_copies,
    check_loss_spikes,
    check_together,
)
from elastic_ring.costs import CostModel
from elastic_ring.data.filesystem import at_submission
from elastic_ring.data.preparation.materialise import as_source
from elastic_ring.data.sampling.order import SampleOrder
from elastic_ring.data.sampling.validation import (
    ValidationSet,
    ValidationSource,
    check_length,
    measured,
    open_sets,
    with_sets,
)
from elastic_ring.data.source import fingerprinted, hold_out, open_source, order_of
from elastic_ring.monitor.callbacks import Callback, check_callbacks
from elastic_ring.train.optim import check_cpu_offload, check_schedule
from elastic_ring.train.startup.check import check_pattern
from elastic_ring.train.startup.layouts import AUTO, Layouts, check_layers, check_rows
from elastic_ring.train.task import TrainingTask, check_parts, check_vocabulary, parts_of
from elastic_ring.train.wrap import check_buildable, check_linears, check_own_optimizer

FIND = """import sys, importlib.util as util; sys.path.append(sys.argv[1])
print(*(name for name in sys.argv[2:] if util.find_spec(name) is None))"""
FIND_S = 60.0


def build_task(
    model: Any,
    data: Any,
    step: StepConfig,
    *,
    optim: OptimConfig | None,
    pattern: LayerPatterns | str | None,
    cost_model: CostModel | str | Path | None,
    validation: Mapping[str, ValidationSet],
    callbacks: Sequence[Callback],
    **options: Any,
) -> TrainingTask:
    """The task of these arguments of `ElasticRingTrainer`; the model's factory brings what they leave out. `options`:
    fields of the task, None for a default."""
    sets = {
        name: replace(entry, data=as_source(entry.data, step)) if getattr(entry, "data", None) is not None else entry
        for name, entry in validation.items()
    }
    check_callbacks(callbacks, step.validates, measured(sets, options["metrics"] or {}))
    parts = parts_of(model, step)
    task = TrainingTask(
        parts.model or model,
        as_source(data, step),
        step,
        optim or OptimConfig(total_steps=step.steps),
        parts.loss,
        initial=parts.initial,
        pattern=parts.pattern if pattern is None else parse_pattern(pattern) if isinstance(pattern, str) else pattern,
        cost_model=CostModel.read(cost_model) if isinstance(cost_model, str | Path) else cost_model,
        flops=parts.flops,
        asks_callbacks=any(callback.controls for callback in callbacks),
        frozen=parts.frozen,
        softcap=parts.softcap,
        validation=sets,
    )
    task = replace(task, **{name: option for name, option in options.items() if option is not None})
    if options["optimizer"] in ("adamw", "muon"):
        task = replace(task, optimizer=None, optim=replace(task.optim, optimizer=options["optimizer"]))
    check_parts(task)
    for source in (task.data, *(entry.data for entry in sets.values() if entry.data is not None)):
        check_vocabulary(parts, source)
    if task.cost_model is not None and step.layout != AUTO:
        raise ValueError(
            f"cost_model={cost_model}: layout={step.layout!r} prices nothing; set layout='auto', "
            "or leave cost_model out"
        )
    return task


def check_settings(task: TrainingTask, scaling: ScalingConfig, run: RunConfig) -> None:
    """Raises ValueError for settings that contradict each other."""
    step = task.step
    check_schedule(task.lr_schedule, task.optim, step.steps)
    check_cpu_offload(scaling.cpu_offload, task.optimizer, task.optim)
    check_together(scaling, step, run.faults)
    if task.optim.optimizer != "muon" and any(fault.phase == "update" for fault in run.faults):
        raise ValueError("faults: phase=update is Muon's: give optimizer='muon', or name another phase")
    check_copies(scaling.mesh, run.copies)
    check_loss_spikes(run, task.optim)
    kernels = [kernel.name for kernel in covering("causal") if scaling.device in kernel.devices]
    if step.kernel and step.kernel not in kernels:
        raise ValueError(
            f"kernel={step.kernel!r} is no attention kernel for device={scaling.device!r}: choose one of "
            f"{', '.join(kernels)}, or leave it out to have one chosen"
        )
    check_length(task.data, step, "data")


def check_task(task: TrainingTask, cp: int, device: str) -> None:
    """Raises ValueError for a model, pattern or data that workers could not train, and for a task that cannot be
    pickled."""
    check_vocabulary(parts_of(task.model, task.step), task.data)  # a dataset may have become a corpus since
    check_buildable(task)
    check_own_optimizer(task)
    check_linears(task)
    check_layers(task)
    layouts = Layouts(task)
    layouts.choice(cp, device)
    if device == "cuda":
        check_pattern(task, cp, layouts)
    check_rows(task)
    try:
        with open(os.devnull, "wb") as nowhere:  # it may be as large as the model
            (pickler := _Pickler(nowhere)).dump(task)
    except Exception as error:
        raise ValueError(
            f"the model, loss, optimizer, data or initial cannot be sent to workers ({type(error).__name__}: {error}): "
            "give functions and classes of a module, or plain objects, without open files, locks or threads in them"
        ) from error
    if not ray.is_initialized():  # which may have been given an environment with more
        check_importable(pickler.modules & sys.modules.keys())


class _Pickler(cloudpickle.Pickler):
    """Its `modules` are those that workers import to read the pickle: of what is pickled by its name alone."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file)
        self.modules = set[str]()

    def reducer_override(self, obj: Any) -> Any:
        reduced = super().reducer_override(obj)
        if reduced is NotImplemented and isinstance(obj, type | ModuleType | FunctionType | BuiltinFunctionType):
            self.modules.add(getattr(obj, "__module__", obj.__name__))
        return reduced


def check_importable(modules: Iterable[str]) -> None:
    """Raises ValueError for one of the loaded `modules` that another Python in this folder does not find, as workers
    would not. Ray gives them the folder of the driver's script and its working directory."""
    importable = {"__main__", "torch", __name__.partition(".")[0], *sys.stdlib_module_names}
    files = {name: getattr(sys.modules[name], "__file__", None) for name in modules if name not in importable}
    names = sorted({name.partition(".")[0] for name, file in files.items() if file} - importable)
    folder = os.path.dirname(os.path.realpath(sys.argv[0]))
    words = [sys.executable, "-c", FIND, folder if folder in sys.path else "", *names]
    for name in subprocess.run(words, capture_output=True, text=True, timeout=FIND_S).stdout.split() if names else ():
        raise ValueError(
            f"module {name!r} ({getattr(sys.modules[name], '__file__', '')}): workers could not import it: install it, "
            "start in its folder, or put that on PYTHONPATH"
        )


def check_shadows(folder: Path, modules: Mapping[str, ModuleType]) -> None:
    """Raises ValueError for a file or package in `folder`, the driver's working directory, that bears the name of one
    of the loaded `modules`: Ray puts that directory first on the path of its workers."""
    own = __name__.partition(".")[0]
    for path in sorted([*folder.glob("*.py"), *(path.parent for path in folder.glob("*/__init__.py"))]):
        name = path.name.removesuffix(".py")
        loaded = getattr(modules.get(name), "__file__", None)
        if loaded and name not in (own, "__main__") and not Path(loaded).resolve().is_relative_to(path.resolve()):
            raise ValueError(
                f"{path}: Ray's workers would import it in place of {loaded}: rename it, or start in another folder"
            )


def training_order(task: TrainingTask) -> SampleOrder:
    """The sequences of each step. Raises ValueError for a corpus that is unreadable or smaller than one batch."""
    training, _ = hold_out(at_submission(lambda: open_source(task.data)), num_sequences=task.num_held_out)
    return order_of(training, task.step.seed, task.step.global_batch)


def fingerprint_of(task: TrainingTask) -> str:
    """The fingerprint of the training data and all validation sets, as each worker computes it. Raises ValueError for
    sets that cannot be computed."""
    opened = open_sets(task.validation)
    source, fingerprint = fingerprinted(task.data)
    _, held_out = hold_out(source, num_sequences=task.num_held_out)
    ValidationSource(task.validation, held_out, {name: source for name, (source, _) in opened.items()})
    return with_sets(fingerprint, opened)
