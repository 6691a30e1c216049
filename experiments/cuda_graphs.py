"""Capture of a ring's passes as CUDA graphs: one host launch per pass, hops included, and a few copies.

With short slices or few visible blocks, kernels end before Python launches the next ones, and the GPUs idle. The
capture runs the ring's own kernels in the same order, so results are bitwise equal if the kernels are deterministic.

Intended for custom training loops whose groups live as long as their processes. A replay creates no work that a group's
timeout or watchdog could observe: if a rank is lost, its peers wait forever. NCCL's abort waits until all graphs that
contain one of its operations are destroyed (`commDestroySync`; also vllm-project/vllm#39846), so groups that must abort
within a second, like the trainer's, must not be captured.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.autograd.graph import increment_version

from elastic_ring.attention.comm.exchange import Group, HopLedger
from elastic_ring.attention.recomputation import Result
from elastic_ring.attention.ring import RingAttention
from elastic_ring.errors import PeerFailed
from experiments.peer_exchange import PeerRing

_Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

FORGETFUL = frozenset({"flex"})
"""Kernels whose calls use more memory than they receive or allocate."""
NUM_WARM_UPS = 2
"""Passes before the capture, to compile kernels, connect and allocate memory."""


def make_graphed(
    ring: RingAttention,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    copy_grads: bool = True,
) -> GraphedRing:
    """`ring`, a `RingAttention`, captured for tensors like q (B, S_local, H, D), k and v
    (B, S_local, Hkv, D).

    With `copy_grads` False, backward returns the graph's own gradient tensors, which the next replay overwrites. Use
    this only if projections consume them at once: a parameter reached through views alone would have its `.grad` in
    them and lose it silently.

    Collective: all ranks capture at the same point and replay in the same order. A rank whose capture failed must tell
    the others, or their first replay waits for it. Warm-up passes and the capture count in the ring's ledger; replays
    do not.

    Raises: what a call would raise, and `ValueError` for tensors that are not on a GPU, for a ring with an observer or
    events, with a transport other than NCCL or with blocks that content chose, and for a kernel that may free tensors
    that a graph still reads.
    """
    ring.check_call(q, k, v)
    check_graphable(ring, q, k)
    if not q.is_cuda:
        raise ValueError(f"device {q.device}: CUDA graphs are of GPUs; elsewhere call the ring itself")
    return GraphedRing(_capture(ring, (q, k, v), q.size(-1) ** -0.5 if scale is None else scale), copy_grads)


def check_graphable(ring: RingAttention, q: torch.Tensor, k: torch.Tensor) -> None:
    """Raises `ValueError` where replaying a CUDA graph of such calls would differ from making them."""
    check_captured(ring.options.observer, ring.ledger, ring.group, q.device)
    if isinstance(ring, PeerRing):
        raise ValueError("the ring has a memory, whose flags count messages and so fit one pass; leave memory out")
    if not ring.schedule.is_dense:
        if ring.schedule.for_one_call:
            raise ValueError("the schedule is of blocks that content chose for one call; plan a static pattern")
        return
    backend = ring.kernel_for(q, k.size(2))
    if backend.name in FORGETFUL:
        raise ValueError(
            f"kernel {backend.name} keeps tensors of its own that it forgets, while a graph would still read them;"
            " take another kernel, or tensors of another type"
        )


def check_captured(observer: object, ledger: HopLedger, group: Group | None, device: torch.device) -> None:
    """Check that a call can be captured in a CUDA graph: replays run no Python and only NCCL's device operations."""
    if observer is not None:
        raise ValueError("the ring has an observer, which no replay would call; leave observer out")
    if ledger.keep_events:
        raise ValueError("keep_events=True: the events of a graph tell no times; set it False")
    if group is None:
        return
    backend: object = group._get_backend(device) if isinstance(group, dist.ProcessGroup) else group
    if not isinstance(backend, getattr(dist, "ProcessGroupNCCL", ())):
        raise ValueError(f"the ring's group works through {type(backend).__name__}; a CUDA graph holds NCCL's alone")


class _Passes:
    """The two graphs of a ring and the memory that they use, which must outlive the ring's own references."""

    def __init__(self, inputs: _Three, out: torch.Tensor, dout: torch.Tensor, grads: _Three) -> None:
        self.inputs, self.out, self.dout, self.grads = inputs, out, dout, grads
        self.forward: Any = None
        self.backward: Any = None
        self.over: Any = None  # the event recorded after the last replay
        self.held: list[Any] = []

    def mark(self) -> None:
        """Record the end of a replay on the current stream."""
        if self.over is not None:
            self.over.record(torch.cuda.current_stream(self.out.device))


@torch.inference_mode(False)
@torch.no_grad()
def _capture(ring: RingAttention, like: _Three, scale: float) -> _Passes:
    q, k, v = (x.detach().clone(memory_format=torch.contiguous_format) for x in like)
    dout = torch.zeros_like(q)
    forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()

    def run_backward(result: Result) -> _Three:
        saved = (q, k, v, result.out, result.lse)
        return ring.run_backward(dout, saved, scale, result.call_index, result.keys)

    stream = torch.cuda.Stream(q.device)
    stream.wait_stream(torch.cuda.current_stream(q.device))
    # Other threads may use CUDA during the capture: heartbeats, a group's watchdog.
    options: Any = {"stream": stream, "capture_error_mode": "thread_local"}
    try:
        with torch.cuda.stream(stream):  # restores the stream even if ending the capture raises
            for _ in range(NUM_WARM_UPS):
                run_backward(ring.run_forward(q, k, v, scale))
            with capturing(forward, **options):
                result = ring.run_forward(q, k, v, scale)
            with capturing(backward, pool=forward.pool(), **options):
                grads = run_backward(result)
    except BaseException as error:
        try:
            forward.reset()  # else the error keeps it alive, and the group's abort waits for it
        except RuntimeError as failed:
            error.add_note(f"the graph of forward was not let go of: {failed}")
        raise
    passes = _Passes((q, k, v), result.out, dout, grads)
    passes.forward, passes.backward, passes.over = forward, backward, torch.cuda.Event()
    passes.held = [ring, ring.options.buffers.shared_buffers(), result]
    return passes


@contextmanager
def capturing(graph: Any, **options: Any) -> Iterator[None]:
    """`torch.cuda.graph`, but raises the error of its body; ending a broken capture raises an error of its own."""
    first: BaseException | None = None
    try:
        with torch.cuda.graph(graph, **options):
            try:
                yield
            except BaseException as error:
                first = error
                raise
    except BaseException as last:
        if first is None or last is first:
            raise
        raise first from None


class GraphedRing:
    """A captured ring, called like the ring itself with tensors of the captured shapes and dtype.

    `out` is the graphs' own memory and valid until the next call; autograd detects its use after that. One object
    serves one layer, whose backward runs before its next forward, on one stream and outside activation checkpointing.
    It owns memory for q, k, v, out, their gradients and the passes' temporaries. Arguments are copied to `inputs`,
    unless they are these tensors already.

    Close it before its group is destroyed; `with` does so, unless its body raises while a replay is still running.
    """

    def __init__(self, passes: _Passes, copy_grads: bool = True) -> None:
        self._passes: _Passes | None = passes
        self._copy_grads = copy_grads
        self._num_calls = 0
        self._versions: list[int] = []

    def __enter__(self) -> GraphedRing:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close(timeout_s=1.0)
        except Exception as failed:  # report the error that ended the block
            error.add_note(f"a graphed ring was not closed: {failed}")

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q (B, S_local, H, D), k and v (B, S_local, Hkv, D) to out (B, S_local, H, D).

        Raises: `ValueError` for tensors unlike the captured ones and after `close`; in backward, if another call came
        between, or if torch operations changed tensors that it reads (changes by other kernels go unnoticed).
        """
        own = self._open().inputs
        for name, given, kept in zip("qkv", (q, k, v), own, strict=True):
            if (given.shape, given.dtype, given.device) != (kept.shape, kept.dtype, kept.device):
                raise ValueError(
                    f"{name} {tuple(given.shape)} {given.dtype} on {given.device}, captured was"
                    f" {tuple(kept.shape)} {kept.dtype} on {kept.device}: make another for these"
                )
            if any(_share(given, other) for other in own if other is not kept):
                raise ValueError(f"{name} overlaps the buffer of another argument: pass {name}.clone()")
        out: torch.Tensor = _Replay.apply(q, k, v, self)
        return out

    @property
    def inputs(self) -> _Three:
        """The tensors q, k and v that the graphs read."""
        q, k, v = self._open().inputs
        return q.detach(), k.detach(), v.detach()

    def close(self, timeout_s: float = 60.0) -> None:
        """Destroy the graphs once their last replay is over. May be called repeatedly.

        Raises: `PeerFailed` if a replay is still running after `timeout_s` seconds, because a rank did not replay.
        Abort the group from another thread, which ends the replay and waits for this call, and close again.
        """
        passes = self._passes
        if passes is None:
            return
        if passes.over is not None:
            _wait_for(passes.over, timeout_s)
        self._passes = None
        try:
            passes.forward.reset()
        finally:
            passes.backward.reset()

    def run_forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, int]:
        """(out, the number of this call)."""
        passes = self._open()
        for own, given in zip(passes.inputs, (q, k, v), strict=True):
            _put(own, given)
        self._num_calls += 1
        increment_version(passes.out)  # torch does not see a replay's writes
        passes.forward.replay()
        passes.mark()
        self._versions = _versions((*passes.inputs, passes.out))
        return passes.out, self._num_calls

    def run_backward(self, dout: torch.Tensor, number: int) -> tuple[torch.Tensor, ...]:
        """dq, dk, dv of call `number`."""
        passes, later = self._open(), self._num_calls - number
        if later:
            raise ValueError(
                f"the graphed ring's call {number} has lost its results to {later} later one(s), made before its"
                " backward: make one for each layer, one for evaluation, and none inside activation checkpointing"
            )
        now = zip(("q", "k", "v", "out"), self._versions, _versions((*passes.inputs, passes.out)), strict=True)
        changed = [name for name, before, after in now if before != after]
        if changed:
            raise ValueError(f"{', '.join(changed)} of a graphed ring changed before its backward, which reads it")
        _put(passes.dout, dout)
        passes.backward.replay()
        passes.mark()
        # Clones, because autograd adopts a gradient tensor that has no other reference as `.grad`.
        return tuple(x.clone() for x in passes.grads) if self._copy_grads else passes.grads

    def _open(self) -> _Passes:
        if self._passes is None:
            raise ValueError("this graphed ring is closed: make another, on a group that is there")
        return self._passes


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ring: GraphedRing) -> torch.Tensor:
        out, ctx.number = ring.run_forward(q, k, v)
        ctx.ring = ring
        return out.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (*ctx.ring.run_backward(dout, ctx.number), None)


def _put(own: torch.Tensor, given: torch.Tensor) -> None:
    if own.data_ptr() != given.data_ptr() or not given.is_contiguous():
        own.copy_(given)


def _share(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _versions(tensors: Iterable[torch.Tensor]) -> list[int]:
    return [tensor._version for tensor in tensors]


def _wait_for(over: Any, timeout_s: float) -> None:
    """Wait for the last replay. Raises: `PeerFailed` after `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    while not over.query():
        if time.monotonic() > deadline:
            raise PeerFailed(
                f"a replay of a graphed ring is not over after {timeout_s} s: a rank did not replay with this one;"
                " abort the group from another thread and close again",
                timeout_s=timeout_s,
            )
        time.sleep(0.001)
