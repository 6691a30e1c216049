"""What runs tell the forecast, and the forecast of a run: stages, --from-run, --score."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from elastic_ring.cli.forecasts import command
from elastic_ring.cli.forecasts.attention import within_documents
from elastic_ring.cli.forecasts.seen import beside, lines_of_end, losses_of, planned
from elastic_ring.cli.settings import parse
from elastic_ring.forecast.answers.request import Learned, narrower, read_stages
from elastic_ring.forecast.goodput import PRIORS
from elastic_ring.gpus import gpu_type
from elastic_ring.monitor.goodput import seen_of
from elastic_ring.monitor.metrics import write_json
from tests.journals import journal_bytes
from tests.unit.data.corpora import prepared

ROOT = Path(__file__).parents[3]
TIME_S = {"startup": 40.0, "steps": 100.0, "recovery": 3.0, "rerun": 1.0}
SETTINGS = ["--preset", "1b", "--dp", "1", "--cp", "2", "--global-batch", "1"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A folder as a run leaves it, with ten steps of the 5.11 s that two H100s took."""
    (tmp_path / "config.toml").write_text(parse(SETTINGS).toml())
    steps = [60.0, 6.0, 5.3, *[5.11] * 7]
    lines = [{"step": index, "step_s": step_s, "loss_hex": (1.0).hex()} for index, step_s in enumerate(steps)]
    (tmp_path / "metrics.jsonl").write_bytes(journal_bytes(lines))
    summary = {"goodput": 0.9, "peak_gpu_bytes": int(22.7 * 2**30), "recoveries": [], "time_s": TIME_S}
    write_json(tmp_path / "summary.json", summary)
    return tmp_path


def test_the_end_of_a_run_shows_forecast_beside_seen(run: Path) -> None:
    found = planned(parse(SETTINGS), "H100-80", 1)
    assert found["step_s"] == pytest.approx(5.11, rel=0.05), "benchmarks/results/gpu_runs, twelfth run"
    assert 0.99 < found["goodput"] < 1.0
    seen = seen_of([60.0, 6.0, 5.3, *[5.11] * 7], json.loads((run / "summary.json").read_text()))
    assert seen == {"step_s": 5.11, "gpu_bytes": int(22.7 * 2**30), "goodput": pytest.approx(100 / 104)}
    assert beside("step_s", 5.0, 4.0) == "step: forecast 5 s, seen 4 s (+25 %)"
    after = "goodput after the start: forecast 99.9 %, seen 97 % (+2.9 points)"
    assert beside("goodput", 0.999, 0.97) == after
    figures = {"step_s": 5.0, "goodput": 0.999}, {"step_s": 4.0, "goodput": 0.97}
    assert lines_of_end(parse(SETTINGS), *figures) == [after], "no measurement calibrates this machine"
    calibrated = parse([*SETTINGS, "--machine", "h100.json"])
    assert lines_of_end(calibrated, *figures) == ["step: forecast 5 s, seen 4 s (+25 %)", after]
    assert lines_of_end(parse(["--machine", "cpu.json"]), *figures) == [after], "cores have one host's figure"
    assert planned(parse(SETTINGS), None, 1) == {}
    quiet = planned(parse([]), None, 2)["step_s"]
    assert quiet == pytest.approx(1.37, rel=0.1), "laptop on two cores"
    busy = planned(parse([]), None, 2, load=4.0)
    assert busy["step_s"] == pytest.approx(2 * quiet), "half of them for others"
    assert busy["alone_step_s"] == quiet


@pytest.mark.parametrize("context", [64, 512, 4096])
def test_packed_documents_have_fewer_pairs(tmp_path: Path, context: int) -> None:
    """The share by the formula beside the pairs of the sequences as they are packed."""
    draws = np.random.default_rng(0).lognormal(5, 1, 400).astype(int) + 1
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": "a" * length}) + "\n" for length in draws))
    manifest = prepared(tmp_path / "out", tmp_path / "a.jsonl")
    total = manifest.num_tokens
    ends = np.union1d(np.cumsum(draws + 1), np.arange(context, total, context))
    true = float((np.diff(ends, prepend=0).astype(float) ** 2).sum()) / (total * context)
    uri = str(tmp_path / "out" / "manifest.json")
    found = within_documents(parse([*SETTINGS, "--model.vocab-size", "512", "--context", str(context), "--data", uri]))
    assert found == pytest.approx(true, rel=0.1), "one packing of 400"
    assert within_documents(parse(SETTINGS)) == 1.0


def test_score_says_how_wrong_each_forecast_was(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--score", str(run), "--fleet", "h100-80"]) == 0
    out = capsys.readouterr().out
    assert "s, seen 5.11 s (-2 %)" in out
    assert "memory: forecast 22.7 GiB, seen 22.7 GiB" in out
    assert "steps of 1 runs:" in out
    assert "goodput after the start: forecast 100 %, seen 96.2 % (+3.8 points)" in out
    assert command.main(["--score", str(run / "gone")]) == 2
    assert "is no run that has ended" in capsys.readouterr().err


def test_score_takes_the_forecast_that_was_made_and_the_losses_that_came(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "config.toml").write_text(parse([]).toml())
    write_json(run / "config.json", {"planned_step_s": 5.0, "planned_goodput": 1.0})
    causes = [
        "rank 0 died in backward of step 40 (killed by SIGKILL)",
        "rank 1 hung in idle of step 44",
        "the coordinator died",
    ]
    recoveries = [{"cause": cause} for cause in causes]
    summary = json.loads((run / "summary.json").read_text()) | {"recoveries": recoveries}
    write_json(run / "summary.json", summary)
    assert losses_of(recoveries) == {"process": 1, "frozen": 1}
    assert command.main(["--score", str(run)]) == 0
    out = capsys.readouterr().out
    assert "step: forecast 5 s, seen 5.11 s (-2 %)" in out
    assert "with its failures (1 process, 1 frozen) goodput after the start: forecast 94.4 %" in out, out


def test_a_run_corrects_the_step_and_narrows_it(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for flags in ([], ["--from-run", str(run)]):
        big = ["--preset", "8b", "--dp", "64", "--global-batch", "64", "--json", *flags]
        assert command.main(big) == 0
        found.append(json.loads(capsys.readouterr().out))
    before, after = (one["inputs"]["step"]["p90"] for one in found)
    assert after < before
    assert found[1]["figures"]["step_s"]["origin"] == "measured"


def test_losses_that_were_seen_move_the_prior_and_narrow_it() -> None:
    prior = PRIORS["published"]
    many = narrower(prior, Learned(1.0, losses=50, gpu_hours=500_000.0))
    assert 10_000 < many.gpu_hours[1] < 12_000
    assert many.gpu_hours[2] / many.gpu_hours[0] < prior.gpu_hours[2] / prior.gpu_hours[0]
    calm = narrower(prior, Learned(1.0, losses=0, gpu_hours=400_000.0))
    assert calm.gpu_hours[1] > 2 * prior.gpu_hours[1]


@pytest.mark.slow
def test_the_worked_plan_has_three_stages_whose_chances_fall(capsys: pytest.CaptureFixture[str]) -> None:
    path = ROOT / "examples" / "forecast_stages.toml"
    assert [stage.name for stage in read_stages(str(path))] == ["100B", "500B", "1T"]
    assert command.main(["--stages", str(path)]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if "all until here" in line]
    chances = [int(row.rsplit(": ", 1)[1].rstrip("%")) for row in rows]
    assert len(chances) == 3
    assert 100 >= chances[0] >= chances[1] >= chances[2]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "has no [[stage]] tables"),
        ('[[stage]]\nname = "a"\ntokens = "1B"\ntrain = []\n', "stage 1: stage.fleet"),
        ('[[stage]]\nname = "a"\ntokens = "0"\ntrain = []\nfleet = "h200"\n', "a: --tokens 0"),
    ],
)
def test_a_bad_stage_is_named(text: str, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "stages.toml").write_text(text)
    assert command.main(["--stages", str(tmp_path / "stages.toml")]) == 2
    assert named in capsys.readouterr().err


def test_gpus_have_their_type_by_the_name_that_cuda_tells() -> None:
    names = {
        "NVIDIA A100-SXM4-40GB": "A100-40",
        "NVIDIA A100-SXM4-80GB": "A100-80",
        "NVIDIA H200": "H200",
        "NVIDIA H100 80GB HBM3": "H100-80",
        "NVIDIA B200": "B200",
        "NVIDIA L4": None,
        "accelerator_type:GH200": None,
        "accelerator_type:A100": "A100-40",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb": None,
    }
    assert {name: gpu_type(name) for name in names} == names


@pytest.mark.slow
def test_five_pictures_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert command.main([*SETTINGS, "--deadline", "90d", "--plot", str(tmp_path / "plots")]) == 0
    assert capsys.readouterr().out
    written = sorted(path.stem for path in (tmp_path / "plots").iterdir())
    assert written == ["cost_and_time", "memory", "spares", "step", "tornado"]
