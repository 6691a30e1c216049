"""Durable checkpoints: safetensors slices of every shard, and one manifest that makes them count.

A step's folder is `checkpoints/step-N/LINEAGE/`. Its data lies in a folder whose name is never used twice
(`attempt-ID`), one file for each rank that wrote; each holds rows of tensors, as FSDP2 cut them, in the safetensors
format, so that a slice for any other mesh is a range of bytes. `COMMIT.json` names all files with sizes and digests and
is created last, exclusively: before it the checkpoint does not exist, and two writers cannot both commit a step.

Why not torch.distributed.checkpoint (DCP): it loads a flipped byte, and a torn save under a name used twice, in
silence. With a digest of every byte a save ends after 1.2 (from an H200) to 2.1 s a GB (CPU) where DCP's async_save
takes 0.7 to 1.4 and a plain write 0.4 to 0.5, beside the next steps; training waits less
(benchmarks/results/checkpoint).

Who writes when, and what a run does with a checkpoint, is decided elsewhere. Nothing is unpickled here.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from elastic_ring.errors import CheckpointDamaged, StorageFailed
from elastic_ring.files import plain_json
from elastic_ring.state import pinned
from elastic_ring.state.checkpoints.header import Place, read_places
from elastic_ring.state.checkpoints.manifest import (
    COMMIT,
    DTYPES,
    FOLDER,
    MAX_BYTES,
    NAMES,
    OPTIMIZER,
    PARAMS,
    REJECTED,
    Described,
    Manifest,
    age_key,
    file_name,
    read_manifest,
    rows_of,
    step_folder,
)
from elastic_ring.state.shard import Counters, Shard, raw_bytes
from elastic_ring.state.snapshot import HostSnapshot
from elastic_ring.state.storage.backend import StoredFile
from elastic_ring.state.storage.folder import Storage

KEPT_NAME, MAX_KEPT_BYTES = "kept.json", 4096
"""In the run's folder: the step whose checkpoint retention leaves."""
OWN_TO_A_DEVICE = ("params", "fused", "foreach", "capturable")
"""Settings of an optimizer's groups that a checkpoint does not restore: another device may compute otherwise."""
# ---------------------------------------------------------------- what one rank writes


class Snapshot(HostSnapshot):
    """One rank's part of a shard in host memory: `tensors` by name, and what is not a tensor in `meta`."""

    def __init__(self, cp_rank: int, part: int, tensors: dict[str, Tensor] | None = None, meta: Any = None) -> None:
        super().__init__(cp_rank)
        self.part, self.tensors, self.meta = part, tensors or {}, meta or {}


def tensors_of(shard: Shard) -> dict[str, Tensor]:
    """All tensors of a shard: `params/NAME`, `optimizer/NAME/FIELD`, in the module's order."""
    found = {f"{PARAMS}/{name}": tensor for name, tensor in shard.params.items()}
    for name, state in _state_by_name(shard).items():
        found |= {f"{OPTIMIZER}/{name}/{key}": value for key, value in state.items() if isinstance(value, Tensor)}
    return found


def meta_of(shard: Shard) -> dict[str, Any]:
    """What of a shard is no tensor, as JSON: counters, the optimizer's groups and its plain values.

    Raises ValueError for an optimizer that keeps something else.
    """
    names = {id(param): name for name, param in shard.params.items()}
    groups = [
        {
            **{key: value for key, value in group.items() if key != "params"},
            "params": [names[id(p)] for p in group["params"]],
        }
        for group in shard.optimizer.param_groups
    ]
    plain = {
        name: {key: value for key, value in state.items() if not isinstance(value, Tensor)}
        for name, state in _state_by_name(shard).items()
    }
    meta = {"counters": asdict(shard.counters), "groups": groups, "plain": {n: v for n, v in plain.items() if v}}
    try:
        json.dumps(meta)
    except TypeError as error:
        raise ValueError(
            f"optimizer={type(shard.optimizer).__name__} keeps values that are neither tensors nor plain JSON "
            f"({error}), which a checkpoint cannot hold: keep numbers, texts, lists and tensors only"
        ) from error
    return meta


def describe(shard: Shard, shapes: Mapping[str, tuple[int, ...]], num_parts: int) -> dict[str, Described]:
    """Every tensor of a shard, and which of `num_parts` rings writes it; the same on all ranks.

    `shapes`: the unsharded shape of every parameter. An optimizer's tensor of its parameter's local shape is cut like
    the parameter, any other is whole. The largest tensor goes first, each to the part with the fewest bytes so far.
    """
    found = {}
    for name, tensor in tensors_of(shard).items():
        param = name.split("/")[1]
        is_cut = tensor.dim() > 0 and tensor.shape == shard.params[param].shape
        found[name] = (NAMES[tensor.dtype], shapes[param] if is_cut else tuple(tensor.shape), not is_cut)
    sizes = {name: math.prod(shape) * DTYPES[dtype].itemsize for name, (dtype, shape, _) in found.items()}
    loads, parts = [0] * num_parts, {}
    for name in sorted(found, key=lambda name: (-sizes[name], name)):
        parts[name] = min(range(num_parts), key=lambda index: (loads[index], index))
        loads[parts[name]] += sizes[name]
    return {name: Described(*values, parts[name]) for name, values in found.items()}


def buffers_for(
    shard: Shard, described: Mapping[str, Described], part: int, last: Snapshot | None = None
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(name, host memory, tensor of the shard) of this rank's part, pinned for tensors on a GPU; the memory of `last`
    where it fits."""
    for name, tensor in tensors_of(shard).items():
        if described[name].part != part:
            continue
        buffer = last.tensors.get(name) if last is not None else None
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = pinned.empty_like(tensor)
        yield name, buffer, tensor


def take(
    shard: Shard, described: Mapping[str, Described], part: int, last: Snapshot | None = None, stream: Any = None
) -> Snapshot:
    """Copy this rank's part to host memory, as `HostSnapshot.fill`. `last` gives its buffers: all memory first, since
    what is given back must not have a copy on its way into it."""
    meta, found = meta_of(shard), list(buffers_for(shard, described, part, last))
    snapshot = Snapshot(shard.cp_rank, part, {name: buffer for name, buffer, _ in found}, meta)
    snapshot.fill((each[1:] for each in found), stream)
    return snapshot


def write_part(
    storage: Storage, folder: str, snapshot: Snapshot, in_the_middle: Callable[[], None] = lambda: None
) -> StoredFile:
    """Write one rank's file; `in_the_middle` is called when half of it is written. Raises StorageFailed."""
    sizes = [tensor.numel() * tensor.element_size() for tensor in snapshot.tensors.values()]

    def chunks() -> Iterator[bytes | memoryview]:
        left = sum(sizes) // 2
        for chunk in safetensors_chunks(snapshot.tensors):
            yield chunk
            if left > 0 and (left := left - len(chunk)) <= 0:
                in_the_middle()
        if left > 0 or not sizes:
            in_the_middle()

    return storage.write(file_name(folder, snapshot.cp_rank, snapshot.part), chunks())


def safetensors_chunks(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """A safetensors file piece by piece, without a second copy of the tensors in memory.

    The format: the header's length in eight bytes, the header as JSON, then the tensors' bytes
    (https://github.com/huggingface/safetensors#format).
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for tensor in tensors.values():
        if tensor.numel():
            yield from raw_bytes([tensor])


def commit(storage: Storage, manifest: Manifest) -> bool:
    """Make a checkpoint count; False when another writer has committed this step before. Raises StorageFailed."""
    return storage.create(f"{step_folder(manifest.step, manifest.lineage)}/{COMMIT}", manifest.to_json())


# ---------------------------------------------------------------- finding and verifying


def committed(storage: Storage) -> list[str]:
    """The folders `checkpoints/step-N/lineage-L` that have a manifest: newest lineage first, then the largest step.
    Last come those of other names, which do not count."""
    suffix = f"/{COMMIT}"
    found = [name.removesuffix(suffix) for name, _ in storage.names(FOLDER) if name.endswith(suffix)]
    return sorted(found, key=age_key, reverse=True)


def wrong_files(storage: Storage, manifest: Manifest) -> Iterator[str]:
    """Read every byte; one line for each file that is missing, cut off or altered."""
    sizes = dict(storage.names(manifest.folder))
    for file in manifest.files:
        if file.name not in sizes:
            yield f"{file.name} is missing"
        elif sizes[file.name] != file.num_bytes:
            yield f"{file.name} has {sizes[file.name]} bytes, {file.num_bytes} were written"
        elif (found := storage.digest(file.name).sha256) != file.sha256:
            yield f"{file.name} has sha256 {found[:16]}, {file.sha256[:16]} was written"


def wrong_with(storage: Storage, folder: str, *, read_bytes: bool = True) -> list[str]:
    """One line for each file of a committed checkpoint that is not what was written, or one about its manifest.

    By digests or, without `read_bytes`, by sizes. Raises StorageFailed, and ValueError for a newer format.
    """
    try:
        manifest = read_manifest(storage, folder)
    except CheckpointDamaged as error:
        return [error.message]
    if read_bytes:
        return list(wrong_files(storage, manifest))
    sizes = dict(storage.names(manifest.folder))
    return [f"{file.name} is missing or cut off" for file in manifest.files if sizes.get(file.name) != file.num_bytes]


def set_aside(storage: Storage, folder: str, reasons: Iterable[str], *, undone: bool = False) -> None:
    """A checkpoint that failed its verification no longer counts; its files stay, with the reason. Those of one that is
    whole and whose steps were `undone` go with the next checkpoint of that step."""
    manifest = storage.read_record(f"{folder}/{COMMIT}", MAX_BYTES)
    record = {"reasons": list(reasons), "manifest": manifest.decode(errors="replace"), "undone": undone}
    storage.create(f"{folder}/{secrets.token_hex(4)}-{REJECTED}", json.dumps(record).encode())
    storage.remove(f"{folder}/{COMMIT}")


# ---------------------------------------------------------------- loading


class Reader:
    """Reads slices of a committed checkpoint for any mesh. Each file is read whole once, and its digest verified.

    A rank of the same `cp` reads its own files only. Files are kept in memory until `fill` has ended. Without
    `whole_files` it reads only the requested bytes, and keeps nothing; with `digests` it first verifies each file from
    which it reads, without it nothing: for files that `wrong_files` passed.
    """

    def __init__(
        self, storage: Storage, manifest: Manifest, *, whole_files: bool = True, digests: bool = False
    ) -> None:
        self.storage, self.manifest, self._whole_files = storage, manifest, whole_files
        self._unverified = {file.name for file in manifest.files} if digests else set[str]()
        self._places: dict[str, dict[str, Place]] = {}
        self._files = {file.name: file for file in manifest.files}
        self._open: dict[str, bytearray] = {}
        self.check: Callable[[], None] = lambda: None
        """Asked before each file; what it raises ends the reading."""

    def tensor(self, name: str, cp_rank: int, cp: int) -> Tensor:
        """The slice of a tensor on rank `cp_rank` of `cp`. Raises CheckpointDamaged, StorageFailed, ValueError."""
        found = self.described(name)
        if found.whole:
            return self._whole(name, found, cp_rank, cp)
        return self.rows(name, *rows_of(found.shape, cp_rank, cp))

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """The rows [start, stop) of a tensor that is cut by rows. Raises as `tensor`."""
        found = self.described(name)
        pieces = []
        for source in range(self.manifest.cp):
            first, last = rows_of(found.shape, source, self.manifest.cp)
            low, high = max(start, first), min(stop, last)
            if low < high:
                stored = self._stored(name, found, source, (last - first, *found.shape[1:]))
                pieces.append(stored[low - first : high - first])
        # Joined, not copied into memory that was there: no row can be one that nobody has read.
        joined = torch.cat(pieces) if pieces else torch.empty((0, *found.shape[1:]), dtype=DTYPES[found.dtype])
        if len(joined) != stop - start:
            raise self._damaged(self.manifest.folder, f"has {len(joined)} of {stop - start} rows of {name}")
        return joined

    def described(self, name: str) -> Described:
        """Raises CheckpointDamaged where the checkpoint has no such tensor."""
        if name not in self.manifest.tensors:
            raise self._damaged(self.manifest.folder, f"has no {name}")
        return self.manifest.tensors[name]

    def _damaged(self, file: str, what: str) -> CheckpointDamaged:
        return CheckpointDamaged(f"{self.storage.at(file)} {what}", path=self.storage.at(file))

    def _whole(self, name: str, found: Described, cp_rank: int, cp: int) -> Tensor:
        if self.manifest.cp in (1, cp):
            return self._stored(name, found, min(cp_rank, self.manifest.cp - 1), found.shape).clone()
        # The files of other ranks may be large, and this tensor is all that is wanted of them.
        pieces = Reader(self.storage, self.manifest, whole_files=False)
        pieces._places, pieces._unverified = self._places, self._unverified
        try:
            copies = [pieces._stored(name, found, source, found.shape) for source in range(self.manifest.cp)]
            agree = all(torch.equal(copy, copies[0]) for copy in copies)
        except CheckpointDamaged:  # of a header with a wrong byte
            copies, agree = [], False
        if not agree:
            for source in range(self.manifest.cp):
                self._check(file_name(self.manifest.folder, source, found.part))
            if not copies:
                raise self._damaged(self.manifest.folder, f"has no whole {name} in each rank's file")
            raise ValueError(
                f"{name} is not cut by rows and differs between ranks, so it fits no other number of ranks: "
                f"resume with cp={self.manifest.cp}"
            )
        return copies[0].clone()

    def _stored(self, name: str, found: Described, cp_rank: int, shape: tuple[int, ...]) -> Tensor:
        """What one rank's file has of a tensor, which must be all of it: another shape would be spread over the rows.
        Raises CheckpointDamaged, StorageFailed."""
        file = file_name(self.manifest.folder, cp_rank, found.part)
        place, data = self._bytes_of(name, file)
        if (place.shape, place.dtype) != (shape, DTYPES[found.dtype]) or len(data) != place.num_bytes:
            held = f"{len(data)} bytes of a {place.dtype} of shape {list(place.shape)}"
            raise self._damaged(file, f"holds {held} of {name}: its manifest says {found.dtype} {list(shape)}")
        if not data:
            return torch.empty(shape, dtype=place.dtype)
        flat = torch.frombuffer(data, dtype=torch.uint8)
        if flat.data_ptr() % place.dtype.itemsize:  # a view of another type must begin at a multiple of its size
            flat = flat.clone()
        return flat.view(place.dtype).reshape(shape)

    def _bytes_of(self, name: str, file: str) -> tuple[Place, memoryview]:
        """Where a tensor is in a file, and its bytes."""
        if self._whole_files:
            data = self._file(file)
            place = self._place(name, file, len(data), lambda start, size: data[start : start + size])
            return place, memoryview(data)[place.start : place.start + place.num_bytes]
        if file in self._unverified:
            self._check(file)
            self._unverified.remove(file)
        size = self._files[file].num_bytes
        place = self._place(name, file, size, lambda start, size: self.storage.read(file, start, size))
        return place, memoryview(bytearray(self.storage.read(file, place.start, place.num_bytes)))

    def _place(self, name: str, file: str, size: int, read: Callable[[int, int], bytes | bytearray]) -> Place:
        if file not in self._places:
            try:
                self._places[file] = read_places(read, size)
            except ValueError as error:
                raise self._damaged(file, f"cannot be read as safetensors: {error}") from error
        if name not in self._places[file]:
            raise self._damaged(file, f"has no {name}, which its manifest names")
        return self._places[file][name]

    def _file(self, name: str) -> bytearray:
        if name not in self._open:
            self.check()
            try:
                data, found = self.storage.load(name)
            except StorageFailed as error:
                if not self.storage.exists(name):
                    raise CheckpointDamaged(f"{name} is missing", path=self.storage.at(name)) from error
                raise
            self._compare(found)
            self._open[name] = data
        return self._open[name]

    def _check(self, name: str) -> None:
        """Read a file for its digest alone. Raises CheckpointDamaged."""
        self.check()
        if not self.storage.exists(name):
            raise CheckpointDamaged(f"{name} is missing", path=self.storage.at(name))
        self._compare(self.storage.digest(name))

    def _compare(self, found: StoredFile) -> None:
        if found != (written := self._files[found.name]):
            raise CheckpointDamaged(
                f"{self.storage.at(found.name)} is not what was written: {found.num_bytes} bytes with sha256 "
                f"{found.sha256[:16]}, {written.num_bytes} with {written.sha256[:16]} were written",
                path=self.storage.at(found.name),
            )

    def unknown(self, params: Collection[str]) -> list[str]:
        """Names of parameters that the checkpoint has beside these."""
        stored = {name.removeprefix(f"{PARAMS}/") for name in self.manifest.tensors if name.startswith(f"{PARAMS}/")}
        return sorted(stored - set(params))

    def fill(self, shard: Shard, cp: int) -> None:
        """Become the checkpoint's state on `shard.cp_rank` of `cp`."""
        shard.counters = Counters(**self.manifest.meta["counters"])
        with torch.no_grad():
            for name, param in shard.params.items():
                value = self.tensor(f"{PARAMS}/{name}", shard.cp_rank, cp)
                if value.shape != param.shape:  # it would be spread over what it does not have
                    raise self._damaged(
                        self.manifest.folder, f"has {name} in shape {list(value.shape)}, the model {list(param.shape)}"
                    )
                param.copy_(value)
        _fill_optimizer(shard, self, cp)
        self._open.clear()


def _fill_optimizer(shard: Shard, reader: Reader, cp: int) -> None:
    meta = reader.manifest.meta
    saved = {name: group for group in meta["groups"] for name in group["params"]}
    names = {id(param): name for name, param in shard.params.items()}
    for group in shard.optimizer.param_groups:
        wanted = {names[id(param)] for param in group["params"]}
        for name in sorted(wanted)[:1]:
            if name not in saved:
                raise reader._damaged(reader.manifest.folder, f"has no group of the optimizer with {name}")
            found = {key: value for key, value in saved[name].items() if key not in OWN_TO_A_DEVICE}
            for key, value in found.items():
                if not _fits(group.get(key), value):
                    raise reader._damaged(reader.manifest.folder, f"has {key}={str(value)[:200]!r} for {name}")
            group.update({key: _restored(group.get(key), value) for key, value in found.items()})
    shard.optimizer.state.clear()
    on_device = {
        id(param): _keeps_steps_on_device(group) for group in shard.optimizer.param_groups for param in group["params"]
    }
    for name, param in shard.params.items():
        prefix = f"{OPTIMIZER}/{name}/"
        state: dict[str, Any] = dict(meta["plain"].get(name, {}))
        for key in (key for key in reader.manifest.tensors if key.startswith(prefix)):
            part = key.removeprefix(prefix)
            value = reader.tensor(key, shard.cp_rank, cp)
            if not reader.manifest.tensors[key].whole and value.shape != param.shape:
                raise reader._damaged(reader.manifest.folder, f"has {key} in another shape than {name}")
            # As `torch.optim.Optimizer.load_state_dict` does, which would cast what must arrive as it was.
            stays = shard.cpu_offload != "none" or (part == "step" and not on_device.get(id(param), False))
            state[part] = value if stays else value.to(param.device)
        if state:
            shard.optimizer.state[param] = state


def _keeps_steps_on_device(group: Mapping[str, Any]) -> bool:
    return bool(group.get("fused") or group.get("capturable"))


def _fits(present: Any, value: Any) -> bool:
    """Whether a setting of an optimizer may become `value`: a number for a number, a list for a tuple of as many."""
    if present is None or value is None:
        return True
    if isinstance(present, (tuple, list)):
        return isinstance(value, (list, tuple)) and len(value) == len(present) and all(map(_fits, present, value))
    numbers = isinstance(present, (bool, int, float, Tensor)), isinstance(value, (bool, int, float))
    return numbers[0] == numbers[1] if any(numbers) else type(present) is type(value)


def _restored(present: Any, value: Any) -> Any:
    """JSON knows lists where an optimizer has tuples."""
    return tuple(value) if isinstance(present, tuple) and isinstance(value, list) else value


def _state_by_name(shard: Shard) -> dict[str, dict[str, Any]]:
    return {
        name: shard.optimizer.state[param] for name, param in shard.params.items() if param in shard.optimizer.state
    }


# ---------------------------------------------------------------- how often, and how long they are kept


def interval_s(cost_s: float, mean_time_between_failures_s: float) -> float:
    """How often to save, after Young (CACM 1974) and Daly (FGCS 2006): sqrt(2 * cost * MTBF), at least the cost."""
    return max(cost_s, math.sqrt(2.0 * cost_s * mean_time_between_failures_s) - cost_s)


def keep(storage: Storage, step: int) -> None:
    """Retention leaves the checkpoint of `step` from now on, and none that was kept before."""
    storage.replace(KEPT_NAME, json.dumps({"step": step}).encode())


def kept_step(storage: Storage) -> int | None:
    """The step of the last `keep`; None if there is none. Raises CheckpointDamaged, StorageFailed."""
    if not storage.exists(KEPT_NAME):
        return None
    try:
        found = plain_json(storage.read_record(KEPT_NAME, MAX_KEPT_BYTES), MAX_KEPT_BYTES)
        step = found["step"] if isinstance(found, dict) else None
    except (ValueError, KeyError) as error:
        raise CheckpointDamaged(
            f"{KEPT_NAME} cannot be read ({error}): remove it, or have a checkpoint kept"
        ) from error
    if type(step) is not int:
        raise CheckpointDamaged(f"{KEPT_NAME} names no step: remove it, or have a checkpoint kept")
    return step


def superfluous(steps: Iterable[int], keep_last: int, keep_every: int, kept: int | None = None) -> list[int]:
    """The steps whose checkpoints go: all but the newest `keep_last`, with `keep_every` its multiples, and `kept`."""
    ordered = sorted(steps)
    stays = set(ordered[-keep_last:]) | {step for step in ordered if keep_every and step % keep_every == 0} | {kept}
    return [step for step in ordered if step not in stays]


def prune(
    storage: Storage,
    keep_last: int,
    keep_every: int,
    lineage: int | None = None,
    *,
    read_bytes: bool = False,
    read_back: int | None = None,
) -> list[int]:
    """Remove what retention does not keep, of one lineage or of each; returns the steps. The step of `keep` stays.

    If none of those that stay is whole (by their files' sizes or, with `read_bytes`, by every byte), the newest that is
    whole stays, too. So does `read_back`, the newest step of which every byte was found right.
    """
    assert keep_last >= 1
    kept = kept_step(storage)
    by_lineage: dict[int, dict[int, str]] = {}
    for folder in committed(storage):
        of_lineage, step = age_key(folder)
        by_lineage.setdefault(of_lineage, {})[step] = folder
    removed = []
    for of_lineage, folders in by_lineage.items():
        if of_lineage < 0 or lineage not in (None, of_lineage):
            continue
        going = superfluous(folders, keep_last, keep_every, kept)
        if not going:
            continue
        newest_first = sorted(folders, key=lambda step: (step not in going, step), reverse=True)
        whole = next(
            (step for step in newest_first if not wrong_with(storage, folders[step], read_bytes=read_bytes)), None
        )
        for step in going:
            if step not in (whole, read_back):
                _remove(storage, folders[step])
                removed.append(step)
    return removed


def _remove(storage: Storage, folder: str) -> None:
    """A checkpoint, but nothing that was set aside in its folder."""
    rejected = [name for name, _ in storage.names(folder, recursive=False) if name.endswith(REJECTED)]
    all_go = all(_is_undone(storage.read_record(name, 2 * MAX_BYTES)) for name in rejected)
    try:
        own = folder if all_go else read_manifest(storage, folder).folder
    except CheckpointDamaged:  # whose files these are is not known
        own = ""
    storage.remove(f"{folder}/{COMMIT}")  # first: what has no manifest does not count
    if own:
        storage.remove_folder(own)


def _is_undone(record: bytes) -> bool:
    try:
        return bool(plain_json(record, 2 * MAX_BYTES)["undone"])
    except (ValueError, LookupError, TypeError):  # of an earlier version, or damaged
        return False
