"""Merging, the registry of kernels and its self-test."""

from __future__ import annotations

import dataclasses
import logging
import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ring.attention import ring as ring_module
from elastic_ring.attention.kernels.adapters import aten, reference
from elastic_ring.attention.kernels.kernel import Kernel
from elastic_ring.attention.kernels.registry import covering, named, select
from elastic_ring.attention.kernels.verify import self_test
from elastic_ring.attention.layouts.layout import contiguous
from elastic_ring.attention.layouts.rows import Span
from elastic_ring.attention.merge import Accumulator, lse_for_backward, merge_all_
from elastic_ring.attention.options import RingOptions
from elastic_ring.attention.patterns.rules import Dense
from elastic_ring.attention.patterns.sparse import Pattern, SparsePattern
from elastic_ring.attention.plan.schedule import plan
from elastic_ring.attention.plan.sparse_schedule import plan_sparse
from elastic_ring.attention.ring import RingAttention
from elastic_ring.errors import RunFailed
from tests.unit.attention.attention_rings import Case, one_thread, relative_error, whole_attention

DENSE = covering("causal")
CPU = [backend for backend in DENSE if "cpu" in backend.devices]
ATEN, REFERENCE = CPU
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.mark.parametrize("parts", ["masked, seen", "seen, masked", "masked, masked"])
def test_a_fully_masked_part_changes_no_bit_and_two_give_no_nan(parts):
    masked = torch.zeros(1, 3, 2, 4), torch.full((1, 3, 2), -math.inf)
    kinds = {"seen": (torch.randn(1, 3, 2, 4), torch.randn(1, 3, 2)), "masked": masked}
    first, second = (kinds[kind] for kind in parts.split(", "))
    out, lse = first[0].clone(), first[1].clone()
    merge_all_(out, lse, [second])
    want = kinds["seen" if "seen" in parts else "masked"]
    assert torch.equal(out, want[0])
    assert torch.equal(lse, want[1])


def test_huge_scores_merge_without_overflow():
    out, lse = torch.ones(1, 1, 1, 2), torch.full((1, 1, 1), 3e4)
    merge_all_(out, lse, [(torch.zeros(1, 1, 1, 2), torch.full((1, 1, 1), 3e4))])
    assert torch.equal(out, torch.full((1, 1, 1, 2), 0.5))
    assert lse.item() == pytest.approx(3e4 + math.log(2))


def test_merging_split_keys_gives_attention_over_all_keys():
    q, k, v, _ = Case(cp=1, seq_len=30).tensors()
    total = Accumulator(q)
    for start, stop in ((0, 1), (1, 17), (17, 30)):
        total.add(Span(0, 30), *reference.forward(q, k[:, start:stop], v[:, start:stop], causal=False, scale=0.3))
    out, lse = reference.forward(q, k, v, causal=False, scale=0.3)
    assert relative_error(total.out, out) < 1e-14
    assert relative_error(total.lse, lse) < 1e-14


def test_rows_that_no_key_reached_have_zero_gradients():
    q, k, v, dout = Case(cp=1, seq_len=6).tensors()
    total = Accumulator(q)
    assert torch.equal(total.lse, torch.full_like(total.lse, -math.inf))
    lse = lse_for_backward(total.lse)
    assert torch.equal(lse, torch.full_like(lse, math.inf))
    for backend in CPU:
        grads = backend.backward(dout, q, k, v, total.out, lse, causal=False, scale=1.0)
        assert all(torch.equal(grad, torch.zeros_like(grad)) for grad in grads)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
@pytest.mark.parametrize("backend", CPU, ids=lambda b: b.name)
def test_a_backend_alone_agrees_with_autograd(backend, num_kv_heads, causal):
    case = Case(cp=1, seq_len=130, causal=causal, num_kv_heads=num_kv_heads)
    q, k, v, dout = case.tensors()
    scale = case.head_dim**-0.5
    out, lse = backend.forward(q, k, v, causal=causal, scale=scale)
    grads = backend.backward(dout, q, k, v, out, lse, causal=causal, scale=scale)
    assert lse.shape == q.shape[:3]
    for got, want in zip((out, *grads), whole_attention(case), strict=True):
        assert got.shape == want.shape
        assert relative_error(got, want) < 1e-13


@pytest.mark.parametrize("backend", CPU, ids=lambda b: b.name)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [4, 64, 160])
def test_every_cpu_backend_passes_its_self_test(backend, dtype, head_dim):
    assert self_test(backend, dtype=dtype, head_dim=head_dim) is None


@pytest.mark.parametrize("name", ["reference", "reference-sparse"])
def test_capped_scores_are_those_of_autograd_and_a_kernel_that_forgets_them_is_refused(name):
    kernel, case = named(name), Case(cp=1, seq_len=40)
    assert self_test(kernel.capped(1.0), dtype=torch.float64) is None
    forgetful = dataclasses.replace(kernel, softcap=1.0)
    assert "out" in (self_test(forgetful, dtype=torch.bfloat16) or "")
    q, k, v, dout = (x.requires_grad_() for x in case.tensors())
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(q.size(2) // k.size(2), 2))
    scores = (0.3 * torch.tanh(scores / 0.3)).masked_fill(torch.ones(40, 40).triu(1).bool(), -math.inf)
    out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v.repeat_interleave(q.size(2) // k.size(2), 2))
    wanted = [out, *torch.autograd.grad(out, (q, k, v), dout)]
    mine = REFERENCE.capped(0.3)
    with torch.no_grad():
        got, lse = mine.attend(q, k, v, "causal", 1.0)
        results = [got, *mine.gradients(dout, q, k, v, got, lse, "causal", 1.0)]
    assert all(relative_error(a, b) < 1e-13 for a, b in zip(results, wanted, strict=True))


def test_a_softcap_chooses_a_kernel_that_has_one_or_is_refused_by_name():
    for cover in ("causal", "mask"):
        chosen = select("cpu", torch.float32, 32, True, cover=cover, softcap=50.0)
        assert (chosen.name, chosen.softcap) == ("reference", 50.0)
    assert select("cpu", torch.float32, 32, True).name == "aten-cpu"
    with pytest.raises(ValueError, match="backend='aten-cpu' has no softcap, and the model caps its scores at 50"):
        select("cpu", torch.float32, 32, True, "aten-cpu", softcap=50.0)
    with pytest.raises(
        ValueError, match=r"head_dim=32, softcap=50, deterministic=True on cpu: aten-cpu has no softcap"
    ):
        select("cpu", torch.float32, 32, True, softcap=50.0, kernels=(ATEN,))
    flash = named("flash-attn-4").capped(50.0)
    assert "documents" not in flash.covers, "it has no backward pass of packed documents for them"
    assert flash.repeatable().backward.keywords == {"softcap": 50.0, "deterministic": True}


def _off(factor: float, **kernel: Any) -> Any:
    """`forward` or `backward` with its second result times a factor: lse or dk."""
    ((name, right),) = kernel.items()

    def run(*args: Any, **kwargs: Any) -> Any:
        first, second, *rest = right(*args, **kwargs)
        return (first, second * factor, *rest)

    return dataclasses.replace(ATEN, name="broken", **{name: run})


def _ignores_causal(*args: Any, causal: bool, scale: float) -> Any:
    return aten.cpu_forward(*args, causal=False, scale=scale)


def _local_lse(dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *, causal: bool, scale: float) -> Any:
    """The classic mistake: normalising by this tile's own keys instead of all keys."""
    out, lse = aten.cpu_forward(q, k, v, causal=causal, scale=scale)
    return aten.cpu_backward(dout, q, k, v, out, lse, causal=causal, scale=scale)


def _nan(*args: Any, **kwargs: Any) -> Any:
    out, lse = aten.cpu_forward(*args, **kwargs)
    return out * math.nan, lse


def _raises(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("no kernel image")


BROKEN = {
    "base-2 lse": _off(1 / math.log(2), forward=aten.cpu_forward),
    "no causal mask": dataclasses.replace(ATEN, name="broken", forward=_ignores_causal),
    "dk off by a hundredth": _off(1.01, backward=aten.cpu_backward),
    "tile's own lse in backward": dataclasses.replace(ATEN, name="broken", backward=_local_lse),
    "nan": dataclasses.replace(ATEN, name="broken", forward=_nan),
    "raises": dataclasses.replace(ATEN, name="broken", forward=_raises),
}


@pytest.mark.parametrize("backend", BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_backend_is_passed_over_loudly(backend, caplog):
    with caplog.at_level(logging.WARNING):
        chosen = select("cpu", torch.float32, 32, True, kernels=(backend, *DENSE))
    assert chosen is ATEN
    (record,) = caplog.records
    assert "broken fails its self-test" in record.getMessage()


def test_a_gpu_that_is_full_passes_over_no_kernel():
    """Another kernel would give other bits, and whoever asks later has memory again."""
    full = [True]

    def forward(*args: Any, **kwargs: Any) -> Any:
        if full:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return ATEN.forward(*args, **kwargs)

    tight = dataclasses.replace(ATEN, name="tight", forward=forward)
    with pytest.raises(torch.OutOfMemoryError):
        select("cpu", torch.float32, 24, True, kernels=(tight, REFERENCE))
    with pytest.raises(torch.OutOfMemoryError):
        self_test(dataclasses.replace(named("reference-sparse"), name="tight", forward=forward), head_dim=16)
    full.clear()
    assert select("cpu", torch.float32, 24, True, kernels=(tight, REFERENCE)).name == "tight"


def test_an_error_that_the_reference_meets_is_the_kernels(monkeypatch):
    """A kernel's own error may show only in what the device is asked next."""

    def breaks(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(reference, "forward", breaks)
    told = self_test(dataclasses.replace(ATEN, name="late"), head_dim=40)
    assert told == "RuntimeError: CUDA error: an illegal memory access was encountered"


def test_a_pass_that_cannot_be_kept_is_a_pass(tmp_path, caplog):
    (tmp_path / "cache").write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        assert self_test(ATEN, head_dim=48, cache_dir=tmp_path / "cache") is None
    assert "is not kept" in caplog.text


def test_nothing_is_chosen_in_silence_when_all_fail():
    with pytest.raises(RunFailed, match="tried broken"):
        select("cpu", torch.float32, 32, True, kernels=(BROKEN["nan"],))


def test_the_best_able_backend_is_chosen_and_a_pin_obeyed():
    limited = dataclasses.replace(ATEN, name="small", max_head_dim=64, deterministic=False)
    table = (limited, *DENSE)
    assert select("cpu", torch.float32, 64, False, kernels=table) is limited
    assert select("cpu", torch.float32, 65, False, kernels=table) is ATEN
    assert select("cpu", torch.float32, 64, True, kernels=table) is ATEN
    assert select("cpu", torch.float32, 64, True, "reference") is REFERENCE


@pytest.mark.parametrize(
    ("pin", "dtype", "message"),
    [
        ("flesh", torch.float32, "unknown; choose one of flash-attn-4, .*, aten-cpu, reference"),
        ("aten-cpu", torch.int32, "takes .* not torch.int32; leave backend out"),
        (None, torch.int32, "no attention backend"),
    ],
)
def test_impossible_choices_are_the_users_mistake(pin, dtype, message):
    with pytest.raises(ValueError, match=message):
        select("cpu", dtype, 32, True, pin)


def test_a_pass_is_kept_on_disk_and_a_failure_is_not(tmp_path):
    calls = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return aten.cpu_forward(*args, **kwargs)

    def judge(forward: Any, folder: Path) -> Any:
        # A new object each time, as in a new process: the verdict in memory is not found.
        backend = dataclasses.replace(ATEN, forward=lambda *args, **kwargs: forward(*args, **kwargs))
        return self_test(backend, cache_dir=folder)

    assert judge(counted, tmp_path) is None
    num_calls = len(calls)
    assert num_calls > 0
    assert judge(counted, tmp_path) is None
    assert len(calls) == num_calls
    for _ in range(2):
        assert judge(_nan, tmp_path / "other") is not None
    assert not (tmp_path / "other").exists()


def test_an_uninstalled_package_a_head_dim_or_a_missing_device_is_a_refusal_with_its_reason():
    cuda = {backend.name: backend for backend in DENSE if "cpu" not in backend.devices}
    assert list(cuda) == ["flash-attn-4", "cudnn", "flash-attn-2", "aten-flash", "flex"]
    missing = dataclasses.replace(ATEN, package="a-package-that-nobody-has")
    assert missing.refusal("cpu", torch.float32, 64, True) == "needs a-package-that-nobody-has, which is not installed"
    odd = dataclasses.replace(ATEN, head_dim_multiple=8)
    assert odd.refusal("cpu", torch.float32, 12, True) == "takes multiples of 8 as head_dim, not 12"
    assert cuda["cudnn"].refusal("cuda", torch.bfloat16, 64, True) == "is not deterministic"
    assert cuda["cudnn"].refusal("cuda", torch.float32, 64, False) is not None
    assert cuda["flex"].refusal("cpu", torch.float32, 64, False) == "runs on cuda, not on cpu"


def test_deterministic_picks_the_repeatable_form_of_a_fast_backend():
    fast = dataclasses.replace(ATEN, name="fast", deterministic=False, deterministic_backward=_same_backward)
    chosen = select("cpu", torch.float32, 32, True, kernels=(fast,))
    assert chosen.deterministic
    assert chosen.backward is _same_backward
    assert select("cpu", torch.float32, 32, False, kernels=(fast,)) is fast


def _same_backward(*args: Any, **kwargs: Any) -> Any:
    return aten.cpu_backward(*args, **kwargs)


@pytest.mark.parametrize(
    ("cover", "name"), [("full", "aten-cpu"), ("mask", "aten-cpu"), ("tables", "reference-sparse")]
)
def test_what_a_kernel_covers_is_tested_with_the_real_head_ratio_and_cached(cover, name, tmp_path):
    """Planted: wrong for three query heads per K/V head, and for nothing else."""
    right, calls = named(name), [0]

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any, **options: Any) -> Any:
        calls[0] += 1
        out, lse = right.forward(q, k, v, *rest, **options)
        kind = next((each for each in ("tables", "mask") if each in options), "full")
        return (out * 1.5 if kind == cover and q.size(2) == 3 * k.size(2) else out), lse

    def choose(head_ratio: int) -> Kernel:
        kernel = dataclasses.replace(right, forward=lambda *args, **options: forward(*args, **options))  # a new process
        return select(
            "cpu",
            torch.float32,
            16,
            True,
            name,
            cover=cover,
            head_ratio=head_ratio,
            cache_dir=tmp_path,
            kernels=(kernel,),
        )

    assert choose(1).name == name
    num_calls = calls[0]
    assert choose(1).name == name
    assert calls[0] == num_calls > 0
    with pytest.raises(RunFailed, match="tried aten-cpu" if cover == "full" else f"3 query heads .*{name} out"):
        choose(3)
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("cover", ["causal", "mask", "tables"])
def test_a_ring_asks_for_its_own_calls(cover, monkeypatch):
    asked: list[Any] = []

    def ask(*args: Any, **options: Any) -> Kernel:
        asked.append((args[2], options["head_ratio"], options["cover"]))
        return select(*args, **options)

    monkeypatch.setattr(ring_module, "select", ask)
    layout, q, k = contiguous(128, 1), torch.zeros(1, 128, 6, 24), torch.zeros(1, 128, 2, 24)
    sparse = plan_sparse(SparsePattern((Dense(),), 128), layout, 6, 2)
    kernel = "reference-sparse" if cover == "tables" else None
    ring = RingAttention(plan(Pattern(), layout) if cover == "causal" else sparse, 0, None, RingOptions(kernel=kernel))
    for _ in range(2):
        assert ring(q, k, k).shape == q.shape
    assert asked == [(24, 3, cover)]


def test_the_flag_that_aten_reads_is_set_for_its_calls_only_and_restored_by_the_last_thread(monkeypatch):
    """The first call in ends first, while the second has not read the flag yet."""
    from torch._inductor import config as inductor_config

    second_is_in, first_is_out = threading.Event(), threading.Event()
    modes: dict[str, int] = {}

    def op(dout: torch.Tensor, *_: Any, **__: Any) -> Any:
        if dout.size(1) == 1:
            assert second_is_in.wait(60)
            modes["first"] = torch.get_deterministic_debug_mode()
        else:
            second_is_in.set()
            assert first_is_out.wait(60)
            modes["second"] = torch.get_deterministic_debug_mode()
        return dout, dout, dout

    def call(num_rows: int) -> None:
        x = torch.zeros(1, num_rows, 1, 8)
        aten.flash_deterministic_backward(x, x, x, x, x, x[..., 0], causal=True, scale=1.0)

    def first() -> None:
        call(1)
        first_is_out.set()

    monkeypatch.setattr(aten, "_flash_backward_op", op)
    mode, compiled = torch.get_deterministic_debug_mode(), inductor_config.deterministic
    torch.set_deterministic_debug_mode("warn")  # as a worker has it
    try:
        threads = [threading.Thread(target=first), threading.Thread(target=call, args=(2,))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert torch.get_deterministic_debug_mode() == 1
    finally:
        torch.set_deterministic_debug_mode(mode)
    assert modes == {"first": 2, "second": 2}
    assert inductor_config.deterministic == compiled
