"""Adapters of peft train on rings as in a plain loop; only they are state; what cannot be adapted is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from elastic_ring import ElasticRingTrainer, OptimConfig, RunConfig, StepConfig
from elastic_ring.cli import main as command
from elastic_ring.cli.settings import parse
from elastic_ring.data.sampling.order import Order
from elastic_ring.integrations.ray_train import Zero3Trainer
from elastic_ring.integrations.transformers import RingModel, export, ring_model
from elastic_ring.integrations.transformers.reference import _SameMasks
from elastic_ring.mesh import Mesh
from elastic_ring.model.dropout import sequence_seed, token_keys
from elastic_ring.monitor.json_files import json_bytes
from elastic_ring.train.optim import learning_rate, make_optimizer
from elastic_ring.train.passes import compute
from elastic_ring.train.task import TrainingTask, parts_of
from elastic_ring.train.wrap import num_frozen, num_parameters
from tests.unit.groups.processes import Membership, membership
from tests.unit.integrations import test_export
from tests.unit.train.tiny_task import CONTEXT, RandomText, begin, own_slices, rebuild, run_steps

peft = pytest.importorskip("peft")
T = pytest.importorskip("transformers")
pytestmark = [  # peft's own
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Model has .tie_word_embeddings=True.:UserWarning"),
]

ALONE, RING = Mesh(1, 1), Mesh(1, 2)
LORA = "r=3,alpha=6,target=q_proj+down_proj"
STEP = StepConfig(steps=8, global_batch=3, context_tokens=CONTEXT)
OPTIM = OptimConfig(peak_lr=1e-2, warmup_steps=2, total_steps=8, eps=1e-4, clip_norm=0.5)
NUM_STEPS = 3


SIZES: dict[str, Any] = {"vocab_size": 17, "hidden_size": 16, "intermediate_size": 23, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1, "bos_token_id": None, "eos_token_id": None}
OF_EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "mlp_only_layers": [0]}
MODELS: dict[str, Any] = {
    "llama": lambda: T.LlamaConfig(**SIZES),
    "tied": lambda: T.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen3-moe": lambda: T.Qwen3MoeConfig(**SIZES, **OF_EXPERTS, head_dim=8),
}
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {"target_modules": ["q_proj", "down_proj"]}),
    "dora": (
        "llama",
        {
            "target_modules": ["q_proj", "down_proj"],
            "use_dora": True,
            "use_rslora": True,
            "lora_dropout": 0.25,
            "modules_to_save": ["embed_tokens", "lm_head", "input_layernorm"],
        },
    ),
    "tied": ("tied", {"target_modules": ["self_attn.v_proj"], "modules_to_save": ["lm_head"]}),
    "frozen experts": ("qwen3-moe", {"target_modules": ["q_proj", "v_proj"], "use_dora": True}),
    "experts": (
        "qwen3-moe",
        {"target_modules": ["o_proj"], "target_parameters": ["gate_up_proj", "experts.down_proj"]},
    ),
}


def saved(parent: Path, name: str) -> Path:
    """A small model with random values."""
    torch.manual_seed(0)
    T.AutoModelForCausalLM.from_config(MODELS[name]()).save_pretrained(parent / name)
    return parent / name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(scope="module")
def two() -> Iterator[Membership]:
    with membership(2) as made:
        yield made


def task_of(model: RingModel, dtype: Any = "float32") -> TrainingTask:
    step = replace(STEP, param_dtype=dtype)
    parts = parts_of(model, step)
    return TrainingTask(model, OneDocument(), step, OPTIM, initial=parts.initial, frozen=parts.frozen)


class OneDocument(RandomText):
    """Sequences that plain transformers computes the same way."""

    def read(self, sample_id: int) -> Any:
        return replace(super().read(sample_id), document_starts=(0,), ends_document=False)


def plain_loop(
    folder: Path, task: TrainingTask, config: Any
) -> tuple[list[float], list[dict[str, Tensor]], dict[str, Tensor]]:
    """(losses, gradients of each step, trained adapters) of peft and transformers alone, by our names."""
    model = peft.get_peft_model(T.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager"), config)
    named = {
        name.removeprefix("base_model.model."): param for name, param in model.named_parameters() if param.requires_grad
    }
    assert task.initial is not None
    with torch.no_grad():
        for name, param in named.items():
            value = task.initial.tensor(name, param.shape)
            assert ".lora_A." in name or torch.equal(value, param), "peft begins with the same"
            param.copy_(value)
    optimizer = make_optimizer(list(named.items()), OPTIM, {name: param.dim() for name, param in named.items()})
    source, losses, gradients, masks = task.data.open(), [], [], _SameMasks(model)
    order = Order(STEP.seed, STEP.global_batch, source.num_sequences)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        total, num_targets = torch.zeros(()), 0
        for index, sample_id in enumerate(order.sample_ids(step)):
            tokens = torch.from_numpy(source.read(sample_id).tokens)
            keys = token_keys((sequence_seed(STEP.seed, step, index),), torch.arange(CONTEXT)[None])
            with masks.begin(keys):
                logits = model.train()(tokens[None, :-1], use_cache=False).logits[0]
            total, num_targets = total + F.cross_entropy(logits, tokens[1:], reduction="sum"), num_targets + CONTEXT
        (total / num_targets).backward()
        gradients.append({name: param.grad.clone() for name, param in named.items() if param.grad is not None})
        torch.nn.utils.clip_grad_norm_(named.values(), 0.5)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, OPTIM)
        optimizer.step()
        losses.append(float(total.detach()) / num_targets)
    return losses, gradients, {name: param.detach() for name, param in named.items()}


def gradients_of_next(me: Any) -> dict[str, Tensor]:
    """Of the sum of the losses, before they are applied."""
    step = me.state.applied
    local = compute(me.state, step)
    me.state.reduce(step)
    found = {name: view / float(local.num_tokens) for name, view in me.state.held.gradient.views.items()}
    return {name: value.clone() for name, value in found.items()}


@pytest.mark.parametrize("case", OPTIONS)
def test_losses_and_gradients_are_those_of_a_plain_loop_of_peft_and_transformers(
    two: Membership, tmp_path: Path, case: str
) -> None:
    kind, options = OPTIONS[case]
    config, folder = peft.LoraConfig(r=3, lora_alpha=6, task_type="CAUSAL_LM", **options), saved(tmp_path, kind)
    task = task_of(ring_model(folder, lora=LORA if case == "plain" else config))
    losses, gradients, weights = plain_loop(folder, task, config)
    for mesh, cpu_offload in ((ALONE, "none"), (RING, "none"), (RING, "all"))[: 3 if case == "plain" else 2]:
        ranks = range(mesh.size)
        two.all(begin, two.meeting(), mesh, task, cpu_offload, ranks=ranks)
        got = []
        for expected in gradients if mesh is ALONE else ():
            found = two.all(gradients_of_next, ranks=ranks)[0]
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                torch.testing.assert_close(found[name], value, rtol=0, atol=1e-5)
            got += two.all(run_steps, 1, ranks=ranks)[0]
        if mesh is RING:
            got = two.all(run_steps, NUM_STEPS, ranks=ranks)[0]
        assert [float.fromhex(loss) for loss, _ in got] == pytest.approx(losses, rel=1e-5)
        slices = two.all(own_slices, ranks=ranks)
        assert slices[0].keys() == weights.keys(), "adapters alone are state"
        for name, value in weights.items():
            torch.testing.assert_close(torch.cat([part[name] for part in slices]), value, rtol=0, atol=1e-5, msg=name)


def frozen_rows(me: Any) -> dict[str, Tensor]:
    return {name: row.clone() for name, row in me.state._frozen._rows.items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_base_is_read_by_rows_kept_between_generations_and_read_anew_elsewhere(
    two: Membership, folder: Path, tmp_path: Path, dtype: str
) -> None:
    base = tmp_path / "base"
    shutil.copytree(folder, base)
    task = task_of(ring_model(base, lora=LORA), dtype)
    two.all(begin, two.meeting(), RING, task)
    apart = two.all(frozen_rows)
    two.all(begin, two.meeting(), ALONE, task, ranks=(0,))
    whole = two.call(0, frozen_rows)
    for name, value in whole.items():
        joined = torch.cat([part[name] for part in apart])
        torch.testing.assert_close(joined.to(value.dtype), value, rtol=0, atol=0, msg=name)
        assert str(value.dtype) == f"torch.{dtype}", "a ring of one has no masters of what is frozen"
    two.call(0, run_steps, 1)
    (base / "model.safetensors").unlink()
    two.call(0, rebuild, two.meeting(), ALONE)
    two.call(0, run_steps, 1)
    kept = two.call(0, frozen_rows)
    assert all(torch.equal(kept[name], value) for name, value in whole.items())
    with pytest.raises(ValueError, match="its weights are none, and the adapters belong to"):
        two.call(0, begin, two.meeting(), ALONE, task)


REFUSED = {
    "r=4,target=nothing": "target='nothing': no linear layer .* give all-linear, or some of down_proj",
    "r=4,target=lm_head": "target='lm_head': is a table of the vocabulary",
    "r=4,target=all-linear+q_proj": "must be all-linear, or names",
    "r=4,dropout=0.1": "'dropout=0.1' is none of r, alpha, ",
    "r=4,lora_dropout=1": "lora_dropout=1.0: must be at least 0",
    "r=4,use_dora=yes": "use_dora=yes: is no bool",
    "r=4,use_dora=true,target_parameters=down_proj": "peft has neither use_dora nor lora_dropout of target_parameters",
    "r=4,target_parameters=q_proj.weight": "must be the end of names of experts' parameters, .* none;",
    "r=4,modules_to_save=mlp": "must be the end of names of modules with weights of their own",
    "r=4,modules_to_save=q_proj": r"and without adapters, .*self_attn\.q_proj",
    "r=4,r=8": "'r=8' is none of",
    "alpha=4": "has no r",
    "r=x": "r=x: is no int",
    "r=0": "r=0: must be between 1",
    "r=4,alpha=nan": "alpha=nan: must be a finite number above 0",
}


@pytest.mark.parametrize("lora", REFUSED)
def test_adapters_that_mean_nothing_are_refused(folder: Path, lora: str) -> None:
    with pytest.raises(ValueError, match=REFUSED[lora]):
        ring_model(folder, lora=lora)


ODD = {"bias": "all", "init_lora_weights": "pissa", "rank_pattern": {"q_proj": 4}}
ODD |= {"task_type": "SEQ_CLS", "target_modules": ".*q_proj"}


@pytest.mark.parametrize("name", ODD)
def test_a_config_of_peft_is_read_and_its_other_options_are_refused_by_name(folder: Path, name: str) -> None:
    with pytest.raises(ValueError, match=rf"lora.*({name}|CAUSAL_LM)"):
        ring_model(folder, lora=peft.LoraConfig(**{name: ODD[name]}))
    usual = ring_model(folder, lora=peft.LoraConfig(r=4, use_rslora=True)).lora
    assert str(usual) == "r=4,alpha=8,target=q_proj+v_proj,use_rslora=true"
    assert (
        ring_model(folder, lora={"r": 4, "lora_alpha": 8.0, "target": ["q_proj", "v_proj"], "use_rslora": True}).lora
        == usual
    )


def test_adapters_need_a_base_in_full_precision(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the base is frozen, so it must have weights"):
        ring_model(folder, lora=LORA, weights=False)
    shutil.copytree(folder, tmp_path / "none")
    (tmp_path / "none" / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="has no weights to freeze"):
        ring_model(tmp_path / "none", lora=LORA)
    moe = saved(tmp_path, "qwen3-moe")
    for lora in ("r=4", "r=4,target=q_proj+down_proj"):
        with pytest.raises(ValueError, match=r"peft takes it for .*, among which are its routers or experts"):
            ring_model(moe, lora=lora)
    config = json.loads((folder / "config.json").read_text())
    quantised = {**config, "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    (tmp_path / "none" / "config.json").write_text(json.dumps(quantised))
    with pytest.raises(ValueError, match=r"is quantised \(quantization_config\)"):
        ring_model(tmp_path / "none", lora=LORA)


def trainer_of(folder: Path, run: Path) -> ElasticRingTrainer:
    return ElasticRingTrainer(
        ring_model(folder, lora=LORA),
        OneDocument(),
        step_config=STEP,
        optim_config=OPTIM,
        run_config=RunConfig("tuned", run_dir=str(run)),
    )


def test_a_run_goes_on_only_above_its_base(folder: Path, tmp_path: Path) -> None:
    base, run = tmp_path / "base", tmp_path / "run"
    shutil.copytree(folder, base)
    before = trainer_of(base, run)
    before.submission().write_record()
    weights = load_file(base / "model.safetensors")
    save_file({**weights, "model.norm.weight": 2 * weights["model.norm.weight"]}, base / "model.safetensors")
    with pytest.raises(ValueError, match=r"'tuned' is taken by a run with other settings .*weights=\w+, .* there, .*"):
        trainer_of(base, run).fit()
    with pytest.raises(ValueError, match="and the adapters belong to"):
        before.task.frozen.check()  # type: ignore[union-attr]
    shutil.rmtree(base)
    with pytest.raises(ValueError, match=rf"{base}/config.json: cannot be read"):
        trainer_of(base, run)


def test_adapters_are_counted_as_state_and_their_base_as_frozen(folder: Path, tmp_path: Path) -> None:
    whole, adapted = (trainer.task for trainer in (whole_trainer(folder, tmp_path), trainer_of(folder, tmp_path)))
    assert num_frozen(whole) == 0
    assert num_frozen(adapted) == num_parameters(whole)
    assert num_parameters(adapted) == 2 * 3 * (16 + 16 + 23 + 16)
    assert whole.flops is not None
    assert adapted.flops is not None
    assert 0.6 < adapted.flops / whole.flops < 0.8, "the gradient of frozen weights is not computed"
    with pytest.raises(ValueError, match="ZeRO-3 in Ray Train trains whole models"):
        Zero3Trainer(ring_model(folder, lora=LORA), OneDocument(), cp=1, step_config=STEP, optim_config=OPTIM)


def whole_trainer(folder: Path, run: Path) -> ElasticRingTrainer:
    return ElasticRingTrainer(
        ring_model(folder), OneDocument(), step_config=STEP, run_config=RunConfig("whole", run_dir=str(run))
    )


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--lora", "r=4"], "lora='r=4': adapts the weights of a model folder, and a preset has none"),
        (["--model-folder", "FOLDER", "--lora", "r=4,bias=all"], "'bias=all' is none of r, alpha, "),
        (["--model-folder", "FOLDER", "--lora", "r=4", "--plan"], "what adapters need is not planned"),
    ],
)
def test_the_flag_is_refused_in_words(
    folder: Path, flags: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(["train", *(str(folder) if flag == "FOLDER" else flag for flag in flags)]) == 2
    assert told in capsys.readouterr().err


def test_the_settings_file_has_the_adapters(folder: Path, tmp_path: Path) -> None:
    asked = parse(["--model-folder", str(folder), "--lora", "r=4"])
    (tmp_path / "again.toml").write_text(asked.toml())
    assert parse(["--config", str(tmp_path / "again.toml")]).lora == "r=4"
    table = '[lora]\nr = 4\ntarget_modules = ["q_proj", "v_proj"]\nuse_dora = true\n'
    (tmp_path / "table.toml").write_text(f'model_folder = "{folder}"\n{table}')
    assert parse(["--config", str(tmp_path / "table.toml")]).lora == "r=4,target_modules=q_proj+v_proj,use_dora=true"


def finished(base: Path, run: Path, pattern: str | None, lora: Any = "r=3") -> Path:
    """A run's folder at its end, with random adapters; the records are the trainer's own."""
    model = ring_model(base, lora=lora)
    trainer = ElasticRingTrainer(
        model,
        OneDocument(),
        step_config=STEP,
        run_config=RunConfig("run", run_dir=str(run)),
        pattern=pattern,
    )
    trainer.submission().write_record()
    torch.manual_seed(3)
    named = {name: param for name, param in model().named_parameters() if param.requires_grad}
    values = {name: 0.1 * torch.randn(param.shape) for name, param in named.items()}
    save_file(values, run / "weights.safetensors", metadata={"format": "pt", "sha256": ""})
    return run


def test_adapters_of_layers_with_biases_are_exported_alone_and_merged(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 23, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = T.Qwen2Config(vocab_size=17, num_key_value_heads=1, bos_token_id=None, eos_token_id=None, **sizes)
    base, run = tmp_path / "base", tmp_path / "run"
    T.Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(base, max_shard_size="4KB")
    finished(base, run, None)
    (run / "summary.json").write_bytes(json_bytes({"steps": 8}))
    export(run, tmp_path / "adapters")
    export(run, tmp_path / "merged", merge=True)
    assert (tmp_path / "adapters" / "adapter_model.safetensors").stat().st_mode & 0o044
    card = (tmp_path / "adapters" / "README.md").read_text()
    assert "LoRA adapters (r=3,alpha=6,target=all-linear) above `./base`." in card
    assert f"| steps | 8 of 8, each of 3 sequences of {CONTEXT} tokens |" in card
    loads = 'AutoModelForCausalLM.from_pretrained("./base")', 'PeftModel.from_pretrained(model, "adapters")'
    assert all(load in card for load in loads)
    assert "[More Information Needed]" not in card
    assert str(tmp_path) not in card + (tmp_path / "adapters" / "adapter_config.json").read_text()
    export(run, tmp_path / "named", base_model=str(base))
    assert peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "named").config.vocab_size == 17
    opened = partial(T.AutoModelForCausalLM.from_pretrained, dtype=torch.float32)
    tokens = torch.randint(0, 17, (1, 12))
    with torch.no_grad():
        below = opened(base)(tokens).logits
        above = peft.PeftModel.from_pretrained(opened(base), tmp_path / "adapters")(tokens).logits
        torch.testing.assert_close(opened(tmp_path / "merged")(tokens).logits, above, rtol=0, atol=1e-5)
    assert (below - above).abs().max() > 0.02
    with pytest.raises(ValueError, match="is not an empty folder"):
        export(run, tmp_path / "merged", merge=True)
    next(base.glob("*.safetensors")).write_bytes(b"other")
    with pytest.raises(ValueError, match="cannot be read as safetensors"):
        export(run, tmp_path / "out", merge=True)


@pytest.mark.parametrize("case", [case for case in OPTIONS if case != "plain"])
def test_peft_loads_each_kind_of_adapters_with_equal_logits_and_so_does_transformers_merged_ones(
    tmp_path: Path, case: str
) -> None:
    kind, options = OPTIONS[case]
    base, lora = saved(tmp_path, kind), peft.LoraConfig(r=3, lora_alpha=6, **options)
    run, opened = finished(base, tmp_path / "run", None, lora), T.AutoModelForCausalLM.from_pretrained
    model, values = ring_model(base, lora=lora), load_file(run / "weights.safetensors")
    frozen, module = model.ring_parts(STEP).frozen, model()
    assert frozen is not None
    tokens = torch.randint(0, 17, (1, test_export.CONTEXT))
    with torch.no_grad():
        for name, param in module.named_parameters():
            param.copy_(values[name] if name in values else frozen.tensor(name, param.shape))
        expected = test_export.logits_of(module, tokens)
        export(run, tmp_path / "adapters")
        loaded = peft.PeftModel.from_pretrained(opened(base), tmp_path / "adapters")
        torch.testing.assert_close(loaded(tokens).logits, expected, rtol=0, atol=1e-4)
        assert (opened(base)(tokens).logits - expected).abs().max() > 0.02
        if case == "tied":
            with pytest.raises(ValueError, match=r"of tied tables the run trained one \(lm_head\)"):
                export(run, tmp_path / "merged", merge=True)
        else:
            export(run, tmp_path / "merged", merge=True)
            torch.testing.assert_close(opened(tmp_path / "merged")(tokens).logits, expected, rtol=0, atol=1e-4)


def test_windows_that_the_base_has_not_are_exported_merged_only(folder: Path, tmp_path: Path) -> None:
    run = finished(folder, tmp_path / "run", "window:8")
    with pytest.raises(ValueError, match="trained with other windows than its base has"):
        export(run, tmp_path / "out")
    export(run, tmp_path / "merged", merge=True)
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["sliding_window"] == 8
    assert export(run, tmp_path / "out", allow_dense=True).num_tensors == 2 * 2 * 7
    whole = whole_trainer(folder, tmp_path / "whole")
    whole.submission().write_record()
    save_file(load_file(folder / "model.safetensors"), tmp_path / "whole" / "weights.safetensors")
    with pytest.raises(ValueError, match=r"merge=True: run .* has no adapters"):
        export(tmp_path / "whole", tmp_path / "other", merge=True)
