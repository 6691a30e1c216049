"""Every exchange of FSDP2 is launched inside the gate that an abort shuts. Real FSDP2 over real gloo, in processes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest

from elastic_ring.mesh import Mesh
from elastic_ring.train.abortable_collectives import DefaultAllGather, DefaultReduceScatter
from tests.unit.groups.processes import Membership, membership
from tests.unit.train.tiny_task import abort_until_paused, begin, break_off, make_task, run_steps

PAIR = Mesh(1, 2)
NUM_SEQUENCES, NUM_UNITS = 3, 3  # of tiny_task: a step's batch; two layers and the root


@pytest.fixture(scope="module")
def pair() -> Iterator[Membership]:
    with membership(2) as made:
        yield made


def launches_of_a_step(me: Any) -> dict[str, int]:
    """How many exchanges of each kind FSDP2 makes in a step, and how many of them outside the gate."""
    gate, inside = me.groups.connector.gate, [False]
    honest, counts = gate.launching, {"all-gather": 0, "reduce-scatter": 0, "outside": 0}

    @contextmanager
    def noted() -> Iterator[None]:
        with honest():
            inside[0] = True
            yield
            inside[0] = False

    def counted(kind: str, call: Any) -> Any:
        def exchange(self: Any, *args: Any, **more: Any) -> Any:
            counts[kind] += 1
            counts["outside"] += not inside[0]
            return call(self, *args, **more)

        return exchange

    gate.launching = noted
    with (
        mock.patch.object(DefaultAllGather, "__call__", counted("all-gather", DefaultAllGather.__call__)),
        mock.patch.object(DefaultReduceScatter, "__call__", counted("reduce-scatter", DefaultReduceScatter.__call__)),
    ):
        run_steps(me, 1)
    return counts


def prepare(me: Any) -> None:
    me.inside, me.go_on = threading.Event(), threading.Event()


def give_up_inside_a_launch(me: Any) -> tuple[str, int]:
    """The control thread gives the groups up while a launch is under way; how the step ends, and what came after."""
    gate, later = me.groups.connector.gate, [0]
    honest, first = gate.launching, [True]

    @contextmanager
    def noted() -> Iterator[None]:
        with honest():
            if first[0]:
                first[0] = False
                me.inside.set()
                assert me.go_on.wait(30)
            else:
                later[0] += 1
            yield

    gate.launching = noted
    return break_off(me, 1), later[0]


def abort_now(me: Any) -> bool:
    assert me.inside.wait(30)
    me.connector._give_up()
    me.go_on.set()
    return abort_until_paused(me)


def test_all_exchanges_of_a_step_are_launched_inside_the_gate(pair: Membership) -> None:
    pair.all(begin, pair.meeting(), PAIR, make_task())
    first, second = pair.all(launches_of_a_step)
    assert first == second
    assert first["outside"] == 0
    assert first["reduce-scatter"] == NUM_SEQUENCES * NUM_UNITS
    assert first["all-gather"] >= NUM_SEQUENCES * NUM_UNITS


def test_nothing_is_launched_after_the_groups_were_given_up(pair: Membership) -> None:
    pair.all(begin, pair.meeting(), PAIR, make_task())
    pair.all(prepare)
    for rank in (0, 1):
        pair.start(rank, give_up_inside_a_launch)
    assert [pair.now(rank, abort_now) for rank in (0, 1)] == [True, True]
    assert [pair.result(rank) for rank in (0, 1)] == [("GroupAborted", 0)] * 2
