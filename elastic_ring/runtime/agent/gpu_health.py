"""Reads a node's GPUs through NVML: use, power, temperature, memory errors, slowdowns, and Xid errors as they happen.

NVML is the optional package nvidia-ml-py; without it, or without a driver, readings are empty. It needs no root.
Calls may hang if a GPU has fallen off its bus: only `health.HealthThread` may make them. No CUDA and no torch here.
"""

from __future__ import annotations

import importlib
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, TypedDict

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
