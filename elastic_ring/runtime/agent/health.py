"""A node's health beside its workers: network counters, its resolver, and its GPUs.

Threads of their own make the readings: a call to a driver may hang, and deaths and hangs of workers must be noticed all
the same. No decisions here.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from elastic_ring.runtime.agent.gpu_health import Nvml, Reading, worse
from elastic_ring.runtime.agent.messages import NodeHealth

log = logging.getLogger(__name__)

LIMIT_S = 2.0
"""A resolver that is reachable answers, or refuses, within a second."""
HEALTH_S = 5.0
"""Between two readings: reading eight GPUs takes some milliseconds of one core."""

ERRORS = (
    "symbol_error",
    "link_error_recovery",
    "link_downed",
    "port_rcv_errors",
    "port_rcv_remote_physical_errors",
    "local_link_integrity_errors",
    "excessive_buffer_overrun_errors",
)
DROPS = ("port_xmit_discards", "VL15_dropped")
WORD_BYTES = 4
"""InfiniBand counts data in words."""
NETWORK_KEYS = ("errors", "drops")
INFINIBAND_KEYS = ("infiniband_errors", "infiniband_drops", "infiniband_sent_bytes", "infiniband_received_bytes")


def network_counters(root: str | os.PathLike[str] = "/") -> dict[str, int]:
    """Sums since boot over all interfaces but the loopback; of InfiniBand only where there are ports. `root`: where
    /sys is."""
    sums = {"errors": 0, "drops": 0}
    for name, counters in psutil.net_io_counters(pernic=True).items():
        if name != "lo":
            sums["errors"] += counters.errin + counters.errout
            sums["drops"] += counters.dropin + counters.dropout
    return sums | infiniband_counters(root)


def infiniband_counters(root: str | os.PathLike[str]) -> dict[str, int]:
    """{} without a port."""
    folders = sorted(Path(root, "sys/class/infiniband").glob("*/ports/*/counters"))
    if not folders:
        return {}

    def total(*names: str) -> int:
        """Without the counters that a driver lacks."""
        values = 0
        for path in (folder / name for folder in folders for name in names):
            with suppress(OSError, ValueError):
                values += int(path.read_text())
        return values

    return {
        "infiniband_errors": total(*ERRORS),
        "infiniband_drops": total(*DROPS),
        "infiniband_sent_bytes": WORD_BYTES * total("port_xmit_data"),
        "infiniband_received_bytes": WORD_BYTES * total("port_rcv_data"),
    }


def lookup_s(address: str) -> float:
    """Seconds that a look-up of the name of `address` takes, at most about LIMIT_S; it need not have a name. torch
    looks the name up at each rendezvous: with a resolver that does not answer that takes ten seconds longer."""

    def look() -> None:
        with suppress(OSError):  # an unknown address is a quick answer, too
            socket.getnameinfo((address, 0), 0)

    begun, thread = time.monotonic(), threading.Thread(target=look, name="resolver", daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    return time.monotonic() - begun


def resolver_warning(node: str, address: str, took_s: float) -> str:
    """A warning for a node whose look-up took so long; empty if that is fast enough."""
    if took_s < LIMIT_S:
        return ""
    return (
        f"node {node}: its resolver does not answer for its own address {address} within {LIMIT_S:g} s, which makes "
        "every rendezvous up to 10 s longer. Name the nodes in /etc/hosts there, or take the resolver out of "
        "/etc/resolv.conf"
    )


class HealthThread:
    """Keeps the newest reading, and calls `tell` in its thread with a sentence for each GPU that gets worse."""

    def __init__(self, tell: Callable[[str], None], network: Callable[[], dict[str, int]] = network_counters) -> None:
        self._tell, self._network = tell, network
        self._newest: NodeHealth | None = None
        self._gpus: dict[str, Reading] = {}

    def open(self) -> None:
        threading.Thread(target=self._watch, name="health", daemon=True).start()

    def take(self) -> NodeHealth | None:
        """The newest reading, once; None while there is none newer."""
        newest, self._newest = self._newest, None
        return newest

    def _watch(self) -> None:
        nvml = Nvml()
        try:
            has_gpus = nvml.open()
        except Exception:
            log.exception("could not begin to read the GPUs")
            has_gpus = False
        while True:
            try:
                self.look(nvml.read() if has_gpus else {})
                if not (has_gpus and nvml.wait(HEALTH_S)):
                    time.sleep(HEALTH_S)
            except Exception:
                log.exception("could not read the node's health; tries again")
                time.sleep(HEALTH_S)

    def look(self, gpus: dict[str, Reading]) -> None:
        """Add a reading of the GPUs to the network's."""
        for text in worse(self._gpus, gpus):
            self._tell(text)
        self._gpus = gpus
        self._newest = {"network": self._network(), "gpus": gpus}
