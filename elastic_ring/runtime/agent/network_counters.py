"""The error counters of a node's network interfaces and InfiniBand ports, as the kernel keeps them. No decisions."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import psutil

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
    found = {"errors": 0, "drops": 0}
    for name, counters in psutil.net_io_counters(pernic=True).items():
        if name != "lo":
            found["errors"] += counters.errin + counters.errout
            found["drops"] += counters.dropin + counters.dropout
    return found | infiniband_counters(root)


def infiniband_counters(root: str | os.PathLike[str]) -> dict[str, int]:
    """{} without a port."""
    folders = sorted(Path(root, "sys/class/infiniband").glob("*/ports/*/counters"))
    if not folders:
        return {}
    return {
        "infiniband_errors": sum(_counter(folder / name) for folder in folders for name in ERRORS),
        "infiniband_drops": sum(_counter(folder / name) for folder in folders for name in DROPS),
        "infiniband_sent_bytes": WORD_BYTES * sum(_counter(folder / "port_xmit_data") for folder in folders),
        "infiniband_received_bytes": WORD_BYTES * sum(_counter(folder / "port_rcv_data") for folder in folders),
    }


def _counter(path: Path) -> int:
    """0 where the driver has no such counter."""
    with suppress(OSError, ValueError):
        return int(path.read_text())
    return 0
