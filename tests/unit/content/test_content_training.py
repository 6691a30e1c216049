"""Training where content chooses blocks: right, the same on every ring, and no bit lost with a worker on the way."""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from elastic_ring import ElasticRingTrainer, ScalingConfig, StepConfig
from elastic_ring.attention.comm.messages import AllToAll
from elastic_ring.attention.layouts.layout import make_layout
from elastic_ring.attention.patterns.content import TopK
from elastic_ring.cli.train import build, parse
from elastic_ring.data.loader import Loader, slice_sample
from elastic_ring.data.sampling.order import Order
from elastic_ring.mesh import Mesh
from elastic_ring.model.transformer import Transformer
from elastic_ring.runtime.groups.groups import Rendezvous
from elastic_ring.state.transfer import receive_shard, send_shard
from elastic_ring.train import gradient
from elastic_ring.train.startup.check import check_pattern
from elastic_ring.train.task import Batch, TrainingTask
from elastic_ring.train.transaction import Transaction
from tests.unit.groups.processes import Membership, connect, membership
from tests.unit.train import tiny_task
from tests.unit.train.test_pattern_training import RandomSource, layer_of, losses_on, packed, patterned
from tests.unit.train.tiny_task import (
    CONTEXT,
    Broken,
    abort_at_a_break,
    abort_until_paused,
    begin,
    break_off,
    facts,
    facts_after_a_rebuild,
    facts_of_steps,
    make_task,
    plain_training,
    rebuild,
    run_steps,
)

NUM_STEPS = 3
TEXT = "topk:2,unit=3;topk:2,causal=0,unit=2+window:2@1"
"""Two documents of 11 and 15 tokens: both layers have blocks to choose from in either."""


@pytest.fixture(scope="module")
def six() -> Iterator[Membership]:
    with membership(6) as made:
        yield made


class ByContent:
    """What each layer sees, from the definition and nothing else of the package."""

    def __init__(self, task: TrainingTask, starts: list[int]) -> None:
        self.task, self.ends = task, [*starts[1:], CONTEXT]
        self.starts = starts

    def layer(self, index: int) -> Any:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            assert self.task.pattern is not None
            (rule,) = self.task.pattern.of_layer(index).heads(q.size(2), k.size(2))
            parts = rule.rules if hasattr(rule, "rules") else (rule,)
            mask = torch.zeros(q.size(2), CONTEXT, CONTEXT, dtype=torch.bool)
            for start, stop in zip(self.starts, self.ends, strict=True):
                for head in range(q.size(2)):
                    for part in parts:
                        own = self.seen(part, q[0, start:stop, head].detach(), k[0, start:stop, 0].detach())
                        mask[head, start:stop, start:stop] |= own
            heads = [x.transpose(1, 2) for x in (q, k, v)]
            return F.scaled_dot_product_attention(*heads, attn_mask=mask.tril(), enable_gqa=True).transpose(1, 2)

        return attend

    def seen(self, rule: Any, q: Tensor, k: Tensor) -> Tensor:
        at = np.arange(len(q))
        if not isinstance(rule, TopK):
            return torch.from_numpy(rule.sees(at[:, None], at[None, :]).copy())
        seen, unit = torch.zeros(len(q), len(q), dtype=torch.bool), rule.unit_tokens
        for i, begun in enumerate(range(0, len(q), unit)):
            speaks = q[begun] if rule.causal else q[begun : begun + unit].mean(0)
            scores = [float(speaks @ k[j * unit : (j + 1) * unit].mean(0)) for j in range(i)]
            for j in (i, *sorted(range(i), key=lambda j: -scores[j])[: rule.width]):
                seen[begun : begun + unit, j * unit : (j + 1) * unit] = True
        return seen


def masked_batch(task: TrainingTask) -> Any:
    def batch(sample: Any) -> Batch:
        piece = slice_sample(sample, make_layout("contiguous", CONTEXT, 1), 0, sample_id=0, index_in_batch=0)
        attention: Any = ByContent(task, list(sample.document_starts))
        return Batch(piece.tokens, piece.targets, piece.positions, piece.document_ids, attention)

    return batch


@pytest.mark.slow
def test_training_is_masked_training_and_every_ring_gives_its_losses(six, monkeypatch):
    """cp 1, 2 and 3 and two rings, 26 tokens in two documents, layers that differ."""
    task = patterned(TEXT)
    dense, _ = plain_training(make_task(), NUM_STEPS)
    monkeypatch.setattr(tiny_task, "dense_batch", masked_batch(task))
    monkeypatch.setattr(
        "elastic_ring.model.transformer.of_layer",
        lambda attention, index: (
            attention.layer(index) if isinstance(attention, ByContent) else layer_of(attention, index)
        ),
    )
    wanted, _ = plain_training(task, NUM_STEPS)
    for mesh in (Mesh(1, 1), Mesh(1, 2), Mesh(1, 3), Mesh(2, 3)):
        assert losses_on(six, mesh, task) == pytest.approx(wanted, abs=1e-5), mesh
    assert abs(dense[-1] - wanted[-1]) > 1e-4, "the pattern makes no difference: the test could not see one"


# ------------------------------------------------------------ a step that breaks off while blocks are chosen


def interrupt_in(me: Any, swap: int, kill: bool) -> None:
    """In step 1, when this process would tell the others its sums (0) or its choices (1)."""
    real = AllToAll.swap

    def struck(self: AllToAll, outgoing: list[Tensor], incoming: list[Tensor], tag: int) -> None:
        if tag % 2 == swap and me.state.applied == 1:
            if kill:
                os.kill(os.getpid(), signal.SIGKILL)
            AllToAll.swap = real  # type: ignore[method-assign]
            raise Broken("while blocks are chosen")
        real(self, outgoing, incoming, tag)

    AllToAll.swap = struck  # type: ignore[method-assign]


def undisturbed(six: Membership) -> list[dict[str, Any]]:
    return facts_of_steps(six, Mesh(2, 2), patterned(TEXT))


@pytest.mark.slow
@pytest.mark.thinned(num=1)
@pytest.mark.parametrize("swap", [0, 1])
def test_a_step_that_breaks_off_while_blocks_are_chosen_gives_the_same_bits_when_run_again(six, swap):
    """Rank 2 of two rings of two stops there with its sockets open; its peer waits until the abort, and no longer."""
    wanted, ranks = undisturbed(six), range(4)
    six.all(begin, six.meeting(), Mesh(2, 2), patterned(TEXT), ranks=ranks)
    six.call(2, interrupt_in, swap, False)
    abort_at_a_break(six, Mesh(2, 2), 2)
    assert facts_after_a_rebuild(six, Mesh(2, 2)) == wanted


def take_place(me: Any, where: Rendezvous, mesh: Mesh, task: TrainingTask, rank: int) -> None:
    """A process that never trained takes the place of a rank, with nothing of its own."""
    gradient.BUCKET_ELEMENTS = tiny_task.BUCKET_ELEMENTS  # ranks sum the same buckets
    me.rank, me.paused, me.break_at = rank, threading.Event(), None
    source = task.data.open()
    order = Order(task.step.seed, task.step.global_batch, source.num_sequences)
    me.state = Transaction(task, Loader(source), order, lambda *_: None)
    connect(me, where, mesh)
    me.membership_id = (1, 1)
    me.state.enter(me.groups, me.membership_id, keep=False)


def heal(me: Any, donor: bool) -> None:
    link = me.connector.link("heal", ["donor", "newcomer"], "donor" if donor else "newcomer")
    if donor:
        send_shard(me.state.shard, link)
    else:
        with me.state.filling():
            receive_shard(me.state.shard, link)


@pytest.mark.slow
@pytest.mark.parametrize("swap", [0, 1])
def test_a_worker_killed_while_blocks_are_chosen_is_replaced_and_no_bit_is_lost(six, swap):
    """Rank 3 of two rings of two is killed there; a newcomer, healed by its twin, ends with the bits of no kill."""
    wanted, square, ranks = undisturbed(six), Mesh(2, 2), range(4)
    with membership(5) as five:
        five.all(begin, five.meeting(), square, patterned(TEXT), ranks=ranks)
        five.call(3, interrupt_in, swap, True)
        for rank in ranks:
            five.start(rank, break_off, 2)
        five.processes[3].join()
        assert all(five.now(rank, abort_until_paused) for rank in range(3))
        assert {five.result(rank) for rank in range(3)} <= {"GroupAborted", "PeerFailed"}
        where = five.meeting()
        for rank in range(3):
            five.start(rank, rebuild, where, square)
        five.start(4, take_place, where, square, patterned(TEXT), 3)
        for rank in (0, 1, 2, 4):
            five.result(rank)
        five.start(1, heal, True)
        five.start(4, heal, False)
        for rank in (1, 4):
            five.result(rank)
        for rank in (0, 1, 2, 4):
            five.start(rank, run_steps, NUM_STEPS - 1)
        for rank in (0, 1, 2, 4):
            five.result(rank)
        found = [five.call(rank, facts) for rank in (0, 1, 2, 4)]
    assert found == [{**fact, "gradient_membership_id": (1, 1)} for fact in wanted]


# ------------------------------------------------------------ before anything starts


def test_the_pattern_is_part_of_what_a_run_is():
    def digest(pattern: str | None) -> str:
        task = make_task()
        return ElasticRingTrainer(task.model, task.data, step_config=task.step, pattern=pattern).submission().digest

    assert digest("topk:2,unit=3") == digest("topk:blocks=2,causal=1,unit=3")
    texts = (None, "topk:2,unit=3", "topk:2,causal=0,unit=3", "topk:2,unit=3+window:2")
    assert len({digest(text) for text in texts}) == 4


def on_gpus(text: str, source: Any = RandomSource, **step: Any) -> TrainingTask:
    settings = StepConfig(steps=1, global_batch=2, context_tokens=1024, param_dtype="bfloat16", **step)
    model = partial(Transformer, replace(tiny_task.MODEL, head_dim=64))
    return ElasticRingTrainer(
        model, source(1024), step_config=settings, pattern=text, scaling_config=ScalingConfig(device="cuda")
    ).task


def test_gpus_choose_without_the_host_where_blocks_are_whole_and_the_rest_is_refused_before_the_start(caplog):
    check_pattern(on_gpus("topk:4,fetch_all=1"), 2)
    check_pattern(on_gpus("topk:4,causal=0+bigbird:2,1,0;dense@1"), 2)
    assert not caplog.records
    for text, source, message in (
        ("topk:4,unit=64", RandomSource, "chooses blocks of 64 tokens"),
        ("topk:4+window:200", RandomSource, "window:200: .*in part"),
        ("topk:4", packed, "begins at position 513, inside a block"),
    ):
        caplog.clear()
        check_pattern(on_gpus(text, source), 2)
        assert re.search(message, caplog.text)
    with pytest.raises(ValueError, match=r"begins at position 513, inside a block.*leave fetch_all out"):
        check_pattern(on_gpus("topk:4,fetch_all=1", packed), 2)


def test_the_job_logs_what_content_keeps(caplog, tmp_path):
    caplog.set_level(logging.INFO)
    for text, said in (("topk:4,unit=64", r"density 0\.2"), ("topk:4,unit=64+window:128", r"density at most 0\.")):
        trainer = build(parse(["--pattern", text, "--run-dir", str(tmp_path / "run")]))
        assert trainer.task.pattern is not None
        assert trainer.task.step.context_tokens == 2048
        messages = [record.getMessage() for record in caplog.records if "density" in record.getMessage()]
        assert re.search(said, messages[-1]), messages[-1]
