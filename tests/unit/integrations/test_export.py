"""What a run exports loads with transformers and computes the same; what cannot be exported is refused by name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import elastic_ring
from elastic_ring import ElasticRingTrainer, StepConfig
from elastic_ring.attention.layouts.layout import make_layout
from elastic_ring.attention.patterns.sparse import Pattern
from elastic_ring.attention.plan.schedule import plan
from elastic_ring.attention.ring import RingAttention
from elastic_ring.cli import main as command
from elastic_ring.cli import train
from elastic_ring.cli.settings import parse
from elastic_ring.data.preparation.prepare import PrepareConfig, prepare
from elastic_ring.data.source import StdlibText
from elastic_ring.integrations.transformers import RingModel, export, ring_model
from elastic_ring.mesh import Mesh
from elastic_ring.monitor.metrics import StepMetrics
from elastic_ring.monitor.metrics_log import MetricsLog
from elastic_ring.state.checkpoints import checkpoint
from elastic_ring.state.checkpoints.manifest import Manifest, attempt_folder
from elastic_ring.state.checkpoints.retention import keep
from elastic_ring.state.checkpoints.weight_files import WEIGHTS, WEIGHTS_INDEX
from elastic_ring.state.shard import Shard
from elastic_ring.state.storage.folder import Storage
from tests.object_store.store import ObjectStore

T = pytest.importorskip("transformers")
hub = pytest.importorskip("huggingface_hub")

CONTEXT = 48
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


def saved(folder: Path, **changes: Any) -> Path:
    """A small model and a tokenizer, as transformers saves them."""
    from tokenizers import Tokenizer, models

    vocab = {chr(33 + number): number for number in range(60)}
    T.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocab, []))).save_pretrained(folder)
    config = T.LlamaConfig(
        **{
            "vocab_size": 257,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "bos_token_id": None,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
            "eos_token_id": None,
            **changes,
        }
    )
    T.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def finished(run: Path, model: RingModel, dtype: Any = "float32", *, in_files: bool = False) -> dict[str, Tensor]:
    """A run's folder as it is at its end, with random weights; the records are the trainer's own.

    `in_files`: the weights lie in several, cut and indexed by Hugging Face's library.
    """
    step = StepConfig(context_tokens=CONTEXT, param_dtype=dtype, global_batch=4)
    trainer = ElasticRingTrainer(
        model, StdlibText(CONTEXT), step_config=step, run_config=elastic_ring.RunConfig("run", run_dir=str(run))
    )
    trainer.submission().write_record()
    torch.manual_seed(3)
    values = {name: 0.1 * torch.randn(param.shape) for name, param in model().named_parameters()}
    if not in_files:
        save_file(values, run / WEIGHTS, metadata={"format": "pt", "sha256": ""})
        return values
    (run / "weights" / "attempt").mkdir(parents=True)
    plan = hub.split_torch_state_dict_into_shards(
        values, max_shard_size="20KB", filename_pattern="weights/attempt/weights{suffix}.safetensors"
    )
    for file, names in plan.filename_to_tensors.items():
        save_file({name: values[name] for name in names}, run / file, metadata={"format": "pt"})
    index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
    (run / WEIGHTS_INDEX).write_text(json.dumps(index))
    return values


def logits_of(module: Any, tokens: Tensor) -> Tensor:
    """By the module that trains, through a ring of one."""
    layout = make_layout("zigzag", CONTEXT, 1)
    with torch.no_grad():
        found: Tensor = module.eval()(
            tokens,
            positions=torch.arange(CONTEXT)[None],
            document_ids=tokens.int(),
            attention=RingAttention(plan(Pattern(), layout), 0, None),
        )
    return found


@pytest.mark.parametrize(("tied", "dtype"), [(True, "float32"), (False, "bfloat16")])
def test_transformers_loads_the_trained_model_with_equal_logits(
    tmp_path: Path, tied: bool, dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = saved(tmp_path / "model", tie_word_embeddings=tied)
    model, run, out = ring_model(folder), tmp_path / "run", tmp_path / "out"
    finished(run, model, dtype, in_files=tied)
    wanted = ["export", str(run), "--format", "huggingface", "--out", str(out), "--max-file-size", "20KB"]
    assert command(wanted) == 0
    told = capsys.readouterr().out
    assert f"tensors in {dtype}" in told
    assert len(list(out.glob("model-*.safetensors"))) > 1
    assert all((out / name).read_bytes() == (folder / name).read_bytes() for name in TOKENIZER)
    trained = model()
    elastic_ring.load_weights(trained, run)
    trained.to(getattr(torch, dtype))
    loaded = T.AutoModelForCausalLM.from_pretrained(out, attn_implementation="sdpa", local_files_only=True).eval()
    assert str(loaded.dtype) == f"torch.{dtype}"
    for (name, ours), (_, theirs) in zip(trained.named_parameters(), loaded.named_parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    tokens = torch.randint(0, 257, (1, CONTEXT))
    with torch.no_grad():
        expected = loaded(tokens, use_cache=False).logits
    tolerance = 1e-5 if dtype == "float32" else 0.05
    torch.testing.assert_close(logits_of(trained, tokens), expected, rtol=tolerance, atol=tolerance)
    assert not list(out.glob(".*")), "nothing half written is left"
    again = ring_model(out)
    assert again.weights is not None, "and what was exported can be trained on"


def save_checkpoint(run: Path, values: dict[str, Tensor], step: int, lineage: int = 0) -> None:
    """Of two ranks, as they write it."""
    storage, folder, files = Storage(str(run)).open(), attempt_folder(step, lineage, f"{step}{lineage}"), []
    shapes = {name: tuple(value.shape) for name, value in values.items()}
    for rank in range(2):
        rows = {name: checkpoint.rows_of(shape, rank, 2) for name, shape in shapes.items()}
        params = {name: value[slice(*rows[name])].clone() for name, value in values.items()}
        shard = Shard(rank, params, torch.optim.SGD(params.values(), lr=0.1))
        described = checkpoint.describe(shard, shapes, 1)
        files.append(checkpoint.write_part(storage, folder, checkpoint.take(shard, described, 0)))
    manifest = Manifest(step, lineage, 1, "identity", folder, 2, 1, tuple(files), described, shard.meta())
    assert checkpoint.commit(storage, manifest)


def test_any_checkpoint_and_the_best_become_a_model_with_a_card(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, run = saved(tmp_path / "models--acme--small" / "snapshots" / "0f"), tmp_path / "run"
    final = finished(run, ring_model(folder))
    with MetricsLog(run) as lines:
        lines.open()
        for step in range(10):
            lines.record(StepMetrics(step, 5.0 - step / 8, 1.0, 0.1, 192, 9.0, 0.1, False, 1, Mesh(1, 2), 2))
            if step % 2:
                lines.validated(step, {"val_loss": 6.0 - step / 8, "val_perplexity": math.inf})
    trained = {
        (step, lineage): {name: value + step for name, value in final.items()}
        for step, lineage in ((4, 1), (6, 0), (8, 1))
    }
    for (step, lineage), values in trained.items():
        save_checkpoint(run, values, step, lineage)
    assert command(["export", str(run), "--best", "--out", str(tmp_path / "best")]) == 2
    assert f"best=True: {run} keeps none: train with --keep-best" in capsys.readouterr().err
    keep(Storage(str(run)), 6, 0)
    assert command(["export", str(run), "--best", "--out", str(tmp_path / "best")]) == 2
    assert "keeps step 6 of lineage 0, and the run has begun lineage 1 since" in capsys.readouterr().err
    keep(Storage(str(run)), 4, 1)
    losses = {"--best": "4.6250", "--step=8": "4.1250", "--step=6": None}
    for flag, loss in losses.items():
        out, step = tmp_path / flag, int(flag[-1]) if flag[-1].isdigit() else 4
        assert command(["export", str(run), flag, "--out", str(out)]) == 0
        loaded = T.AutoModelForCausalLM.from_pretrained(out, local_files_only=True).state_dict()
        values = next(values for (at, _), values in trained.items() if at == step)
        assert all(torch.equal(loaded[name], value) for name, value in values.items())
        card = hub.ModelCard.load(out / "README.md")
        assert (card.data.base_model, card.data.library_name) == ("acme/small", "transformers")
        assert (card.data.pipeline_tag, card.data.tags) == ("text-generation", ["elastic-ring"])
        assert f"| steps | {step} of 40, each of 4 sequences of 48 tokens |\n| tokens | {step * 192:,} |" in card.text
        assert (f"| training loss | {loss} after" in card.text) == (loss is not None), (
            "another branch's are not its own"
        )
        assert ("| branch | lineage 0; the run went on in lineage 1 |" in card.text) == (loss is None)
        assert str(tmp_path) not in card.content
    card_text = (tmp_path / "--best" / "README.md").read_text()
    assert "| validation | val_loss 5.6250, val_perplexity not finite after step 4 |" in card_text
    assert "| optimizer | adamw, peak_lr=" in card_text
    for flags, text in ((["--step=5"], "no checkpoint of step 5; there are 4, 6, 8"), (["--step=4", "--best"], "one")):
        assert command(["export", str(run), *flags, "--out", str(tmp_path / "none")]) == 2
        assert text in capsys.readouterr().err
    (run / "lineages").mkdir()
    (run / "lineages" / "002.json").write_text("{}")  # begun, without a checkpoint yet
    assert command(["export", str(run), "--step=8", "--out", str(tmp_path / "left")]) == 0
    assert "| training loss" not in (tmp_path / "left" / "README.md").read_text()
    next(run.rglob("step-00000008/**/shard-00001*")).write_bytes(b"other")
    assert command(["export", str(run), "--step=8", "--out", str(tmp_path / "damaged")]) == 1
    assert "has 5 bytes, " in capsys.readouterr().err
    assert not (tmp_path / "damaged").exists()


def test_the_text_model_of_a_multimodal_folder_is_exported_by_itself(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    text = json.loads((saved(tmp_path / "plain") / "config.json").read_text())
    tower = {"model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    outer = T.LlavaForConditionalGeneration(
        T.LlavaConfig(text_config=text, vision_config={**tower, "num_hidden_layers": 1, "image_size": 28})
    )
    outer.save_pretrained(tmp_path / "model")
    finished(tmp_path / "run", ring_model(tmp_path / "model"))
    export(tmp_path / "run", tmp_path / "out")
    loaded = T.AutoModelForCausalLM.from_pretrained(tmp_path / "out", local_files_only=True)
    trained = ring_model(tmp_path / "model")()
    elastic_ring.load_weights(trained, tmp_path / "run")
    tokens = torch.randint(0, 257, (1, CONTEXT))
    torch.testing.assert_close(logits_of(trained, tokens), loaded(tokens).logits, rtol=1e-4, atol=1e-4)
    adapted = ring_model(tmp_path / "model", lora="r=2,target=q_proj")
    trainer = ElasticRingTrainer(
        adapted,
        StdlibText(CONTEXT),
        step_config=StepConfig(context_tokens=CONTEXT),
        run_config=elastic_ring.RunConfig("adapted", run_dir=str(tmp_path / "adapted")),
    )
    trainer.submission().write_record()
    values = {name: torch.zeros(p.shape) for name, p in adapted().named_parameters() if p.requires_grad}
    save_file(values, tmp_path / "adapted" / WEIGHTS, metadata={"format": "pt", "sha256": ""})
    with pytest.raises(ValueError, match="belong to the text model of a llava, and peft would put them on the whole"):
        export(tmp_path / "adapted", tmp_path / "merged")
    export(tmp_path / "adapted", tmp_path / "merged", merge=True)
    merged = T.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", local_files_only=True)
    base = outer.model.language_model.state_dict()
    assert all(torch.equal(value, base[name]) for name, value in merged.model.state_dict().items())


def test_another_type_and_another_tokenizer_can_be_asked_for(tmp_path: Path) -> None:
    model = ring_model(T.LlamaConfig(**json.loads((saved(tmp_path / "model") / "config.json").read_text())))
    values = finished(tmp_path / "run", model)
    done = export(tmp_path / "run", tmp_path / "out", dtype="float16", tokenizer=tmp_path / "model")
    loaded = T.AutoModelForCausalLM.from_pretrained(tmp_path / "out", local_files_only=True)
    assert torch.equal(loaded.model.norm.weight, values["model.norm.weight"].half())
    assert (done.num_files, done.dtype) == (1, "float16")
    assert (tmp_path / "out" / "model.safetensors").stat().st_mode & 0o777 == (
        tmp_path / "run" / "config.json"
    ).stat().st_mode & 0o777
    with pytest.raises(ValueError, match=r"has none of tokenizer\.json"):
        export(tmp_path / "run", tmp_path / "more", tokenizer=tmp_path / "run")


def test_an_export_copies_no_file_that_a_link_leads_to_out_of_the_tokenizers_folder(tmp_path: Path) -> None:
    folder, private = saved(tmp_path / "model"), tmp_path / "private"
    finished(tmp_path / "run", ring_model(folder))
    private.write_text("secret")
    (folder / "merges.txt").symlink_to(private)
    for tokenizer in (None, folder):
        with pytest.raises(ValueError, match=r"model/merges\.txt: is a link to .*private, out of its folder"):
            export(tmp_path / "run", tmp_path / "out", tokenizer=tokenizer)
    assert not (tmp_path / "out").exists()
    repository = tmp_path / "models--a--b"
    (repository / "snapshots").mkdir(parents=True)
    folder.rename(repository / "snapshots" / "0f")
    (repository / "blobs").mkdir()
    (repository / "blobs" / "1").write_text("merges")
    (repository / "snapshots" / "0f" / "merges.txt").unlink()
    (repository / "snapshots" / "0f" / "merges.txt").symlink_to("../../blobs/1")
    export(tmp_path / "run", tmp_path / "out", tokenizer=repository / "snapshots" / "0f")
    assert (tmp_path / "out" / "merges.txt").read_text() == "merges"
    split = saved(tmp_path / "split")
    (tmp_path / "elsewhere").mkdir()
    (split / "model.safetensors").rename(tmp_path / "elsewhere" / "a.safetensors")
    (split / "sub").symlink_to(tmp_path / "elsewhere")
    (split / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "sub/a.safetensors"}}))
    with pytest.raises(ValueError, match=r"sub/a\.safetensors: is a link to .*elsewhere/a\.safetensors, out of its"):
        ring_model(split)


def test_what_cannot_be_exported_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, run = ring_model(saved(tmp_path / "model")), tmp_path / "run"
    values = finished(run, model)
    assert command(["export", str(run), "--out", str(tmp_path / "model")]) == 2
    assert "is not an empty folder" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"dtype='int8': must be one of"):
        export(run, tmp_path / "out", dtype="int8")
    with pytest.raises(ValueError, match=r"config\.json: cannot be read"):
        export(tmp_path, tmp_path / "out")
    values.pop("model.norm.weight")
    save_file(values, run / WEIGHTS)
    with pytest.raises(ValueError, match=r"not those of its model .*: model\.norm\.weight"):
        export(run, tmp_path / "out")
    (run / WEIGHTS).unlink()
    with pytest.raises(ValueError, match="final weights are written when a run completes"):
        export(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"token 59 \('\\\\'\) is outside the model's vocabulary of 59"):
        ring_model(saved(tmp_path, vocab_size=59))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json: cannot be read as a tokenizer"):
        ring_model(tmp_path)


def test_a_corpus_that_was_prepared_with_another_tokenizer_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = saved(tmp_path / "model")
    (tmp_path / "corpus.txt").write_text("def main(): return 0\n" * 200)
    manifests = {}
    for name, tokenizer in (("own", str(folder)), ("bytes", "bytes")):
        end = "!" if tokenizer != "bytes" else None  # the tokenizer names no end of its own
        prepare(
            PrepareConfig(
                sources=(str(tmp_path / "corpus.txt"),),
                out=str(tmp_path / name),
                tokenizer=tokenizer,
                end_of_document=end,
                workers=0,
            )
        )
        manifests[name] = str(tmp_path / name / "manifest.json")
    flags = ["--model-folder", str(folder), "--context", "32", "--run-dir", str(tmp_path / "run"), "--data"]
    trainer = train.build(parse([*flags, manifests["own"]]))
    assert trainer.task.data.vocab_size == 60
    assert train.main([*flags, manifests["bytes"]]) == 2
    assert "was prepared with another tokenizer than that in" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_in_an_object_store_is_exported_from_there(
    tmp_path: Path, object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    object_store.enter(monkeypatch)
    values = finished(tmp_path / "run", ring_model(saved(tmp_path / "model")), in_files=True)
    storage = Storage(f"s3://{object_store.new_bucket()}/runs/run").open()
    for path in [path for path in (tmp_path / "run").rglob("*") if path.is_file()]:
        storage.replace(str(path.relative_to(tmp_path / "run")), path.read_bytes())
    assert command(["export", storage.uri, "--out", str(tmp_path / "out")]) == 0
    assert "all of it in" in capsys.readouterr().out
    loaded = T.LlamaForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in values.items())
    assert command(["export", f"{storage.uri}-none", "--out", str(tmp_path / "none")]) == 2
