"""What others may have written, read as data: DeepSpeed's files without their code, and small facts between ranks.

DeepSpeed unpickles its checkpoints with `weights_only=False`, so that a file in a run's folder could run anything; and
torch's collectives of objects unpickle what any process on the network may have sent. Here both are data only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Set
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.distributed as dist

from elastic_ring.config import environment
from elastic_ring.errors import CheckpointDamaged
from elastic_ring.files import plain_json

ROW_BYTES = 512
"""The most bytes of one rank's report to the others, as JSON."""
_ONLY_DATA = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
_FILE = re.compile(r"(bf16_)?zero_pp_rank_[0-9]+_mp_rank_00_(model|optim)_states\.pt")
_NAMES = ("param_shapes", "frozen_param_shapes", "frozen_param_fragments", "module")
_EXPERTS = ("ds_autoep_layers", "autoep_layers", "universal_checkpoint_info")


@contextmanager
def data_only(folder: Path) -> Iterator[None]:
    """Whoever calls torch.load meanwhile, here and in child processes, gets tensors and plain values, and what
    DeepSpeed needs beside them. Raises CheckpointDamaged, with what it holds, for a file in `folder` with more."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum

    found = environment()
    before = found.get(_ONLY_DATA)
    found[_ONLY_DATA] = "1"
    try:
        with torch.serialization.safe_globals([LossScaler, DynamicLossScaler, ZeroStageEnum]):
            yield
    except UnpicklingError as error:
        why = next((line.strip() for line in str(error).splitlines() if "GLOBAL" in line), str(error)[:300])
        raise CheckpointDamaged(
            f"{folder} holds more than tensors and numbers, and was not read: {why}", path=str(folder)
        ) from error
    finally:
        if before is None:
            del found[_ONLY_DATA]
        else:
            found[_ONLY_DATA] = before


def check_names(folder: Path, names: Set[str], rank: int | None = None) -> None:
    """DeepSpeed's conversion makes paths of keys in its files: those must be `names` of the model. Files must be of
    stage 3: of others it takes other keys. `rank`: look at this one's files only, which alone DeepSpeed reads then.

    Call it in `data_only`. Raises CheckpointDamaged.
    """
    for path in sorted(folder.glob("*_states.pt" if rank is None else f"*zero_pp_rank_{rank}_*_states.pt")):
        kind = _FILE.fullmatch(path.name)
        state = torch.load(path, map_location="cpu", mmap=True) if kind else None
        if not kind or not isinstance(state, dict):
            reason = "is no file of ZeRO stage 3"
        elif kind[2] == "optim":
            optimizer = state.get("optimizer_state_dict")
            is_right = isinstance(optimizer, dict) and optimizer.get("zero_stage") == 3
            reason = "" if is_right else "is not of ZeRO stage 3"
        else:
            parts = [part for key in _NAMES for part in _parts_of(state.get(key))]
            keys = [key for part in parts for key in (part if isinstance(part, dict) else [part])]
            odd = [key for key in keys if not isinstance(key, str) or key not in names]
            odd += [key for key in _EXPERTS if state.get(key)]
            is_right = not odd and isinstance(state.get("param_shapes"), list)
            reason = "" if is_right else f"names {str(odd[:1])[:200]}, which the model does not have"
        if reason:
            raise CheckpointDamaged(f"{path} {reason}, and was not loaded", path=str(path))


def _parts_of(found: Any) -> list[Any]:
    return found if isinstance(found, list) else [found] if found else []


# ---------------------------------------------------------------- between the ranks


def gathered(value: Any, device: torch.device) -> list[Any]:
    """What each rank says, by rank. Collective over the default group. Raises ValueError."""
    text = json.dumps(value).encode()
    if len(text) > ROW_BYTES:
        raise ValueError(f"a rank reports {len(text)} bytes: there is room for {ROW_BYTES}")
    own = torch.tensor(list(text.ljust(ROW_BYTES)), dtype=torch.uint8, device=device)
    rows = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, own)
    return [plain_json(bytes(row.tolist()), ROW_BYTES) for row in rows]
