"""With spares and donors, a run that loses workers ends with the bits of the undisturbed run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Train = Callable[..., dict[str, Any]]
Summary = dict[str, Any]

EVERY_PHASE = (
    "kill@step=1,phase=forward,hop=1,rank=0; kill@step=2,phase=backward,rank=1; kill@step=3,phase=reduce,rank=2;"
    "kill@step=4,phase=vote,rank=3; kill@step=5,phase=apply,rank=0; kill@step=6,phase=idle,rank=1"
)


@pytest.fixture(scope="module")
def undisturbed() -> dict[tuple[int, int], Summary]:
    """Fault-free runs by (dp, cp), filled as they are needed."""
    return {}


def assert_same_bits(summary: Summary, reference: Summary) -> None:
    assert summary["losses"] == reference["losses"]
    assert summary["weights_sha256"] == reference["weights_sha256"]
    assert summary["samples_sha256"] == reference["samples_sha256"]
    assert summary["exact"]


def fault_free(train: Train, known: dict[tuple[int, int], Summary], dp: int, cp: int) -> Summary:
    if (dp, cp) not in known:
        known[dp, cp] = train(f"calm-{dp}x{cp}", dp=dp, cp=cp)
        assert known[dp, cp]["recoveries"] == []
    return known[dp, cp]


def test_a_kill_in_each_phase_and_of_each_rank_changes_no_bit(
    train: Train, undisturbed: dict[tuple[int, int], Summary]
) -> None:
    reference = fault_free(train, undisturbed, 2, 2)
    summary = train("every-phase", spares=6, faults=EVERY_PHASE)
    assert_same_bits(summary, reference)
    assert len(summary["recoveries"]) == 6
    assert [recovery["steps_undone"] for recovery in summary["recoveries"]] == [0] * 6
    assert all(recovery["survivor_pids_kept"] and recovery["exact"] for recovery in summary["recoveries"])
