"""Services of a run beside training: they watch its corpus, ask the autoscaler, and export metrics. No decisions here.

The corpus and the autoscaler have a thread each: a store or Ray may answer late, and decisions must not wait.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from ray.util.metrics import Gauge, Histogram

from elastic_ring.config import RunConfig, ScalingConfig
from elastic_ring.control.capacity.scaling import Ask, next_ask, outstanding, sizes
from elastic_ring.control.state import Ended, Finishing, Idle, State
from elastic_ring.data.manifest import Manifest
from elastic_ring.data.prepared import longer_manifest, may_grow, pinned_manifest
from elastic_ring.files import shown_url, with_access
from elastic_ring.runtime.coordinator.folds.metrics_table import TABLE, Metric, Reading
from elastic_ring.runtime.coordinator.inbox import DemandNoted
from elastic_ring.runtime.coordinator.recorder import RunRecorder
from elastic_ring.runtime.driver.cluster import NodeInfo
from elastic_ring.runtime.driver.room import autoscaler_of, num_room
from elastic_ring.runtime.ray_head import RENEW_S
from elastic_ring.train.task import TrainingTask

log = logging.getLogger(__name__)

LOOK_S = 1.0
FAILED_S = 10.0
UNKNOWN = -1
"""The last request of an earlier coordinator."""
PLACED_S = 30.0
"""After this long, room that no worker of the run got is another run's."""
EXPORT_S = 4.0
"""A gauge that is not set again disappears from Ray's endpoint after 20 to 30 s."""
BUCKETS_S = [0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 300.0]


@dataclass(frozen=True)
class Services:
    corpus: CorpusWatcher
    demand: DemandKeeper
    metrics: MetricsExporter


class CorpusWatcher:
    """Watches the folder of a run's manifest until the corpus is complete.

    Its thread calls `grew(uri, digest)` for each longer manifest, and `refused(text)` once for each damaged file.
    """

    def __init__(
        self, data: Any, look_s: float, grew: Callable[[str, str], None], refused: Callable[[str], None]
    ) -> None:
        """Watches nothing where `look_s` is 0, the data have no manifest, or they say themselves how they grow."""
        self._is_on = look_s > 0 and may_grow(data)
        self._uri: str = data.uri if self._is_on else ""
        self._digest: str = data.digest if self._is_on else ""
        self._look_s, self._grew, self._refused = look_s, grew, refused
        self._manifest: Manifest | None = None  # the newest
        self._reported: set[tuple[str, ...]] = set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="corpus", daemon=True)

    def open(self, state: State) -> None:
        """Go on behind the last manifest that `state` knows."""
        if not self._is_on:
            return
        newest = state.grown or (state.corpus[-1] if state.corpus else None)
        if newest is not None:
            self._uri, self._digest = with_access(newest.uri, self._uri), newest.digest
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """A thread that waits for a store is left behind; its result no longer counts."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _watch(self) -> None:
        while not self._over.is_set() and not (self._manifest is not None and self._manifest.is_complete):
            try:
                self._look()
            except ValueError as error:
                file_and_fault = str(error).split(": ", 2)[:2]
                if not self._over.is_set() and self._is_new(*file_and_fault):
                    self._refused(
                        f"the corpus does not grow for now, and training goes on with what is in use: {error}"
                    )
            except Exception as error:
                if self._is_new(type(error).__name__):
                    log.exception("could not look for a longer manifest; tries again")
            self._over.wait(self._look_s)

    def _look(self) -> None:
        if self._manifest is None:  # the longer one must begin with this
            try:
                self._manifest = pinned_manifest(self._uri, self._digest)
            except ValueError as error:
                raise ValueError(f"{error}; expected the manifest in use, of digest {self._digest[:16]}") from error
        longer = longer_manifest(self._uri, self._manifest)
        if longer is None or self._over.is_set():
            return
        self._uri, self._manifest = longer
        self._grew(shown_url(self._uri), self._manifest.digest)

    def _is_new(self, *reason: str) -> bool:
        is_new = reason not in self._reported
        self._reported.add(reason)
        return is_new


@dataclass(frozen=True)
class Wish:
    """The demand of a state of the run. `sizes`: useful numbers of workers, rising, empty for none. `num_placed`:
    workers with a process. `num_room`: of the nodes that stay, None before Ray has listed any."""

    sizes: tuple[int, ...]
    num_placed: int
    num_room: int | None
    most_rings: int = 1


def wish_of(state: State, nodes: Iterable[NodeInfo]) -> Wish:
    """`nodes`: as Ray lists them."""
    scaling, nodes = state.options.scaling, tuple(nodes)
    placed = [worker for worker in state.workers.values() if worker.status != "stopping" and not worker.draining]
    over = isinstance(state.phase, Idle | Finishing | Ended)
    useful = () if over else sizes(scaling.min_dp, scaling.most_rings, scaling.cp, scaling.spares)
    room = num_room(nodes, scaling.most_rings * scaling.cp) if nodes else None
    return Wish(useful, len(placed), room, scaling.most_rings)


class DemandKeeper:
    """Keeps the autoscaler's request of one run. A run asks from the moment when the cluster has too little room for it
    until all that it can have is placed. `tell` is called in the thread for each request that differs.

    `nodes()`: as Ray lists them, empty before it has.
    """

    def __init__(
        self,
        run: str,
        scaling: ScalingConfig,
        tell: Callable[[DemandNoted], None],
        nodes: Callable[[], Iterable[NodeInfo]],
    ) -> None:
        self._autoscaler = autoscaler_of(run, scaling)
        self._tell, self._nodes = tell, nodes
        self._wish = Wish((), 0, None)
        self._ask = Ask()
        self._sent: int | None = None
        self._sent_at = 0.0
        self._short_since: float | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="demand", daemon=True)

    def open(self, *, goes_on: bool) -> None:
        """`goes_on`: an earlier coordinator has asked: its request is renewed, or withdrawn, at the first look."""
        self._sent = UNKNOWN if goes_on else None
        self._thread.start()

    def look(self, state: State) -> None:
        """Take the present demand; called by the deciding thread."""
        self._wish = wish_of(state, self._nodes())

    def close(self, timeout_s: float) -> None:
        """Withdraw the request; one that cannot be withdrawn within `timeout_s` expires by itself."""
        self._over.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.warning("could not withdraw the request to the autoscaler yet; it expires by itself")

    def _keep(self) -> None:
        while not self._over.wait(LOOK_S):
            self._guarded(self._step)
        if self._sent:
            self._guarded(partial(self._send, 0, "the run is over"))

    def _guarded(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:
            # Ray's control plane may be away for a while, or have no head resource: training does not need it.
            log.exception("could not ask the autoscaler; tries again")
            self._over.wait(FAILED_S)

    def _step(self) -> None:
        wish, now = self._wish, time.monotonic()
        if wish.num_room is None:
            return
        if self._sent is None:  # until the cluster has too little room, or room that other runs use
            if not wish.sizes or wish.num_placed >= wish.sizes[-1]:
                self._short_since = None
                return
            self._short_since = self._short_since or now
            if wish.num_room >= wish.sizes[-1] and now < self._short_since + PLACED_S:
                return
        self._autoscaler.most_rings = wish.most_rings
        before, num_asked = self._ask, self._ask.num_workers
        is_refused = num_asked > 0 and self._sent == num_asked and self._autoscaler.is_refused(num_asked)
        self._ask = next_ask(self._ask, wish.sizes, wish.num_room, is_refused, now)
        if before.is_trial and not self._ask.is_trial and not is_refused:
            self._tell(DemandNoted(f"the autoscaler has more: room for {wish.num_room}", num_asked))
        num_workers = outstanding(self._ask, wish.num_placed)
        if num_workers == self._sent and (not self._sent or now < self._sent_at + RENEW_S):
            return
        reason = f"{num_asked} were refused" if is_refused else f"there is room for {wish.num_room}"
        if not num_workers and wish.sizes:
            reason += f", {wish.num_placed} are placed"
        self._send(num_workers, "" if self._ask.is_trial or (before.is_trial and is_refused) else reason)

    def _send(self, num_workers: int, reason: str) -> None:
        """Log and journal it only with a reason: a trial, twice a minute, says nothing new."""
        self._autoscaler.ask(num_workers)
        if num_workers != self._sent and reason:
            text = f"asks the autoscaler for {num_workers} worker(s)" if num_workers else "withdraws its request"
            self._tell(DemandNoted(f"{text}: {reason}", num_workers))
        self._sent, self._sent_at = num_workers, time.monotonic()


class MetricsExporter:
    """Exports a run's metrics through Ray: a loop over `folds.metrics_table`. The deciding thread alone uses it."""

    def __init__(self, run: RunConfig, recorder: RunRecorder, step_flops: float | None = None) -> None:
        self._run, self._recorder = run, recorder
        self._reading = partial(Reading, run, recorder, step_flops, time.time())
        self._exported_at = -math.inf
        self._num_observed = len(recorder.recoveries.records)  # an earlier coordinator observed these
        self._exported: list[tuple[Metric, Gauge | Histogram]] = []
        self._closed = False

    def export(self, state: State, *, failed: bool | None = None) -> None:
        """Set every gauge, at most once in EXPORT_S. A defect in here ends the metrics, not the training. `failed`:
        whether the run ended with an error; this export is the last."""
        if self._closed or (failed is None and time.monotonic() - self._exported_at < EXPORT_S):
            return
        self._exported_at, self._closed = time.monotonic(), failed is not None
        try:
            reading = self._reading(state, self._num_observed, failed)
            for metric in () if self._exported else TABLE:
                is_gauge, names = metric.kind == "gauge", (metric.name, metric.meaning)
                exported = Gauge(*names, metric.labels) if is_gauge else Histogram(*names, BUCKETS_S, metric.labels)
                self._exported.append((metric, exported))
            for metric, exported in self._exported:
                export = exported.observe if isinstance(exported, Histogram) else exported.set
                for value, number in metric.samples(reading):
                    if number is not None and math.isfinite(number):  # Ray drops these without a word
                        export(float(number), dict(zip(metric.labels, (self._run.name, value), strict=False)))
            self._num_observed = len(self._recorder.recoveries.records)
        except Exception:
            log.exception("metrics are not exported any more")
            self._closed = True


def step_flops(task: TrainingTask) -> float | None:
    """None with a pattern: the attention that it leaves out is not known."""
    return task.flops * task.step.global_batch if task.flops is not None and task.pattern is None else None
