"""What a lost host costs: one machine as several hosts, one of which is killed or frozen while a run trains.

    python benchmarks/recovery/bench_hosts.py --hosts 4 --save              one GPU a host
    python benchmarks/recovery/bench_hosts.py --hosts 4 --device cpu        the same on CPUs, one slot a host
    python benchmarks/recovery/bench_hosts.py --hosts 3 --gpus 2            three hosts, two of which share a GPU
    python benchmarks/recovery/bench_hosts.py --hosts 2 --cases doctor      `elastic-ring doctor` alone

Each host is a raylet of its own; on GPUs NCCL is told that the hosts differ, so everything goes over sockets. A head
without GPUs holds the coordinator. Where there are fewer GPUs than hosts, hosts take them in turn and each has its own
folder of GPU leases, as machines have. For each mesh a run without faults comes first; the others must end with its
weights, or, where the mesh shrinks, with its samples. Seconds are those of the run's own record, from the moment when
the fault is let loose to the next committed step. Exits 1 where a run fails, differs, leaves a process or misses a bar.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import psutil

from benchmarks.harness import results
from benchmarks.harness.arguments import bench_parser, list_of
from deploy.drills.local_cluster import LocalCluster
from deploy.drills.processes import marked, start_training
from elastic_ring.config import Timeouts, environment
from elastic_ring.monitor.metrics import SUMMARY_NAME
from elastic_ring.runtime.gpu.leases import FOLDER

TOKEN = "bench-hosts"
DOCTOR = "doctor"
STEPS, FAULT_STEP = 24, 12
RUN_S, LEFT_S, HOST_UP_S = 240.0, 10.0, 4.0
SPARE_BAR_S, SHRINK_BAR_S = 3.0, 2.5
HEALING = f"step={FAULT_STEP},phase=heal,role=spare"
OTHER_HOLDER = f"step={FAULT_STEP},phase=backward,rank=1"
"""Of the shard of rank 3: with both hosts gone the copies alone have it."""
FROZEN_BAR_S = Timeouts().node_silent_s + 3.0


@dataclass(frozen=True)
class Case:
    """One run. `fault` fires on the last rank, in `phase`; `then`: further faults, as text. `bar_s`: from the first
    fault to the next committed step."""

    name: str
    dp: int
    cp: int
    spares: int = 0
    copies: int = 0
    fault: str = ""
    phase: str = "backward"
    bar_s: float = 0.0
    shrinks: bool = False
    then: str = ""

    @property
    def mesh(self) -> tuple[int, int]:
        return self.dp, self.cp

    def faults(self) -> str:
        if not self.fault:
            return "none"
        return f"{self.fault}@step={FAULT_STEP},phase={self.phase},rank={self.dp * self.cp - 1}{self.then}"


CASES = (
    Case(DOCTOR, 1, 1),
    Case("dp2", 2, 1),
    Case("dp2-kill-process", 2, 1, spares=1, fault="kill"),
    Case("dp2-kill-host", 2, 1, spares=1, fault="kill-node", bar_s=SPARE_BAR_S),
    Case("dp2-freeze-host", 2, 1, spares=1, fault="freeze-node", bar_s=FROZEN_BAR_S),
    Case("dp2-kill-host-shrink", 2, 1, fault="kill-node", bar_s=SHRINK_BAR_S, shrinks=True),
    Case("dp2-freeze-host-shrink", 2, 1, fault="freeze-node", bar_s=FROZEN_BAR_S, shrinks=True),
    Case("cp2", 1, 2),
    Case("cp2-kill-host", 1, 2, spares=1, copies=1, fault="kill-node", bar_s=SPARE_BAR_S),
    Case("cp2-freeze-host", 1, 2, spares=1, copies=1, fault="freeze-node", bar_s=FROZEN_BAR_S),
    Case("2x2", 2, 2),
    Case("2x2-kill-host-shrink", 2, 2, fault="kill-node", bar_s=SHRINK_BAR_S, shrinks=True),
    Case("dp2-kill-healing-host", 2, 1, spares=2, fault="kill-node", then=f"; kill-node@{HEALING}"),
    Case("2x2-kill-two-hosts", 2, 2, copies=1, fault="kill-node", then=f"; kill-node@{OTHER_HOLDER}", shrinks=True),
)


class Hosts:
    """`num_hosts` hosts; those that a fault took are replaced before the next run."""

    def __init__(self, folder: Path, num_hosts: int, num_gpus: int) -> None:
        """`num_gpus`: 0 on CPUs."""
        self.cluster = LocalCluster(folder, [0], TOKEN)
        self._num_hosts, self._num_gpus = num_hosts, num_gpus
        self._at: dict[int, int] = {}

    def mend(self) -> None:
        """Start every host that is not whole."""
        gone = [host for host in range(self._num_hosts) if host not in self._at or not self._is_whole(host)]
        for host in gone:
            variables = {"NCCL_HOSTID": f"host{host}", "NCCL_IB_DISABLE": "1"}
            if self._num_gpus:
                variables["CUDA_VISIBLE_DEVICES"] = str(host % self._num_gpus)
            more = ["--num-gpus=1", "--object-store-memory=500000000"] if self._num_gpus else []
            before = own_folder(FOLDER) if 0 < self._num_gpus < self._num_hosts else ()
            self._at[host] = self.cluster.add_node(8 if self._num_gpus else 1, more, variables, before)
        if gone:
            time.sleep(HOST_UP_S)

    def _is_whole(self, host: int) -> bool:
        if self.cluster.is_whole(self._at[host]):
            return True
        self.cluster.kill_node(self._at[host])
        return False


def own_folder(folder: Path) -> list[str]:
    """Before a command: it and what it starts have an empty folder of that name to themselves (Linux, as root)."""
    folder.mkdir(parents=True, exist_ok=True)
    script = f'mount -t tmpfs -o mode=1777 none {folder} && exec "$@"'
    return ["unshare", "--mount", "sh", "-c", script, "sh"]


def run(case: Case, folder: Path, options: argparse.Namespace, cluster: LocalCluster) -> dict[str, Any]:
    """Train once; the figures of its recovery, or `failed` with the last lines."""
    where, log = folder / case.name, folder / f"{case.name}.log"
    arguments = [
        "--run-dir",
        str(where),
        "--preset",
        options.preset,
        "--dp",
        str(case.dp),
        "--cp",
        str(case.cp),
        "--spares",
        str(case.spares),
        "--context",
        str(options.context),
        "--steps",
        str(STEPS),
        "--faults",
        case.faults(),
    ]
    if case.copies:
        arguments += ["--copies", str(case.copies), "--run.copy-every-steps", "2"]
    if options.device == "cpu":
        arguments += ["--scaling.device", "cpu", "--cpus-per-worker", "1", "--global-batch", "4"]
    begun = time.monotonic()
    process = start_training(arguments, log, TOKEN, cluster.variables)
    try:
        code = process.wait(RUN_S)
    except Exception:
        process.kill()
        process.wait()
        code = -1
    row: dict[str, Any] = {"case": case.name, "code": code, "run_s": time.monotonic() - begun}
    if code != 0:
        return row | {"failed": log.read_text(errors="replace")[-1500:]}
    summary = json.loads((where / SUMMARY_NAME).read_text())
    row |= {name: summary[name] for name in ("weights_sha256", "samples_sha256")}
    if case.fault:
        (first, *_) = summary["recoveries"]
        names = ("action", "source", "detect_s", "close_s", "heal_s", "rerun_s", "total_s", "steps_undone")
        row |= {name: first.get(name) for name in names}
    return row | {"left": left_behind()}


def examine(options: argparse.Namespace, cluster: LocalCluster, folder: Path) -> dict[str, Any]:
    """What the doctor says of the hosts, a row as `run` gives one."""
    own = ["--scaling.device", "cpu", "--cpus-per-worker", "1"] if options.device == "cpu" else []
    command = [sys.executable, "-m", "elastic_ring", "doctor", "--preset", options.preset, *own]
    command += ["--storage-path", str(folder), "--context", str(options.context)]
    begun = time.monotonic()
    said = subprocess.run(command, env={**environment(), **cluster.variables}, capture_output=True, text=True)
    results.show(said.stdout)
    row: dict[str, Any] = {"case": DOCTOR, "code": said.returncode, "run_s": time.monotonic() - begun}
    return row | ({"failed": f"{said.stdout}{said.stderr}"[-1500:]} if said.returncode else {})


def left_behind() -> int:
    """Actors of the run that are still there `LEFT_S` after its end; those of a frozen host do not count."""
    deadline = time.monotonic() + LEFT_S
    while True:
        number = sum(map(is_actor, marked(TOKEN)))
        if not number or time.monotonic() > deadline:
            return number
        time.sleep(0.2)


def is_actor(process: psutil.Process) -> bool:
    """Whether a live process is a worker or the coordinator of a run."""
    try:
        name = " ".join(process.cmdline())
        return process.status() != psutil.STATUS_STOPPED and ("ray::Worker" in name or "ray::Coordinator" in name)
    except psutil.NoSuchProcess:
        return False


def missed(case: Case, row: dict[str, Any], calm: dict[str, Any]) -> list[str]:
    if "failed" in row:
        return [f"{case.name}: exit {row['code']}: {row['failed']}"]
    if case.name == DOCTOR:
        return []
    told = []
    same = "samples_sha256" if case.shrinks else "weights_sha256"
    if row[same] != calm[same]:
        told.append(f"{case.name}: {same} differs from the undisturbed run's")
    if case.bar_s and row["total_s"] > case.bar_s:
        told.append(f"{case.name}: {row['total_s']:.2f} s, bar {case.bar_s:.1f}")
    if case.fault and case.shrinks != (row["action"] == "mesh shrank"):
        told.append(f"{case.name}: {row['action']}")
    if row["left"]:
        told.append(f"{case.name}: {row['left']} process(es) left behind")
    return told


def main(arguments: Sequence[str] | None = None) -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--gpus", type=int, default=None, help="on which the hosts lie; as many as hosts if left out")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--preset", default="100m")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--cases", type=list_of(str), default=None, help=f"some of {','.join(c.name for c in CASES)}")
    parser.add_argument("--logs", type=Path, default=None, help="keep runs' folders and logs here")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args(arguments)
    folder = options.logs or Path(tempfile.mkdtemp(prefix="hosts-"))
    folder.mkdir(parents=True, exist_ok=True)
    wanted = [c for c in CASES if (options.cases is None or c.name in options.cases) and c.dp * c.cp <= options.hosts]
    num_gpus = 0 if options.device == "cpu" else options.gpus or options.hosts
    hosts = Hosts(Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp")), options.hosts, num_gpus)
    rows, calm, told = [], {}, []
    with hosts.cluster as cluster:
        for case in wanted:
            hosts.mend()
            row = examine(options, cluster, folder) if case.name == DOCTOR else run(case, folder, options, cluster)
            rows.append(row)
            if not case.fault:
                calm[case.mesh] = row
            told += missed(case, row, calm.get(case.mesh, row))
            results.show(json.dumps({key: value for key, value in row.items() if key != "phases"}))
    names = ("case", "action", "source", "detect_s", "close_s", "heal_s", "rerun_s", "total_s", "steps_undone", "run_s")
    text = results.table(names, [[row.get(name) for name in names] for row in rows])
    results.show(f"{text}\n{results.verdict(told)}")
    if options.save:
        results.save("hosts", "bench_hosts", text, {"rows": rows, "missed": told})
    return int(bool(told))


if __name__ == "__main__":
    sys.exit(main())
