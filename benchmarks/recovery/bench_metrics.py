"""What exporting a run's metrics costs a step: one run, the export off and on in turns.

    python benchmarks/recovery/bench_metrics.py [--everything] [--blocks 20] [--block-steps 12] [--save]

The laptop preset on a Ray of its own. In a block with metrics the coordinator sets every gauge every four seconds, as
in any run, and the endpoint of Ray's agent is scraped every 5 s; in a block without, it sets none. Which comes first
swaps with each pair of blocks, against drift. A step's time is from one commit to the next on rank 0; the first two
steps of a block, in which it is switched, are left out, and so is the first pair. The bounds are those of 90 % of the
ratios of means when pairs of blocks are drawn with replacement. What workers and agents measure for the metrics is part
of both; with `--everything` it is switched off, too, in blocks without: a worker then sums no clock of a step's phases,
measures no work of its own and reads no GPU memory, and the node's agent reads no memory of processes, no pressure, no
network counters and no GPUs' health.

`CPU` is the share of one core that the coordinator and Ray's agent, which carries the metrics, take: of what it rises a
step pays at most as much where all cores work on it.

Exits 1 when the step's ratio is above 0.5 %.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import psutil
import ray

from benchmarks.harness import results, runs
from benchmarks.harness.arguments import at_least_one, bench_parser
from elastic_ring import RunConfig
from elastic_ring.cli import train
from elastic_ring.runtime.driver.cluster import NAMESPACE, actor_name

LIMIT = 0.005
NEVER, NUM_DRAWS, SWITCHING = 1_000_000, 4000, 2
SCRAPE_S = 5.0
SIDES = ("without", "with")
Figures = dict[str, Any]


class Scraper:
    """Reads the node's endpoint as Prometheus does while it is switched on, and counts this run's series."""

    def __init__(self, url: str) -> None:
        self.url, self.is_on, self.num_series, self.num_scrapes = url, False, 0, 0

    @contextmanager
    def running(self) -> Iterator[None]:
        over = threading.Event()
        thread = threading.Thread(target=self._scrape, args=(over,))
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _scrape(self, over: threading.Event) -> None:
        while not over.wait(SCRAPE_S):
            if self.is_on:
                with urllib.request.urlopen(self.url, timeout=SCRAPE_S) as answer:
                    text = answer.read().decode()
                self.num_series = sum("elastic_ring_" in line for line in text.splitlines() if line[:1] != "#")
                self.num_scrapes += 1


def exporters() -> list[psutil.Process]:
    """The coordinator and the agent of this process's own Ray."""
    found = [psutil.Process(pid) for pid in runs.actor_pids("Coordinator")]
    for process in psutil.Process().children(recursive=True):
        if process.cmdline()[:1] == ["ray::DashboardAgent"]:  # as it calls itself once it is up
            found.append(process)
    if len(found) < 2:
        raise runs.WatchFailed(f"found {len(found)} of the coordinator and Ray's agent")
    return found


def cpu_s(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def alternate(
    name: str, scraper: Scraper, num_blocks: int, block_steps: int, everything: bool, run: runs.Watcher
) -> list[Figures]:
    """A row for each block: which side, its steps' times and its share of a core."""
    run.whole(1)
    coordinator = ray.get_actor(actor_name(name, "coordinator"), namespace=NAMESPACE)
    processes, rows = exporters(), list[Figures]()
    for block in range(2 * num_blocks):
        side = SIDES[(block + block // 2) % 2]
        scraper.is_on = side == "with"
        switch(coordinator, side == "with")
        if everything:
            switch_measuring(name, side == "with")
        begun, used = time.monotonic(), cpu_s(processes)
        first = len(run.steps())
        run.more_steps(block_steps)
        share = (cpu_s(processes) - used) / (time.monotonic() - begun)
        moments = [line["committed_monotonic_s"] for line in run.steps()[first : first + block_steps]]
        rows.append({"side": side, "step_s": np.diff(moments)[SWITCHING - 1 :].tolist(), "cores": share})
        results.show(f"  block {block + 1} of {2 * num_blocks}, {side}: {np.mean(rows[-1]['step_s']):.3f} s a step")
    return rows[2:]


def switch(coordinator: Any, on: bool) -> None:
    """Let the coordinator export from now on, or not: it looks when it exported last."""

    def exported_at(actor: Any) -> None:
        actor.services.metrics._exported_at = float("-inf" if on else "inf")

    ray.get(coordinator.__ray_call__.remote(exported_at), timeout=30.0)


def switch_measuring(name: str, on: bool) -> None:
    """Let the run's workers and agents measure what only metrics need, or not."""
    of_run = actor_name(name, "")
    known = ray.util.list_named_actors(all_namespaces=True)
    names = [one["name"] for one in known if one["namespace"] == NAMESPACE and one["name"].startswith(of_run)]
    others = [one for one in names if one != actor_name(name, "coordinator")]
    is_agent = {one: one.startswith(actor_name(name, "agent:")) for one in others}
    if not {True, False} <= set(is_agent.values()):
        raise runs.WatchFailed(f"no agent or no worker among the run's actors: {', '.join(others)}")
    asked = []
    for one in others:
        measures = agent_measures if is_agent[one] else worker_measures
        asked.append(ray.get_actor(one, namespace=NAMESPACE).__ray_call__.remote(measures, on))
    ray.get(asked, timeout=60.0)


def worker_measures(_: Any, on: bool) -> None:
    """Runs in a worker."""
    from elastic_ring.monitor import stamps
    from elastic_ring.runtime.worker import member
    from elastic_ring.train import transaction

    class NoClock:
        def __init__(self, *_: object) -> None:
            pass

        def stop(self, _: object) -> None:
            pass

        def per_sequence_s(self, _: int) -> float:
            return 0.0

    def stamp(self: Any, step: int, phase: int, hop: int = -1) -> None:
        """A stamp without a clock."""
        self._counter = counter = self._counter + 1
        self.phase, words = phase, self._words
        words[stamps._BEGUN_SLOT] = counter
        stamps._BODY.pack_into(words, stamps._BODY_AT, step, self.generation, phase, hop, self._now_ns())
        words[stamps._COUNTER_SLOT] = counter

    places: list[tuple[Any, str, Any]] = [
        (member, "gpu_memory", dict),
        (transaction, "WorkClock", NoClock),
        (stamps.StampWriter, "stamp", stamp),
    ]
    for place, what, without in places:
        own = f"_bench_{what}"
        if not hasattr(place, own):
            setattr(place, own, getattr(place, what))
        setattr(place, what, getattr(place, own) if on else without)


def agent_measures(agent: Any, on: bool) -> None:
    """Runs in a node's agent; a worker's step and phase are told in any case, as status needs them."""

    def nothing(*_: object) -> None:
        return None

    for place, what in ((agent._memory, "process"), (agent._memory, "pressure"), (agent._health, "look")):
        if on:
            vars(place).pop(what, None)  # the class has its own
        else:
            setattr(place, what, nothing)


def measure(num_blocks: int, block_steps: int, everything: bool = False) -> tuple[list[Figures], Scraper]:
    with runs.scratch() as folder, runs.local_ray():
        name = "bench-metrics"
        options = ["--preset", "laptop", "--faults", "none", "--steps", str(NEVER), "--run-dir", str(folder / name)]
        trainer = train.build(train.parse(options))
        trainer.run_config = RunConfig(name, run_dir=str(folder / name), progress=False)
        scraper = Scraper(f"http://127.0.0.1:{ray.nodes()[0]['MetricsExportPort']}/metrics")
        with scraper.running():
            rows = runs.train_while(
                trainer, lambda run: alternate(name, scraper, num_blocks, block_steps, everything, run)
            )
    if not scraper.num_series:
        raise runs.WatchFailed(f"{scraper.num_scrapes} scrapes of {scraper.url} showed no metric of the run")
    return rows, scraper


def report(rows: list[Figures], scraper: Scraper) -> tuple[str, Figures, bool]:
    blocks = {side: np.array([np.mean(row["step_s"]) for row in rows if row["side"] == side]) for side in SIDES}
    cores = {side: float(np.mean([row["cores"] for row in rows if row["side"] == side])) for side in SIDES}
    without, with_them = blocks["without"], blocks["with"]
    draws = np.random.default_rng(0).integers(len(without), size=(NUM_DRAWS, len(without)))
    ratios = [with_them[draw].mean() / without[draw].mean() for draw in draws]
    ratio = float(with_them.mean() / without.mean())
    low, high = (float(np.percentile(ratios, percent)) for percent in (5, 95))
    more = (cores["with"] - cores["without"]) / (os.cpu_count() or 1)
    table = [[one, float(blocks[one].mean()), cores[one]] for one in SIDES]
    text = "\n".join(
        [
            results.table(["metrics", "step s", "CPU, cores"], table),
            f"{len(without)} pairs of blocks; {scraper.num_series} series, {scraper.num_scrapes} scrapes",
            f"step {100 * (ratio - 1):+.2f} % (90 % of draws from {100 * (low - 1):+.2f} to {100 * (high - 1):+.2f} %)",
            f"CPU of coordinator and agent {100 * more:+.3f} % of the machine's cores",
        ]
    )
    record = {
        "rows": rows,
        "ratio": ratio,
        "from": low,
        "to": high,
        "cores": cores,
        "cores_share": more,
        "series": scraper.num_series,
    }
    return text, record, ratio - 1 <= LIMIT


def main() -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--blocks", type=at_least_one, default=20, help="pairs of blocks, one more for warming up")
    parser.add_argument("--everything", action="store_true", help="without: nothing is measured for metrics, either")
    parser.add_argument("--block-steps", type=at_least_one, default=12)
    parser.add_argument(
        "--save", action="store_true", help="write the table and a JSON into benchmarks/results/training/"
    )
    options = parser.parse_args()
    text, record, good = report(*measure(options.blocks + 1, options.block_steps, options.everything))
    record["everything"] = options.everything
    results.show("\n" + text)
    if options.save:
        results.save("training", "bench_metrics", text, record)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
