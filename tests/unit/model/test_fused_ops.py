"""Layers whose pieces torch.compile has made: the eager result but for rounding, the same bits in every process,
nothing compiled after the warm-up without a word, and no start without a compiler."""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch import Tensor

from elastic_ring import trainer
from elastic_ring.attention.layouts.layout import make_layout
from elastic_ring.attention.patterns.pattern import Pattern
from elastic_ring.attention.plan.schedule import plan
from elastic_ring.attention.ring import RingAttention
from elastic_ring.config import RunConfig
from elastic_ring.mesh import Mesh
from elastic_ring.model import fused_ops
from elastic_ring.model.fused_ops import OPTIONS
from elastic_ring.model.init import Initialiser, initialise_module
from elastic_ring.model.transformer import Rotation, Transformer
from elastic_ring.train.startup.check import check_model
from elastic_ring.train.startup.compiling import (
    CompileWatch,
    check_compiler,
    check_compiles,
    find_compiler,
    report_compiled,
    slice_lengths,
    warm_up_model,
)
from elastic_ring.train.task import TrainingTask
from tests.unit.groups.processes import Membership, membership
from tests.unit.train.tiny_task import (
    MODEL,
    STEP,
    RandomText,
    abort_until_paused,
    begin,
    break_off,
    facts,
    make_task,
    plan_break,
    rebuild,
    run_steps,
)

pytestmark = [
    # torch looks at it, and hides its own warning in a way that comes after a filter which makes errors of warnings.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),  # its own too
]

COMPILED = replace(MODEL, compile_blocks=True)
CONTEXT = 27  # two ranks of a ring hold 14 and 13
RING, REPLICAS = Mesh(1, 2), Mesh(2, 1)


def without_inductor() -> None:
    """Dynamo and AOTAutograd as ever, their graphs run as they are: seconds less for all that is not about bits."""

    def quick(piece: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(piece, fullgraph=True, dynamic=False, backend="aot_eager")

    fused_ops._made = quick
    fused_ops.compiled.cache_clear()
    torch._dynamo.reset()


@pytest.fixture
def quick() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused_ops, "_made", None)  # to be put back
        without_inductor()
        yield
    fused_ops.compiled.cache_clear()


@pytest.fixture(autouse=True)
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One thread, and compiled code in a folder of this run, shared by its tests."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "compiled"))
        yield
    torch.set_num_threads(before)


def pass_of(num_tokens: int = 24, documents: tuple[int, ...] = (0,), **settings: Any) -> list[Tensor]:
    """The loss and all gradients of one sequence."""
    config = replace(MODEL, **settings)
    model = Transformer(config)
    initialise_module(model, Initialiser(0, config.num_layers))
    ring = RingAttention(plan(Pattern(True, documents), make_layout("contiguous", num_tokens, 1)), 0, None)
    tokens = torch.arange(num_tokens).unsqueeze(0) * 7 % config.vocab_size
    positions = torch.arange(num_tokens).unsqueeze(0)
    loss, _ = model(tokens, positions=positions, document_ids=tokens, attention=ring, targets=tokens.roll(-1, 1))
    loss.backward()
    return [loss.detach(), *(param.grad for param in model.parameters() if param.grad is not None)]


# ------------------------------------------------------------ what it computes


def digest_of(tensors: list[Tensor]) -> str:
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()


@pytest.mark.slow
def test_compiled_layers_give_the_eager_loss_and_gradients_and_recomputing_them_changes_no_bit() -> None:
    eager, kept = (pass_of(compile_blocks=compiled, checkpoint_activations=False) for compiled in (False, True))
    assert len(eager) == len(kept)
    for found, wanted in zip(kept, eager, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    for offload in (False, True):
        again = pass_of(compile_blocks=True, checkpoint_activations=True, offload_activations=offload)
        assert all(map(torch.equal, kept, again))


def half_a_pass() -> list[Tensor]:
    """The result and gradients of what comes after attention, of the shapes above: half of what there is to compile."""
    generator = torch.Generator().manual_seed(0)
    width, ffn = MODEL.width, MODEL.ffn_width
    shapes = [(1, 24, width), (1, 24, 16), (width, 16), (width,), (ffn, width), (ffn, width), (width, ffn)]
    drawn = [torch.randn(shape, generator=generator) for shape in shapes]
    inputs = [x.requires_grad_() if x.dim() == 3 else torch.nn.Parameter(x) for x in drawn]
    out = fused_ops.compiled().after(*inputs, MODEL.norm_eps)
    return [out.detach(), *torch.autograd.grad(out, inputs, torch.ones_like(out))]


BITS = """
import torch
torch.set_num_threads(1)
from tests.unit.model.test_fused_ops import digest_of, half_a_pass
print(digest_of(half_a_pass()), torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"])
"""


def bits(compiled: Path) -> tuple[str, int]:
    """Digest of `half_a_pass` in a process of its own; how many graphs it found in the folder."""
    done = subprocess.run(
        [sys.executable, "-c", BITS],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(compiled)},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    digest, hits = done.stdout.split()
    return digest, int(hits)


@pytest.mark.slow
def test_another_process_gets_the_same_bits_whether_it_compiles_anew_or_finds_it_done(tmp_path: Path) -> None:
    here = digest_of(half_a_pass())
    anew, hits = bits(tmp_path)
    assert hits == 0
    found, hits = bits(tmp_path)
    assert hits == 2  # forward and backward
    assert here == anew == found


@pytest.mark.usefixtures("quick")
@pytest.mark.slow
def test_documents_and_layers_and_modules_share_what_one_has_compiled() -> None:
    watch = CompileWatch()
    pass_of(compile_blocks=True)
    assert len(watch.news()) == 2
    pass_of(compile_blocks=True, documents=(0, 7, 9))
    pass_of(compile_blocks=True, documents=(0, 23), num_layers=3, checkpoint_activations=False)
    assert watch.news() == []


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_every_length_is_compiled_for_itself_and_more_of_them_than_torch_takes_by_default() -> None:
    weights = [torch.ones(8), *torch.ones(3, 4, 8)]

    def run(num_tokens: int) -> None:
        rotation = Rotation.at(torch.arange(num_tokens).unsqueeze(0), 4, 10_000.0, torch.float32)
        fused_ops.compiled().before(torch.ones(1, num_tokens, 8), *weights, rotation.cos, rotation.sin, 1e-5, 4)

    watch = CompileWatch()
    for num_tokens in range(20, 30):
        run(num_tokens)
        assert len(watch.news()) == 1
    for num_tokens in range(20, 30):
        run(num_tokens)
    assert watch.news() == []


def test_nothing_is_chosen_by_timing_and_torch_knows_every_option() -> None:
    known = torch._inductor.config.get_config_copy()
    assert set(OPTIONS) <= set(known)
    assert OPTIONS["deterministic"] is True
    assert not any(value for name, value in OPTIONS.items() if name not in ("deterministic", "compile_threads"))


# ------------------------------------------------------------ on a ring, through what happens to it


@pytest.fixture(scope="module")
def pair() -> Iterator[Membership]:
    with membership(2) as made:
        yield made


def compiled_task(**settings: Any) -> TrainingTask:
    step = replace(STEP, context_tokens=CONTEXT)
    task = make_task(data=RandomText(CONTEXT), step=step)
    return replace(task, model=partial(Transformer, replace(COMPILED, **settings)))


def warm_up_kernels(me: Any, task: TrainingTask, cp: int) -> None:
    without_inductor()
    warm_up_model(task, torch.device("cpu"), cp)
    me.compiles = CompileWatch()


def compiled_since(me: Any) -> list[str]:
    return me.compiles.news()


def check(me: Any) -> None:
    check_model(me.state.task, me.groups, me.state)


def validate(me: Any) -> dict[str, float]:
    return me.state.validate(me.state.loader, 2)


@pytest.mark.slow
@pytest.mark.thinned(num=1)
@pytest.mark.parametrize(
    ("mesh", "offload", "together"),
    [(RING, False, 1), (REPLICAS, True, 1), (RING, False, 2)],
    ids=["ring", "replicas", "passes"],
)
def test_a_warm_process_compiles_nothing_in_its_steps_nor_after_a_break(
    pair: Membership, mesh: Mesh, offload: bool, together: int
) -> None:
    """Three sequences a step: on one ring a pass of two and one of one."""
    task = compiled_task(offload_activations=offload)
    task = replace(task, step=replace(task.step, sequences_per_pass=together))
    assert slice_lengths(task, mesh.cp, "cpu") == {REPLICAS: (27,), RING: (13, 14, 26, 28)[: 2 * together]}[mesh]
    pair.all(warm_up_kernels, task, mesh.cp)
    pair.all(begin, pair.meeting(), mesh, task)
    pair.all(check)
    undisturbed = pair.all(run_steps, 4)
    ended = [fact["digest"] for fact in pair.all(facts)]
    pair.all(begin, pair.meeting(), mesh, task)
    pair.call(1, plan_break, "backward", 1) if mesh.cp == 2 else pair.call(1, plan_break, "reduce", 1)
    for rank in (0, 1):
        pair.start(rank, break_off, 4)
    assert pair.result(1) == "Broken"
    assert all(pair.now(rank, abort_until_paused) for rank in (0, 1))
    pair.result(0)
    pair.all(rebuild, pair.meeting(), mesh)
    again = pair.all(run_steps, 3)
    assert pair.all(compiled_since) == [[], []]
    assert [told[1:] for told in undisturbed] == again
    assert [fact["digest"] for fact in pair.all(facts)] == ended
    pair.all(begin, pair.meeting(), mesh, make_task(data=task.data, step=task.step))
    for found, eager in zip(undisturbed, pair.all(run_steps, 4), strict=True):
        for one, other in zip(found, eager, strict=True):
            assert float.fromhex(one[0]) == pytest.approx(float.fromhex(other[0]), rel=1e-5)


def test_every_length_of_a_pass_is_warmed_up() -> None:
    """Of three sequences a ring has three, two or one; of 27 tokens a rank of two has 13 or 14."""
    task = compiled_task()
    for together, lengths in ((1, (13, 14)), (2, (13, 14, 26, 28)), (3, (13, 14, 26, 28, 39, 42))):
        step = replace(task.step, sequences_per_pass=together)
        assert slice_lengths(replace(task, step=step), 2, "cpu") == lengths


@pytest.mark.slow
def test_passes_without_gradients_are_compiled_in_the_warm_up_where_the_run_validates(pair: Membership) -> None:
    for every, compiled in ((2, 0), (0, 2)):
        task = compiled_task()
        task = replace(task, step=replace(task.step, val_every_steps=every))
        pair.all(warm_up_kernels, task, 2)
        pair.all(begin, pair.meeting(), RING, task)
        pair.all(run_steps, 1)
        pair.all(validate)
        assert list(map(len, pair.all(compiled_since))) == [compiled] * 2


# ------------------------------------------------------------ what an operator is told


def told_by(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Our own lines: torch keeps a trace of what it compiles in the same log."""
    return [record.getMessage() for record in caplog.records if record.name.startswith("elastic_ring")]


@pytest.mark.usefixtures("quick")
@pytest.mark.slow
def test_what_is_compiled_after_the_warm_up_is_named_once_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    pass_of(compile_blocks=True)
    watch = CompileWatch()
    with caplog.at_level(logging.WARNING):
        report_compiled(watch, 11)
        assert told_by(caplog) == []
        pass_of(37, compile_blocks=True)
        report_compiled(watch, 12)
        report_compiled(watch, 13)
    (told,) = told_by(caplog)
    assert told.startswith("step 12 compiled 2 more: before (")
    assert "after (" in told
    assert "expected 24, actual 37" in told
    assert "the warm-up did not cover it" in told


# ------------------------------------------------------------ no compiler


def nothing(device: str) -> str:
    return f"there is nothing for {device}"


def test_without_a_compiler_the_option_is_refused_with_the_way_out() -> None:
    wanted = "compile_blocks=True on device='cuda': there is nothing for cuda; or train without: compile_blocks=False"
    with pytest.raises(ValueError, match=wanted):
        check_compiler("cuda", nothing)
    task = compiled_task()
    with pytest.raises(ValueError, match="there is nothing for cpu"):
        check_compiles(task, "cpu", nothing)
    with pytest.raises(ValueError, match="there is nothing for cpu"):
        warm_up_model(task, torch.device("cpu"), 2, nothing)
    check_compiles(make_task(), "cpu", nothing)
    warm_up_model(make_task(), torch.device("cpu"), 2, nothing)


def test_a_machine_without_its_tools_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def said(device: str) -> str:
        return find_compiler(device) or "nothing is missing"

    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", lambda: 1 / 0)
    assert said("cpu") == "there is no C++ compiler (ZeroDivisionError): install g++, or name one in CXX"
    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", lambda: "g++")
    monkeypatch.setattr("sysconfig.get_path", lambda name: "/nowhere")
    assert said("cpu") == "there is no Python.h: install Python's development files"
    monkeypatch.setattr("torch.utils._triton.has_triton_package", lambda: False)
    assert said("cuda") == "there is no Triton: install the triton package of this torch"
    monkeypatch.setattr("torch.utils._triton.has_triton_package", lambda: True)
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert said("cuda") == "there is no C compiler, which Triton needs: install gcc, or name one in CC"


def test_a_run_without_a_compiler_ends_before_anything_is_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(trainer, "check_compiles", partial(check_compiles, find=nothing))
    task = compiled_task()
    run = RunConfig(run_dir=str(tmp_path / "run"))
    asked = trainer.ElasticRingTrainer(task.model, task.data, step_config=task.step, run_config=run)
    with pytest.raises(ValueError, match="there is nothing for cpu"):
        asked.fit()


def test_what_torch_fails_to_compile_is_refused_at_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise torch._dynamo.exc.TorchRuntimeError("no such instruction")

    monkeypatch.setattr(Transformer, "warm_up_kernels", broken)
    with pytest.raises(ValueError, match=r"torch\.compile failed \(no such instruction\); or train without"):
        warm_up_model(compiled_task(), torch.device("cpu"), 2)


def test_a_busy_gpu_without_memory_to_compile_on_is_no_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("97 GiB")

    monkeypatch.setattr(Transformer, "warm_up_kernels", full)
    warm_up_model(compiled_task(), torch.device("cpu"), 2)
    assert "too little memory to compile beside others, the first step will: 97 GiB" in caplog.text
