"""`elastic-ring forecast`: what it answers, what it refuses, and in which direction each input moves the answer."""

from __future__ import annotations

import dataclasses
import functools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from elastic_ring.cli.forecasts import command
from elastic_ring.cli.settings import parse
from elastic_ring.costs import CostModel
from elastic_ring.forecast.answers.money import Owned, read_prices
from elastic_ring.forecast.answers.request import amount
from elastic_ring.forecast.answers.search import FRONT_DRAWS, changed, fitting_changes, pareto, search
from elastic_ring.forecast.goodput import HOUR, PRIORS, Failures, RunShape, Spot
from elastic_ring.forecast.renewal import CommonRandomNumbers, HostsAway, mean_goodput, rates_of, simulate_goodput
from elastic_ring.forecast.scenario import Scenario, curves, default_efficiency, forecast, totals_at
from elastic_ring.forecast.sizing.machines import Range, around, named_fleet
from elastic_ring.forecast.sizing.step_time import Attention, hop_times_s
from elastic_ring.gpus import GPUS
from tests.sim.simulator.tier1 import Tier1

ODD_RATES = {
    "ranks_per_host": 1,
    "matmul": [{"width": 1, "tokens": 1, "flops": -1}],
    "host_copies": {"to_host_bytes_s": 1.0, "from_host_bytes_s": 1.0},
    "stragglers": {"between_ranks": 0.1},
}
RUN = ["--preset", "8b", "--dp", "64", "--global-batch", "64"]


@functools.cache
def scenario(*flags: str, gpu: str = "H100-80", tokens: float = 1e12) -> Scenario:
    asked, fleet = parse([*RUN, *flags]), named_fleet(gpu)
    return Scenario(
        asked.model,
        asked.scaling,
        asked.step,
        asked.run,
        fleet,
        default_efficiency(fleet),
        PRIORS["published"],
        read_prices(None).find(gpu, "on demand"),
        tokens,
    )


def answer(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, str, str]:
    code = command.main([*RUN, *flags])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_one_command_answers_memory_time_goodput_money_and_probability(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = answer(capsys, "--fleet", "h100-80", "--tokens", "1T", "--deadline", "60d", "--budget", "2M")
    assert code == 0
    words = [
        "H100-80    79.1 GiB: fits",
        "step ",
        "goodput ",
        "1 T tokens in 119,210 steps of 8,388,608: 64 sequences, context 131,072",
        "days (median, 80 %",
        "USD (median, 80 %",
        "(mean cost, USD, at P10",
        "probability of both",
        "x 64 in",
    ]
    assert [word for word in words if word not in out] == []
    origins = {line.rsplit("[")[-1].rstrip("]") for line in out.splitlines() if "80 %:" in line}
    assert origins <= {"measured", "calibrated", "specified", "assumed"}


def test_json_has_the_same_answer_and_a_tornado_sorted_by_swing(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = answer(capsys, "--json", "--deadline", "60d")
    found = json.loads(out)
    assert code == 0
    assert found["figures"]["step_s"]["p10"] < found["figures"]["step_s"]["p50"] < found["figures"]["step_s"]["p90"]
    assert found["memory"]["fits"] is True
    assert found["steps"] * found["tokens_per_step"] >= found["tokens"] > 0 < found["context_tokens"]
    assert 0 <= found["probability"]["deadline"] <= 1
    swings = [abs(row["p90"] - row["p10"]) for row in found["tornado"]]
    assert swings == sorted(swings, reverse=True)
    assert len(swings) == 8


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--tokens", "0"], "--tokens 0"),
        (["--tokens", "many"], "--tokens many"),
        (["--deadline", "2020-01-01"], "--deadline 2020-01-01: lies in the past"),
        (["--deadline", "0d"], "--deadline 0d"),
        (["--budget", "-3"], "--budget -3"),
        (["--fleet", "cloud"], "--fleet cloud"),
        (["--fleet", "fleet.toml"], "fleet.toml: links: must be given"),
        (["--failures", "often"], "--failures often"),
        (["--failures", "failures.toml"], "failures.toml: gpu_hours="),
        (["--failures", "words.toml"], "words.toml: gpu_hours=['a', 2, 3]"),
        (["--failures", "repair.toml"], "repair.toml: repair_hours=3"),
        (["--failures", "shares.toml"], "shares.toml: shares="),
        (["--prices", "no_day.toml"], "row 1: price.date='2026-13-41': is no day"),
        (["--prices", "rows.toml"], "rows.toml: has no [[price]] rows"),
        (["--prices", "owned.toml"], "owned.toml: owned.years=-1"),
        (["--price", "cheap"], "--price: invalid choice: 'cheap'"),
        (["--tokens", "1e400"], "--tokens 1e400"),
        (["--measured-step", "nan"], "--measured-step nan"),
        (["--measured-step", "soon"], "--measured-step: invalid float value: 'soon'"),
        (["--prices", "prices.toml"], "row 1: price.date"),
        (["--prices", "hours.toml"], "on_hours=[1.0, 2.0, inf]: must be three finite numbers"),
        (["--search", "--price", "owned"], "--search --price owned: prices has no row of it"),
        (["--prices", "gone.toml"], "gone.toml: cannot be read"),
        (["--measured-step", "0"], "--measured-step 0"),
        (["--machine", "gone.json"], "gone.json"),
        (["--machine", "old.json"], "--machine old.json: has no rates for a forecast"),
        (["--machine", "odd.json"], "--machine odd.json: rates: matmul flops=-1: must be a number above 0"),
        (["--dp", "100"], "global_batch=64 is less than dp=100"),
        (["--pattern", "window"], "--pattern: "),
        (["--pattern", "dense@40"], "--pattern: layer 40"),
        (["--model-folder", "."], "--model-folder .: its config.json cannot be read"),
        (["--model-folder", "mamba"], "--model-folder mamba: model_type='mamba'"),
        (["--model-folder", "bare"], "--model-folder bare: config.json has no num_attention_heads"),
        (["--model-folder", "bare", "--lora", "r=8,alpha=8,target=q_proj"], "--lora"),
        (["--fleet", "small.toml"], "num_gpus=8"),
        (["--fleet", "odd.toml"], "fleet gpu='T4'"),
    ],
)
def test_bad_input_gets_one_line_that_names_it(
    flags: list[str], named: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    links = "[links]\nnvlink_gb_s = 450.0\nnic_gb_s = 50.0\n"
    price = '[[price]]\ngpu = "H100-80"\nkind = "spot"\nusd_hour = [1.0, 2.0, 3.0]\nsource = "me"\n'
    for name, text in {
        "fleet.toml": 'gpu = "H100-80"\n',
        "failures.toml": "gpu_hours = [3, 2, 1]\n",
        "words.toml": 'gpu_hours = ["a", 2, 3]\n',
        "repair.toml": "gpu_hours = [1, 2, 3]\nrepair_hours = 3\n",
        "shares.toml": "gpu_hours = [1, 2, 3]\nshares = {process = 1.5, gpu = -0.5}\n",
        "prices.toml": price,
        "no_day.toml": f'{price}date = "2026-13-41"\n',
        "hours.toml": f'{price}date = "2026-05-01"\non_hours = [1.0, 2.0, inf]\n',
        "rows.toml": "price = [3]\n",
        "owned.toml": f'{price}date = "2026-05-01"\n[owned]\nyears = -1.0\n',
        "small.toml": f'gpu = "H100-80"\nnum_gpus = 8\n{links}',
        "odd.toml": f'gpu = "T4"\n{links}',
    }.items():
        Path(name).write_text(text)
    CostModel().write("old.json")
    CostModel().write("odd.json", rates=ODD_RATES)
    for kind in ("mamba", "llama"):
        folder = tmp_path / kind.replace("llama", "bare")
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    code, out, err = answer(capsys, *flags)
    assert (code, out) == (2, "")
    assert named in err
    assert err.count("\n") == 1


def test_neither_torch_nor_ray_is_imported() -> None:
    code = (
        "import sys; from elastic_ring.cli import main; assert main(['forecast', '--preset', '8b']) == 0;"
        "print([name for name in ('torch', 'ray', 'matplotlib', 'typeguard', 'numpy.ma') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_more_tokens_failures_and_dollars_never_make_it_better() -> None:
    base = scenario()
    middle = base.medians()
    worse = {"step": 1.2, "gpu_hours": 1e4, "repair": 3.0, "rebuild": 3.0, "jitter": 2.0, "links": 0.7, "price": 9.0}
    double = dataclasses.replace(base, tokens=2e12)
    first, *others, long = totals_at(
        [(base, middle), *((base, {**middle, name: value}) for name, value in worse.items()), (double, middle)]
    )
    assert [name for name, other in zip(worse, others, strict=True) if other["usd"] <= first["usd"]] == []
    assert long["run_s"] == pytest.approx(2 * first["run_s"])


def test_a_measured_step_takes_the_place_of_the_model_and_a_far_one_is_marked_and_wider() -> None:
    found = forecast(dataclasses.replace(scenario(), measured_step_s=10.0), num_draws=200)
    assert found.middle["step_s"] == pytest.approx(10.0)
    low, _, high = found.quantiles("step_s")
    assert 9.6 < low < high < 10.4
    near, far = scenario("--dp", "1", "--global-batch", "1"), scenario()
    assert "GPUs" not in near.extrapolated
    assert far.extrapolated["GPUs"] == 64.0
    assert far.inputs()["step"].p90 > near.inputs()["step"].p90


def shape(**changes: object) -> RunShape:
    times = {"heal_s": 2.0, "rebuild_s": 2.0, "detect_s": 5.0, "interval_s": 600.0, "wait_s": 0.05, "restore_s": 120.0}
    base = RunShape(8, 8, 8, 8, 32, 128, 10.0, **times)
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def mean_of(one: RunShape, failures: Failures, gpu_hours: float | None = None) -> float:
    return mean_goodput([one], failures, [failures.gpu_hours[1] if gpu_hours is None else gpu_hours], [1.0])[0]


def test_without_failures_goodput_is_one_but_for_checkpoints() -> None:
    assert mean_of(shape(wait_s=6.0), PRIORS["none"]) == pytest.approx(1 / 1.01, abs=1e-6)


def test_rare_losses_cost_their_rate_times_the_cost_of_one() -> None:
    """One host in ten years, of which only a loss's own cost and the hosts away in the mean are left."""
    one = shape(dp=4, spares=0)
    failures = Failures(shares={"host": 1.0}, repair_hours=(12.0, 0.5), planned_per_day=0.0)
    rate, away_s = one.num_gpus / (4e6 * HOUR), 12 * HOUR * np.exp(0.5**2 / 2)
    cost_s = one.detect_s + 2 * one.rebuild_s + 2 * one.heal_s + one.step_s / 2  # and a ring's return
    lost = rate * (cost_s + away_s / one.dp) + one.wait_s / one.interval_s
    assert 1 - mean_of(one, failures, 4e6) == pytest.approx(lost, rel=0.1)


def test_spares_help_while_hosts_are_away_and_cost_rent() -> None:
    rows = curves(scenario(), {"spares": [0.0, 8.0, 16.0, 64.0]})["spares"]
    goodput = [row[1] for row in rows]
    assert goodput == sorted(goodput)
    assert rows[-1][2] > rows[1][2], "rent of spares that hardly serve"


def test_hosts_that_are_away_are_not_lost_again() -> None:
    """Sixteen of 64 single hosts are away at a time, each lost once in 300 hours and back after 100."""
    one = shape(dp=64, spares=0, heal_s=0.0, rebuild_s=0.0, detect_s=0.0, step_s=1e-3)
    failures = Failures(shares={"host": 1.0}, repair_hours=(100.0, 0.1), planned_per_day=0.0)
    assert mean_of(one, failures, 300 * 8.0) == pytest.approx(0.75, abs=0.02)


def test_gradients_come_back_in_the_type_of_the_keys_and_few_keys_are_kept() -> None:
    one = scenario("--cp", "16")
    there, back = hop_times_s(one.job, one.fleet.spec, one.eff, 8)
    assert back == 2 * there, "keys again, and their gradients"
    few = dataclasses.replace(one.job, attention=Attention(0.01, fetched=0.01, hops=1, sparse=1.0))
    there, back = hop_times_s(few, one.fleet.spec, one.eff, 8)
    assert back == there


def test_spot_capacity_is_cheaper_slower_and_paid_while_it_is_there() -> None:
    plain = scenario()
    spot = dataclasses.replace(plain, price=read_prices(None).find("H100-80", "spot"))
    rented, taken = (totals_at([(one, one.medians())])[0] for one in (plain, spot))
    assert taken["goodput"] < rented["goodput"]
    assert taken["usd"] < 0.6 * rented["usd"]
    assert taken["paid_hours"] < taken["gpu_hours"]
    never = Spot(1e15, 3600.0, 1e15)
    assert mean_of(shape(spot=never), PRIORS["published"]) == pytest.approx(
        mean_of(shape(), PRIORS["published"]), abs=1e-6
    )
    often = Spot(2e5, 4e3, 3e6)
    alone, spare = (mean_of(shape(dp=1, spares=n, spot=often), PRIORS["none"]) for n in (0, 1))
    assert spare >= alone, "a host that has one spare is no whole host"


@pytest.mark.parametrize("hours", [None, ([0.001, 0.01, 0.1], [5.0, 10.0, 20.0])])
def test_no_draw_commits_more_than_is_paid_for(hours: tuple[list[float], list[float]] | None) -> None:
    """2,049 GPUs, and ones that are hardly ever there."""
    price = read_prices(None).find("H100-80", "spot")
    if hours is not None:
        price = dataclasses.replace(price, on_hours=hours[0], off_hours=hours[1])
    flags = ["--dp", "256", "--cp", "8", "--spares", "1", "--global-batch", "4096"]
    found = forecast(dataclasses.replace(scenario(*flags), price=price), num_draws=2_000)
    committed_hours = found.draws["goodput"] * found.draws["run_s"] / HOUR * 2048
    assert (committed_hours <= found.draws["paid_hours"] * (1 + 1e-9)).all()
    ideal_hours = found.draws["step_s"] * 1e12 / found.scenario.tokens_per_step / HOUR * 2048
    assert committed_hours == pytest.approx(ideal_hours), "of all tokens"


def test_a_walk_through_a_large_fleet_begins_with_hosts_away() -> None:
    one = shape(dp=256, spot=Spot(12 * HOUR, 6 * HOUR, 4000 * HOUR))
    luck = CommonRandomNumbers(np.random.default_rng(0), 30)
    walked = simulate_goodput(one, PRIORS["none"], np.full(30, 1e12), 1e9, luck, steady=True)
    assert one.spot is not None
    assert 0.95 * one.spot.share_paid < float(walked.mean()) < one.spot.share_paid
    wide = shape(dp=4, cp=32, spot=Spot(12 * HOUR, HOUR, 400 * HOUR))
    many = [wide, dataclasses.replace(wide, spares=32)]
    each = [mean_of(one, PRIORS["published"], 4e4) for one in many]
    assert mean_goodput(many, PRIORS["published"], [4e4] * 2, [1.0] * 2) == pytest.approx(each, abs=0.01)
    assert each[1] > each[0] + 0.05, "spares of a whole ring"


def test_one_ring_without_copies_pays_for_the_interval_between_checkpoints() -> None:
    alone, held = scenario("--dp", "1", "--copies", "0"), scenario("--dp", "1", "--copies", "1", "--spares", "8")
    lost = [[1 - row[1] for row in curves(one, {"interval": (1e5, 600.0)})["interval"]] for one in (alone, held)]
    assert lost[0][0] - lost[0][1] > 1.5 * (lost[1][0] - lost[1][1])


def test_draws_keep_their_quantiles() -> None:
    drawn = Range(1.0, 2.0, 8.0).draw(40_000, np.random.default_rng(0))
    assert np.quantile(drawn, (0.1, 0.5, 0.9)) == pytest.approx([1.0, 2.0, 8.0], rel=0.04)
    assert around(3.0, 0.1).p50 == 3.0
    with pytest.raises(ValueError, match="must be above 0 and rise"):
        Range(2.0, 1.0, 3.0)


def test_the_cheapest_change_that_fits_is_named_and_fits() -> None:
    tight = scenario("--dp", "1", "--cp", "2", "--global-batch", "1")
    assert not tight.fits
    assert forecast(tight, num_draws=100).probability(1e12, None) == {"deadline": 0.0}
    name, cost = fitting_changes(tight)[0]
    assert "cp" in name or "offload" in name
    assert cost > 0


def test_the_search_returns_a_front_that_nothing_beats() -> None:
    base = scenario("--dp", "16", "--global-batch", "16", "--context", "32768")
    base = dataclasses.replace(base, pattern=lambda cp: Attention(density=0.1, fetched=0.2, sparse=1.0))
    front, tried = search(base, read_prices(None), "on demand", 90 * 86400.0, 1e6, ["H100-80"], limit=300)
    assert 0 < len(front) < tried <= 300
    assert pareto(front) == front
    assert all(one.scenario.fits and one.success is not None for one in front)
    assert front[0].usd == forecast(front[0].scenario, num_draws=FRONT_DRAWS).quantiles("usd")[1], "walked"
    assert all("the pattern" in one.line() for one in front), "dense attention was tried and is slower"


def test_prices_are_dated_and_stale_ones_warn() -> None:
    prices = read_prices(None)
    for gpu in GPUS:
        row = prices.find(gpu, "on demand")
        assert row.source
        assert prices.warnings(row, 91)
        assert not prices.warnings(row, 90)
        assert "dated in the future" in prices.warnings(row, -1)[0]
    with pytest.raises(ValueError, match="has no price of H900"):
        prices.find("H900", "spot")


def test_an_own_fleet_costs_wear_energy_and_staff() -> None:
    fleet, owned = named_fleet("H100-80"), Owned()
    at_400, at_800 = owned.usd_hour(fleet, 400) / 400, owned.usd_hour(fleet, 800) / 800
    assert 1.0 < at_800 < at_400 < 3.0, "staff is shared"


def test_amounts_are_numbers_and_unknown_settings_of_a_search_are_refused() -> None:
    assert [amount(text, "--tokens") for text in ("1T", "12M", "300e9", "$2K")] == [1e12, 12e6, 300e9, 2e3]
    with pytest.raises(ValueError, match="search: width_of_gpu"):
        changed(scenario(), width_of_gpu=3)


@pytest.mark.parametrize("spot", [None, Spot(4e5, 4e3, 3e6)])
def test_tier_1_runs_the_control_core_and_agrees_with_tier_2(spot: Spot | None) -> None:
    for index, (dp, cp, spares) in enumerate(((1, 16, 8), (2, 8, 8), (4, 16, 0))):
        one = shape(dp=dp, cp=cp, spares=spares, hosts_per_switch=4, spot=spot)
        failures = Failures(gpu_hours=(1e4, 3e4, 6e4), repair_hours=(3.0, 0.4), planned_per_day=0.0)
        duration_s = 120 / float(sum(rates_of(one, failures, 3e4).values()))
        luck = CommonRandomNumbers(np.random.default_rng(index), 2)
        walks = [Tier1(one, failures, 3e4, duration_s, luck, draw).run() for draw in range(2)]
        walked = simulate_goodput(one, failures, np.full(2, 3e4), duration_s, luck)
        assert min(walk.losses for walk in walks) > 60
        assert np.mean([walk.goodput for walk in walks]) == pytest.approx(float(walked.mean()), abs=0.003)


def test_tier_1_refuses_a_mesh_with_too_many_members() -> None:
    with pytest.raises(ValueError, match="129 members are more than 128"):
        Tier1(shape(dp=129, cp=8), PRIORS["published"], 4e4, 1e6, CommonRandomNumbers(np.random.default_rng(0), 1))


def test_a_host_that_takes_the_last_slot_of_a_full_draw_is_not_forgotten_as_the_soonest() -> None:
    away = HostsAway(draws=2, slots=2)
    both = np.array([0, 1])
    for at, hosts in (([9.0, 5.0], [1.0, 1.0]), ([4.0, 7.0], [2.0, 1.0]), ([6.0, 6.0], [3.0, 2.0])):
        away.add(both, np.array(at), np.array(hosts))
    assert away.soonest_at.tolist() == [6.0, 5.0]
    assert away.hosts.tolist() == [4.0, 3.0]
    away.take_back(both)
    assert (away.soonest_at.tolist(), away.hosts.tolist()) == ([9.0, 6.0], [1.0, 2.0])
