"""A node's GPUs as NVML sees them: use, power, temperature, memory errors, slowdowns, and Xid errors as they happen.

NVML is the optional package nvidia-ml-py; without it, or without a driver, readings are empty. It needs no root.
Calls may hang where a GPU has fallen off its bus: only `health.HealthThread` may make them. No CUDA and no torch here.
"""

from __future__ import annotations

import importlib
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

log = logging.getLogger(__name__)

Reading = dict[str, float]
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
"""What rises before a GPU fails."""
OF_PROGRAMS = frozenset({13, 31, 43, 45, 68, 69, 94, 109})
"""Xid errors that a program's own fault, or its end, causes on a healthy GPU (a contained memory error, 94, ends up in
the counts of memory errors)."""


class Nvml:
    """The GPUs of this node. `open` first; nothing else may be called where it returned False."""

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
        self._listen()
        return bool(self._handles)

    def _listen(self) -> None:
        """Have NVML collect Xid errors; some virtual GPUs have none."""
        try:
            self._events = self._nvml.nvmlEventSetCreate()
            for handle in self._handles:
                self._nvml.nvmlDeviceRegisterEvents(handle, self._nvml.nvmlEventTypeXidCriticalError, self._events)
        except self._nvml.NVMLError as error:
            log.info("NVML reports no Xid errors here: %s", error)
            self._events = None

    def wait(self, seconds: float) -> bool:
        """Wait for an Xid error; whether this waited, or one came."""
        if self._events is None:
            return False
        try:
            event = self._nvml.nvmlEventSetWait_v2(self._events, int(1000 * seconds))
            index, xid = self._nvml.nvmlDeviceGetIndex(event.device), int(event.eventData)
        except self._nvml.NVMLError_Timeout:
            return True
        except self._nvml.NVMLError as error:  # a GPU that is lost, say; its other readings go on
            log.warning("NVML reports no more Xid errors: %s", error)
            self._events = None
            return False
        log.warning("GPU %d: Xid error %d", index, xid)
        self._xids[index] += is_of_the_device(xid)
        return True

    def read(self) -> dict[str, Reading]:
        """By the GPU's index; readings that a GPU lacks are missing."""
        return {str(index): self._read(index, handle) for index, handle in enumerate(self._handles)}

    def describe(self) -> list[dict[str, Any]]:
        """The same with each GPU's name, memory and highest clock (0 if unknown): for a look before a start."""
        found = []
        for (index, reading), handle in zip(self.read().items(), self._handles, strict=True):
            try:
                clock = int(self._nvml.nvmlDeviceGetMaxClockInfo(handle, self._nvml.NVML_CLOCK_SM))
            except self._nvml.NVMLError:
                clock = 0
            name = self._nvml.nvmlDeviceGetName(handle)
            memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
            found.append(
                {
                    **reading,
                    "index": int(index),
                    "name": name if isinstance(name, str) else name.decode(),
                    "used_bytes": int(memory.used),
                    "total_bytes": int(memory.total),
                    "max_clock_mhz": clock,
                }
            )
        return found

    def _read(self, index: int, handle: Any) -> Reading:
        nvml = self._nvml
        asked: dict[str, Callable[[], float]] = {
            "utilisation": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
            "power_watts": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            "temperature_celsius": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            "ecc_errors": lambda: nvml.nvmlDeviceGetTotalEccErrors(
                handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
            ),
            "slowed": lambda: is_slowed(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)),
        }
        found: Reading = {"xid_errors": self._xids[index]} if self._events is not None else {}
        for key, ask in asked.items():
            try:
                found[key] = float(ask())
            except nvml.NVMLError as error:
                log.debug("GPU %d does not tell %s: %s", index, key, error)
        return found | self._memory(handle)

    def _memory(self, handle: Any) -> Reading:
        """Rows that were remapped; retired pages on GPUs before Ampere; {} if NVML reports neither."""
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


# ---------------------------------------------------------------- judgements, from what was read


def is_of_the_device(xid: int) -> bool:
    """Whether an Xid error says something of the GPU, and not of the program on it."""
    return xid not in OF_PROGRAMS


def is_slowed(reasons: int) -> bool:
    """Whether NVML's reasons for a lower clock contain heat or the hardware (its power brake, too): a power limit in
    software, and an idle GPU, are none."""
    hardware, software_heat, hardware_heat, power_brake = 0x08, 0x20, 0x40, 0x80
    return bool(reasons & (hardware | software_heat | hardware_heat | power_brake))


def worse(before: Mapping[str, Reading], now: Mapping[str, Reading]) -> list[str]:
    """A sentence for each GPU whose counters have risen between two readings, and for counts already there at its first
    reading (`before` lacks it then)."""
    told = []
    for index, reading in now.items():
        known = before.get(index, {})
        risen = {key: reading[key] - known.get(key, 0.0) for key in RISING if key in reading}
        shown = ", ".join(f"{risen[key]:.0f} {what}" for key, what in RISING.items() if risen.get(key, 0.0) > 0)
        if shown:
            since = "since the last look" if index in before else "from before"
            told.append(f"GPU {index} has {shown} {since}: it may fail; look at dmesg and nvidia-smi -q")
    return told
