"""What the warm-up compiled on a GPU is not compiled again in the steps: flash-attn-4's, Triton's and FlexAttention's
kernels. `tests/unit/train/test_warmup.py` and `test_compilations.py` make the same claims on CPUs."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from elastic_ring.attention.layers import AttentionFn
from elastic_ring.attention.layouts.layout import make_layout
from elastic_ring.attention.options import RingOptions
from elastic_ring.attention.patterns.parse import parse_pattern
from elastic_ring.attention.patterns.sparse import Pattern
from elastic_ring.attention.plan.schedule import plan
from elastic_ring.attention.ring import RingAttention
from elastic_ring.attention.warmup import NullProcessGroup
from elastic_ring.config import StepConfig
from elastic_ring.data.source import StdlibText
from elastic_ring.model.config import ModelConfig
from elastic_ring.model.init import Initialiser, initialise_module
from elastic_ring.model.transformer import Transformer
from elastic_ring.train.optim import OptimConfig
from elastic_ring.train.startup.compilations import CompileWatch
from elastic_ring.train.startup.warm import warm_up_attention, warm_up_device
from elastic_ring.train.task import TrainingTask, attention_of

MODEL = ModelConfig(512, 2, 256, 4, 2, 64, 768)
CONTEXT, CP = 4096, 2


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


def task_of(pattern: str = "", kernel: str = "") -> TrainingTask:
    step = StepConfig(context_tokens=CONTEXT, param_dtype="bfloat16", kernel=kernel)
    parsed = parse_pattern(pattern) if pattern else None
    return TrainingTask(partial(Transformer, MODEL), StdlibText(CONTEXT), step, OptimConfig(), pattern=parsed)


def pass_of(task: TrainingTask, cp_rank: int, attention: AttentionFn | None = None) -> None:
    """Loss and gradients of one rank's slice, on a ring whose other ranks are silent."""
    device, layout = torch.device("cuda", 0), make_layout("zigzag", CONTEXT, CP)
    built = Transformer(MODEL)
    initialise_module(built, Initialiser(0, MODEL.num_layers))
    built.to(device, torch.bfloat16)
    tokens = torch.arange(CONTEXT).unsqueeze(0) * 7 % MODEL.vocab_size
    mine, positions = (layout.scatter(x, cp_rank, 1).to(device) for x in (tokens, torch.arange(CONTEXT).unsqueeze(0)))
    piece: Any = ContiguousCopy()
    attention = attention or attention_of(task, piece, layout, cp_rank, NullProcessGroup(cp_rank, CP))
    loss, _ = built(mine, positions=positions, document_ids=mine, attention=attention, targets=mine)
    loss.backward()


class ContiguousCopy:
    document_starts = (0,)


def no_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q + (k + v).repeat_interleave(q.size(2) // k.size(2), dim=2)


@pytest.mark.parametrize(("pattern", "kernel"), [("", "flex"), ("bigbird:4,1,2", "flex")], ids=["dense", "sparse"])
def test_warmed_up_lengths_of_flex_attention_are_not_compiled_again(pattern, kernel):
    task = task_of(pattern, kernel)
    warm_up_attention(task, torch.device("cuda", 0), (MODEL.num_heads, MODEL.num_kv_heads, MODEL.head_dim), CP)
    pass_of(task, 0, no_attention)  # a first pass compiles Liger's kernels of the layers
    watch = CompileWatch()
    for cp_rank in range(CP):
        pass_of(task, cp_rank)
    assert watch.news() == []


@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_documents_of_any_length_meet_only_kernels_that_the_warm_up_compiled(cp, head_dim):
    """flash-attn-4's and Triton's, forward and backward; sequences of one document and packed ones."""
    pytest.importorskip("flash_attn.cute")
    task, device, shape = task_of(), torch.device("cuda", 0), (4, 2, head_dim)
    chosen: dict[str, str] = {}
    assert warm_up_device(task, device, [shape], cp, None, chosen) == ""
    assert [name.split()[0] for name in chosen.values()] == ["flash-attn-4"]
    watch, layout = CompileWatch(), make_layout("zigzag", CONTEXT, cp)
    for seed in range(8):
        draw, starts = random.Random(seed), [0]
        while seed and starts[-1] < CONTEXT:
            starts.append(starts[-1] + int(2 ** draw.uniform(0.0, 11.0)))
        schedule = plan(Pattern(document_starts=tuple(start for start in starts if start < CONTEXT)), layout)
        for cp_rank in range(cp):
            own = {"device": device, "dtype": torch.bfloat16, "requires_grad": True}
            length = layout.num_tokens(cp_rank)
            q, k, v = (torch.randn(1, length, heads, head_dim, **own) for heads in (shape[0], shape[1], shape[1]))
            nobody = NullProcessGroup(cp_rank, cp) if cp > 1 else None
            RingAttention(schedule, cp_rank, nobody)(q, k, v).sum().backward()
    torch.cuda.synchronize(device)
    assert watch.news() == []


def test_flex_attention_takes_more_lengths_than_torch_compiles_by_default():
    watch = CompileWatch()
    for num_tokens in range(256, 256 + 64 * 12, 64):
        q, k, v = (
            torch.randn(1, num_tokens, heads, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for heads in (4, 2, 2)
        )
        schedule = plan(Pattern(), make_layout("contiguous", num_tokens, 1))
        RingAttention(schedule, 0, None, RingOptions(backend="flex"))(q, k, v).sum().backward()
    assert len(watch.news()) >= 12
