"""Spreads the pieces of a preparation over a Ray cluster with Ray Data. The only module of this room that knows Ray.

A pool of actors takes pieces as rows of a dataset and gives their records back as each is complete. An actor that dies
is replaced and its piece runs again, which changes nothing: a piece's files follow from the piece.
"""

from __future__ import annotations

import logging
import pickle
import secrets
from collections.abc import Iterator, Sequence
from typing import TypedDict

import ray
import ray.data

from elastic_ring import errors
from elastic_ring.config import environment
from elastic_ring.data.preparation.inputs import Piece
from elastic_ring.data.preparation.piece import Job, PieceRecord, PieceWorker
from elastic_ring.files import plain_json
from elastic_ring.validation import from_plain

ATTEMPTS = "attempts"
NUM_ATTEMPTS = 3
"""How often a piece runs whose actor dies under it; Ray Data would try for ever."""
NO_PROGRESS_S, SLOW_BYTES_PER_S = 1800, 100_000


class _Task(TypedDict):
    number: int
    work: bytes


class _Outcome(TypedDict):
    number: int
    record: str
    error: str
    message: str


class _PoolWorker:
    """An actor of the pool. A user's mistake comes back as a row, so that it arrives with its own class and words."""

    def __init__(self) -> None:
        environment()["TOKENIZERS_PARALLELISM"] = "false"  # a process for each CPU already
        self._worker: PieceWorker | None = None

    def __call__(self, row: _Task) -> _Outcome:
        record, kind, message = "", "", ""
        attempt, job, task, piece = pickle.loads(row["work"])
        try:
            self._worker = self._worker or PieceWorker(job)
            names = (f"{ATTEMPTS}/{attempt}/{task}-{piece.name}.{number}" for number in range(NUM_ATTEMPTS))
            if not any(self._worker.storage.create(name, secrets.token_bytes(8)) for name in names):
                raise errors.RunFailed(
                    f"piece {task}-{piece.name} killed its process {NUM_ATTEMPTS} times: too little memory for one of "
                    "its documents? Ray's logs say how each ended"
                )
            piece_record = getattr(self._worker, task)(piece)
            record = piece_record.to_json().decode() if piece_record is not None else ""
        except (ValueError, errors.ElasticRingError) as error:
            kind, message = type(error).__name__, str(error)
        return {"number": row["number"], "record": record, "error": kind, "message": message}


def over_cluster(
    workers: int | None, job: Job, task: str, pieces: Sequence[Piece]
) -> Iterator[tuple[Piece, PieceRecord | None]]:
    """Run `task` of a `PieceWorker` for each piece; yields pieces as they are complete, with their records.

    `workers` processes of a CPU each; None: as many as the cluster has CPUs. Raises the first error of a piece;
    RunFailed for a piece that kills its workers; ValueError where this process has no Ray.
    """
    if not pieces:
        return
    if not ray.is_initialized():  # it is not this room's to start one: who may connect to it is decided elsewhere
        raise ValueError(
            f"workers={workers}: this process has no Ray: give prepare(config, "
            "elastic_ring.runtime.driver.ray_session.cluster), which joins or starts one, or workers=0"
        )
    logger = logging.getLogger("ray.data")  # which has notices on each execution
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        attempt = secrets.token_hex(4)
        works = (pickle.dumps((attempt, job, task, piece)) for piece in pieces)
        rows = [{"number": number, "work": work} for number, work in enumerate(works)]
        if workers is None:
            num_cpus = max(1, int(ray.cluster_resources().get("CPU", 1)))
            pool = ray.data.ActorPoolStrategy(min_size=1, max_size=num_cpus, initial_size=min(num_cpus, len(pieces)))
        else:
            pool = ray.data.ActorPoolStrategy(size=min(workers, len(pieces)))
        dataset = ray.data.from_items(rows, override_num_blocks=len(rows))
        context = dataset.context
        context.enable_progress_bars = context.print_on_execution_start = False  # ours counts bytes
        largest = max(piece.num_bytes for piece in pieces)
        context.execution_no_progress_timeout_s = NO_PROGRESS_S + largest // SLOW_BYTES_PER_S
        for row in dataset.map(_PoolWorker, compute=pool, num_cpus=1).iter_rows():
            if row["error"]:
                raise getattr(errors, row["error"], ValueError)(row["message"])
            record = from_plain(PieceRecord, plain_json(row["record"])) if row["record"] else None
            yield pieces[row["number"]], record
    except ray.exceptions.RayError as error:
        raise errors.RunFailed(f"the preparation's workers failed; the same command goes on: {error}") from error
    finally:
        logger.setLevel(level)
    PieceWorker(job).storage.remove_folder(ATTEMPTS)
