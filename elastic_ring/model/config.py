"""The shape of our decoder: one frozen dataclass, its presets, and how many parameters it has. No torch in
here."""

from __future__ import annotations

from dataclasses import dataclass

_DTYPES = ("float32", "bfloat16", "float64")


@dataclass(frozen=True)
class ModelConfig:
    """A decoder of `num_layers` blocks; `ffn_width` is the inner width of SwiGLU.

    dtype is that of the parameters as built; what FSDP2 computes in is its own setting. `offload_activations` moves
    what checkpointing keeps to host memory between forward and backward. `compile_blocks` has torch.compile fuse what
    a layer computes around attention (`pieces`). Raises ValueError for shapes that do not fit each other.
    """

    vocab_size: int
    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_width: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    checkpoint_activations: bool = True
    offload_activations: bool = False
    compile_blocks: bool = False
    loss_chunk_tokens: int = 1024
    dtype: str = "float32"

    def __post_init__(self) -> None:
        counts = ("vocab_size", "num_layers", "width", "num_heads", "num_kv_heads", "head_dim", "ffn_width")
        for name in (*counts, "loss_chunk_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"ModelConfig {name}={getattr(self, name)}: must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"ModelConfig num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}: each KV head "
                "serves a whole number of query heads; choose num_kv_heads that divides num_heads"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"ModelConfig head_dim={self.head_dim}: rotary embedding turns pairs, choose an even one"
            )
        if self.rope_theta <= 1.0 or self.norm_eps <= 0.0:
            raise ValueError(
                f"ModelConfig rope_theta={self.rope_theta} must be above 1, norm_eps={self.norm_eps} above 0"
            )
        if self.offload_activations and not self.checkpoint_activations:
            raise ValueError(
                "ModelConfig offload_activations=True moves what checkpointing keeps, and checkpoint_activations=False "
                "keeps it all: set that to True"
            )
        if self.dtype not in _DTYPES:
            raise ValueError(f"ModelConfig dtype={self.dtype!r}: choose one of {', '.join(_DTYPES)}")


def num_parameters(config: ModelConfig) -> int:
    """How many parameters `Transformer(config)` has, without building it."""
    attention = 2 * config.width * config.head_dim * (config.num_heads + config.num_kv_heads)
    block = attention + 3 * config.width * config.ffn_width + 2 * config.width
    embeddings = config.vocab_size * config.width * (1 if config.tie_embeddings else 2)
    return embeddings + config.num_layers * block + config.width


def preset(name: str) -> ModelConfig:
    """A named size: laptop, 100m, 1b, 8b, 70b, 1t. `dataclasses.replace` changes a field."""
    table = {
        # Bytes and an end-of-document token; meant for a context of 2,048.
        "laptop": ModelConfig(257, 4, 128, 4, 2, 32, 384),
        "100m": ModelConfig(32_768, 12, 768, 12, 4, 64, 2_048, tie_embeddings=True),
        "1b": ModelConfig(128_256, 16, 2_048, 32, 8, 64, 5_760, rope_theta=500_000.0, tie_embeddings=True),
        "8b": ModelConfig(128_256, 32, 4_096, 32, 8, 128, 14_336, rope_theta=500_000.0),
        "70b": ModelConfig(128_256, 80, 8_192, 64, 8, 128, 28_672, rope_theta=500_000.0),
        "1t": ModelConfig(128_256, 136, 24_576, 192, 16, 128, 81_920, rope_theta=500_000.0),
    }
    if name not in table:
        raise ValueError(f"model preset {name!r}: choose one of {', '.join(table)}")
    return table[name]
