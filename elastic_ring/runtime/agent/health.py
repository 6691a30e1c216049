"""A node's health beside its workers: network counters, its resolver, and its GPUs through NVML (use, power,
temperature, memory errors, slowdowns, and Xid errors as they happen).

NVML is the optional package nvidia-ml-py; without it, or without a driver, readings are empty. It needs no root.
Threads of their own make the readings: a call to a driver may hang, for example if a GPU has fallen off its bus, and
deaths and hangs of workers must be noticed all the same. No decisions, no CUDA and no torch here.
"""

from __future__ import annotations

import importlib
import logging
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypedDict

import psutil

from elastic_ring.runtime.agent.messages import NodeHealth, Reading

log = logging.getLogger(__name__)

GPU_KEYS = (
    "utilisation",
    "power_watts",
    "temperature_celsius",
    "ecc_errors",
    "remapped_rows",
    "needs_reset",
    "xid_errors",
    "slowed",
)
"""Readings of one GPU: shares of 1, watts, degrees; uncorrected memory errors since the driver's start; rows of memory
that were remapped (pages retired, on older GPUs), 1 if one waits for a reset or could not be remapped; Xid errors that
the agent saw; 1 while it is slowed down for heat, or by its hardware."""
RISING = {
    "ecc_errors": "uncorrected memory error(s)",
    "remapped_rows": "remapped memory row(s)",
    "needs_reset": "memory row(s) to remap that wait for a reset, or cannot be remapped",
    "xid_errors": "Xid error(s)",
}
"""Counters that rise before a GPU fails."""
OF_PROGRAMS = frozenset({13, 31, 43, 45, 68, 69, 94, 109})
"""Xid errors that a program's own fault, or its end, causes on a healthy GPU (a contained memory error, 94, also counts
as a memory error)."""


class GpuReport(TypedDict, total=False):
    """`Nvml.describe` of one GPU; readings that it lacks are missing."""

    index: int
    name: str
    used_bytes: int
    total_bytes: int
    max_clock_mhz: int
    needs_reset: float
    ecc_errors: float
    slowed: float


class Nvml:
    """The GPUs of this node. Call `open` first, and nothing else if it returned False."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._handles: list[Any] = []
        self._events: Any = None
        self._xids: Counter[int] = Counter()

    def open(self) -> bool:
        """Whether there is a GPU that NVML knows."""
        try:
            self._nvml = importlib.import_module("pynvml")
            self._nvml.nvmlInit()
        except ImportError:
            log.info("nvidia-ml-py is not installed: the health of GPUs is unknown")
            return False
        except self._nvml.NVMLError as error:
            log.info("no NVML on this node: %s", error)
            return False
        self._handles = [self._nvml.nvmlDeviceGetHandleByIndex(i) for i in range(self._nvml.nvmlDeviceGetCount())]
        try:
            self._events = self._nvml.nvmlEventSetCreate()
            for handle in self._handles:
                self._nvml.nvmlDeviceRegisterEvents(handle, self._nvml.nvmlEventTypeXidCriticalError, self._events)
        except self._nvml.NVMLError as error:  # some virtual GPUs have none
            log.info("NVML reports no Xid errors here: %s", error)
            self._events = None
        return bool(self._handles)

    def wait(self, seconds: float) -> bool:
        """Wait for an Xid error; False if NVML cannot wait for any."""
        if self._events is None:
            return False
        try:
            event = self._nvml.nvmlEventSetWait_v2(self._events, int(1000 * seconds))
            index, xid = self._nvml.nvmlDeviceGetIndex(event.device), int(event.eventData)
        except self._nvml.NVMLError_Timeout:
            return True
        except self._nvml.NVMLError as error:  # a lost GPU, say; its other readings go on
            log.warning("NVML reports no more Xid errors: %s", error)
            self._events = None
            return False
        log.warning("GPU %d: Xid error %d", index, xid)
        self._xids[index] += is_of_the_device(xid)
        return True

    def read(self) -> dict[str, Reading]:
        """By the GPU's index; readings that a GPU lacks are missing."""
        return {str(index): self._read(index, handle) for index, handle in enumerate(self._handles)}

    def describe(self) -> list[GpuReport]:
        """The readings with each GPU's name, memory and highest clock (0 if unknown): for a look before a start."""
        reports = []
        for (index, reading), handle in zip(self.read().items(), self._handles, strict=True):
            try:
                clock = int(self._nvml.nvmlDeviceGetMaxClockInfo(handle, self._nvml.NVML_CLOCK_SM))
            except self._nvml.NVMLError:
                clock = 0
            name = self._nvml.nvmlDeviceGetName(handle)
            memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
            report: GpuReport = {
                **reading,  # type: ignore[typeddict-item]
                "index": int(index),
                "name": name if isinstance(name, str) else name.decode(),
                "used_bytes": int(memory.used),
                "total_bytes": int(memory.total),
                "max_clock_mhz": clock,
            }
            reports.append(report)
        return reports

    def _read(self, index: int, handle: Any) -> Reading:
        nvml = self._nvml
        getters: dict[str, Callable[[], float]] = {
            "utilisation": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
            "power_watts": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            "temperature_celsius": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            "ecc_errors": lambda: nvml.nvmlDeviceGetTotalEccErrors(
                handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
            ),
            "slowed": lambda: is_slowed(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)),
        }
        reading: Reading = {"xid_errors": self._xids[index]} if self._events is not None else {}
        for key, get in getters.items():
            try:
                reading[key] = float(get())
            except nvml.NVMLError as error:
                log.debug("GPU %d has no reading of %s: %s", index, key, error)
        return reading | self._memory(handle)

    def _memory(self, handle: Any) -> Reading:
        """The remapped rows; retired pages on GPUs before Ampere; {} if NVML reports neither."""
        nvml = self._nvml
        try:
            corrected, uncorrected, is_pending, has_failed = nvml.nvmlDeviceGetRemappedRows(handle)
            return {"remapped_rows": corrected + uncorrected, "needs_reset": float(bool(is_pending or has_failed))}
        except nvml.NVMLError:
            pass
        causes = (
            nvml.NVML_PAGE_RETIREMENT_CAUSE_MULTIPLE_SINGLE_BIT_ECC_ERRORS,
            nvml.NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR,
        )
        try:
            pages = sum(len(list(nvml.nvmlDeviceGetRetiredPages(handle, cause))) for cause in causes)
            return {"remapped_rows": pages, "needs_reset": float(nvml.nvmlDeviceGetRetiredPagesPendingStatus(handle))}
        except nvml.NVMLError:
            return {}


# ---------------------------------------------------------------- judgements


def is_of_the_device(xid: int) -> bool:
    """Whether an Xid error is the GPU's, and not of the program on it."""
    return xid not in OF_PROGRAMS


def is_slowed(reasons: int) -> bool:
    """Whether NVML's reasons for a lower clock contain heat or the hardware (its power brake, too): a power limit in
    software, and an idle GPU, are none."""
    hardware, software_heat, hardware_heat, power_brake = 0x08, 0x20, 0x40, 0x80
    return bool(reasons & (hardware | software_heat | hardware_heat | power_brake))


def worse(before: Mapping[str, Reading], now: Mapping[str, Reading]) -> list[str]:
    """A sentence for each GPU whose counters have risen between two readings, or were not 0 at its first reading
    (`before` lacks it then)."""
    sentences = []
    for index, reading in now.items():
        earlier = before.get(index, {})
        risen = {key: reading[key] - earlier.get(key, 0.0) for key in RISING if key in reading}
        shown = ", ".join(f"{risen[key]:.0f} {errors}" for key, errors in RISING.items() if risen.get(key, 0.0) > 0)
        if shown:
            since = "since the last look" if index in before else "from before"
            sentences.append(f"GPU {index} has {shown} {since}: it may fail; look at dmesg and nvidia-smi -q")
    return sentences


# ---------------------------------------------------------------- network, resolver, and the thread that reads

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
