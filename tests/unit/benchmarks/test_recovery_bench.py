"""What the benches can fail on, from figures and records written by hand: recovery, peers, overhead, checkpoints."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.checkpoint.bench_checkpoint import Bench, measure, report, shard_of
from benchmarks.harness import gpu_runs
from benchmarks.peers import common
from benchmarks.peers.common import Event, Kill, Record
from benchmarks.recovery import bench_overhead as overhead
from benchmarks.recovery import bench_recovery_gpu as recovery
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


def test_a_run_that_leaked_is_judged_and_the_mended_one_passes():
    leaked = recovery.outgrown(MEASURED["bench_recovery_gpu_1b_paced"]["kills"])
    assert [line.partition(" grows")[0] for line in leaked][:2] == ["memory of rank 0's process", "memory of GPU 0"]
    assert recovery.outgrown(MEASURED["bench_recovery_gpu_1b_in_a_row"]["kills"]) == []


def test_growth_is_the_slope_over_kills_with_the_standbys_contexts_taken_off():
    context = recovery.CONTEXT_BYTES / 2**30
    samples = [(2.0, 20.0)] + [
        (2.0 + 5 * kill / 1024, 20.0 + context * there)
        for kill, there in zip((5, 10, 15, 20), (6, 2, 4, 3), strict=True)
    ]
    assert recovery.growth(rows(*samples, spares=(2, 6, 2, 4, 3))) == pytest.approx(
        {"rank 0's process": 5.0, "GPU 0": 0.0}
    )
    assert recovery.growth(rows(*samples[:4])) == {}, "too few to say"
    assert recovery.slope([(0.0, 1.0), (1.0, 3.0), (2.0, 5.0)]) == pytest.approx(2.0)


def test_what_a_survivor_holds_on_its_gpu_is_judged_by_itself_where_the_driver_tells():
    held = rows(*[(2.0, 30.0)] * 6)
    for index, row in enumerate(held):
        row["own_gib"] = 20.0 + 0.5 * index
    assert recovery.growth(held) == pytest.approx(
        {"rank 0's process": 0.0, "rank 0's process on GPUs": 102.4, "GPU 0": 0.0}
    )
    assert recovery.outgrown(held) == ["memory of rank 0's process on GPUs grows by 102.4 MiB a kill, more than 64"]
    held[3]["own_gib"] = None
    assert "rank 0's process on GPUs" not in recovery.growth(held)


@pytest.mark.parametrize(("pid", "mib"), [(17, 30_550), (18, 750), (1, None), (19, None)])
def test_what_a_process_holds_is_read_from_the_drivers_tool_or_not_known(pid, mib, tmp_path, monkeypatch):
    """In the form that nvidia-smi printed on the hosts; only its parsing is shown here."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nprintf '17, 29800\\n18, 750\\n17, 750\\n19, [N/A]\\n'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert gpu_runs.process_memory_mib(pid) == mib


def test_a_process_that_the_tool_does_not_know_is_told_as_not_known():
    held = [{**row, "own_gib": None} for row in rows(*[(2.0, 30.0)] * 6)]
    held[-1] |= {"memory_after": [2.0, 30.0], "own_after_gib": None}
    told = recovery.memory_text(held)
    assert "before kill 5, 2 spares there: [2.0, 30.0]; None" in told
    assert told.endswith("aside: rank 0's process +0.0, GPU 0 +0.0")


def test_steps_after_a_recovery_are_medians_by_their_place_in_a_generation():
    """The first generation is no recovery's, and one that was cut short says nothing."""
    lengths = {0: [9.0] * 8, 1: [0.5, 0.7, 0.5, 0.4, 0.5], 2: [0.5, 0.9, 0.3, 0.4, 0.5, 0.1], 3: [7.0]}
    steps, now = [], 0.0
    for generation, seconds in lengths.items():
        for each in [3.0, *seconds]:
            now += each
            steps.append({"generation": generation, "committed_monotonic_s": now})
    assert recovery.steps_after(steps) == pytest.approx([0.5, 0.8, 0.4, 0.4, 0.5])
    assert recovery.steps_after(steps[:9]) == []


@pytest.mark.parametrize("name", recovery.FAULTS)
def test_every_planned_kill_is_a_schedule_that_ends_within_the_short_run(name):
    faults = parse_faults(recovery.FAULTS[name].format(step=6, last=3))
    assert faults[0].rank == 3
    assert {fault.kind for fault in faults} == {"kill"}
    assert faults[-1].phase == name
    assert all(fault.step == 6 for fault in faults)


def test_a_pair_that_was_not_exact_and_bits_that_differ_are_missed():
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
    text, missed = recovery.report(figures)
    assert missed == [
        "pair 0 was not exact: fewer rings",
        "weights_sha256 of a kill in vote differ from the run without faults",
    ]
    assert "killed 0.5 s after another one" in text


@pytest.mark.parametrize("options", [["--in-building", "1"], ["--faults", "vote,heal"], ["--faults", "lunch"]])
def test_what_cannot_work_is_refused_before_anything_starts(options, capsys):
    with pytest.raises(SystemExit):
        recovery.main(options)
    assert "--spares 2" in (told := capsys.readouterr().err) or "choose of backward,reduce,vote,apply,heal" in told


# ------------------------------------------------------------------------------ what the peers' bench calls a recovery


OLD, NEW, ALL, FEWER = (10, 11, 12, 13), (20, 21, 22, 23), 4, 3


def steps(pids: tuple[int, ...], step: int, at_s: float, num_members: int = ALL) -> list[Event]:
    return [Event("step", worker, pid, step, num_members, at_s) for worker, pid in enumerate(pids)]


def test_a_record_gives_back_what_its_writers_added(tmp_path):
    record = Record(tmp_path)
    assert record.events() == []
    record.add("enter", 3)
    record.add("step", 3, 7, FEWER)
    kinds = [(event.kind, event.worker, event.step, event.num_members) for event in record.events()]
    assert kinds == [("enter", 3, -1, ALL), ("step", 3, 7, FEWER)]
    assert record.events()[0].at_s <= record.events()[1].at_s


def test_all_workers_stop_before_the_same_step(tmp_path):
    record = Record(tmp_path)
    assert not record.must_stop(10**9)
    record.stop_after(5)
    assert [record.must_stop(step) for step in (4, 5, 6)] == [False, True, True]


def test_a_step_under_way_that_still_commits_is_no_recovery():
    events = [
        *steps(OLD, 8, 99.9),
        *steps(OLD[:3], 9, 100.01),
        *[Event("skip", worker, OLD[worker], 9, ALL, 100.05) for worker in range(3)],
        Event("enter", 3, NEW[3], -1, ALL, 102.0),
        Event("ready", 3, NEW[3], -1, ALL, 102.5),
        *steps((*OLD[:3], NEW[3]), 10, 103.0),
    ]
    found = common.phases(events, Kill(OLD[3], 100.0))
    assert found == pytest.approx(
        {
            "noticed_s": 0.05,
            "entered_s": 2.0,
            "ready_s": 2.5,
            "first_step_s": 3.0,
            "next_step_s": 3.0,
            "complete_s": 3.0,
            "steps_rerun": 0,
            "num_started": 1,
        }
    )


def test_steps_that_run_again_after_a_restart_do_not_count_as_the_next_step():
    events = [
        *steps(OLD, 12, 99.9),
        Event("error", 0, OLD[0], 12, ALL, 100.02),
        *[Event("enter", worker, pid, -1, ALL, 105.0 + worker) for worker, pid in enumerate(NEW)],
        *steps(NEW, 11, 109.0),
        *steps(NEW, 12, 109.1),
        *steps(NEW, 13, 109.2),
    ]
    found = common.phases(events, Kill(OLD[3], 100.0))
    assert (found["entered_s"], found["first_step_s"], found["next_step_s"]) == pytest.approx((8.0, 9.0, 9.2))
    assert (found["steps_rerun"], found["num_started"]) == (2, 4)


def test_survivors_that_go_on_with_fewer_are_not_yet_complete():
    events = [
        *steps(OLD, 8, 99.9),
        *steps(OLD[:3], 9, 100.4, FEWER),
        Event("enter", 3, NEW[3], -1, ALL, 102.0),
        *steps((*OLD[:3], NEW[3]), 10, 103.0),
    ]
    found = common.phases(events, Kill(OLD[3], 100.0))
    assert (found["next_step_s"], found["complete_s"]) == pytest.approx((0.4, 3.0))


def test_a_batch_depends_on_seed_step_and_worker_alone():
    keys = [(step, worker, seed) for step in range(3) for worker in range(4) for seed in range(2)]
    first = [common.batch(*key)[0] for key in keys]
    assert all(torch.equal(text, common.batch(*key)[0]) for text, key in zip(first, keys, strict=True))
    assert len({text.numpy().tobytes() for text in first}) == len(keys)


# ------------------------------------------------------------------------------------------------------------ overhead


FIGURES: dict[str, Any] = {
    "model": "small model",
    "blocks": 3,
    "steps_per_block": 4,
    "ratio": 1.01,
    "worst_loss_error": 0.0,
    "median_product_s": 1.01,
    "mean_product_s": 1.01,
    "median_plain_s": 1.0,
    "mean_plain_s": 1.0,
}


def test_a_bound_above_the_limit_and_other_losses_are_missed():
    text, missed = overhead.report({**FIGURES, "upper_bound": 1.04}, 0.05)
    assert "upper bound +4.00 % (limit 5 %)" in text
    assert missed == []
    _, missed = overhead.report({**FIGURES, "upper_bound": 1.06, "worst_loss_error": 0.1}, 0.05)
    assert [line.split(" ")[1] for line in missed] == ["upper", "losses"]


def test_one_after_the_other_tells_no_bound_and_holds_the_losses_alone():
    text, missed = overhead.report({**FIGURES, "ratio": 1.5, "upper_bound": None}, 0.05)
    assert "one after the other" in text
    assert "limit" not in text
    assert missed == []
    _, missed = overhead.report({**FIGURES, "upper_bound": None, "worst_loss_error": 0.1}, 0.05)
    assert len(missed) == 1


def test_what_copies_cost_is_the_ratio_of_both_overheads_and_its_bound_is_held():
    def figures(product_s: float) -> dict[str, Any]:
        return {"product_s": [[1.0, product_s], [product_s, 1.0]], "plain_s": [[0.5, 0.5], [0.5, 0.5]]}

    cost = overhead.cost_of_copies(figures(1.0), figures(1.04))
    assert [cost[name] for name in ("overhead_without", "overhead_with", "cost")] == pytest.approx([2.0, 2.04, 1.02])
    assert cost["cost_upper_bound"] == pytest.approx(1.02)
    asked = Namespace(model="small", copies="1", copy_every=2, blocks=3, block_steps=2)
    assert overhead.report_copies(cost, 0.05, asked, [])[1] == []
    done = {"said": "copies of step 1", "bytes": 2_000_000_000, "total_s": 3.0, "blocked_s": 0.004}
    text, missed = overhead.report_copies(cost, 0.01, asked, [done, {"said": "no copies of step 2: the last ones"}])
    assert "copies cost +2.00 %" in text
    assert "1 snapshots of 2.00 GB copied, median 3.00 s, longest 3.00 s; training waited 4.0 ms" in text
    assert "1 times a rank left a round out" in text
    assert missed == ["the upper bound is +2.00 %, more than 1 %"]


@pytest.mark.parametrize("options", [["--dp", "2"], ["--model", "small", "--cp", "2"], ["--apart", "--block-steps=2"]])
def test_options_that_would_mean_nothing_are_refused(options, monkeypatch):
    monkeypatch.setattr("sys.argv", ["bench_overhead.py", *options])
    with pytest.raises(SystemExit, match="2"):
        overhead.main()


# --------------------------------------------------------------------------------------------------------- checkpoints


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    made = Bench(shard_of(6 << 20))
    yield made
    made.stager.close()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_each_system_writes_every_byte_of_the_state(bench, tmp_path):
    assert 0.9 * (6 << 20) < bench.num_bytes <= (6 << 20) + 64  # and the steps of the optimizer
    for name, save in bench.systems.items():
        (folder := tmp_path / name).mkdir()
        waits, ends = save(folder)
        written = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        assert bench.num_bytes <= written < 1.05 * bench.num_bytes, name
        assert 0 < waits <= ends


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_table_has_ratios_to_the_plain_write_of_the_same_round(bench, tmp_path):
    assert list(measure(bench, 1, tmp_path)) == list(bench.systems)
    found = {"plain write": [(9.0, 9.0), (1.0, 1.0), (2.0, 2.0)], "ours": [(5.0, 9.0), (0.5, 3.0), (0.7, 4.0)]}
    text, figures = report(found, 2_000_000_000, tmp_path)
    expected = {"first_wait_s": 5.0, "waits_s": 0.6, "ends_s": 3.5, "gb_per_s": 2 / 3.5, "ratio_to_plain": 2.5}
    assert figures["ours"] == pytest.approx(expected)
    assert "2.500" in text
    assert list(tmp_path.iterdir()) == []
