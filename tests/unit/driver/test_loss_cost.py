"""Copies by default, and the line at the start that says what a loss costs."""

from __future__ import annotations

import logging

import pytest

from elastic_ring.config import CheckpointConfig, RunConfig
from elastic_ring.mesh import Mesh
from elastic_ring.runtime.driver.cluster import NodeInfo
from elastic_ring.runtime.driver.loss_cost import with_settled_copies
from tests.sim.simulator.options import simulated

GIB = 2**30
PARAMETERS = -(-GIB // 24)
"""Copies of a whole shard take 2 GiB."""


def node(name: str, memory_gib: float, num_slots: int = 8) -> NodeInfo:
    return NodeInfo(name, name, num_slots, False, memory_bytes=memory_gib * GIB)


def settled(
    caplog: pytest.LogCaptureFixture,
    mesh: Mesh,
    *nodes: NodeInfo,
    copies: str = "auto",
    checkpoints: CheckpointConfig | None = None,
) -> tuple[str, str]:
    """(the copies that the run has, what the start says)."""
    caplog.clear()
    caplog.set_level(logging.INFO)
    run = RunConfig(copies=copies, checkpoint_config=checkpoints or CheckpointConfig())
    return with_settled_copies(run, mesh, PARAMETERS, nodes).copies, caplog.text


def test_one_ring_has_copies_by_default_where_the_nodes_have_the_memory(caplog: pytest.LogCaptureFixture) -> None:
    copies, told = settled(caplog, Mesh(1, 2), node("a", 2.1, 1), node("b", 2.1, 1))
    assert copies == "auto"
    assert "1.0 GiB of host memory a rank; a loss of any process: back to copies (one each 10 step(s))" in told
    assert "on one node" not in told
    copies, told = settled(caplog, Mesh(1, 2), node("a", 4.1))
    assert (copies, "on one node: they go to other processes of this node" in told) == ("auto", True)
    for nodes in ((node("a", 3.9),), (node("a", 9.0), node("b", 0.0))):
        copies, told = settled(caplog, Mesh(1, 2), *nodes)
        assert copies == "0"
        assert "would take 2.0 GiB of the" in told
        assert "a loss of any process: back to the newest checkpoint (the first after step 1, the others" in told


def test_one_rank_and_refused_copies_say_what_a_loss_costs(caplog: pytest.LogCaptureFixture) -> None:
    every_7, none = CheckpointConfig(every_steps=7), CheckpointConfig(every_steps=0)
    _, told = settled(caplog, Mesh(1, 1), node("a", 9.0), checkpoints=every_7)
    assert (
        "one rank: nobody else holds its state; a loss of any process: back to the newest checkpoint (one each 7"
        in told
    )
    copies, told = settled(caplog, Mesh(1, 2), node("a", 9.0), copies="0", checkpoints=none)
    assert copies == "0"
    assert "copies=0: nobody else holds a worker's state; a loss of any process: the end of the run. copies=1" in told
    _, told = settled(caplog, Mesh(1, 1), node("a", 9.0), checkpoints=CheckpointConfig(every_s=9.0))
    assert "(one each 9 s)" in told
    assert settled(caplog, Mesh(1, 2), node("a", 0.1), node("b", 0.1), copies="1") == ("1", ""), "asked for"


def test_rings_beside_each_other_have_copies_only_once_there_is_one_left(caplog: pytest.LogCaptureFixture) -> None:
    assert settled(caplog, Mesh(2, 2), node("a", 99.0)) == ("auto", "")
    assert settled(caplog, Mesh(2, 2), node("a", 1.0)) == ("0", "")
    options = simulated("run", dp=2, cp=2, total_steps=9, copies="auto")
    assert [bool(options.copy_mode(Mesh(dp, 2))) for dp in (1, 2)] == [True, False]
