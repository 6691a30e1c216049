"""What the recovery bench can fail on, from figures: growth of memory, pairs of kills, planned kills in each phase."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import gpu_runs
from benchmarks.recovery import bench_recovery_gpu as bench
from elastic_ring.faults import parse_faults

MEASURED = json.loads(
    (
        Path(__file__).resolve().parents[3] / "benchmarks" / "results" / "training" / "2026-11-21-training-4xH200.json"
    ).read_text()
)


def rows(*memory: tuple[float, ...], spares: tuple[int, ...] | None = None) -> list[dict[str, Any]]:
    spares = spares or (2,) * len(memory)
    return [
        {"kill": 5 * index, "memory": list(each), "spares": there}
        for index, (each, there) in enumerate(zip(memory, spares, strict=True))
    ]


def test_a_run_that_leaked_is_judged_and_the_mended_one_passes() -> None:
    leaked = bench.outgrown(MEASURED["bench_recovery_gpu_1b_paced"]["kills"])
    assert [line.partition(" grows")[0] for line in leaked][:2] == ["memory of rank 0's process", "memory of GPU 0"]
    assert bench.outgrown(MEASURED["bench_recovery_gpu_1b_in_a_row"]["kills"]) == []


def test_growth_is_the_slope_over_kills_with_the_standbys_contexts_taken_off() -> None:
    context = bench.CONTEXT_BYTES / 2**30
    samples = [(2.0, 20.0)] + [
        (2.0 + 5 * kill / 1024, 20.0 + context * there)
        for kill, there in zip((5, 10, 15, 20), (6, 2, 4, 3), strict=True)
    ]
    assert bench.growth(rows(*samples, spares=(2, 6, 2, 4, 3))) == pytest.approx(
        {"rank 0's process": 5.0, "GPU 0": 0.0}
    )
    assert bench.growth(rows(*samples[:4])) == {}, "too few to say"
    assert bench.slope([(0.0, 1.0), (1.0, 3.0), (2.0, 5.0)]) == pytest.approx(2.0)


def test_what_a_survivor_holds_on_its_gpu_is_judged_by_itself_where_the_driver_tells() -> None:
    held = rows(*[(2.0, 30.0)] * 6)
    for index, row in enumerate(held):
        row["own_gib"] = 20.0 + 0.5 * index
    assert bench.growth(held) == pytest.approx(
        {"rank 0's process": 0.0, "rank 0's process on GPUs": 102.4, "GPU 0": 0.0}
    )
    assert bench.outgrown(held) == ["memory of rank 0's process on GPUs grows by 102.4 MiB a kill, more than 64"]
    held[3]["own_gib"] = None
    assert "rank 0's process on GPUs" not in bench.growth(held)


@pytest.mark.parametrize(("pid", "mib"), [(17, 30_550), (18, 750), (1, None), (19, None)])
def test_what_a_process_holds_is_read_from_the_drivers_tool_or_not_known(
    pid: int, mib: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the form that nvidia-smi printed on the hosts; only its parsing is shown here."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nprintf '17, 29800\\n18, 750\\n17, 750\\n19, [N/A]\\n'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert gpu_runs.process_memory_mib(pid) == mib


def test_a_process_that_the_tool_does_not_know_is_told_as_not_known() -> None:
    held = [{**row, "own_gib": None} for row in rows(*[(2.0, 30.0)] * 6)]
    held[-1] |= {"memory_after": [2.0, 30.0], "own_after_gib": None}
    told = bench.memory_text(held)
    assert "before kill 5, 2 spares there: [2.0, 30.0]; None" in told
    assert told.endswith("aside: rank 0's process +0.0, GPU 0 +0.0")


def test_steps_after_a_recovery_are_medians_by_their_place_in_a_generation() -> None:
    """The first generation is no recovery's, and one that was cut short says nothing."""
    lengths = {0: [9.0] * 8, 1: [0.5, 0.7, 0.5, 0.4, 0.5], 2: [0.5, 0.9, 0.3, 0.4, 0.5, 0.1], 3: [7.0]}
    steps, now = [], 0.0
    for generation, seconds in lengths.items():
        for each in [3.0, *seconds]:
            now += each
            steps.append({"generation": generation, "committed_monotonic_s": now})
    assert bench.steps_after(steps) == pytest.approx([0.5, 0.8, 0.4, 0.4, 0.5])
    assert bench.steps_after(steps[:9]) == []


@pytest.mark.parametrize("name", bench.FAULTS)
def test_every_planned_kill_is_a_schedule_that_ends_within_the_short_run(name: str) -> None:
    faults = parse_faults(bench.FAULTS[name].format(step=6, last=3))
    assert faults[0].rank == 3
    assert {fault.kind for fault in faults} == {"kill"}
    assert faults[-1].phase == name
    assert all(fault.step == 6 for fault in faults)


def test_a_pair_that_was_not_exact_and_bits_that_differ_are_missed() -> None:
    figures = {
        "run": {"preset": "1b", "context": 1, "cp": 2, "gpus": 4, "gpu": "one", "nccl": "2"},
        "parameters": 1,
        "link_GB_s": 1.0,
        "paced": 1,
        "kills": [],
        "pairs": [
            {
                "pair": 0,
                "apart_s": 0.5,
                "recoveries": [
                    {"exact": True, "action": "a", "cause": "c"},
                    {"exact": False, "action": "fewer rings", "cause": "c"},
                ],
            }
        ],
        "same": {"vote": {"losses": True, "weights_sha256": False}, "heal": {"losses": True}},
    }
    text, missed = bench.report(figures)
    assert missed == [
        "pair 0 was not exact: fewer rings",
        "weights_sha256 of a kill in vote differ from the run without faults",
    ]
    assert "killed 0.5 s after another one" in text


@pytest.mark.parametrize("options", [["--in-building", "1"], ["--faults", "vote,heal"], ["--faults", "lunch"]])
def test_what_cannot_work_is_refused_before_anything_starts(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        bench.main(options)
    assert "--spares 2" in (told := capsys.readouterr().err) or "choose of backward,reduce,vote,apply,heal" in told
