"""A node's health beside its workers: network counters, and GPUs where there are any. Read in a thread of its own.

A call to a driver may hang; deaths and hangs of workers must be noticed all the same. No decisions here.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from elastic_ring.runtime.agent.gpu_health import Nvml, Reading, worse
from elastic_ring.runtime.agent.network_counters import network_counters

log = logging.getLogger(__name__)

HEALTH_S = 5.0
"""Between two readings: reading eight GPUs takes some milliseconds of one core."""


class HealthThread:
    """The newest reading, and news of GPUs that get worse. `tell` is called with a sentence, in the thread."""

    def __init__(self, tell: Callable[[str], None], network: Callable[[], dict[str, int]] = network_counters) -> None:
        self._tell, self._network = tell, network
        self._newest: dict[str, Any] | None = None
        self._gpus: dict[str, Reading] = {}

    def open(self) -> None:
        threading.Thread(target=self._watch, name="health", daemon=True).start()

    def take(self) -> dict[str, Any] | None:
        """The newest reading, once; None while there is no newer one."""
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
