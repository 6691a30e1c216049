"""Training with a pattern: right, the same on every ring, and the same bits after a step that broke off."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from elastic_ring import ElasticRingTrainer, RunConfig, ScalingConfig, StepConfig
from elastic_ring.attention.layers import PatternedAttention, of_layer
from elastic_ring.attention.layouts.layout import make_layout
from elastic_ring.attention.lowering.call_plan import PlanCache
from elastic_ring.attention.options import RingOptions
from elastic_ring.attention.patterns.parse import parse_pattern
from elastic_ring.attention.ring import RingAttention
from elastic_ring.data.loader import slice_sample
from elastic_ring.data.packing import Sample
from elastic_ring.data.source import StdlibText
from elastic_ring.mesh import Mesh
from elastic_ring.model.init import Initialiser, initialise_module
from elastic_ring.model.transformer import Transformer
from elastic_ring.train.startup.check import check_pattern
from elastic_ring.train.task import Batch, TrainingTask, attention_of
from tests.unit.attention.attention_rings import ThreadRings, in_threads
from tests.unit.groups.processes import Membership, membership
from tests.unit.train import tiny_task
from tests.unit.train.tiny_task import (
    CONTEXT,
    STEP,
    begin,
    facts_after_a_break,
    facts_of_steps,
    make_task,
    plain_training,
    run_steps,
)

NUM_STEPS = 3
MIXED = (
    '{"block": 4, "groups": [{"layers": [0], "rule": "sinks:2+window:5"},'
    ' {"heads": [{"rule": "random:1,unit=4"}, {"rule": "window:3"}]}]}'
)
"""Layer 0 of the tiny model one way, layer 1 another; its two heads apart."""


def patterned(text: str = MIXED, **settings: Any) -> TrainingTask:
    pattern = parse_pattern(text)
    pattern.check(tiny_task.MODEL.num_layers, tiny_task.MODEL.num_heads, tiny_task.MODEL.num_kv_heads)
    return make_task(pattern=pattern, **settings)


@pytest.fixture(scope="module")
def six() -> Iterator[Membership]:
    with membership(6) as made:
        yield made


def losses_on(six: Membership, mesh: Mesh, task: TrainingTask) -> list[float]:
    ranks = range(mesh.size)
    six.all(begin, six.meeting(), mesh, task, ranks=ranks)
    results = six.all(run_steps, NUM_STEPS, ranks=ranks)
    assert all(result == results[0] for result in results)
    return [float.fromhex(loss) for loss, _ in results[0]]


def masked_batch(task: TrainingTask) -> Any:
    """For `plain_training`: dense attention under the mask that the rules spell out pair by pair."""

    def batch(sample: Any) -> Batch:
        piece = slice_sample(sample, make_layout("contiguous", CONTEXT, 1), 0, sample_id=0, index_in_batch=0)
        ids = piece.document_ids[0]
        starts = torch.tensor([int((ids == i).nonzero()[0, 0]) for i in range(int(ids.max()) + 1)])
        at = torch.arange(CONTEXT) - starts[ids]
        causal = (ids[:, None] == ids[None, :]) & torch.ones(CONTEXT, CONTEXT, dtype=torch.bool).tril()
        return Batch(piece.tokens, piece.targets, piece.positions, piece.document_ids, Masked(task, at, causal))

    return batch


class Masked:
    """What each layer sees, from its rules and nothing else of the package."""

    def __init__(self, task: TrainingTask, at: Tensor, causal: Tensor) -> None:
        self.task, self.at, self.causal = task, at, causal

    def layer(self, index: int) -> Any:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            assert self.task.pattern is not None
            rules = self.task.pattern.of_layer(index).heads(q.size(2), k.size(2))
            at = self.at.numpy()
            seen = torch.stack([torch.from_numpy(rule.sees(at[:, None], at[None, :]).copy()) for rule in rules])
            heads = [x.transpose(1, 2) for x in (q, k, v)]
            out = F.scaled_dot_product_attention(*heads, attn_mask=seen & self.causal, enable_gqa=True)
            return out.transpose(1, 2)

        return attend


def layer_of(attention: Any, index: int) -> Any:
    return attention.layer(index) if isinstance(attention, Masked) else of_layer(attention, index)


@pytest.mark.slow
def test_training_with_a_pattern_is_masked_training_and_every_ring_gives_its_losses(
    six: Membership, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cp 1, 2 and 3 and two rings, 26 tokens in two documents, layers and heads that differ."""
    task = patterned()
    dense, _ = plain_training(make_task(), NUM_STEPS)
    monkeypatch.setattr(tiny_task, "dense_batch", masked_batch(task))
    monkeypatch.setattr("elastic_ring.model.transformer.of_layer", layer_of)
    wanted, _ = plain_training(task, NUM_STEPS)
    for mesh in (Mesh(1, 1), Mesh(1, 2), Mesh(1, 3), Mesh(2, 3)):
        assert losses_on(six, mesh, task) == pytest.approx(wanted, abs=1e-5), mesh
    assert abs(dense[-1] - wanted[-1]) > 1e-4, "the pattern makes no difference: the test could not see one"


@pytest.mark.thinned(num=1)
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_a_dense_pattern_gives_the_bits_of_no_pattern(six: Membership, layout: str) -> None:
    step = replace(STEP, layout=layout)
    mesh = Mesh(1, 2)
    assert losses_on(six, mesh, patterned("dense", step=step)) == losses_on(six, mesh, make_task(step=step))


@pytest.mark.parametrize("pattern", [None, "dense", "window:8"])
def test_sequences_of_one_membership_are_planned_once_for_each_shape(
    pattern: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three sequences with equal documents, and one with others: two plans."""
    made: list[int] = []
    real = RingAttention._between_hosts
    monkeypatch.setattr(RingAttention, "_between_hosts", lambda *a: made.append(1) or real(*a))
    task, plans = make_task() if pattern is None else patterned(pattern), PlanCache()
    layout = make_layout("zigzag", CONTEXT, 1)
    x = torch.zeros(1, CONTEXT, 2, 8)
    for starts in ((0,), (0,), (0, 9), (0,)):
        piece = slice_sample(
            Sample(np.zeros(CONTEXT + 1, dtype=np.int64), starts), layout, 0, sample_id=0, index_in_batch=0
        )
        attention = attention_of(task, piece, layout, 0, None, plans=plans)
        for layer in range(2):
            of_layer(attention, layer)(x, x, x)
    assert len(made) == 2


@pytest.mark.thinned(num=1)
@pytest.mark.parametrize("phase", ["forward", "backward", "reduce"])
def test_a_step_with_a_pattern_that_breaks_off_and_runs_again_gives_the_same_bits(six: Membership, phase: str) -> None:
    """Rank 2 of two rings of two breaks off; all abort, meet again, and run the step once more."""
    undisturbed = facts_of_steps(six, Mesh(2, 2), patterned())
    assert facts_after_a_break(six, Mesh(2, 2), patterned(), 2, phase) == undisturbed


def test_the_pattern_is_part_of_what_a_run_is(tmp_path: Any) -> None:
    def digest(pattern: str | None) -> str:
        task = make_task()
        return ElasticRingTrainer(task.model, task.data, step_config=task.step, pattern=pattern).submission().digest

    assert digest("window:8") == digest("window:8")
    assert len({digest(None), digest("window:8"), digest("window:9"), digest("window:8;dense@0")}) == 4


def test_keys_in_8_bits_are_part_of_what_a_run_is_only_where_they_are_set() -> None:
    def trainer(**step: Any) -> ElasticRingTrainer:
        return ElasticRingTrainer(make_task().model, make_task().data, step_config=replace(make_task().step, **step))

    plain, native, encoded = trainer(), trainer(kv_wire="native"), trainer(kv_wire="fp8")
    assert plain.submission().identity.entries == native.submission().identity.entries
    assert plain.submission().digest == native.submission().digest != encoded.submission().digest
    assert set(encoded.submission().identity.entries.items()) - set(plain.submission().identity.entries.items()) == {
        ("step.kv_wire", "fp8")
    }


@pytest.mark.parametrize(
    ("part", "value", "named"),
    [
        ("model", torch.nn.Linear(2, 2), "model is a Linear, already built: give a class, a function"),
        ("model", 3, "model=3: give a function"),
        ("loss", 5, "loss=5: give a function"),
        ("optimizer", 0.1, "optimizer=0.1: give a function"),
        ("pattern", ["dense"], r"pattern=\['dense'\]: give a short form"),
        ("units", "layers", "units='layers': give a function"),
        ("data", [1, 2], "data is a list: give StdlibText"),
        ("initial", 3, "initial=3: give an object whose tensor"),
    ],
)
def test_the_trainer_refuses_parts_that_are_not_what_their_names_say(part: str, value: Any, named: str) -> None:
    task = make_task()
    with pytest.raises(ValueError, match=named):
        ElasticRingTrainer(**{"model": task.model, "data": task.data, "step_config": task.step, part: value})


def test_the_trainer_refuses_a_wrong_pattern_before_anything_starts() -> None:
    task = make_task()
    with pytest.raises(ValueError, match="'windw' is no family"):
        ElasticRingTrainer(task.model, task.data, step_config=task.step, pattern="windw:8")


def packed(num_tokens: int) -> Any:
    """Sequences of random tokens whose first is one document; of the later ones some are cut inside a block."""

    class Source(RandomSource):
        def starts(self, sample_id: int) -> tuple[int, ...]:
            return (0, num_tokens // 2) if sample_id < 40 else (0, num_tokens // 2 + 1)

    return Source(num_tokens)


def unaligned(num_tokens: int) -> Any:
    return StdlibText(num_tokens)


class RandomSource:
    def __init__(self, num_tokens: int) -> None:
        self.context_tokens = num_tokens
        self.num_sequences = 64
        self.fingerprint = "random"

    def open(self) -> RandomSource:
        return self

    def read(self, sample_id: int) -> Sample:
        return Sample(np.full(self.context_tokens + 1, sample_id % 7), self.starts(sample_id))

    def starts(self, sample_id: int) -> tuple[int, ...]:
        return (0,)


REFUSED = {
    "in part": ("topk:2,fetch_all=1+window:200", 512, {}, r"in part.*bigbird:3,0,0.*leave fetch_all out"),
    "documents": ("topk:2,fetch_all=1", 512, {"source": packed}, r"begins at position 257, inside a block"),
    "source": ("topk:2,fetch_all=1", 512, {"source": unaligned}, r"align_tokens=1; set align_tokens=128"),
    "type": ("bigbird:2,0,0", 512, {"param_dtype": "float32"}, r"set param_dtype='bfloat16'"),
    "a pinned kernel": (
        "bigbird:2,0,0",
        512,
        {"kernel": "flash-attn-4"},
        r"no deterministic sparse backward.*or kernel='flash-attn-4' to",
    ),
    "heads": ("bigbird:2,0,0", 512, {"head_dim": 8}, r"takes head_dim 64, 128, not 8"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_a_pattern_that_gpus_cannot_run_is_refused_by_fit_before_anything_starts(
    why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, num_tokens, change, message = REFUSED[why]
    monkeypatch.setattr("elastic_ring.trainer.ray_session", None)  # it would start Ray
    step = StepConfig(
        steps=1,
        global_batch=2,
        context_tokens=num_tokens,
        param_dtype=change.get("param_dtype", "bfloat16"),
        kernel=change.get("kernel", ""),
    )
    model = replace(tiny_task.MODEL, head_dim=change.get("head_dim", 64))
    trainer = ElasticRingTrainer(
        partial(Transformer, model),
        change.get("source", RandomSource)(num_tokens),
        step_config=step,
        pattern=text,
        scaling_config=ScalingConfig(device="cuda"),
        run_config=RunConfig("refused", run_dir=str(tmp_path / "run")),
    )
    with pytest.raises(ValueError, match=message):
        trainer.fit()


def test_a_pattern_of_whole_blocks_is_let_through_to_gpus(caplog: pytest.LogCaptureFixture) -> None:
    step = StepConfig(steps=1, global_batch=2, context_tokens=512, param_dtype="bfloat16")
    model = partial(Transformer, replace(tiny_task.MODEL, head_dim=64))
    trainer = ElasticRingTrainer(
        model,
        RandomSource(512),
        step_config=step,
        pattern="bigbird:2,1,1;dense@1",
        scaling_config=ScalingConfig(device="cuda"),
    )
    check_pattern(trainer.task, 2)
    check_pattern(replace(trainer.task, data=StdlibText(512, align_tokens=128)), 2)
    assert not caplog.records


@pytest.mark.parametrize(
    ("text", "num_tokens", "source", "said"),
    [
        ("window:200", 512, RandomSource, ["window:200: keeps blocks of 128 tokens in part"]),
        ("bigbird:2,0,0", 384, RandomSource, ["layout zigzag of 384 tokens over cp=2 cuts at"]),
        ("bigbird:2,0,0", 512, packed, ["begins at position 257, inside a block"]),
        (
            "window:200;dense@1",
            384,
            unaligned,
            ["keeps blocks of 128 tokens in part", "layout zigzag", "documents of the data begin inside blocks"],
        ),
        ("topk:2,fetch_all=1@0;window:200@1", 512, RandomSource, ["window:200: keeps"]),
    ],
    ids=["rule", "layout", "documents", "all at once", "another layer than the one that insists"],
)
def test_what_cuts_blocks_is_told_and_not_refused(
    text: str, num_tokens: int, source: Any, said: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    step = StepConfig(steps=1, global_batch=2, context_tokens=num_tokens, param_dtype="bfloat16")
    model = partial(Transformer, replace(tiny_task.MODEL, head_dim=64))
    scaling = ScalingConfig(device="cuda")
    check_pattern(
        ElasticRingTrainer(model, source(num_tokens), step_config=step, pattern=text, scaling_config=scaling).task, 2
    )
    assert "blocks of 128 tokens are cut: they are padded and masked" in caplog.text
    assert all(cause in caplog.text for cause in said)


@pytest.mark.thinned(num=4)
@pytest.mark.parametrize(
    "text", ["bigbird:2,0,1,unit=128", "bigbird:1,0,0;dense@1", "longnet:256/1,512/2,unit=128", "window:200;dense@1"]
)
@pytest.mark.parametrize("documents", [(0,), (0, 128, 384), (0, 77, 300)])
def test_training_in_blocks_gives_the_losses_of_training_in_tiles(text: str, documents: tuple[int, ...]) -> None:
    """What GPUs run, with the spelled-out kernel: both layers of the tiny model, two ranks."""
    layout = make_layout("zigzag", 512, 2)
    model = Transformer(tiny_task.MODEL)
    initialise_module(model, Initialiser(0, tiny_task.MODEL.num_layers))
    tokens = torch.arange(512).unsqueeze(0) * 5 % tiny_task.MODEL.vocab_size
    rings = ThreadRings()

    def work(cp_rank: int, kernel: str | None) -> list[Tensor]:
        own = copy.deepcopy(model)
        attention = PatternedAttention(
            parse_pattern(text),
            layout,
            cp_rank,
            rings.groups(2)[cp_rank],
            RingOptions(kernel=kernel),
            document_starts=documents,
        )
        mine = layout.scatter(tokens, cp_rank, 1)
        loss, _ = own(
            mine, positions=layout.positions(cp_rank).unsqueeze(0), document_ids=mine, attention=attention, targets=mine
        )
        loss.backward()
        return [loss.detach(), *(p.grad for p in own.parameters() if p.grad is not None)]

    rings.groups(2)
    found = {kernel: in_threads(2, partial(work, kernel=kernel)) for kernel in (None, "reference-sparse")}
    for tiles, blocks in zip(*found.values(), strict=True):
        for a, b in zip(tiles, blocks, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
