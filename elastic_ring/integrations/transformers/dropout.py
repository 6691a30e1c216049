"""Dropout in models of transformers: every call takes its mask from where it is, in place of a generator's state.

Modules of one model are changed, never a class or a module of transformers. Dropout that stays torch's own is seen by
the trace, and refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial, update_wrapper
from inspect import getmembers, isfunction, unwrap
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from elastic_ring.attention.recomputation import swapped
from elastic_ring.model.dropout import dropout, token_keys

OUTSIDE = -1
"""The layer of calls before and after the layers."""


@dataclass
class _Place:
    """Where in a pass the model computes; `num_calls` of dropout were before."""

    keys: Tensor | None
    layer: int = OUTSIDE
    num_calls: int = 0


class DropoutMasks:
    """The masks of one model. Calls are numbered in each layer's forward pass, so that a recomputed one repeats."""

    def __init__(self) -> None:
        self.place = _Place(None)

    def begin(self, attention: Any, positions: Tensor) -> None:
        """A pass of training begins: `positions` (1, S) in the tokens' own sequences, whose seeds the attention has."""
        seeds = attention.options.sequence_seeds
        self.place = _Place(token_keys(seeds, positions) if seeds else None)

    def of_layer(self, layer: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The layer's forward pass with the masks of the pass that has begun, whenever it runs."""
        return partial(self._run, self.place.keys, layer, forward)

    def _run(self, keys: Tensor | None, layer: int, forward: Callable[..., Any], *args: Any, **options: Any) -> Any:
        with swapped(self, "place", _Place(keys, layer)):
            return forward(*args, **options)

    def dropout(self, input: Tensor, p: float = 0.5, training: bool = True, *_: bool, **__: bool) -> Tensor:
        """In place of `torch.nn.functional.dropout`. Raises ValueError in a pass without seeds, and for a tensor that
        has not a vector for each token."""
        if not training or not p:
            return input
        place = self.place
        if place.keys is None:
            raise ValueError(f"dropout={p} without the step of the pass: give attention_of(step=...), or model.eval()")
        place.num_calls += 1
        return dropout(input, p, place.keys, place.layer, place.num_calls - 1)


def install_masks(model: Any) -> None:
    """Have every dropout of a model of `module.build` take its masks from where it is, also of modules that were put
    into it since the last call."""
    masks = model.dropout_masks = model.dropout_masks or DropoutMasks()
    spaces: dict[int, dict[str, object]] = {}
    for module in model.modules():
        kind: Any = type(module)
        if isinstance(module, nn.Dropout):
            module.forward = partial(_forward, masks, module)  # type: ignore[method-assign]
        for name, function in _callers(kind):
            if name not in vars(module):
                setattr(module, name, MethodType(_rebuilt(function, masks, spaces), module))


def has_dropout(model: nn.Module, config: Any) -> bool:
    """Whether a module or a setting of the model may drop something."""
    return any(isinstance(module, nn.Dropout) and module.p for module in model.modules()) or any(
        "drop" in name and value for name, value in config.to_dict().items()
    )


def _forward(masks: DropoutMasks, module: nn.Dropout, input: Tensor) -> Tensor:
    return masks.dropout(input, module.p, module.training)


class _Namespace:
    """A module with some of its names replaced."""

    def __init__(self, whole: Any, **own: Any) -> None:
        self.__dict__ |= {"_whole": whole, **own}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)


@lru_cache(maxsize=4096)
def _callers(kind: Any) -> tuple[tuple[str, Any], ...]:
    """The methods of a class of transformers that call functional dropout, themselves or by a function beside them."""
    methods = [(name, method) for name, method in getmembers(kind, isfunction) if _is_own(method)]
    return tuple((name, method) for name, method in methods if _calls(unwrap(method)) or any(_helpers(unwrap(method))))


def _is_own(function: Any) -> bool:
    return str(function.__module__).startswith("transformers.models.")


def _calls(function: Any) -> bool:
    names = {*function.__code__.co_names}
    return "dropout" in names and bool(names & {"functional", "F"})


def _helpers(function: Any) -> Iterator[str]:
    """Names of functions of the same file that a function calls and that call dropout, but for attention's."""
    for name in function.__code__.co_names:
        helper = function.__globals__.get(name)
        is_beside = isfunction(helper) and helper.__module__ == function.__module__
        if is_beside and not name.startswith("eager_") and _calls(helper):
            yield name


def _rebuilt(function: Any, masks: DropoutMasks, spaces: dict[int, dict[str, object]]) -> Any:
    """The function with dropout of its own in its globals, below the same decorators."""
    inner = getattr(function, "__wrapped__", None)
    if inner is None:
        names, closure = _globals(function, masks, spaces), function.__closure__
        for name in _helpers(function):
            names[name] = _rebuilt(function.__globals__[name], masks, spaces)
    else:
        changed = CellType(_rebuilt(inner, masks, spaces))
        names = function.__globals__
        closure = tuple(changed if cell.cell_contents is inner else cell for cell in function.__closure__ or ())
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, closure)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy if inner is None else update_wrapper(copy, inner)


def _globals(function: Any, masks: DropoutMasks, spaces: dict[int, dict[str, object]]) -> dict[str, object]:
    own = function.__globals__
    if id(own) not in spaces:
        functional = _Namespace(nn.functional, dropout=masks.dropout)
        replaced = {"F": functional, "nn": _Namespace(nn, functional=functional)}
        if "torch" in own:
            replaced["torch"] = _Namespace(own["torch"], nn=replaced["nn"])
        spaces[id(own)] = {**own, **{name: value for name, value in replaced.items() if name in own}}
    return spaces[id(own)]
