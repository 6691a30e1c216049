"""Compilations: none after the warm-up, for documents of any length; each one is counted and announced.

flash-attn-4 needs a GPU. Here a kernel with its compile keys and caches, which computes with the CPU's own, takes its
place behind the real adapter; `tests/gpu/test_compilations_on_gpu.py` makes the same claims of the real one.
"""

from __future__ import annotations

import itertools
import logging
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from elastic_ring.attention.kernels.adapters import aten, flash_attn, flex
from elastic_ring.attention.kernels.registry import named
from elastic_ring.attention.kernels.verify import warm_up_kernels
from elastic_ring.attention.layouts.layout import make_layout
from elastic_ring.attention.options import RingOptions
from elastic_ring.attention.patterns.sparse import Pattern
from elastic_ring.attention.plan.schedule import plan
from elastic_ring.attention.ring import RingAttention
from elastic_ring.attention.warmup import NullProcessGroup, length_classes, warm_up_variants
from elastic_ring.monitor.stamps import Phase, StampReader, StampWriter
from elastic_ring.runtime.notices import Compiled
from elastic_ring.runtime.worker.coordinator_client import StartWork
from elastic_ring.runtime.worker.member_parts import MemberParts, StepNotices
from elastic_ring.train.startup.compilations import EVENTS, CompileEvents, CompileWatch

CONTEXT = 1024
HEAD_DIM = 8
BACKEND = replace(
    named("flash-attn-4"),
    devices=("cpu",),
    dtypes=(torch.float32,),
    min_capability=None,
    package=None,
)


@dataclass
class JITCache:
    """As `flash_attn.cute.cache_utils.JITCache`: compiled kernels by variant."""

    cache: dict[Any, str] = field(default_factory=dict)

    def __contains__(self, key: Any) -> bool:
        return key in self.cache

    def __getitem__(self, key: Any) -> str:
        return self.cache[key]

    def __setitem__(self, key: Any, kernel: str) -> None:
        self.cache[key] = kernel


@dataclass(frozen=True)
class Tiles:
    """Rows of flash-attn-4's tiles on one architecture for one head dim."""

    forward: int
    backward_causal: int
    backward_full: int
    backward_keys: int


H100_64, H100_128, H100_256, B200 = Tiles(192, 128, 128, 128), Tiles(128, 64, 80, 128), Tiles(128, 64, 64, 48), None


def make_interface(tiles: Tiles | None) -> Any:
    """A module with the functions that the adapter calls, each with a compile cache; `tiles` None is sm_100."""
    interface: Any = ModuleType("flash_attn.cute.interface")
    interface.on_compile = lambda: None

    def look_up(function: Any, key: Any) -> None:
        if key not in function.compile_cache:
            interface.on_compile()
            function.compile_cache[key] = "compiled"
        assert function.compile_cache[key] == "compiled"

    def lengths(q: Tensor, k: Tensor, cuts: dict[str, Any]) -> tuple[int, int, Any]:
        """Queries, keys, and what else enters a key: of documents the longest, and whether they are many."""
        if not cuts:
            return q.size(1), k.size(1), None
        return cuts["max_seqlen_q"], cuts["max_seqlen_k"], cuts["cu_seqlens_q"].numel() - 1 > 256

    def by_document(cuts: dict[str, Any], call: Any, *tensors: Tensor) -> list[Tensor]:
        """`call` on each document of tensors (tokens, ...), the results end to end."""
        edges = cuts["cu_seqlens_q"].tolist()
        found = [call(*(x[None, a:b] for x in tensors)) for a, b in itertools.pairwise(edges)]
        return [torch.cat(each, dim=1)[0] for each in zip(*found, strict=True)]

    def forward(
        q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, causal: bool, return_lse: bool, **cuts: Any
    ) -> Any:
        num_rows, _, many = lengths(q, k, cuts)
        rows = num_rows * q.size(-2) // k.size(-2)
        if tiles is None:
            stages = 2 if rows > 128 else 1
            key: Any = (causal, stages, rows <= stages * 128, many)
        else:
            key = (causal, not causal or rows <= tiles.forward, many)
        look_up(interface._flash_attn_fwd, key)
        if cuts:
            call = partial(aten.cpu_forward, causal=causal, scale=softmax_scale)
            out, lse = by_document(cuts, call, q, k, v)
            return out, lse.t()
        out, lse = aten.cpu_forward(q, k, v, causal=causal, scale=softmax_scale)
        return out, lse.transpose(1, 2)

    def backward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        dout: Tensor,
        lse: Tensor,
        *,
        softmax_scale: float,
        causal: bool,
        deterministic: bool,
        dk: Tensor | None,
        dv: Tensor | None,
        **cuts: Any,
    ) -> Any:
        rows = 128 if tiles is None else tiles.backward_causal if causal else tiles.backward_full
        keys = 128 if tiles is None else tiles.backward_keys
        num_rows, num_keys, many = lengths(q, k, cuts)
        look_up(interface._bwd_preprocess, (rows, many))
        look_up(interface._flash_attn_bwd, (causal, deterministic, num_rows <= rows, num_keys <= keys, many))
        if cuts:
            call = partial(aten.cpu_backward, causal=causal, scale=softmax_scale)
            grads: Any = by_document(cuts, call, dout, q, k, v, out, lse.t())
            for place, grad in ((dk, grads[1]), (dv, grads[2])):
                if place is not None:
                    place.copy_(grad)
            return grads
        grads = aten.cpu_backward(dout, q, k, v, out, lse.transpose(1, 2), causal=causal, scale=softmax_scale)
        for place, grad in ((dk, grads[1]), (dv, grads[2])):
            if place is not None:
                place.copy_(grad)
        return grads

    def preprocess() -> None: ...

    interface._flash_attn_fwd, interface._flash_attn_bwd, interface._bwd_preprocess = forward, backward, preprocess
    for function in (forward, backward, preprocess):
        function.compile_cache = JITCache()  # type: ignore[attr-defined]
    return interface


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Puts an interface where the adapter and the counter find flash-attn-4's."""

    def planted(tiles: Tiles | None) -> Any:
        interface = make_interface(tiles)
        for name in ("flash_attn", "flash_attn.cute"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.setattr(sys.modules["flash_attn.cute"], "interface", interface, raising=False)
        monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", interface)
        EVENTS._attached.discard("flash_attn.cute.interface")
        flash_attn._flash4.cache_clear()
        return interface

    yield planted
    flash_attn._flash4.cache_clear()
    EVENTS._attached.discard("flash_attn.cute.interface")


def train_on_documents(cp: int, group: int, num_packings: int) -> None:
    """Forward and backward of every rank of a ring, over sequences packed with documents of 1 to 600 tokens."""
    layout = make_layout("zigzag", CONTEXT, cp)
    for seed in range(num_packings):
        draw, starts = random.Random(seed), [0]
        while starts[-1] < CONTEXT:
            starts.append(starts[-1] + int(2 ** draw.uniform(0.0, 9.2)))
        schedule = plan(Pattern(document_starts=tuple(start for start in starts if start < CONTEXT)), layout)
        for cp_rank in range(cp):
            nobody = NullProcessGroup(cp_rank, cp) if cp > 1 else None
            shapes = [(1, layout.num_tokens(cp_rank), heads, HEAD_DIM) for heads in (2 * group, 2, 2)]
            q, k, v = (torch.randn(shape, requires_grad=True) for shape in shapes)
            RingAttention(schedule, cp_rank, nobody, RingOptions(backend=BACKEND))(q, k, v).sum().backward()


@pytest.mark.thinned(num=4)
@pytest.mark.parametrize("tiles", [H100_64, H100_128, H100_256, B200], ids=["h100-64", "h100-128", "h100-256", "b200"])
@pytest.mark.parametrize(("cp", "group"), [(1, 1), (2, 4)])
def test_documents_of_any_length_meet_only_kernels_that_the_warm_up_compiled(
    plant: Any, tiles: Tiles | None, cp: int, group: int
) -> None:
    plant(tiles)
    watch = CompileWatch()
    assert warm_up_kernels(BACKEND, "cpu", torch.float32, HEAD_DIM, group) is None
    num_by_self_test = len(watch.news())
    num_tiles = warm_up_variants(BACKEND, "cpu", torch.float32, HEAD_DIM, group, cp, CONTEXT)
    assert (num_tiles == 1) == (cp == 1)
    num_by_variants = len(watch.news())
    train_on_documents(cp, group, 6)
    assert watch.news() == []
    assert watch.count == num_by_self_test + num_by_variants
    assert num_by_variants <= (5 if cp == 1 else 20)
    # The self-test alone leaves some for the steps of rings whose documents reach over slices.
    plant(tiles)
    watch = CompileWatch()
    assert warm_up_kernels(BACKEND, "cpu", torch.float32, HEAD_DIM, group) is None
    watch.news()
    train_on_documents(cp, group, 6)
    num_left = len(watch.news())
    assert num_left <= num_by_variants
    assert (num_left > 0) == (cp > 1)


def test_a_length_of_each_class_lies_between_the_edges_of_tiles() -> None:
    assert length_classes((64, 128), 1) == (64, 128, 192)
    assert length_classes((64, 128), 4) == (16, 32, 64, 128, 192)
    assert length_classes((), 4) == ()


@pytest.fixture
def member(tmp_path: Path) -> Iterator[Any]:
    """The part of a member that counts and announces, with real stamps."""
    made: Any = MemberParts.__new__(MemberParts)
    made.start_work = StartWork()
    made.stamps = StampWriter(tmp_path / "w").open()
    made.published = []
    made.notices = StepNotices("w", made.published.extend)
    EVENTS.listener = made.announce_compilation
    yield made
    EVENTS.listener = None
    made.stamps.close()


def compile_one(head_dim: int = HEAD_DIM, rows: int = 16) -> None:
    x = torch.zeros(1, rows, 2, head_dim)
    flash_attn.flash4_forward(x, x, x, causal=True, scale=1.0)


def test_a_compilation_in_a_step_has_a_phase_of_its_own_while_it_lasts(plant: Any, member: Any) -> None:
    interface, reader, seen = plant(H100_64), StampReader(member.stamps.path), []
    EVENTS.attach()
    interface.on_compile = lambda: seen.append(reader.read())
    member.stamps.stamp(3, Phase.BACKWARD, 1)
    compile_one()
    (during,), after = seen, reader.read()
    assert after is not None
    assert (during.step, during.phase, during.hop) == (3, Phase.COMPILE, 1)
    assert (after.step, after.phase, after.hop) == (3, Phase.BACKWARD, 1)
    compile_one()
    assert len(seen) == 1
    reader.close()


def test_a_worker_tells_what_it_compiled_before_and_after_step_0(
    plant: Any, member: Any, caplog: pytest.LogCaptureFixture
) -> None:
    interface = plant(H100_64)
    EVENTS.attach()
    compile_one()
    member.notices.after_step(0, True)
    assert member.published.pop() == Compiled(0, "w", [], 1)
    with caplog.at_level(logging.WARNING):
        member.notices.after_step(1, True)
        compile_one(rows=400)
        interface._flash_attn_bwd.compile_cache["a kernel"] = "compiled"
        member.notices.after_step(2, True)
    names = ["flash-attn-4 flash_attn_fwd", "flash-attn-4 flash_attn_bwd"]
    assert member.published == [Compiled(2, "w", names, 0)]
    assert caplog.messages == [f"step 2 compiled 2 more: {'; '.join(names)}; the warm-up did not cover it"]


def test_a_spare_that_joins_later_counts_its_warm_up_as_before(plant: Any, member: Any) -> None:
    plant(H100_64)
    EVENTS.attach()
    compile_one()
    member.notices.compilations.before_steps()
    member.notices.after_step(7, True)
    assert member.published == [Compiled(7, "w", [], 1)]


def test_a_kernel_that_is_loaded_from_disk_is_counted(plant: Any) -> None:
    interface = plant(H100_64)

    class Persistent(JITCache):
        def __contains__(self, key: Any) -> bool:
            self.cache[key] = "compiled"
            return True

    interface._flash_attn_fwd.compile_cache = Persistent()
    watch = CompileWatch()
    compile_one()
    compile_one()
    assert watch.news() == ["flash-attn-4 flash_attn_fwd"]


def test_torch_compile_is_announced_before_it_begins_and_when_it_has_ended() -> None:
    heard: list[str] = []
    EVENTS.listener = heard.append
    try:
        function = torch.compile(lambda x: x + 1, backend="eager")
        EVENTS.attach()
        function(torch.ones(3))
    finally:
        EVENTS.listener = None
    assert [name.split()[0] if name else "" for name in heard] == ["torch.compile", ""]


def test_flex_attention_that_a_step_compiles_is_named_once_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    traced = torch.compile(flex._by_token(), backend="eager", dynamic=False, fullgraph=True)
    monkeypatch.setattr(flex, "_compiled", lambda fullgraph: traced)

    def attend(num_tokens: int) -> None:
        q, k, v = torch.randn(3, 1, num_tokens, 2, 16).unbind()
        flex.masked(q, k, v, None, 0.25, or_fail=True)

    attend(16)
    watch = CompileWatch()
    attend(16)  # a warning of torch's in the first call of a process would change what it guards
    with caplog.at_level(logging.WARNING, "elastic_ring"):
        watch.of_step(11)
        attend(32)
        assert len(watch.of_step(12)[0]) == 1
        attend(16)
        watch.of_step(13)
    (told,) = [record.getMessage() for record in caplog.records if record.name.startswith("elastic_ring")]
    assert told.startswith("step 12 compiled 1 more: flex_attention_by_token (")
    assert "expected 16, actual 32" in told
    assert told.endswith("the warm-up did not cover it")


def test_triton_is_announced_and_counted_by_its_hooks_unless_they_are_taken(caplog: pytest.LogCaptureFixture) -> None:
    runtime, events = SimpleNamespace(jit_cache_hook=None, jit_post_compile_hook=None), CompileEvents()
    heard: list[str] = []
    events.listener = heard.append
    events._observe_triton(SimpleNamespace(runtime=runtime))
    about = {"fn": SimpleNamespace(name="_merge_kernel"), "already_compiled": False}
    assert runtime.jit_cache_hook(**about) is False
    runtime.jit_post_compile_hook(**about)
    assert (heard, events.names) == (["triton _merge_kernel", ""], ["triton _merge_kernel"])
    events.begin("torch.compile 0/0")
    runtime.jit_cache_hook(**about)
    runtime.jit_post_compile_hook(**about)
    assert heard[2:] == ["torch.compile 0/0", "triton _merge_kernel"], "the outer compilation goes on"
    events.end()
    assert heard[4:] == [""]
    with caplog.at_level(logging.WARNING):
        CompileEvents()._observe_triton(SimpleNamespace(runtime=runtime))
    assert "neither counted nor announced" in caplog.text
