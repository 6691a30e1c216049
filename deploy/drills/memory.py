"""The drill `memory`: a step that runs out of memory, and a worker that fills its node, beside undisturbed runs."""

from __future__ import annotations

import argparse
import ctypes
import logging
import resource
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from elastic_ring.config import OptimConfig, RunConfig, ScalingConfig, StepConfig
from elastic_ring.data.source import StdlibText
from elastic_ring.model.config import ModelConfig
from elastic_ring.model.init import Initialiser
from elastic_ring.model.loss import BatchLike, language_model_loss
from elastic_ring.model.transformer import Transformer
from elastic_ring.monitor.host_memory import HostMemory
from elastic_ring.trainer import ElasticRingTrainer

log = logging.getLogger(__name__)

# Each of two ranks keeps about 12 MiB a layer where it recomputes nothing.
WIDE = ModelConfig(257, 12, 64, 4, 2, 16, 2048, checkpoint_activations=False)
CONTEXT, STEPS = 1024, 6
STRUCK_CALL = 3
ROOM_BYTES = 80 << 20
MAPPED_BYTES = 1 << 16
CHUNK_BYTES, CHUNK_S = 32 << 20, 0.1
GUARD_ROOM = 0.04
"""Of the node's memory: how far above what is in use now the guard of the drill acts."""
M_MMAP_THRESHOLD = -3


@dataclass
class StruckLoss:
    """The usual loss. In its third call one process, the first that makes the file `claim`, is short of memory (`kind`
    short: RLIMIT_DATA leaves it ROOM_BYTES, for this attempt and the two after it), or grows until it is killed."""

    kind: str = ""
    claim: str = ""
    num_calls: int = 0
    is_struck: bool = False

    def __call__(self, model: Any, batch: BatchLike) -> tuple[Any, Any]:
        self.num_calls += 1
        if self.kind == "short" and self.num_calls == 1:  # what is freed goes back at once
            ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES)
        if self.kind and self.num_calls == STRUCK_CALL and self._is_first():
            self.is_struck = True
            self._grow() if self.kind == "grows" else self._limit()
        if self.is_struck and self.num_calls == 2 * STRUCK_CALL:
            resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        return language_model_loss(model, batch)

    def _is_first(self) -> bool:
        try:
            Path(self.claim).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def _limit(self) -> None:
        status = Path("/proc/self/status").read_text()
        (data_kib,) = (int(line.split()[1]) for line in status.splitlines() if line.startswith("VmData:"))
        resource.setrlimit(resource.RLIMIT_DATA, ((data_kib << 10) + ROOM_BYTES, resource.RLIM_INFINITY))

    def _grow(self) -> None:
        kept: list[bytearray] = []
        total = HostMemory().read().total_bytes
        while len(kept) * CHUNK_BYTES < 3 * GUARD_ROOM * total:
            kept.append(bytearray(b"x") * CHUNK_BYTES)
            time.sleep(CHUNK_S)
        raise RuntimeError("no guard has stopped it")


def memory(options: argparse.Namespace) -> int:
    """0 if both runs ended with the bits of undisturbed ones, and deaths and reliefs are those that were planted."""
    name = f"memory-{secrets.token_hex(3)}"
    folder = Path(options.storage_path).expanduser().absolute()
    folder.mkdir(parents=True, exist_ok=True)
    wrong = []
    for kind, scaling in (("short", ScalingConfig(dp=1, cp=2, spares=0)), ("grows", ScalingConfig(dp=2, cp=1))):
        calm = _run(folder, f"{name}-{kind}-calm", scaling, StruckLoss())
        struck = _run(folder, f"{name}-{kind}", scaling, StruckLoss(kind, str(folder / f"{name}-{kind}.claim")))
        wrong += [f"{kind}: {what}" for what in differences(kind, calm, struck)]
        log.info(
            "%s: reliefs %s, lost workers %s, %s",
            kind,
            [change["reliefs"] for change in struck["memory"]],
            struck["lost_workers"],
            "; ".join(one["cause"] for one in struck["recoveries"]),
        )
    for what in wrong:
        log.error("%s", what)
    log.info("memory: %s", "not as planted" if wrong else "both runs went on, with the bits of the undisturbed ones")
    return int(bool(wrong))


def differences(kind: str, calm: Mapping[str, Any], struck: Mapping[str, Any]) -> list[str]:
    """What is not as the drill promises."""
    found = [f"{what} differ" for what in ("losses", "weights_sha256") if calm[what] != struck[what]]
    lost = {"out of memory": 1} if kind == "grows" else {}
    if struck["lost_workers"] != lost:
        found.append(f"lost workers {struck['lost_workers']}, not {lost}")
    reliefs = [change["reliefs"] for change in struck["memory"]]
    if reliefs[:1] != [["caches"]]:
        found.append(f"reliefs {reliefs}, not caches first")
    if not struck["exact"] or calm["memory"] or calm["lost_workers"]:
        found.append("the run is not exact, or the undisturbed one was disturbed")
    return found


def _run(folder: Path, name: str, scaling: ScalingConfig, loss: StruckLoss) -> Mapping[str, Any]:
    limit = min(0.97, HostMemory().read().share + GUARD_ROOM) if loss.kind == "grows" else 0.0
    trainer = ElasticRingTrainer(
        partial(Transformer, WIDE),
        StdlibText(CONTEXT),
        loss=loss,
        initial=Initialiser(0, WIDE.num_layers),
        step_config=StepConfig(steps=STEPS, global_batch=scaling.dp, context_tokens=CONTEXT, check_model=False),
        optim_config=OptimConfig(peak_lr=1e-2, min_lr=1e-3, warmup_steps=1, total_steps=STEPS),
        scaling_config=scaling,
        run_config=RunConfig(name=name, run_dir=str(folder / name), progress=False, memory_limit=limit),
    )
    return trainer.fit().summary
