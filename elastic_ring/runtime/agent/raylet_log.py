"""Whether Ray's own memory monitor took a worker: its raylet's log says whom it chose, and how much that one held."""

from __future__ import annotations

import re
from pathlib import Path

NAME = "raylet.out"
TAIL_BYTES = 256 << 10
_CHOSEN = re.compile(r"\bto kill\b|\bkill details\b|\bkilled due to the node running low on memory\b")
_VICTIM = re.compile(r"\bpid=(\d+), actual memory used=([0-9.]+)GB")


def ray_killed(log_path: str, pid: int) -> str:
    """What the raylet says of a worker that has just died by a signal; empty if nothing. `log_path`: the worker's own
    log, which lies beside the raylet's."""
    if not log_path:
        return ""
    try:
        with (Path(log_path).parent / NAME).open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    for line in reversed(lines):
        if _CHOSEN.search(line):
            held = dict(_VICTIM.findall(line))
            if str(pid) in held:
                return f"Ray's memory monitor killed it ({NAME}: pid={pid}, {held[str(pid)]} GB)"
    return ""
