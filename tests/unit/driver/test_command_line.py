"""The command line: presets, a TOML file and flags, in this order; help and refusals without torch or Ray."""

from __future__ import annotations

import dataclasses
import math
import os
import pty
import pwd
import re
import subprocess
import sys
import tomllib
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import ray
from safetensors.torch import save_file

from elastic_ring import ElasticRingTrainer, OptimConfig, StepConfig, cli
from elastic_ring.cli import settings, train
from elastic_ring.cli.options import FOREIGN, options_of
from elastic_ring.cli.schedule import with_rates
from elastic_ring.cli.settings import NESTED, SECTIONS, parse
from elastic_ring.data.preparation.prepare import PrepareConfig
from elastic_ring.data.source import StdlibText, TextFiles, TokenShards
from elastic_ring.forecast.pass_choice import PassChoice, choose_pass
from elastic_ring.model.config import ModelSizes
from elastic_ring.monitor.json_files import json_bytes, read_json
from elastic_ring.monitor.metrics import write_json
from elastic_ring.monitor.plot import draw_run
from elastic_ring.train.optim import learning_rate
from elastic_ring.train.wrap import num_parameters
from tests.small_models import small_config

SHORT = """--preset --dp --cp --spares --max-dp --min-dp --steps --seed --global-batch --context --val-every --faults
--data --align-tokens --layout --machine --pattern --cpus-per-worker --kernel --offload-activations --plan
--run-name --run-dir --config --model-folder --windows --wait-for-resources-s --grow-delay-s --grow-interval-s
--grow-cost-s --corpus-look-s --storage-path --resume --checkpoint-every-steps --checkpoint-keep-last --copies
--cpu-offload --kv-wire --linears --epochs --stop-early --keep-best --extend --validate --val-every-tokens --device
--from --search --optimizer --packing --long-documents"""


def test_help_imports_neither_torch_nor_ray_and_an_unknown_command_is_answered_with_those_that_exist():
    program = (
        "import sys\nfrom elastic_ring.cli import COMMANDS, main\n"
        "for arguments in (['--help'], ['trian'], *([command, '--help'] for command in COMMANDS)):\n"
        "    try:\n        print(main(arguments))\n    except SystemExit as end:\n        print(end.code)\n"
        "print([name for name in ('torch', 'ray', 'pyarrow', 'numpy') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip().endswith("[]"), done.stdout[-200:]
    assert "there is no command 'trian': did you mean train?" in done.stderr
    assert all(name in done.stderr for name in cli.COMMANDS)


def test_the_command_says_its_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"elastic-ring {version('elastic-ring')}\n"


def test_every_setting_is_a_flag_and_the_short_flags_keep_their_spelling(capsys):
    with pytest.raises(SystemExit):
        parse(["--help-all"])
    told = capsys.readouterr().out
    words = set(told.replace(",", " ").split())
    dotted = {
        f"--{section}.{name.replace('_', '-')}"
        for section, cls in SECTIONS.items()
        for name in cls.__pydantic_fields__
        if name not in NESTED
    }
    assert {f"--{name.replace('_', '-')}" for name in settings.SHORT} - set(SHORT.split()) == set()
    assert (dotted | {"--run.timeouts.start-s", "--run.checkpoint-config.every-s", *SHORT.split()}) - words == set()
    blank = re.findall(r"│ (--[\w-]+) [^│]*│\n│ +\(default", told)
    assert blank == [], "short flags of which the help says nothing"


def test_every_name_of_another_trainer_leads_to_options_that_exist():
    known = options_of(settings.ShortFlags, SECTIONS, settings.SHORT)
    assert {name for names in FOREIGN.values() for name in names} <= known.keys()
    assert not FOREIGN.keys() & known.keys()


def test_help_fits_a_screen_and_says_where_the_rest_is(capsys):
    with pytest.raises(SystemExit) as end:
        parse(["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert end.value.code == 0
    assert len(lines) <= 30
    assert max(map(len, lines)) <= 100
    assert "--help-all" in lines[-1]


@pytest.mark.parametrize(
    ("word", "right"),
    [
        ("--max-steps", "--steps"),
        ("--learning-rate", "--optim.peak-lr"),
        ("--lr", "--optim.peak-lr"),
        ("--batch-size", "--global-batch"),
        ("--output-dir", "--storage-path"),
        ("--gpus", "--dp"),
        ("--max_seq_length", "--context"),
        ("--model-name-or-path", "--model-folder"),
        ("--steeps", "--steps"),
        ("--contxt", "--context"),
        ("--scaling.steps", "--steps"),
        ("--weight-decay", "--optim.weight-decay"),
    ],
)
def test_an_option_that_does_not_exist_meets_the_right_one_first(capsys, word, right):
    assert cli.main(["train", f"{word}=5"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"elastic-ring train: {word}: there is no such option; did you mean {right}")
    assert line.count("--") <= 4


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--steps abc", "--steps='abc': must be a whole number"),
        ("--optim.peak-lr high", "--optim.peak-lr='high': must be a number"),
        ("--optim.schedule foo", "--optim.schedule='foo': must be one of constant, cosine, linear, wsd"),
        ("--dp", "--dp: must have a value"),
        ("--dp --cp 2", "--dp: must have a value"),
        ("--config", "--config: must have a value"),
        ("--dp 2 3", "3: belongs to no option"),
        ("--cp -1", "scaling.cp=-1: must be a whole number of at least 1"),
        ("--preset big", "preset='big': must be one of laptop"),
        ("--faults zzz", "faults: unknown fault 'zzz'"),
        ("--zzzz 1", "--zzzz: there is no such option; --help-all lists all"),
    ],
)
def test_a_wrong_value_is_one_line_that_begins_with_the_option(capsys, words, says):
    assert cli.main(["train", *words.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"elastic-ring train: {says}")


def test_flags_win_over_the_file_and_the_file_over_the_preset(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(
        'preset = "100m"\n[scaling]\ndp = 4\nmax_dp = 8\n[step]\nglobal_batch = 8\n[run.timeouts]\nstart_s = 7\n'
    )
    asked = parse(["--config", str(file), "--scaling.max-dp", "None", "--global-batch", "16", "--run.env", "A=1,B=x"])
    assert (asked.preset, asked.model.width, asked.scaling.device) == ("100m", 768, "cuda")
    assert (asked.scaling.dp, asked.scaling.max_dp, asked.step.global_batch) == (4, None, 16)
    assert (asked.run.timeouts.start_s, asked.run.env) == (7.0, {"A": "1", "B": "x"})
    assert parse(["--preset", "laptop", "--config", str(file)]).model.width == 128


def test_a_model_folder_decides_the_sizes_and_stays_in_the_file(tmp_path):
    flags = ["--model-folder", "llama", "--windows", "blocks", "--model.loss-chunk-tokens", "7"]
    asked = parse(flags)
    assert (asked.model_folder, asked.windows, asked.model.loss_chunk_tokens) == ("llama", "blocks", 7)
    file = tmp_path / "config.toml"
    file.write_text(asked.toml())
    assert parse(["--config", str(file)]) == asked
    assert parse(["--config", str(file), "--model-folder", "qwen"]).model_folder == "qwen"
    for wrong, told in (
        (["--model.width", "64"], r"model\.width: the folder of --model-folder decides it"),
        (
            ["--offload-activations", "--model.checkpoint-activations"],
            r"model\.offload_activations: the folder of --model-folder decides it",
        ),
    ):
        with pytest.raises(ValueError, match=told):
            parse([*flags, *wrong])
    with pytest.raises(ValueError, match="--model-folder names none"):
        parse(["--windows", "dense"])


def test_the_schedule_is_as_long_as_the_run_unless_its_length_is_given(tmp_path):
    assert (parse(["--steps", "5"]).optim.total_steps, parse(["--steps", "5"]).optim.warmup_steps) == (5, 5)
    assert parse(["--step.steps", "90"]).optim.total_steps == 90
    assert parse(["--steps", "90", "--optim.total-steps", "100"]).optim.total_steps == 100
    of_preset = parse([]).optim
    by_epochs = parse(["--epochs", "2", "--global-batch", "8"])
    sequences = StdlibText(by_epochs.step.context_tokens).open().num_sequences
    assert by_epochs.step.steps == by_epochs.optim.total_steps == math.ceil(2 * sequences / 8)
    for argv, told in (
        (["--epochs=2", "--steps=3"], "one of them"),
        (["--epochs", "2", "--step.steps", "3"], "give one of them"),
        (["--epochs=0"], "above 0"),
    ):
        with pytest.raises(ValueError, match=told):
            parse(argv)
    for flag in (["--optim.total-steps", "60"], ["--optim.total_steps=60"]):
        assert parse(["--steps", "12", *flag]).optim == of_preset, "its value is the preset's"
    with pytest.raises(ValueError, match=r"warmup_steps=10: must be in \[0, total_steps=9\]"):
        parse(["--steps", "9", "--optim.warmup-steps", "10"])


LATER = {"total_steps": 90, "replanned": [60, 60]}


def test_a_longer_run_keeps_the_schedule_with_which_it_began_or_plans_the_further_steps_anew(tmp_path):
    folder = ["--run-dir", str(tmp_path), "--extend"]
    with pytest.raises(ValueError, match=r"extend=True: .* has no run 'train-1t-laptop'"):
        parse([*folder, "--steps", "90"])
    optim = {"total_steps": 60, "warmup_steps": 10}
    (tmp_path / "config.json").write_bytes(json_bytes({"step": {"steps": 60}, "optim": optim}))
    for steps in (90, 60):  # the second, where the same command is given once more
        asked = parse([*folder, "--steps", str(steps)])
        assert (asked.step.steps, asked.optim.total_steps, asked.optim.warmup_steps) == (steps, 60, 10)
    with pytest.raises(ValueError, match=r"steps=30: run 'train-1t-laptop' has 60 already"):
        parse([*folder, "--steps", "30"])
    with pytest.raises(ValueError, match="give --extend too"):
        parse([*folder[:-1], "--steps", "90", "--replan"])
    with pytest.raises(ValueError, match=r"replan=True: run .* has 60 steps already; give more"):
        parse([*folder, "--steps", "60", "--replan"])
    anew = parse([*folder, "--steps", "90", "--replan"])
    assert (anew.optim.total_steps, anew.optim.warmup_steps, anew.optim.replanned) == (90, 10, (60, 60))
    (tmp_path / "config.json").write_bytes(json_bytes({"step": {"steps": 90}, "optim": {**optim, **LATER}}))
    assert parse([*folder, "--steps", "90", "--replan"]).optim == anew.optim, "the same command again"
    assert parse([*folder, "--steps", "99"]).optim == anew.optim, "from there at the last rate"
    assert parse([*folder, "--steps", "99", "--replan"]).optim.replanned == (60, 60, 90, 90)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json in .* cannot be read"):
        parse([*folder, "--steps", "90"])


SMALL = ["--preset", "laptop", "--context", "64", "--dp", "1", "--cp", "1"]


def rates(optim: OptimConfig) -> tuple[float, float, int]:
    return optim.peak_lr, optim.min_lr, optim.warmup_steps


def test_a_model_folder_takes_a_small_rate_and_a_run_on_record_keeps_the_one_that_it_began_with(tmp_path):
    folder = [*SMALL, "--model-folder", "llama", "--run-dir", str(tmp_path / "run"), "--steps"]
    asked = parse([*folder, "90"])
    assert rates(asked.optim) == (2e-5, 2e-6, 3)
    (tmp_path / "config.toml").write_text(asked.toml())
    from_file = parse(["--config", str(tmp_path / "config.toml"), "--steps", "1000"])
    assert rates(from_file.optim) == (2e-5, 2e-6, 30), "its length follows the steps"
    assert rates(parse([*folder, "200", "--lora", "r=4"]).optim) == (1e-4, 1e-5, 6)
    assert rates(parse([*folder, "90", "--optim.peak-lr", "1e-3"]).optim) == (1e-3, 1e-4, 3)
    assert rates(parse([*folder, "90", "--optim.min-lr=0", "--optim.warmup-steps=0"]).optim) == (2e-5, 0.0, 0)
    assert rates(parse([*SMALL, "--steps", "90"]).optim) == (3e-3, 3e-4, 10), "a preset's model begins anew"
    before = {"peak_lr": 3e-3, "min_lr": 3e-4, "warmup_steps": 10, "total_steps": 90}
    (tmp_path / "run").mkdir()
    write_json(tmp_path / "run" / "config.json", {"step": {"steps": 90}, "optim": before})
    for more in (["90"], ["120", "--extend"]):
        asked = with_rates(parse([*folder, *more]), None)
        assert (rates(asked.optim), asked.optim.total_steps) == ((3e-3, 3e-4, 10), 90)
    assert rates(with_rates(parse([*folder, "90", "--resume", "never"]), None).optim) == (2e-5, 2e-6, 3)
    elsewhere = [*folder[:-2], str(tmp_path / "next"), "--resume"]
    for path in (tmp_path / "run", tmp_path / "run" / "checkpoints" / "step-00000010" / "lineage-000"):
        asked = with_rates(parse([*elsewhere, str(path)]), None)
        assert rates(asked.optim) == (3e-3, 3e-4, 10), "checkpoints share its identity"


def ended(run: Path, steps: int = 40, min_lr: float | None = None, **settings: Any) -> OptimConfig:
    """A run's folder as it is at its end after `steps` of 60."""
    asked = parse([*SMALL, "--steps", "60", "--optim.peak-lr", "1e-3", "--run-dir", str(run)])
    task = train.build(asked).task
    optim = asked.optim if min_lr is None else dataclasses.replace(asked.optim, min_lr=min_lr)
    trainer = ElasticRingTrainer(
        task.model, task.data, step_config=task.step, optim_config=optim, run_config=asked.run, **settings
    )
    trainer.submission().write_record()
    write_json(run / "summary.json", {"steps": steps})
    save_file(dict(trainer.task.model().state_dict()), run / "weights.safetensors", metadata={"sha256": ""})
    return optim


def usual_rate(step: int) -> float:
    return 0.5


def test_weights_of_another_run_go_on_at_its_rate_unless_that_is_none(tmp_path, caplog):
    caplog.set_level("INFO")
    optim = ended(tmp_path / "a")
    second = [*SMALL, "--steps", "100", "--run-dir", str(tmp_path / "second"), "--from"]
    trainer = train.build(parse([*second, str(tmp_path / "a")]))
    at_end = learning_rate(40, optim)
    assert 1e-4 < at_end < 1e-3
    assert trainer.task.optim.peak_lr == at_end
    assert trainer.task.optim.min_lr == pytest.approx(at_end / 10)
    assert trainer.task.optim.warmup_steps == 3
    assert f"peak_lr = {at_end!r}" in trainer.config_files["config.toml"]
    lower = train.build(parse([*second, str(tmp_path / "a"), "--optim.min-lr", "1e-4"]))
    assert rates(lower.task.optim) == (at_end, 1e-4, 3), "above the default rate, and below the run's"
    assert f"(the rate of step 40 of {tmp_path / 'a'}; --optim.peak-lr sets another)" in caplog.text
    trainer.submission().write_record()
    ended(tmp_path / "a", min_lr=0.0)
    again = train.build(parse([*second, str(tmp_path / "a")]))
    assert again.task.optim == trainer.task.optim, "its own record wins over what the other run says now"
    for name in ("of 0", "by a function", "without a record"):
        if name == "of 0":
            ended(tmp_path / name, steps=60, min_lr=0.0)
        else:
            ended(tmp_path / name, lr_schedule=usual_rate)
        if name == "without a record":
            (tmp_path / name / "config.json").unlink()
        third = [*SMALL, "--steps", "100", "--run-dir", str(tmp_path / "third"), "--from", str(tmp_path / name)]
        assert rates(train.build(parse(third)).task.optim) == (2e-5, 2e-6, 3)
        assert train.build(parse([*third, "--optim.peak-lr", "5e-5"])).task.optim.peak_lr == 5e-5


def test_data_that_are_not_there_are_refused_before_ray_starts(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")  # which would be told first
    assert train.main(["--run-dir", str(tmp_path / "run"), "--data", str(tmp_path / "none.jsonl")]) == 2
    assert "none.jsonl: there is no such file" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["status"], ["train", "--run-dir"]])
def test_another_users_folder_is_named_with_its_owner_and_mode(tmp_path, command):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "journal.jsonl").touch()
    folder.chmod(0o000)
    # Root reads everything but for its capabilities.
    without = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
    words = [*without, sys.executable, "-m", "elastic_ring", *command, str(folder)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    folder.chmod(0o700)
    owner = pwd.getpwuid(os.geteuid()).pw_name
    told = f"permission denied: {folder} belongs to {owner} (d---------), and this user is {owner}: ask the owner for"
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert told in done.stderr


def test_other_steps_over_the_file_of_an_earlier_run_change_the_schedule(tmp_path):
    file = tmp_path / "config.toml"
    for flags, schedule in (([], (9, 9)), (["--optim.total-steps", "70", "--optim.warmup-steps", "3"], (70, 3))):
        asked = parse(flags)
        file.write_text(asked.toml())
        assert parse(["--config", str(file)]) == asked
        optim = parse(["--config", str(file), "--steps", "9"]).optim
        assert (optim.total_steps, optim.warmup_steps) == schedule


def test_the_resolved_settings_are_written_as_a_file_that_gives_them_again(tmp_path):
    asked = parse(
        [
            "--run-dir",
            str(tmp_path),
            "--faults",
            "kill@step=3,rank=1",
            "--optim.clip-norm",
            "None",
            "--run.env",
            "A=secret",
            "--val-every-tokens=16384",
            "--stop-early=val_code_loss:2",
            "--keep-best=val_held_perplexity",
            f"--validate=code={__file__},weight=2,sequences=3; held",
        ]
    )
    trainer = train.build(asked)
    assert {name: (one.weight, one.num_sequences) for name, one in trainer.task.validation.items()} == {
        "code": (2.0, 3),
        "held": (1.0, None),
    }
    assert trainer.task.num_held_out == asked.step.num_val_sequences
    trainer.submission().write_record()
    written = (tmp_path / "config.toml").read_text()
    assert "secret" not in written
    again = parse(["--config", str(tmp_path / "config.toml")])
    assert again == dataclasses.replace(asked, run=dataclasses.replace(asked.run, env={}))
    assert tomllib.loads(written)["run"]["faults"] == "kill@step=3,phase=idle,rank=1"


NO_PATH = ["--data.end-of-document=256", "--data.vocab-size=257"]  # an empty one is the working directory


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--validate=code=x,weights=2"], "'weights=2' is not weight=NUMBER"),
        (["--validate=code=x;code"], "a name of its own"),
        (["--validate=Code"], "small letters"),
        (["--validate=code", "--val-every=0"], "never validates"),
        (["--validate=code", "--keep-best=val_cod_loss"], "the validation has val_loss, val_perplexity, val_code_loss"),
        (["--stop-early=soon"], "METRIC:COUNT"),
        (["--val-every-tokens=9"], "val_every_tokens=9: give one"),
        (
            ["--data=", *NO_PATH],
            "TextFiles paths=('',): give a tuple of at least one path or pattern, none of them emp",
        ),
        (["--data=shards:", *NO_PATH], "TokenShards uri='': give --data shards:URI"),
        (["--data.source=shards", *NO_PATH], "TokenShards uri='': give --data shards:URI"),
        (["--run-name", "caf\udce9"], r"run.name='caf\xe9': is not UTF-8"),
        (["--data", "caf\udce9"], r"data.paths='caf\xe9': is not UTF-8"),
        (["--run.checkpoint-config.keep-last=1", "--run.notices=\udce9"], r"run.notices='\xe9': is not UTF-8"),
    ],
)
def test_a_wrong_setting_is_refused_alone_in_a_line(flags, named, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(train, "_train_beside_ray", train.build)  # no Ray starts for what is refused
    assert train.main(["--val-every=1", "--run-dir", str(tmp_path), *flags]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert named in error
    assert len(error) < 250


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[scaling]\ndpp = 3\n", "scaling has no setting dpp: did you mean dp?"),
        ("[scalling]\ndp = 3\n", "the file has no setting scalling: did you mean scaling?"),
        ("[run.timeouts]\nstart = 3\n", "run.timeouts has no setting start: did you mean start_s?"),
        ("[step]\nsteps = 'x'\n", "step.steps='x': must be a whole number of at least 1"),
        ("[step]\nsteps = \n", "cannot be read as TOML"),
        ("scaling = 3\n", "must be a table"),
    ],
)
def test_a_wrong_file_is_refused_in_one_line(text, named, tmp_path, capsys):
    (tmp_path / "run.toml").write_text(text)
    assert train.main(["--config", str(tmp_path / "run.toml")]) == 2
    assert named in capsys.readouterr().err


def chosen(argv: list[str], gpu: str | None = "A100-40") -> PassChoice:
    asked = parse(argv)
    sizes = ModelSizes(asked.model, is_built_in=True)
    return choose_pass(sizes, asked.scaling, asked.step, asked.run, gpu)


def test_activations_are_kept_where_the_plan_fits_the_runs_gpu_and_nothing_else_was_asked_for(tmp_path):
    small, file = ["--preset", "1b", "--cp", "1", "--context", "8192"], tmp_path / "no.toml"
    file.write_text("[model]\ncheckpoint_activations = true\n")
    rings = ["--cp", "1", "--context", "4096", "--dp", "4", "--global-batch", "4", "--step.sequences-per-pass", "4"]
    kept = {
        True: (small, [*small, "--preset", "100m"], ["--preset", "1b", *rings, "--min-dp", "4"]),
        False: (
            ["--preset", "1b"],
            ["--preset", "laptop"],
            [*small, "--offload-activations"],
            [*small, "--scaling.keep-activations", "False"],
            [*small, "--config", str(file)],
            ["--preset", "1b", *rings, "--min-dp", "1"],
            ["--preset", "1b", "--cp", "1", "--context", "16384"],
            [*small, "--model.checkpoint-activations"],
        ),
    }
    for wanted, asked in kept.items():
        assert [chosen(each).keeps_activations for each in asked] == [wanted] * len(asked)
    assert chosen(["--preset", "1b"], "H200").keeps_activations, "the same run on a larger GPU"
    file.write_text(parse(small).toml())
    again = ["--config", str(file)]
    assert parse(again) == parse(small)
    assert not chosen([*again, "--context", "131072"]).keeps_activations, "what was chosen is no setting"
    file.write_text(parse([*small, "--scaling.keep-activations", "True"]).toml())
    assert parse([*again, "--context", "131072"]).scaling.keep_activations is True, "what was asked for is one"


def test_a_pass_takes_as_many_sequences_as_the_forecast_finds_fast_and_the_gpu_holds():
    short = ["--preset", "1b", "--dp", "1", "--cp", "1", "--context", "2048", "--global-batch", "16"]
    on_h200, on_a100 = chosen(short, "H200"), chosen(short, "A100-40")
    assert (on_h200.num_sequences, on_h200.keeps_activations) == (8, True)
    assert on_a100.num_sequences < 8, "more would not fit"
    assert re.fullmatch(r"8 sequences a pass, activations kept: 0.\d+ s a step on H200 by the forecast", on_h200.reason)
    assert chosen([*short, "--step.sequences-per-pass", "2"], "H200").num_sequences == 2
    assert chosen([*short[:-4], "--context", "131072", "--global-batch", "2"], "H200").num_sequences == 1
    assert chosen(short, None).reason.startswith("one sequence a pass, activations kept: no forecast of the run's GPUs")
    assert chosen(["--preset", "8b"], None).reason == "one sequence a pass: no forecast of the run's GPUs"
    asked = parse([*short, "--device", "cuda"])
    for model in (None, ModelSizes(asked.model, one_a_pass="its balancing loss is one of a whole pass")):
        choice = choose_pass(model, asked.scaling, asked.step, asked.run, "H200")
        assert choice.num_sequences == 1
        assert "its " in choice.reason
    by_hand = choose_pass(None, asked.scaling, dataclasses.replace(asked.step, sequences_per_pass=4), asked.run, None)
    assert by_hand.reason == "4 sequences a pass: as set"
    laptop = ["--preset", "laptop", "--global-batch", "16"]
    assert [chosen([*laptop, "--context", context], None).num_sequences for context in ("512", "2048")] == [4, 1]


def test_a_run_on_record_keeps_the_sequences_of_its_pass(tmp_path, caplog):
    caplog.set_level("INFO")
    words = ["--run-dir", str(tmp_path / "run"), "--global-batch", "16", "--context", "256"]

    def number(*more: str) -> int:
        trainer = train.build(parse([*words, *more]))
        trainer.choose_pass(None)
        trainer.submission().write_record()
        assert trainer.task.step.micro_batch == trainer.submission().settings_record()["step"]["sequences_per_pass"]
        return trainer.task.step.micro_batch

    assert number() == 8
    assert number("--cp", "1") == 8, "on record; a new run would take 4"
    assert "8 sequences a pass: as on record of this run" in caplog.text
    assert number("--cp", "1", "--run.resume", "never") == 4
    path = tmp_path / "run" / "config.json"
    write_json(path, {**(read_json(path) or {}), "step": {}})
    assert number() == 1, "a run of before passes had several"
    assert number("--step.sequences-per-pass", "2") == 2


def test_no_preset_kills_its_own_worker():
    assert all(parse(["--preset", name]).run.faults == () for name in settings.PRESETS)


def test_shards_take_vocabulary_column_and_end_of_document_from_the_flags():
    def source(*flags: str) -> Any:
        asked = parse(["--preset", "1b", "--data", "shards:/tokens", *flags])
        return train.data_source(asked.data, asked.model, StepConfig(context_tokens=8))

    made = source("--data.column", "ids", "--data.end-of-document", "128001", "--data.rows-end-documents")
    assert made == TokenShards(8, "/tokens", "ids", 128_256, 128_001, True)
    assert source("--data.vocab-size", "32768", "--data.end-of-document", "2").vocab_size == 32_768
    with pytest.raises(ValueError, match=r"data.end_of_document is not given .* \(--data.end-of-document ID\)"):
        source()
    with pytest.raises(ValueError, match=r"data.vocab_size=128257 is more than model.vocab_size=128256"):
        source("--data.vocab-size", "128257")


def test_output_into_a_closed_pipe_ends_without_a_traceback():
    program = "import sys\nfrom elastic_ring.cli import main\nsys.stdin.read()\nsys.exit(main(['train', '--help']))\n"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as command:
        assert command.stdout is not None
        assert command.stdin is not None
        assert command.stderr is not None
        command.stdout.close()
        command.stdin.close()
        assert (command.stderr.read(), command.wait()) == (b"", 1)


def test_optional_packages_that_are_missing_are_named_with_the_extra_that_has_them(
    tmp_path, monkeypatch, capsys, caplog
):
    for name in [name for name in sys.modules if name.startswith("elastic_ring.tuning")]:
        monkeypatch.delitem(sys.modules, name)
    for name in [name for name in sys.modules if name.partition(".")[0] == "optuna"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert cli.main(["tune", "--out", str(tmp_path / "search")]) == 2
    assert "which is not installed: pip install '.[tune]'" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    (tmp_path / "metrics.jsonl").write_text("")
    draw_run(tmp_path, [])
    assert "pip install '.[plot]'" in caplog.text


def test_a_model_folder_is_planned_and_built_with_its_own_sizes(tmp_path, capsys):
    small_config(vocab_size=300, tie_word_embeddings=False, eos_token_id=None).save_pretrained(tmp_path / "llama")
    flags = ["--model-folder", str(tmp_path / "llama"), "--context", "64", "--run-dir", str(tmp_path / "run")]
    trainer = train.build(parse(flags))
    assert trainer.task.model().config.hidden_size == 32
    assert "huggingface.json" in trainer.config_files
    assert train.main([*flags, "--plan"]) == 0
    assert capsys.readouterr().out.startswith(f"{num_parameters(trainer.task):,} parameters on 4 ranks")
    small_config(vocab_size=200, num_hidden_layers=1, eos_token_id=None).save_pretrained(tmp_path / "small")
    assert train.main(["--model-folder", str(tmp_path / "small")]) == 2
    assert "data.vocab_size=257 is more than the model's 200" in capsys.readouterr().err
    assert not ray.is_initialized()  # which started beside


def test_places_are_those_of_the_command_for_every_source(tmp_path, monkeypatch):
    """Workers, and later submissions from `config.toml`, have other working directories."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for given, place in (("a.txt", tmp_path / "a.txt"), ("~/a.txt", tmp_path / "home" / "a.txt")):
        asked = parse(["--data", given])
        assert train.data_source(asked.data, asked.model, StepConfig(context_tokens=8)).paths == (str(place),)
        assert str(place) in asked.toml()
        shards = parse(["--data", f"shards:{given}"])
        assert train.data_source(shards.data, shards.model, StepConfig(context_tokens=8)).uri == str(place)
        assert TokenShards(8, given).uri == str(place)
        assert TextFiles(8, (given, "s3://bucket/a.txt")).paths == (str(place), "s3://bucket/a.txt")
        config = PrepareConfig((given,), given, tokenizer=given)
        assert (config.sources, config.out, config.tokenizer) == ((str(place),), str(place), str(place))


def test_a_file_of_settings_may_begin_with_a_byte_order_mark(tmp_path):
    (tmp_path / "a.toml").write_bytes(b"\xef\xbb\xbf[step]\nsteps = 7\n")
    assert parse(["--config", str(tmp_path / "a.toml")]).step.steps == 7


def test_a_host_on_which_ray_cannot_start_is_told_in_one_line(tmp_path):
    from elastic_ring.runtime.driver.ray_session import check_host

    with pytest.raises(ValueError, match=r"^TMPDIR='/x+': is longer than .* set RAY_TMPDIR=/tmp, or another short"):
        check_host({"TMPDIR": "/" + "x" * 60})
    with pytest.raises(ValueError, match=r"nowhere: is not there or cannot be written.* --shm-size=2g"):
        check_host({}, str(tmp_path / "nowhere"))
    check_host({"TMPDIR": "/" + "x" * 60, "RAY_TMPDIR": "/tmp"}, str(tmp_path))


def test_help_on_a_terminal_has_colours_and_no_escape_in_letters():
    ours, theirs = pty.openpty()
    try:
        with subprocess.Popen(
            [sys.executable, "-m", "elastic_ring", "train", "--no-such-flag"],
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "TERM": "xterm"},
        ) as process:
            os.close(theirs)
            told = b""
            with suppress(OSError):  # a terminal whose other end is closed
                while data := os.read(ours, 1 << 16):
                    told += data
        assert process.returncode == 2
    finally:
        os.close(ours)
    assert b"no-such-flag" in told
    assert b"\\x1b" not in told


def test_control_characters_of_a_file_are_shown_and_not_obeyed(tmp_path, capsys):
    """A run's record may be a stranger's, and a terminal obeys more than colours: titles, clipboards, answers."""
    (tmp_path / "status.json").write_bytes(json_bytes({"run": "a\x1b]0;owned\x07\x1b[2J", "phase": "x\ry\u202e"}))
    assert cli.main(["status", str(tmp_path)]) == 0
    assert cli.main(["status", str(tmp_path / "\x1b[8A")]) == 2
    out, err = capsys.readouterr()
    assert "run a\\x1b]0;owned\\x07\\x1b[2J: x\\ry\\u202e" in out
    assert "\\x1b[8A" in err
    assert not {"\x1b", "\x07", "\r", "\u202e"} & {*out, *err}
