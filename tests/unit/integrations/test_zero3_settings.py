"""Settings of ZeRO-3 in Ray Train: what contradicts the mesh, DeepSpeed's file or the disk is refused by name."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elastic_ring.cli.settings import parse
from elastic_ring.cli.train import build as build_elastic
from elastic_ring.cli.zero3 import build as build_zero3
from elastic_ring.cli.zero3 import parse_zero3, workers_of
from elastic_ring.config import OptimConfig, RunConfig, StepConfig
from elastic_ring.data.source import TextFiles, open_source
from elastic_ring.integrations.ray_train import ops
from elastic_ring.integrations.ray_train.rings import packed
from elastic_ring.integrations.ray_train.settings import (
    Zero3Config,
    check_mesh,
    deepspeed_config,
    mesh_of,
    read_deepspeed,
)
from elastic_ring.integrations.ray_train.trainer import Zero3Trainer
from elastic_ring.mesh import Mesh
from elastic_ring.model.config import ModelConfig, preset
from elastic_ring.model.transformer import Transformer
from elastic_ring.monitor.callbacks import Callback
from elastic_ring.monitor.metrics import write_json
from elastic_ring.train.startup.layouts import check_rows
from elastic_ring.train.task import ModelParts
from tests.lock_process import lock_process

STEP = StepConfig(global_batch=4, context_tokens=128)


@pytest.mark.parametrize(
    ("workers", "cp", "given", "said"),
    [
        ((3, 3), 2, {}, r"workers=3 is no multiple of cp=2: .* --workers 2 or 4"),
        ((1, 1), 2, {}, r"workers=1 is less than cp=2"),
        ((1, 4), 2, {}, r"workers=1 is less than cp=2"),
        ((4, 2), 1, {}, r"workers=4:2: must be MIN:MAX"),
        ((6, 6), 2, {}, r"global_batch=4 is no multiple of dp=3"),
        ((512, 512), 256, {}, r"context_tokens=128 is less than cp=256"),
        ((4, 4), 2, {"zero_hpz_partition_size": 3}, r"zero_hpz_partition_size=3 does not divide workers=4"),
        ((2, 4), 2, {"mics_shard_size": 2}, r"mics_shard_size=2 does not divide workers=3"),
    ],
)
def test_a_mesh_that_does_not_come_out_is_refused(
    workers: tuple[int, int], cp: int, given: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        check_mesh(workers, cp, STEP, Zero3Config(deepspeed={"zero_optimization": given}))


def test_several_sequences_in_a_pass_are_refused() -> None:
    with pytest.raises(ValueError, match="sequences_per_pass=2: ZeRO-3 in Ray Train computes one sequence at a time"):
        check_mesh((2, 2), 2, StepConfig(sequences_per_pass=2), Zero3Config())


class Rows:
    """A factory of a decoder that says how many tokens it has rows for."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __call__(self) -> Transformer:
        return Transformer(ModelConfig(self.rows, 2, 16, 2, 1, 8, 23))

    def ring_parts(self, step: StepConfig) -> ModelParts:
        return ModelParts(vocab_size=self.rows)


def test_the_tokens_of_a_ray_dataset_are_compared_with_the_models_rows() -> None:
    def trainer(model: Any, vocab_size: int, end: int = 0) -> Zero3Trainer:
        return Zero3Trainer(model, dataset=object(), vocab_size=vocab_size, end_of_document=end, step_config=STEP)

    check_rows(trainer(Rows(60), 60).task)
    with pytest.raises(ValueError, match=r"data\.vocab_size=61 is more than the model's 60"):
        trainer(Rows(60), 61)
    with pytest.raises(ValueError, match=r"data\.vocab_size=61 is more than the model's 60"):
        check_rows(trainer(Rows(60).__call__, 61).task)
    with pytest.raises(ValueError, match="end_of_document=60 is no token of a vocabulary of vocab_size=60"):
        trainer(Rows(60), 60, 60)


@pytest.mark.parametrize(
    ("workers", "cp", "mesh"),
    [
        (2, 2, Mesh(1, 2)),
        (3, 2, Mesh(1, 3)),
        (4, 2, Mesh(2, 2)),
        (5, 2, Mesh(1, 5)),
        (6, 2, Mesh(2, 3)),
        (8, 2, Mesh(4, 2)),
        (4, 1, Mesh(4, 1)),
    ],
)
def test_any_number_of_workers_between_the_bounds_has_a_mesh(workers: int, cp: int, mesh: Mesh) -> None:
    assert mesh_of(workers, cp, STEP.global_batch) == mesh


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"train_batch_size": 8}, r"train_batch_size=8: elastic_ring sets it \(step_config.global_batch"),
        ({"fp16": {"enabled": True}}, "param_dtype"),
        ({"scheduler": {"type": "WarmupLR"}}, "optim_config.schedule"),
        ({"sequence_parallel_size": 2}, "cp"),
        ({"zero_optimization": {"stage": 2}}, r"stage=2: this is the door for stage 3"),
        ({"zero_optimization": {"offload_param": {"device": "cpu"}}}, r"set --offload-param cpu"),
        ({"zero_optimization": {"offload_optimizer": {"nvme_path": "/disk"}}}, r"set nvme_path \(--nvme-path\)"),
    ],
)
def test_keys_of_deepspeeds_configuration_that_are_decided_elsewhere_are_refused(
    given: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        Zero3Config(deepspeed=given)


def test_parameters_without_the_optimizer_are_not_offloaded() -> None:
    with pytest.raises(ValueError, match=r"offload_param='cpu' with offload_optimizer='none'.*offload_optimizer='cpu'"):
        Zero3Config(offload_param="cpu")


def test_the_configuration_keeps_what_the_user_gives_and_adds_what_follows(tmp_path: Path) -> None:
    file = tmp_path / "deepspeed.json"
    file.write_text(
        json.dumps({"zero_optimization": {"stage": 3, "reduce_bucket_size": 1000}, "aio": {"thread_count": 2}})
    )
    own = Zero3Config(offload_optimizer="nvme", offload_param="cpu", deepspeed=read_deepspeed(file))
    made = deepspeed_config(
        own,
        STEP,
        OptimConfig(),
        Mesh(2, 2),
        swap_folder=tmp_path,
        universal=True,
        largest_elements=10,
        pin_memory=False,
    )
    assert made["gradient_accumulation_steps"] == 2
    assert "managed_gradient_accumulation" not in made
    assert made["gradient_clipping"] == 1.0
    assert made["checkpoint"] == {"load_universal": True}
    assert made["aio"] == {"thread_count": 2}
    assert made["communication_data_type"] == "fp32", "with bf16 parameters DeepSpeed would sum gradients in bf16"
    assert made["data_types"] == {"grad_accum_dtype": "fp32"}
    zero = made["zero_optimization"]
    assert zero["reduce_bucket_size"] == 1000
    assert zero["offload_optimizer"] == {"pin_memory": False, "device": "nvme", "nvme_path": str(tmp_path)}
    assert zero["offload_param"] == {"pin_memory": False, "device": "cpu"}


def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "text.json").write_text("stage: 3")
    for name, said in (("list", "must be an object"), ("text", "cannot be read as JSON"), ("none", "No such file")):
        with pytest.raises(ValueError, match=said):
            read_deepspeed(tmp_path / f"{name}.json")


@pytest.mark.parametrize(
    "flag",
    [
        "--dp",
        "--spares",
        "--faults",
        "--max-dp",
        "--resume",
        "--checkpoint-keep-last",
        "--scaling.cp",
        "--run.copies",
        "--run.timeouts.build-s",
        "--run.checkpoint_config.every_s",
        "--run.straggler_factor",
        "--run.no-progress",
    ],
)
def test_flags_of_the_elastic_ring_name_what_to_use_here(flag: str) -> None:
    with pytest.raises(ValueError, match=r": is the elastic ring's; here "):
        parse_zero3([flag if "no-" in flag else f"{flag}=1"])


def test_a_file_of_settings_is_asked_as_flags_are_and_one_of_a_usual_run_is_taken(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(parse(["--steps=7", "--run-name=same"]).toml())
    _, asked = parse_zero3([f"--config={file}"])
    assert (asked.step.steps, asked.run.name) == (7, "same")
    for section, line, said in (
        ("scaling", "num_threads = 4", r"scaling.num_threads=4: .* nothing of the kind"),
        ("run", "corruption = 'act'", r"run.corruption='act': .* one copy of each shard"),
        ("step", "val_every_steps = 5", r"step.val_every_steps=5: .* does not validate"),
    ):
        file.write_text(f"[{section}]\n{line}\n")
        with pytest.raises(ValueError, match=said):
            parse_zero3([f"--config={file}"])


def test_a_response_to_loss_spikes_that_needs_the_elastic_ring_is_refused() -> None:
    with pytest.raises(ValueError, match=r"loss_spike_actions=.*back.*: must be one or more of clip, skip, stop"):
        build_zero3(*parse_zero3(["--run.loss-spike=act", "--run.loss-spike-actions", "skip", "back"]))
    trainer = build_zero3(*parse_zero3(["--run.loss-spike=act", "--run.loss-spike-actions", "skip", "stop"]))
    assert (trainer.zero.loss_spike, trainer.zero.loss_spike_actions) == ("act", ("skip", "stop"))


def test_what_the_trainer_would_not_tell_or_obey_is_refused() -> None:
    def trainer(**given: Any) -> Zero3Trainer:
        return Zero3Trainer(Rows(60), dataset=object(), vocab_size=60, end_of_document=0, step_config=STEP, **given)

    with pytest.raises(ValueError, match="callbacks: ZeRO-3 in Ray Train calls none"):
        trainer(callbacks=[Callback()])
    with pytest.raises(ValueError, match=r"run_config is the elastic ring's: give a ray\.train\.RunConfig"):
        trainer(run_config=RunConfig(straggler="act"))
    with pytest.raises(ValueError, match="clip lowers clip_norm, and clip_norm=None"):
        trainer(zero=Zero3Config(loss_spike="act"), optim_config=OptimConfig(clip_norm=None))
    experts = partial(Transformer, preset("moe-laptop"))
    with pytest.raises(ValueError, match="num_experts=8: ZeRO-3 in Ray Train has no rule that balances experts"):
        Zero3Trainer(experts, dataset=object(), vocab_size=257, end_of_document=256, step_config=STEP)


def test_the_doors_flags_stand_beside_those_of_train() -> None:
    own, asked = parse_zero3(["--workers=2:4", "--cp=2", "--steps=7", "--offload-optimizer=cpu", "--model.width=64"])
    assert (workers_of(own.workers), own.cp, own.offload_optimizer) == ((2, 4), 2, "cpu")
    assert (asked.step.steps, asked.model.width) == (7, 64)
    with pytest.raises(ValueError, match=r"workers='two': must be a number, or MIN:MAX"):
        workers_of("two")


def test_a_folder_without_room_for_swap_files_is_refused(tmp_path: Path) -> None:
    ops.check_swap_folder(tmp_path / "new")
    assert os.listdir(tmp_path / "new") == []
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"nvme_path='.*file/swap' cannot be used .*\(Not a directory\)"):
        ops.check_swap_folder(tmp_path / "file" / "swap")


def test_a_lock_that_nobody_holds_is_told_and_one_that_is_held_is_not(tmp_path: Path) -> None:
    lock = tmp_path / "async_io" / "lock"
    lock.parent.mkdir()
    holder = (
        "import sys, time; from torch.utils.file_baton import FileBaton; assert FileBaton(sys.argv[1]).try_acquire(); "
        "print('locked', flush=True); time.sleep(60)"
    )
    with lock_process([sys.executable, "-c", holder, str(lock)]):
        ops.check_locks(tmp_path)
    assert lock.exists(), "the killed build has left it"
    with pytest.raises(ValueError, match=rf"{lock}: left \d+ s ago .* async_io .* remove the folder {lock.parent}"):
        ops.check_locks(tmp_path)


def test_documents_of_a_dataset_are_packed_as_a_corpus_is(tmp_path: Path) -> None:
    texts = [f"document {number} ".encode() * (1 + number % 9) for number in range(60)]
    for number, text in enumerate(texts):
        (tmp_path / f"{number:03d}.txt").write_bytes(text)
    source = open_source(TextFiles(64, (str(tmp_path),)))
    found = list(packed((np.frombuffer(text, dtype=np.uint8) for text in texts), 64, 256))
    assert len(found) == source.num_sequences > 40
    for index, mine in enumerate(found):
        theirs = source.read(index)
        np.testing.assert_array_equal(mine.tokens, theirs.tokens)
        assert mine.document_starts == theirs.document_starts
        assert mine.ends_document == theirs.ends_document


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
def test_the_records_name_the_type_for_an_export_and_refuse_the_elastic_ring_under_the_same_name(
    tmp_path: Path,
) -> None:
    flags = [f"--storage-path={tmp_path}", "--run-name=one", "--step.param-dtype=bfloat16"]
    trainer = build_zero3(*parse_zero3(flags))
    recorded = trainer._config()
    assert recorded["step"]["param_dtype"] == "bfloat16"
    assert recorded["versions"]["deepspeed"]
    (tmp_path / "one").mkdir()
    write_json(tmp_path / "one" / "config.json", recorded)
    assert trainer._finished() is None, "its own settings are those of the record"
    with pytest.raises(ValueError, match="is taken by a run with other settings"):
        build_elastic(parse(flags)).submission().finished_summary()


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
def test_data_elsewhere_are_the_same_run_and_other_data_are_not(tmp_path: Path) -> None:
    flags = [f"--storage-path={tmp_path}", "--run-name=one", "--context=64"]
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("some words " * 50)
    first, second = (build_zero3(*parse_zero3([*flags, f"--data={tmp_path / name}"])) for name in ("a.txt", "b.txt"))
    (tmp_path / "one").mkdir()
    write_json(tmp_path / "one" / "config.json", first._config())
    assert second._finished() is None
    (tmp_path / "b.txt").write_text("more words " * 50)
    third = build_zero3(*parse_zero3([*flags, f"--data={tmp_path / 'b.txt'}"]))
    with pytest.raises(
        ValueError, match=r"other settings .*, in files of the data: gone a.txt; new b.txt; data: TextFiles \w+"
    ):
        third._finished()
