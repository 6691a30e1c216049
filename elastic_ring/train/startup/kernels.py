"""Agrees on one attention kernel for all ranks of a run. Each rank chooses by a self-test; no rank uses a kernel that
another cannot run.

Two kernels in one ring would round differently, and kernels whose gradients differ in type would exchange messages of
different sizes and hang. Ranks compare names here; the capabilities of kernels are in the backend tables.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from elastic_ring.attention.kernels.kernel import CoverKind, Kernel
from elastic_ring.attention.kernels.registry import KERNELS, select, sparse_form
from elastic_ring.errors import ElasticRingError, RunFailed
from elastic_ring.files import plain_json
from elastic_ring.train.task import TrainingTask

log = logging.getLogger(__name__)

ROW_BYTES = 1024
_ORDER = [kernel.name for kernel in KERNELS]

Names = tuple[str, ...]
"""The kernel of each kind of attention call in the model, in the order of the calls."""


class KernelMismatch(ElasticRingError):
    """This rank cannot run the attention kernel of the other ranks."""


def chosen_kernels(
    task: TrainingTask, shapes: Sequence[tuple[int, int, int]], device: torch.device, cache_dir: Path | None
) -> Iterator[tuple[tuple[int, int, int], CoverKind, Kernel]]:
    """The kernel for each kind of attention of `shapes` (query heads, K/V heads, head dim) on this device. Raises as
    `select`."""
    step, pattern, dtype = task.step, task.pattern, getattr(torch, task.step.param_dtype)
    pins: dict[CoverKind, str | None] = {"causal": step.kernel or None} if pattern is None or pattern.any_dense else {}
    if pattern is not None and pattern.any_sparse and device.type == "cuda":
        # A document may cut blocks in any step: the kernel for masks is agreed on before.
        pins["tables"] = pins["masked_tables"] = sparse_form(step.kernel)
    for shape in shapes:
        for cover, pin in pins.items():
            yield (
                shape,
                cover,
                select(
                    device,
                    dtype,
                    shape[2],
                    step.deterministic,
                    pin,
                    cover=cover,
                    head_ratio=shape[0] // shape[1],
                    softcap=task.softcap,
                    cache_dir=cache_dir,
                ),
            )


def kernels_of(
    task: TrainingTask, shapes: Sequence[tuple[int, int, int]], device: torch.device, cache_dir: Path | None
) -> Names:
    """The names of `chosen_kernels`."""
    return tuple(kernel.name for _, _, kernel in chosen_kernels(task, shapes, device, cache_dir))


def gather_rows(world: Any, names: Names, holds: bool) -> list[tuple[bool, Names]]:
    """(has state, kernels) of every rank, in rank order; over a CPU group."""
    text = json.dumps([holds, names]).encode()
    assert len(text) <= ROW_BYTES, names
    row = torch.frombuffer(bytearray(text.ljust(ROW_BYTES)), dtype=torch.uint8)
    rows = [torch.empty(ROW_BYTES, dtype=torch.uint8) for _ in range(world.size())]
    world.allgather([rows], [row]).wait()
    read = [plain_json(bytes(each.tolist())) for each in rows]
    return [(bool(has_state), tuple(kernels)) for has_state, kernels in read]


def agreed(rows: Sequence[tuple[bool, Names]]) -> Names:
    """The kernels for all ranks: of a rank with state, else per kind of call the least preferred choice.

    Raises KernelMismatch when the ranks make different kinds of calls.
    """
    in_use = [names for has_state, names in rows if has_state]
    if in_use:
        return in_use[0]
    if len({len(names) for _, names in rows}) > 1:
        raise KernelMismatch(f"the ranks' models make different attention calls: {_describe(rows)}")
    return tuple(max(column, key=_ORDER.index) for column in zip(*(names for _, names in rows), strict=True))


def agree(
    task: TrainingTask, rows: Sequence[tuple[bool, Names]], own: Names, find: Callable[[TrainingTask], Names]
) -> tuple[TrainingTask, Names]:
    """The task that this rank runs, and its kernels. `find` returns the kernels of a task on this rank.

    The task is unchanged if this rank's choice is the agreed one; otherwise the agreed kernel is pinned. Raises
    KernelMismatch where that kernel does not run here.
    """
    common = agreed(rows)
    if common == own:
        return task, own
    failures = []
    for name in dict.fromkeys(name.removesuffix("-sparse") for name in common):
        pinned = replace(task, step=replace(task.step, kernel=name))
        try:
            names = find(pinned)
        except (ValueError, RunFailed) as error:
            failures.append(str(error))
            continue
        if names == common:
            log.warning("attention kernel %s, as on all ranks, instead of %s: %s", common, own, _describe(rows))
            return pinned, common
        failures.append(f"kernel={name!r} gives {', '.join(names)}")
    raise KernelMismatch(
        f"all ranks must run {', '.join(common)}, but this one runs {', '.join(own)} and cannot switch "
        f"({'; '.join(failures)}). Ranks: {_describe(rows)}. Pin a kernel that runs everywhere with kernel="
    )


class KernelAgreement:
    """A worker's kernels over the generations of a run: chosen by its self-tests, then agreed on by all ranks."""

    def __init__(self, task: TrainingTask, kind: str, cache_dir: Path | None) -> None:
        self._task, self._device, self._cache_dir = task, torch.device(kind), cache_dir
        self._own: Names = ()

    def look(self, shapes: tuple[tuple[int, int, int], ...]) -> None:
        """Choose the kernels for attention of these `shapes`."""
        self._find = partial(kernels_of, shapes=shapes, device=self._device, cache_dir=self._cache_dir)
        self._own = self._find(self._task)

    def settle(self, task: TrainingTask, world: Any, holds: bool) -> TrainingTask:
        """`task` with the kernels agreed on by the ranks of `world`, a CPU group. Raises KernelMismatch as `agree`.

        On CPUs every rank has the same kernels."""
        if self._device.type == "cpu":
            return task
        # A rank without state starts from the run's own task, without a kernel that was pinned for other ranks.
        task = task if holds else self._task
        own = self._own if holds else self._find(task)
        task, self._own = agree(task, gather_rows(world, own, holds), own, self._find)
        return task


def _describe(rows: Sequence[tuple[bool, Names]]) -> str:
    seen: dict[Names, list[int]] = {}
    for rank, (_, names) in enumerate(rows):
        seen.setdefault(names, []).append(rank)
    return "; ".join(f"{', '.join(names) or 'nothing'} on ranks {ranks}" for names, ranks in seen.items())
