"""Asks the autoscaler for what the run wants, in a thread: Ray's answers may take long, and decisions must not wait.

How much that is comes from `demand`. A run asks from the moment when the cluster has too little room for what
it wants until all that it can have is placed; a static cluster that holds all of it is never asked.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from elastic_ring.config import ScalingConfig
from elastic_ring.control.capacity.scaling import Ask, next_ask, outstanding, sizes
from elastic_ring.control.state import Ended, Finishing, Idle, State
from elastic_ring.runtime.driver.cluster import NodeInfo
from elastic_ring.runtime.driver.room import autoscaler_of, num_room
from elastic_ring.runtime.ray_head import RENEW_S

log = logging.getLogger(__name__)

LOOK_S = 1.0
FAILED_S = 10.0
UNKNOWN = -1
"""The last request of an earlier coordinator."""
PLACED_S = 30.0
"""Room that nobody of the run got within this long is somebody else's."""


@dataclass(frozen=True)
class Wish:
    """What a state of the run wants: useful numbers of workers, rising, none for nothing; how many have a process; and
    for how many the nodes that stay have room, None before Ray has listed any; and how many rings it may have."""

    wanted: tuple[int, ...]
    num_placed: int
    num_room: int | None
    most_rings: int = 1


def wish_of(state: State, nodes: Iterable[NodeInfo]) -> Wish:
    """`nodes`: those that Ray lists."""
    scaling, nodes = state.options.scaling, tuple(nodes)
    placed = [worker for worker in state.workers.values() if worker.status != "stopping" and not worker.draining]
    over = isinstance(state.phase, Idle | Finishing | Ended)
    wanted = () if over else sizes(scaling.min_dp, scaling.most_rings, scaling.cp, scaling.spares)
    room = num_room(nodes, scaling.most_rings * scaling.cp) if nodes else None
    return Wish(wanted, len(placed), room, scaling.most_rings)


class DemandKeeper:
    """The requests of one run. `tell` is called in the thread, with text and number of each request that differs.

    `nodes()`: those that Ray lists, none before it has.
    """

    def __init__(
        self,
        run: str,
        scaling: ScalingConfig,
        tell: Callable[[dict[str, Any]], None],
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
        """What the run wants now; called by the deciding thread."""
        self._wish = wish_of(state, self._nodes())

    def close(self, timeout_s: float) -> None:
        """Withdraw the request. What cannot be withdrawn within `timeout_s` expires by itself."""
        self._over.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.warning("could not withdraw the request to the autoscaler yet; it expires by itself")

    def _keep(self) -> None:
        while not self._over.wait(LOOK_S):
            self._guarded(self._step)
        if self._sent:
            self._guarded(self._withdraw)

    def _guarded(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:
            # Ray's control plane may be away for a while, or have no head resource: training does not need it.
            log.exception("could not ask the autoscaler; tries again")
            self._over.wait(FAILED_S)

    def _step(self) -> None:
        wish, now = self._wish, time.monotonic()
        if wish.num_room is None or (self._sent is None and not self._begins(wish.num_room, wish, now)):
            return
        self._autoscaler.most_rings = wish.most_rings
        before, asked = self._ask, self._ask.num_workers
        is_refused = asked > 0 and self._sent == asked and self._autoscaler.is_refused(asked)
        self._ask = next_ask(self._ask, wish.wanted, wish.num_room, is_refused, now)
        if before.is_trial and not self._ask.is_trial and not is_refused:
            self._tell({"text": f"the autoscaler has more: room for {wish.num_room}", "num_workers": asked})
        num_workers = outstanding(self._ask, wish.num_placed)
        if num_workers == self._sent and (not self._sent or now < self._sent_at + RENEW_S):
            return
        why = f"{asked} were refused" if is_refused else f"there is room for {wish.num_room}"
        if not num_workers and wish.wanted:
            why += f", {wish.num_placed} are placed"
        self._send(num_workers, "" if self._ask.is_trial or (before.is_trial and is_refused) else why)

    def _begins(self, num_room: int, wish: Wish, now: float) -> bool:
        """Whether the cluster has too little room, or room that others use."""
        if not wish.wanted or wish.num_placed >= wish.wanted[-1]:
            self._short_since = None
            return False
        self._short_since = self._short_since or now
        return num_room < wish.wanted[-1] or now >= self._short_since + PLACED_S

    def _send(self, num_workers: int, why: str) -> None:
        """Log and journal it only with a reason: a trial, twice a minute, says nothing new."""
        self._autoscaler.ask(num_workers)
        if num_workers != self._sent and why:
            told = f"asks the autoscaler for {num_workers} worker(s)" if num_workers else "withdraws its request"
            self._tell({"text": f"{told}: {why}", "num_workers": num_workers})
        self._sent, self._sent_at = num_workers, time.monotonic()

    def _withdraw(self) -> None:
        self._send(0, "the run is over")
