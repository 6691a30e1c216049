"""How often in a row a coordinator that Ray restarts could not begin for what its journal holds.

Each try is another process, so Ray's head keeps the number. No decision about training here.
"""

from __future__ import annotations

import logging

from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put

from elastic_ring.errors import ElasticRingError, StorageFailed

log = logging.getLogger(__name__)

LIMIT = 3
OF_CONTENT = (ElasticRingError, LookupError, TypeError, ValueError, AttributeError)
"""What reading a journal raises; not `StorageFailed` or `OSError`: a storage that is away is waited for."""


class FailedStarts:
    def __init__(self, coordinator: str, attempt: str) -> None:
        self._key = f"{coordinator}:{attempt}:failed starts".encode()

    def is_last(self, error: BaseException) -> bool:
        """Count this error; whether no further try is made."""
        if not isinstance(error, OF_CONTENT) or isinstance(error, StorageFailed):
            return False
        try:
            number = 1 + int(_internal_kv_get(self._key) or 0)
            _internal_kv_put(self._key, b"%d" % number)
        except Exception:
            log.exception("could not count a failed start; tries again")
            return False
        return number >= LIMIT

    def forget(self) -> None:
        _internal_kv_del(self._key)
