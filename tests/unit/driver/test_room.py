"""What the cluster can hold, how a mesh that is too large for it is refused, and what workers are started with."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial

import pytest

from elastic_ring import ElasticRingTrainer, RunConfig
from elastic_ring.config import CheckpointConfig, ScalingConfig
from elastic_ring.data.source import StdlibText
from elastic_ring.mesh import Mesh
from elastic_ring.model.config import preset
from elastic_ring.model.transformer import Transformer
from elastic_ring.runtime.driver import room as room_module
from elastic_ring.runtime.driver.cluster import WORKER_ENVIRONMENT, NodeInfo, num_gpus, worker_environment
from elastic_ring.runtime.driver.room import room, shortage, with_settled_copies, without_gpus
from tests.sim.simulator.options import simulated

ON_GPUS = ScalingConfig(dp=2, cp=4, device="cuda")


class Granting:
    """What a driver asks an autoscaler that grants up to `most` workers; the real one is in `tests/ray`."""

    def __init__(self, most: int = 1000) -> None:
        self.most, self.asked = most, list[int]()

    def ask(self, num_workers: int) -> None:
        self.asked.append(num_workers)

    def is_refused(self, num_workers: int) -> bool:
        return num_workers > self.most


class Looks:
    """The nodes that Ray shows at each look; the last stays."""

    def __init__(self) -> None:
        self.nodes: list[list[NodeInfo]] = [[]]
        self.gpus, self.here = 0.0, "10.0.0.9"

    def next(self, scaling: ScalingConfig) -> list[NodeInfo]:
        return self.nodes.pop(0) if len(self.nodes) > 1 else self.nodes[0]


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Looks:
    looks = Looks()
    monkeypatch.setattr(room_module, "live_nodes", looks.next)
    monkeypatch.setattr(room_module.ray, "cluster_resources", lambda: {"GPU": looks.gpus})
    monkeypatch.setattr(room_module.ray.util, "get_node_ip_address", lambda: looks.here)
    monkeypatch.setattr(room_module.torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(room_module.time, "sleep", lambda seconds: None)
    return looks


@pytest.fixture(autouse=True)
def autoscaler(monkeypatch: pytest.MonkeyPatch) -> Granting:
    granting = Granting()
    monkeypatch.setattr(room_module, "autoscaler_of", lambda run, scaling: granting)
    return granting


def _node(num_slots: int, num_gpus: int | None, draining: bool = False) -> NodeInfo:
    return NodeInfo("n", "10.0.0.1", num_slots, draining, num_gpus)


def test_a_nodes_places_are_the_gpus_that_ray_names_and_none_on_a_cpu_mesh():
    assert num_gpus({"CPU": 64.0, "GPU": 8.0}, "cuda") == 8
    assert num_gpus({"CPU": 64.0}, "cuda") is None
    assert num_gpus({"CPU": 64.0, "GPU": 8.0}, "cpu") is None


def test_a_mesh_may_take_every_gpu_whatever_room_there_is_for_standbys():
    assert shortage(ON_GPUS, [_node(64, 4), _node(64, 4)], {"GPU": 8.0}) == ""
    assert shortage(ON_GPUS, [_node(64, None)], {}) == ""


def test_a_run_on_gpus_is_told_where_the_only_machine_has_none():
    unknown = _node(64, None)
    assert "--preset laptop" in without_gpus(ON_GPUS, [unknown], "10.0.0.1", 0)
    assert without_gpus(ON_GPUS, [unknown], "10.0.0.2", 0) == "", "a driver that has none may start one elsewhere"
    assert without_gpus(ON_GPUS, [unknown], "10.0.0.1", 8) == ""
    assert without_gpus(ON_GPUS, [_node(64, 8)], "10.0.0.1", 0) == ""
    assert without_gpus(ScalingConfig(), [unknown], "10.0.0.1", 0) == ""


@pytest.mark.parametrize(
    ("here", "first", "then", "refused"),
    [
        (
            "10.0.0.1",
            [_node(64, None)],
            replace(_node(64, 8), address="10.0.0.2"),
            "this machine.* has no GPU .*add nodes",
        ),
        (
            "10.0.0.9",
            [_node(64, 4)],
            _node(64, 4),
            r"needs 8 GPUs, .* 4 missing\. Lower dp or cp, add nodes, or set wait_",
        ),
    ],
    ids=["a head without GPUs", "too few"],
)
def test_room_waits_for_gpus_if_it_may_and_refuses_when_they_do_not_come(looks, here, first, then, refused):
    looks.here, looks.gpus, looks.nodes = here, 4.0, [first, [*first, then]]
    room(replace(ON_GPUS, wait_for_resources_s=600.0))
    looks.nodes = [first]
    with pytest.raises(ValueError, match=refused):
        room(ON_GPUS)


def test_a_mesh_larger_than_the_gpus_says_what_is_there_and_what_is_missing():
    told = shortage(ON_GPUS, [_node(64, 4), _node(64, 2), _node(64, 8, draining=True)], {"CPU": 192.0, "GPU": 14.0})
    assert told == (
        "mesh dp=2 x cp=4 needs 8 GPUs, one for each member; the cluster has GPU: 14 on 3 node(s), room for 6 "
        "member(s): 2 missing. Lower dp or cp"
    )


def test_too_few_slots_are_told_before_too_few_gpus():
    told = shortage(ON_GPUS, [_node(3, 2)], {"CPU": 3.0, "GPU": 2.0})
    assert told == (
        "mesh dp=2 x cp=4 needs 8 workers with {'CPU': 1.0} each; the cluster has CPU: 3 on 1 node(s), room for 3: "
        "5 missing. Lower dp or cp or resources_per_worker"
    )


def test_an_empty_cluster_is_waited_for_and_asked_for_all_that_the_run_may_use(looks, autoscaler):
    looks.nodes = [[_node(0, None)], [_node(0, None)], [_node(0, None), _node(4, None)]]
    assert room(ScalingConfig(dp=2, cp=2, spares=1, max_dp=3, wait_for_resources_s=600.0)) == 2
    assert autoscaler.asked == [7], "asked once, not at each look"


def test_where_more_is_refused_the_run_begins_with_min_dp_rings_at_once(monkeypatch, looks, autoscaler):
    autoscaler.most = 4
    monkeypatch.setattr(room_module, "live_nodes", lambda scaling: [_node(4 if 4 in autoscaler.asked else 0, None)])
    assert room(ScalingConfig(dp=3, cp=2, spares=0, min_dp=2, wait_for_resources_s=600.0)) == 2
    assert autoscaler.asked == [6, 4]


def test_an_autoscaler_that_does_not_answer_is_asked_again(monkeypatch, looks, autoscaler):
    def ask(num_workers: int) -> None:
        autoscaler.asked.append(num_workers)
        if len(autoscaler.asked) < 3:
            raise TimeoutError("the head is busy")

    monkeypatch.setattr(autoscaler, "ask", ask)
    monkeypatch.setattr(room_module, "live_nodes", lambda scaling: [_node(4 if len(autoscaler.asked) > 2 else 0, None)])
    assert room(ScalingConfig(dp=2, cp=2, spares=0, wait_for_resources_s=600.0)) == 2
    assert autoscaler.asked == [4, 4, 4]


def test_a_driver_that_gives_up_withdraws_its_request(looks, autoscaler):
    looks.nodes = [[_node(0, None)]]
    with pytest.raises(ValueError, match=r"4 missing\..* add nodes, or set wait_for_resources_s"):
        room(ScalingConfig(dp=2, cp=2, spares=0, wait_for_resources_s=0.1))
    assert autoscaler.asked == [4, 0]


# ------------------------------------------------------------ the environment of workers


def test_the_users_own_variables_win_over_those_that_workers_on_gpus_get():
    ours = WORKER_ENVIRONMENT
    assert worker_environment("cuda", {}, {"HOME": "x"}, {"WANDB": "y"}) == ours, "nothing else is passed on here"
    inherited = {"NCCL_NVLS_ENABLE": "1", "MALLOC_ARENA_MAX": "4"}
    found = worker_environment("cuda", {}, inherited, {"NCCL_NVLS_ENABLE": "2"})
    assert found == {**ours, "NCCL_NVLS_ENABLE": "2", "MALLOC_ARENA_MAX": "4"}
    asked = {"NCCL_NVLS_ENABLE": "3", "NCCL_DEBUG": "INFO"}
    assert worker_environment("cuda", asked, inherited, {"NCCL_NVLS_ENABLE": "2"}) == {**found, **asked}


def test_workers_on_cpus_get_what_the_user_asks_for_and_nothing_else():
    assert worker_environment("cpu", {}, {"NCCL_NVLS_ENABLE": "1"}, {}) == {}
    assert worker_environment("cpu", {"MALLOC_ARENA_MAX": "2"}, {}, {}) == {"MALLOC_ARENA_MAX": "2"}


def test_variables_must_be_text_and_their_values_are_not_written_down(tmp_path):
    with pytest.raises(ValueError, match="a mapping of text to text"):
        RunConfig(env={"NCCL_DEBUG": 1})  # type: ignore[dict-item]
    run = RunConfig("told", run_dir=str(tmp_path), env={"A_TOKEN": "its-value"})
    trainer = ElasticRingTrainer(partial(Transformer, preset("laptop")), StdlibText(2048), run_config=run)
    trainer.submission().write_record()
    text = (tmp_path / "config.json").read_text()
    assert "A_TOKEN" in text
    assert "its-value" not in text


def test_the_same_run_with_other_variables_is_the_same_run(tmp_path):
    runs = [RunConfig("told", run_dir=str(tmp_path), env=env) for env in ({}, {"NCCL_DEBUG": "INFO"})]
    model, data = partial(Transformer, preset("laptop")), StdlibText(2048)
    assert len({ElasticRingTrainer(model, data, run_config=run).submission().digest for run in runs}) == 1


# ------------------------------------------------------------ copies by default


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


def test_one_ring_has_copies_by_default_where_the_nodes_have_the_memory(caplog):
    copies, told = settled(caplog, Mesh(1, 2), node("a", 2.1, 1), node("b", 2.1, 1))
    assert copies == "auto"
    assert "1.0 GiB of host memory a rank; a failure of any process: back to copies (one each 10 step(s))" in told
    assert "on one node" not in told
    copies, told = settled(caplog, Mesh(1, 2), node("a", 4.1))
    assert (copies, "on one node: they go to other processes of this node" in told) == ("auto", True)
    for nodes in ((node("a", 3.9),), (node("a", 9.0), node("b", 0.0))):
        copies, told = settled(caplog, Mesh(1, 2), *nodes)
        assert copies == "0"
        assert "would take 2.0 GiB of the" in told
        assert "a failure of any process: back to the newest checkpoint (the first after step 1, the others" in told


def test_one_rank_and_refused_copies_say_what_a_loss_costs(caplog):
    every_7, none = CheckpointConfig(every_steps=7), CheckpointConfig(every_steps=0)
    _, told = settled(caplog, Mesh(1, 1), node("a", 9.0), checkpoints=every_7)
    assert (
        "one rank: nobody else holds its state; a failure of any process: back to the newest checkpoint (one each 7"
        in told
    )
    copies, told = settled(caplog, Mesh(1, 2), node("a", 9.0), copies="0", checkpoints=none)
    assert copies == "0"
    assert "copies=0: nobody else holds a worker's state; a failure of any process: back to the first step. " in told
    _, told = settled(caplog, Mesh(1, 1), node("a", 9.0), checkpoints=CheckpointConfig(every_s=9.0))
    assert "(one each 9 s)" in told
    assert settled(caplog, Mesh(1, 2), node("a", 0.1), node("b", 0.1), copies="1") == ("1", ""), "asked for"


def test_rings_beside_each_other_have_copies_only_once_there_is_one_left(caplog):
    assert settled(caplog, Mesh(2, 2), node("a", 99.0)) == ("auto", "")
    assert settled(caplog, Mesh(2, 2), node("a", 1.0)) == ("0", "")
    options = simulated("run", dp=2, cp=2, total_steps=9, copies="auto")
    assert [bool(options.copy_mode(Mesh(dp, 2))) for dp in (1, 2)] == [True, False]
