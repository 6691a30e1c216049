"""Under which names a folder stores a model's parameters, by transformers' own table of conversions.

Folders of mixture-of-experts models name experts one by one (`experts.3.down_proj.weight`), and the module has them in
one parameter. Some families have other names besides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Pieces = tuple[tuple[str, ...], ...]
"""The stored names of each row of a parameter; a row is their concatenation along its own first dimension."""


@dataclass(frozen=True)
class StoredNames:
    """`names`: a stored name by the name that the model has for it. `pieces`: of parameters that are stored by rows."""

    names: Mapping[str, str]
    pieces: Mapping[str, Pieces]


def stored_names(model: Any, keys: Iterable[str]) -> StoredNames:
    """What a folder that stores `keys` has for a model of transformers. Raises ValueError for a conversion that is not
    a change of names, nor experts one by one."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, dot_natural_key

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
                _check_operations(model, converter)
                places = columns.setdefault(target, [[] for _ in converter.source_patterns])
                places[converter.source_patterns.index(source)].append(key)
                break
        else:
            names[name] = key
    return StoredNames(names, {name: _rows(name, places) for name, places in columns.items()})


def _rows(name: str, places: list[list[str]]) -> Pieces:
    if len({len(column) for column in places}) != 1:
        raise ValueError(
            f"{name} is stored in parts, and some are missing: there are {[*map(len, places)]} of its kinds"
        )
    return tuple(zip(*places, strict=True))


def _check_operations(model: Any, converter: Any) -> None:
    from transformers.core_model_loading import Concatenate, MergeModulelist

    kinds = [(type(each), each.dim) for each in converter.operations if isinstance(each, Concatenate | MergeModulelist)]
    if len(kinds) != len(converter.operations) or kinds not in (
        [(MergeModulelist, 0)],
        [(MergeModulelist, 0), (Concatenate, 1)],
    ):
        raise ValueError(
            f"model_type={model.config.model_type!r}: transformers rearranges {converter.source_patterns[0]} when it "
            "loads it; load it with transformers once and save it with save_pretrained(..., save_original_format=False)"
        )
