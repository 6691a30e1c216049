"""What a training step takes of memory, from the sizes of a decoder alone. No torch in here.

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
"""How many of these are in host memory, by `cpu_offload`."""
VISITING_BYTES: Mapping[CpuOffload, int] = {
    "none": 0,
    "optimizer": MOMENTS_BYTES,
    "all": MASTER_BYTES + MOMENTS_BYTES,
}
"""What the update of a parameter brings to the GPU, two buckets at a time (`state.host_optimizer`)."""
LOGITS_BYTES = 12
"""Bytes of a logit in the loss's backward pass: probabilities, their gradient in the type that is computed in, and the
next chunk's logits in both types; in fp32, or in one piece as other libraries compute them, it is the same sum."""
BUCKET_ELEMENTS = 32 << 20
GATHER_LIMIT_BYTES = 3 << 29
"""The most bytes of keys for which hops share a round of kernels (`attention.ring`)."""
WORKSPACE_BYTES = 32 << 20
"""What cuBLAS allocates for itself on an H100 or H200."""
CUDA_PROCESS_BYTES, CPU_PROCESS_BYTES = int(2.3 * 2**30), int(0.45 * 2**30)
"""A worker's process beside its state: Python, torch, Ray, CUDA's libraries, what warm-up and the allocator keep. On an
H200 2.2 to 2.5 GiB were resident (benchmarks/results/gpu_runs, third and sixth run). On CPUs a rank of the laptop
preset alone had 498 MiB at its peak, the forecast says 492 (`tests/unit/model/test_memory_forecast.py`)."""


def rows_of_logits(num_tokens: int, vocab_size: int, width: int) -> int:
    """How many tokens' logits `liger.cross_entropy_sum` holds at a time, in the hidden type: about as much as the
    hidden states of all `num_tokens` (`fused_linear_cross_entropy_forward` of liger-kernel 0.8.5)."""
    rows = -(-num_tokens // -(-vocab_size // width))
    return min(num_tokens, 1 << (rows - 1).bit_length())


@dataclass(frozen=True)
class Moment:
    """`terms`: what is on the device then, in bytes."""

    name: str
    terms: Mapping[str, int]

    @property
    def num_bytes(self) -> int:
        return sum(self.terms.values())


@dataclass(frozen=True)
class StepMemory:
    """The memory of one rank. `num_parameters`: of the whole model; where it is a model of another library, its layers
    are counted as a decoder's of the same sizes. `tokens`: of a rank in one pass. `element_bytes`: of the type that is
    computed in. `fused_norms`: RMSNorm keeps its input, no copies in fp32. `experts`: as `StepConfig.experts`.
    `built_in`: it is the built-in decoder, whose large parts are gathered on their own. `latent`: numbers of a token
    that hops carry in place of K and V; 0 where they carry these. `num_trained`: parameters of adapters on a frozen
    base; None where all are trained."""

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

    # ------------------------------------------------------------ sizes

    @cached_property
    def shard(self) -> int:
        """Parameters of a rank."""
        return -(-self.num_parameters // self.cp)

    @cached_property
    def trained_shard(self) -> int:
        """Those that have moments and gradients."""
        return self.shard if self.num_trained is None else -(-self.num_trained // self.cp)

    @cached_property
    def block(self) -> int:
        """Parameters of the largest block, which is the last where layers differ. Another library's may have less or
        more than ours of the same sizes, as latent attention has."""
        others = (self.num_parameters - num_parameters(self.config)) // self.config.num_layers
        return others + max(block_parameters(self.config, layer) for layer in (0, self.config.num_layers - 1))

    @cached_property
    def sent(self) -> int:
        """Parameters of a block's experts where tokens are sent to them; 0 where they are gathered with the block."""
        config, number = self.config, expert_parameters(self.config)
        asked = "gather" if self.cpu_offload == "all" or not number else self.experts
        chosen = sends_tokens(
            asked, self.cp, number, self.tokens, config.experts_per_token, config.width, self.element_bytes
        )
        return number if chosen else 0

    @cached_property
    def unit(self) -> int:
        """Parameters of a block that are gathered together."""
        return self.block - self.sent

    @cached_property
    def parts(self) -> tuple[int, int]:
        """Parameters of attention and of a slice of the feed-forward part, where these are gathered one by one."""
        last = self.config.num_layers - 1
        if not (self.built_in and self.config.is_parted(last)):
            return 0, 0
        slices = self.config.ffn_slices
        whole = 3 * self.config.width * self.config.ffn_width
        return block_parameters(self.config, last) - whole, 3 * self.config.width * max(slices)

    @cached_property
    def head_parts(self) -> tuple[int, int]:
        """How many slices the head has, each gathered on its own, as the embedding is, and parameters of one; 0 of
        them: the head is gathered with the rest of the root."""
        if not (self.built_in and self.config.has_own_tables):
            return 0, 0
        slices = self.config.head_slices
        return len(slices), max(slices) * self.config.width

    @property
    def _own_experts(self) -> int:
        """Bytes of the experts of a block that a rank keeps: their values in the computing type, and their gradients in
        that and in fp32."""
        return -(-self.sent // self.cp) * (2 * self.element_bytes + FP32)

    @cached_property
    def root(self) -> int:
        """Parameters outside the blocks, which FSDP2 gathers as one unit for the whole of a pass."""
        return self.table * (1 if self.config.tie_embeddings else 2) + self.config.width

    @property
    def table(self) -> int:
        return self.config.vocab_size * self.config.width

    @property
    def _width_bytes(self) -> int:
        """One activation of the residual stream's width."""
        return self.tokens * self.config.width * self.element_bytes

    @property
    def _ffn_bytes(self) -> int:
        """One activation inside a feed-forward part; with experts, of all that a token takes."""
        config = self.config
        width = config.experts_per_token * config.expert_width + config.shared_width
        dense = max(config.ffn_slices) if any(self.parts) else config.ffn_width
        return self.tokens * (width or dense) * self.element_bytes

    @property
    def _rows_bytes(self) -> int:
        """One row of the residual stream's width for each expert that a token takes."""
        return self.config.experts_per_token * self._width_bytes

    def _heads_bytes(self, num_heads: int) -> int:
        return self.tokens * num_heads * self.config.head_dim * self.element_bytes

    @property
    def _norms_bytes(self) -> int:
        """Bytes of a layer's two norms, written out in Python: the input and the result once more, one of them in
        fp32."""
        return 0 if self.fused_norms else 2 * self.tokens * self.config.width * (FP32 + self.element_bytes)

    # ------------------------------------------------------------ activations

    @cached_property
    def kept_per_layer(self) -> int:
        """What a layer keeps from its forward pass to its backward pass."""
        config = self.config
        attended = self._heads_bytes(config.num_heads) + self.tokens * config.num_heads * LSE_BYTES
        if config.checkpoint_activations:
            return (2 if any(self.parts) else 1) * self._width_bytes + attended
        qkv = self._heads_bytes(config.num_heads + 2 * config.num_kv_heads) + self._norms_bytes
        ffn = self._ffn_bytes
        if any(self.parts):  # of all slices, each with its own result of the norm
            ffn = self.tokens * config.ffn_width * self.element_bytes
            attended += (len(config.ffn_slices) - 1) * self._width_bytes
        # gate, up and their product; and silu(gate) where no kernel computes both at once
        return 4 * self._width_bytes + attended + qkv + (3 if self.on_gpu else 4) * ffn + 2 * self._rows_bytes

    @cached_property
    def activation_bytes(self) -> int:
        return self.config.num_layers * self.kept_per_layer

    @cached_property
    def recomputed(self) -> int:
        """What the backward pass of a block holds beside what was kept, where SwiGLU's gradients are computed."""
        config = self.config
        if not config.checkpoint_activations:
            return self._width_bytes + 2 * self._ffn_bytes + self._rows_bytes
        qkv = self._heads_bytes(config.num_heads + 2 * config.num_kv_heads) + self._norms_bytes
        # Of the feed-forward's width: gate, up and their gradients, silu(gate) and one more. Of experts' rows: what
        # goes in and what comes out, sorted and by token, and once more as it travels.
        return 4 * self._width_bytes + qkv + 6 * self._ffn_bytes + (6 if self.sent else 4) * self._rows_bytes

    @cached_property
    def uneven_bytes(self) -> int:
        """Room for more than a rank's fair share of experts' rows, of which backward holds four of a row's width, and
        six activations inside an expert. What is above that room comes in parts (`experts.parts`)."""
        if not self.sent:
            return 0
        inner = self._rows_bytes // self.config.width * self.config.expert_width
        return int((min(MOST_SHARES, self.cp) - 1) * (4 * self._rows_bytes + 6 * inner))

    @cached_property
    def rotation(self) -> int:
        return self.tokens * self.config.head_dim * FP32

    def _kept(self, num_layers: int) -> int:
        """Of `num_layers` layers: those that wait in host memory leave with the next one's forward pass."""
        return (min(num_layers, 2) if self.config.offload_activations else num_layers) * self.kept_per_layer

    @cached_property
    def hop_buffers(self) -> int:
        """For keys, their gradients, and what comes back: one slot of each with one stage of hops, else two."""
        if self.cp == 1:
            return 0
        carried = self.latent * self.tokens * self.element_bytes or self._keys_bytes
        return 3 * (1 if self._hops == self.cp - 1 else 2) * self._hops * carried

    @property
    def _keys_bytes(self) -> int:
        """K and V of a rank's tokens."""
        return 2 * self._heads_bytes(self.config.num_kv_heads)

    @property
    def _hops(self) -> int:
        """How many share a stage."""
        return min(self.cp - 1, max(1, GATHER_LIMIT_BYTES // self._keys_bytes)) if self.on_gpu else 1

    @property
    def _projected_bytes(self) -> int:
        """K, V and their gradients, as kernels take them and as the projection does, of one stage's latents."""
        return 3 * self._hops * self._keys_bytes if self.latent and self.cp > 1 else 0

    # ------------------------------------------------------------ state

    @cached_property
    def _lasting(self) -> dict[str, int]:
        """State that is on the device all the time."""
        moments = MOMENTS_BYTES if self.cpu_offload == "none" else 0
        masters = 0 if self.cpu_offload == "all" else MASTER_BYTES
        computed = self.element_bytes * self.shard if self._is_whole and self.element_bytes < MASTER_BYTES else 0
        # A ring of one reads a frozen base in the type that is computed in (`train.wrap.keep_whole`).
        num_masters = self.trained_shard if computed else self.shard
        return {
            "fp32 masters": masters * num_masters,
            "Adam's moments": moments * self.trained_shard,
            "gradients": GRADIENT_BYTES * self.trained_shard,
            **({"parameters to compute with": computed} if computed else {}),
            "hop buffers": self.hop_buffers,
            **({"matmul workspace": WORKSPACE_BYTES} if self.on_gpu else {}),
        }

    @property
    def _is_whole(self) -> bool:
        """A ring of one computes with a copy of all parameters (`train.wrap.keep_whole`)."""
        return self.cp == 1 and self.cpu_offload != "all"

    def _gathered(self, num_parameters: int) -> int:
        """Parameters of a unit, gathered in the type that is computed in."""
        return 0 if self._is_whole else self.element_bytes * num_parameters

    def _summed(self, num_parameters: int) -> int:
        """Gradients of a unit that is being summed over the ring, in fp32: the whole unit's and this rank's."""
        return 0 if self._is_whole else FP32 * (num_parameters + -(-num_parameters // self.cp))

    # ------------------------------------------------------------ moments

    @cached_property
    def moments(self) -> tuple[Moment, ...]:
        last = self.config.num_layers - 1
        layers = sorted({last, max(0, last - 1), 0}, reverse=True)
        found = [self._of_loss(), *map(self._of_layer, layers), self._of_end()]
        return (*found, self._of_update()) if self.cpu_offload != "none" else tuple(found)

    @cached_property
    def fullest(self) -> Moment:
        return max(self.moments, key=lambda moment: moment.num_bytes)

    def _logits_bytes(self, table: int) -> int:
        """Beside the head's gradient in fp32: rows of logits as Liger's kernel takes them and that gradient once more,
        in the type that is computed in; else a chunk of ours."""
        config, rows = self.config, min(self.config.loss_chunk_tokens, self.tokens)
        ours = rows * table // config.width * LOGITS_BYTES
        of_liger = rows_of_logits(self.tokens, config.vocab_size, config.width) * self.element_bytes
        has_liger = self.on_gpu and self.fused_norms and table == self.table
        if has_liger and of_liger <= config.loss_chunk_tokens * LOGITS_BYTES:
            return of_liger * config.vocab_size + self.element_bytes * table
        return ours

    def _of_loss(self) -> Moment:
        config = self.config
        number, part = self.head_parts
        table = part or self.table
        logits = self._logits_bytes(table)
        return Moment(
            "the loss's backward pass",
            {
                **self._lasting,
                "kept activations": self._kept(config.num_layers),
                "gathered embedding and head": self._gathered(min(number, 2) * part or self.root),
                "gathered blocks": 0 if any(self.parts) else self._gathered(self.unit),
                "head's gradient": FP32 * table,
                # One slice's is summed over the ring while the next one's is computed.
                "gradients of the head on their way": self._summed(part) if number > 1 else 0,
                "a chunk of logits": max(logits, self.element_bytes * part + logits // 2) if part else logits,
                "last layer's result": (4 if number > 1 else 3) * self._width_bytes,
                "rotary angles": self.rotation,
            },
        )

    def _of_layer(self, layer: int) -> Moment:
        """The backward pass of one layer; the gradients of the next one, or of the part that was computed before, are
        being summed over the ring. Of parts most is held at the feed-forward's first slice, beside which attention is
        gathered."""
        config = self.config
        done = config.num_layers - 1 - layer
        attention, part = self.parts
        number, of_head = self.head_parts
        on_way = part or self.unit
        of_last = self._summed(of_head) if number and not part else 0
        return Moment(
            f"the backward pass of layer {layer}",
            {
                **self._lasting,
                "gradients of a block on their way": self._gathered(on_way) + self._summed(on_way)
                if done or part
                else of_last,
                "a rank's experts and their gradients": self._own_experts,
                "kept activations": self._kept(layer + 1),
                "recomputed block": self.recomputed,
                "keys projected up": self._projected_bytes,
                "gathered embedding and head": 0 if number else self._gathered(self.root),
                "gathered blocks": self._gathered(attention + part or 2 * self.unit),
                "head's gradient": 0 if number else self.element_bytes * self.table,
                "rotary angles": self.rotation,
            },
        )

    def _of_end(self) -> Moment:
        """The embedding's gradient is added to the head's where they are one, and all are summed over the ring."""
        own = self.head_parts[0] > 0
        return Moment(
            "the end of the backward pass",
            {
                **self._lasting,
                "gathered embedding and head": 0 if own else self._gathered(self.root),
                "head's and embedding's gradients": (1 if own else 2) * self.element_bytes * self.table,
                "the same in fp32, on their way": self._summed(self.table if own else self.root),
                "first layer's gradient": self._width_bytes,
            },
        )

    def _of_update(self) -> Moment:
        """`all` has the gradients in host memory: those of the buckets do not visit, their sums are here."""
        largest = -(-self.table // self.cp)
        bucket = min(self.shard, max(BUCKET_ELEMENTS, largest))
        two = min(self.shard, bucket + BUCKET_ELEMENTS)
        return Moment("the update", {**self._lasting, "state on a visit": VISITING_BYTES[self.cpu_offload] * two})

    # ------------------------------------------------------------ totals

    @property
    def device_bytes(self) -> int:
        """At the peak of a step, without contexts and what the allocator cannot use."""
        return self.fullest.num_bytes

    def host_terms(self, staging: int = 0, copies: int = 0) -> dict[str, int]:
        """What the process of this rank takes of host memory; `staging`: a checkpoint's part, `copies`: snapshots."""
        offloaded = self.config.offload_activations
        terms = {
            "process": CUDA_PROCESS_BYTES if self.on_gpu else CPU_PROCESS_BYTES,
            "offloaded state": IN_HOST_BYTES[self.cpu_offload] * self.shard,
            "offloaded activations": self.activation_bytes if offloaded else 0,
            "a step on CPUs": 0 if self.on_gpu else self.device_bytes,
            "a checkpoint's part": staging,
            "snapshots and copies": copies,
        }
        return {name: size for name, size in terms.items() if size}
