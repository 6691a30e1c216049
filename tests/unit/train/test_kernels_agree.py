"""All ranks of a run take one attention kernel, whatever each of them would have chosen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from elastic_ring.attention.kernels.kernel import Kernel
from elastic_ring.attention.kernels.registry import KERNELS
from elastic_ring.attention.patterns.parse import parse_pattern
from elastic_ring.config import StepConfig
from elastic_ring.train.optim import OptimConfig
from elastic_ring.train.startup.kernels import KernelMismatch, agree, agreed, gather_rows, kernels_of
from elastic_ring.train.task import TrainingTask
from tests.unit.attention.attention_rings import ThreadRings, in_threads

CPU = torch.device("cpu")
SHAPES = ((4, 2, 16), (4, 4, 32))
TASK = TrainingTask(model=lambda: nn.Linear(1, 1), data=None, step=StepConfig(), optim=OptimConfig())  # type: ignore[arg-type]


def here(task: TrainingTask) -> tuple[str, ...]:
    return kernels_of(task, SHAPES, CPU, None)


def test_every_rank_hears_what_each_chose_over_a_real_group() -> None:
    groups = ThreadRings().groups(3)
    rows = [(True, ("flex",)), (False, ("cudnn", "flex-sparse")), (False, ())]
    heard = in_threads(3, lambda rank: gather_rows(groups[rank], rows[rank][1], rows[rank][0]))
    assert heard == [rows] * 3


def test_where_all_choose_alike_nothing_is_pinned() -> None:
    own = here(TASK)
    assert own == ("aten-cpu", "aten-cpu")
    assert agree(TASK, [(False, own)] * 4, own, here) == (TASK, own)


def test_at_a_start_what_one_rank_cannot_run_is_run_by_none() -> None:
    own, other = here(TASK), ("reference", "reference")
    task, names = agree(TASK, [(False, own), (False, other), (False, own)], own, here)
    assert (task.step.kernel, names) == ("reference", other)
    assert here(task) == other, "what the step will select from now on"


def test_a_newcomer_takes_what_the_run_has_been_running_also_if_it_would_choose_a_better_one() -> None:
    own, running = here(TASK), ("reference", "reference")
    task, names = agree(TASK, [(False, own), (True, running)], own, here)
    assert (task.step.kernel, names) == ("reference", running)
    assert agree(task, [(False, own), (True, running)], running, here) == (task, running), "and a survivor stays"


def test_a_newcomer_that_cannot_follow_is_refused_with_everybodys_choice() -> None:
    def broken(task: TrainingTask) -> tuple[str, ...]:
        raise ValueError(f"backend={task.step.kernel!r} needs flash-attn, which is not installed")

    rows = [(True, ("flash-attn-2",)), (False, ("flex",)), (True, ("flash-attn-2",))]
    with pytest.raises(KernelMismatch, match=r"not installed.*flash-attn-2 on ranks \[0, 2\]; flex on ranks \[1\]"):
        agree(TASK, rows, ("flex",), broken)


def test_of_each_kind_of_call_the_least_preferred_choice_is_the_common_one() -> None:
    assert agreed([(False, ("flash-attn-4", "flex-sparse")), (False, ("cudnn", "flash-attn-4-sparse"))]) == (
        "cudnn",
        "flex-sparse",
    )


def test_a_common_choice_that_no_single_name_gives_is_refused_not_mixed() -> None:
    """Two head dims, of which only one has the better kernel: a name pins both."""

    def only_both(task: TrainingTask) -> tuple[str, ...]:
        return (task.step.kernel, task.step.kernel)

    rows = [(False, ("flash-attn-4", "flex")), (False, ("cudnn", "flash-attn-4"))]
    with pytest.raises(KernelMismatch, match="cannot switch"):
        agree(TASK, rows, ("flash-attn-4", "flex"), only_both)


def test_with_a_pattern_gpus_agree_on_masks_of_blocks_before_anything_cuts_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str | None]] = []

    def select(*what: Any, cover: str, **_: Any) -> Kernel:
        asked.append((cover, what[4]))
        return KERNELS[0]

    monkeypatch.setattr("elastic_ring.train.startup.kernels.select", select)
    task = replace(TASK, pattern=parse_pattern("window:200;dense@1"), step=replace(TASK.step, kernel="flex"))
    assert len(kernels_of(task, SHAPES[:1], torch.device("cuda"), None)) == 3
    assert asked == [("causal", "flex"), ("tables", "flex-sparse"), ("masked_tables", "flex-sparse")]


def test_ranks_whose_models_call_differently_are_refused() -> None:
    rows: list[Any] = [(False, ("flex",)), (False, ("flex", "flex"))]
    with pytest.raises(KernelMismatch, match="different attention calls"):
        agreed(rows)


def test_a_users_pin_is_what_every_rank_reports() -> None:
    pinned = replace(TASK, step=replace(TASK.step, kernel="reference"))
    assert here(pinned) == ("reference", "reference")
