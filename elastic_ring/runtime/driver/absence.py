"""A driver whose coordinator does not answer: it waits for `lease_s`, says so once, and says what to do when it ends.

With the head of the Ray cluster its coordinator is away too; both come back where the head keeps the cluster's state
(docs/operating/start.md, "The head node"). No decision about training belongs here.
"""

from __future__ import annotations

import logging
import socket
import time
from contextlib import suppress
from typing import Any, Never

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError

from elastic_ring.config import RunConfig
from elastic_ring.control.decisions.terms import TermClaim, refuse_if_replaced
from elastic_ring.errors import CoordinatorLost, StaleMessage, StorageFailed
from elastic_ring.runtime.terms import Terms

log = logging.getLogger(__name__)

ASK_S = 1.0  # between two looks at the head
CONNECT_S = 2.0


class Absence:
    """Whether the head of the cluster and the coordinator answer this driver, and since when they do not."""

    def __init__(self, run: RunConfig, gcs_address: str, attempt: str = "") -> None:
        """`attempt`: the submission that this driver follows."""
        self._run, self._gcs_address, self._attempt = run, gcs_address, attempt
        self._silent_since: float | None = None  # of the coordinator
        self._head_since: float | None = None  # of the head
        self._looked_at = 0.0

    def ask(self, coordinator: Any, last_step: int, num_lines: int) -> dict[str, Any] | None:
        """The coordinator's news; None while it is away.

        Raises: CoordinatorLost after `lease_s` without an answer; ActorDiedError when it is gone for good.
        """
        error: BaseException | None = None
        try:
            news = self._get(coordinator.follow.remote(last_step, num_lines))
        except (GetTimeoutError, ActorUnavailableError) as failed:
            # Ray restarts a coordinator that was killed; one that froze may resume.
            news, error = None, failed
        head_answers = self._look()
        if news is None:
            self._wait(error)
        else:
            self._silent_since = None
            if head_answers:
                self._back()
        return news

    def gone(self, error: BaseException) -> Never:
        """Raises CoordinatorLost for a coordinator that does not come back."""
        # Ray's further lines name what may have killed a process: memory, a crash.
        told = str(error).partition("\n")[0] or type(error).__name__
        self._give_up(f"the coordinator of run {self._run.name} is gone: {told}", error)

    def _get(self, answer: Any) -> dict[str, Any] | None:
        """Wait `hello_s` for an answer, but not for one that may never come: None when the head is away."""
        deadline = time.monotonic() + self._run.timeouts.hello_s
        while not ray.wait([answer], timeout=ASK_S)[0] and time.monotonic() < deadline:
            if not self._look():
                return None
        news: dict[str, Any] = ray.get(answer, timeout=ASK_S)
        return news

    def _look(self) -> bool:
        """Whether the head answered the last question; logs once when it does not."""
        now = time.monotonic()
        if now - self._looked_at < ASK_S:
            return self._head_since is None
        self._looked_at = now
        answers = is_listening(self._gcs_address)
        if not answers and self._head_since is None:
            self._head_since = now
            log.warning(
                "run %s: the head of the Ray cluster at %s does not answer; the workers train on without it. This "
                "driver waits up to %.0f s (timeouts.lease_s); should it end without another word, Ray has ended it: "
                "submit the same command again",
                self._run.name,
                self._gcs_address,
                self._run.timeouts.lease_s,
            )
        return answers

    def _wait(self, error: BaseException | None) -> None:
        lease_s, now = self._run.timeouts.lease_s, time.monotonic()
        self._silent_since = self._silent_since or now
        if now - self._silent_since > lease_s:
            who = "coordinator" if self._head_since is None else "head of the Ray cluster and no coordinator"
            self._give_up(f"no {who} answered run {self._run.name} for {lease_s:.0f} s (timeouts.lease_s)", error)
        time.sleep(min(ASK_S, lease_s / 10))

    def _back(self) -> None:
        if self._head_since is not None:
            away_s = time.monotonic() - self._head_since
            log.warning("run %s: the head and the coordinator answer again after %.0f s", self._run.name, away_s)
        self._head_since = None

    def _give_up(self, what: str, error: BaseException | None) -> Never:
        """Raises CoordinatorLost, logged first: without a head Ray may end this process before anybody prints it.
        TermLost where another submission has taken the run: to submit again would take it back."""
        try:
            terms = Terms(self._run).open()
            if terms.has_claimed(self._attempt):
                own = TermClaim(0, self._attempt)
                refuse_if_replaced(self._run.name, self._run.storage_uri, own, terms.newest())
        except StaleMessage:
            pass  # this submission's own newest
        except StorageFailed as failed:
            log.warning("could not find out whether another submission has taken the run: %s", failed)
        instead = "resumes from the newest checkpoint" if self._run.checkpoint_config.is_on else "begins anew"
        told = (
            f"{what}. Submit the same command again: it attaches to the run if that is still alive, else it {instead}"
        )
        log.error("%s", told)
        raise CoordinatorLost(told, lease_s=self._run.timeouts.lease_s) from error


def is_listening(gcs_address: str) -> bool:
    """Whether something listens where the head of the cluster was."""
    host, _, port = gcs_address.rpartition(":")
    with suppress(OSError):
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
        return True
    return False
