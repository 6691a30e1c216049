"""What a submission knows of its passes before the forecast is asked: the run's GPUs, and the number on record."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import ray

from elastic_ring.config import ScalingConfig, StepConfig
from elastic_ring.gpus import GPUS, gpu_type
from elastic_ring.runtime.coordinator.resume import Resume

log = logging.getLogger(__name__)

ACCELERATOR = "accelerator_type:"
"""How Ray's resources name a node's type of GPU."""


def gpu_of_run(scaling: ScalingConfig) -> str | None:
    """The smallest type among the GPUs of Ray's nodes, or of those that the workers ask for; None where one of them has
    no forecast, or where no node has a GPU yet. Logs which."""
    if scaling.device != "cuda":
        return None
    names = {name for name in scaling.resources_per_worker if name.startswith(ACCELERATOR)}
    if not names:
        resources = [node["Resources"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("GPU", 0) > 0]
        names = {name for node in resources for name in node if name.startswith(ACCELERATOR)}
    types = {name: gpu_type(name) for name in sorted(names)}
    if not types or None in types.values():
        odd = ", ".join(name.removeprefix(ACCELERATOR) for name, kind in types.items() if kind is None)
        log.info("%s: set step.sequences_per_pass for more than one", odd or "no GPU has joined the cluster yet")
        return None
    return min((kind for kind in types.values() if kind), key=lambda kind: GPUS[kind].gib)


def recorded_pass(step: StepConfig, config: Mapping[str, Any] | None, resume: Resume) -> int | None:
    """The sequences of a pass of the run on record: by its config.json, else by the checkpoint it goes on from; 1 where
    neither says. None for a new run."""
    if config is None and not resume.checkpoints:
        return None
    number = resume.sequences_per_pass if config is None else config.get("step", {}).get("sequences_per_pass")
    return number if type(number) is int and 1 <= number <= step.global_batch else 1
