"""One layout for a whole model: the same wherever it is chosen, for fewer bytes, and training gives the same on it."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from elastic_ring import ElasticRingTrainer, RunConfig, ScalingConfig, StepConfig
from elastic_ring.attention.autolayout import Sizes, choose_layout, in_whole_blocks, price_dense
from elastic_ring.attention.layers import PatternedAttention
from elastic_ring.attention.layouts.layout import (
    Layout,
    contiguous,
    dealt,
    residue_class,
    striped,
    tokens_max_over_mean,
    zigzag,
)
from elastic_ring.attention.patterns.layers import LayerGroup, LayerPatterns
from elastic_ring.attention.patterns.parse import parse_pattern
from elastic_ring.attention.patterns.rules import Window
from elastic_ring.attention.plan.sparse_blocks import check_layer_blocks
from elastic_ring.costs import CostModel
from elastic_ring.mesh import Mesh
from elastic_ring.model.init import Initialiser, initialise_module
from elastic_ring.model.loss import language_model_loss
from elastic_ring.model.transformer import Transformer
from elastic_ring.train.startup.layouts import Layouts, attention_calls, check_layers
from elastic_ring.train.task import Batch, TrainingTask
from tests.unit.attention.attention_rings import ThreadRings, in_threads
from tests.unit.groups.processes import Membership, membership
from tests.unit.train import tiny_task
from tests.unit.train.test_pattern_training import MIXED, RandomSource, losses_on, patterned
from tests.unit.train.tiny_task import (
    STEP,
    facts_after_a_break,
    facts_of_steps,
    make_task,
)

AUTO = replace(STEP, layout="auto")
CALLS = tuple((layer, 8, 2, 64) for layer in range(4))
WINDOW = parse_pattern("window:256")


def task_of(text: str | None, num_tokens: int = 512, **settings: Any) -> TrainingTask:
    step = replace(AUTO, context_tokens=num_tokens)
    return make_task(step=step, pattern=None if text is None else parse_pattern(text), **settings)


# ------------------------------------------------------------ the choice


@pytest.mark.slow
def test_the_same_layout_comes_out_in_every_process_and_for_every_object_of_the_same_task():
    text, ours = "sinks:8+window:40;bigbird:1,1,2,seed=3,unit=16@1", {}
    for cp in (2, 3, 4):
        ours[cp] = Layouts(task_of(text)).choice(cp, "cpu")
        again = Layouts(task_of(text))
        again.choice(4, "cpu")
        assert again.choice(cp, "cpu") == ours[cp]
        assert ours[cp].layout.cp == cp
    program = (
        "from tests.unit.sparse.test_layout_auto import task_of\n"
        "from elastic_ring.train.startup.layouts import Layouts\n"
        f"layouts = Layouts(task_of({text!r}))\n"
        "print([layouts.choice(cp, 'cpu').layout.segments for cp in (4, 3, 2)])"
    )
    there = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert there.stdout.strip() == str([ours[cp].layout.segments for cp in (4, 3, 2)])


def test_a_window_is_split_so_that_less_is_sent_than_by_zigzag_and_the_reason_says_so():
    found = choose_layout(WINDOW, CALLS, 8192, 4)
    by_name = {price.layout.name: price for price in found.candidates}
    assert found.layout.segments == contiguous(8192, 4).segments
    assert by_name[found.layout.name].all_bytes * 2 <= by_name["zigzag"].all_bytes
    assert found.candidates[0].layout == found.layout
    assert f"against zigzag: {by_name['zigzag'].all_bytes:,} bytes" in found.why
    assert "4 attention calls" in found.why


def test_dense_layers_are_weighed_by_the_dense_ring():
    """Enough of them, and what suits the windows is too uneven."""
    mixed = parse_pattern("window:256;dense@3")
    sizes = Sizes(8, 2, 64, 2)
    window, both = (choose_layout(patterns, CALLS, 8192, 4) for patterns in (WINDOW, mixed))
    assert both.layout.name != "contiguous"
    for price in both.candidates:
        of_windows = next(p for p in window.candidates if p.layout.name == "contiguous")
        if price.layout.name == "contiguous":
            dense = price_dense(price.layout, sizes, CostModel())
            assert price.all_bytes == of_windows.all_bytes * 3 // 4 + dense.all_bytes
            assert price.forward_s == pytest.approx(of_windows.forward_s * 3 / 4 + dense.forward_s)
            assert price.work_max_over_mean > 1.3


def test_a_dense_layers_price_follows_its_tiles_bytes_and_figures():
    price, sizes, even = price_dense, Sizes(8, 2, 64, 2), zigzag(4096, 4)
    base = price(even, sizes, CostModel())
    assert base.work_max_over_mean == pytest.approx(1.0, abs=1e-3)
    assert price(contiguous(4096, 4), sizes, CostModel()).work_max_over_mean > 1.5
    assert price(even, sizes, CostModel(dense_flops=1e9)).forward_s > base.forward_s
    assert price(even, sizes, CostModel(call_s=1.0)).forward_s == pytest.approx(4.0, abs=0.01)
    # Every second stripe sees one tile more of each other rank.
    assert price(striped(4096, 4), sizes, CostModel(call_s=1.0)).forward_s > 20


def test_figures_can_change_the_choice():
    patterns = parse_pattern("window:512;dense@3")
    cheap_links, dear_links = (
        choose_layout(patterns, CALLS, 8192, 8, CostModel(link_bytes_per_s=bytes_per_s, call_s=call_s))
        for bytes_per_s, call_s in ((1e15, 1e-3), (1e9, 0.0))
    )
    assert cheap_links.candidates != dear_links.candidates
    assert cheap_links.candidates[0].forward_s != dear_links.candidates[0].forward_s


@pytest.mark.thinned
@pytest.mark.parametrize("num_tokens", [26, 509, 1024])
@pytest.mark.parametrize("cp", [2, 3, 8])
def test_every_rank_holds_as_many_tokens_as_any(num_tokens, cp):
    found = choose_layout(parse_pattern("longnet:64/1,256/4;strided:8,unit=4@2"), CALLS, num_tokens, cp)
    least = min(tokens_max_over_mean(layout) for layout in (contiguous(num_tokens, cp), zigzag(num_tokens, cp)))
    for price in found.candidates:
        assert tokens_max_over_mean(price.layout) <= max(1.05, least * 1.05)
        assert min(price.layout.num_tokens(rank) for rank in range(cp)) > 0


class Chosen(Window):
    """Stands for a rule whose keys content chooses: it has no schedule before a call."""

    awaits_content = True

    def sees(self, q: Any, k: Any) -> Any:
        raise AssertionError("asked before a call")


@pytest.mark.parametrize(
    ("patterns", "calls", "cp", "word"),
    [
        (None, CALLS, 4, "densely"),
        (parse_pattern("dense"), CALLS, 4, "densely"),
        (WINDOW, CALLS, 1, "one rank"),
        (WINDOW, (), 4, "without running it"),
        (LayerPatterns((LayerGroup((Chosen(8) | Window(4),)),)), CALLS, 4, "content chooses"),
        (LayerPatterns((LayerGroup((Chosen(8),), (2,)), LayerGroup((Window(4),)))), CALLS, 4, "content chooses"),
    ],
)
def test_where_nothing_can_be_weighed_it_is_zigzag_and_says_why(patterns, calls, cp, word):
    found = choose_layout(patterns, calls, 4096, cp)
    assert found.layout == zigzag(4096, cp)
    assert found.why.startswith("zigzag: ")
    assert word in found.why


def test_gpus_get_layouts_of_whole_blocks_only():
    patterns = parse_pattern("bigbird:3,1,2")
    found = choose_layout(patterns, CALLS, 128 * 20, 2, whole_blocks=True)
    anywhere = choose_layout(patterns, CALLS, 128 * 20 + 64, 2)
    assert found.candidates
    assert all(in_whole_blocks(price.layout) for price in found.candidates)
    assert not all(in_whole_blocks(price.layout) for price in anywhere.candidates)
    # 6 blocks on 2 ranks: zigzag would cut one in half, and is not taken.
    odd = choose_layout(patterns, CALLS, 128 * 6, 2, whole_blocks=True)
    assert odd.layout.name != "zigzag"
    check_layer_blocks(patterns, odd.layout)
    none = choose_layout(patterns, CALLS, 1000, 2, whole_blocks=True)
    assert none.layout == zigzag(1000, 2)
    assert "no layout cuts between blocks" in none.why


def test_a_pattern_that_does_not_fit_the_calls_is_refused():
    with pytest.raises(ValueError, match="layer 3: the pattern has no rules"):
        choose_layout(parse_pattern("window:8@0-2"), CALLS, 4096, 2)


# ------------------------------------------------------------ the task


def test_the_models_attention_calls_are_listed_with_their_layers():
    assert attention_calls(patterned()) == ((0, 2, 1, 8), (1, 2, 1, 8))
    assert attention_calls(make_task()) == ((0, 2, 1, 8), (1, 2, 1, 8))


def twice_backwards(model: Any, batch: Batch) -> Any:
    """A loss whose model calls its layers in another order, and then wants a value."""
    x = torch.zeros(1, batch.tokens.size(1), 2, 8)
    for layer in (1, 0, 1):
        x = batch.attention.layer(layer)(x, x, x)  # type: ignore[attr-defined]
    return x.sum().item(), 1


def test_layers_are_those_that_the_model_names_not_their_order():
    assert attention_calls(patterned(loss=twice_backwards)) == ((1, 2, 2, 8), (0, 2, 2, 8), (1, 2, 2, 8))


def ours(pattern: str, **settings: Any) -> TrainingTask:
    """Our decoder of two layers under its own loss: what attends is sure."""
    return make_task(pattern=parse_pattern(pattern), **{"loss": language_model_loss, **settings})


@pytest.mark.parametrize(
    ("pattern", "named"),
    [
        ("window:12;dense@99", "dense@99' has rules for layer 99, but the model attends in layers 0, 1: name"),
        ("dense@1", "layer 0: the pattern has no rules for it"),
        ('{"groups": [{"heads": [{"count": 3, "rule": "window:8"}, {"rule": "dense"}]}]}', "rules for 4 heads"),
    ],
)
def test_rules_for_what_our_decoder_does_not_have_are_refused(pattern, named):
    with pytest.raises(ValueError, match=named):
        check_layers(ours(pattern))
    check_layers(ours("window:12;dense@1"))


def test_fit_refuses_them_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setattr("elastic_ring.trainer.ray_session", None)  # it would start Ray
    task = make_task()
    trainer = ElasticRingTrainer(
        task.model,
        task.data,
        step_config=task.step,
        pattern="window:12;dense@99",
        run_config=RunConfig("no", run_dir=str(tmp_path / "run")),
    )
    with pytest.raises(ValueError, match="has rules for layer 99"):
        trainer.fit()


def test_a_model_that_does_not_say_which_layer_calls_is_refused_where_layers_differ():
    def direct(model: Any, batch: Batch) -> Any:
        x = torch.zeros(1, batch.tokens.size(1), 2, 8)
        return batch.attention(x, x, x).sum(), 1

    with pytest.raises(ValueError, match="does not say which layer calls"):
        check_layers(ours("window:12;dense@1", loss=direct))
    check_layers(ours("window:12", loss=direct))


def test_what_another_loss_calls_is_not_sure_and_told_in_the_log(caplog):
    def with_head(model: Any, batch: Batch) -> Any:
        loss, counted = language_model_loss(model, batch)
        num_targets = int(counted)  # a value, which the meta device has not
        x = torch.zeros(1, batch.tokens.size(1), 2, 8)
        return loss + batch.attention.layer(2)(x, x, x).sum(), num_targets  # type: ignore[attr-defined]

    check_layers(ours("window:12;dense@2", loss=with_head))
    assert "has rules for layer 2, but the model attends in layers 0, 1; checked with one pass" in caplog.text
    caplog.clear()
    check_layers(ours("window:12;dense@5", loss=twice_backwards))
    assert caplog.text == "", "its loss does not even call the model"


def test_a_named_layout_is_taken_as_it_is_and_an_unknown_one_refused():
    assert Layouts(make_task(pattern=WINDOW)).choice(2, "cpu").layout == zigzag(STEP.context_tokens, 2)
    with pytest.raises(ValueError, match="layout='automatic': must be one of contiguous, zigzag, auto"):
        StepConfig(layout="automatic")


def test_figures_are_part_of_what_a_run_is_and_serve_only_a_layout_that_is_chosen(tmp_path):
    task, path = make_task(), tmp_path / "machine.json"
    CostModel().write(path)
    make = partial(ElasticRingTrainer, task.model, task.data, pattern="window:8")

    def digest(cost_model: Any) -> str:
        return make(step_config=AUTO, cost_model=cost_model).submission().digest

    assert digest(None) == digest(None)
    assert digest(CostModel()) == digest(str(path)) == digest(path)
    assert len({digest(None), digest(CostModel()), digest(CostModel(call_s=1.0))}) == 3
    with pytest.raises(ValueError, match="set layout='auto', or leave cost_model out"):
        make(step_config=STEP, cost_model=path)
    path.write_text("{}")
    with pytest.raises(ValueError, match="jobs/calibrate"):
        make(step_config=AUTO, cost_model=path)


def test_fit_says_in_one_line_which_layout_and_why(tmp_path, monkeypatch, caplog):
    class Reached(RuntimeError):
        pass

    def stop(scaling: Any, lease_s: float) -> Any:
        raise Reached

    monkeypatch.setattr("elastic_ring.trainer.ray_session", stop)  # it would start Ray
    caplog.set_level("INFO", logger="elastic_ring.train.startup.layouts")
    for device, num_tokens, text in (("cpu", 509, "window:64"), ("cuda", 768, "bigbird:2,0,1")):
        caplog.clear()
        step = StepConfig(
            steps=1,
            global_batch=2,
            context_tokens=num_tokens,
            layout="auto",
            deterministic=False,
            param_dtype="bfloat16" if device == "cuda" else "float32",
        )
        model = partial(Transformer, replace(tiny_task.MODEL, head_dim=64))
        trainer = ElasticRingTrainer(
            model,
            RandomSource(num_tokens),
            step_config=step,
            pattern=text,
            scaling_config=ScalingConfig(device=device),
            run_config=RunConfig("auto", run_dir=str(tmp_path / device)),
        )
        with pytest.raises(Reached):
            trainer.fit()
        said = [record.message for record in caplog.records if record.message.startswith("layout auto at cp=2: ")]
        assert len(said) == 1
        assert Layouts(trainer.task).choice(2, device).why in said[0]


# ------------------------------------------------------------ training


@pytest.fixture(scope="module")
def six() -> Iterator[Membership]:
    with membership(6) as made:
        yield made


def passes(rings: ThreadRings, text: str, layout: Layout) -> tuple[torch.Tensor, list[torch.Tensor], int]:
    """Loss and gradients of the fp64 tiny model summed over the ranks, and bytes sent, of one sequence."""
    config = replace(tiny_task.MODEL, dtype="float64")
    model = Transformer(config)
    initialise_module(model, Initialiser(0, config.num_layers))
    tokens = torch.arange(layout.seq_len).unsqueeze(0) * 5 % config.vocab_size

    def work(cp_rank: int) -> tuple[torch.Tensor, list[torch.Tensor], int]:
        own = copy.deepcopy(model)
        group = rings.groups(layout.cp)[cp_rank]
        attention = PatternedAttention(parse_pattern(text), layout, cp_rank, group)
        mine = layout.scatter(tokens, cp_rank, 1)
        loss, _ = own(
            mine, positions=layout.positions(cp_rank).unsqueeze(0), document_ids=mine, attention=attention, targets=mine
        )
        loss.backward()
        grads = [p.grad for p in own.parameters() if p.grad is not None]
        return loss.detach(), grads, sum(attention.ledger.sent_bytes.values())

    rings.groups(layout.cp)
    found = in_threads(layout.cp, work)
    grads = [torch.stack(parts).sum(0) for parts in zip(*(own for _, own, _ in found), strict=True)]
    return torch.stack([loss for loss, _, _ in found]).sum(), grads, sum(sent for _, _, sent in found)


@pytest.mark.parametrize("cp", [2, 4])
def test_on_the_chosen_layout_a_model_gives_zigzags_results_and_a_window_sends_less(rings, cp):
    """Loss and every gradient in fp64, to rounding; bytes of both passes as counted on the wire."""
    chosen = Layouts(task_of("window:40", 509)).choice(cp, "cpu").layout
    assert chosen.segments != zigzag(509, cp).segments
    loss, grads, sent = passes(rings, "window:40", chosen)
    wanted, wanted_grads, by_zigzag = passes(rings, "window:40", zigzag(509, cp))
    torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=1e-12)
    for got, want in zip(grads, wanted_grads, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)
    assert 0 < sent < by_zigzag


@pytest.mark.parametrize("kind", ["striped", "residue class", "balanced"])
def test_whatever_layout_is_chosen_dense_and_sparse_layers_give_zigzags_results(rings, kind):
    """Every kind that is weighed, in pieces of 16 tokens, with a dense layer beside the sparse one."""
    text = "strided:4,2,unit=16;dense@1"
    layouts = {
        "striped": striped(509, 3, unit_tokens=16),
        "residue class": residue_class(509, 3, 4, unit_tokens=16),
        "balanced": dealt(np.arange(509), 3, 4, unit_tokens=16),
    }
    loss, grads, _ = passes(rings, text, layouts[kind])
    wanted, wanted_grads, _ = passes(rings, text, zigzag(509, 3))
    torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=1e-12)
    for got, want in zip(grads, wanted_grads, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_training_on_the_chosen_layout_gives_the_losses_of_zigzag_on_every_ring(six):
    for text in ("window:5", MIXED):
        for mesh in (Mesh(1, 2), Mesh(2, 3)):
            wanted = losses_on(six, mesh, patterned(text))
            assert losses_on(six, mesh, patterned(text, step=AUTO)) == pytest.approx(wanted, abs=1e-5), (text, mesh)


@pytest.mark.slow
def test_a_step_on_the_chosen_layout_that_breaks_off_and_runs_again_gives_the_same_bits(six):
    square, task = Mesh(2, 2), patterned("window:5", step=AUTO)
    assert facts_after_a_break(six, square, task, 2, "backward") == facts_of_steps(six, square, task)
