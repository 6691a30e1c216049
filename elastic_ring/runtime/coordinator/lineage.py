"""What earlier submissions of a run decided about its data, read from their records in the run's storage.

A checkpoint has the manifests by its step. Steps that ran after it run again when the run is submitted again, and must
use the same sequences: the journal says which manifests held there, the metrics how far the run came.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from elastic_ring.control.decisions import rollback
from elastic_ring.control.decisions.corpus import journalled
from elastic_ring.control.messages import BatchSkip, CorpusVersion
from elastic_ring.control.replay import standing
from elastic_ring.errors import RecordDamaged
from elastic_ring.monitor.journal import salvage
from elastic_ring.monitor.metrics import JOURNAL_NAME, METRICS_NAME
from elastic_ring.runtime.run_storage import growing
from elastic_ring.state.storage.folder import Storage


@dataclass(frozen=True)
class Earlier:
    """The later manifests that were decided, how many steps ran, from step 0 on, and which batches are left out; None
    where no records say."""

    corpus: tuple[CorpusVersion, ...] = ()
    num_steps: int = 0
    skips: tuple[BatchSkip, ...] | None = None


def earlier(storage: Storage, lineage: int, identity: str, damaged: dict[str, str]) -> Earlier:
    """The records of the last submission of `lineage`, which took over those before it.

    Empty where its records are no longer in `storage` (an object store keeps only the last submission's), or where they
    belong to another `identity`. Damaged lines are left out, and named in `damaged`, by file.
    Raises StorageFailed.
    """
    attempts = [f"{name}/" for name in storage.folders() if name.startswith("attempt-")]
    for folder in ("", *reversed(attempts)):
        name = folder + JOURNAL_NAME
        lines = standing(_records(storage, name, damaged))
        begin = next((line for line in lines if line.get("note") == "begin"), None)
        if begin is None or begin.get("lineage", 0) != lineage or begin.get("identity", identity) != identity:
            continue
        steps = [line.get("step") for line in _records(storage, folder + METRICS_NAME, damaged) if "loss_hex" in line]
        ran = [step + 1 for step in steps if type(step) is int]
        try:
            return Earlier(journalled(lines), max([*ran, begin.get("num_steps", 0)]), rollback.journalled(lines))
        except (LookupError, TypeError, AttributeError) as error:
            damaged[name] = f"{storage.at(name)} holds something else ({type(error).__name__}: {error})"
    return Earlier()


def _records(storage: Storage, name: str, damaged: dict[str, str]) -> list[dict[str, Any]]:
    try:
        lines, wrong = salvage(growing(storage, name))
    except RecordDamaged as error:
        damaged[name] = error.message
        return []
    if wrong:
        damaged[name] = (
            f"line {wrong[0]} of {storage.at(name)} is damaged: which sequences the steps after the checkpoint used is "
            "known from the other lines only"
        )
    return lines
