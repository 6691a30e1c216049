"""How long the head of the Ray cluster may be away, by the settings that a process finds in its environment.

Ray reads them where `ray start` runs, each node for itself, and hands them on to the processes that it starts there: so
the coordinator knows those of the head, each node agent those of its node, and a driver its own.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

log = logging.getLogger(__name__)

RECONNECT = "RAY_gcs_rpc_server_reconnect_timeout_s"
RECONNECT_S = 60
"""Ray's default."""


def reconnect_s(environment: Mapping[str, str]) -> float:
    """How long Ray's processes on this machine live without the head; then Ray ends them."""
    try:
        return float(environment.get(RECONNECT, RECONNECT_S))
    except ValueError as error:
        raise ValueError(f"{RECONNECT}={environment[RECONNECT]!r} is no number of seconds") from error


def is_kept(environment: Mapping[str, str]) -> bool:
    """Whether a head with this environment keeps the cluster's state outside its memory."""
    return environment.get("RAY_gcs_storage", "memory") == "rocksdb" or bool(environment.get("RAY_REDIS_ADDRESS"))


def warn_if_shorter(who: str, found_s: float, lease_s: float) -> str:
    """Warn, for a head that keeps the cluster's state, of a process that Ray ends before `lease_s` is over.

    Returns the warning; empty where there is none.
    """
    if found_s >= lease_s:
        return ""
    told = (
        f"the head of the Ray cluster may be away for {found_s:g} s only, not for timeouts.lease_s={lease_s:g}: Ray "
        f"then ends {who}. Set {RECONNECT}={math.ceil(lease_s)} or more there before Ray starts, or lower lease_s"
    )
    log.warning("%s", told)
    return told
