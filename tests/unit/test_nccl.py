"""What stands round NCCL's groups and needs no GPU: builds side by side, and aborts that meet them half way."""

from __future__ import annotations

import threading

import pytest

from elastic_ring.errors import GroupAborted, PeerFailed
from elastic_ring.runtime.nccl import in_parallel

WAIT_S = 60.0


def nothing() -> None:
    return None


def test_builds_run_side_by_side_and_their_results_keep_their_order() -> None:
    both = threading.Barrier(2)

    def build(name: str) -> str:
        both.wait(WAIT_S)  # neither can end before the other has begun
        return name

    assert in_parallel([lambda: build("shard"), lambda: build("ring")], nothing) == ["shard", "ring"]
    assert in_parallel([], nothing) == []


def test_a_build_that_fails_does_not_wait_for_one_that_never_ends() -> None:
    never = threading.Event()

    def fails() -> None:
        raise PeerFailed("the peer is gone")

    with pytest.raises(PeerFailed):
        in_parallel([lambda: never.wait(WAIT_S * 10), fails], nothing)
    never.set()


def test_builds_that_never_end_are_left_behind_once_the_generation_is_given_up() -> None:
    never, begun = threading.Event(), threading.Event()

    def hangs() -> None:
        begun.set()
        never.wait(WAIT_S * 10)

    def check() -> None:
        if begun.is_set():
            raise GroupAborted("given up")

    with pytest.raises(GroupAborted):
        in_parallel([hangs, hangs], check)
    never.set()
