"""Which folder a run may take. Light to import: a command looks before it starts Ray."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

from elastic_ring.monitor.metrics import CONFIG_NAME, JOURNAL_NAME, STATUS_NAME, SUMMARY_NAME
from elastic_ring.state.checkpoints import FOLDER

FIRST_RECORDS_BYTES = 64 * 1024
"""More than a run writes before its first step."""
RECORDS = frozenset({CONFIG_NAME, JOURNAL_NAME, STATUS_NAME, SUMMARY_NAME, "terms"})
"""One of them at least is in a run's folder."""


def check_writable(folder: Path) -> None:
    """Raises ValueError for a run folder that cannot be written to, or that holds files and no run's records."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"run_dir={str(folder)!r} is a file: give a folder, or a name that does not exist yet")
    for parent in folder.parents:
        if parent.exists() and not parent.is_dir():
            raise ValueError(f"run_dir={str(folder)!r} cannot be written to: {parent} is a file; give a folder")
    try:
        names = {path.name for path in folder.iterdir()} if folder.exists() else set[str]()
        has_checkpoints = any(folder.glob(f"{FOLDER}/step-*/lineage-*"))
        if names and not has_checkpoints and not any(name in RECORDS or name.startswith("attempt-") for name in names):
            raise ValueError(f"run_dir={str(folder)!r} holds other files: give a new folder")
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder if folder.is_dir() else folder.parent) as file:
            file.write(bytes(FIRST_RECORDS_BYTES))  # a full disk often still accepts an empty file
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise ValueError(
            f"run_dir={str(folder)!r} cannot be written to ({error.strerror or error}): "
            f"{'free space there, or ' * full}give a folder that can"
        ) from error
