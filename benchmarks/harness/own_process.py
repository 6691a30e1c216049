"""CPU time and memory of attention calls, each measurement in a process of its own so that peaks do not add up."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any


def cpu_cost(run: Callable[[], object], repeats: int, prepare: Callable[[], object] = lambda: None) -> dict[str, float]:
    """The least CPU seconds of `run`, and the resident peak in MiB above what the process held before.

    `prepare` is called before each run and not timed.
    """
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    times = []
    for _ in range(repeats):
        prepare()
        start_s = time.process_time()
        run()
        times.append(time.process_time() - start_s)
    extra_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return {"cpu_s": min(times), "extra_mib": extra_mib}


def in_own_process(script: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Run the script with `arguments`; the JSON object that it prints. Raises CalledProcessError where it fails."""
    done = subprocess.run([sys.executable, script, *arguments], check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found
