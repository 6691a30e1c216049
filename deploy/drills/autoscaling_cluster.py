"""A real autoscaling Ray cluster (autoscaler v2) on one machine: a head without CPUs, and nodes as they are asked for.

Ray's own `ray.cluster_utils.AutoscalingCluster` reads an example that the wheel lacks, and stops every other Ray of the
machine. Nodes are made by Ray's provider for such clusters: each is a raylet of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from deploy.drills.local_cluster import new_access
from elastic_ring.config import environment
from elastic_ring.files import replace_file

ROOT = Path(__file__).resolve().parents[2]
"""Where the workers find this package, installed or not."""
ADDRESS = "127.0.0.1"
HEAD_ID = "f" * 51 + "00000"
NODE_ID = "RAY_OVERRIDE_NODE_ID_FOR_TESTING"  # in the environment of each node's processes
PROVIDER = "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider"
LOOK_S = 0.2
START_S = 120.0


class AutoscalingCluster:
    """The cluster; `folder` must have a short path, as Ray puts sockets there. Use as a context."""

    def __init__(self, folder: Path, port: int, *, cpus_per_node: int, max_nodes: int, idle_s: float) -> None:
        self._access = new_access()
        self._address = f"{ADDRESS}:{port}"
        self.variables = {**self._access, "RAY_ADDRESS": self._address}
        """Of a process that connects to it."""
        self._folder, self._port = folder, port
        self._config = folder / "cluster.json"
        self._cpus_per_node, self._idle_s = cpus_per_node, idle_s
        self._head: subprocess.Popen[bytes] | None = None
        self.set_max_nodes(max_nodes)

    def set_max_nodes(self, number: int) -> None:
        """What the cluster may grow to from now on; the autoscaler reads it at each look."""
        node = {
            "resources": {"CPU": self._cpus_per_node},
            "node_config": {},
            "min_workers": 0,
            "max_workers": number,
            "idle_timeout_s": self._idle_s,
        }
        head = {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0}
        config = {
            "cluster_name": "autoscaling",
            "max_workers": number,
            "idle_timeout_minutes": self._idle_s / 60,
            "provider": {
                "type": "external",
                "module": PROVIDER,
                "gcs_address": self._address,
                "head_node_id": HEAD_ID,
                "launch_multiple": True,
                "disable_node_updaters": True,
            },
            "available_node_types": {"ray.head.default": head, "worker": node},
            "head_node_type": "ray.head.default",
            "auth": {"ssh_user": "ray"},
            "docker": {},
            "file_mounts": {},
            "cluster_synced_files": [],
            "initialization_commands": [],
            "setup_commands": [],
            "head_setup_commands": [],
            "worker_setup_commands": [],
            "head_start_ray_commands": [],
            "worker_start_ray_commands": [],
        }
        replace_file(self._config, json.dumps(config).encode())  # the autoscaler must not read half of it

    def __enter__(self) -> AutoscalingCluster:
        variables = {
            **environment(),
            **self._access,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_FAKE_CLUSTER": "1",
            "RAY_enable_autoscaler_v2": "1",
            "AUTOSCALER_UPDATE_INTERVAL_S": "1",
            "RAY_CLOUD_INSTANCE_ID": HEAD_ID,
            NODE_ID: HEAD_ID,
            "PYTHONPATH": os.pathsep.join([str(ROOT), environment().get("PYTHONPATH", "")]),
        }
        with (self._folder / "head.log").open("wb") as log:
            self._head = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "ray.scripts.scripts",
                    "start",
                    "--head",
                    "--block",
                    f"--port={self._port}",
                    f"--node-ip-address={ADDRESS}",
                    "--num-cpus=0",
                    "--include-dashboard=false",
                    f"--autoscaling-config={self._config}",
                    f"--temp-dir={self._folder / 'ray'}",
                ],
                env=variables,
                stdout=log,
                stderr=log,
            )
        self._until("the head", lambda: "Ray runtime started" in (self._folder / "head.log").read_text())
        return self

    def __exit__(self, *_: object) -> None:
        """Kills what this cluster has started, and nothing else."""
        for process in self._own():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        if self._head is not None:
            self._head.kill()
            self._head.wait()

    def _until(self, what: str, holds: Callable[[], bool]) -> None:
        assert self._head is not None
        deadline = time.monotonic() + START_S
        while not holds():
            if self._head.poll() is not None or time.monotonic() > deadline:
                told = (self._folder / "head.log").read_text()[-3000:]
                raise RuntimeError(f"{what} of the autoscaling cluster did not start:\n{told}")
            time.sleep(LOOK_S)

    def _own(self) -> list[psutil.Process]:
        assert self._head is not None
        with suppress(psutil.NoSuchProcess):
            return list(psutil.Process(self._head.pid).children(recursive=True))
        return []

    def nodes(self) -> list[str]:
        """Ray's ids of the nodes whose raylet lives, the head left out."""
        raylets = [process for process in self._own() if _name(process) == "raylet"]
        return sorted({str(_variables(raylet).get(NODE_ID, HEAD_ID)) for raylet in raylets} - {HEAD_ID})

    def kill_node(self, node: str) -> int:
        """SIGKILL a node's raylet and all that it has started, as when a machine fails; how many processes it were."""
        killed = [process for process in self._own() if _variables(process).get(NODE_ID) == node]
        raylets = [process for process in killed if _name(process) == "raylet"]
        assert raylets, f"node {node} has no raylet"
        for process in [*raylets, *(child for one in raylets for child in one.children(recursive=True))]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        return len(killed)


def _name(process: psutil.Process) -> str:
    """Empty for a process that is gone, or that nobody has waited for."""
    with suppress(psutil.NoSuchProcess):
        return "" if process.status() == psutil.STATUS_ZOMBIE else str(process.name())
    return ""


def _variables(process: psutil.Process) -> dict[str, Any]:
    with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        return dict(process.environ())
    return {}
