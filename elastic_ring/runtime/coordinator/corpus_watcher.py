"""Looks for a longer manifest while a run trains, in a thread: a store may be slow, and decisions must not wait."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from elastic_ring.control.state import State
from elastic_ring.data.growth import longer_manifest
from elastic_ring.data.manifest import Manifest, read_manifest
from elastic_ring.data.source import PreparedTokens

log = logging.getLogger(__name__)

Tell = Callable[[str, str], None]


class CorpusWatcher:
    """Watches the folder of a run's manifest until the corpus is complete.

    `grew(uri, digest)` is called in the thread for each longer manifest, `refused(text)` once for each reason why one
    cannot be used.
    """

    def __init__(self, data: Any, look_s: float, grew: Tell, refused: Callable[[str], None]) -> None:
        """Watches nothing where `look_s` is 0, the data have no manifest, or they say themselves how they grow."""
        self._is_on = look_s > 0 and isinstance(data, PreparedTokens) and not data.later
        self._uri = data.uri if self._is_on else ""
        self._look_s, self._grew, self._refused = look_s, grew, refused
        self._now: Manifest | None = None
        self._told = ""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="corpus", daemon=True)

    def open(self, state: State) -> None:
        """Go on behind the last manifest that `state` knows."""
        if not self._is_on:
            return
        if state.grown is not None:
            self._uri = state.grown.uri
        elif state.corpus:
            self._uri = state.corpus[-1].uri
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """A thread that waits for a store is left behind: it tells nothing any more."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _watch(self) -> None:
        while not self._over.is_set() and not (self._now is not None and self._now.is_complete):
            try:
                self._look()
            except ValueError as error:
                self._refuse(str(error))
            except Exception:
                log.exception("could not look for a longer manifest; it is looked for again")
            self._over.wait(self._look_s)

    def _look(self) -> None:
        self._now = self._now or read_manifest(self._uri)
        found = longer_manifest(self._uri, self._now)
        if found is None or self._over.is_set():
            return
        self._uri, self._now = found
        self._grew(self._uri, self._now.digest)

    def _refuse(self, why: str) -> None:
        if why != self._told and not self._over.is_set():
            self._told = why
            self._refused(f"a longer manifest is not used, and training goes on with the corpus so far: {why}")
