"""Which metrics a run on GPUs exports: trains on a Ray of its own and reads the endpoint that Prometheus reads.

    python benchmarks/probes/probe_metrics_gpu.py [--dp 1] [--cp 2] [--seconds 60] [-- FLAGS of elastic-ring train]

Prints a line of JSON with the newest value of every metric that only GPUs have, and the names of the table that were
not seen. Exits 1 when one of NEEDED is missing: a reading of NVML, torch's memory, the utilisation, with --cp 2 or more
the latency of exchanges.
"""

from __future__ import annotations

import json
import re
import secrets
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path

if __name__ == "__main__":  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness.arguments import bench_parser
from deploy.drills.local_cluster import LocalCluster
from deploy.drills.processes import start_training
from elastic_ring.runtime.coordinator.folds.metrics_table import TABLE

NEEDED = (
    "elastic_ring_gpu_memory_bytes",
    "elastic_ring_gpu_temperature_celsius",
    "elastic_ring_gpu_power_watts",
    "elastic_ring_gpu_utilisation_ratio",
    "elastic_ring_mfu_ratio",
)
OF_RINGS = "elastic_ring_hop_latency_seconds"
LINE = re.compile(r"^ray_(elastic_ring_\w+?)(?:_bucket|_sum|_count)?\{([^}]*)\} (\S+)")
PART = re.compile(r'part="([^"]*)"')


def read(url: str) -> dict[str, float]:
    """The values by name and part."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    found = {}
    for match in filter(None, map(LINE.match, lines)):
        part = PART.search(match[2])
        found[f"{match[1]}{{{part[1]}}}" if part else match[1]] = float(match[3])
    return found


def main() -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--dp", type=int, default=1)
    parser.add_argument("--cp", type=int, default=2)
    parser.add_argument("--preset", default="100m")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long it reads once the first metric is there")
    given = sys.argv[1:]
    end = given.index("--") if "--" in given else len(given)
    options, more = parser.parse_args(given[:end]), given[end + 1 :]
    token = secrets.token_hex(8)
    with tempfile.TemporaryDirectory(prefix="er-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        with LocalCluster(folder / "ray", (16,), token) as cluster:
            training = start_training(
                [
                    "--preset",
                    options.preset,
                    "--dp",
                    str(options.dp),
                    "--cp",
                    str(options.cp),
                    "--spares",
                    "0",
                    "--context",
                    str(options.context),
                    "--global-batch",
                    str(options.dp),
                    "--steps",
                    "1000000",
                    "--checkpoint-every-steps",
                    "0",
                    "--run-name",
                    "probe",
                    "--storage-path",
                    str(folder),
                    *more,
                ],
                folder / "train.log",
                token,
                cluster.variables,
            )
            seen = watch(f"http://{cluster.metrics[0]}/metrics", options.seconds)
        training.wait()
        if not seen:
            print((folder / "train.log").read_text(errors="replace")[-3000:], file=sys.stderr)
    return told(seen, options.cp)


def watch(url: str, seconds: float) -> dict[str, float]:
    """The newest value of all that was seen within `seconds` of the first step, or 240 s without one."""
    seen: dict[str, float] = {}
    deadline = time.monotonic() + 240.0
    while time.monotonic() < deadline:
        before = "elastic_ring_loss" in seen
        seen |= read(url)
        if not before and "elastic_ring_loss" in seen:
            deadline = time.monotonic() + seconds
        time.sleep(1.0)
    return seen


def told(seen: Mapping[str, float], cp: int) -> int:
    names = {key.partition("{")[0] for key in seen}
    shown = {
        key: value
        for key, value in sorted(seen.items())
        if "gpu" in key or key.startswith((OF_RINGS, "elastic_ring_mfu", "elastic_ring_step_part"))
    }
    not_seen = [metric.name for metric in TABLE if metric.name not in names]
    print(json.dumps({"seen": shown, "not_seen": not_seen, "num_series": len(seen)}))
    missing = [name for name in (*NEEDED, *([OF_RINGS] if cp > 1 else [])) if name not in names]
    if missing:
        print(f"missing: {', '.join(missing)}", file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
