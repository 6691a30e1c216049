"""Seconds of a step: for each layer the longest of kernels, launches and messages, and what does not overlap.

A job is a decoder on shards: `shard_ranks` hold a model together and gather its layers (FSDP), `cp` of them share a
sequence (K/V in hops), `replicas` sum gradients once a step. Tensor and pipeline parallelism are not modelled. Figures
of the machine may be arrays of draws.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from elastic_ring.config import ScalingConfig, StepConfig
from elastic_ring.costs import SPARSE_COST, SPARSE_KEYS, sends_tokens
from elastic_ring.forecast.sizing.machines import Efficiency, Number
from elastic_ring.gpus import Gpu
from elastic_ring.model.config import ModelConfig, expert_parameters, num_parameters

MESSAGE_S = 20e-6
"""Latency of a collective for each rank that its ring passes, and of a hop."""
ADAM_BYTES = 32
"""Memory traffic for each parameter of a shard: master and moments read and written, gradient read, norm."""
LOSS_BYTES = 14
"""Memory traffic for each logit of both passes."""
RECOMPUTED = {"none": 0.0, "half": 0.5, "all": 1.0, "all but attention": 1.0}
"""Shares of a layer's forward pass that the backward pass repeats; half: every second layer."""
ROW_PASSES = 35.0
"""Passes through memory of the rows that experts take, in a forward pass: sorted, gathered, summed. Fitted to the same
half of the cases as the times of `Efficiency`."""
COMPILED, LIGER = 0.55, 0.28
"""Shares of elementwise traffic that torch.compile and Liger's kernels leave."""
KEPT_KEYS = 0.25
"""Of a rank's own keys: fetched ones that are fewer stay for the backward pass (`RingOptions.keep_keys`)."""


@dataclass(frozen=True)
class Attention:
    """A pattern's work relative to dense attention, on average over the layers. `density`: share of the causal pairs;
    `slowest`: largest number of pairs of a rank over the mean; `fetched`: K/V that one rank receives, over a dense
    ring's; `hops`: messages (None: all of the ring's); `sparse`: share of the layers with a pattern. `is_bound`:
    content chooses, so that density and bytes are upper bounds."""

    density: float = 1.0
    slowest: float = 1.0
    fetched: float = 1.0
    hops: float | None = None
    sparse: float = 0.0
    is_bound: bool = False


DENSE = Attention()


@dataclass(frozen=True)
class Latent:
    """Hops carry `numbers` of a token in place of K and V; readers project them up by a matrix of `parameters`. Where
    content chooses by keys, keys cross."""

    numbers: int
    parameters: int


@dataclass(frozen=True)
class Job:
    """One step. `tokens`: of a rank in a pass; `seq`: tokens of a sequence; `passes`: of a rank in a step.

    `block`: matrix parameters of a layer that multiply a token; `gathered`: those of them that FSDP gathers (None:
    all); `sent`: elements of a token that go to its experts, one way. `head`: parameters of the output. `recompute`:
    share of forward that backward repeats, as `RECOMPUTED`. `fused`: share of elementwise traffic that fused kernels
    leave. `ffn`, `rows`: elements of a token that the feed-forward layer writes, and that experts take."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    block: float
    head: float
    vocab: int
    ffn: float
    num_parameters: float
    tokens: int
    seq: int
    passes: int
    shard_ranks: int
    cp: int = 1
    replicas: int = 1
    recompute: Literal["none", "half", "all", "all but attention"] = "none"
    fused: float = 1.0
    attention: Attention = DENSE
    offload: str = "none"
    offload_activations: bool = False
    grad_bytes: int = 4
    gathered: float | None = None
    sent: float = 0.0
    rows: float = 0.0
    latent: Latent | None = None

    @property
    def num_gpus(self) -> int:
        return self.shard_ranks * self.replicas

    @property
    def tokens_per_step(self) -> float:
        return float(self.tokens) * self.passes * self.num_gpus

    @property
    def flops(self) -> float:
        """FLOP of the model in a step on one GPU, recomputation not counted."""
        dense = 6.0 * (self.block * self.layers + self.head) * self.tokens
        return self.passes * (dense + 3.0 * self.attention_flops * self.layers)

    @property
    def attention_flops(self) -> float:
        """FLOP of attention in a layer's forward pass on one GPU: the causal half."""
        return 2.0 * self.attention.density * self.tokens * self.seq * self.heads * self.head_dim

    @property
    def fetched(self) -> float:
        """Tokens whose keys a rank fetches in a layer's forward pass."""
        return self.attention.fetched * (self.cp - 1) * self.tokens

    @property
    def carried(self) -> tuple[float, float]:
        """Numbers of a token that hops carry, and FLOP of their projection up at a reader."""
        if self.latent is None or self.attention.is_bound:
            return 2.0 * self.kv_heads * self.head_dim, 0.0
        return float(self.latent.numbers), 2.0 * self.latent.parameters

    @property
    def attention_work(self) -> float:
        """FLOP of attention in a layer's forward pass on the slowest GPU, with what kernels over block tables cost
        beside it, for both rounds of a ring: its own keys and fetched keys."""
        attention = self.attention
        if not attention.sparse:
            return self.attention_flops
        rounds = 1.0 + min(1.0, attention.fetched) * (self.cp > 1)
        beside = 4.0 * attention.sparse * rounds * SPARSE_KEYS * self.tokens * self.heads * self.head_dim
        return self.attention_flops * attention.slowest * SPARSE_COST + beside


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step by part; `total_s` has the slowest of all GPUs."""

    parts: dict[str, Number]
    slowest: Number

    @property
    def total_s(self) -> Number:
        return sum(self.parts.values()) * self.slowest


def together(kernels_s: Number, messages_s: Number, overlap: Number) -> Number:
    """Seconds of kernels and messages that run beside each other."""
    return np.maximum(kernels_s, messages_s) + (1.0 - overlap) * np.minimum(kernels_s, messages_s)


def collective_s(num_bytes: float, ranks: int, gpu: Gpu, eff: Efficiency, per_host: int) -> Number:
    """Seconds of an all-gather or a reduce-scatter of `num_bytes` in all: each rank sends and receives nearly all of
    it, and each host by all of its cards."""
    if ranks < 2:
        return 0.0
    moved = num_bytes * (ranks - 1) / ranks
    rate = gpu.nvlink_bytes_s * eff.link
    if ranks > per_host:
        rate = np.minimum(rate, gpu.nic_bytes_s * per_host * eff.link)
    return moved / rate + MESSAGE_S * (1 + np.log2(ranks))


def step_time(job: Job, gpu: Gpu, eff: Efficiency, per_host: int = 8) -> StepTime:
    """The parts of a step in the order in which they run."""
    matmul = gpu.peak_flops * eff.matmul / (1.0 + eff.half_width / job.width)
    attention = gpu.peak_flops * eff.attention * (1.0 if job.head_dim >= 128 else eff.narrow_heads)
    hbm = gpu.hbm_bytes_s * 0.85 / eff.elementwise
    product_s = 2.0 * job.block * job.tokens / matmul
    attend_s = job.attention_work / attention
    moved = (12.0 * job.width + 2.0 * (job.heads + 2 * job.kv_heads) * job.head_dim + 2.0 * job.ffn) * 2.0
    moved = moved * job.fused + 2.0 * ROW_PASSES * job.rows
    touch_s = job.tokens * moved / hbm
    again = RECOMPUTED[job.recompute]
    attend_again = 0.0 if job.recompute == "all but attention" else again
    up_s = job.carried[1] * job.fetched / matmul
    forward_s = product_s + up_s + attend_s + touch_s
    # Once more, and the gradients of both factors.
    backward_s = 2.0 * product_s + 3.0 * up_s + 2.5 * attend_s + 2.0 * touch_s
    backward_s = backward_s + again * (product_s + touch_s) + attend_again * attend_s
    host_s = eff.experts_host_s if job.rows else eff.ring_host_s if job.cp > 1 else eff.host_s
    forward_s, backward_s = np.maximum(forward_s, host_s / 3), np.maximum(backward_s, host_s * 2 / 3)
    gathered = job.block if job.gathered is None else job.gathered
    gather_s = collective_s(2.0 * gathered, job.shard_ranks, gpu, eff, per_host)
    reduce_s = collective_s(job.grad_bytes * gathered, job.shard_ranks, gpu, eff, per_host)
    trip_s = collective_s(2.0 * job.sent * job.tokens, job.cp, gpu, eff, per_host) if job.sent else 0.0
    hops_s, hops_back_s = hop_times_s(job, gpu, eff, per_host)
    # Nothing hides the trips to experts and back.
    forward = together(forward_s, gather_s + hops_s, eff.overlap) + 2 * trip_s
    backward = together(backward_s, gather_s + reduce_s + hops_back_s, eff.overlap) + 2 * (1 + again) * trip_s
    head_s = 6.0 * job.head * job.tokens / matmul + job.tokens * job.vocab * LOSS_BYTES / (gpu.hbm_bytes_s * 0.85)
    kernels = job.passes * job.layers
    parts = {
        "matrix products": kernels * ((3 + again) * product_s + 4 * up_s),
        "attention": kernels * (3.5 + attend_again) * attend_s,
        "elementwise": kernels * (3 + again) * touch_s,
    }
    whole = kernels * (forward + backward)
    parts["launches and messages that wait"] = np.maximum(whole - sum(parts.values()), 0.0)
    parts["head and loss"] = job.passes * head_s
    parts["gathered root"] = job.passes * collective_s(2.0 * job.head, job.shard_ranks, gpu, eff, per_host)
    parts["sum over replicas"] = replica_sum_s(job, gpu, eff, per_host)
    parts["update"] = update_s(job, gpu)
    if job.offload_activations:
        kept = 2.0 * job.tokens * 2 * job.width * job.layers * job.passes / (gpu.pcie_bytes_s * eff.link)
        parts["activations over PCIe"] = np.maximum(kept - whole, 0.0)
    # The slowest of so many ranks over their mean, where each varies by `jitter` (normal).
    slowest = 1.0 + eff.jitter * np.sqrt(2.0 * np.log(max(1, job.num_gpus)))
    return StepTime(parts, slowest)


def hop_times_s(job: Job, gpu: Gpu, eff: Efficiency, per_host: int) -> tuple[Number, Number]:
    """Seconds of a layer's hops, forward and backward: cp - 1 hops or what a pattern fetches; backward fetches again,
    unless few keys were kept, and returns gradients, which all kernels of GPUs give in the type of the keys."""
    attention = job.attention
    if job.cp < 2:
        return 0.0, 0.0
    rate = (gpu.nvlink_bytes_s if job.cp <= per_host else gpu.nic_bytes_s) * eff.link
    messages = job.cp - 1 if attention.hops is None else attention.hops
    forward_s = 2.0 * job.carried[0] * job.fetched / rate + messages * MESSAGE_S
    few = attention.fetched * (job.cp - 1) <= KEPT_KEYS
    is_kept = attention.sparse == 1.0 and not attention.is_bound and few
    return forward_s, forward_s if is_kept else 2.0 * forward_s


def replica_sum_s(job: Job, gpu: Gpu, eff: Efficiency, per_host: int) -> Number:
    """Seconds of the all-reduce of a shard's fp32 gradients, over NVLink where a host has all ranks."""
    if job.replicas < 2:
        return 0.0
    rate = gpu.nvlink_bytes_s if job.num_gpus <= per_host else gpu.nic_bytes_s
    num_bytes = 2.0 * 4.0 * job.num_parameters / job.shard_ranks * (job.replicas - 1) / job.replicas
    return num_bytes / (rate * eff.link) + MESSAGE_S * 2 * job.replicas


def update_s(job: Job, gpu: Gpu) -> Number:
    """Seconds of Adam on the shard: at memory's speed, and of offloaded state over PCIe in both directions at once."""
    shard = job.num_parameters / job.shard_ranks
    visit = {"none": 0.0, "optimizer": 8.0, "all": 20.0}[job.offload]
    return shard * ADAM_BYTES / (gpu.hbm_bytes_s * 0.85) + shard * visit / (gpu.pcie_bytes_s * 0.75)


def job_of(
    config: ModelConfig,
    scaling: ScalingConfig,
    step: StepConfig,
    attention: Attention = DENSE,
    num_own: int | None = None,
    latent: Latent | None = None,
) -> Job:
    """What one rank computes and sends in a step of `elastic-ring train`; `num_own` as in `plan_of`."""
    of_ring = -(-step.global_batch // scaling.dp)
    together = min(step.micro_batch, of_ring)
    ffn_width = config.experts_per_token * config.expert_width + config.shared_width or config.ffn_width
    number = num_own or num_parameters(config)
    qkvo = 2.0 * config.width * config.head_dim * (config.num_heads + config.num_kv_heads)
    qkvo += (number - num_parameters(config)) / config.num_layers
    recomputes = config.checkpoint_activations and (scaling.keep_activations is not True or config.offload_activations)
    tokens, gathered, sent = together * step.rank_tokens(scaling.cp), None, 0
    if config.num_experts:
        in_experts, placement = expert_parameters(config), "gather" if scaling.cpu_offload == "all" else step.experts
        sizes = (in_experts, tokens, config.experts_per_token, config.width)
        is_sent = sends_tokens(placement, scaling.cp, *sizes, element_bytes=2)
        sent = config.experts_per_token * config.width * is_sent
        gathered = qkvo + 3.0 * config.width * config.shared_width + in_experts * (not is_sent)
    return Job(
        layers=config.num_layers,
        width=config.width,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block=qkvo + 3.0 * config.width * ffn_width,
        head=float(config.vocab_size * config.width),
        vocab=config.vocab_size,
        ffn=3.0 * ffn_width,
        num_parameters=float(number),
        tokens=tokens,
        seq=step.context_tokens,
        passes=-(-of_ring // together),
        shard_ranks=scaling.cp,
        cp=scaling.cp,
        replicas=scaling.dp,
        recompute="all but attention" if recomputes else "none",
        fused=LIGER,
        attention=attention,
        offload=scaling.cpu_offload,
        offload_activations=config.offload_activations,
        gathered=gathered,
        sent=float(sent),
        rows=float(config.experts_per_token * config.width),
        latent=latent,
    )
