"""One embedded Ray for the session, small models, and runs that are compared bit by bit."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster
from safetensors.torch import load_file

from elastic_ring import Callback, ElasticRingTrainer, OptimConfig, Result, RunConfig, ScalingConfig, StepConfig
from elastic_ring.control.coordination import advance, initial, replay, standing
from elastic_ring.control.facts import Fact, fact_of
from elastic_ring.control.messages import from_json
from elastic_ring.control.state import Ended
from elastic_ring.data.sampling.validation import ValidationSet
from elastic_ring.data.source import PreparedTokens, SourceConfig, StdlibText
from elastic_ring.files import replace_file
from elastic_ring.model.config import ModelConfig
from elastic_ring.model.init import Initialiser
from elastic_ring.model.loss import language_model_loss
from elastic_ring.model.transformer import Transformer
from elastic_ring.monitor.journal import read
from elastic_ring.monitor.metrics import (
    CONFIG_NAME,
    JOURNAL_NAME,
    METRICS_NAME,
    RECOVERY_KEYS,
    STATUS_NAME,
    StepMetrics,
    read_metrics,
)
from elastic_ring.runtime.coordinator.folds.recovery_log import RecoveryLog
from elastic_ring.runtime.coordinator.folds.run_totals import RunTotals
from elastic_ring.runtime.coordinator.run_spec import RunSpec, control_options
from elastic_ring.runtime.driver.cluster import NAMESPACE, left_behind
from elastic_ring.runtime.worker.env_fingerprint import versions
from tests.ray.fork_server import ForkServer
from tests.sim import invariants
from tests.unit.data.corpora import prepared, texts, write_jsonl

os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 would starve workers beside the other tests
ALONE = {"dp": 1, "cp": 1, "spares": 0}
"""The mesh of tests that are not about a mesh: one worker starts sooner than five."""
ROOT = Path(__file__).parents[2]
TINY = ModelConfig(257, 2, 32, 4, 2, 8, 64)
EXPERTS = replace(TINY, num_experts=5, experts_per_token=2, expert_width=16, shared_width=16)


class InParts(ModelConfig):
    """A shape that is built as a much larger one is: layers without experts, embedding and head in parts."""

    has_own_tables = True
    ffn_slices = (24, 24, 16)
    head_slices = (128, 129)

    def is_parted(self, layer: int) -> bool:
        return not self.has_experts(layer)


IN_PARTS = InParts(**{**vars(EXPERTS), "num_layers": 3, "num_dense_layers": 2})


@pytest.fixture(scope="session")
def fork_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """Forks the workers of the session's Ray; other Rays start theirs themselves."""
    with ForkServer(tmp_path_factory.mktemp("forks")) as server:
        yield server
        ray.shutdown()


def join(address: str = "local", **options: Any) -> None:
    """`ray.init` without a dashboard, and without Ray's words on the console."""
    if address == "local":
        options["include_dashboard"] = False
    ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR", **options)


@contextmanager
def cluster_of(*nodes: dict[str, Any], head_cpus: int = 0) -> Iterator[Cluster]:
    """Raylets on this machine, in place of the other modules' Ray: a head without CPUs outlives the nodes."""
    ray.shutdown()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": head_cpus, "include_dashboard": False})
    try:
        for node in nodes:
            cluster.add_node(**node)
        join(cluster.address)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def ran(*words: str, code: int = 0, timeout_s: float = 240.0, **options: Any) -> subprocess.CompletedProcess[str]:
    """A command that has ended with this code; the options are those of `subprocess.run`."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=timeout_s, **options)
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-4000:]
    return done


@pytest.fixture(scope="module")
def local_ray(fork_server: ForkServer) -> None:
    """One Ray for all modules that start none of their own, with as many CPUs as the largest mesh asks for."""
    if not ray.is_initialized():
        with fork_server.forking():
            join(num_cpus=32)


def slow_loss(seconds: float, model: Any, batch: Any) -> tuple[Any, int]:
    """The usual loss, some time later: gives a restarted worker the time to come back before the run ends."""
    time.sleep(seconds)
    return language_model_loss(model, batch)


def held_loss(gate: Path, seconds: float, model: Any, batch: Any) -> tuple[Any, int]:
    """The usual loss, slow as long as there is no file `gate`: the test makes it when it has seen what it waits for."""
    if not gate.exists():
        time.sleep(seconds)
    return language_model_loss(model, batch)


class Heard(Callback):
    """What a driver's callback was told, by kind."""

    def __init__(self) -> None:
        self.losses: list[tuple[int, str]] = []
        self.validations: list[tuple[int, float]] = []
        self.causes: list[str] = []

    def on_step(self, metrics: StepMetrics) -> None:
        self.losses.append((metrics.step, metrics.loss.hex()))

    def on_validation(self, step: int, metrics: Mapping[str, float]) -> None:
        self.validations.append((step, metrics["val_loss"]))

    def on_back(self, step: int, validations: Mapping[int, Mapping[str, float]]) -> None:
        self.losses = [told for told in self.losses if told[0] < step]
        self.validations = [told for told in self.validations if told[0] < step]

    def on_recovery(self, recovery: Mapping[str, Any]) -> None:
        self.causes.append(recovery["cause"])

    def check(self, summary: Mapping[str, Any]) -> None:
        """Every step that counts and every recovery of the finished run was told, each once and in order."""
        assert self.losses == list(enumerate(summary["losses"]))
        assert self.causes == [recovery["cause"] for recovery in summary["recoveries"]]


def wait_for(*conditions: Callable[[], bool], limit_s: float = 120.0) -> None:
    """Until all hold; fails after `limit_s`, which only a defect makes it reach."""
    deadline = time.monotonic() + limit_s
    for condition in conditions:
        while not condition():
            assert time.monotonic() < deadline, f"not within {limit_s} s: {condition}"
            time.sleep(0.05)


def num_steps(folder: Path) -> int:
    """How many steps of the run in this folder are on record."""
    return len(read_metrics(folder)) if (folder / METRICS_NAME).exists() else 0


def status(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / STATUS_NAME).read_text())
    return found


def pids(folder: Path) -> list[int]:
    """The processes of the mesh by global rank, as the coordinator tells it."""
    return [member["pid"] for member in status(folder)["members"]]


def notes(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [line for line in read(folder / JOURNAL_NAME) if line.get("note") == kind]


def events(folder: Path) -> list[dict[str, Any]]:
    return [line["event"] for line in read(folder / JOURNAL_NAME) if "event" in line]


def placements(folder: Path) -> list[list[str]]:
    """The node of each rank, build by build, as the run has recorded them."""
    builds: dict[int, list[str]] = {}
    for line in read(folder / JOURNAL_NAME):
        for command in line.get("commands", ()):
            if command["type"] == "Build":
                builds[command["generation"]] = command["nodes"]
    return list(builds.values())


def are_apart(nodes: Sequence[str], cp: int = 2) -> bool:
    """Whether no two holders of a shard share a node."""
    return all(len(set(nodes[cp_rank::cp])) == len(nodes[cp_rank::cp]) for cp_rank in range(cp))


def bits(summary: Mapping[str, Any]) -> dict[str, Any]:
    """What is equal in two runs that used the same samples and computed the same, bit for bit."""
    return {key: summary[key] for key in ("losses", "weights_sha256", "samples_sha256")}


def tiny_trainer(
    folder: Path,
    name: str,
    *,
    faults: str = "",
    steps: int = 12,
    slow_s: float = 0.0,
    gate: Path | None = None,
    gate_s: float = 0.3,
    callbacks: tuple[Callback, ...] = (),
    optimizer: Any = None,
    lr_schedule: Any = None,
    run: Mapping[str, Any] | None = None,
    data: SourceConfig | None = None,
    model: ModelConfig = TINY,
    validation: Mapping[str, ValidationSet] | None = None,
    **scaling: Any,
) -> ElasticRingTrainer:
    """A run of a small decoder, on the standard library's sources if no other data are given."""
    loss: Any = partial(slow_loss, slow_s) if slow_s else language_model_loss
    options = {"dp": 2, "cp": 2, "spares": 1, **scaling}
    total_steps, replanned = options.pop("total_steps", steps), options.pop("replanned", ())
    step = StepConfig(
        steps=steps,
        global_batch=options.pop("global_batch", 6),
        context_tokens=96,
        sequences_per_pass=options.pop("sequences_per_pass", 1),
        kv_wire=options.pop("kv_wire", "native"),
        val_every_steps=options.pop("val_every_steps", 0),
        val_every_tokens=options.pop("val_every_tokens", 0),
        experts=options.pop("experts", "auto"),
    )
    settings: dict[str, Any] = {
        "run_dir": str(folder / name),
        "faults": faults,
        "progress": False,
        "grow_cost_s": 0.0,
        **(run or {}),
    }
    return ElasticRingTrainer(
        partial(Transformer, model),
        data or StdlibText(96),
        step_config=step,
        optim_config=OptimConfig(
            peak_lr=1e-2, min_lr=1e-3, warmup_steps=2, total_steps=total_steps, replanned=replanned
        ),
        loss=partial(held_loss, gate, gate_s) if gate else loss,
        scaling_config=ScalingConfig(**options),
        run_config=RunConfig(name=name, **settings),
        initial=Initialiser(0, TINY.num_layers),
        callbacks=callbacks,
        optimizer=optimizer,
        lr_schedule=lr_schedule,
        validation=validation,
    )


@pytest.fixture(scope="session")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> PreparedTokens:
    """Two prepared sources, the first with twice the weight, as `data` of `tiny_trainer`."""
    folder = tmp_path_factory.mktemp("mixture")
    sources = [write_jsonl(folder / f"{name}.jsonl", texts(300, start)) for name, start in (("a", 0), ("b", 300))]
    prepared(folder / "out", *sources, weights=(2.0, 1.0), row_group_tokens=256)
    return PreparedTokens.of(str(folder / "out" / "manifest.json"), 96)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of fault-free runs by (dp, cp, steps), which pytest-xdist's processes share: each is made when one
    needs it first, and its bits are the same on any cluster here."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "undisturbed"
    folder.mkdir(exist_ok=True)
    return folder


def fault_free(known: Path, folder: Path, dp: int = 2, cp: int = 2, steps: int = 12) -> dict[str, Any]:
    """The summary of the run that `tiny_trainer` describes, without a fault."""
    name = f"calm-{dp}x{cp}x{steps}"
    kept = known / f"{name}.json"
    if not kept.exists():
        result = finished(tiny_trainer(folder, name, dp=dp, cp=cp, steps=steps, spares=0))
        assert result.summary["recoveries"] == []
        replace_file(kept, json.dumps(result.summary).encode())
    summary: dict[str, Any] = json.loads(kept.read_text())
    return summary


@pytest.fixture
def train(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """Runs to the end and returns the summary."""
    return lambda name, **options: finished(tiny_trainer(tmp_path_factory.mktemp("runs"), name, **options)).summary


def finished(trainer: ElasticRingTrainer) -> Result:
    """The result of a run of which nothing is left in the cluster and whose records agree."""
    result = trainer.fit()
    assert left_behind(trainer.run_config.name) == []
    check_records(trainer, result)
    return result


def check_folds(trainer: ElasticRingTrainer, facts: list[Fact], summary: dict[str, Any]) -> None:
    totals, recoveries = RunTotals(), RecoveryLog(trainer.run_config, lambda note: None)
    for fact in facts:
        totals.saw(fact)
        recoveries.saw(fact)
    assert summary["generations"] == [vars(generation) for generation in totals.generations]
    assert summary["checkpoints"] == totals.checkpoints
    assert summary["memory"] == [vars(relief) for relief in totals.reliefs]
    assert summary["compilations_after_step_0"] == totals.num_compiled_late
    assert summary["recoveries"] == [{key: getattr(one, key) for key in RECOVERY_KEYS} for one in recoveries.records]


def check_records(trainer: ElasticRingTrainer, result: Result) -> None:
    """The journal replays to the same commands and its facts fold to the summary, no decision in it broke an invariant,
    the weights' file has the digest of the summary, nobody is a member any more, and the versions are recorded."""
    run_spec = RunSpec(trainer.run_config, trainer.scaling_config, trainer.task, "", "", "")
    options = control_options(run_spec)
    journal = standing(read(result.path / JOURNAL_NAME))
    check_folds(trainer, [fact for line in journal if (fact := fact_of(line)) is not None], result.summary)
    lines = [line for line in journal if "event" in line]
    assert isinstance(replay(options, lines).phase, Ended)
    state = initial(options)
    for line in lines:
        event: Any = from_json(line["event"])
        decision = advance(state, event, line["now"])
        invariants.check(state, event, decision)
        state = decision.state
    told = status(result.path)
    assert (told["phase"], told["members"], told["spares"]) == ("ended", [], [])
    assert json.loads((result.path / CONFIG_NAME).read_text())["versions"] == versions(trainer.scaling_config.device)
    weights = load_file(result.weights)
    total = hashlib.sha256()
    for name in sorted(weights):
        total.update(weights[name].numpy().tobytes())
    assert total.hexdigest() == result.summary["weights_sha256"]
