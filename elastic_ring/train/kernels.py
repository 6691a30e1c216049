"""One attention kernel for all ranks of a run: each finds its own by a self-test, and what one of them cannot run
is taken by none.

Two kernels in one ring would add in different ways, and those that return gradients in different types would wait for
ever for messages of another size. Here ranks compare names; what a kernel can do is the tables' business.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from elastic_ring.attention.block_kernels import KERNELS, select_sparse, sparse_form
from elastic_ring.attention.kernels.table import BACKENDS, select
from elastic_ring.errors import ElasticRingError, RunFailed
from elastic_ring.train.task import TrainingTask

log = logging.getLogger(__name__)

ROW_BYTES = 1024
_ORDER = [backend.name for backend in BACKENDS] + [kernel.name for kernel in KERNELS]

Names = tuple[str, ...]
"""The kernel of each kind of attention call that the model makes, in the order of the calls."""


class KernelMismatch(ElasticRingError):
    """This rank cannot run the attention kernel that the others run."""


def kernels_of(
    task: TrainingTask, shapes: Sequence[tuple[int, int, int]], device: torch.device, cache_dir: Path | None
) -> Names:
    """What attention of these `shapes` (query heads, K/V heads, head dim) gets on this device. Raises as `select`."""
    names, step, dtype = [], task.step, getattr(torch, task.step.param_dtype)
    for num_heads, num_kv_heads, head_dim in shapes:
        if task.pattern is None or task.pattern.any_dense:
            found = select(
                device, dtype, head_dim, step.deterministic, step.kernel or None, group=num_heads // num_kv_heads,
                cache_dir=cache_dir,
            )  # fmt: skip
            names.append(found.name)
        if task.pattern is not None and task.pattern.any_sparse and device.type == "cuda":
            names.append(select_sparse(head_dim, dtype, step.deterministic, sparse_form(step.kernel)).name)
    return tuple(names)


def gather_rows(world: Any, names: Names, holds: bool) -> list[tuple[bool, Names]]:
    """(holds state, kernels) of every rank, in rank order; over a group of host memory."""
    text = json.dumps([holds, names]).encode()
    assert len(text) <= ROW_BYTES, names
    row = torch.frombuffer(bytearray(text.ljust(ROW_BYTES)), dtype=torch.uint8)
    rows = [torch.empty(ROW_BYTES, dtype=torch.uint8) for _ in range(world.size())]
    world.allgather([rows], [row]).wait()
    read = [json.loads(bytes(each.tolist())) for each in rows]
    return [(bool(held), tuple(found)) for held, found in read]


def agreed(rows: Sequence[tuple[bool, Names]]) -> Names:
    """What all are to run: what the run has been running, else of each kind the least preferred of all choices.

    Raises KernelMismatch when the ranks do not even make the same kinds of calls.
    """
    held = [names for holds, names in rows if holds]
    if held:
        return held[0]
    if len({len(names) for _, names in rows}) > 1:
        raise KernelMismatch(f"the ranks' models make different attention calls: {_told(rows)}")
    return tuple(max(column, key=_ORDER.index) for column in zip(*(names for _, names in rows), strict=True))


def agree(
    task: TrainingTask, rows: Sequence[tuple[bool, Names]], own: Names, find: Callable[[TrainingTask], Names]
) -> tuple[TrainingTask, Names]:
    """The task as this rank has to run it, and its kernels; `find` gives those of a task here.

    Where all choose alike nothing changes. Otherwise the kernel is pinned where it was another's choice. Raises
    KernelMismatch where what all are to run does not run here.
    """
    wanted = agreed(rows)
    if wanted == own:
        return task, own
    failures = []
    for name in dict.fromkeys(name.removesuffix("-sparse") for name in wanted):
        pinned = replace(task, step=replace(task.step, kernel=name))
        try:
            found = find(pinned)
        except (ValueError, RunFailed) as error:
            failures.append(str(error))
            continue
        if found == wanted:
            log.warning("attention kernel %s, as on all ranks, instead of %s: %s", wanted, own, _told(rows))
            return pinned, wanted
        failures.append(f"kernel={name!r} gives {', '.join(found)}")
    raise KernelMismatch(
        f"all ranks are to run {', '.join(wanted)}, this one runs {', '.join(own)} and cannot follow "
        f"({'; '.join(failures)}). Ranks: {_told(rows)}. Pin one that runs everywhere with kernel"
    )


class KernelChoice:
    """One worker's, over the generations of a run: what its self-tests chose, and what all have agreed on."""

    def __init__(self, task: TrainingTask, kind: str, cache_dir: Path | None) -> None:
        self._task, self._device, self._cache_dir = task, torch.device(kind), cache_dir
        self._shapes: tuple[tuple[int, int, int], ...] = ()
        self._own: Names = ()

    def look(self, shapes: tuple[tuple[int, int, int], ...]) -> None:
        """Find what attention of these `shapes` gets here; on a CPU it is the same code everywhere."""
        self._shapes = shapes
        self._own = self._find(self._task)

    def settle(self, task: TrainingTask, world: Any, holds: bool) -> TrainingTask:
        """`task` as all ranks of `world`, a group of host memory, have to run it. Raises KernelMismatch as `agree`."""
        if self._device.type == "cpu":
            return task
        # Who holds nothing begins with the run's own task: what it once pinned for others binds it no more.
        task = task if holds else self._task
        own = self._own if holds else self._find(task)
        task, self._own = agree(task, gather_rows(world, own, holds), own, self._find)
        return task

    def _find(self, task: TrainingTask) -> Names:
        return kernels_of(task, self._shapes, self._device, self._cache_dir)


def _told(rows: Sequence[tuple[bool, Names]]) -> str:
    seen: dict[Names, list[int]] = {}
    for rank, (_, names) in enumerate(rows):
        seen.setdefault(names, []).append(rank)
    return "; ".join(f"{', '.join(names) or 'nothing'} on ranks {ranks}" for names, ranks in seen.items())
