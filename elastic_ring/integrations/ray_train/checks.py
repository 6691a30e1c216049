"""What is asked of DeepSpeed and of the driver's disk before workers start."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

from elastic_ring.integrations.ray_train.settings import Zero3Config
from elastic_ring.model.config import built_in

BLOCK_BYTES = 4096


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

    given = {key: value for key, value in zero.deepspeed.get("zero_optimization", {}).items() if value != "auto"}
    try:
        DeepSpeedZeroConfig(**given)
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
        folder.mkdir(parents=True, exist_ok=True)
        opened = os.open(name, os.O_CREAT | os.O_WRONLY | os.O_DIRECT, 0o600)
    except OSError as error:
        why = error.strerror or str(error)
        if name.exists():
            name.unlink()
            why = "its file system has no direct I/O, which DeepSpeed uses; tmpfs is one of these"
        raise ValueError(
            f"nvme_path={str(folder)!r} cannot be used for offloading ({why}): give a folder on a local "
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
