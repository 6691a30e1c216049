"""DeepSpeed and the operators that it compiles: is it there, are they built, has a killed build left a lock?

torch builds each operator in a folder of its own and holds `lock` there meanwhile. A build that is killed leaves the
file, and everybody who needs the operator then waits for it without a word and without end.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import secrets
import time
from pathlib import Path
from typing import Any

import psutil

from elastic_ring.config import environment
from elastic_ring.integrations.ray_train.settings import Zero3Config
from elastic_ring.model.config import built_in

log = logging.getLogger(__name__)

FOLDER = "TORCH_EXTENSIONS_DIR"
LOCK = "lock"
ASYNC_IO = ("pin_memory", "async_io")
"""The operators of NVMe offload."""
BLOCK_BYTES = 4096


def check_installed() -> None:
    """Raises ValueError with the way out."""
    if importlib.util.find_spec("deepspeed") is None:
        raise ValueError(
            "deepspeed is not installed, and ZeRO-3 in Ray Train is DeepSpeed's: pip install setuptools wheel ninja, "
            "then pip install --no-build-isolation '.[deepspeed]' (it is built against the installed torch)"
        )


def extensions_folder() -> Path:
    """Where operators are built and kept: TORCH_EXTENSIONS_DIR, or the user's cache, which outlives a reboot.

    DeepSpeed's own default is in /tmp, where each reboot costs the build again.
    """
    folder = environment().get(FOLDER)
    return Path(folder) if folder else Path.home() / ".cache" / "elastic_ring" / "torch_extensions"


def check_locks(folder: Path) -> None:
    """Raises ValueError for a build's lock that no process of this host holds any more."""
    if not (locks := sorted(folder.glob(f"*/{LOCK}"))):
        return
    # torch's builder has its lock open as long as it builds; files of other users' processes cannot be seen.
    processes = [process.info["open_files"] or () for process in psutil.process_iter(["open_files"])]
    held = {file.path for files in processes for file in files}
    for lock in locks:
        if str(lock) not in held:
            age_s = max(0.0, time.time() - lock.stat().st_mtime)
            raise ValueError(
                f"{lock}: left {age_s:.0f} s ago by a build of DeepSpeed's operator {lock.parent.name} that was "
                f"killed, and every later run would wait for it without end: remove the folder {lock.parent}"
            )


def load_async_io(folder: Path) -> None:
    """Build the operators of NVMe offload, or load them where they are built. Raises ValueError with the way out."""
    folder.mkdir(parents=True, exist_ok=True)
    check_locks(folder)
    environment()[FOLDER] = str(folder)
    from deepspeed.ops.op_builder import AsyncIOBuilder

    builder = AsyncIOBuilder()
    if not builder.is_compatible():
        raise ValueError(
            "offload to nvme needs libaio and its header, which are not found: apt-get install libaio-dev, or offload "
            "to cpu"
        )
    built = all(any((folder / name).glob("*.so")) for name in ASYNC_IO)
    if not built:
        log.info("DeepSpeed's operators for NVMe are built into %s, once; this takes minutes", folder)
    begun_s = time.monotonic()
    try:
        builder.load(verbose=False)
    except Exception as error:
        raise ValueError(f"DeepSpeed's operator {builder.name} cannot be built in {folder}: {error}") from error
    if not built:
        log.info("built in %.0f s", time.monotonic() - begun_s)


def main() -> None:
    """Build the operators of NVMe offload before they are needed."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    check_installed()
    load_async_io(extensions_folder())


def check_no_experts(model: Any) -> None:
    """Raises ValueError for a factory of a model with experts of the built-in decoder."""
    shape = built_in(model)
    if shape is not None and shape.num_experts:
        raise ValueError(
            f"num_experts={shape.num_experts}: ZeRO-3 in Ray Train has no rule that balances experts; train "
            "them on the elastic ring"
        )


def check_zero_settings(zero: Zero3Config) -> None:
    """Raises ValueError for a setting under zero_optimization that DeepSpeed does not know, or a value it refuses."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from pydantic import ValidationError

    section = zero.deepspeed.get("zero_optimization", {})
    try:
        DeepSpeedZeroConfig(**{key: value for key, value in section.items() if value != "auto"})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(map(str, first["loc"]))
        raise ValueError(
            f"deepspeed configuration zero_optimization.{name}={first['input']!r}: DeepSpeed refuses it "
            f"({first['msg']})"
        ) from error


def check_swap_folder(folder: Path) -> None:
    """Raises ValueError for a folder that cannot be written to, or whose file system has no direct I/O."""
    name = folder / f".elastic-ring-{secrets.token_hex(4)}"
    try:
        folder.mkdir(0o700, parents=True, exist_ok=True)
        opened = os.open(name, os.O_CREAT | os.O_WRONLY | os.O_DIRECT, 0o600)
    except OSError as error:
        reason = error.strerror or str(error)
        if name.exists():
            name.unlink()
            reason = "its file system has no direct I/O, which DeepSpeed uses; tmpfs is one of these"
        raise ValueError(
            f"nvme_path={str(folder)!r} cannot be used for offloading ({reason}): give a folder on a local "
            "disk of every node (--nvme-path)"
        ) from error
    try:
        os.posix_fallocate(opened, 0, BLOCK_BYTES)
    except OSError as error:
        raise ValueError(
            f"nvme_path={str(folder)!r} cannot be written to ({error.strerror or error}): free space "
            "there, or give another folder (--nvme-path)"
        ) from error
    finally:
        os.close(opened)
        name.unlink(missing_ok=True)
