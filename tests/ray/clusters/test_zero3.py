"""ZeRO-3 in Ray Train, through its door: real worker groups, DeepSpeed over gloo, a worker that is killed."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ring import load_weights
from elastic_ring.cli import main as elastic_ring_command
from elastic_ring.cli.settings import parse
from elastic_ring.cli.train import build
from elastic_ring.data.loader import Loader
from elastic_ring.data.source import hold_out, open_source
from elastic_ring.integrations.ray_train import ops
from elastic_ring.model.init import initialise_module
from elastic_ring.runtime.driver.task_checks import training_order
from elastic_ring.train.optim import learning_rate, make_optimizer
from elastic_ring.train.startup.layouts import Layouts
from elastic_ring.train.task import attention_of, batch_of
from tests.ray.conftest import ROOT, ran
from tests.ray.fork_server import ForkServer
from tests.small_models import small_config
from tests.unit.data.corpora import prepared, texts, write_jsonl

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed: the extra `deepspeed`"
    ),
]
LARGER = ["--context=128", "--global-batch=4", "--optim.total-steps=12", "--optim.warmup-steps=2"]
SMALL = ["--model.num-layers=2", "--model.width=64", "--model.ffn-width=128", *LARGER]
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(ROOT),
    "RAY_USAGE_STATS_ENABLED": "0",
    "OMP_NUM_THREADS": "1",
    "RAY_ADDRESS": "local",
    "RAY_worker_niceness": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
}
LIMIT_S = 240.0


def command(folder: Path, *more: str, small: Sequence[str] = SMALL) -> list[str]:
    """The words after `python`."""
    script = str(ROOT / "jobs" / "train_zero3.py")
    return [script, *small, f"--storage-path={folder}", "--run-name=zero3", *more]


def trained(server: ForkServer, folder: Path, *more: str, small: Sequence[str] = SMALL) -> dict[str, Any]:
    ran(*server.python(*command(folder, *more, small=small)), env=ENVIRONMENT)
    return summary_of(folder)


def summary_of(folder: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((folder / "zero3" / "summary.json").read_text())
    return summary


def losses(summary: dict[str, Any]) -> list[float]:
    return [float.fromhex(loss) for loss in summary["losses"]]


def in_one_process(num_steps: int, small: Sequence[str] = SMALL) -> list[float]:
    """The losses of the same task without rings, shards, Ray or DeepSpeed: one module, torch's AdamW."""
    task = build(parse([*small, f"--steps={num_steps}"])).task
    model = task.model()
    initialise_module(model, task.initial)  # type: ignore[arg-type]
    named = list(model.named_parameters())
    optimizer = make_optimizer(named, task.optim, {name: param.ndim for name, param in named})  # type: ignore[arg-type]
    layout = Layouts(task).choice(1, "cpu").layout
    source, _ = hold_out(open_source(task.data), num_sequences=0)
    found = []
    with Loader(source) as loader:
        for step in range(num_steps):
            optimizer.zero_grad()
            total, count = 0.0, 0
            for index, sample_id in enumerate(training_order(task).sample_ids(step)):
                piece = loader.load(sample_id, index, layout, 0)
                loss, number = task.loss(
                    model, batch_of(piece, attention_of(task, piece, layout, 0, None), torch.device("cpu"))
                )
                loss.backward()
                total, count = total + loss.item(), count + int(number)
            for param in model.parameters():
                assert param.grad is not None
                param.grad /= count
            assert task.optim.clip_norm is not None
            torch.nn.utils.clip_grad_norm_(model.parameters(), task.optim.clip_norm)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, task.optim)
            optimizer.step()
            found.append(total / count)
    return found


def test_a_ring_of_two_trains_what_one_process_and_the_elastic_ring_train(fork_server, tmp_path):
    summary = trained(fork_server, tmp_path, "--steps=6", "--workers=2", "--cp=2")
    assert losses(summary) == pytest.approx(in_one_process(6), abs=1e-4)
    own = f"--steps=6 --dp=1 --cp=2 --spares=0 --storage-path={tmp_path} --run-name=elastic".split()
    ran(*fork_server.python(str(ROOT / "jobs" / "train_1t.py"), *SMALL, *own), env=ENVIRONMENT)
    elastic = json.loads((tmp_path / "elastic" / "summary.json").read_text())
    assert losses(summary) == pytest.approx(losses(elastic), abs=1e-3)
    assert summary["samples_sha256"] == elastic["samples_sha256"]
    assert set(summary) == set(elastic)

    poisoned = command(tmp_path / "poisoned", "--steps=9", "--cp=2", "--optim.peak-lr=1e30", "--optim.max-skipped=2")
    done = ran(*fork_server.python(*poisoned), code=1, env=ENVIRONMENT)
    assert "TooManySkipped: step 3: 3 steps in a row were skipped" in done.stderr
    folder = tmp_path / "poisoned" / "zero3"
    assert [json.loads(line)["skipped"] for line in lines_of(folder / "metrics.jsonl")] == [False, True, True, True]
    assert [line["note"] for line in notes(folder)] == ["attempt", *["skipped"] * 3, "gave up"], "nobody tried again"


def test_a_worker_killed_right_after_a_checkpoint_comes_back_there_and_another_number_of_workers_goes_on(
    fork_server, tmp_path, capsys
):
    own = ["--cp=2", "--checkpoint-every-steps=2", "--steps=8"]
    # Ray Train fetches the report of a checkpoint up to so much later.
    slow = {**ENVIRONMENT, "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "2.0"}
    with (tmp_path / "out.txt").open("w") as out:
        run = subprocess.Popen(
            [sys.executable, *command(tmp_path, "--workers=2", *own)], env=slow, stdout=out, stderr=out
        )
        try:
            pid = kill_after_checkpoint(tmp_path / "zero3", run)
            assert run.wait(LIMIT_S) == 0, (tmp_path / "out.txt").read_text()[-4000:]
        finally:
            run.kill()
    summary, reference, shown = summary_of(tmp_path), in_one_process(12), (tmp_path / "out.txt").read_text()
    assert losses(summary) == pytest.approx(reference[:8], abs=1e-4)
    (recovery,) = summary["recoveries"]
    assert recovery["source"] == "checkpoint"
    groups = [line for line in notes(tmp_path / "zero3") if line["note"] == "attempt"]
    assert [(line["generation"], line["step"]) for line in groups] == [(1, 0), (2, 2)], "the one on record"
    assert pid not in [worker["pid"] for worker in groups[1]["workers"]]
    assert len(re.findall("Ray Train started a new worker group in", shown)) == 1
    steps = re.findall(r"step +(\d+)/8  loss", shown)
    assert steps == sorted(set(steps)), "none twice"
    assert steps[-1] == "8"
    folders = [path.name for path in sorted((tmp_path / "zero3").glob("checkpoint-*-*"))]
    assert folders == ["checkpoint-000000006-2", "checkpoint-000000008-2"], "Ray Train has removed that of step 2"
    assert elastic_ring_command(["checkpoints", "list", str(tmp_path / "zero3")]) == 0
    assert [row.split()[:4] for row in capsys.readouterr().out.splitlines()[1:]] == [
        ["8", "2", "2", "workers"],
        ["6", "2", "2", "workers"],
    ]

    longer = trained(fork_server, tmp_path, "--workers=4", "--cp=2", "--checkpoint-every-steps=2", "--steps=12")
    assert losses(longer) == pytest.approx(reference, abs=1e-4)
    assert longer["generations"][-1]["mesh"] == {"dp": 2, "cp": 2}
    assert longer["resumed_from"][-1]["step"] == 8
    assert len(longer["recoveries"]) == 1, "a submission is no recovery"


@pytest.mark.soak
def test_a_saved_llama_with_a_pattern_trains_on_a_manifest_and_is_exported(fork_server, tmp_path):
    """Beside one process with the same pattern, and back to what transformers loads, in the type of the run."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = small_config()
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    prepared(tmp_path / "prepared", write_jsonl(tmp_path / "a.jsonl", texts(300)))
    tuned = [
        f"--model-folder={tmp_path / 'llama'}",
        f"--data={tmp_path / 'prepared' / 'manifest.json'}",
        "--pattern=window:32",
        "--optim.peak-lr=1e-2",
        *LARGER,
    ]
    summary = trained(fork_server, tmp_path, "--steps=4", "--workers=2", "--cp=2", small=tuned)
    assert losses(summary) == pytest.approx(in_one_process(4, tuned), abs=1e-4)
    dense = in_one_process(4, [flag for flag in tuned if "window" not in flag])
    assert losses(summary) != pytest.approx(dense, abs=1e-3), "a comparison that a lost pattern would pass"

    assert elastic_ring_command(["export", str(tmp_path / "zero3"), "--out", str(tmp_path / "out")]) == 0
    after, before = (transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("out", "llama"))
    assert after.dtype == torch.float32
    module = build(parse([*tuned, "--steps=4"])).task.model()
    load_weights(module, tmp_path / "zero3")
    own, first = dict(module.named_parameters()), dict(before.named_parameters())
    for name, value in after.named_parameters():
        assert torch.equal(value, own[name])
        assert not torch.equal(value, first[name])


def notes(folder: Path) -> list[dict[str, Any]]:
    path = folder / "attempts.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def kill_after_checkpoint(folder: Path, run: subprocess.Popen[bytes]) -> int:
    """SIGKILL the worker of rank 1 once the first checkpoint is on record; its PID, which nobody has any more."""
    deadline = time.monotonic() + LIMIT_S
    while not any(line["note"] == "checkpoint" for line in notes(folder)):
        assert run.poll() is None, "it ended before it was killed"
        assert time.monotonic() < deadline
        time.sleep(0.02)
    pid = int(notes(folder)[0]["workers"][1]["pid"])
    os.kill(pid, signal.SIGKILL)
    while Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return pid


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.soak
def test_what_is_offloaded_to_the_cpu_trains_the_same(fork_server, tmp_path):
    """The optimizer's state in pinned memory, by DeepSpeed's own configuration, and parameters in pageable memory."""
    own = {"zero_optimization": {"offload_optimizer": {"pin_memory": True}}}
    (tmp_path / "deepspeed.json").write_text(json.dumps(own))
    flags = ["--steps=4", "--workers=2", "--cp=2", "--offload-optimizer=cpu", "--offload-param=cpu"]
    summary = trained(fork_server, tmp_path, *flags, f"--deepspeed-config={tmp_path / 'deepspeed.json'}")
    assert losses(summary) == pytest.approx(in_one_process(4), abs=1e-4)


SWAPS = """
import sys
from pathlib import Path
from elastic_ring.cli import zero3
from elastic_ring.integrations.ray_train import train

def loop(worker):
    train(worker)
    swapped = [path.stat().st_size for path in worker.swap_folder.rglob("*.swp")]
    Path(sys_out, f"swapped-{worker.rank}").write_text(str(sum(swapped)))

sys_out = sys.argv[1]
own, asked = zero3.parse_zero3(sys.argv[2:])
trainer = zero3.build(own, asked)
trainer.train_loop = loop
trainer.fit()
"""


@pytest.mark.skipif(
    not all(any((ops.extensions_folder() / name).glob("*.so")) for name in ops.ASYNC_IO),
    reason="DeepSpeed's operators for NVMe take minutes to build: `make nvme`, then run this again",
)
def test_what_is_offloaded_to_nvme_trains_the_same_and_goes_on_with_another_number(fork_server, tmp_path):
    """A partition is swapped from 1 MiB on, so this model is larger."""
    swap = tmp_path / "swap"
    own = ["--offload-optimizer=nvme", "--offload-param=nvme", f"--nvme-path={swap}"]
    arguments = command(tmp_path, "--steps=4", "--workers=2", "--cp=2", *own, small=LARGER)[1:]
    ran(sys.executable, "-c", SWAPS, str(tmp_path), *arguments, env=ENVIRONMENT)
    reference = in_one_process(6, LARGER)
    assert losses(summary_of(tmp_path)) == pytest.approx(reference[:4], abs=1e-4)
    for rank in (0, 1):
        assert int((tmp_path / f"swapped-{rank}").read_text()) > 2**20, "nothing was on NVMe"
    assert not list(swap.rglob("*.swp")), "swap files are left"

    longer = trained(fork_server, tmp_path, "--steps=6", "--workers=3", "--cp=3", *own, small=LARGER)
    assert losses(longer) == pytest.approx(reference, abs=1e-4)


DATASET = """
import sys
import numpy as np
import ray
import ray.train
from functools import partial
from elastic_ring import OptimConfig, StepConfig
from elastic_ring.integrations.ray_train import Zero3Config, Zero3Trainer
from elastic_ring.model.config import ModelConfig
from elastic_ring.model.init import Initialiser
from elastic_ring.model.transformer import Transformer

ray.init(address="local", num_cpus=5, include_dashboard=False)

def bytes_of(batch):
    return {"tokens": [list(text.encode()) for text in batch["text"]]}

dataset = ray.data.from_items([{"text": f"document {i} " * 40} for i in range(400)]).map_batches(bytes_of)
config = ModelConfig(257, 2, 64, 4, 2, 16, 128)
trainer = Zero3Trainer(
    partial(Transformer, config), dataset=dataset, vocab_size=257, end_of_document=256, cp=2,
    scaling_config=ray.train.ScalingConfig(num_workers=(2, 3), resources_per_worker={"CPU": 1}),
    run_config=ray.train.RunConfig(name="zero3", storage_path=sys.argv[1]),
    step_config=StepConfig(steps=12, global_batch=12, context_tokens=128),
    optim_config=OptimConfig(peak_lr=1e-2, total_steps=12), initial=Initialiser(0, 2),
    zero=Zero3Config(checkpoint_every_steps=0),
)
trainer.fit()
"""


@pytest.mark.soak
def test_a_ray_dataset_feeds_a_number_of_workers_that_ray_train_chooses(tmp_path):
    """Two to three workers where there is room for five: three start, which is no multiple of cp."""
    ran(sys.executable, "-c", DATASET, str(tmp_path), env=ENVIRONMENT)
    summary = summary_of(tmp_path)
    (group,) = summary["generations"]
    assert group["mesh"] == {"dp": 1, "cp": 3}
    found = losses(summary)
    assert found[-1] < found[0] - 1.0
    steps = [json.loads(line) for line in lines_of(tmp_path / "zero3" / "metrics.jsonl")]
    assert len({line["samples"] for line in steps}) == 12
    # Each of the 12 sequences of a step has 128 targets, less those at the ends of documents.
    assert all(12 * 120 < line["num_tokens"] <= 12 * 128 for line in steps)


REPORTS = """
import json
import sys
import tempfile
from pathlib import Path
import ray
import ray.train
import torch
from ray.train.torch import TorchConfig, TorchTrainer
from elastic_ring.integrations.ray_train.worker import newest_checkpoint
from elastic_ring.state.checkpoints.zero3 import STATE

def known():
    return [Path(each.checkpoint.path).name for each in ray.train.get_all_reported_checkpoints()]

def train(config):
    folder = Path(config["folder"]) / "zero3"
    for name in ("checkpoint-000000020-2", "checkpoint-000000030-1", "checkpoint-000000040-3"):
        state = json.dumps({"step": 20, "num_workers": 1, "files": {"shard": 5}})
        if name.endswith("3"):  # Ray Train has not heard of it
            newest_checkpoint(str(folder), 0, torch.device("cpu"))
            known_before = known()
            (folder / name).mkdir()
            (folder / name / "shard").write_text("whole")
        else:
            with tempfile.TemporaryDirectory() as own:
                (Path(own) / "shard").write_text("whole")
                own = ray.train.Checkpoint.from_directory(own)
                ray.train.report({"step": 20}, checkpoint=own, checkpoint_dir_name=name)
        (folder / name / STATE).write_text(state)
    chosen, _ = newest_checkpoint(str(folder), 0, torch.device("cpu"))
    out = {"before": known_before, "chosen": Path(chosen.path).name, "after": known()}
    (Path(config["folder"]) / "known.json").write_text(json.dumps(out))

ray.init(address="local", num_cpus=2, include_dashboard=False)
TorchTrainer(
    train, train_loop_config={"folder": sys.argv[1]}, torch_config=TorchConfig(backend="gloo"),
    scaling_config=ray.train.ScalingConfig(num_workers=1),
    run_config=ray.train.RunConfig(name="zero3", storage_path=sys.argv[1]),
).fit()
"""


def test_ray_train_is_told_once_of_a_checkpoint(tmp_path):
    """Twice, with the newest by name not its latest, it would remove the folder that is being read."""
    ran(sys.executable, "-c", REPORTS, str(tmp_path), env=ENVIRONMENT)
    known = json.loads((tmp_path / "known.json").read_text())
    two = ["checkpoint-000000020-2", "checkpoint-000000030-1"]
    assert known == {"before": two, "chosen": "checkpoint-000000040-3", "after": [*two, "checkpoint-000000040-3"]}
