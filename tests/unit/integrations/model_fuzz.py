"""Every causal model of transformers, small and with its switches turned: it trains as transformers does, or is refused
by name.

python -m tests.unit.integrations.model_fuzz [TYPE ...] [--turned N] [--write]     prints the table of types
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from elastic_ring import OptimConfig, StepConfig
from elastic_ring.attention.layouts.layout import make_layout
from elastic_ring.data.loader import slice_sample
from elastic_ring.data.source import StdlibText
from elastic_ring.integrations.transformers import reference, ring_model
from elastic_ring.integrations.transformers.module import class_of
from elastic_ring.integrations.transformers.reference import compared
from elastic_ring.model.dropout import sequence_seed
from elastic_ring.model.loss import language_model_loss
from elastic_ring.train.task import TrainingTask, attention_of, batch_of
from tests.unit.attention.attention_rings import ThreadRings, in_threads

CONTEXT = reference.NUM_TOKENS
STEP = StepConfig(context_tokens=CONTEXT)
NUM_LAYERS = 4
UNSET = {
    "head_dim": 16,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
}
"""Sizes that some types leave to each folder."""
RECORD = Path(__file__).resolve().parents[3] / "docs" / "images" / "model_types.json"
"""The outcome of each type as it is, which `docs/tables.py` writes into a page."""
EQUAL = "equal"
REFUSED_RATES = re.compile(r"noise|att\w*drop|layer_?drop|drop\w*att")


def types() -> dict[str, Any]:
    """The config class of each causal type of the installed transformers."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    return {config.model_type: config for config in sorted(MODEL_FOR_CAUSAL_LM_MAPPING, key=lambda c: c.model_type)}


def small(kind: str) -> dict[str, Any]:
    """The type's own config with small sizes, windows inside the context, and no noise, and no dropout in its
    attention. Raises what its class raises."""
    plain = json.loads(json.dumps(types()[kind]().to_dict()))
    plain |= {name: 0.0 for name, value in plain.items() if REFUSED_RATES.search(name) and value}
    plain |= {name: size for name, size in UNSET.items() if plain.get(name, size) is None}
    plain |= {"num_kv_shared_layers": 0} if "num_kv_shared_layers" in plain else {}
    return reference.shrunk(plain, max(CONTEXT, 1 << 20), NUM_LAYERS, is_dense=False)


def turned(plain: dict[str, Any], seed: str, number: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """(what, config) with one switch or rate turned."""
    from transformers import PretrainedConfig

    common = {*PretrainedConfig().to_dict()} - {"tie_word_embeddings"}
    own = {name: value for name, value in plain.items() if name not in common}
    switches = {name: not value for name, value in own.items() if isinstance(value, bool)}
    rates = {name: value * 0.7 + 0.1 for name, value in own.items() if isinstance(value, float)}
    choices = [*{**switches, **rates}.items()]
    for name, value in random.Random(seed).sample(choices, min(number, len(choices))):
        yield f"{name}={value}", {**plain, name: value}


def outcome(plain: dict[str, Any]) -> str:
    """EQUAL, or why the config is refused. Raises AssertionError where it trains something else on one rank or two."""
    try:
        ring = ring_model(plain)
        ring = compared(ring, CONTEXT)
        ring.ring_parts(STEP)
    except ValueError as error:
        return str(error)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        modules = [ring().train() for _ in range(2)]
        reference._fill(modules[0])
        modules[1].load_state_dict(modules[0].state_dict())
        base = class_of(ring.config)._from_config(ring.config, dtype=torch.float32, attn_implementation="eager").train()
        base.load_state_dict(modules[0].state_dict())
    sample = reference._sample(1 if reference.has_balancing_loss(ring.config) else 3, ring.vocab_size)
    sample = replace(sample, tokens=sample.tokens[::-1].copy())
    task = TrainingTask(
        ring, StdlibText(CONTEXT), STEP, OptimConfig(), pattern=ring.pattern(CONTEXT), softcap=ring.softcap
    )
    groups, layout = ThreadRings().groups(2), make_layout("zigzag", CONTEXT, 2)

    def work(cp_rank: int) -> dict[str, torch.Tensor]:
        piece = slice_sample(sample, layout, cp_rank, sample_id=0, index_in_batch=0)
        attention = attention_of(task, piece, layout, cp_rank, groups[cp_rank], step=0)
        loss, _ = language_model_loss(modules[cp_rank], batch_of(piece, attention, torch.device("cpu")))
        return reference._gradients(modules[cp_rank], loss)

    first, second = in_threads(2, work)
    total = {name: tensor + second[name] for name, tensor in first.items()}
    plain_gradients = reference._plain_gradients(base, sample, sequence_seed(STEP.seed, 0, 0))
    worst, part = max(reference._errors(total, plain_gradients))
    assert worst <= reference.TOLERANCE, f"{plain['model_type']} trains another model: {part} differs by {worst:.1e}"
    return EQUAL


REASONS = {
    "does not attend through": "attend beside `AttentionInterface`",
    "layer_types has": "other kinds of layers",
    "more than a decoder of text": "more than a decoder of text",
    "is not causal": "not causal",
    "mask of its own": "a mask of its own",
}


def kind_of(result: str) -> str:
    """EQUAL, or the kind of the reason for a refusal."""
    known = (reason for words, reason in REASONS.items() if words in result)
    return EQUAL if result == EQUAL else next(known, "others, by name")


def outcomes(kind: str, number: int) -> Iterator[tuple[str, str]]:
    """(what is turned, the outcome) of a type's config as it is and turned."""
    try:
        plain = small(kind)
    except Exception as error:  # the class of the config refuses its own defaults
        yield "", f"model_type={kind!r}: has no config of its own ({type(error).__name__})"
        return
    yield "", outcome(plain)
    for what, config in turned(plain, kind, number):
        yield what, outcome(config)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("types", nargs="*")
    parser.add_argument("--turned", type=int, default=0)
    parser.add_argument("--write", action="store_true", help="the record of these types anew")
    args, counts, record = parser.parse_args(), Counter[str](), dict[str, str]()
    for kind in args.types or types():
        try:
            for what, result in outcomes(kind, args.turned):
                counts[EQUAL if result == EQUAL else "refused"] += 1
                record.setdefault(kind, kind_of(result))
                print(f"{kind:28} {what:40} {result[:160]!r}", flush=True)
        except Exception as error:
            counts["in silence, or no refusal"] += 1
            print(f"{kind:28} !!! {type(error).__name__}: {str(error)[:300]!r}", flush=True)
    print(dict(counts))
    if args.write:
        old = json.loads(RECORD.read_text()) if RECORD.exists() else {}
        RECORD.write_text(json.dumps({**old, **record}, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
