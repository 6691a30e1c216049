"""Settings classes: frozen pydantic dataclasses whose errors are one plain ValueError each.

`@settings` takes the place of `@dataclass(frozen=True)`. Types are checked strictly (no text for a number, no 1 for
True), unknown names are refused with the nearest known one, and a docstring under a field is its help text on the
command line. Imports nothing of the project.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import field
from itertools import pairwise
from typing import Annotated, Any, TypeVar, dataclass_transform, get_args, get_origin

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

T = TypeVar("T")
LONGEST_SHOWN = 500
CONFIG = ConfigDict(strict=True, extra="forbid")


class Must(str):
    """In a field's annotation: what its value must be, after "must be", for every error about it."""


class Flag(str):
    """In a field's annotation: its flag on the command line beside the dotted one."""


PositiveInt = Annotated[int, Field(ge=1), Must("a whole number of at least 1")]
NonNegativeInt = Annotated[int, Field(ge=0), Must("a whole number of at least 0")]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False), Must("0 seconds or more")]
PositiveSeconds = Annotated[float, Field(gt=0, allow_inf_nan=False), Must("a positive number of seconds")]

# What a value must be by pydantic's error type, where the field's annotation has no `Must`.
EXPECTED = {
    "bool_type": "True or False",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "string_type": "text",
    "dict_type": "a mapping, written as {'NAME': value}",
    "mapping_type": "a mapping, written as {'NAME': value}",
    "tuple_type": "a tuple",
    "list_type": "a list",
    "missing": "given",
}


@dataclass_transform(frozen_default=True, field_specifiers=(field, Field))
def settings(cls: type[T]) -> type[T]:
    """A frozen, validated dataclass. Its constructor raises ValueError that names setting, value and way out.

    Class attributes without an annotation: `_prefix` goes before a setting's name in messages, `_instead` says for
    names of other libraries what to use here.
    """
    checked: Any = dataclass(cls, frozen=True, config=CONFIG)
    validated = checked.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            validated(self, *args, **kwargs)
        except ValidationError as error:
            values = dict(zip(checked.__pydantic_fields__, args, strict=False)) | kwargs
            raise ValueError(explain(checked, error, values)) from None

    __init__.__signature__ = checked.__signature__  # type: ignore[attr-defined]
    checked.__init__ = __init__
    return checked  # type: ignore[no-any-return]


def docstrings(cls: type) -> dict[str, str]:
    """The text under each field of a class, on one line. Read for help only: pydantic's own way takes a third of
    the time in which settings are imported."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(tree, ast.ClassDef)
    return {
        above.target.id: " ".join(below.value.value.split())
        for above, below in pairwise(tree.body)
        if isinstance(above, ast.AnnAssign) and isinstance(above.target, ast.Name)
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str)
    }


def from_plain(cls: type[T], plain: object, prefix: str = "") -> T:
    """An instance from what TOML or JSON can say (a list for a tuple). Raises ValueError as the constructor does, with
    settings named from `prefix` on: `optim.peak_lr`."""
    if not isinstance(plain, Mapping):
        raise ValueError(f"{prefix or cls.__name__}={_shown(plain)}: must be a mapping")
    try:
        return TypeAdapter(cls).validate_json(json.dumps(plain))
    except ValidationError as error:
        raise ValueError(_undecoded(plain, prefix.rstrip(".")) or explain(cls, error, plain, prefix)) from None


def _undecoded(value: Any, named: str) -> str:
    """An error's text for the first text in `value` with bytes that Python could not decode; empty without one."""
    if isinstance(value, str):
        shown = value.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
        whole = not any("\ud800" <= sign <= "\udfff" for sign in value)
        return "" if whole else f"{named}='{shown}': is not UTF-8, or not to this locale: LC_ALL=C.UTF-8 reads UTF-8"
    parts: Any = ()
    if isinstance(value, Mapping):
        parts = ((f"{named}.{key}".lstrip("."), part) for key, part in value.items())
    elif isinstance(value, (list, tuple)):
        parts = ((named, part) for part in value)
    return next((text for name, part in parts if (text := _undecoded(part, name))), "")


def explain(cls: Any, error: ValidationError, values: Mapping[str, object], prefix: str = "") -> str:
    """The first error about `values`, in the words of `Must` and `EXPECTED`."""
    first = error.errors(include_url=False)[0]
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    value: Any = values
    owner, spec, path = cls, None, []
    for part in first["loc"]:
        records = get_args(owner)[0] if get_origin(owner) in (list, tuple) else None
        if isinstance(part, int) and hasattr(records, "__pydantic_fields__"):
            owner, value = records, value[part]
            path.append(str(part))
            continue
        fields = getattr(owner, "__pydantic_fields__", {})
        name = list(fields)[part] if isinstance(part, int) and part < len(fields) else str(part)
        if name not in fields:
            break
        spec, owner, value = fields[name], fields[name].annotation, value.get(name)
        path.append(name)
    if first["type"] in ("unexpected_keyword_argument", "unexpected_positional_argument"):
        return _unknown(owner, str(first["loc"][-1]), prefix)
    named = f"{prefix or getattr(cls, '_prefix', '')}{'.'.join(path)}"
    if first["type"] == "missing" and len(path) == len(first["loc"]):
        return f"{named}: must be given"
    must = _must(spec) if spec else ""
    if first["type"] == "literal_error":
        must = must or f"one of {first['ctx']['expected'].replace(' or ', ', ')}".replace("'", "")
    must = must or EXPECTED.get(first["type"], "") or first["msg"].removeprefix("Input should be ")
    return f"{named}={_shown(value)}: must be {must}"


def _shown(value: Any) -> str:
    """A value as an error says it: a file may hold a long one."""
    text = repr(value)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


def _must(spec: Any) -> str:
    """The `Must` of a field, or of a member of its union: `PositiveInt | None`."""
    members = (mark for member in get_args(spec.annotation) for mark in getattr(member, "__metadata__", ()))
    return next((str(mark) for mark in (*spec.metadata, *members) if isinstance(mark, Must)), "")


def _unknown(cls: Any, name: str, prefix: str) -> str:
    instead = getattr(cls, "_instead", {}).get(name)
    if instead:
        return f"{cls.__name__} {prefix}{name}: {instead}"
    return unknown_setting(cls.__name__, f"{prefix}{name}", list(cls.__pydantic_fields__))


def unknown_setting(owner: str, name: str, names: Sequence[str]) -> str:
    """An error's text for a name that `owner` does not have, with the nearest that it has."""
    near = difflib.get_close_matches(name.rpartition(".")[2], names, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(names)}"
    return f"{owner} has no setting {name}: {hint}"


def option_text(options: Mapping[str, object]) -> str:
    """Options, such as a table of a settings file, in the form `r=16,target=q_proj+v_proj,use_dora=true`."""

    def text(value: object) -> str:
        if isinstance(value, list | tuple | set):
            return "+".join(map(str, sorted(value) if isinstance(value, set) else value))
        return str(value).lower() if isinstance(value, bool) else str(value)

    return ",".join(f"{name}={text(value)}" for name, value in options.items())
