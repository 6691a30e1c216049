"""The terms of a run in its storage, `terms/000001` and so on, and the threads that look for a newer one.

What a newer term means is decided in `control.decisions.terms`.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from secrets import token_hex
from typing import cast

from elastic_ring.config import RunConfig
from elastic_ring.control.decisions.terms import (
    LOOK_S,
    NOBODY,
    TermClaim,
    Unanswered,
    newest_claim,
    refuse_if_replaced,
)
from elastic_ring.errors import ElasticRingError, StaleMessage, StorageFailed, TermLost
from elastic_ring.files import plain_json
from elastic_ring.monitor.metrics import JOURNAL_NAME
from elastic_ring.runtime.run_storage import CURRENT
from elastic_ring.state.storage.folder import Storage

log = logging.getLogger(__name__)

FOLDER = "terms"
WITHDRAWN = ".withdrawn"
TELL_AGAIN_S = 60.0
ASK_S = 5.0
"""Between questions of global rank 0 to the coordinator, and how long one may take until it counts as away."""
EXIT = 3
_NAME = re.compile(r"([0-9]{6,})(\.withdrawn)?")


class Terms:
    """The claims of one run. Every method raises StorageFailed, after `storage_s`."""

    def __init__(self, run: RunConfig, *, excludes: bool = True) -> None:
        """`excludes`: whether the storage keeps two writers of one name apart, as the driver has tried."""
        self._storage = Storage(run.storage_uri, excludes, run.timeouts.storage_s)
        self._read: dict[int, TermClaim] = {}
        self._last: int | None = None  # the largest term that was ever seen, void ones too

    def open(self) -> Terms:
        self._storage.open(write=False)
        return self

    def newest(self) -> TermClaim:
        """The newest claim that stands."""
        claimed, withdrawn = self._listed()
        newest = newest_claim(map(TermClaim, claimed), withdrawn)
        return self._claim_of(newest.term) if newest.term else newest

    def has_claimed(self, attempt: str) -> bool:
        """Whether this submission has ever claimed a term. Without a claim it was not replaced: the newest is older."""
        claimed, _ = self._listed()
        return any(self._claim_of(term).attempt == attempt for term in sorted(claimed, reverse=True))

    def refuse_if_replaced(self, run: RunConfig, own: TermClaim, newest: TermClaim | None = None) -> None:
        """`newest`: the newest claim, looked up if left out. Raises: as `terms.refuse_if_replaced`, with the own claim
        as it stands now; StorageFailed where the journal is gone with it, as after an unmount."""
        newest = newest or self.newest()
        at_own = newest
        if newest.term <= own.term:
            at_own = self._claim_now(own.term)
            if at_own == NOBODY and not any(map(self._storage.exists, (JOURNAL_NAME, CURRENT))):
                raise StorageFailed(f"{run.storage_uri} has neither this run's journal nor its term")
        refuse_if_replaced(run.name, run.storage_uri, own, newest, at_own=at_own)

    def _claim_now(self, term: int) -> TermClaim:
        """Never from memory: the file may be removed and written anew."""
        self._read.pop(term, None)
        return self._claim_of(term) if self._storage.exists(_name(term)) else NOBODY

    def _claim_of(self, term: int) -> TermClaim:
        if term not in self._read:
            data = self._storage.read_record(_name(term))
            try:
                claim = plain_json(data)
                texts = str(claim["attempt"]), str(claim["host"]), str(claim.get("id", ""))
                self._read[term] = TermClaim(term, *texts, since(claim.get("unix_s")))
            except (ValueError, KeyError, TypeError, AttributeError):  # somebody's own file
                self._read[term] = TermClaim(term)
        return self._read[term]

    def claim(self, attempt: str, above: int = 0) -> TermClaim | None:
        """Claim the term after those of the last look and `above`: create a file that only one process can create. None
        if another process has."""
        if self._last is None:
            self._listed()
        term, host, now_s, claim_id = 1 + max(self._last or 0, above), socket.gethostname(), time.time(), token_hex(8)
        # No two may write the same, where the storage does not exclude.
        claim = {"attempt": attempt, "host": host, "unix_s": now_s, "id": claim_id}
        if not self._storage.create(_name(term), json.dumps(claim).encode()):
            self._last = term  # a listing may hide it
            return None
        self._last, self._read[term] = term, TermClaim(term, attempt, host, claim_id, since(now_s))
        return self._read[term]

    def withdraw(self, own: TermClaim) -> None:
        """Void this process's own claim, unless its number is another's by now."""
        if self._claim_now(own.term) == own:
            self._storage.create(f"{_name(own.term)}{WITHDRAWN}", json.dumps({"id": token_hex(8)}).encode())

    def follows(self, term: int) -> bool:
        """Whether a later term is claimed, by one look at a folder. False for other storages, which answer later."""
        if not self._storage.is_local:
            return False
        while os.path.exists(self._storage.at(_name(term := term + 1))):
            if not os.path.exists(self._storage.at(f"{_name(term)}{WITHDRAWN}")):
                return True
        return False

    def is_away(self, own: TermClaim) -> bool:
        """Whether the run's folder was moved, removed or unmounted: neither this claim nor the journal is there."""
        names = (_name(own.term), JOURNAL_NAME)
        return self._storage.is_local and not any(os.path.exists(self._storage.at(name)) for name in names)

    def _listed(self) -> tuple[list[int], set[int]]:
        """The terms that are claimed, and those that are withdrawn."""
        matches = [_NAME.fullmatch(name.rpartition("/")[2]) for name, _ in self._storage.names(FOLDER, recursive=False)]
        numbers = [(int(match[1]), bool(match[2])) for match in matches if match]
        self._last = max([self._last or 0, *(term for term, _ in numbers)])
        return [term for term, is_void in numbers if not is_void], {term for term, is_void in numbers if is_void}


class TermWatch:
    """Looks for a newer term every LOOK_S in its own thread, so that no deciding thread waits for storage."""

    def __init__(self, run: RunConfig, own: TermClaim, terms: Terms) -> None:
        self._run, self.own, self._terms = run, own, terms
        self._newest = own
        self._silence = Unanswered()
        self._is_heard = True
        self._lost: ElasticRingError | None = None
        self.is_away = False  # at the last look
        self._told_s = -TELL_AGAIN_S
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="terms", daemon=True)

    def open(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._over.set()

    def look(self) -> None:
        """Ask the storage now; before every write that others may rely on. Raises StorageFailed, and as `check`."""
        newest = self._terms.newest()
        self.is_away = self._terms.is_away(self.own)
        if self.is_away:
            raise StorageFailed(f"{self._run.storage_uri} has neither this run's journal nor its term")
        if newest.term > self._newest.term:
            self._newest = newest
        try:
            self.check()
            self._terms.refuse_if_replaced(self._run, self.own, newest)
        except (StaleMessage, TermLost) as error:
            self._lost = error
            raise
        self._is_heard = True

    def check(self) -> None:
        """Check what is known, without waiting for the storage. Raises as `refuse_if_replaced`, as the last look."""
        if self._lost is not None:
            raise self._lost
        if self._terms.follows(self._newest.term):  # a folder answers at once
            self._newest = max(self._newest, self._terms.newest(), key=lambda claim: claim.term)
        refuse_if_replaced(self._run.name, self._run.storage_uri, self.own, self._newest)

    def silent_s(self) -> float:
        """Seconds for which the storage has not answered; call it a few times a second."""
        is_heard, self._is_heard = self._is_heard, False
        return self._silence.tick(time.monotonic(), is_heard=is_heard)

    def _work(self) -> None:
        while not self._over.wait(LOOK_S):
            try:
                self.look()
            except StorageFailed as error:
                if time.monotonic() - self._told_s > TELL_AGAIN_S:
                    self._told_s = time.monotonic()
                    log.warning("could not find out whether another coordinator has claimed the run: %s", error)
            except ElasticRingError:
                return  # the deciding thread looks by itself, and gets the error
            except Exception:
                log.exception("could not find out whether another coordinator has claimed the run; tries again")


class TermGuard:
    """Global rank 0 looks for a newer term while the coordinator is away: without it no step completes, so its end
    stops all members. `own` returns the claim under which this process speaks for them, or None; `is_there` whether
    the coordinator answers within so many seconds; `leave` ends this process."""

    def __init__(
        self,
        run: RunConfig,
        own: Callable[[], TermClaim | None],
        is_there: Callable[[float], bool],
        leave: Callable[[int], object] = os._exit,
    ) -> None:
        self._run, self._own, self._is_there, self._leave = run, own, is_there, leave
        self._terms: Terms | None = None
        self._silence = Unanswered(longest_turn_s=run.timeouts.storage_s + 4 * ASK_S)

    def start(self) -> None:
        threading.Thread(target=self._work, name="term-guard", daemon=True).start()

    def _work(self) -> None:
        while True:
            time.sleep(ASK_S)
            own = self._own()
            if own is not None and not self._is_there(ASK_S):
                self.look(own)
            else:
                self._silence = Unanswered(longest_turn_s=self._silence.longest_turn_s)

    def look(self, own: TermClaim) -> None:
        """Ask the storage; ends this process where the run is lost, or where nobody could ask for `fail_after_s`."""
        limit_s = self._run.checkpoint_config.fail_after_s
        is_heard = True
        try:
            self._terms = self._terms or Terms(self._run).open()
            self._terms.refuse_if_replaced(self._run, own)
        except TermLost as lost:
            self._end(lost.message)
        except StaleMessage:
            log.info("a new coordinator of this submission begins")
        except StorageFailed as error:
            is_heard = False
            log.warning("the coordinator is away; could not find out whether it was replaced: %s", error)
        if self._silence.tick(time.monotonic(), is_heard=is_heard) > limit_s:
            self._end(
                f"run {self._run.name}: no coordinator, and {self._run.storage_uri} has not answered for {limit_s:g} s "
                "(checkpoint.fail_after_s) whether another submission has taken the run: this process ends"
            )

    def _end(self, reason: str) -> None:
        log.error("%s", reason)
        self._leave(EXIT)


def since(unix_s: object) -> str:
    """For a sentence about another host; empty for what is no time."""
    with suppress(ValueError, OverflowError, OSError, TypeError):
        return f", since {datetime.fromtimestamp(cast(float, unix_s), UTC):%Y-%m-%d %H:%M:%S} UTC by its clock"
    return ""


def _name(term: int) -> str:
    return f"{FOLDER}/{term:06d}"
