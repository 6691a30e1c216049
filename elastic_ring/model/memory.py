"""The memory of a training step, from the sizes of a decoder alone. No torch in here.

The peak of a step is the fullest of a few moments: the loss's backward pass, the backward pass of the last layers and
of the first, the end of the backward pass, the update. Each moment is a list of named terms; the plan prints those of
the fullest. A decoder block is counted as `transformer` computes it and autograd keeps it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from elastic_ring.config import CpuOffload
from elastic_ring.costs import MOST_SHARES, Placement, sends_tokens
from elastic_ring.model.config import ModelConfig, block_parameters, expert_parameters, num_parameters

FP32 = 4
LSE_BYTES = 4
MASTER_BYTES, MOMENTS_BYTES, GRADIENT_BYTES = 4, 8, 4
"""Bytes for each parameter of a rank's shard: the fp32 master, Adam's two moments, the gradient; with `cpu_offload`
"all" there is one in host memory, too."""
IN_HOST_BYTES: Mapping[CpuOffload, int] = {
    "none": 0,
    "optimizer": MOMENTS_BYTES,
    "all": MASTER_BYTES + MOMENTS_BYTES + GRADIENT_BYTES,
}
"""The part of these that is in host memory, by `cpu_offload`."""
VISITING_BYTES: Mapping[CpuOffload, int] = {
    "none": 0,
    "optimizer": MOMENTS_BYTES,
    "all": MASTER_BYTES + MOMENTS_BYTES,
}
"""Bytes for each parameter that the update copies to the GPU, two buckets at a time (`state.host_optimizer`)."""
LOGITS_BYTES = 12
"""Bytes of a logit in the loss's backward pass: probabilities, their gradient in the computing type, and the next
chunk's logits in both types; in fp32, or in one piece as other libraries compute them, it is the same sum."""
BUCKET_ELEMENTS = 32 << 20
GATHER_LIMIT_BYTES = 3 << 29
"""The most bytes of keys for which hops share a round of kernels (`attention.ring`)."""
WORKSPACE_BYTES = 32 << 20
"""cuBLAS's own allocation on an H100 or H200."""
CUDA_PROCESS_BYTES, CPU_PROCESS_BYTES = int(2.3 * 2**30), int(0.45 * 2**30)
"""A worker's process beside its state: Python, torch, Ray, CUDA's libraries, caches of warm-up and allocator. On an
H200 2.2 to 2.5 GiB were resident (benchmarks/results/gpu_runs, third and sixth run). On CPUs a rank of the laptop
preset alone had 498 MiB at its peak, the forecast says 492 (`tests/unit/model/test_memory_forecast.py`)."""


def rows_of_logits(num_tokens: int, vocab_size: int, width: int) -> int:
    """How many tokens' logits `liger.CrossEntropySum` holds at a time, in the hidden type: about as much as the
    hidden states of all `num_tokens` (`fused_linear_cross_entropy_forward` of liger-kernel 0.8.5)."""
    rows = -(-num_tokens // -(-vocab_size // width))
    return min(num_tokens, 1 << (rows - 1).bit_length())


@dataclass(frozen=True)
class Moment:
    """A moment of the step; `terms`: bytes on the device by name."""

    name: str
    terms: Mapping[str, int]

    @property
    def num_bytes(self) -> int:
        return sum(self.terms.values())


@dataclass(frozen=True)
class ModelUnits:
    """Parameters of the units that FSDP2 gathers together."""

    step: StepMemory

    @property
    def shard(self) -> int:
        """Parameters of a rank."""
        return -(-self.step.num_parameters // self.step.cp)

    @cached_property
    def block(self) -> int:
        """The largest block, which is the last where layers differ. Another library's may have less or more than ours
        of the same sizes, as latent attention has."""
        config = self.step.config
        difference = (self.step.num_parameters - num_parameters(config)) // config.num_layers
        return difference + max(block_parameters(config, layer) for layer in (0, config.num_layers - 1))

    @cached_property
    def sent(self) -> int:
        """A block's experts where tokens are sent to them; 0 where they are gathered with the block."""
        step, config, number = self.step, self.step.config, expert_parameters(self.step.config)
        placement = "gather" if step.cpu_offload == "all" or not number else step.experts
        sizes = step.cp, number, step.tokens, config.experts_per_token, config.width, step.element_bytes
        return number if sends_tokens(placement, *sizes) else 0

    @property
    def unit(self) -> int:
        """The part of a block that is gathered together."""
        return self.block - self.sent

    @cached_property
    def parts(self) -> tuple[int, int]:
        """Attention, and a slice of the feed-forward part, if these are gathered one by one; else (0, 0)."""
        config = self.step.config
        if not (self.step.built_in and config.is_parted(config.num_layers - 1)):
            return 0, 0
        feed_forward = 3 * config.width * config.ffn_width
        attention = block_parameters(config, config.num_layers - 1) - feed_forward
        return attention, 3 * config.width * max(config.ffn_slices)

    @cached_property
    def head_parts(self) -> tuple[int, int]:
        """(number of slices of the head, parameters of one) if these and the embedding are gathered one by one; (0, 0)
        if the head is gathered with the rest of the root."""
        if not (self.step.built_in and self.step.config.has_own_tables):
            return 0, 0
        slices = self.step.config.head_slices
        return len(slices), max(slices) * self.step.config.width

    @property
    def root(self) -> int:
        """Parameters outside the blocks, which FSDP2 gathers as one unit for the whole of a pass."""
        return self.table * (1 if self.step.config.tie_embeddings else 2) + self.step.config.width

    @property
    def table(self) -> int:
        return self.step.config.vocab_size * self.step.config.width


@dataclass(frozen=True)
class Activations:
    """Bytes of a rank's activations and hop buffers in one pass."""

    step: StepMemory

    @property
    def width_bytes(self) -> int:
        """One activation of the residual stream's width."""
        return self.step.tokens * self.step.config.width * self.step.element_bytes

    @property
    def _ffn_bytes(self) -> int:
        """One activation inside a feed-forward part; with experts, of all experts of a token."""
        config = self.step.config
        width = config.experts_per_token * config.expert_width + config.shared_width
        dense = max(config.ffn_slices) if any(self.step.units.parts) else config.ffn_width
        return self.step.tokens * (width or dense) * self.step.element_bytes

    @property
    def _rows_bytes(self) -> int:
        """One row of the residual stream's width for each expert of a token."""
        return self.step.config.experts_per_token * self.width_bytes

    def _heads_bytes(self, num_heads: int) -> int:
        return self.step.tokens * num_heads * self.step.config.head_dim * self.step.element_bytes

    @property
    def _qkv_bytes(self) -> int:
        """Q, K and V, and the results of two norms that are written out in Python: the input and the result once more,
        one of them in fp32."""
        step, config = self.step, self.step.config
        norms = 0 if step.fused_norms else 2 * step.tokens * config.width * (FP32 + step.element_bytes)
        return self._heads_bytes(config.num_heads + 2 * config.num_kv_heads) + norms

    @cached_property
    def kept_per_layer(self) -> int:
        """Kept by a layer from its forward pass to its backward pass."""
        step, config = self.step, self.step.config
        attended = self._heads_bytes(config.num_heads) + step.tokens * config.num_heads * LSE_BYTES
        if config.checkpoint_activations:
            return (2 if any(step.units.parts) else 1) * self.width_bytes + attended
        ffn = self._ffn_bytes
        if any(step.units.parts):  # of all slices, each with its own result of the norm
            ffn = step.tokens * config.ffn_width * step.element_bytes
            attended += (len(config.ffn_slices) - 1) * self.width_bytes
        # gate, up and their product; and silu(gate) where no kernel computes both at once
        num_ffn = 3 if step.on_gpu else 4
        return 4 * self.width_bytes + attended + self._qkv_bytes + num_ffn * ffn + 2 * self._rows_bytes

    def kept(self, num_layers: int) -> int:
        """Kept by `num_layers` layers: offloaded activations leave with the next layer's forward pass."""
        offloaded = self.step.config.offload_activations
        return (min(num_layers, 2) if offloaded else num_layers) * self.kept_per_layer

    @cached_property
    def recomputed(self) -> int:
        """Held by the backward pass of a block beside what was kept, when SwiGLU's gradients are computed."""
        if not self.step.config.checkpoint_activations:
            return self.width_bytes + 2 * self._ffn_bytes + self._rows_bytes
        # Of the feed-forward's width: gate, up and their gradients, silu(gate) and one more. Of experts' rows: input
        # and output, sorted and by token, and once more as they travel.
        num_rows = 6 if self.step.units.sent else 4
        return 4 * self.width_bytes + self._qkv_bytes + 6 * self._ffn_bytes + num_rows * self._rows_bytes

    @cached_property
    def uneven_bytes(self) -> int:
        """Room for more than a rank's fair share of experts' rows, of which backward holds four of a row's width, and
        six activations inside an expert. Rows beyond that room come in parts (`experts.exchange`)."""
        if not self.step.units.sent:
            return 0
        inner = self._rows_bytes // self.step.config.width * self.step.config.expert_width
        return int((min(MOST_SHARES, self.step.cp) - 1) * (4 * self._rows_bytes + 6 * inner))

    @property
    def rotation(self) -> int:
        return self.step.tokens * self.step.config.head_dim * FP32

    @property
    def _keys_bytes(self) -> int:
        """K and V of a rank's tokens."""
        return 2 * self._heads_bytes(self.step.config.num_kv_heads)

    @property
    def _hops(self) -> int:
        """Hops of one stage."""
        if not self.step.on_gpu:
            return 1
        return min(self.step.cp - 1, max(1, GATHER_LIMIT_BYTES // self._keys_bytes))

    @cached_property
    def hop_buffers(self) -> int:
        """For keys, their gradients and partial gradients: one slot of each with one stage of hops, else two."""
        if self.step.cp == 1:
            return 0
        carried = self.step.latent * self.step.tokens * self.step.element_bytes or self._keys_bytes
        return 3 * (1 if self._hops == self.step.cp - 1 else 2) * self._hops * carried

    @property
    def projected(self) -> int:
        """K, V and their gradients, as kernels take them and as the projection does, of one stage's latents."""
        return 3 * self._hops * self._keys_bytes if self.step.latent and self.step.cp > 1 else 0


@dataclass(frozen=True)
class StepMemory:
    """The memory of one rank in a step.

    `num_parameters`: of the whole model; layers of another library's model are counted as a decoder's of the same
    sizes. `tokens`: of a rank in one pass. `element_bytes`: of the computing type. `fused_norms`: RMSNorm keeps its
    input, no copies in fp32. `experts`: as `StepConfig.experts`. `built_in`: the built-in decoder, whose large parts
    are gathered on their own. `latent`: numbers of a token that hops carry in place of K and V, or 0. `num_trained`:
    parameters of adapters on a frozen base; None where all are trained. `optimizer`: as `OptimConfig.optimizer`.
    """

    config: ModelConfig
    num_parameters: int
    cp: int
    tokens: int
    element_bytes: int
    cpu_offload: CpuOffload = "none"
    on_gpu: bool = True
    fused_norms: bool = True
    experts: Placement = "auto"
    built_in: bool = True
    latent: int = 0
    num_trained: int | None = None
    optimizer: str = "adamw"

    @cached_property
    def units(self) -> ModelUnits:
        return ModelUnits(self)

    @cached_property
    def activations(self) -> Activations:
        return Activations(self)

    @property
    def num_matrices(self) -> int:
        """Parameters of a rank's shard that Muon updates: all but embedding and head, or all of adapters."""
        if self.optimizer != "muon":
            return 0
        number = self.num_parameters - self.units.root if self.num_trained is None else self.num_trained
        return -(-number // self.cp)

    @cached_property
    def lasting(self) -> dict[str, int]:
        """State that is on the device all the time."""
        shard = self.units.shard
        trained = shard if self.num_trained is None else -(-self.num_trained // self.cp)
        moments = MOMENTS_BYTES * trained - FP32 * self.num_matrices
        computed = self.element_bytes * shard if self._is_whole and self.element_bytes < MASTER_BYTES else 0
        # A ring of one reads a frozen base in the computing type (`train.wrap.keep_whole`).
        num_masters = trained if computed else shard
        return {
            "fp32 masters": 0 if self.cpu_offload == "all" else MASTER_BYTES * num_masters,
            "Muon's and Adam's moments" if self.num_matrices else "Adam's moments": moments
            if self.cpu_offload == "none"
            else 0,
            "gradients": GRADIENT_BYTES * trained,
            **({"parameters to compute with": computed} if computed else {}),
            "hop buffers": self.activations.hop_buffers,
            **({"matmul workspace": WORKSPACE_BYTES} if self.on_gpu else {}),
        }

    @property
    def _is_whole(self) -> bool:
        """A ring of one computes with a copy of all parameters (`train.wrap.keep_whole`)."""
        return self.cp == 1 and self.cpu_offload != "all"

    def _gathered(self, num_parameters: int) -> int:
        """Parameters of a unit, gathered in the computing type."""
        return 0 if self._is_whole else self.element_bytes * num_parameters

    def _summed(self, num_parameters: int) -> int:
        """Gradients of a unit that is being summed over the ring, in fp32: the whole unit's and this rank's."""
        return 0 if self._is_whole else FP32 * (num_parameters + -(-num_parameters // self.cp))

    # ------------------------------------------------------------ moments

    @cached_property
    def moments(self) -> tuple[Moment, ...]:
        last = self.config.num_layers - 1
        layers = sorted({last, max(0, last - 1), 0}, reverse=True)
        moments = (self._loss_moment(), *map(self._layer_moment, layers), self._end_moment())
        if self.num_matrices:
            rows = (2 if self.on_gpu else FP32) * self.num_matrices
            return (*moments, Moment("the update", {**self.lasting, "orthogonalised rows": rows}))
        if self.cpu_offload == "none":
            return moments
        # With "all" gradients are in host memory: the buckets' do not visit, their sums are here.
        shard, largest = self.units.shard, -(-self.units.table // self.cp)
        bucket = min(shard, max(BUCKET_ELEMENTS, largest))
        visiting = VISITING_BYTES[self.cpu_offload] * min(shard, bucket + BUCKET_ELEMENTS)
        return (*moments, Moment("the update", {**self.lasting, "state on a visit": visiting}))

    @cached_property
    def fullest(self) -> Moment:
        return max(self.moments, key=lambda moment: moment.num_bytes)

    @property
    def device_bytes(self) -> int:
        """At the peak of a step, without contexts and without memory that the allocator cannot use."""
        return self.fullest.num_bytes

    def _loss_moment(self) -> Moment:
        config, units, activations = self.config, self.units, self.activations
        number, part = units.head_parts
        table = part or units.table
        # Beside the head's gradient in fp32: rows of logits as Liger's kernel takes them and that gradient once more,
        # in the computing type; else a chunk of ours.
        logits = min(config.loss_chunk_tokens, self.tokens) * table // config.width * LOGITS_BYTES
        of_liger = rows_of_logits(self.tokens, config.vocab_size, config.width) * self.element_bytes
        has_liger = self.on_gpu and self.fused_norms and table == units.table
        if has_liger and of_liger <= config.loss_chunk_tokens * LOGITS_BYTES:
            logits = of_liger * config.vocab_size + self.element_bytes * table
        return Moment(
            "the loss's backward pass",
            {
                **self.lasting,
                "kept activations": activations.kept(config.num_layers),
                "gathered embedding and head": self._gathered(min(number, 2) * part or units.root),
                "gathered blocks": 0 if any(units.parts) else self._gathered(units.unit),
                "head's gradient": FP32 * table,
                # One slice's is summed over the ring while the next one's is computed.
                "gradients of the head on their way": self._summed(part) if number > 1 else 0,
                "a chunk of logits": max(logits, self.element_bytes * part + logits // 2) if part else logits,
                "last layer's result": (4 if number > 1 else 3) * activations.width_bytes,
                "rotary angles": activations.rotation,
            },
        )

    def _layer_moment(self, layer: int) -> Moment:
        """The backward pass of one layer, while the gradients of the next one, or of the part computed before, are
        being summed over the ring. Of parts most is held at the feed-forward's first slice, beside which attention is
        gathered."""
        units, activations = self.units, self.activations
        is_last = layer == self.config.num_layers - 1
        attention, part = units.parts
        number, of_head = units.head_parts
        on_way = part or units.unit
        of_last = self._summed(of_head) if number and not part else 0
        own_experts = -(-units.sent // self.cp) * (2 * self.element_bytes + FP32)
        return Moment(
            f"the backward pass of layer {layer}",
            {
                **self.lasting,
                "gradients of a block on their way": of_last
                if is_last and not part
                else self._gathered(on_way) + self._summed(on_way),
                "a rank's experts and their gradients": own_experts,
                "kept activations": activations.kept(layer + 1),
                "recomputed block": activations.recomputed,
                "keys projected up": activations.projected,
                "gathered embedding and head": 0 if number else self._gathered(units.root),
                "gathered blocks": self._gathered(attention + part or 2 * units.unit),
                "head's gradient": 0 if number else self.element_bytes * units.table,
                "rotary angles": activations.rotation,
            },
        )

    def _end_moment(self) -> Moment:
        """The embedding's gradient is added to the head's where they are one, and all are summed over the ring."""
        units, own = self.units, self.units.head_parts[0] > 0
        return Moment(
            "the end of the backward pass",
            {
                **self.lasting,
                "gathered embedding and head": 0 if own else self._gathered(units.root),
                "head's and embedding's gradients": (1 if own else 2) * self.element_bytes * units.table,
                "the same in fp32, on their way": self._summed(units.table if own else units.root),
                "first layer's gradient": self.activations.width_bytes,
            },
        )

    def host_terms(self, staging: int = 0, copies: int = 0) -> dict[str, int]:
        """Host memory of this rank's process; `staging`: a checkpoint's part, `copies`: snapshots."""
        activations = self.config.num_layers * self.activations.kept_per_layer
        terms = {
            "process": CUDA_PROCESS_BYTES if self.on_gpu else CPU_PROCESS_BYTES,
            "offloaded state": IN_HOST_BYTES[self.cpu_offload] * self.units.shard,
            "offloaded activations": activations if self.config.offload_activations else 0,
            "a step on CPUs": 0 if self.on_gpu else self.device_bytes,
            "a checkpoint's part": staging,
            "snapshots and copies": copies,
        }
        return {name: size for name, size in terms.items() if size}
