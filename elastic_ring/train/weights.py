"""Writes the unsharded final weights, files dealt to the ranks of a ring, and loads them into a module.

Ring 0 gathers one tensor at a time. Only the rank of a file keeps its tensors, until they are written. No rank holds
the whole model.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import secrets
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from elastic_ring.errors import StorageFailed
from elastic_ring.files import few
from elastic_ring.state.checkpoints.stored_weights import StoredWeights
from elastic_ring.state.checkpoints.weight_files import (
    MAX_FILE_BYTES,
    WEIGHTS,
    WEIGHTS_FOLDER,
    WEIGHTS_INDEX,
    file_names,
    grouped,
    index_text,
    remove_others,
)
from elastic_ring.state.safetensors import raw_bytes, safetensors_chunks
from elastic_ring.state.storage.backend import StoredFile, pieces
from elastic_ring.state.storage.folder import Storage

log = logging.getLogger(__name__)

POLL_S = 0.05
"""Between looks for an abort, while a file is being written."""
CLEAN_S = 10.0
"""For each request that removes files of earlier attempts: the weights count already."""
NUM_NAMED = 5
ATTEMPT_BYTES, DIGEST_BYTES, SIZE_BYTES = 8, 32, 8


def gather_weights(state: Any, groups: Any, storage: Storage, max_file_bytes: int = MAX_FILE_BYTES) -> str | None:
    """Write all parameters that are state from ring 0; global rank 0 returns `weights_sha256`, others None.

    The digest is sha256 over the raw bytes of the unsharded fp32 parameters in name order. A rank holds one tensor and
    one file of up to `max_file_bytes`, or of one larger tensor. A model that fits into one file becomes
    `weights.safetensors`, which rank 0 replaces whole. A larger one lies in several, and counts once rank 0 has
    written the index, after every rank has reported size and digest of its files.

    A collective of the ring: raises what its group raises, StorageFailed, and GroupAborted once the group has been
    aborted. Then the weights that counted before still do.
    """
    if groups.mesh.coordinate(groups.global_rank).dp_rank != 0:
        return None
    gather, writer = _Gather(state, groups), _Writer(storage, groups)
    tensors = list(grouped(gather.sizes, max_file_bytes))
    attempt = gather.exchange(secrets.token_bytes(ATTEMPT_BYTES))[0].hex()  # rank 0 chooses the name
    files = dict(zip(file_names(attempt, len(tensors)), tensors, strict=True))
    for index, (file, names) in enumerate(files.items()):
        if index % groups.mesh.cp != gather.cp_rank:
            for name in names:
                gather.tensor(name)  # another rank keeps it
            continue
        writer.wait()  # one file at a time is in memory
        tensors_of_file = {name: gather.tensor(name) for name in names}
        writer.start(file, tensors_of_file, {"sha256": gather.sha256} if file == WEIGHTS else {})
        del tensors_of_file  # or it would be in memory beside the next file's
    writer.wait()
    # Sizes and digests of all files; a single `weights.safetensors` has none.
    records = [bytes.fromhex(file.sha256) + file.num_bytes.to_bytes(SIZE_BYTES, "little") for file in writer.written]
    record_bytes = DIGEST_BYTES + SIZE_BYTES
    rows = gather.exchange(b"".join(records).ljust(-(-len(files) // gather.num_ranks) * record_bytes, b"\0"))
    groups.check()  # an abort ends NCCL's exchanges without an error: the received bytes may be garbage
    if groups.global_rank != 0:
        return None
    if WEIGHTS not in files:
        sizes, digests = dict(storage.names(WEIGHTS_FOLDER)), dict[str, str]()
        for index, file in enumerate(files):
            start = index // gather.num_ranks * record_bytes
            record = rows[index % gather.num_ranks][start : start + record_bytes]
            digests[file] = record[:DIGEST_BYTES].hex()
            if sizes.get(file) != (num_bytes := int.from_bytes(record[DIGEST_BYTES:], "little")):
                raise StorageFailed(
                    f"{storage.at(file)} has {sizes.get(file, 'no')} bytes here, its rank has written {num_bytes}: all "
                    "workers must see the run's folder",
                    path=storage.at(file),
                )
        metadata = {"total_size": sum(gather.sizes.values()), "sha256": gather.sha256, "file_sha256": digests}
        weight_map = {name: file for file, names in files.items() for name in names}
        storage.replace(WEIGHTS_INDEX, index_text(weight_map, metadata))  # which makes the files count
    remove_others(
        Storage(storage.uri, storage.excludes, min(storage.timeout_s, CLEAN_S)),
        [WEIGHTS] if WEIGHTS in files else [WEIGHTS_INDEX, *files],
    )
    return gather.sha256


def load_weights(module: nn.Module, path: str | os.PathLike[str]) -> None:
    """Loads a run's final weights into `module`, strictly, on the module's device and in its types.

    `path`: `Result.weights` (a safetensors file, or the index of several), or the run's folder. One tensor at a time is
    read. Tied parameters (one tensor under several names) are stored once, under the first name. Buffers, which no step
    changes, stay as the module has them; a warning names them. Raises ValueError for weights that cannot be read, and
    for names or shapes that differ from the module's; then nothing has been loaded.
    """
    stored = StoredWeights.open(path)
    shapes, tied = stored.shapes, dict[int, list[str]]()
    own: dict[str, Tensor] = module.state_dict(keep_vars=True)
    for name, value in own.items():
        tied.setdefault(id(value), []).append(name)
    targets = {next((name for name in names if name in shapes), names[0]): own[names[0]] for names in tied.values()}
    kept = [name for name, _ in module.named_buffers() if name not in shapes and targets.pop(name, None) is not None]
    wrong = [f"{name} is missing" for name in targets if name not in shapes]
    wrong += [f"{name} is unknown to the module" for name in sorted(shapes.keys() - own.keys())]
    wrong += [
        f"{name} has shape {shapes[name]}, not {tuple(value.shape)}"
        for name, value in targets.items()
        if name in shapes and shapes[name] != tuple(value.shape)
    ]
    if wrong:
        shown = few(wrong, NUM_NAMED, "; ")
        raise ValueError(f"{os.fspath(path)}: holds other parameters than a {type(module).__name__}: {shown}")
    with torch.no_grad():
        for name, value in targets.items():
            value.copy_(stored.tensor(name))
    if kept:
        log.warning("%s: has no buffers; the module's own stay: %s", os.fspath(path), few(kept, NUM_NAMED))


class _Gather:
    """Gathers the tensors of a ring in name order, and digests them on global rank 0."""

    def __init__(self, state: Any, groups: Any) -> None:
        from elastic_ring.train.abortable_collectives import AbortableAllGather

        shapes = state.shapes
        self._params, self._groups, self._total = state.shard.params, groups, hashlib.sha256()
        self._pool, self._digested = ThreadPoolExecutor(1), Future[Any]()  # a digest takes longer than a gather
        self._digested.set_result(None)
        self._device = state.device
        self._shapes = {name: shapes[name] for name in sorted(shapes)}
        self._all_gather = AbortableAllGather(groups.launching)
        self.num_ranks, self.cp_rank = groups.mesh.cp, groups.mesh.coordinate(groups.global_rank).cp_rank

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of each tensor."""
        return {name: math.prod(shape) * self._params[name].element_size() for name, shape in self._shapes.items()}

    @property
    def sha256(self) -> str:
        """The digest of the tensors gathered so far."""
        self._digested.result()
        return self._total.hexdigest()

    def exchange(self, own: bytes) -> list[bytes]:
        """All-gather as many bytes of each rank, in the order of the ring. Raises GroupAborted."""
        rows = self._gather(torch.frombuffer(bytearray(own), dtype=torch.uint8))
        self._groups.check()
        return [bytes(row.tolist()) for row in rows.reshape(self.num_ranks, len(own))]

    def tensor(self, name: str) -> Tensor:
        """All rows of one parameter, in host memory; a collective."""
        # Only the last ranks' slices are padded, so the rows are in one piece.
        local, shape = self._params[name], self._shapes[name]
        per_rank = -(-shape[0] // self.num_ranks)
        if local.shape[0] < per_rank:
            local = torch.cat([local, local.new_zeros((per_rank - local.shape[0], *shape[1:]))])
        tensor = self._gather(local.detach().contiguous())[: shape[0]]
        if self._groups.global_rank == 0:
            self._digested.result()  # one tensor at a time waits for it
            self._digested = self._pool.submit(self._total.update, raw_bytes(tensor))
        return tensor

    def _gather(self, own: Tensor) -> Tensor:
        """`own` of every rank, concatenated, in host memory."""
        if self.num_ranks == 1:
            return own.cpu()
        own = own.to(self._device)
        whole = own.new_empty((self.num_ranks * own.shape[0], *own.shape[1:]))
        work = self._all_gather(whole, own, self._groups.shard, async_op=True)
        assert work is not None
        work.wait()
        return whole.cpu()


class _Writer:
    """Writes one file in a thread, while the next tensors are gathered; an abort ends it at the next piece."""

    def __init__(self, storage: Storage, groups: Any) -> None:
        self._storage, self._groups = storage, groups
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self.written: list[StoredFile] = []

    def start(self, name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        def chunks() -> Iterator[bytes | memoryview]:
            # transformers refuses a file that does not name its library's format.
            for piece in pieces(safetensors_chunks(tensors, {"format": "pt", **metadata})):
                self._groups.check()
                yield piece

        def write() -> None:
            try:
                if name == WEIGHTS:  # its header has the tensors' digest
                    self._storage.replace(name, chunks())
                else:
                    self.written.append(self._storage.write(name, chunks()))
            except Exception as error:  # raised in the thread that waits
                self._error = error

        self._thread = threading.Thread(target=write, name="weights", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait for the file. Raises GroupAborted, and the error of the write."""
        while self._thread is not None:
            self._thread.join(POLL_S)
            self._groups.check()
            if not self._thread.is_alive():
                self._thread = None
        if self._error is not None:
            raise self._error
