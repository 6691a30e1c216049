"""Slices hold what the sequence holds; the digest of what was consumed is the same on every mesh."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from elastic_ring.attention.layouts.layout import make_layout
from elastic_ring.data.loader import (
    IGNORE,
    ArrivedCopies,
    Loader,
    Slice,
    consumed_digest,
    samples_text,
    slice_sample,
)
from elastic_ring.data.sampling.order import Order, share
from elastic_ring.data.source import Sample
from elastic_ring.errors import DigestMismatch

CONTEXT = 29


class Numbers:
    """Sequences of random tokens with random documents; counts its reads."""

    def __init__(self, num_sequences: int = 30, context_tokens: int = CONTEXT) -> None:
        self.num_sequences = num_sequences
        self.context_tokens = context_tokens
        self.fingerprint = "numbers"
        self.reads: list[int] = []

    def read(self, sample_id: int) -> Sample:
        self.reads.append(sample_id)
        if sample_id >= self.num_sequences:
            raise ValueError(f"sample_id={sample_id}")
        rng = np.random.default_rng(sample_id)
        tokens = rng.integers(0, 257, self.context_tokens + 1)
        starts = rng.choice(np.arange(1, self.context_tokens), size=3, replace=False)
        return Sample(tokens, (0, *sorted(starts.tolist())), bool(sample_id % 2))


def cut(sample: Sample, layout: str, cp: int) -> list[Slice]:
    plan = make_layout(layout, CONTEXT, cp)
    return [slice_sample(sample, plan, cp_rank, sample_id=0, index_in_batch=0) for cp_rank in range(cp)]


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("cp", [1, 2, 3, 5, 7, 8])
@pytest.mark.parametrize("sample_id", [2, 3])
def test_the_slices_of_a_ring_make_up_the_sequence(layout: str, cp: int, sample_id: int) -> None:
    sample = Numbers().read(sample_id)
    slices = cut(sample, layout, cp)
    positions = torch.cat([part.positions for part in slices], dim=1).squeeze(0)
    assert sorted(positions.tolist()) == list(range(CONTEXT))
    placed = torch.argsort(positions)
    tokens, targets, documents = (
        torch.cat([getattr(part, name) for part in slices], dim=1).squeeze(0)[placed].tolist()
        for name in ("tokens", "targets", "document_ids")
    )
    assert tokens == sample.tokens[:-1].tolist()
    for position in range(CONTEXT):
        expected = sample.tokens[position + 1]
        if position + 1 in sample.document_starts or (position == CONTEXT - 1 and sample.ends_document):
            expected = IGNORE
        assert targets[position] == expected
        assert documents[position] == sum(start <= position for start in sample.document_starts) - 1
    assert sum(part.num_targets for part in slices) == sum(target != IGNORE for target in targets)


def test_a_slice_has_the_promised_types_and_does_not_share_memory_with_the_sample() -> None:
    sample = Numbers().read(0)
    before = sample.tokens.copy()
    part = cut(sample, "zigzag", 2)[1]
    for name, dtype in (("tokens", 64), ("targets", 64), ("positions", 64), ("document_ids", 32)):
        tensor = getattr(part, name)
        assert tensor.dtype == getattr(torch, f"int{dtype}")
        assert tensor.shape == (1, make_layout("zigzag", CONTEXT, 2).num_tokens(1))
        tensor += 1
    assert (sample.tokens == before).all()
    assert part.document_starts == sample.document_starts


def test_a_layout_for_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match=r"seq_len=28 for a sequence of 29 tokens"):
        slice_sample(Numbers().read(0), make_layout("zigzag", CONTEXT - 1, 2), 0, sample_id=0, index_in_batch=0)


def batch_slices(step: int, dp: int, cp: int, layout: str, global_batch: int = 7) -> list[list[Slice]]:
    """What each rank of the mesh consumes in a step."""
    source = Numbers()
    ids = Order(0, global_batch, source.num_sequences).sample_ids(step)
    plan = make_layout(layout, CONTEXT, cp)
    return [
        [
            slice_sample(source.read(sample_id), plan, cp_rank, sample_id=sample_id, index_in_batch=index)
            for index, sample_id in share(ids, dp_rank, dp)
        ]
        for dp_rank in range(dp)
        for cp_rank in range(cp)
    ]


def total(step: int, ranks: list[list[Slice]]) -> tuple[str, str]:
    """The two sums, as the vote comes to them: limbs of all ranks added in float64."""
    limbs = torch.tensor([consumed_digest(step, slices) for slices in ranks], dtype=torch.float64).sum(dim=0)
    assert limbs.shape == (4,)
    text = samples_text(limbs.tolist())
    return text[:16], text[16:]


def test_the_digest_is_that_of_the_batch_on_every_mesh_and_layout() -> None:
    whole = total(4, batch_slices(4, 1, 1, "contiguous"))
    for dp, cp, layout in (
        (1, 2, "zigzag"),
        (2, 2, "zigzag"),
        (3, 3, "contiguous"),
        (7, 1, "zigzag"),
        (2, 5, "zigzag"),
    ):
        assert total(4, batch_slices(4, dp, cp, layout)) == whole
    # The order in which a rank consumed its sequences is not part of what was consumed.
    assert total(4, [slices[::-1] for slices in batch_slices(4, 2, 2, "zigzag")]) == whole


def with_changed(name: str) -> Callable[[Slice], Slice]:
    def change(part: Slice) -> Slice:
        tensor = getattr(part, name).clone()
        tensor[0, 3] += 1
        return replace(part, **{name: tensor})

    return change


@pytest.mark.parametrize(
    "change",
    [
        with_changed("tokens"),
        with_changed("targets"),
        with_changed("positions"),
        lambda part: replace(part, indices_in_batch=(part.indices_in_batch[0] + 1,)),
        lambda part: replace(part, tokens=part.tokens.flip(1)),
    ],
    ids=["token", "target", "position", "index", "order of tokens"],
)
def test_the_digest_notices_any_change_in_both_lanes(change: Callable[[Slice], Slice]) -> None:
    ranks = batch_slices(0, 2, 2, "zigzag")
    before = total(0, ranks)
    ranks[3][1] = change(ranks[3][1])
    after = total(0, ranks)
    assert after[0] != before[0]
    assert after[1] != before[1]


def test_the_digest_notices_what_is_dropped_doubled_swapped_or_of_another_step() -> None:
    ranks = batch_slices(0, 2, 2, "zigzag")
    first, *rest = ranks
    swapped = [replace(first[0], indices_in_batch=(2,)), replace(first[1], indices_in_batch=(0,)), *first[2:]]
    values = [
        total(0, ranks),
        total(1, ranks),
        total(0, rest),
        total(0, [first[1:], *rest]),
        total(0, [first + first[:1], *rest]),
        total(0, [first + first[:1] * 2, *rest]),
        total(0, [swapped, *rest]),
        total(0, [[]]),
    ]
    assert [part.indices_in_batch[0] for part in first[:2]] == [0, 2]
    assert len({lane for value in values for lane in value}) == 2 * len(values) - 1  # (0, 0) of nothing


def test_limbs_are_whole_numbers_below_two_to_the_32() -> None:
    for limb in consumed_digest(3, batch_slices(3, 1, 1, "contiguous")[0]):
        assert limb == int(limb)
        assert 0 <= limb < 2**32
    assert samples_text([2**32 + 5, 1, 7, 2**32]) == f"{2 * 2**32 + 5:016x}{7:016x}"


def loader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("elastic-ring-loader")]


def test_the_loader_reads_each_sequence_once_one_ahead_and_leaves_no_thread() -> None:
    source = Numbers()
    layout = make_layout("zigzag", CONTEXT, 2)
    with Loader(source) as loader:
        assert not loader_threads()
        ids = [5, 3, 8, 8, 1]
        for index, sample_id in enumerate(ids):
            following = ids[index + 1 :]
            part = loader.load(sample_id, index, layout, 1, upcoming=following)
            expected = slice_sample(Numbers().read(sample_id), layout, 1, sample_id=sample_id, index_in_batch=index)
            assert torch.equal(part.tokens, expected.tokens)
            assert (part.sample_id, part.indices_in_batch[0]) == (sample_id, index)
        assert source.reads == ids
        assert len(loader_threads()) == 1
    assert not loader_threads()


def test_the_loader_reads_as_far_ahead_as_it_is_asked_to_and_each_sequence_once() -> None:
    source, layout, ids = Numbers(), make_layout("contiguous", CONTEXT, 1), [5, 3, 8, 8, 1, 2]
    with Loader(source, num_ahead=2) as loader:
        for index, sample_id in enumerate(ids):
            assert loader.load(sample_id, index, layout, 0, upcoming=ids[index + 1 :]).sample_id == sample_id
            loader._thread.submit(int).result()  # behind all reads that were begun
            assert source.reads == ids[: index + 3]
        loader.load(4, 0, layout, 0, upcoming=[6, 7])
        loader.load(6, 0, layout, 0, upcoming=[9])
        loader.load(9, 0, layout, 0)
    assert source.reads in ([*ids, 4, 6, 7, 9], [*ids, 4, 6, 9]), "7 is dropped, unless it was read already"


def test_a_read_that_was_foretold_wrongly_is_dropped_and_its_error_with_it() -> None:
    source = Numbers()
    layout = make_layout("contiguous", CONTEXT, 1)
    with Loader(source) as loader:
        loader.load(0, 0, layout, 0, upcoming=[999])
        assert loader.load(1, 0, layout, 0).sample_id == 1
        with pytest.raises(ValueError, match="sample_id=999"):
            loader.load(999, 0, layout, 0)
        assert loader.load(2, 0, layout, 0, upcoming=[3]).sample_id == 2
    assert not loader_threads()


def test_a_wait_for_storage_that_stalls_can_be_ended_and_the_sequence_is_not_lost() -> None:
    storage, source = threading.Event(), Numbers()

    class Stalled(Numbers):
        def read(self, sample_id: int) -> Sample:
            assert storage.wait(30.0)
            return source.read(sample_id)

    asked: list[bool] = []

    def aborted() -> None:
        asked.append(True)
        if len(asked) < 3:
            return
        raise InterruptedError("the generation was aborted")

    plan = make_layout("zigzag", CONTEXT, 2)
    with Loader(Stalled(), aborted) as loader:
        with pytest.raises(InterruptedError):
            loader.load(4, 0, plan, 1)
        assert len(asked) == 3
        storage.set()
        piece = loader.load(4, 0, plan, 1)
    assert source.reads == [4], "the read that was under way serves the next load"
    assert torch.equal(piece.tokens, cut(source.read(4), "zigzag", 2)[1].tokens)


def test_what_arrived_as_it_was_sent_is_fine_and_the_copies_go_with_the_check() -> None:
    arrived = ArrivedCopies(True)
    for part in cut(Numbers().read(2), "zigzag", 3):
        arrived.keep(part, part.to("cpu"))
    arrived.check(4)
    assert arrived._kept == []


@pytest.mark.parametrize("name", ["tokens", "targets", "positions", "document_ids"])
def test_a_slice_that_arrived_changed_is_found_before_the_vote(name: str) -> None:
    sent = replace(cut(Numbers().read(2), "zigzag", 3)[1], sample_id=17)
    there = replace(sent, **{name: getattr(sent, name).clone()})
    getattr(there, name)[0, -1] += 1
    arrived = ArrivedCopies(True)
    arrived.keep(sent, there)
    getattr(there, name)[0, -1] -= 1  # the model may change what it was given; the copy is of what arrived
    with pytest.raises(DigestMismatch, match=rf"step 4: {name} of sequence 17 arrived changed"):
        arrived.check(4)


def test_in_most_steps_nothing_is_copied_back() -> None:
    arrived = ArrivedCopies(False)
    part = cut(Numbers().read(2), "zigzag", 3)[0]
    arrived.keep(part, replace(part, tokens=part.tokens + 1))
    arrived.check(4)
