"""How long a step of the laptop preset waits for its data where they come from a slow object store.

    python benchmarks/data/bench_data_wait.py [--mb-per-s 2] [--latency-s 0.05] [--steps 40] [--save]

A corpus of the environment's Python files is prepared with the byte tokenizer into a bucket of Ceph's gateway. Training
reads it through a proxy that holds each answer back for `--latency-s` and for its size over `--mb-per-s`. `wait` is
`data_wait_s` of metrics.jsonl, on global rank 0, as a share of `step_s`: all steps together, the median and the worst
step. The first steps wait for the first row groups, which nothing could read ahead; they are a row of their own.
Needs Debian's radosgw, ceph-mon and ceph-osd.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

if __name__ == "__main__":  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.data.bench_prepare import write_corpus
from benchmarks.harness import results
from benchmarks.harness.arguments import bench_parser

NUM_FIRST = 2


def main() -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--mb-per-s", type=float, default=2.0, help="of each connection to the store (2)")
    parser.add_argument("--latency-s", type=float, default=0.05, help="of each request (0.05)")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--mib", type=int, default=32, help="size of the corpus (32)")
    parser.add_argument("--save", action="store_true", help="write the table and a JSON into benchmarks/results/data/")
    options = parser.parse_args()
    steps = train(options.mib << 20, options.steps, options.mb_per_s * 1e6, options.latency_s)
    text, record = report(steps, options.mb_per_s, options.latency_s)
    results.show(text)
    if options.save:
        results.save("data", "bench_data_wait", text, record)
    return 0


def train(num_bytes: int, num_steps: int, bytes_per_s: float, latency_s: float) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl of a run on the store behind the proxy."""
    from tests.object_store.proxy import faulty_proxy
    from tests.object_store.store import ObjectStore, free_ports

    with tempfile.TemporaryDirectory() as name:
        store = ObjectStore(Path(name) / "store", free_ports(2), [str(os.getpid())])
        store.start()
        try:
            write_corpus(Path(name) / "corpus.jsonl", num_bytes)
            uri = f"s3://{store.new_bucket()}/prepared"
            given = {**os.environ, **store.environment}
            _run(["data", "prepare", "--source", f"{name}/corpus.jsonl", "--out", uri, "--workers", "0"], given)
            with faulty_proxy(store.port) as proxy:
                proxy.delay_s = lambda size: latency_s + size / bytes_per_s
                given["AWS_ENDPOINT_URL"] = proxy.endpoint
                _run(
                    [
                        "train",
                        "--preset",
                        "laptop",
                        "--data",
                        f"{uri}/manifest.json",
                        "--steps",
                        str(num_steps),
                        "--run-dir",
                        f"{name}/run",
                    ],
                    given,
                )
            lines = (Path(name) / "run" / "metrics.jsonl").read_text().splitlines()
        finally:
            store.stop()
    return [line for line in map(json.loads, lines) if "loss_hex" in line]


def _run(arguments: list[str], given: dict[str, str]) -> None:
    command = [sys.executable, "-m", "elastic_ring", *arguments]
    done = subprocess.run(command, env=given, capture_output=True, text=True, timeout=900)
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)}: exit status {done.returncode}\n{done.stderr[-3000:]}")


def report(steps: list[dict[str, Any]], mb_per_s: float, latency_s: float) -> tuple[str, dict[str, Any]]:
    rows: list[list[object]] = []
    for name, part in ((f"first {NUM_FIRST} steps", steps[:NUM_FIRST]), ("all later steps", steps[NUM_FIRST:])):
        shares = [line["data_wait_s"] / line["step_s"] for line in part]
        total = sum(line["data_wait_s"] for line in part) / sum(line["step_s"] for line in part)
        step_s = median(line["step_s"] for line in part)
        rows.append([name, len(part), step_s, 100 * total, 100 * median(shares), 100 * max(shares)])
    text = f"laptop preset, {mb_per_s:g} MB/s a connection and {latency_s:g} s a request\n"
    text += results.table(["", "steps", "step s", "wait %", "median %", "worst %"], rows)
    names = ("steps", "step_s", "wait_percent", "median_percent", "worst_percent")
    figures = {str(name): dict(zip(names, values, strict=True)) for name, *values in rows}
    return text, {"mb_per_s": mb_per_s, "latency_s": latency_s, "rows": figures}


if __name__ == "__main__":
    sys.exit(main())
