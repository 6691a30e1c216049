"""The tasks that quality is measured on: seeded, solvable from what is shown, and blind where a pattern is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.quality.content import ContentFamily
from benchmarks.quality.families import families
from benchmarks.quality.long_range import long_range_bits
from benchmarks.quality.small.model import Masks, SmallConfig, SmallModel, attend
from benchmarks.quality.small.text import batch, corpus
from benchmarks.quality.small.train import Settings
from benchmarks.quality.tasks import (
    ASSIGN,
    COPY,
    FIRST_SYMBOL,
    FIRST_VALUE,
    IGNORED,
    TASKS,
    VOCAB_SIZE,
    Example,
    example,
    train_tasks,
)
from elastic_ring.data.source import TextFiles
from tests.unit.attention.attention_rings import one_thread

LENGTH, BLOCK = 128, 8


def examples(name: str, num: int = 50) -> list[Example]:
    return [example(name, LENGTH, BLOCK, 0, number) for number in range(num)]


@pytest.mark.parametrize("name", TASKS)
def test_a_task_is_a_function_of_its_seed_and_number(name: str) -> None:
    first, again, other = example(name, LENGTH, BLOCK, 0, 3), example(name, LENGTH, BLOCK, 0, 3), examples(name)[4]
    assert np.array_equal(first.tokens, again.tokens)
    assert np.array_equal(first.targets, again.targets)
    assert not np.array_equal(first.tokens, other.tokens)
    assert not np.array_equal(first.tokens, example(name, LENGTH, BLOCK, 1, 3).tokens)


@pytest.mark.parametrize("name", TASKS)
def test_every_answer_stands_where_its_distance_says(name: str) -> None:
    for one in examples(name):
        asked = np.flatnonzero(one.targets != IGNORED)
        assert asked.size
        assert one.tokens.min() > 0
        assert one.tokens.max() < VOCAB_SIZE
        for at in asked:
            source = at - one.distance[at]
            assert 0 < source <= at
            assert one.tokens[source] == one.targets[at]
            assert one.phase[at] == source % BLOCK
        assert (one.distance[one.targets == IGNORED] == -1).all()


def solve(name: str, tokens: np.ndarray, at: int) -> int:
    """What a reader of the whole sequence says, told only the rules of the task."""
    seen = tokens[: at + 1]
    if name == "selective copy":
        content = [t for t in seen[1 : list(seen).index(COPY)] if FIRST_SYMBOL <= t < FIRST_VALUE]
        return int(content[at - list(seen).index(COPY)])
    if name == "variables":
        at_ = next(i for i in range(1, at) if seen[i] == tokens[at] and seen[i + 1] == ASSIGN)
        named = seen[at_ + 2]
        root = next(i for i in range(1, at) if seen[i] == named and seen[i + 1] == ASSIGN)
        return int(seen[root + 2])
    before = next(i for i in range(1, at) if seen[i] == tokens[at])
    return int(seen[before + 1])


@pytest.mark.parametrize("name", TASKS)
def test_every_task_can_be_solved_from_what_is_shown(name: str) -> None:
    for one in examples(name):
        for at in np.flatnonzero(one.targets != IGNORED):
            assert solve(name, one.tokens, int(at)) == one.targets[at], (name, at)


def test_needles_come_from_all_distances_and_copies_from_all_phases() -> None:
    distances = [int(one.distance.max()) for one in examples("needle", 200)]
    assert min(distances) < LENGTH // 4
    assert max(distances) > 3 * LENGTH // 4
    phases = {int(p) for one in examples("boundary copy", 200) for p in one.phase[one.phase >= 0]}
    assert phases == set(range(BLOCK))


def test_the_model_sees_what_the_pattern_keeps_and_nothing_else() -> None:
    """An earlier token changes a later output only where the family's layers let it through."""
    with one_thread():
        for name, family in families(LENGTH, BLOCK).items():
            if isinstance(family, ContentFamily):
                continue
            config = SmallConfig(VOCAB_SIZE)
            masks = family.masks(LENGTH, config.num_heads)
            q, k, v = (torch.randn(1, LENGTH, 4, 16, generator=torch.Generator().manual_seed(i)) for i in range(3))
            mask = masks.of_layer(0, q.device)
            base = attend(q, k, v, mask)
            changed = v.clone()
            changed[:, 5] += 1
            moved = (attend(q, k, changed, mask) - base).abs().amax((0, 3)).T > 1e-6
            seen = torch.ones(4, LENGTH, dtype=torch.bool) if mask is None else mask[:, :, 5].expand(4, -1)
            seen = seen & (torch.arange(LENGTH) >= 5)
            assert torch.equal(moved, seen), name


def test_content_keeps_own_blocks_and_no_future() -> None:
    with one_thread():
        family = families(LENGTH, BLOCK)["content top-k"]
        assert isinstance(family, ContentFamily)
        masks = family.masks(LENGTH, 4)
        q, k = torch.randn(2, LENGTH, 4, 16), torch.randn(2, LENGTH, 4, 16)
        mask = masks.for_call(0, q, k)
        assert not mask.triu(1).any()
        assert mask.diagonal(dim1=2, dim2=3).all()
        per_row = mask[:, :, BLOCK - 1 :: BLOCK].sum(-1)
        assert int(per_row.max()) == family.top_k * BLOCK


def test_each_sequence_of_a_batch_chooses_as_it_does_alone() -> None:
    with one_thread():
        family = families(LENGTH, BLOCK)["content top-k"]
        masks = family.masks(LENGTH, 4)
        q, k = torch.randn(3, LENGTH, 4, 16), torch.randn(3, LENGTH, 4, 16)
        alone = [masks.for_call(0, *pair) for pair in zip(q.split(1), k.split(1), strict=True)]
        assert torch.equal(masks.for_call(0, q, k), torch.cat(alone))
        assert not torch.equal(alone[0], alone[1])


def test_the_causal_choice_does_not_change_with_later_queries_of_the_block() -> None:
    with one_thread():
        generator = torch.Generator().manual_seed(0)
        q, k, other = (torch.randn(1, LENGTH, 4, 16, generator=generator) for _ in range(3))
        first = (torch.arange(LENGTH) % BLOCK == 0)[None, :, None, None]
        moved = torch.where(first, q, other)
        for name, same in (("causal content", True), ("content top-k", False)):
            family = families(LENGTH, BLOCK)[name]
            masks = family.masks(LENGTH, 4)
            assert torch.equal(masks.for_call(0, q, k), masks.for_call(0, moved, k)) == same


def test_equal_seeds_train_to_equal_figures() -> None:
    with one_thread():
        family = families(64, 4)["sinks + window"]
        settings = Settings(steps=3, seq_len=64, block=4, per_task=1, num_evaluated=4)
        runs = [train_tasks(family, seed, settings) for seed in (0, 0, 1)]
        for run in runs:
            run.pop("train_s")
        assert runs[0] == runs[1]
        assert runs[0]["loss"] != runs[2]["loss"]
        assert SmallModel(SmallConfig(8), 0)(torch.zeros(1, 64, dtype=torch.int64), Masks(None, 64, 4)).shape == (
            1,
            64,
            8,
        )


def test_the_check_of_long_range_signal_finds_it_where_it_is_and_only_there() -> None:
    """Documents whose end repeats their beginning, beside documents of noise."""
    noise = np.random.default_rng(0).integers(97, 123, (6, 1025))
    repeating = noise.copy()
    repeating[:, -128:] = repeating[:, :128]
    bits = long_range_bits(noise, near=128, tail=128)
    assert bits["far"] == pytest.approx(bits["other"], abs=0.3)
    bits = long_range_bits(repeating, near=128, tail=128)
    assert bits["far"] < bits["other"] - 2
    assert bits["near"] == pytest.approx(bits["other"], abs=0.5)


def test_a_corpus_has_no_end_of_document_inside_a_sequence_and_keeps_held_out_ones_apart(tmp_path: Path) -> None:
    for number in range(30):
        (tmp_path / f"{number:02}.txt").write_text(f"{number:02} " * 400)
    found = corpus(128, 4, source=TextFiles(128, (str(tmp_path),)))
    assert found.held.shape == (4, 129)
    assert (found.sequences[:, :-1] < 256).all()
    assert len(found.training) + 4 == len(found.sequences)
    epoch = batch(found, 0, 0, len(found.training))
    assert sorted(row.tobytes() for row in epoch) == sorted(row.tobytes() for row in found.training)
    assert not np.array_equal(epoch, batch(found, 1, 0, len(found.training)))
