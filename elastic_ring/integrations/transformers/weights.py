"""Reads a Hugging Face folder's safetensors files row by row; checks that they fit a model. No transformers in here.

Each tensor is read from its file on access, and only the requested rows: no process holds the whole model.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from elastic_ring.files import check_links, few, name_below, plain_json, read_small
from elastic_ring.integrations.transformers.conversions import Pieces, StoredNames

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
SAMPLE_BYTES = 1 << 16
NUM_NAMED = 5
# Earlier versions of transformers stored this buffer; it is computed from the config.
NO_PARAMETER = re.compile(r"(^|\.)rotary_emb\.inv_freq$")


@dataclass(frozen=True)
class FolderWeights:
    """First values from a folder, by parameter name, as the trainer's `initial`.

    `files` maps a stored name to its file. `aliases` maps a parameter's name to the name it is stored under, where that
    is another, `pieces` to those of its rows where it is stored in parts. `digest` covers headers, sizes and samples
    of the files' bytes.
    """

    folder: str
    files: Mapping[str, str]
    digest: str
    aliases: Mapping[str, str]
    pieces: Mapping[str, Pieces]

    @classmethod
    def open(cls, folder: Path) -> FolderWeights | None:
        """Reads the index and the headers; None for a folder without weights. Raises ValueError for one whose weights
        are in another format, or cannot be read."""
        names = _files_of(folder)
        if not names:
            others = sorted(path.name for path in folder.glob("*.bin")) + sorted(
                path.name for path in folder.glob("*.pt")
            )
            if others:
                raise ValueError(
                    f"model folder {str(folder)!r} has {others[0]} and no safetensors: only safetensors are read; load "
                    "it with transformers once and save it with save_pretrained"
                )
            return None
        total, files = hashlib.sha256(), dict[str, str]()
        for name in names:
            path = folder / name
            try:
                with safe_open(path, framework="pt") as file:
                    files |= dict.fromkeys(file.keys(), name)
            except (OSError, SafetensorError) as error:
                raise ValueError(f"{path}: cannot be read as safetensors ({error})") from error
            total.update(f"{name} {path.stat().st_size} ".encode() + _sample(path))
        return cls(str(folder), files, total.hexdigest()[:16], {}, {})

    def tensor(self, name: str, shape: Sequence[int], rows: tuple[int, int] | None = None) -> Tensor:
        """The fp32 value of a parameter, or its rows [start, stop). Raises ValueError where shape or file differ."""
        if name in self.pieces:
            return self._row_by_row(name, tuple(shape), rows)
        stored = self.aliases.get(name, name)
        path = Path(self.folder, self.files[stored])
        try:
            with safe_open(path, framework="pt") as file:
                part = file.get_slice(stored)
                if tuple(part.get_shape()) != tuple(shape):
                    raise ValueError(f"{path}: {stored} has shape {tuple(part.get_shape())}, the model {tuple(shape)}")
                start, stop = rows if rows is not None else (0, shape[0])
                value: Tensor = part[start:stop]
        except (OSError, SafetensorError) as error:
            raise ValueError(
                f"{path}: cannot be read as safetensors ({error}); every worker must see the model folder"
            ) from error
        return value.to(torch.float32)

    def _row_by_row(self, name: str, shape: tuple[int, ...], rows: tuple[int, int] | None) -> Tensor:
        start, stop = rows if rows is not None else (0, shape[0])
        value = torch.empty(stop - start, *shape[1:], dtype=torch.float32)
        files: dict[str, Any] = {}
        try:
            for place, names in enumerate(self.pieces[name][start:stop]):
                end = 0
                for stored in names:
                    path = Path(self.folder, self.files[stored])
                    if path.name not in files:
                        files[path.name] = safe_open(path, framework="pt")
                    part = files[path.name].get_tensor(stored)
                    value[place, end : end + part.size(0)] = part
                    end += part.size(0)
        except (OSError, SafetensorError) as error:
            raise ValueError(
                f"{path}: cannot be read as safetensors ({error}); every worker must see the model folder"
            ) from error
        return value

    def fitted(self, model: nn.Module, stored_as: StoredNames) -> FolderWeights:
        """With aliases for the parameters of `model`, `stored_as` in this folder, and for its buffers that are there.
        Raises ValueError for weights that are missing, that the model does not have, or that have another shape; the
        message has the first five names of each."""
        prefix = str(getattr(model, "base_model_prefix", ""))
        wanted, aliases, missing = _names_of(model), dict[str, str](), list[str]()
        pieces, used = dict[str, Pieces](), set[str]()
        kept = {name: [name] for name, _ in model.named_buffers() if name in model.state_dict()}
        for name, tied in (wanted | kept).items():
            spellings = [found for each in tied for found in _spellings(each, prefix)]
            split = next((found for found in spellings if found in stored_as.pieces), None)
            stored = next((stored_as.names[found] for found in spellings if found in stored_as.names), None)
            if split is not None:
                pieces[name] = stored_as.pieces[split]
                used |= {key for row in pieces[name] for key in row}
            elif stored is not None:
                aliases |= {name: stored} if stored != name else {}
                used |= {stored_as.names[found] for found in spellings if found in stored_as.names}
            elif name in wanted:
                missing.append(name)
        unknown = sorted(key for key in self.files.keys() - used if not NO_PARAMETER.search(key))
        made = replace(self, aliases=aliases, pieces=pieces)
        others = made._other_shapes({name: tuple(param.shape) for name, param in model.named_parameters()}, missing)
        failures = [
            f"{len(names)} {what}: {few(names, NUM_NAMED)}"
            for what, names in (("missing", missing), ("unknown to the model", unknown), ("of another shape", others))
            if names
        ]
        if failures:
            raise ValueError(
                f"the weights in {self.folder!r} do not fit a {type(model).__name__}: {'; '.join(failures)}. Give the "
                "folder that belongs to this config, or weights=False to begin with drawn values"
            )
        return made

    def _other_shapes(self, shapes: Mapping[str, tuple[int, ...]], missing: Sequence[str]) -> list[str]:
        by_file: dict[str, list[str]] = {}
        for name in shapes:
            if name not in missing and name not in self.pieces:
                by_file.setdefault(self.files[self.aliases.get(name, name)], []).append(name)
        found = [f"{name}: {odd}" for name in self.pieces if (odd := self._odd_pieces(name, shapes[name]))]
        for file_name, names in by_file.items():
            with safe_open(Path(self.folder, file_name), framework="pt") as file:
                for name in names:
                    stored = tuple(file.get_slice(self.aliases.get(name, name)).get_shape())
                    if stored != shapes[name]:
                        found.append(f"{name} {stored} instead of {shapes[name]}")
        return found

    def _odd_pieces(self, name: str, shape: tuple[int, ...]) -> str:
        """Which parts of a parameter do not make it up; empty where they do."""
        rows = self.pieces[name]
        if len(rows) != shape[0]:
            return f"has {len(rows)} rows instead of {shape[0]}"
        shapes: dict[str, tuple[int, ...]] = {}
        for file_name in sorted({self.files[stored] for names in rows for stored in names}):
            with safe_open(Path(self.folder, file_name), framework="pt") as file:
                here = (stored for names in rows for stored in names if self.files[stored] == file_name)
                shapes |= {stored: tuple(file.get_slice(stored).get_shape()) for stored in here}
        for names in rows:
            found = (sum(shapes[stored][0] for stored in names), *shapes[names[0]][1:])
            if found != shape[1:] or len({shapes[stored][1:] for stored in names}) != 1:
                return f"{names[0]} {found} instead of {shape[1:]}"
        return ""

    def buffers(self, model: nn.Module) -> dict[str, Tensor]:
        """The buffers of `model` that are stored here, whole: experts' correction biases and the like."""
        found = {}
        for name, buffer in model.named_buffers():
            stored = self.aliases.get(name, name)
            if stored in self.files:
                found[name] = self.tensor(name, tuple(buffer.shape)).to(buffer.dtype)
        return found

    def __repr__(self) -> str:
        return f"FolderWeights({self.digest})"


def _files_of(folder: Path) -> list[str]:
    """The names of the safetensors files; none where there are none."""
    index = folder / INDEX
    if not index.exists():
        return [SINGLE] if (folder / SINGLE).exists() else []
    try:
        found: Any = plain_json(read_small(index))
        names = sorted({name_below(name) for name in found["weight_map"].values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index}: cannot be read as an index of weights ({type(error).__name__}: {error})") from error
    check_links(folder, [folder / name for name in names])
    return names


def _names_of(model: nn.Module) -> dict[str, list[str]]:
    """Every parameter's name with all the names that share it, which itself is the first."""
    shared: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        shared.setdefault(id(param), []).append(name)
    return {names[0]: names for names in shared.values()}


def _spellings(name: str, prefix: str) -> tuple[str, ...]:
    """As stored by the model with its head, and by the model below the head."""
    if prefix and name.startswith(f"{prefix}."):
        return name, name.removeprefix(f"{prefix}.")
    return (name,)


def _sample(path: Path) -> bytes:
    """The first and last bytes, and some of the middle: reading all of a large file would take minutes."""
    size = path.stat().st_size
    with path.open("rb") as file:
        taken = [file.read(SAMPLE_BYTES)]
        for start in (size // 2, max(0, size - SAMPLE_BYTES)):
            file.seek(start)
            taken.append(file.read(SAMPLE_BYTES))
    return hashlib.sha256(b"".join(taken)).digest()
