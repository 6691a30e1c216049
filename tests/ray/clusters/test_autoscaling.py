"""A run on a real autoscaling cluster, from an empty cluster to an empty one; the story is that of the drill."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from benchmarks.recovery.autoscaling import changing_run
from deploy.drills.autoscaling import MAX_DP, Timeline


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path: Ray puts sockets in it, whose paths may have 107 bytes."""
    ray.shutdown()  # the other modules' Ray
    with tempfile.TemporaryDirectory(prefix="as-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)
    ray.shutdown()


@pytest.mark.slow
@pytest.mark.timeout(600)  # nodes come and go at the pace of the autoscaler
def test_a_run_grows_and_shrinks_with_its_cluster_by_itself_and_uses_the_same_samples(folder):
    timeline = Timeline()
    summary, missed = changing_run(folder, timeline)
    assert missed == []
    told = [what for _, what in timeline.events]
    assert told[0] == "submitted to an empty cluster"
    assert [what for what in told if what.startswith("shrunk to min_dp")]
    assert sum(what.startswith("grown again") for what in told) == 3
    sizes = [dp for dp, _ in itertools.groupby(one["mesh"]["dp"] for one in summary["generations"])]
    assert sizes == [1, MAX_DP, 1, MAX_DP, 1, MAX_DP, 1, MAX_DP, 1]
    assert timeline.samples[-1][1] == 0, "every node is gone"
    assert max(asked for _, _, _, asked in timeline.samples) == MAX_DP * 2
