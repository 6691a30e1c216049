"""Looks for a longer manifest while a run trains, in a thread: a store may be slow, and decisions must not wait."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from elastic_ring.control.state import State
from elastic_ring.data.manifest import Manifest
from elastic_ring.data.prepared import longer_manifest, may_grow, pinned_manifest
from elastic_ring.files import shown_url, with_access

log = logging.getLogger(__name__)

Tell = Callable[[str, str], None]


class CorpusWatcher:
    """Watches the folder of a run's manifest until the corpus is complete.

    `grew(uri, digest)` is called in the thread for each longer manifest, `refused(text)` once for each reason why the
    corpus does not grow: what is wrong with which file.
    """

    def __init__(self, data: Any, look_s: float, grew: Tell, refused: Callable[[str], None]) -> None:
        """Watches nothing where `look_s` is 0, the data have no manifest, or they say themselves how they grow."""
        self._is_on = look_s > 0 and may_grow(data)
        self._uri: str = data.uri if self._is_on else ""
        self._digest: str = data.digest if self._is_on else ""
        self._look_s, self._grew, self._refused = look_s, grew, refused
        self._now: Manifest | None = None
        self._told: set[tuple[str, ...]] = set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="corpus", daemon=True)

    def open(self, state: State) -> None:
        """Go on behind the last manifest that `state` knows."""
        if not self._is_on:
            return
        newest = state.grown or (state.corpus[-1] if state.corpus else None)
        if newest is not None:
            self._uri, self._digest = with_access(newest.uri, self._uri), newest.digest
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """A thread that waits for a store is left behind; its result no longer counts."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _watch(self) -> None:
        while not self._over.is_set() and not (self._now is not None and self._now.is_complete):
            try:
                self._look()
            except ValueError as error:
                self._refuse(str(error))
            except Exception as error:
                if self._is_new(type(error).__name__):
                    log.exception("could not look for a longer manifest; tries again")
            self._over.wait(self._look_s)

    def _look(self) -> None:
        self._now = self._now or self._in_use()
        found = longer_manifest(self._uri, self._now)
        if found is None or self._over.is_set():
            return
        self._uri, self._now = found
        self._grew(shown_url(self._uri), self._now.digest)

    def _in_use(self) -> Manifest:
        """The manifest that the longer one must begin with."""
        try:
            return pinned_manifest(self._uri, self._digest)
        except ValueError as error:
            raise ValueError(f"{error}; expected the manifest in use, of digest {self._digest[:16]}") from error

    def _refuse(self, why: str) -> None:
        file_and_fault = why.split(": ", 2)[:2]
        if not self._over.is_set() and self._is_new(*file_and_fault):
            self._refused(f"the corpus does not grow for now, and training goes on with what is in use: {why}")

    def _is_new(self, *reason: str) -> bool:
        if reason in self._told:
            return False
        self._told.add(reason)
        return True
