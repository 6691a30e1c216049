"""Asks the provider, on each node, for a notice that this machine is about to be taken away.

A function without arguments answers None, or in how many seconds the machine goes. `RunConfig.notices` names it: `aws`,
`gcp` and `azure` are here, any other is MODULE:FUNCTION. The answer becomes Ray's drain notice. No decisions.
"""

from __future__ import annotations

import importlib
import logging
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from elastic_ring.files import plain_json

log = logging.getLogger(__name__)

Ask = Callable[[], float | None]

ASK_EVERY_S = 2.0
ANSWER_S = 2.0
METADATA = "http://169.254.169.254"
GCP_METADATA = "http://metadata.google.internal"
GCP_NOTICE_S = 30.0
"""The time that Google Cloud grants after its notice (compute/docs/instances/preemptible)."""


def find(name: str) -> Ask:
    """The function of this name. Raises: ValueError if there is none."""
    if name in PROVIDERS:
        return PROVIDERS[name]
    module, _, function = name.partition(":")
    try:
        ask: Ask = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"notices={name!r}: give one of {', '.join(PROVIDERS)}, or MODULE:FUNCTION that can be imported on each "
            f"node ({error})"
        ) from error
    return ask


class Notices:
    """Asks in a thread of its own, as a provider may take long to answer; calls `tell(in_s)` once, and `failed(text)`
    for each new reason without an answer. Raises: ValueError as `find`."""

    def __init__(self, name: str, tell: Callable[[float], None], failed: Callable[[str], None]) -> None:
        self._name, self._tell, self._failed = name, tell, failed
        self._ask = find(name)

    def open(self) -> None:
        threading.Thread(target=self._watch, name="notices", daemon=True).start()

    def _watch(self) -> None:
        last_reason, pause = "", threading.Event()
        while True:
            try:
                in_s = self._ask()
                if in_s is not None:
                    log.warning("the provider takes this machine away in %.0f s", in_s)
                    self._tell(in_s)
                    return
            except Exception as error:
                if f"{error}" != last_reason:  # logged once: off that provider there is never an answer
                    last_reason = f"{error}"
                    self._failed(f"notices={self._name!r} does not say whether this machine is taken away: {error}")
            pause.wait(ASK_EVERY_S)


def aws(base: str = METADATA) -> float | None:
    """EC2's instance-action of a spot instance, by IMDSv2: two minutes' notice."""
    token = _get(f"{base}/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "300"}, method="PUT")
    notice = _get(f"{base}/latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": token or ""})
    return None if notice is None else _seconds_until(datetime.fromisoformat(plain_json(notice)["time"]))


def gcp(base: str = GCP_METADATA) -> float | None:
    """Compute Engine's `preempted`; the machine goes half a minute later."""
    preempted = _get(f"{base}/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"})
    return GCP_NOTICE_S if preempted is not None and preempted.strip() == "TRUE" else None


def azure(base: str = METADATA) -> float | None:
    """Azure's scheduled events of the kinds that end this machine."""
    document = _get(f"{base}/metadata/scheduledevents?api-version=2020-07-01", {"Metadata": "true"})
    events = plain_json(document)["Events"] if document is not None else []
    ends = [event["NotBefore"] for event in events if event["EventType"] in ("Preempt", "Terminate")]
    return min((_seconds_until(parsedate_to_datetime(at)) if at else 0.0 for at in ends), default=None)


PROVIDERS: Mapping[str, Ask] = {"aws": aws, "gcp": gcp, "azure": azure}


def _get(url: str, headers: Mapping[str, str], method: str = "GET") -> str | None:
    """The answer; None for 404, by which EC2 says that there is no notice."""
    request = urllib.request.Request(url, headers=dict(headers), method=method)
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=ANSWER_S) as answer:
            text: str = answer.read().decode()
            return text
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return None
        raise


def _seconds_until(at: datetime) -> float:
    """Seconds from now, at least 0."""
    return max(0.0, (at - datetime.now(UTC)).total_seconds())
