"""Reads a Hugging Face folder's safetensors files row by row; checks that they fit a model.

Each tensor is read from its file on access, and only the requested rows: no process holds the whole model. Folders of
mixture-of-experts models name experts one by one (`experts.3.down_proj.weight`), and the module has them in one
parameter; some families have other names besides. Transformers' own table of conversions says which.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from elastic_ring.files import check_links, check_model_links, few, name_below, plain_json, read_small

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
SAMPLE_BYTES = 1 << 16
NUM_NAMED = 5
# Earlier versions of transformers stored this buffer; it is computed from the config.
NO_PARAMETER = re.compile(r"(^|\.)rotary_emb\.inv_freq$")
Pieces = tuple[tuple[str, ...], ...]
"""The stored names of each row of a parameter; a row is their concatenation along its own first dimension."""


@dataclass(frozen=True)
class FolderWeights:
    """First values from a folder, by parameter name, as the trainer's `initial`.

    `files` and `shapes` have those of each stored name. `aliases` maps a parameter's name to the name it is stored
    under, where that is another, `pieces` to those of its rows where it is stored in parts. `digest` covers headers,
    sizes and samples of the files' bytes.
    """

    folder: str
    digest: str
    files: Mapping[str, str] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    pieces: Mapping[str, Pieces] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path) -> FolderWeights | None:
        """Reads the index and the headers; None for a folder without weights. Raises ValueError for one whose weights
        are in another format, or cannot be read."""
        check_model_links(folder)
        names, index = [SINGLE] if (folder / SINGLE).exists() else [], folder / INDEX
        if index.exists():
            try:
                content: Any = plain_json(read_small(index))
                names = sorted({name_below(name) for name in content["weight_map"].values()})
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                reason = f"{type(error).__name__}: {error}"
                raise ValueError(f"{index}: cannot be read as an index of weights ({reason})") from error
            check_links(folder, [folder / name for name in names])
        if not names:
            unread = [path.name for ending in ("*.bin", "*.pt") for path in sorted(folder.glob(ending))]
            if unread:
                raise ValueError(
                    f"model folder {str(folder)!r} has {unread[0]} and no safetensors: only safetensors are read; load "
                    "it with transformers once and save it with save_pretrained"
                )
            return None
        total, files, shapes = hashlib.sha256(), dict[str, str](), dict[str, tuple[int, ...]]()
        for name in names:
            path = folder / name
            try:
                with safe_open(path, framework="pt") as file:
                    files |= dict.fromkeys(file.keys(), name)
                    shapes |= {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
            except (OSError, SafetensorError) as error:
                raise ValueError(f"{path}: cannot be read as safetensors ({error})") from error
            size, parts = path.stat().st_size, list[bytes]()
            with path.open("rb") as stream:  # reading all of a large file would take minutes
                for start in (0, size // 2, max(0, size - SAMPLE_BYTES)):
                    stream.seek(start)
                    parts.append(stream.read(SAMPLE_BYTES))
            total.update(f"{name} {size} ".encode() + hashlib.sha256(b"".join(parts)).digest())
        return cls(str(folder), total.hexdigest()[:16], files, shapes)

    def tensor(self, name: str, shape: Sequence[int], rows: tuple[int, int] | None = None) -> Tensor:
        """The fp32 value of a parameter, or its rows [start, stop). Raises ValueError where shape or file differ."""
        start, stop = rows if rows is not None else (0, shape[0])
        path = Path(self.folder)
        try:
            if name in self.pieces:
                value = torch.empty(stop - start, *shape[1:], dtype=torch.float32)
                files: dict[str, Any] = {}
                for place, names in enumerate(self.pieces[name][start:stop]):
                    end = 0
                    for stored in names:
                        path = Path(self.folder, self.files[stored])
                        if path.name not in files:
                            files[path.name] = safe_open(path, framework="pt")
                        part = files[path.name].get_tensor(stored)
                        value[place, end : end + part.size(0)] = part
                        end += part.size(0)
                return value
            stored = self.aliases.get(name, name)
            path = Path(self.folder, self.files[stored])
            with safe_open(path, framework="pt") as file:
                part = file.get_slice(stored)
                if tuple(part.get_shape()) != tuple(shape):
                    raise ValueError(f"{path}: {stored} has shape {tuple(part.get_shape())}, the model {tuple(shape)}")
                whole: Tensor = part[start:stop]
                return whole.to(torch.float32)
        except (OSError, SafetensorError) as error:
            raise ValueError(
                f"{path}: cannot be read as safetensors ({error}); every worker must see the model folder"
            ) from error

    def fitted(self, model: nn.Module, stored_as: StoredNames) -> FolderWeights:
        """With aliases for the parameters of `model`, `stored_as` in this folder, and for its buffers that are there.
        Raises ValueError for weights that are missing, that the model does not have, or that have another shape; the
        message has the first five names of each."""
        prefix = f"{getattr(model, 'base_model_prefix', '')}."
        shared: dict[int, list[str]] = {}
        for name, param in model.named_parameters(remove_duplicate=False):
            shared.setdefault(id(param), []).append(name)
        parameters = {names[0]: names for names in shared.values()}
        buffers = {name: [name] for name, _ in model.named_buffers() if name in model.state_dict()}
        aliases, missing = dict[str, str](), list[str]()
        pieces, used = dict[str, Pieces](), set[str]()
        for name, tied in (parameters | buffers).items():
            # As stored by the model with its head, and by the model below the head.
            spellings = [spelling for each in tied for spelling in dict.fromkeys((each, each.removeprefix(prefix)))]
            split = next((spelling for spelling in spellings if spelling in stored_as.pieces), None)
            stored = [stored_as.names[spelling] for spelling in spellings if spelling in stored_as.names]
            if split is not None:
                pieces[name] = stored_as.pieces[split]
                used |= {key for row in pieces[name] for key in row}
            elif stored:
                differing = (key for key in stored[1:] if not self._are_equal(stored[0], key))
                if (other := next(differing, None)) is not None:
                    raise ValueError(
                        f"{self.folder!r} has {stored[0]} and {other}, which differ, and its config makes them one "
                        "(tie_word_embeddings): set that to false in config.json to train both"
                    )
                aliases |= {each: stored[0] for each in tied if each != stored[0]}
                used |= set(stored)
            elif name in parameters:
                missing.append(name)
        unknown = sorted(key for key in self.files.keys() - used if not NO_PARAMETER.search(key))
        reshaped = []
        for name, param in model.named_parameters():
            shape, rows = tuple(param.shape), pieces.get(name)
            if rows is None and name not in missing and (own := self.shapes[aliases.get(name, name)]) != shape:
                reshaped.append(f"{name} {own} instead of {shape}")
            elif rows is not None and len(rows) != shape[0]:
                reshaped.append(f"{name}: has {len(rows)} rows instead of {shape[0]}")
            for names in rows or ():
                parts = [self.shapes[key] for key in names]
                joined = (sum(part[0] for part in parts), *parts[0][1:])
                if joined != shape[1:] or len({part[1:] for part in parts}) != 1:
                    reshaped.append(f"{name}: {names[0]} {joined} instead of {shape[1:]}")
                    break
        failures = [
            f"{len(names)} {fault}: {few(names, NUM_NAMED)}"
            for fault, names in (
                ("missing", missing),
                ("unknown to the model", unknown),
                ("of another shape", reshaped),
            )
            if names
        ]
        if failures:
            raise ValueError(
                f"the weights in {self.folder!r} do not fit a {type(model).__name__}: {'; '.join(failures)}. Give the "
                "folder that belongs to this config, or weights=False to begin with drawn values"
            )
        return replace(self, aliases=aliases, pieces=pieces)

    def _are_equal(self, *keys: str) -> bool:
        if len({self.shapes[key] for key in keys}) > 1:
            return False
        values = [self.tensor(key, self.shapes[key]) for key in dict.fromkeys(keys)]
        return all(torch.equal(values[0], value) for value in values[1:])

    def __repr__(self) -> str:
        return f"FolderWeights({self.digest})"


# ------------------------------------------------------------ names in a folder


@dataclass(frozen=True)
class StoredNames:
    """`names`: a stored name by the name that the model has for it. `pieces`: of parameters that are stored by rows."""

    names: Mapping[str, str]
    pieces: Mapping[str, Pieces]


def stored_names(model: Any, keys: Iterable[str]) -> StoredNames:
    """What a folder that stores `keys` has for a model of transformers. Raises ValueError for a conversion that is not
    a change of names, nor experts one by one."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter, dot_natural_key

    supported = ([(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)])
    table = get_model_conversion_mapping(model)
    converters = [entry for entry in table if isinstance(entry, WeightConverter)]
    renamings = [entry for entry in table if not isinstance(entry, WeightConverter)]
    names, columns = dict[str, str](), dict[str, list[list[str]]]()
    for key in sorted(keys, key=dot_natural_key):
        name = key
        for renaming in renamings:
            name, _ = renaming.rename_source_key(name)
        for converter in converters:
            target, source = converter.rename_source_key(name)
            if source is not None:
                kinds = [
                    (type(each), each.dim)
                    for each in converter.operations
                    if isinstance(each, Concatenate | MergeModulelist)
                ]
                if len(kinds) != len(converter.operations) or kinds not in supported:
                    raise ValueError(
                        f"model_type={model.config.model_type!r}: transformers rearranges "
                        f"{converter.source_patterns[0]} when it loads it; load it with transformers once and save it "
                        "with save_pretrained(..., save_original_format=False)"
                    )
                places = columns.setdefault(target, [[] for _ in converter.source_patterns])
                places[converter.source_patterns.index(source)].append(key)
                break
        else:
            names[name] = key
    pieces: dict[str, Pieces] = {}
    for name, places in columns.items():
        if len({len(column) for column in places}) != 1:
            raise ValueError(
                f"{name} is stored in parts, and some are missing: there are {[*map(len, places)]} of its kinds"
            )
        pieces[name] = tuple(zip(*places, strict=True))
    return StoredNames(names, pieces)
