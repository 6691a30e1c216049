"""The fit finds planted figures, every rank gets the same ones, and a file keeps them or is refused by name."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ring.attention.autolayout import BLOCK_TOKENS, Sizes, price, sparse_kernels
from elastic_ring.attention.kernels import block_tables
from elastic_ring.attention.layouts.layout import contiguous
from elastic_ring.attention.patterns.families import BigBird
from elastic_ring.attention.patterns.rules import Window
from elastic_ring.attention.patterns.sparse import SparsePattern
from elastic_ring.attention.plan.sparse_schedule import plan_sparse
from elastic_ring.attention.plan.sparse_tiles import tiles
from elastic_ring.cli.forecasts.answer import rates_of
from elastic_ring.cli.operate import calibrate as main
from elastic_ring.costs import CostModel
from elastic_ring.errors import RunFailed
from elastic_ring.forecast.scenario import default_efficiency
from elastic_ring.forecast.sizing.machines import named_fleet
from elastic_ring.forecast.sizing.rates import ALONE, read_rates
from elastic_ring.tuning import machine_rates, timed_cases
from elastic_ring.tuning.calibrate import Calibration, Check, Stopwatch, _fit_rate, calibrate, fit
from elastic_ring.tuning.calibrate_host import report
from elastic_ring.tuning.timed_cases import Hops, TimingBudget
from experiments.pattern_choice import choose
from tests.unit.attention.attention_rings import ThreadRings, in_threads, one_thread

CPU = torch.device("cpu")
SIZES = Sizes(2, 1, 8, 4)
EFFORT = TimingBudget(limit_s=1e6, repeats=3, most_bytes=1 << 16, num_tokens=(1024, 1536))
TRUTH = CostModel(
    kernel_flops=5e9, link_bytes_per_s=1e9, message_s=2e-5, call_s=1e-4, dense_flops=8e9, overlap=0.0, per_tile=True
)
DENSE_CALL_S = 3e-4


@pytest.fixture(scope="module")
def rings() -> Iterator[ThreadRings]:
    with one_thread():
        yield ThreadRings()


# ------------------------------------------------------------ the fit


@pytest.mark.parametrize("noise", [(1.0,) * 5, (1.05, 0.95, 1.05, 0.95, 1.05), (0.97, 1.04, 1.0, 1.05, 0.96)])
def test_the_fit_recovers_the_figures_behind_noisy_times(noise: tuple[float, ...]) -> None:
    counts, amounts = (16, 16, 1, 1, 1), (16e3, 16e4, 1e6, 1e7, 1e8)
    times = [n * (count * 4e-5 + amount / 2e9) for n, count, amount in zip(noise, counts, amounts, strict=True)]
    each, per = fit(counts, amounts, times)
    allowed = 1e-9 if set(noise) == {1.0} else 0.1
    assert each == pytest.approx(4e-5, rel=allowed)
    assert 1 / per == pytest.approx(2e9, rel=allowed)


@pytest.mark.parametrize("bad_rounds", [1, 3])
def test_times_that_do_not_grow_are_measured_again_before_they_are_refused(bad_rounds: int) -> None:
    durations = iter([(3.0, 1.0)] * bad_rounds + [(0.5, 3.0)])
    stopwatch, checks = Stopwatch(None, CPU, EFFORT), list[Check]()
    stopwatch.median_s = lambda run: run()  # type: ignore[method-assign, assignment, return-value]

    def cases() -> list[Any]:
        small_s, large_s = next(durations)
        return [timed_cases.Case("small", 1, 1.0, lambda: small_s), timed_cases.Case("large", 1, 2.0, lambda: large_s)]

    if bad_rounds == 3:
        with pytest.raises(RunFailed, match=r"do not grow with their sizes \(3\.00e\+00, 1\.00e\+00 s\)"):
            _fit_rate(stopwatch, "dense", cases, checks)
    else:
        _fit_rate(stopwatch, "dense", cases, checks)
        assert [check.measured_s for check in checks] == [0.5, 1.0]


def test_no_figure_of_a_fit_is_negative() -> None:
    assert fit((1, 1), (1.0, 2.0), (1.0, 3.0))[0] == 0.0
    assert fit((1, 1), (1.0, 2.0), (3.0, 1.0))[1] == 0.0


@pytest.mark.parametrize(
    ("counts", "amounts", "times", "message"),
    [
        ((1,), (1.0,), (1.0,), "at least two"),
        ((1, 1), (1.0, 2.0), (1.0, 0.0), "positive"),
        ((1, 1), (1.0, 2.0), (1.0, float("inf")), "positive"),
        ((1, 2), (1.0, 2.0), (1.0, 2.0), "vary the sizes"),
    ],
)
def test_times_that_say_nothing_are_refused(counts: Any, amounts: Any, times: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit(counts, amounts, times)


# ------------------------------------------------------------ measuring


class Clocks(threading.local):
    """A clock for each thread, which stands still but for what it is told."""

    now = 0.0
    slower = 1.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds * self.slower


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    """What is timed runs as ever, and takes the time that TRUTH says."""
    clocks = Clocks()
    real_hops, real_attends = timed_cases.Hops.__call__, timed_cases._Attends.__call__

    def hops(self: Any, meanwhile: Any = None) -> None:
        real_hops(self, meanwhile)
        clocks.advance(TRUTH.moving_s(self._count * self._num_bytes, self._count))

    def attends(self: Any) -> None:
        real_attends(self)
        schedule = self._ring.schedule
        if not schedule.is_dense:
            calls, pairs = sparse_kernels(schedule, 0, False, TRUTH)
            clocks.advance(calls * TRUTH.call_s + 4 * SIZES.head_dim * pairs / TRUTH.kernel_flops)
        else:
            pairs = SIZES.num_heads * schedule.layout.seq_len * (schedule.layout.seq_len + 1) // 2
            clocks.advance(DENSE_CALL_S + 4 * SIZES.head_dim * pairs / TRUTH.dense_flops)

    monkeypatch.setattr(timed_cases.Hops, "__call__", hops)
    monkeypatch.setattr(timed_cases._Attends, "__call__", attends)
    return clocks


@pytest.mark.slow
@pytest.mark.thinned(num=1)
@pytest.mark.parametrize("cp", [2, 3])
def test_every_rank_gets_the_figures_of_the_slowest(rings: ThreadRings, clocks: Clocks, cp: int) -> None:
    groups = rings.groups(cp)

    def work(cp_rank: int) -> Calibration:
        clocks.slower = 1 + cp_rank / 4
        return calibrate(groups[cp_rank], CPU, SIZES, effort=EFFORT, clock=clocks)

    found = in_threads(cp, work)
    assert all(each.cost_model == found[0].cost_model and each.checks == found[0].checks for each in found)
    slower = 1 + (cp - 1) / 4
    for name, value in asdict(found[0].cost_model).items():
        truth = getattr(TRUTH, name)
        if name.endswith("_s") and not name.endswith("per_s"):
            truth *= slower
        elif name not in ("overlap", "per_tile"):
            truth /= slower
        assert value == pytest.approx(truth, rel=1e-6, abs=1e-9), name
    assert {check.fitted for check in found[0].checks} == {True, False}
    assert max(abs(check.error) for check in found[0].checks) < 1e-6
    assert found[0].about["ranks"] == cp


def test_a_single_rank_measures_its_kernels_and_says_what_it_did_not(clocks: Clocks) -> None:
    with one_thread():
        found = calibrate(None, CPU, SIZES, effort=EFFORT, clock=clocks)
    assert found.cost_model.kernel_flops == pytest.approx(TRUTH.kernel_flops)
    default = CostModel()
    for name in found.about["not measured"]:
        assert getattr(found.cost_model, name) == getattr(default, name)
    assert not any("bytes" in check.name for check in found.checks)


def test_repeats_end_on_all_ranks_once_the_time_of_one_is_over(rings: ThreadRings) -> None:
    groups, effort = rings.groups(2), TimingBudget(limit_s=10.0, repeats=7)

    def work(cp_rank: int) -> tuple[int, float]:
        clock, ran = Clocks(), list[int]()
        stopwatch = Stopwatch(groups[cp_rank], CPU, effort, clock)

        def run() -> None:
            ran.append(len(ran))
            clock.advance((1.0, 4.0)[cp_rank])

        median_s = stopwatch.median_s(run)
        return len(ran), median_s

    assert in_threads(2, work) == [(3, 4.0), (3, 4.0)]


def test_hops_carry_what_they_are_asked_to_and_no_more_is_held(rings: ThreadRings) -> None:
    groups = rings.groups(3)

    def work(cp_rank: int) -> tuple[int, int]:
        hops, beside = Hops(groups[cp_rank], CPU, 5000, 4), list[int]()
        hops(lambda: beside.append(1))
        hops()
        assert hops._buffers is not None
        return hops._buffers.nbytes, len(beside)

    assert in_threads(3, work) == [(10000, 4)] * 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"limit_s": 0}, "limit_s=0"),
        ({"limit_s": float("nan")}, "limit_s=nan"),
        ({"repeats": 0}, "repeats=0"),
        ({"most_bytes": 100}, "most_bytes=100"),
        ({"num_tokens": (2048, 1024)}, "two ascending multiples of 128"),
        ({"num_tokens": (1000, 2048)}, "two ascending multiples of 128"),
    ],
)
def test_an_effort_that_cannot_measure_is_refused(settings: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TimingBudget(**settings)


def test_a_bad_fit_shows_in_the_report() -> None:
    good = Check("16 x 8192 bytes", 16, 131072.0, 1e-3, 1.1e-3, False)
    about = {
        "ranks": 2,
        "device": "CPU, 2 cores",
        "dtype": "float32",
        "num_heads": 8,
        "num_kv_heads": 2,
        "head_dim": 64,
        "torch": "2",
        "date": "today",
    }
    fine = report(Calibration(TRUTH, (good,), about))
    assert "+10.0%  not fitted" in fine
    assert "do not plan by these figures" not in fine
    assert "do not plan by these figures" in report(Calibration(TRUTH, (good, replace(good, measured_s=5e-4)), about))


def test_the_job_refuses_wrong_options_before_it_starts_a_process(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cpu", "--limit-s", "0"]) == 2
    assert main(["--device", "cpu", "--most-mib", "0"]) == 2
    assert main(["--device", "cuda", "--ranks", "1000"]) == 2
    assert main(["--device", "cpu", "--hosts", "2"]) == 2
    assert main(["--device", "cpu", "--storage", "nowhere"]) == 2
    told = capsys.readouterr().err.splitlines()
    named = ["limit_s", "most_bytes", "--ranks 1000", "--hosts 2", "--storage nowhere"]
    assert [line.split(":")[1].split("=")[0].strip() for line in told] == named


# ------------------------------------------------------------ rates for a forecast


def test_rates_are_measured_written_and_read_by_the_forecast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_rates, "WIDTHS", {"cpu": (32, 64)})
    monkeypatch.setattr(machine_rates, "ATTENTION", {"cpu": ((64, 256), (128, 256))})
    monkeypatch.setattr(machine_rates, "WRITTEN_BYTES", 1 << 20)
    host = machine_rates.Host(1, storage=tmp_path)
    rates = machine_rates.measure(Stopwatch(None, CPU, EFFORT), CPU, torch.float32, host)
    path = tmp_path / "machine.json"
    Calibration(TRUTH, (), {}).write(path, asdict(rates))
    assert CostModel.read(path) == TRUTH
    read = read_rates(path)
    assert [row.flops for row in read.matmul] == [row.flops for row in rates.matmul]
    assert rates.storage is not None
    assert read.host.storage_bytes_s == rates.storage["write_bytes_s"]
    assert read.collectives == read.groups == []
    assert rates.stragglers["between_ranks"] == "not measured"
    assert machine_rates.lines(rates)[-1].startswith("ranks apart not measured")
    usual = default_efficiency(named_fleet("H100-80"))
    alone = default_efficiency(named_fleet("H100-80"), read)
    assert (alone.jitter, alone.jitter_origin) == (usual.jitter, "assumed"), "one rank is apart from nothing"
    assert [one.name for one in tmp_path.iterdir()] == ["machine.json"], "the file that was timed is gone"
    assert len(machine_rates.lines(rates)) == 2 + 2 + 3


PLANTED: dict[str, Any] = {
    "ranks_per_host": 4,
    # A rate of 800e12 in wide layers, half of it at a width of 300.
    "matmul": [{"width": w, "tokens": 1, "flops": 800e12 / (1 + 300 / w)} for w in (1024, 2048, 4096)],
    "attention": [{"head_dim": d, "tokens": 1, "flops": flops} for d, flops in ((64, 450e12), (128, 600e12))],
    "collectives": [
        {"kind": kind, "ranks": ranks, "level": level, "bytes": 1, "bytes_s": rate}
        for kind, ranks, level, rate in (
            ("all-gather", 2, "host", 400e9),
            ("all-gather", 4, "host", 300e9),
            ("reduce-scatter", 4, "host", 270e9),
            ("all-gather", 16, "network", 240e9),
            ("reduce-scatter", 16, "network", 250e9),
        )
    ],
    "groups": [{"ranks": ranks, "s": s} for ranks, s in ((2, 0.3), (4, 0.4), (8, 0.5))],
    "host_copies": {"to_host_bytes_s": 51e9, "from_host_bytes_s": 50e9},
    "stragglers": {"between_ranks": 0.02, "within_a_rank": 0.01, "ranks": 16},
    "storage": {"write_bytes_s": 3e9, "path": "/"},
}


def test_a_forecast_takes_what_was_measured_by_shape_group_and_level_and_says_so_of_another_gpu(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "machine.json"
    for device in ("NVIDIA H200", "NVIDIA H100 80GB HBM3"):
        Calibration(TRUTH, (), {"device": device}).write(path, PLANTED)
        rates, fleet = rates_of(path, "H100-80"), named_fleet("H100-80")
    (warned,) = caplog.messages
    assert warned.endswith("was measured on NVIDIA H200, and the fleet has H100-80: this is no forecast of it")
    eff = default_efficiency(fleet, rates)
    usual = default_efficiency(fleet)
    assert eff.matmul == pytest.approx(usual.matmul * 800e12 / 989.4e12 / ALONE["matmul"])
    assert eff.half_width == pytest.approx(300.0)
    assert eff.narrow_heads == pytest.approx(0.75)
    assert (eff.jitter, eff.jitter_origin) == (0.02, "calibrated")
    assert eff.origin == "calibrated"
    seen = rates.fleet(fleet)
    assert seen.spec.nvlink_bytes_s * eff.link == pytest.approx(270e9), "the slower one of the largest group"
    assert seen.spec.nic_bytes_s * 4 * eff.link == pytest.approx(240e9), "the cards of a host's ranks that measured"
    assert (seen.links.pcie_gb_s, seen.links.storage_gb_s) == (50.0, 3.0)
    assert rates.doubled_s() == pytest.approx(0.1)


@pytest.mark.slow
def test_two_hosts_measure_collectives_over_the_network_together(tmp_path: Path) -> None:
    """Two commands with a rank each meet over TCP, as on two hosts."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        meet = f"127.0.0.1:{probe.getsockname()[1]}"
    few = ["--device", "cpu", "--ranks", "1", "--heads", "1", "--head-dim", "8", "--limit-s", "0.1", "--repeats", "1"]
    command = [sys.executable, "-m", "elastic_ring", "calibrate", *few, "--hosts", "2", "--meet", meet]
    others = subprocess.Popen([*command, "--host", "1"], stdout=subprocess.DEVNULL)
    try:
        subprocess.run([*command, "--host", "0", "--out", str(tmp_path / "m.json")], check=True, timeout=240)
        assert others.wait(60) == 0
    finally:
        others.kill()
    rates = read_rates(tmp_path / "m.json")
    assert {(row.kind, row.level) for row in rates.collectives} == {
        ("all-gather", "network"),
        ("reduce-scatter", "network"),
    }
    assert [row.ranks for row in rates.groups] == [2]


# ------------------------------------------------------------ the file


def test_figures_come_back_from_their_file_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "deeper" / "machine.json"
    checks = (Check("dense 1024", 1, 1e9, 0.1 + 0.2, 0.3, True),)
    Calibration(TRUTH, checks, {"device": "CPU, 2 cores", "date": "2026-11-21"}).write(path)
    assert CostModel.read(path) == TRUTH
    written = json.loads(path.read_text())
    assert written["about"]["device"] == "CPU, 2 cores"
    assert written["checks"][0]["measured_s"] == 0.1 + 0.2


BAD = {
    "no file": (None, "cannot be read"),
    "no JSON": ("{", "is not JSON"),
    "a list": ("[]", 'no object "machine"'),
    "no figures": ('{"about": {}}', 'no object "machine"'),
    "missing": ({"call_s": ...}, "'call_s' is missing"),
    "unknown": ({"calls_s": 1.0}, "CostModel has no setting calls_s: did you mean call_s"),
    "text": ({"call_s": "1"}, "call_s='1': must be 0 seconds or more"),
    "a bool": ({"call_s": True}, "call_s=True: must be 0 seconds or more"),
    "no bool": ({"per_tile": 1}, "per_tile=1: must be True or False"),
    "negative": ({"message_s": -1.0}, "message_s=-1.0: must be 0 seconds or more"),
    "no rate": ({"kernel_flops": 0.0}, "kernel_flops=0.0: must be more than 0"),
    "not finite": ({"link_bytes_per_s": float("inf")}, "link_bytes_per_s=inf"),
    "not a number": ({"dense_flops": float("nan")}, "dense_flops=nan"),
    "too much": ({"overlap": 1.5}, "overlap=1.5: must be 0 to 1"),
}


@pytest.mark.parametrize("why", BAD)
def test_a_bad_file_is_refused_by_its_name_with_a_way_out(why: str, tmp_path: Path) -> None:
    content, message = BAD[why]
    path = tmp_path / "machine.json"
    if isinstance(content, dict):
        figures = {**asdict(TRUTH), **content}
        content = json.dumps({"machine": {name: value for name, value in figures.items() if value is not ...}})
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=message) as caught:
        CostModel.read(path)
    assert str(path) in str(caught.value)
    assert "jobs/calibrate.py" in str(caught.value)


def test_a_file_that_cannot_be_written_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be written"):
        TRUTH.write(tmp_path)


# ------------------------------------------------------------ what plans make of them


def test_a_plan_for_cpus_counts_the_tiles_and_what_masked_ones_compute() -> None:
    schedule = plan_sparse(SparsePattern((Window(200),)), contiguous(1024, 2), 2, 1)
    own = [tile for hop in tiles(schedule, 1) for tile in hop]
    assert sparse_kernels(schedule, 1, True, TRUTH) == (len(own), sum(2 * tile.num_pairs for tile in own))
    assert sparse_kernels(schedule, 1, True, CostModel()) == (2, schedule.work(1))
    assert sum(2 * tile.num_pairs for tile in own) > schedule.work(1)


def test_each_figure_makes_plans_dearer() -> None:
    pattern = SparsePattern((BigBird(3, 1, 2),))
    schedule = plan_sparse(pattern, contiguous(4096, 4), SIZES.num_heads, SIZES.num_kv_heads)
    dearer = {
        "kernel_flops": 1e9,
        "link_bytes_per_s": 1e3,
        "message_s": 1.0,
        "call_s": 1.0,
        "overlap": 0.0,
        "per_tile": True,
    }
    base = replace(CostModel(), per_tile=False)
    for name, value in dearer.items():
        before, after = (price(schedule, SIZES, m) for m in (base, replace(base, **{name: value})))
        assert after.forward_s > before.forward_s, name
    assert {field.name for field in fields(CostModel)} - set(dearer) == {"dense_flops"}
    assert choose(pattern, 4096, 4, SIZES, TRUTH).best.forward_s > choose(pattern, 4096, 4, SIZES).best.forward_s


def test_plans_and_kernels_mean_the_same_blocks() -> None:
    assert BLOCK_TOKENS == block_tables.BLOCK_TOKENS
