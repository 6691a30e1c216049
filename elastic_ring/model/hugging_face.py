"""The model types of Hugging Face that are known by name. Names only."""

from __future__ import annotations

KNOWN_TYPES = frozenset(
    {
        *("deepseek_v2", "deepseek_v3", "dots1", "ernie4_5_moe", "gemma", "gemma2", "gemma3_text", "glm4_moe"),
        *("gpt_oss", "granitemoe", "llama", "mistral", "mixtral", "olmo2", "olmoe", "phi3", "qwen2", "qwen2_moe"),
        *("qwen3", "qwen3_moe", "smollm3"),
    }
)
"""A config of these says all of the model's sizes: `unit/forecast/test_forecast_models.py` holds each against the
module. Their logits are `lm_head(hidden)`, with a softcap where the config has `final_logit_softcapping` and divided
where it has `logits_scaling`: their loss is computed in chunks of tokens. Others make the logits of a whole slice at
once, as transformers does."""
