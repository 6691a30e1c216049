"""What a standby finds out and does before it has a place, as far as a CPU can show it."""

from __future__ import annotations

import logging
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from elastic_ring.attention.patterns.parse import parse_pattern
from elastic_ring.config import StepConfig
from elastic_ring.data.source import StdlibText
from elastic_ring.model.config import preset
from elastic_ring.model.transformer import Transformer
from elastic_ring.train.optim import OptimConfig
from elastic_ring.train.startup.layouts import attention_shapes
from elastic_ring.train.startup.warm import warm_up_attention
from elastic_ring.train.task import TrainingTask


def task_of(model: partial[Transformer]) -> TrainingTask:
    return TrainingTask(model, StdlibText(64), StepConfig(context_tokens=64), OptimConfig())


@pytest.mark.parametrize("name", ["laptop", "1b", "8b", "1t"])
def test_the_shapes_of_attention_are_known_without_memory(name: str) -> None:
    config = replace(preset(name), num_layers=2)
    shapes = attention_shapes(task_of(partial(Transformer, config)))
    assert shapes == ((config.num_heads, config.num_kv_heads, config.head_dim),)


class NoAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, *_: object, **__: object) -> tuple[torch.Tensor, int]:
        raise ValueError("wants values")


def test_a_model_that_wants_values_is_no_mistake() -> None:
    assert attention_shapes(TrainingTask(NoAttention, StdlibText(64), StepConfig(), OptimConfig())) == ()


@pytest.mark.thinned(num=1)
@pytest.mark.parametrize("pattern", ["", "window:16", "sinks:4+window:16;dense@0"])
def test_attention_of_every_rank_of_a_ring_is_warmed_up_alone(pattern: str, caplog: pytest.LogCaptureFixture) -> None:
    task = replace(task_of(partial(Transformer, preset("laptop"))), pattern=parse_pattern(pattern) if pattern else None)
    with caplog.at_level(logging.INFO):
        warm_up_attention(task, torch.device("cpu"), (4, 2, 32), 4)
    (logged,) = [line for line in caplog.messages if "warmed up" in line]
    assert logged == f"cpu: attention warmed up for the slices of {4 if pattern else 2} ranks"
    task = replace(task, step=replace(task.step, global_batch=5, sequences_per_pass=3))
    with caplog.at_level(logging.INFO):
        warm_up_attention(task, torch.device("cpu"), (4, 2, 32), 4)  # passes of 1, 2 and 3 sequences
    assert f"warmed up for the slices of {12 if pattern else 6} ranks" in caplog.messages[-1]


WARM = """
import torch.distributed as dist
from functools import partial
from tests.unit.train.test_standby_warmup import task_of
from elastic_ring.model.config import preset
from elastic_ring.model.transformer import Transformer
from elastic_ring.train.startup.warm import warm_up
warm_up(task_of(partial(Transformer, preset("laptop"))))
assert not dist.is_initialized()
"""


@pytest.mark.slow
def test_warming_up_leaves_no_group_behind() -> None:
    subprocess.run([sys.executable, "-c", WARM], check=True, timeout=120)
