"""A driver of `test_head_lost.py`, in a process of its own on the worker node: Ray may end one whose head is away.

Usage: `python -m tests.ray.head_driver ADDRESS NODE_ADDRESS FOLDER NAME GATE LEASE_S STEP_S`.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import ray

from elastic_ring.config import Timeouts
from elastic_ring.runtime.driver.cluster import NAMESPACE
from elastic_ring.runtime.driver.ray_session import outlast_head
from tests.ray.conftest import tiny_trainer

STEPS = 30


def main(address: str, node_address: str, folder: str, name: str, gate: str, lease_s: str, step_s: str) -> None:
    """Follow a run of `tiny_trainer` whose steps take `step_s` until the file `gate` exists."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    outlast_head(float(lease_s))  # as the trainer does, which cannot say which of this machine's nodes to join
    ray.init(address=address, _node_ip_address=node_address, namespace=NAMESPACE, log_to_driver=False)
    timeouts = Timeouts(lease_s=float(lease_s))
    tiny_trainer(
        Path(folder), name, steps=STEPS, gate=Path(gate), gate_s=float(step_s), run={"timeouts": timeouts}
    ).fit()


if __name__ == "__main__":
    main(*sys.argv[1:])
