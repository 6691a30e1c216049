"""A run's records in an object store: written on the coordinator's node, mirrored beside training, fetched elsewhere.

The store has the small files as they are (`status.json`, `summary.json`, ...) and the growing ones in pieces under
`records/`, named by the term of their writer; `records/CURRENT.json` says which term's pieces count. Where the run's
folder is a path, nothing here does anything. Checkpoints and weights go to the storage by themselves.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from elastic_ring.config import RunConfig, Timeouts
from elastic_ring.errors import RecordDamaged, StaleMessage, StorageFailed, TermLost
from elastic_ring.files import denied, replace_file
from elastic_ring.monitor.callbacks import CALLBACKS_NAME, kept_places
from elastic_ring.monitor.journal import MAX_BYTES
from elastic_ring.monitor.json_files import DAMAGED, json_bytes, parse_json
from elastic_ring.monitor.metrics import CONFIG_NAME, JOURNAL_NAME, METRICS_NAME, STATUS_NAME, SUMMARY_NAME
from elastic_ring.state.checkpoints import FOLDER as CHECKPOINTS
from elastic_ring.state.storage.backend import ignore
from elastic_ring.state.storage.folder import Storage
from elastic_ring.state.storage.local_files import OTHER_FILE_SYSTEM, try_calls

log = logging.getLogger(__name__)

APPENDED = (JOURNAL_NAME, METRICS_NAME)
REPLACED = (STATUS_NAME, SUMMARY_NAME, "loss.png")
SETTINGS = (CONFIG_NAME, "config.toml", "huggingface.json")
FOLDER, CURRENT = "records", "records/CURRENT.json"
PIECE_BYTES = 1 << 20
PERIOD_S = 1.0
TELL_AGAIN_S = 60.0
LOOK_S = 10.0
FIRST_RECORDS_BYTES = 64 * 1024
"""More than a run writes before its first step."""
RECORDS = frozenset({CONFIG_NAME, JOURNAL_NAME, STATUS_NAME, SUMMARY_NAME, "terms"})
"""One of them at least is in a run's folder."""


def check_writable(folder: Path, *, holds_run: bool = True) -> None:
    """Raises ValueError for a run folder that cannot be written to, or that holds files and no run's records. A folder
    that `holds_run` needs all calls of a run's storage; others have a driver's own files."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"run_dir={str(folder)!r} is a file: give a folder, or a name that does not exist yet")
    for parent in folder.parents:
        if parent.exists() and not parent.is_dir():
            raise ValueError(f"run_dir={str(folder)!r} cannot be written to: {parent} is a file; give a folder")
    try:
        names = {path.name for path in folder.iterdir()} if folder.exists() else set[str]()
        has_checkpoints = any(folder.glob(f"{CHECKPOINTS}/step-*/lineage-*"))
        if names and not has_checkpoints and not any(name in RECORDS or name.startswith("attempt-") for name in names):
            raise ValueError(f"run_dir={str(folder)!r} holds other files: give a new folder")
        folder.parent.mkdir(parents=True, exist_ok=True)
        there = folder if folder.is_dir() else folder.parent
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(bytes(FIRST_RECORDS_BYTES))  # a full disk often still accepts an empty file
            file.flush()
            if holds_run:
                try_calls(there)
            os.fsync(file.fileno())
    except StorageFailed as error:
        raise ValueError(f"run_dir={str(folder)!r}: {error.message}: {OTHER_FILE_SYSTEM}") from error
    except PermissionError as error:
        raise ValueError(f"run_dir={str(folder)!r} cannot be written to: {denied(error)}") from error
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise ValueError(
            f"run_dir={str(folder)!r} cannot be written to ({error.strerror or error}): "
            f"{'free space there, or ' * full}give a folder that can"
        ) from error


def storage_of(run: RunConfig, tell: Callable[[str], None] = ignore) -> Storage:
    """The run's storage, connected. Raises StorageFailed."""
    return Storage(run.storage_uri, timeout_s=run.timeouts.storage_s, tell=tell).open(write=False)


def fetch(run: RunConfig, folder: Path, *, keep_longer: bool = False, tell: Callable[[str], None] = ignore) -> None:
    """Bring the records from the store into `folder`; nothing for a run whose folder is a path.

    `keep_longer`: a growing file that is there already stays where it only goes on from what the store has.
    """
    if not run.is_remote:
        return
    storage = storage_of(run, tell)
    folder.mkdir(0o700, parents=True, exist_ok=True)
    present = {name for name, _ in storage.names(recursive=False)}
    for name in (*REPLACED, *SETTINGS):
        _bring(folder / name, storage.read_record(name) if name in present else None)
    for name in APPENDED:
        data, path = growing(storage, name), folder / name
        if not (keep_longer and path.exists() and path.read_bytes().startswith(data)):
            _bring(path, data or None)


def _bring(path: Path, data: bytes | None) -> None:
    """Write a file as the store has it; None removes it."""
    if data is None:
        path.unlink(missing_ok=True)
    else:
        replace_file(path, data)


def growing(storage: Storage, name: str) -> bytes:
    """A growing file in a store or in a run's folder, by its pieces or, where a run has ended, whole; empty where there
    is none. Raises StorageFailed; RecordDamaged for one that is longer than a run writes."""
    term = _current_term(storage)
    prefix = _prefix(name, term)
    pieces = [piece for piece in storage.names(FOLDER) if piece[0].startswith(prefix)] if term else []
    if not any(num_bytes for _, num_bytes in pieces):
        pieces = [(name, storage.size(name))] if storage.exists(name) else []
    if sum(num_bytes for _, num_bytes in pieces) > MAX_BYTES:
        raise RecordDamaged(f"{storage.at(name)} has more than {MAX_BYTES} bytes", path=name)
    return b"".join(storage.read(piece) for piece, _ in sorted(pieces))


def _current_term(storage: Storage) -> int:
    """The term whose pieces count; the newest that has any where the record of it is damaged."""
    if not storage.exists(CURRENT):
        return 0
    try:
        return int(parse_json(storage.read_record(CURRENT), storage.at(CURRENT))["term"])
    except (RecordDamaged, LookupError, TypeError, ValueError) as error:
        log.warning("%s is damaged (%s): takes the newest records", storage.at(CURRENT), error)
        return max((0, *(_term_of(piece) for piece, _ in storage.names(FOLDER))))


def publish(run: RunConfig, folder: Path) -> None:
    """Put the settings, which the driver writes, into the store."""
    if run.is_remote:
        storage = storage_of(run)
        for name in SETTINGS:
            if (folder / name).exists():
                storage.replace(name, (folder / name).read_bytes())


def forget_end(run: RunConfig, *, goes_on: bool, was_finished: bool) -> None:
    """At a new attempt, remove the records of an earlier one's end from the store, and reduce the record of callbacks'
    events to `kept_places`, or remove it."""
    if not run.is_remote:
        return
    storage = storage_of(run)
    for name in REPLACED:
        storage.remove(name)
    if not goes_on:
        storage.remove(CALLBACKS_NAME)
    elif storage.exists(CALLBACKS_NAME):
        try:
            record = parse_json(storage.read_record(CALLBACKS_NAME), storage.at(CALLBACKS_NAME))
            kept = kept_places(record, was_finished=was_finished)
        except (RecordDamaged, LookupError, TypeError, AttributeError) as error:
            log.warning("%s; the driver that runs callbacks sets it aside", error)
            return
        storage.replace(CALLBACKS_NAME, json_bytes(kept))


def fetch_places(run: RunConfig, folder: Path) -> None:
    """Bring the record of the events that callbacks have received, from any driver, from the store into `folder`."""
    if run.is_remote:
        storage = storage_of(run)
        is_there = storage.exists(CALLBACKS_NAME)
        _bring(folder / CALLBACKS_NAME, storage.read_record(CALLBACKS_NAME) if is_there else None)


def keep_places(run: RunConfig, folder: Path) -> None:
    """Put the record of callbacks' events into the store. If it fails, a driver on another host repeats some events."""
    if run.is_remote:
        try:
            storage_of(run).replace(CALLBACKS_NAME, (folder / CALLBACKS_NAME).read_bytes())
        except StorageFailed as error:
            log.warning("the record of the callbacks' events is not in the run's storage: %s", error)


class RunRecords:
    """A run's records for an onlooker: its folder, or a copy of the records in its object store."""

    def __init__(self, where: str, tell: Callable[[str], None] = ignore) -> None:
        """`where`: the run's folder, or s3://bucket/prefix/NAME. `tell`: gets a line when the store does not answer,
        which is waited for LOOK_S: somebody looks on."""
        timeouts = Timeouts(storage_s=LOOK_S)
        self._run = RunConfig("onlooker", run_dir=where.removeprefix("file://"), timeouts=timeouts)
        self._tell = tell
        self._copy: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> RunRecords:
        return self

    def __exit__(self, *error: object) -> None:
        if self._copy is not None:
            self._copy.cleanup()

    def look(self) -> Path:
        """The folder with the records as they are now. Raises StorageFailed; ValueError where a store has none."""
        if not self._run.is_remote:
            return Path(self._run.storage_uri)
        if self._copy is None:
            self._copy = tempfile.TemporaryDirectory(prefix="elastic-ring-")
        folder = Path(self._copy.name)
        fetch(self._run, folder, tell=self._tell)
        if not any(folder.iterdir()):
            raise ValueError(f"{self._run.storage_uri}: holds no run; give the storage path and the name of a run")
        return folder


class Mirror:
    """Copies the coordinator's records to the store every second, by which the journal may lag. It logs a failing store
    once a minute; training goes on. A replaced coordinator writes nothing more."""

    def __init__(self, run: RunConfig, term: int, ask: Callable[[], None] = lambda: None) -> None:
        """`ask` asks the storage for a newer term, and raises StaleMessage or TermLost where there is one."""
        self._run, self._term, self._ask = run, term, ask
        self._storage = Storage(run.storage_uri, timeout_s=run.timeouts.storage_s) if run.is_remote else None
        self._begun = {name: 0 for name in APPENDED}  # where the piece begins that still grows
        self._sent = {name: 0 for name in APPENDED}
        self._seen: dict[str, int] = {}
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._is_current = False
        self._told_s = -TELL_AGAIN_S
        self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)

    def open(self) -> None:
        if self._storage is not None:
            self._storage.open(write=False)
            self._thread.start()

    def flush(self) -> None:
        """Everything written so far is in the store when this returns. Raises StorageFailed, and as `ask`."""
        if (storage := self._storage) is None:
            return
        self._ask()
        with self._lock:
            # Before the lines that they count: a copy of a status must not be ahead of the journal's.
            paths = [path for path in map(self._run.folder.joinpath, REPLACED) if path.exists()]
            replaced = {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in paths}
            for name in APPENDED:
                self._append(storage, name)
            if not self._is_current and _current_term(storage) <= self._term:
                storage.replace(CURRENT, json_bytes({"term": self._term, "unix_s": time.time()}))
                for piece, _ in storage.names(FOLDER):
                    if 0 <= _term_of(piece) < self._term:
                        storage.remove(piece)
                self._is_current = True
            replaced |= {
                path.name: (path.stat().st_mtime_ns, path.read_bytes())
                for path in self._run.folder.glob(f"*{DAMAGED}*")
                if path.stat().st_mtime_ns != self._seen.get(path.name)
            }
            for name, (changed_ns, data) in replaced.items():
                if changed_ns != self._seen.get(name):
                    storage.replace(name, data)
                    self._seen[name] = changed_ns

    def abandon(self) -> None:
        """The run is another submission's: nothing is copied any more."""
        self._over.set()

    def close(self, timeout_s: float) -> None:
        """A last copy, with whole growing files. Logs it if the store refuses."""
        if self._storage is None:
            return
        self._over.set()
        self._thread.join(timeout_s)
        try:
            self.flush()
            for name in APPENDED:
                if (self._run.folder / name).exists():
                    self._storage.replace(name, (self._run.folder / name).read_bytes())
        except (StaleMessage, TermLost) as error:
            log.warning("the run's last records stay in %s: %s", self._run.folder, error)
        except StorageFailed as error:
            log.error("the run's last records are not in its storage, only in %s: %s", self._run.folder, error)

    def _work(self) -> None:
        assert self._storage is not None
        while not self._over.wait(PERIOD_S):
            try:
                self.flush()
            except (StaleMessage, TermLost):
                return  # the deciding thread looks by itself, and gets the error
            except (StorageFailed, OSError) as error:
                if time.monotonic() - self._told_s > TELL_AGAIN_S:
                    self._told_s = time.monotonic()
                    log.warning("the run's records lag in its storage, training goes on: %s", error)

    def _append(self, storage: Storage, name: str) -> None:
        path = self._run.folder / name
        size = path.stat().st_size if path.exists() else 0
        while self._sent[name] < size:
            begun = self._begun[name]
            stop = min(size, begun + PIECE_BYTES)
            with path.open("rb") as file:
                file.seek(begun)
                storage.replace(f"{_prefix(name, self._term)}{begun:014d}", file.read(stop - begun))
            self._sent[name] = stop
            if stop == begun + PIECE_BYTES:
                self._begun[name] = stop


def _prefix(name: str, term: int) -> str:
    return f"{FOLDER}/{name}-{term:06d}-"


def _term_of(piece: str) -> int:
    """-1 for other files."""
    number = re.fullmatch(rf"{FOLDER}/.+-(\d+)-\d+", piece)
    return int(number[1]) if number else -1
