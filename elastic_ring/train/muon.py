"""Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) on rows split over a ring.

The update of a matrix needs all of its rows. One rank gathers them, orthogonalises the whole matrix, and sends each
rank its rows of the result. So bits do not depend on the ring's size. Momentum stays where the rows are. Everything
else is AdamW's. With the scale of Moonlight (Liu et al. 2025, arXiv:2502.16982) AdamW's learning rate and weight decay
carry over; `torch.optim.Muon` with `adjust_lr_fn="match_rms_adamw"` computes the same on one process. Votes and
membership must not enter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise, zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from elastic_ring.attention.comm.ledger import HopLedger
from elastic_ring.attention.comm.messages import AllToAll
from elastic_ring.state.checkpoints.manifest import rows_of
from elastic_ring.state.shard import Shard

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NUM_ITERATIONS = 5
EPS = 1e-7
MOMENTUM = 0.95
RMS = 0.2
"""The usual root mean square of an element of AdamW's update (Moonlight)."""
BUFFER = "momentum_buffer"
HALVES = {"gate_up": "down", "gate_up_proj": "down_proj", "Wi": "Wo", "input_linear": "output_linear"}
"""Layers with the rows of gate and up one after the other, and the layer after each, which has half as many columns."""
QKV = {"qkv_proj": "o_proj", "c_attn": "c_proj"}
"""Layers with the rows of q, k and v one after the other, and the layer after each, with a column for each of q's."""
_TAG = (1 << 30) + (1 << 21)
"""Larger than the tags of experts' exchanges (`experts.exchange`)."""


def newton_schulz(matrix: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrix, roughly: singular values between 0.7 and 1.2. (R, C) to (R, C) in its dtype.

    The steps of `torch.optim.Muon`, which computes in bfloat16. `matrix` must be contiguous: bits depend on it.
    """
    a, b, c = COEFFICIENTS
    is_tall = matrix.size(0) > matrix.size(1)
    x = matrix.T if is_tall else matrix
    x = x / x.norm().clamp(min=EPS)
    for _ in range(NUM_ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.T if is_tall else x).contiguous()


def matrix_parts(model: nn.Module, units: Sequence[nn.Module]) -> dict[str, tuple[int, ...]]:
    """The parameters that Muon updates, in the model's order, each with the rows of its parts.

    These are weights of `nn.Linear` within the layers (`units`), and those of experts, which lie in one tensor
    (experts, rows, columns). Not: routers, embedding tables, the head, vectors. A fused projection whose parts are
    blocks of rows is several matrices: `QKV` and `HALVES`. All others are one, as where rows alternate by head
    (`query_key_value`, CodeGen's `qkv_proj`, GPTBigCode's `c_attn` of several heads of keys, MLA's `kv_b_proj`), where
    the halves are columns (experts of GPT-OSS and Aria), MLA's `kv_a_proj_with_mqa` and LFM2's `in_proj`.
    """
    inside = {param for unit in units for param in unit.parameters() if param.requires_grad}
    parts: dict[str, tuple[int, ...]] = {}
    for name, param in model.named_parameters():
        path, _, leaf = name.rpartition(".")
        owner = model.get_submodule(path)
        if param not in inside or min(param.shape[-2:]) == 1 or _is_router(model, path, param.shape[0]):
            continue
        above, _, own = path.rpartition(".")
        if param.dim() == 2 and isinstance(owner, nn.Linear):
            parts[name] = _rows_of_parts(own, param, model.get_submodule(above))
        elif param.dim() == 3 and "expert" in type(owner).__name__.lower():
            parts[name] = _rows_of_parts(leaf, param, owner)
    return parts


def _is_router(model: nn.Module, path: str, num_rows: int) -> bool:
    """Whether a module is a router by its name, lies in a `gate` beside experts, or has a row for each of these."""
    names = path.split(".")
    if "router" in f"{path}.{type(model.get_submodule(path)).__name__}".lower():
        return True
    for depth, name in enumerate(names):
        experts = getattr(model.get_submodule(".".join(names[:depth])), "experts", None)
        if not isinstance(experts, nn.Module) or name == "experts":
            continue
        stacked = (param.shape[0] for param in experts.parameters() if param.dim() == 3)
        number = len(experts) if isinstance(experts, nn.ModuleList) else next(stacked, 0)
        if name == "gate" or (depth == len(names) - 1 and num_rows == number):
            return True
    return False


def _rows_of_parts(name: str, weight: Tensor, parent: nn.Module) -> tuple[int, ...]:
    """Of a linear layer or experts' tensor called `name` in `parent`."""
    num_rows = weight.shape[-2]
    following = getattr(parent, HALVES.get(name, QKV.get(name, "")), None)
    following = getattr(following, "weight", following)
    if not isinstance(following, Tensor):
        return (num_rows,)
    inner = following.shape[-1]
    if name in HALVES:
        return (inner, inner) if 2 * inner == num_rows else (num_rows,)
    alternates = name == "c_attn" and num_rows == 3 * inner
    return (num_rows,) if alternates or num_rows <= inner else (inner, *((num_rows - inner) // 2,) * 2)


@dataclass(frozen=True)
class Matrix:
    """Rows [first, stop) of a parameter, whose experts lie one under another."""

    name: str
    first: int
    stop: int
    num_columns: int

    @property
    def scale(self) -> float:
        """The factor of the learning rate."""
        return RMS * math.sqrt(max(self.stop - self.first, self.num_columns))

    @property
    def flops(self) -> int:
        """A measure of its Newton-Schulz steps."""
        short, long = sorted((self.stop - self.first, self.num_columns))
        return short * short * (2 * long + short)


class Division:
    """Who orthogonalises which matrix, on a ring of `cp`: a pure function of shapes.

    A matrix that one rank has all rows of, as an expert's, stays there. The others go to the rank with the least work
    so far, largest first. `rounds`: for each cp_rank its next matrix, or None.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], parts: Mapping[str, tuple[int, ...]], cp: int) -> None:
        self.spans: dict[str, list[tuple[int, int]]] = {}
        self.columns = {name: shapes[name][-1] for name in parts}
        self.matrices: dict[str, list[Matrix]] = {}
        self.own: list[list[Matrix]] = [[] for _ in range(cp)]
        work, shared = [0] * cp, list[Matrix]()
        for name, rows in parts.items():
            each = sum(rows) if len(shapes[name]) == 3 else 1
            cuts = (rows_of(shapes[name], cp_rank, cp) for cp_rank in range(cp))
            self.spans[name] = [(start * each, stop * each) for start, stop in cuts]
            edges = accumulate(rows * (shapes[name][0] if each > 1 else 1), initial=0)
            self.matrices[name] = [Matrix(name, *edge, self.columns[name]) for edge in pairwise(edges)]
            for matrix in self.matrices[name]:
                holder = matrix.first // self.spans[name][0][1]
                if matrix.stop <= self.spans[name][holder][1]:
                    self.own[holder].append(matrix)
                    work[holder] += matrix.flops
                else:
                    shared.append(matrix)
        owned: list[list[Matrix]] = [[] for _ in range(cp)]
        for matrix in sorted(shared, key=lambda each: -each.flops):  # stable
            owner = work.index(min(work))
            owned[owner].append(matrix)
            work[owner] += matrix.flops
        self.rounds: list[tuple[Matrix | None, ...]] = list(zip_longest(*owned))

    def piece(self, matrix: Matrix, cp_rank: int) -> range:
        """The rows of `matrix` on `cp_rank`, counted in the parameter."""
        start, stop = self.spans[matrix.name][cp_rank]
        return range(max(start, matrix.first), max(start, matrix.first, min(stop, matrix.stop)))


@dataclass(frozen=True)
class Party:
    """Ranks that compute an update together: a ring, or in a roll forward all ranks with the step's gradient.

    `cp_ranks`: by their order in `group`. Of several with one cp_rank the first computes for all. `device`: of the
    group's messages. `abandoned` keeps buffers of aborted exchanges.
    """

    group: Any
    index: int
    cp_ranks: tuple[int, ...]
    device: torch.device
    abandoned: list[Tensor] = field(default_factory=list)

    @property
    def cp_rank(self) -> int:
        return self.cp_ranks[self.index]

    def is_source(self, index: int) -> bool:
        return self.cp_ranks.index(self.cp_ranks[index]) == index


@dataclass(frozen=True)
class Update:
    """This rank's rows of the orthogonalised matrices of `step`, by parameter; `pieces` of them have a factor of the
    learning rate each. It is kept until its apply has ended."""

    step: int
    rows: Mapping[str, Tensor]
    pieces: Mapping[str, Sequence[tuple[slice, float]]]


class UpdateRun:
    """Computes the update of one step on one rank of `party`. It changes neither the shard nor the gradient, so it may
    be aborted at any time, and repeats with equal bits.

    `scale`: the factor of the summed gradient. `look` is called before each exchange with its number; it raises to end
    the update.
    """

    def __init__(
        self, division: Division, shard: Shard, gradients: Mapping[str, Tensor], scale: float, party: Party
    ) -> None:
        self._division, self._shard, self._gradients, self._scale = division, shard, gradients, scale
        self._party, self._device = party, shard.device
        # As torch on GPUs; on CPUs bfloat16 is no faster.
        self._dtype = torch.bfloat16 if self._device.type == "cuda" else torch.float32
        self._rows: dict[str, Tensor] = {}

    @torch.no_grad()
    def run(self, step: int, look: Callable[[int], None]) -> Update:
        division, party, cp_rank = self._division, self._party, self._party.cp_rank
        for name, spans in division.spans.items():
            num_rows = spans[cp_rank][1] - spans[cp_rank][0]
            self._rows[name] = torch.empty(num_rows, division.columns[name], dtype=self._dtype, device=self._device)
        look(0)
        for matrix in division.own[cp_rank]:
            look(0)
            self._rows[matrix.name][self._local(matrix)] = newton_schulz(self._direction(matrix))
        swaps = AllToAll(len(party.cp_ranks), party.index, party.group, HopLedger(), party.abandoned)
        for number, matrices in enumerate(division.rounds, start=1):
            look(number)
            self._round(matrices, swaps)
        pieces = {name: [(self._local(each), each.scale) for each in division.matrices[name]] for name in self._rows}
        return Update(step, self._rows, pieces)

    def _round(self, matrices: Sequence[Matrix | None], swaps: AllToAll) -> None:
        """Each owner gathers its matrix from the sources, orthogonalises it, and sends its rows to the whole party."""
        division, party = self._division, self._party
        peers, own_index = range(len(party.cp_ranks)), party.index
        empty = torch.empty(0, dtype=self._dtype, device=party.device)
        is_source, mine = party.is_source(own_index), matrices[party.cp_rank]
        owned = [matrices[party.cp_ranks[peer]] if party.is_source(peer) else None for peer in peers]
        outgoing = [
            empty if matrix is None or not is_source else self._direction(matrix).to(party.device) for matrix in owned
        ]
        incoming, whole = [empty] * len(peers), empty
        if is_source and mine is not None:
            whole = empty.new_empty(mine.stop - mine.first, mine.num_columns)
            incoming = [self._part(whole, mine, peer) if party.is_source(peer) else empty for peer in peers]
            incoming[own_index].copy_(outgoing[own_index])
        swaps.swap(outgoing, incoming, _TAG)
        outgoing = [empty] * len(peers)
        if is_source and mine is not None:
            whole = newton_schulz(whole.to(self._device)).to(party.device)
            outgoing = [self._part(whole, mine, peer) for peer in peers]
        incoming = [
            empty if matrix is None else empty.new_empty(len(division.piece(matrix, party.cp_rank)), matrix.num_columns)
            for matrix in owned
        ]
        swaps.swap(outgoing, incoming, _TAG)
        if is_source and mine is not None:
            incoming[own_index] = outgoing[own_index]
        for matrix, received in zip(owned, incoming, strict=True):
            if matrix is not None:
                self._rows[matrix.name][self._local(matrix)] = received

    def _part(self, whole: Tensor, matrix: Matrix, peer: int) -> Tensor:
        """The rows of a whole matrix that `peer` has."""
        piece = self._division.piece(matrix, self._party.cp_ranks[peer])
        return whole[piece.start - matrix.first : piece.stop - matrix.first]

    def _local(self, matrix: Matrix) -> slice:
        """The rows of a matrix here, counted in the parameter's slice."""
        piece = self._division.piece(matrix, self._party.cp_rank)
        start, _ = self._division.spans[matrix.name][self._party.cp_rank]
        return slice(piece.start - start, piece.stop - start)

    def _direction(self, matrix: Matrix) -> Tensor:
        """This rank's rows of the gradient with Nesterov's momentum, contiguous, in the computing type."""
        rows, param = self._local(matrix), self._shard.params[matrix.name]
        gradient = self._gradients[matrix.name].view(-1, matrix.num_columns)[rows] * self._scale
        buffer = self._shard.optimizer.state.get(param, {}).get(BUFFER)
        own = torch.zeros_like(gradient) if buffer is None else buffer.view(-1, matrix.num_columns)[rows]
        return gradient.lerp(own.lerp(gradient, 1 - MOMENTUM), MOMENTUM).to(self._dtype)


class Muon(torch.optim.AdamW):
    """AdamW, and Muon for groups with `muon`: it has their update before its step."""

    update: Update | None = None
    _names: Mapping[Tensor, str]

    def take(self, update: Update, params: Mapping[str, Tensor]) -> None:
        """The update for the next step, of these parameters by name; neither is kept after it."""
        self.update, self._names = update, {param: name for name, param in params.items()}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        groups = self.param_groups
        self.param_groups = [group for group in groups if not group.get("muon")]
        try:
            super().step(closure)
            for group, param in ((each, param) for each in groups if each.get("muon") for param in each["params"]):
                self._move(param, group["lr"], group["weight_decay"])
        finally:
            self.param_groups, self.update, self._names = groups, None, {}

    def _move(self, param: Tensor, rate: float, decay: float) -> None:
        assert self.update is not None
        name, state = self._names[param], self.state[param]
        if BUFFER not in state:
            state[BUFFER] = torch.zeros_like(param)
        state[BUFFER].lerp_(param.grad, 1 - MOMENTUM)
        param.mul_(1 - rate * decay)
        rows = self.update.rows[name]
        values = param.view(-1, rows.size(-1))
        for piece, scale in self.update.pieces[name]:
            values[piece].add_(rows[piece], alpha=-rate * scale)
