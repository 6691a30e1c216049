"""With spares and donors, a run that loses workers ends with the bits of the undisturbed run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from elastic_ring.faults import EXCHANGES
from elastic_ring.model.init import Initialiser
from elastic_ring.model.transformer import Transformer
from elastic_ring.monitor.metrics import read_metrics
from tests.ray.conftest import EXPERTS, IN_PARTS, Heard, bits, fault_free, finished, tiny_trainer

Train = Callable[..., dict[str, Any]]
Summary = dict[str, Any]

EVERY_PHASE = (
    "kill@step=1,phase=forward,hop=1,rank=0; kill@step=2,phase=backward,rank=1; kill@step=3,phase=reduce,rank=2;"
    "kill@step=4,phase=vote,rank=3; kill@step=5,phase=apply,rank=0; kill@step=8,phase=idle,rank=1"
)
# Ranks 1 and 2 of 2 x 2 hold different shards. A newcomer dies while it heals, so does one more later on.
AT_ONCE_AND_IN_HEAL = (
    "kill@step=2,phase=backward,rank=1; kill@step=2,phase=backward,rank=2;"
    "kill@step=5,phase=forward,rank=3; kill@step=5,phase=heal,role=spare"
)
# With three rings a donor may die in the middle of healing and leave another donor.
THREE_RINGS = (
    "kill@step=1,phase=backward,rank=4; kill@step=3,phase=reduce,rank=8; kill@step=3,phase=heal,role=donor;"
    "kill@step=6,phase=vote,rank=0; kill@step=8,phase=forward,hop=2,rank=5; kill@step=8,phase=forward,hop=1,rank=6"
)
# The other ranks of the three rings, and the phases that the first run leaves out.
THREE_RINGS_MORE = (
    "kill@step=1,phase=apply,rank=1; kill@step=3,phase=idle,rank=3; kill@step=3,phase=idle,rank=2;"
    "kill@step=7,phase=forward,rank=7"
)
OTHER_WAYS_TO_GO = "freeze@step=2,phase=backward,rank=2; gil@step=4,rank=1; exit@step=6,phase=forward,rank=3"


def assert_same_bits(summary: Summary, reference: Summary) -> None:
    assert bits(summary) == bits(reference)
    assert summary["exact"]
    assert all(recovery["exact"] and recovery["survivor_pids_kept"] for recovery in summary["recoveries"])
    assert all(recovery["steps_undone"] == 0 for recovery in summary["recoveries"])


def faults_of(summary: Summary) -> list[int]:
    """How many faults struck in each recovery."""
    return [len(recovery["faults"]) for recovery in summary["recoveries"]]


def test_a_kill_in_each_phase_and_of_each_rank_changes_no_bit(train, undisturbed, tmp_path):
    reference = fault_free(undisturbed, tmp_path, 2, 2)
    heard = Heard()
    summary = train("every-phase", spares=6, faults=EVERY_PHASE, callbacks=(heard,))
    heard.check(summary)
    assert_same_bits(summary, reference)
    assert faults_of(summary) == [1] * 6


@pytest.mark.parametrize(
    "first",
    [pytest.param(0, marks=pytest.mark.slow), *(pytest.param(n, marks=pytest.mark.soak) for n in range(6, 36, 6))],
)
def test_a_kill_in_each_exchange_of_experts_changes_no_bit(train, first):
    """Of rows and of results, in forward, recomputation and backward of two layers, on each of four ranks."""
    calm = train(f"experts-{first}-calm", spares=0, steps=8, model=EXPERTS, experts="send")
    kills = range(first, first + 6)
    places = [(1 + kill - first, EXCHANGES[kill % 2], kill // 2 % 6, (kill + kill // 4) % 4) for kill in kills]
    faults = "; ".join("kill@step={},phase={},hop={},rank={}".format(*place) for place in places)
    summary = train(f"experts-{first}", spares=6, steps=8, faults=faults, model=EXPERTS, experts="send")
    assert_same_bits(summary, calm)
    assert faults_of(summary) == [1] * 6


class Crowded(Initialiser):
    """All tokens go to the experts of rank 0."""

    def tensor(self, name: str, shape: Sequence[int], rows: tuple[int, int] | None = None) -> torch.Tensor:
        value = super().tensor(name, shape, rows)
        if name.endswith("balance_bias"):
            value[: max(0, 2 - (rows[0] if rows else 0))] = 9.0
        return value


@pytest.mark.slow
def test_a_kill_between_the_parts_in_which_rows_come_to_crowded_experts_changes_no_bit(local_ray, tmp_path, capsys):
    """On a ring of two no rank can get more than twice its share."""
    found = []
    for name, faults in (
        ("crowd-calm", ""),
        ("crowd", "kill@step=1,phase=dispatch,hop=1,rank=0; kill@step=2,phase=combine,hop=1,rank=4"),
    ):
        settings: dict[str, Any] = {"dp": 2, "cp": 3, "spares": 2 if faults else 0, "steps": 4, "global_batch": 2}
        trainer = tiny_trainer(tmp_path, name, faults=faults, model=EXPERTS, experts="send", **settings)
        trainer.task = replace(trainer.task, initial=Crowded(0, EXPERTS.num_layers))
        result = finished(trainer)
        assert all(line["expert_parts"] for line in read_metrics(result.path))
        found.append(result.summary)
    assert "than 2 times its fair share of tokens for its experts, so they come in parts" in capsys.readouterr().err
    assert_same_bits(found[1], found[0])
    assert faults_of(found[1]) == [1, 1]


@pytest.mark.slow
def test_kills_change_no_bit_of_a_model_whose_large_layers_are_gathered_in_parts(train):
    """Two layers in parts, one of experts that tokens are sent to; the head in slices."""
    model = Transformer(IN_PARTS)
    assert [len(whole.own_units()) for whole in (*model.blocks, model)] == [4, 4, 0, 3]
    calm = train("parts-calm", spares=0, steps=8, model=IN_PARTS, experts="send")
    faults = (
        "kill@step=1,phase=forward,hop=1,rank=0; kill@step=3,phase=backward,rank=3;"
        "kill@step=4,phase=combine,hop=2,rank=1; kill@step=6,phase=apply,rank=2"
    )
    summary = train("parts", spares=4, steps=8, faults=faults, model=IN_PARTS, experts="send")
    assert_same_bits(summary, calm)
    assert faults_of(summary) == [1] * 4


@pytest.mark.parametrize(
    ("size", "spares", "faults", "struck"),
    [
        pytest.param(2, 4, AT_ONCE_AND_IN_HEAL, [2, 2], marks=pytest.mark.slow, id="two at once, a newcomer"),
        pytest.param(3, 6, THREE_RINGS, [1, 2, 1, 2], marks=pytest.mark.soak, id="a donor"),
        pytest.param(3, 4, THREE_RINGS_MORE, [1, 2, 1], marks=pytest.mark.soak, id="each other rank"),
    ],
)
def test_kills_at_once_and_of_those_that_heal_change_no_bit(train, undisturbed, tmp_path, size, spares, faults, struck):
    reference = fault_free(undisturbed, tmp_path, size, size)
    summary = train("at-once", dp=size, cp=size, spares=spares, faults=faults)
    assert_same_bits(summary, reference)
    assert faults_of(summary) == struck


def adafactor(named: list[tuple[str, torch.Tensor]]) -> torch.optim.Optimizer:
    return torch.optim.Adafactor([tensor for _, tensor in named], lr=0.1)


def halving(step: int) -> float:
    return 0.1 * 0.5 ** (step // 2)


@pytest.mark.slow
def test_an_optimizer_a_schedule_and_passes_of_ones_own_survive_a_kill_with_their_bits(train):
    """Three sequences a ring: a pass of two and one of one. Keys cross in 8 bits."""
    own = {"kv_wire": "fp8", "optimizer": adafactor, "lr_schedule": halving, "steps": 6, "sequences_per_pass": 2}
    calm = train("own-calm", spares=0, **own)
    assert_same_bits(train("own-struck", spares=1, faults="kill@step=3,phase=apply,rank=3", **own), calm)


@pytest.mark.slow
def test_a_frozen_a_stuck_and_a_leaving_process_are_replaced_without_changing_a_bit(train, undisturbed, tmp_path):
    reference = fault_free(undisturbed, tmp_path, 2, 2)
    summary = train("other-ways", spares=3, faults=OTHER_WAYS_TO_GO)
    assert_same_bits(summary, reference)
    causes = [recovery["cause"] for recovery in summary["recoveries"]]
    assert "was stopped" in causes[0]
    assert "made no progress" in causes[1]
    assert "exit code 3" in causes[2]


@pytest.mark.slow
def test_an_exception_is_survived_in_place_and_a_drained_rank_hands_its_place_over_without_a_lost_step(
    train, undisturbed, tmp_path
):
    reference = fault_free(undisturbed, tmp_path, 2, 2)
    summary = train("raise", spares=1, faults="raise@step=3,phase=backward,rank=2; drain@step=6,rank=1")
    assert_same_bits(summary, reference)
    raised, drained = summary["recoveries"]
    assert raised["action"] == "rebuilt in place"
    assert (drained["action"], drained["steps_rerun"]) == ("drained", 0)


@pytest.mark.thinned(num=1)
@pytest.mark.parametrize("kind", ["kill", "freeze"])
def test_training_goes_on_while_the_coordinator_is_gone(train, undisturbed, tmp_path, kind):
    reference = fault_free(undisturbed, tmp_path, 2, 2)
    heard = Heard()
    summary = train(
        f"{kind}-coordinator", spares=0, faults=f"{kind}-coordinator@step=2", slow_s=0.4, callbacks=(heard,)
    )
    heard.check(summary)
    assert_same_bits(summary, reference)
    assert summary["generations"][-1]["generation"] == 1
    assert [recovery["action"] for recovery in summary["recoveries"]] == ["coordinator restarted from its journal"]
