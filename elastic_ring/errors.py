"""The one exception tree. A user's wrong setting is a `ValueError`; everything else raises from here.

Every error carries `facts`, a flat mapping of what an operator needs (step, worker, signal …), and
survives pickling, because most of them cross a process boundary on their way to the person who reads them.
"""

from __future__ import annotations

from typing import Any


class ElasticRingError(Exception):
    """Root of the tree. `message` is for people, `facts` for programs."""

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.message = message
        self.facts = facts

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.facts)


def _rebuild(kind: type[ElasticRingError], message: str, facts: dict[str, Any]) -> ElasticRingError:
    return kind(message, **facts)


class GroupAborted(ElasticRingError):
    """This process's control thread closed the group while an operation was under way."""


class PeerFailed(ElasticRingError):
    """An exchange with another rank failed: a reset socket, a timeout. Not proof that the peer is dead."""


class StaleMessage(ElasticRingError):
    """A message of an older term or generation; it changed nothing."""


class TermLost(ElasticRingError):
    """Another submission has claimed a newer term of the run: this one stops. Names run, host, term and the way out."""


class IllegalTransition(ElasticRingError):
    """The control core met an event that its present phase has no row for. Carries the recent story."""


class JournalDamaged(ElasticRingError):
    """The journal cannot be read back, or replaying it gives other commands than it recorded."""


class RecordDamaged(ElasticRingError):
    """A small file of a run's records is not what was written. Names the file."""


class ShardLost(ElasticRingError):
    """No live holder, no copy and no verified checkpoint of some `cp_rank` is left."""


class DigestMismatch(ElasticRingError):
    """A healed shard differs from its donor's digest; it must not be used."""


class StorageFailed(ElasticRingError):
    """A folder or an object store refused or did not answer. Names the place."""


class CheckpointDamaged(ElasticRingError):
    """A file of a checkpoint is missing or not what was written; the checkpoint must not be used."""


class CrashLoop(ElasticRingError):
    """The same step killed members too often. Names the batch, the signal and the last log lines."""


class UserCodeFailed(ElasticRingError):
    """The user's model, loss or data raised on the same step again. The message begins with their traceback."""


class OutOfMemory(ElasticRingError):
    """A step ran out of memory with every relief of the memory ladder in force. Says what was tried, what to change."""


class TooManySkipped(ElasticRingError):
    """More than `max_skipped` steps in a row were skipped: for a non-finite gradient or loss, or a loss spike."""


class LossSpike(ElasticRingError):
    """The loss rose far above the steps before, and `loss_spike_actions` had come to `stop`."""


class FaultNeverFired(ElasticRingError):
    """A planned fault did not happen, so the run proves nothing about it."""


class CoordinatorLost(ElasticRingError):
    """The coordinator did not answer within its lease."""


class RunFailed(ElasticRingError):
    """The run ended without success for a reason that no other class names."""
