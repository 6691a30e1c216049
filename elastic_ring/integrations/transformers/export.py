"""A run's weights, final or of a checkpoint, as transformers loads them: config, safetensors files with an index,
tokenizer, card.

Runs of `ring_model`, under the names that they have, and of the built-in decoder, which becomes a Llama.
Weights are read tensor by tensor; at most those of one file that is written are in memory.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from elastic_ring.data.packing import BYTE_VOCAB_SIZE
from elastic_ring.data.tokenizer import BYTES
from elastic_ring.files import check_model_links
from elastic_ring.integrations.transformers.checks import check_tokenizer, config_of, read_object
from elastic_ring.integrations.transformers.export_card import Rows, base_name, training_rows, write_card
from elastic_ring.integrations.transformers.export_config import (
    NOTE,
    byte_tokenizer,
    config_of_preset,
    name_of_preset,
    tokens_of_run,
    with_pattern,
)
from elastic_ring.integrations.transformers.lora import (
    ADAPTERS,
    MergedWeights,
    TrainedAdapters,
    Weights,
    write_adapters,
)
from elastic_ring.integrations.transformers.model import CONFIG_FILE
from elastic_ring.integrations.transformers.module import build, class_of
from elastic_ring.integrations.transformers.weights import INDEX
from elastic_ring.model.config import ModelConfig
from elastic_ring.monitor.json_files import as_written
from elastic_ring.monitor.metrics import CONFIG_NAME
from elastic_ring.runtime.run_storage import RunRecords
from elastic_ring.state.checkpoints.stored_weights import CheckpointWeights, StoredWeights
from elastic_ring.validation import from_plain

log = logging.getLogger(__name__)

DTYPES = ("float32", "bfloat16", "float16")
BESIDE_WEIGHTS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)


@dataclass(frozen=True)
class Exported:
    """The result of `export`."""

    folder: Path
    num_tensors: int
    num_bytes: int
    num_files: int
    dtype: str


def export(
    run: str | Path,
    out: str | Path,
    *,
    step: int | None = None,
    best: bool = False,
    dtype: str | None = None,
    tokenizer: str | Path | None = None,
    base_model: str | None = None,
    max_file_size: str = "5GB",
    allow_dense: bool = False,
    merge: bool = False,
) -> Exported:
    """Write the weights of a run of `ring_model`, or of a preset as a Llama, as `save_pretrained` does, with a card.

    `run`: its folder, or s3://bucket/prefix/NAME. `step`: of the checkpoint after so many steps, or with `best` of the
    one that `KeepBest` keeps; by default the final weights. `dtype`: float32, bfloat16 or float16; by default what the
    run computed in. `tokenizer`: "bytes", or the folder whose tokenizer is copied; by default the one of the folder
    that the run began from, or of a preset's data. `base_model`: how card and adapter_config.json name that folder, by
    an id of the hub or a path; by default its id if it is of the hub's cache, else its last part. `allow_dense`: export
    layers whose pattern no config of transformers says, as layers that attend to all earlier tokens. Of a run with
    `lora=` a folder of peft is written, or with `merge` the weights of the base with the adapters in them.

    Raises ValueError for a run of another model, for one that has not completed or has no such checkpoint, for such a
    pattern, and for an `out` that is not empty; StorageFailed for a store that does not answer; CheckpointDamaged.
    """
    where, out = os.path.expanduser(run), Path(out).expanduser()
    if step is not None and best:
        raise ValueError(f"step={step} beside best=True: each names a checkpoint; give one")
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r}: must be one of {', '.join(DTYPES)}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"out={str(out)!r} is not an empty folder: give a new one")
    with RunRecords(where) as records:
        folder = records.look()
        is_run = (folder / CONFIG_NAME).exists()  # else `read` says so
        checkpoint = CheckpointWeights.open(where, step) if is_run and (step is not None or best) else None
        trained = _Trained.read(folder, checkpoint, base_model)
    if checkpoint is not None and checkpoint.branch:
        log.warning("step %d is of %s", checkpoint.step, checkpoint.branch)
    dtype, tokenizer = dtype or trained.dtype, str(tokenizer or trained.tokenizer)
    plain, lost = with_pattern(trained.config, trained.pattern, trained.context_tokens, allow_dense=allow_dense)
    _check_tokenizer(tokenizer, plain["vocab_size"])
    weights: Weights = checkpoint or StoredWeights.open(where)
    if merge and trained.adapters is None:
        raise ValueError(f"merge=True: run {where!r} has no adapters; leave it out")
    if trained.adapters is not None and not merge:
        _check_base(trained.adapters, plain, allow_dense=allow_dense)
        num_tensors, num_bytes = write_adapters(weights, trained.adapters, trained.base, out, getattr(torch, dtype))
        shutil.copymode(out / "adapter_config.json", out / ADAPTERS)  # safetensors' files are their owner's alone
        _write_tokenizer(tokenizer, out, trained, was_asked=tokenizer != trained.tokenizer)
        lora = trained.adapters.lora
        title = f"LoRA adapters ({lora}) above `{trained.base}`"
        write_card(out, title, trained.rows, base=trained.base, adapters=True)
        if lost:
            log.warning("%s", lost)
        return Exported(out, num_tensors, num_bytes, 1, dtype)
    if trained.adapters is not None:
        weights = MergedWeights.open(weights, trained.adapters)
    return _export_whole(weights, trained, config_of(plain), lost, out, dtype, tokenizer, max_file_size)


def _export_whole(
    weights: Weights,
    trained: _Trained,
    config: Any,
    lost: str,
    out: Path,
    dtype: str,
    tokenizer: str,
    max_file_size: str,
) -> Exported:
    slices, shapes = _joined_slices(weights, trained.exported_name)
    with torch.device("meta"):
        model = build(config)
    empty = _empty(model, shapes, getattr(torch, dtype))

    def value(name: str) -> Tensor:
        if name in slices:
            parts = [weights.tensor(own) for own in slices[name]]
            return parts[0] if len(parts) == 1 else torch.cat(parts, _sliced_dim(name))
        return torch.tensor(trained.buffers.get(name, (0.0,) * empty[name].numel())).view(empty[name].shape)

    out.mkdir(parents=True, exist_ok=True)
    num_bytes, num_files = _write_weights(model, value, empty, out, max_file_size)
    _write_tokenizer(tokenizer, out, trained, was_asked=tokenizer != trained.tokenizer)
    title = f"A {config.model_type} of {model.num_parameters():,} parameters"
    title += "" if trained.adapters is None else f", with LoRA adapters ({trained.adapters.lora}) merged into it"
    title += f"; {lost}" if lost else ""
    write_card(out, title, trained.rows, base=trained.base)
    config.dtype, config.architectures = getattr(torch, dtype), [class_of(config).__name__]
    config.save_pretrained(out)  # last: a folder without a config does not load
    if lost:
        log.warning("%s; %s says so under %r", lost, out / "config.json", NOTE)
    return Exported(out, len(empty), num_bytes, num_files, dtype)


def _check_base(adapters: TrainedAdapters, plain: Mapping[str, object], *, allow_dense: bool) -> None:
    """Raises ValueError for adapters of another model than their folder's: of a part of it, or with other windows."""
    if adapters.outer_type:
        raise ValueError(
            f"the run's adapters belong to the text model of a {adapters.outer_type}, and peft would put them on the "
            "whole: give --merge (merge=True)"
        )
    own, needed = ({**config, "architectures": None, NOTE: None} for config in (adapters.config, plain))
    if needed != own and not allow_dense:
        raise ValueError(
            "the run trained with other windows than its base has, and a folder of adapters has no config to say "
            "so: give --merge (merge=True), or --allow-dense (allow_dense=True) to export the adapters all the same"
        )


@dataclass(frozen=True)
class _Trained:
    """A run's records of its model. `base`: the name of the folder that it began from, or "". `rows`: of its card."""

    config: Mapping[str, object]
    pattern: str
    context_tokens: int
    dtype: str
    tokenizer: str
    exported_name: Callable[[str], str]
    buffers: Mapping[str, tuple[float, ...]]
    rows: Rows
    base: str = ""
    adapters: TrainedAdapters | None = None

    @classmethod
    def read(cls, folder: Path, checkpoint: CheckpointWeights | None, base_model: str | None) -> _Trained:
        """Raises ValueError for a run whose model is neither the built-in decoder nor one of transformers,
        RecordDamaged."""
        recorded = read_object(folder / CONFIG_NAME, "give a run's folder")
        own = read_object(folder / CONFIG_FILE, "export needs it") if (folder / CONFIG_FILE).exists() else None
        with as_written(str(folder / (CONFIG_NAME if own is None else CONFIG_FILE))):
            step = recorded["step"]
            pattern = str(recorded.get("pattern") or "")
            context, dtype = int(step["context_tokens"]), str(step["param_dtype"])
            place = (None, "") if checkpoint is None else (checkpoint.step, checkpoint.branch)
            rows = training_rows(folder, recorded, *place)
            if own is not None:
                kept = {name: tuple(map(float, values)) for name, values in own.get("buffers", {}).items()}
                config, folder_of_base, adapters = dict(own["config"]), str(own["folder"]), TrainedAdapters.of(own)
                has_base = str(recorded.get("identity", {}).get("initial", "")).startswith("FolderWeights")
                base = base_model or (base_name(folder_of_base) if has_base or adapters is not None else "")
                return cls(config, pattern, context, dtype, folder_of_base, str, kept, rows, base, adapters)
            shape = from_plain(ModelConfig, recorded["model"]) if recorded.get("model") else None
            tokenizer, end = ("", None) if shape is None else tokens_of_run(recorded.get("data", {}))
        if shape is None:
            raise ValueError(
                f"{folder}: its model is neither one of transformers ({CONFIG_FILE}) nor a preset's, so nobody knows "
                "its config: load the weights into your own module (elastic_ring.load_weights)"
            )
        plain = config_of_preset(shape, context, end)
        return cls(plain, pattern, context, dtype, tokenizer, name_of_preset, {}, rows, base_model or "")


def _joined_slices(
    weights: Weights, exported_name: Callable[[str], str]
) -> tuple[dict[str, list[str]], dict[str, tuple[int, ...]]]:
    """(names in the run by exported name, in the order of their slices; shapes by exported name)."""
    from transformers.core_model_loading import dot_natural_key

    slices, shapes = dict[str, list[str]](), dict[str, tuple[int, ...]]()
    for own in sorted(weights.shapes, key=dot_natural_key):
        slices.setdefault(exported_name(own), []).append(own)
    for name, parts in slices.items():
        shape = list(weights.shapes[parts[0]])
        if len(parts) > 1:
            shape[_sliced_dim(name)] = sum(weights.shapes[own][_sliced_dim(name)] for own in parts)
        shapes[name] = tuple(shape)
    return slices, shapes


def _sliced_dim(name: str) -> int:
    """Along which the built-in decoder slices the parameter of this exported name."""
    return int(name.endswith("down_proj.weight"))


def _empty(model: Any, stored: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> dict[str, Tensor]:
    """The parameters of a model on the meta device in `dtype`, or in fp32 where transformers keeps that (routers), and
    its buffers that are saved. Raises ValueError where other parameters are `stored`."""
    kept = [f".{part}." for part in model._get_dtype_plan(dtype)]
    parameters = {
        name: param.detach() if any(part in f".{name}." for part in kept) else param.detach().to(dtype)
        for name, param in model.named_parameters()
    }
    saved = model.state_dict()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in saved}
    shapes = {name: tuple(param.shape) for name, param in parameters.items()}
    shapes |= {name: tuple(buffer.shape) for name, buffer in buffers.items() if name in stored}
    # A preset without an expert for every token: its weights are zeros.
    shapes = {name: shape for name, shape in shapes.items() if name in stored or ".shared_experts." not in name}
    if shapes != stored:
        odd = sorted(set(shapes.items()) ^ set(stored.items()))
        raise ValueError(
            f"the run's weights are not those of its model under this version of transformers: {odd[0][0]} "
            f"{odd[0][1]} is in one of them only; export with the version that it was trained with"
        )
    return parameters | buffers


def _write_weights(
    model: Any, value: Callable[[str], Tensor], empty: Mapping[str, Tensor], out: Path, max_file_size: str
) -> tuple[int, int]:
    """(bytes, files) of the weights, under the names in which the hub has them: experts one by one. In memory are the
    tensors of one file, and one of the model's."""
    from huggingface_hub import split_torch_state_dict_into_shards

    pieces = {name: _pieces(model, name, tensor) for name, tensor in empty.items()}
    flat = {name: tensor for parts in pieces.values() for name, tensor in parts.items()}
    plan, held = split_torch_state_dict_into_shards(flat, max_shard_size=max_file_size), dict[str, Tensor]()
    for name, tensor in empty.items():
        whole = value(name).to(tensor.dtype).contiguous()
        for part, value_of_part in _pieces(model, name, whole).items():
            is_whole = value_of_part is whole
            held[part] = value_of_part if is_whole else value_of_part.clone()  # a view: a file may have no two
            file_name = plan.tensor_to_filename[part]
            in_file = plan.filename_to_tensors[file_name]
            if all(each in held for each in in_file):
                partial = out / f".{file_name}.{os.getpid()}"
                partial.touch()
                mode = partial.stat().st_mode  # by the umask: safetensors writes files that only their owner can read
                save_file({each: held.pop(each) for each in in_file}, partial, metadata={"format": "pt"})
                partial.chmod(mode)
                os.replace(partial, out / file_name)
    assert not held, sorted(held)
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (out / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in empty.values())
    return num_bytes, len(plan.filename_to_tensors)


def _pieces(model: Any, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """The stored tensors of a parameter, by transformers' own table."""
    from transformers.core_model_loading import revert_weight_conversion

    stored: dict[str, Tensor] = revert_weight_conversion(model, {name: tensor})
    return stored


def _check_tokenizer(where: str, vocab_size: int) -> None:
    """Raises ValueError for a tokenizer with more tokens than the model."""
    if where == BYTES and vocab_size < BYTE_VOCAB_SIZE:
        raise ValueError(f"tokenizer='bytes' has {BYTE_VOCAB_SIZE} tokens, and the model {vocab_size}: name its own")
    if where not in (BYTES, ""):
        check_model_links(Path(where).expanduser())
        check_tokenizer(Path(where).expanduser(), vocab_size)


def _write_tokenizer(where: str, out: Path, trained: _Trained, *, was_asked: bool) -> None:
    if where == BYTES:
        byte_tokenizer(trained.context_tokens).save_pretrained(out)
        return
    folder = Path(where).expanduser()
    names = [name for name in BESIDE_WEIGHTS if (folder / name).is_file()] if where else []
    for name in names:
        shutil.copyfile(folder / name, out / name)
    if any(name.startswith(("tokenizer", "vocab")) for name in names):
        return
    if was_asked:
        raise ValueError(f"tokenizer={str(folder)!r} has none of {', '.join(BESIDE_WEIGHTS[:3])}: name another folder")
    log.warning(
        "no tokenizer is copied: %s; name its folder, or bytes, to have it in the export",
        f"{folder} has none" if where else "the run's records name none that can be read",
    )
