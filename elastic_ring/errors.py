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
    """The coordinator ordered this process to abort an exchange that was under way. Normal, in workers' logs only."""


class PeerFailed(ElasticRingError):
    """An exchange with another rank failed. Normal next to a death, and no proof of one; in workers' logs only."""


class StaleMessage(ElasticRingError):
    """A message of an older term or generation changed nothing. Normal: an older coordinator learned of its
    successor."""


class TermLost(ElasticRingError):
    """Another submission has taken the run over (exit 3). Leave it, or stop the run on the named host and submit
    here."""


class IllegalTransition(ElasticRingError):
    """The control core has no transition for an event in its phase. A defect: report it, with journal and logs."""


class JournalDamaged(ElasticRingError):
    """A restarted coordinator cannot read its journal, or replaying it gives other commands. Submit again: the run
    resumes from its newest checkpoint."""


class RecordDamaged(ElasticRingError):
    """A small file of the run's records is damaged. Nothing to do: the run sets it aside and writes it anew."""


class OtherFormat(ElasticRingError):
    """The run's folder was written by a version of elastic_ring with another format. Use that version, or begin a new
    run with `--from` one of its checkpoints; `checkpoints export` reads its weights."""

    @classmethod
    def of(cls, path: object, seen: int, expected: int) -> OtherFormat:
        """`path` has the format `seen`; this version reads `expected`."""
        return cls(
            f"{path} has format {seen}, and this version of elastic_ring reads format {expected}: go on with the "
            "version that wrote it, or begin another run from its checkpoint (--from); checkpoints export reads its "
            "weights",
            path=str(path),
            format=seen,
        )


class ShardLost(ElasticRingError):
    """No live holder, no copy and no verified checkpoint of some `cp_rank` is left, and the run has begun again
    `rollback_limit` times. Start again with more nodes, and with checkpoints."""


class DigestMismatch(ElasticRingError):
    """A healed shard, or a batch on a GPU, was damaged and is sent again. Repeated on one node: memory, GPU,
    network."""


class StorageFailed(ElasticRingError):
    """A folder or an object store refused, or did not answer for too long. Mend space, credentials or endpoint, and
    submit again."""


class CheckpointDamaged(ElasticRingError):
    """A file of a checkpoint is missing or damaged, and the checkpoint is not used. Take the one before it."""


class WeightsDamaged(ElasticRingError):
    """A file of the weights with which a run begins (`--from`) is damaged. Begin with another checkpoint."""


class CrashLoop(ElasticRingError):
    """The same step killed members `crash_loop_limit` times. The message has signal and log lines: skip that batch, or
    give more memory."""


class UserCodeFailed(ElasticRingError):
    """Model, loss or data raised `user_error_limit` times in the same step. The message begins with the traceback."""


class OutOfMemory(ElasticRingError):
    """A step ran out of memory with every relief in force. The message says what was tried, and what to change."""


class TooManySkipped(ElasticRingError):
    """More than `max_skipped` steps in a row were skipped. Lower the learning rate; look at the data."""


class LossSpike(ElasticRingError):
    """The loss rose far above the steps before, and going back did not help, or `loss_spike_actions` says `stop`. Look
    at the named sequences."""


class FaultNeverFired(ElasticRingError):
    """A planned fault did not happen, so the run proves nothing about it. Training is complete: correct the
    schedule."""


class CoordinatorLost(ElasticRingError):
    """The driver heard no coordinator for `lease_s`. Submit again: it attaches, or resumes."""


class RunFailed(ElasticRingError):
    """The run ended for another reason, which the message has: a stop, a failed start-up check, no driver."""
