"""Every refused setting is a ValueError that names the setting, its value and the way out."""

from __future__ import annotations

import dataclasses
import math
import pickle
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from elastic_ring.cli.data_settings import DataConfig
from elastic_ring.config import (
    CheckpointConfig,
    OptimConfig,
    RunConfig,
    ScalingConfig,
    StepConfig,
    Timeouts,
    check_copies,
    check_lasting,
    check_loss_spikes,
    check_together,
    digest,
)
from elastic_ring.faults import COMMIT_KINDS, FLIP_KINDS, FLIPPED, KINDS, PHASES, Fault, parse_faults
from elastic_ring.mesh import Mesh
from elastic_ring.model.config import ModelConfig
from elastic_ring.runtime.driver.task_checks import check_shadows
from elastic_ring.validation import docstrings, from_plain

# (class, setting, refused value, a piece of the way out)
REFUSED = [
    (ScalingConfig, "dp", 0, "at least 1"),
    (ScalingConfig, "min_dp", 3, "lower min_dp or raise dp"),
    (ScalingConfig, "max_dp", 1, "raise max_dp or leave it out"),
    (ScalingConfig, "release_contexts", "yes", "must be True or False"),
    (ScalingConfig, "resources_per_worker", {}, "name at least one resource"),
    (ScalingConfig, "resources_per_worker", {"CPU": -1.0}, "not negative"),
    (ScalingConfig, "resources_per_worker", {"CPU": 0.0}, "more than 0"),
    (ScalingConfig, "wait_for_resources_s", -1.0, "0 seconds or more"),
    (StepConfig, "sequences_per_pass", 0, "at least 1"),
    (StepConfig, "sequences_per_pass", 5, "more than global_batch=4: .* lower sequences_per_pass or raise"),
    (StepConfig, "seed", -1, "at least 0"),
    (StepConfig, "layout", "spiral", "contiguous, zigzag"),
    (StepConfig, "param_dtype", "float16", "float32, bfloat16"),
    (RunConfig, "name", "", "letters, digits"),
    (RunConfig, "name", "x" * 81, "up to 80"),
    (RunConfig, "run_dir", 5, "must be text"),
    (RunConfig, "storage_path", "gs://bucket", "give s3://bucket/prefix"),
    (RunConfig, "storage_path", "s3://", "give a folder, or s3://bucket/prefix with the bucket's name"),
    (StepConfig, "seed", 2**64, "at least 0 and below 2"),
    (RunConfig, "faults", 7, "a schedule as text"),
    (RunConfig, "copies", "3", "auto, 0, 1, 2 or parity:G"),
    (RunConfig, "copies", "parity:1", "G of at least 2"),
    (RunConfig, "env", [("A", "B")], "a mapping of text to text"),
    (RunConfig, "timeouts", {}, "must be an instance of Timeouts"),
    (StepConfig, "check_model", "no", "True or False"),
    (OptimConfig, "peak_lr", "1e-3", "a number above 0"),
    (OptimConfig, "betas", [0.9, 1.0], "two numbers"),
    (OptimConfig, "clip_norm", -1.0, "a number above 0, or None"),
    (RunConfig, "straggler_factor", float("inf"), "a finite number above 1"),
]

# (class, setting that it does not have, what to use instead)
UNKNOWN = [
    (RunConfig, "failure_config", "crash_loop_limit"),
    (CheckpointConfig, "num_to_keep", "use keep_last"),
    (RunConfig, "callbacks", "give them to the trainer"),
    (RunConfig, "sync_config", "nothing is synchronised"),
    (RunConfig, "lodge", "known are name"),
    (ScalingConfig, "num_workers", "set dp and cp"),
    (ScalingConfig, "use_gpu", "device='cuda'"),
    (StepConfig, "global_bach", "did you mean global_batch"),
    (Timeouts, "x", "known are stopped_s"),
]


@pytest.mark.parametrize(
    ("config", "setting", "value", "way_out"), REFUSED, ids=lambda x: getattr(x, "__name__", str(x))[:20]
)
def test_a_wrong_setting_is_refused_by_name_and_value(config, setting, value, way_out):
    with pytest.raises(ValueError, match=way_out) as caught:
        config(**{setting: value})
    assert f"{setting}={value!r}" in str(caught.value)


def is_whole_number(spec: Any) -> bool:
    return spec.type in ("PositiveInt", "NonNegativeInt") or "Annotated[PositiveInt" in str(spec.type)


@pytest.mark.parametrize("value", [-1, 2.5, True, "2"])
def test_every_whole_number_is_checked_by_name(value):
    for config in (ScalingConfig, StepConfig, RunConfig, OptimConfig, DataConfig):
        names = [spec.name for spec in dataclasses.fields(config) if is_whole_number(spec)]
        assert names
        for name in names:
            with pytest.raises(ValueError, match=rf"{name}={re.escape(repr(value))}: must be .*whole number"):
                config(**{name: value})


@pytest.mark.parametrize(("config", "setting", "instead"), UNKNOWN)
def test_a_setting_that_does_not_exist_is_refused_with_what_to_use(config, setting, instead):
    with pytest.raises(ValueError, match=instead) as caught:
        config(**{setting: 1})
    assert setting in str(caught.value)
    assert not isinstance(caught.value, ValidationError)


@pytest.mark.parametrize(
    ("dp", "cp", "copies", "told"),
    [
        (1, 1, "1", "copies='1': each goes to another rank, and the mesh dp=1 x cp=1 has 0 other"),
        (2, 1, "2", "take copies='1', or a larger mesh"),
        (1, 4, "parity:4", "a group of 4 ranks and the rank outside of it that holds their parity make 5"),
    ],
)
def test_copies_for_which_the_mesh_has_too_few_ranks_are_refused(dp, cp, copies, told):
    with pytest.raises(ValueError, match=re.escape(told)):
        check_copies(Mesh(dp, cp), copies)


@pytest.mark.parametrize(
    ("dp", "cp", "copies"), [(1, 2, 1), (1, 3, "2"), (1, 4, "parity:3"), (1, 1, "0"), (1, 1, "auto")]
)
def test_copies_that_fit_are_taken_as_numbers_too(dp, cp, copies):
    run = RunConfig(copies=copies)
    check_copies(Mesh(dp, cp), run.copies)
    assert run.copies == str(copies)


def test_an_action_on_loss_spikes_that_has_nothing_to_do_is_refused():
    off = CheckpointConfig(every_steps=0)
    acts = RunConfig(loss_spike="act", loss_spike_actions=("back",), checkpoint_config=off)
    with pytest.raises(ValueError, match=r"there is nothing to go back to: set copies, or checkpoint_config"):
        check_loss_spikes(acts, OptimConfig())
    check_loss_spikes(dataclasses.replace(acts, copies="1"), OptimConfig())
    check_loss_spikes(dataclasses.replace(acts, checkpoint_config=CheckpointConfig(every_steps=5)), OptimConfig())
    with pytest.raises(ValueError, match=r"clip lowers clip_norm, and clip_norm=None: leave clip out"):
        check_loss_spikes(RunConfig(loss_spike="act", loss_spike_actions=("clip",)), OptimConfig(clip_norm=None))
    with pytest.raises(ValueError, match=r"skip_batches=.*: must be entries such as 60\+21"):
        RunConfig(skip_batches=("60",))


def test_settings_read_from_a_file_are_checked_as_those_of_the_constructor():
    plain = {"peak_lr": 1e-3, "betas": [0.9, 0.99], "clip_norm": None}
    assert from_plain(OptimConfig, plain) == OptimConfig(peak_lr=1e-3, betas=(0.9, 0.99), clip_norm=None)
    assert from_plain(RunConfig, {"timeouts": {"start_s": 9.0}}).timeouts.start_s == 9.0
    with pytest.raises(ValueError, match=r"^run\.timeouts\.start_s='9': must be a positive number of seconds$"):
        from_plain(RunConfig, {"timeouts": {"start_s": "9"}}, "run.")
    with pytest.raises(ValueError, match=r"Timeouts has no setting start: did you mean start_s\?"):
        from_plain(RunConfig, {"timeouts": {"start": 9.0}})


def test_every_setting_says_what_it_is():
    for config in (Timeouts, ScalingConfig, StepConfig, OptimConfig, RunConfig, ModelConfig):
        names = config.__pydantic_fields__.keys()  # type: ignore[attr-defined]
        assert names - docstrings(config).keys() <= {"timeouts"}


@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, "1", True, None])
@pytest.mark.parametrize("setting", [spec.name for spec in dataclasses.fields(Timeouts)])
def test_no_timeout_is_anything_but_a_positive_number(setting, value):
    with pytest.raises(ValueError, match="must be a positive number of seconds") as caught:
        Timeouts(**{setting: value})
    assert f"timeouts.{setting}={value!r}" in str(caught.value)


@pytest.mark.parametrize(
    ("inner", "outer"), [("stopped_s", "heart_floor_s"), ("park_s", "report_s"), ("beat_s", "node_silent_s")]
)
def test_a_timeout_outlasts_those_it_contains(inner, outer):
    value = getattr(Timeouts(), outer)
    told = (
        rf"timeouts\.{inner}={value} must be less than timeouts\.{outer}={value}: raise the second or lower the first"
    )
    with pytest.raises(ValueError, match=told):
        Timeouts(**{inner: value})


def together(faults: str = "", **settings: Any) -> None:
    scaling = {spec.name for spec in dataclasses.fields(ScalingConfig)}
    check_together(
        ScalingConfig(**{k: v for k, v in settings.items() if k in scaling}),
        StepConfig(**{k: v for k, v in settings.items() if k not in scaling}),
        parse_faults(faults),
    )


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"global_batch": 2, "dp": 3}, "global_batch=2 is less than dp=3: .* raise global_batch or lower dp"),
        ({"global_batch": 2, "dp": 2, "max_dp": 4}, r"global_batch=2 is less than dp=4: .* \(max_dp\)"),
        ({"context_tokens": 3, "cp": 4}, "context_tokens=3 is less than cp=4: .* raise context_tokens or lower cp"),
        (
            {"steps": 5, "faults": "kill@step=5"},
            r"kill@step=5,.*: step=5 never comes in a run of steps=5; name one of 0 to 4",
        ),
        ({"faults": "kill@step=1,rank=4"}, r"rank=4 is not in the mesh dp=2 x cp=2; name one of 0 to 3"),
        ({"max_dp": 3, "faults": "kill@step=1,rank=6"}, r"rank=6 is not in the mesh dp=3 x cp=2; name one of 0 to 5"),
        ({"faults": "kill@step=1,phase=forward,hop=2"}, r"hop=2 never comes on rings of cp=2; name one of 0 to 1"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings, named):
    with pytest.raises(ValueError, match=named):
        together(**settings)


def test_the_outermost_settings_that_go_together_are_accepted():
    together("kill@step=4,rank=5; kill@step=0,phase=forward,hop=1", steps=5, max_dp=3, global_batch=3)
    together(context_tokens=4, cp=4)
    ScalingConfig(dp=2, min_dp=2, max_dp=2, spares=0)
    Timeouts(lease_s=1)


def test_a_run_takes_its_faults_as_text_or_as_a_tuple():
    faults = (Fault("kill", 3, "idle", 1),)
    assert RunConfig(faults="kill@step=3,rank=1").faults == faults  # type: ignore[arg-type]
    assert RunConfig(faults=faults).faults == faults
    with pytest.raises(ValueError, match="unknown fault 'burn'"):
        RunConfig(faults="burn@step=3")  # type: ignore[arg-type]


def test_a_runs_folder_is_its_name_under_the_storage_path_unless_run_dir_names_another(tmp_path):
    run = RunConfig("demo", storage_path=str(tmp_path))
    assert run.folder == tmp_path / "demo"
    assert dataclasses.replace(run, name="other").folder == tmp_path / "other"
    assert RunConfig("demo", str(tmp_path), run_dir="~/here").folder == Path("~/here").expanduser()
    assert RunConfig().folder == Path("runs/elastic-ring").absolute()


def test_paths_and_lists_are_taken_for_text_and_tuples(tmp_path):
    path: Any = tmp_path
    assert RunConfig("demo", storage_path=path) == RunConfig("demo", storage_path=str(path))
    assert RunConfig(run_dir=path) == RunConfig(run_dir=str(path))
    pair: Any = [0.9, 0.99]
    assert OptimConfig(betas=pair).betas == (0.9, 0.99)


def test_the_mesh_is_derived_and_spares_are_not_in_it():
    scaling = ScalingConfig(dp=3, cp=2, spares=2, max_dp=5)
    assert (scaling.mesh, scaling.most_rings, scaling.num_workers) == (Mesh(3, 2), 5, 8)
    assert ScalingConfig(dp=3).most_rings == 3


def test_equal_settings_give_equal_digests_and_any_other_another():
    assert digest(StepConfig(), ScalingConfig()) == digest(StepConfig(), ScalingConfig())
    changed = [
        digest(dataclasses.replace(StepConfig(), **{name: value}), ScalingConfig())
        for name, value in (("steps", 41), ("seed", 1), ("layout", "contiguous"))
    ]
    assert len({digest(StepConfig(), ScalingConfig()), *changed}) == 4


def test_settings_survive_the_way_to_another_process_and_cannot_be_changed_there():
    for config in (Timeouts(), ScalingConfig(), StepConfig(), RunConfig()):
        assert pickle.loads(pickle.dumps(config)) == config
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(config, dataclasses.fields(config)[0].name, 1)


def test_coordinates_and_ranks_of_a_mesh_are_one_to_one():
    mesh = Mesh(3, 4)
    assert [mesh.global_rank(mesh.coordinate(rank)) for rank in range(mesh.size)] == list(range(12))
    assert [mesh.ring(dp_rank) for dp_rank in range(3)] == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)]
    assert mesh.replicas(1) == (1, 5, 9)
    with pytest.raises(ValueError, match="mesh dp=0 x cp=4: both must be at least 1"):
        Mesh(0, 4)


@pytest.mark.parametrize("run_dir", ["runs/demo", ".", "COPY/runs/demo"])
def test_a_run_folder_in_rays_copy_of_a_jobs_working_directory_is_refused_for_a_run_and_not_as_a_setting(
    tmp_path, monkeypatch, run_dir
):
    """As in a job that was submitted with `--working-dir`: that is where its script and its workers run, which import
    a user's module with all settings that it makes."""
    copy = tmp_path / "session_2026" / "runtime_resources" / "working_dir_files" / "_ray_pkg_0123456789abcdef"
    copy.mkdir(parents=True)
    monkeypatch.chdir(copy)
    given = run_dir.replace("COPY", str(copy))
    folder = RunConfig("demo", run_dir=given).folder
    assert folder == copy / given
    with pytest.raises(ValueError, match="temporary copy of a job's working directory") as refused:
        check_lasting(folder)
    assert str(refused.value).startswith(f"run_dir={str(folder)!r} lies in")
    assert "give an absolute path that every node sees" in str(refused.value)
    check_lasting(RunConfig("demo", run_dir=str(tmp_path / "runs")).folder)
    monkeypatch.chdir(tmp_path)
    assert RunConfig("demo", run_dir="runs").folder == tmp_path / "runs", "without a copy a relative one is as good"
    check_lasting(tmp_path / "runs")


# ------------------------------------------------------------------------------------------------ a schedule of faults


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("", ()),
        ("  ", ()),
        ("none", ()),
        (";;", ()),
        ("kill@step=21,phase=backward,rank=3", (Fault("kill", 21, "backward", 3),)),
        ("freeze@step=30,rank=0", (Fault("freeze", 30, "idle", 0),)),
        ("kill@step=0", (Fault("kill", 0, "idle", 0),)),
        ("exit@step=6,phase=forward,hop=0,rank=3", (Fault("exit", 6, "forward", 3, 0),)),
        ("kill@step=5,phase=heal,role=donor", (Fault("kill", 5, "heal", None, None, "donor"),)),
        ("kill@step=5,phase=heal", (Fault("kill", 5, "heal"),)),
        (" kill@step=1 , rank=1 ;drain@rank=2,step=2; ", (Fault("kill", 1, "idle", 1), Fault("drain", 2, "idle", 2))),
    ],
)
def test_a_schedule_reads_as_it_is_meant(text, faults):
    assert parse_faults(text) == faults


@pytest.mark.parametrize(
    ("kind", "phase"),
    [
        (k, p)
        for k in KINDS
        for p in PHASES
        if (k not in FLIP_KINDS or p in FLIPPED) and (p != "commit" or k in COMMIT_KINDS)
    ],
)
def test_what_is_printed_reads_back_as_the_same_fault(kind, phase):
    (fault,) = parse_faults(f"{kind}@step=7,phase={phase}")
    assert parse_faults(str(fault)) == (fault,)
    hops = [Fault(kind, 7, phase, 2, 1)] if phase in ("forward", "backward") else []
    roles = [Fault(kind, 7, phase, None, None, "spare"), Fault(kind, 7, phase, 3, None, "donor")]
    for other in (*hops, *(roles if phase == "heal" else [])):
        assert parse_faults(str(other)) == (other,)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("burn@step=1", "unknown fault 'burn' in 'burn@step=1'; known: kill, freeze"),
        ("kill", "'kill' names no step; write kill@step=N"),
        ("kill@rank=3", "'kill@rank=3' names no step"),
        ("kill@step=1,when=now", r"cannot read 'when=now' in .*; use step=, phase=, rank=, hop=, role="),
        ("kill@step=1,rank", "cannot read 'rank'"),
        ("kill@step=one", "step='one' in 'kill@step=one' must be a whole number of at least 0"),
        ("kill@step=-1", "step='-1'"),
        ("kill@step=1.5", r"step='1\.5'"),
        ("kill@step=²", "step='²' .* must be a whole number"),
        ("kill@step=", "step=''"),
        ("kill@step=1,rank=x", "rank='x'"),
        ("kill@step=1,phase=commit", "phase=commit is the coordinator's; use slow, kill-coordinator"),
        ("kill@step=1,phase=lunch", "unknown phase 'lunch' in .*; known: forward, backward, reduce"),
        ("kill@step=1,phase=heal,role=nurse", "role='nurse' in .*; use role=spare or role=donor"),
        ("kill@step=1,phase=vote,role=donor", "role='donor' in .* with phase=heal"),
        ("kill@step=1,phase=vote,hop=1", "hop=1 in .* needs phase=forward, backward, update, dispatch, combine"),
        ("flip@step=1,phase=idle", "flip in 'flip@step=1,phase=idle' needs phase=backward"),
        ("wrong@step=1,phase=vote", "wrong in 'wrong@step=1,phase=vote' needs phase=backward"),
        ("kill@step=1,hop=1", "hop=1 in .* needs phase=forward, backward, update, dispatch, combine"),
        ("kill@step=1; freeze@step=2,rank=a", "rank='a' in 'freeze@step=2,rank=a'"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_part_that_is_wrong(text, named):
    with pytest.raises(ValueError, match=f"^faults: .*{named}"):
        parse_faults(text)


def test_a_fault_matches_its_own_moment_only():
    fault = Fault("kill", 3, "forward", 1, 0)
    assert fault.matches(step=3, phase="forward", rank=1, hop=0)
    assert not fault.matches(step=4, phase="forward", rank=1, hop=0)
    assert not fault.matches(step=3, phase="backward", rank=1, hop=0)
    assert not fault.matches(step=3, phase="forward", rank=0, hop=0)
    assert not fault.matches(step=3, phase="forward", rank=1, hop=1)
    assert not fault.matches(step=3, phase="forward", rank=1)


def test_a_fault_without_hop_or_rank_matches_any():
    assert all(Fault("kill", 3, "forward", 1).matches(step=3, phase="forward", rank=1, hop=h) for h in (0, 1, None))
    heal = Fault("kill", 3, "heal", None, None, "spare")
    assert heal.matches(step=3, phase="heal", rank=2, role="spare")
    assert not heal.matches(step=3, phase="heal", rank=2, role="donor")


def test_a_file_that_workers_would_import_in_place_of_a_library_is_refused(tmp_path):
    """Ray puts the driver's folder first on the path of its workers, which then could not even begin."""
    for name in ("torch.py", "mine.py"):
        (tmp_path / name).touch()
    (tmp_path / "elastic_ring").mkdir()
    (tmp_path / "elastic_ring" / "__init__.py").touch()
    with pytest.raises(ValueError, match=r"torch\.py: Ray's workers would import it in place of .*torch/__init__\.py"):
        check_shadows(tmp_path, sys.modules)
    (tmp_path / "torch.py").rename(tmp_path / "pydantic")
    check_shadows(tmp_path, sys.modules)
    (tmp_path / "pydantic").unlink()
    (tmp_path / "pydantic").mkdir()
    (tmp_path / "pydantic" / "__init__.py").touch()
    with pytest.raises(ValueError, match="pydantic: Ray's workers"):
        check_shadows(tmp_path, sys.modules)
    (tmp_path / "pydantic").rename(tmp_path / "pydantic.bak")
    (tmp_path / "__main__.py").touch()
    check_shadows(tmp_path, sys.modules)
    check_shadows(Path(__file__).parents[3], sys.modules)
