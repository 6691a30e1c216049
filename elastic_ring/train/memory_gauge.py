"""How near a rank came to the end of its memory in a step. It reports this share in the vote.

On a GPU: the most that tensors took, and the free pieces between them that no large tensor fits into, of what torch
holds or could still get. On a CPU under a limit (RLIMIT_DATA): the process's data after each forward pass, when all
activations are there. The node's agent reports how full the node is.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path

import torch

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_STATM = Path("/proc/self/statm")
_DATA_FIELD = 5


class MemoryGauge:
    """One step after the other; `begin` resets torch's peak, which its statistics then tell of this step."""

    def __init__(self) -> None:
        self._share = 0.0

    def begin(self, device: torch.device) -> None:
        self._share = 0.0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def look(self, device: torch.device) -> None:
        """Behind a forward pass."""
        if device.type == "cpu":
            limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
            if limit not in (resource.RLIM_INFINITY, 0):
                data_bytes = int(_STATM.read_text().split()[_DATA_FIELD]) * _PAGE_BYTES
                self._share = max(self._share, data_bytes / limit)

    def share(self, device: torch.device) -> float:
        """The share used in this step so far, from 0 to about 1; 0 where nothing limits the device."""
        if device.type != "cuda":
            return self._share
        found = torch.cuda.memory_stats(device)
        free, _ = torch.cuda.mem_get_info(device)
        used = found["allocated_bytes.all.peak"] + found["inactive_split_bytes.all.current"]
        return float(used / max(1, free + found["reserved_bytes.all.current"]))
