"""A step's work from the settings of a run."""

from __future__ import annotations

from elastic_ring.config import ScalingConfig, StepConfig
from elastic_ring.experts.price import sends_tokens
from elastic_ring.forecast.sizing.step_time import DENSE, LIGER, Attention, Job, Latent
from elastic_ring.model.config import ModelConfig, expert_parameters, num_parameters


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
    beside = (num_own or num_parameters(config)) - num_parameters(config)
    qkvo = 2.0 * config.width * config.head_dim * (config.num_heads + config.num_kv_heads) + beside / config.num_layers
    recomputes = config.checkpoint_activations and (scaling.keep_activations is not True or config.offload_activations)
    tokens, gathered, sent = together * -(-step.context_tokens // scaling.cp), None, 0
    if config.num_experts:
        number = expert_parameters(config)
        is_sent = sends_tokens(
            "gather" if scaling.cpu_offload == "all" else step.experts,
            scaling.cp,
            number,
            tokens,
            config.experts_per_token,
            config.width,
            2,
        )
        sent = config.experts_per_token * config.width * is_sent
        gathered = qkvo + 3.0 * config.width * config.shared_width + number * (not is_sent)
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
        num_parameters=float(num_own or num_parameters(config)),
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
