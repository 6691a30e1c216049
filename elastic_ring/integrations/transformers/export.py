"""A run's final weights as transformers loads them: config, safetensors files with an index, tokenizer.

Weights are read tensor by tensor; at most those of one file that is written are in memory.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from elastic_ring.integrations.transformers.checks import config_of
from elastic_ring.integrations.transformers.model import CONFIG_FILE
from elastic_ring.integrations.transformers.module import build, class_of
from elastic_ring.integrations.transformers.weights import INDEX
from elastic_ring.monitor.metrics import CONFIG_NAME
from elastic_ring.runtime.run_storage import RunRecords
from elastic_ring.state.checkpoints.stored_weights import StoredWeights

log = logging.getLogger(__name__)

DTYPES = ("float32", "bfloat16", "float16")
BESIDE_WEIGHTS = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.jinja", "generation_config.json",
)  # fmt: skip


@dataclass(frozen=True)
class Exported:
    """What `export` wrote."""

    folder: Path
    num_tensors: int
    num_bytes: int
    num_files: int
    dtype: str


def export(
    run: str | Path,
    out: str | Path,
    *,
    dtype: str | None = None,
    tokenizer: str | Path | None = None,
    max_file_size: str = "5GB",
) -> Exported:
    """Write the final weights of a run of `ring_model` as `save_pretrained` does.

    `run`: its folder, or s3://bucket/prefix/NAME. `dtype`: float32, bfloat16 or float16; by default what the run
    computed in. `tokenizer`: the folder whose tokenizer is copied, by default the one that the run began from.

    Raises ValueError for a run of another model, for one that has not completed, and for an `out` that is not empty;
    StorageFailed for a store that does not answer.
    """
    where, out = os.path.expanduser(run), Path(out).expanduser()
    with RunRecords(where) as records:
        run_folder = records.look()
        record = _json(run_folder / CONFIG_FILE, "give the folder of a run of elastic_ring.integrations.transformers")
        dtype = dtype or str(_json(run_folder / CONFIG_NAME, "give a run's folder")["step"]["param_dtype"])
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r}: must be one of {', '.join(DTYPES)}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"out={str(out)!r} is not an empty folder: give a new one")
    weights = StoredWeights.open(where)
    empty = _empty(record["config"], weights, getattr(torch, dtype))
    out.mkdir(parents=True, exist_ok=True)
    num_bytes, num_files = _write_weights(weights, empty, out, max_file_size)
    _copy_tokenizer(Path(tokenizer) if tokenizer else Path(record["folder"]), out, was_asked=tokenizer is not None)
    config = config_of(record["config"])
    config.dtype, config.architectures = getattr(torch, dtype), [class_of(config).__name__]
    config.save_pretrained(out)  # last: a folder without a config does not load
    return Exported(out, len(empty), num_bytes, num_files, dtype)


def _json(path: Path, way_out: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read ({error}); {way_out}") from error
    return found


def _empty(plain: dict[str, Any], weights: StoredWeights, dtype: torch.dtype) -> dict[str, Tensor]:
    """The model's parameters on the meta device, in `dtype`. Raises ValueError where the run has others."""
    with torch.device("meta"):
        model = build(config_of(plain))
    found = {name: param.detach().to(dtype) for name, param in model.named_parameters()}
    shapes = {name: tuple(param.shape) for name, param in found.items()}
    if shapes != weights.shapes:
        odd = sorted(set(shapes.items()) ^ set(weights.shapes.items()))
        raise ValueError(
            f"the run's weights are not those of its model under this version of transformers: {odd[0][0]} "
            f"{odd[0][1]} is in one of them only; export with the version that it was trained with"
        )
    return found


def _write_weights(
    weights: StoredWeights, empty: Mapping[str, Tensor], out: Path, max_file_size: str
) -> tuple[int, int]:
    """(bytes, files) of the weights."""
    from huggingface_hub import split_torch_state_dict_into_shards

    plan = split_torch_state_dict_into_shards(dict(empty), max_shard_size=max_file_size)
    for file_name, names in plan.filename_to_tensors.items():
        held = {name: weights.tensor(name).to(empty[name].dtype).contiguous() for name in names}
        partial = out / f".{file_name}.{os.getpid()}"
        save_file(held, partial, metadata={"format": "pt"})
        partial.chmod(0o666 & ~_umask(out))
        os.replace(partial, out / file_name)
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (out / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in empty.values())
    return num_bytes, len(plan.filename_to_tensors)


def _umask(folder: Path) -> int:
    """This process's umask, read off a new file: safetensors writes files that only their owner can read."""
    probe = folder / f".mode.{os.getpid()}"
    probe.touch()
    mode = probe.stat().st_mode & 0o666
    probe.unlink()
    return 0o666 ^ mode


def _copy_tokenizer(folder: Path, out: Path, *, was_asked: bool) -> None:
    found = [name for name in BESIDE_WEIGHTS if (folder / name).is_file()] if folder.parts else []
    for name in found:
        shutil.copyfile(folder / name, out / name)
    if any(name.startswith(("tokenizer", "vocab")) for name in found):
        return
    if was_asked:
        raise ValueError(f"tokenizer={str(folder)!r} has none of {', '.join(BESIDE_WEIGHTS[:3])}: name another folder")
    log.warning("no tokenizer is copied: %s has none; name its folder to have it in the export", folder)
