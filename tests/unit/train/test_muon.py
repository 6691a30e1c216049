"""Muon on rows that a ring shares: torch's own Muon on whole matrices, bit for bit on every ring, through breaks."""

from __future__ import annotations

import gc
import re
import time
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim._muon import _zeropower_via_newtonschulz

from elastic_ring.config import RunConfig, ScalingConfig
from elastic_ring.control.messages import Vote
from elastic_ring.data.sampling.order import Order
from elastic_ring.errors import PeerFailed
from elastic_ring.mesh import Mesh
from elastic_ring.model.transformer import Transformer
from elastic_ring.runtime.driver.task_checks import check_settings
from elastic_ring.runtime.groups.groups import Rendezvous
from elastic_ring.state.checkpoints.manifest import rows_of
from elastic_ring.state.header import Counters, ShardMeta
from elastic_ring.state.shard import Shard
from elastic_ring.train import update
from elastic_ring.train.muon import (
    COEFFICIENTS,
    EPS,
    NUM_ITERATIONS,
    Division,
    Muon,
    Party,
    UpdateRun,
    matrix_parts,
    newton_schulz,
)
from elastic_ring.train.optim import BALANCE_SCALE, SIGN_EPS, learning_rate, make_optimizer
from elastic_ring.train.startup.check import ModelRefused
from elastic_ring.train.task import TrainingTask, parts_of
from elastic_ring.train.wrap import check_own_optimizer, largest_list
from tests.unit.groups.processes import Membership, connect, membership
from tests.unit.train.test_transaction import train_as_plain
from tests.unit.train.tiny_task import (
    CONTEXT,
    EXPERTS,
    OPTIM,
    STEP,
    Broken,
    RandomText,
    abort_until_paused,
    begin,
    break_off,
    facts,
    facts_of_steps,
    make_task,
    momentum,
    plain_training,
    plan_break,
    rebuild,
    roll_forward,
    run_steps,
)

SQUARE = Mesh(2, 2)
MUON = replace(OPTIM, optimizer="muon")
SENT = {"model": partial(Transformer, EXPERTS), "step": replace(STEP, experts="send")}
MATRIX = re.compile(r".*\.(query|key|value|output|gate|up|down|[oq]\w*_proj|gate_up(_proj)?|down_proj)(\.weight)?")
NUM_STEPS = 4


@pytest.fixture(scope="module")
def four() -> Iterator[Membership]:
    with membership(4) as made:
        yield made


class Reference:
    """torch's Muon over whole matrices, each expert and each part of a fused layer by itself, and torch's AdamW."""

    def __init__(self, named: list[tuple[str, nn.Parameter]]) -> None:
        self.views: list[tuple[Tensor, nn.Parameter, Any]] = []
        others: dict[str, list[Tensor]] = {"decayed": [], "undecayed": [], "balancing": []}
        for name, param in named:
            if MATRIX.fullmatch(name) and param.dim() > 1:
                edges = {"qkv": (0, 0.5, 0.75, 1), "gate_up": (0, 0.5, 1)}
                parts = next((cuts for part, cuts in edges.items() if part in name), (0, 1))
                rows = [slice(*(int(edge * param.shape[-2]) for edge in pair)) for pair in pairwise(parts)]
                keys = rows if param.dim() == 2 else list(product(range(len(param)), rows))
                self.views += [(param.detach()[key], param, key) for key in keys]
            else:
                kind = "balancing" if "balance" in name else "decayed" if param.dim() > 1 else "undecayed"
                others[kind].append(param)
        decay: dict[str, Any] = {"weight_decay": MUON.weight_decay}
        views = [view for view, _, _ in self.views]
        self.muon = torch.optim.Muon(views, adjust_lr_fn="match_rms_adamw", **decay)
        signs = {"betas": (0.0, 0.0), "eps": SIGN_EPS, "lr_scale": BALANCE_SCALE, "weight_decay": 0.0}
        settings: dict[str, dict[str, Any]] = {"decayed": decay, "undecayed": {"weight_decay": 0.0}, "balancing": signs}
        groups = [{"params": params, **settings[kind]} for kind, params in others.items() if params]
        self.adamw = torch.optim.AdamW(groups, betas=MUON.betas, eps=MUON.eps)
        self.param_groups = [*self.muon.param_groups, *self.adamw.param_groups]

    def zero_grad(self) -> None:
        self.adamw.zero_grad()
        for _, param, _ in self.views:
            param.grad = None

    def step(self) -> None:
        for view, param, key in self.views:
            assert param.grad is not None
            view.grad = param.grad[key]
        with patch.object(torch.Tensor, "bfloat16", torch.Tensor.clone):  # in fp32, as ours on CPUs
            self.muon.step()
        self.adamw.step()


@pytest.mark.thinned(num=2)
@pytest.mark.parametrize("mesh", [Mesh(1, 1), Mesh(1, 2), Mesh(1, 4), SQUARE], ids=str)
@pytest.mark.parametrize("settings", [{}, SENT], ids=["dense", "experts"])
def test_steps_on_a_mesh_are_those_of_torchs_muon_on_whole_matrices(
    four: Membership, mesh: Mesh, settings: dict[str, Any]
) -> None:
    task = replace(make_task(optim=MUON), **settings)
    train_as_plain(four, mesh, task, plain_training(task, NUM_STEPS, Reference))


class OneDocument(RandomText):
    """Sequences that plain transformers computes the same way."""

    def read(self, sample_id: int) -> Any:
        return replace(super().read(sample_id), document_starts=(0,), ends_document=False)


@pytest.mark.slow
def test_a_model_folder_with_fused_layers_trains_as_transformers_with_torchs_muon(
    four: Membership, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    from elastic_ring.integrations.transformers import ring_model

    sizes = {"hidden_size": 16, "intermediate_size": 23, "num_hidden_layers": 2, "num_attention_heads": 2}
    tokens: dict[str, Any] = {"vocab_size": 17, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
    torch.manual_seed(0)
    config = transformers.Phi3Config(**sizes, **tokens, num_key_value_heads=1)
    transformers.Phi3ForCausalLM(config).save_pretrained(tmp_path)
    model = ring_model(tmp_path)
    task = TrainingTask(model, OneDocument(), STEP, MUON, initial=parts_of(model, STEP).initial)
    plain = transformers.Phi3ForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    optimizer, losses = Reference(list(plain.named_parameters())), []
    source = task.data.open()
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        total, ids = torch.zeros(()), Order(STEP.seed, STEP.global_batch, source.num_sequences).sample_ids(step)
        for sample_id in ids:
            text = torch.from_numpy(source.read(sample_id).tokens)
            logits = plain(text[None, :-1], use_cache=False).logits[0]
            total = total + F.cross_entropy(logits, text[1:], reduction="sum") / (len(ids) * CONTEXT)
        total.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, MUON)
        optimizer.step()
        losses.append(float(total.detach()))
    weights = {name: param.detach() for name, param in plain.named_parameters()}
    train_as_plain(four, Mesh(1, 2), task, (losses, weights), atol=1e-5)


# ------------------------------------------------------------ bits

SHAPES = {"odd": (7, 5), "tall": (9, 3), "fused": (12, 6), "experts": (3, 4, 6), "few": (3, 8), "norm": (5,)}
PARTS = {"odd": (7,), "tall": (9,), "fused": (6, 3, 3), "experts": (2, 2), "few": (3,)}


def updated(me: Any, where: Rendezvous, mesh: Mesh) -> dict[str, Tensor]:
    """This rank's rows after some steps with the same gradients on every ring."""
    connect(me, where, mesh)
    cp_rank, generator = me.groups.global_rank, torch.Generator().manual_seed(0)

    def rows() -> dict[str, Tensor]:
        whole = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
        return {name: whole[name][slice(*rows_of(shape, cp_rank, mesh.cp))] for name, shape in SHAPES.items()}

    named, ndims = rows(), {name: len(shape) for name, shape in SHAPES.items()}
    optimizer = make_optimizer(list(named.items()), MUON, ndims, matrices=PARTS)
    assert isinstance(optimizer, Muon)
    shard = Shard(cp_rank, named, optimizer)
    party = Party(me.groups.ring, cp_rank, tuple(range(mesh.cp)), torch.device("cpu"))
    for step in range(3):
        gradients = rows()
        update = UpdateRun(Division(SHAPES, PARTS, mesh.cp), shard, gradients, 0.5, party).run(
            step, lambda number: None
        )
        optimizer.take(update, shard.params)
        shard.apply({name: gradient * 0.5 for name, gradient in gradients.items()}, 1e-2)
    states = {f"{name} {key}": value for name, param in named.items() for key, value in optimizer.state[param].items()}
    assert {name for name in states if "exp_avg_sq" in name} == {"norm exp_avg_sq"}, "matrices have one state"
    return {**named, **{name: value for name, value in states.items() if "momentum" in name}}


def test_the_same_gradients_give_equal_bits_on_rings_of_every_size(four: Membership) -> None:
    found = []
    for cp in (1, 2, 4):
        mesh = Mesh(1, cp)
        slices = four.all(updated, four.meeting(), mesh, ranks=range(cp))
        found.append({name: torch.cat([part[name] for part in slices]) for name in slices[0]})
    assert found[0].keys() > SHAPES.keys()
    for name, value in found[0].items():
        assert all(torch.equal(value, other[name]) for other in found[1:]), name


@pytest.mark.parametrize("shape", [(48, 16), (16, 48)])
def test_newton_schulz_has_the_bits_of_torchs_in_bfloat16(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    expected = _zeropower_via_newtonschulz(matrix, COEFFICIENTS, NUM_ITERATIONS, EPS)
    assert torch.equal(newton_schulz(matrix.bfloat16()), expected)
    assert (torch.linalg.svdvals(newton_schulz(matrix)) - 1).abs().max() < 0.35


# ------------------------------------------------------------ broken off


def miss_the_end(me: Any) -> None:
    """In the next update this rank breaks off once all ranks have their rows, as the others go on to apply."""
    gather = update.gather_statuses

    def breaks(state: Any, status: int) -> list[int]:
        update.gather_statuses = gather
        gather(state, status)
        raise Broken("the end of an update")

    update.gather_statuses = breaks


def vote_of_step_1(me: Any) -> Vote:
    held = me.state.held
    return held.last if held.unapplied is None else held.unapplied.vote


def gets_rows(me: Any) -> bool:
    """Whether this rank's update ends within some seconds."""
    end = time.monotonic() + 20.0
    while me.state.held.update is None and time.monotonic() < end:
        time.sleep(0.01)
    return me.state.held.update is not None


def vote_after(four: Membership, breaking: int, updated: tuple[int, ...] = ()) -> Vote:
    """Of step 1, which breaks off on one rank; these others have their rows by then."""
    for rank in range(4):
        four.start(rank, break_off, 2)
    assert four.result(breaking) == "Broken"
    assert all(four.now(rank, gets_rows) for rank in updated)
    assert all(four.now(rank, abort_until_paused) for rank in range(4))
    assert {four.result(rank) for rank in range(4) if rank != breaking} == {"GroupAborted"}
    vote: Vote = four.call(breaking, vote_of_step_1)
    assert vote.step == 1
    return vote


def digests_after(four: Membership, breaking: int, newcomers: tuple[int, ...] = ()) -> list[str]:
    """Each rank's digest after step 1, which breaks off on one rank and is rolled forward in the next generation, where
    some ranks are newcomers; those are left out."""
    vote, where = vote_after(four, breaking), four.meeting()
    for rank in range(4):
        four.start(rank, partial(rebuild, keep=rank not in newcomers), where, SQUARE)
        four.start(rank, partial(roll_forward, holds=rank not in newcomers), vote)
    for rank in (*range(4), *range(4)):
        four.result(rank)
    found = [fact for rank, fact in enumerate(four.all(facts)) if rank not in newcomers]
    assert all((fact["applied"], fact["valid"], fact["unapplied"]) == (2, True, False) for fact in found)
    return [fact["digest"] for fact in found]


@pytest.fixture(scope="module")
def calm(four: Membership) -> list[dict[str, Any]]:
    return facts_of_steps(four, SQUARE, make_task(optim=MUON), 2)


@pytest.mark.parametrize("newcomers", [(), (1,), (1, 2)], ids=["none", "one", "one of each ring"])
def test_an_update_that_breaks_off_is_computed_again_with_equal_bits(
    four: Membership, calm: list[dict[str, Any]], newcomers: tuple[int, ...]
) -> None:
    """Rank 1 breaks off after an exchange: the other ring has its rows, and waits. A newcomer has no gradient, so the
    rest of both rings computes together."""
    four.all(begin, four.meeting(), SQUARE, make_task(optim=MUON))
    four.call(1, plan_break, "update", 1, 2)
    expected = [fact["digest"] for rank, fact in enumerate(calm) if rank not in newcomers]
    assert digests_after(four, 1, newcomers) == expected


def test_a_rank_that_has_its_rows_applies_them_when_the_others_have_gone_on(
    four: Membership, calm: list[dict[str, Any]]
) -> None:
    four.all(begin, four.meeting(), SQUARE, make_task(optim=MUON))
    four.all(run_steps, 1)
    four.call(3, miss_the_end)
    assert digests_after(four, 3) == [fact["digest"] for fact in calm]


def test_a_rank_with_its_rows_stays_valid_where_the_update_cannot_be_repeated(
    four: Membership, calm: list[dict[str, Any]]
) -> None:
    """Ring 1 has its rows, ring 0 not, and the new mesh has no gradient of cp_rank 1: rank 2 applies all the same."""
    four.all(begin, four.meeting(), SQUARE, make_task(optim=MUON))
    four.call(1, plan_break, "update", 1, 2)
    vote = vote_after(four, 1, updated=(2,))
    for holders, failed in (((0, 2), True), ((2,), False)):
        where = four.meeting()
        for rank in range(4):
            four.start(rank, partial(rebuild, keep=rank in holders), where, SQUARE)
            four.start(rank, partial(roll_forward, holds=rank in holders), vote)
        for rank in range(4):
            four.result(rank)
        for rank in range(4):
            with pytest.raises(PeerFailed, match="no rank of the mesh has cp_rank 1") if failed else nullcontext():
                four.result(rank)
        found = four.all(facts)
        assert [found[rank]["valid"] for rank in (0, 2)] == [False, True]
    assert found[2]["applied"] == 2
    assert found[2]["digest"] == calm[2]["digest"]


def test_no_parameter_of_the_last_generation_is_kept_after_a_step() -> None:
    named = {name: torch.ones(shape) for name, shape in SHAPES.items()}
    optimizer = make_optimizer(
        list(named.items()), MUON, {name: len(shape) for name, shape in SHAPES.items()}, None, PARTS
    )
    assert isinstance(optimizer, Muon)
    shard, party = Shard(0, named, optimizer), Party(None, 0, (0,), torch.device("cpu"))
    gradients = {name: torch.ones(shape) for name, shape in SHAPES.items()}
    optimizer.take(UpdateRun(Division(SHAPES, PARTS, 1), shard, gradients, 1.0, party).run(0, lambda _: None), named)
    shard.apply(gradients, 1e-2)
    old = [weakref.ref(param) for param in named.values()]
    shard.rebind({name: torch.empty_like(param) for name, param in named.items()})
    named.clear()
    gc.collect()
    assert [ref() for ref in old] == [None] * len(SHAPES)


# ------------------------------------------------------------ whose matrices


def test_routers_tables_head_norms_and_biases_are_no_matrices_and_experts_halves_are() -> None:
    model = Transformer(EXPERTS)
    parts = matrix_parts(model, model.blocks)
    assert parts["blocks.1.ffn.experts.gate_up"] == (8, 8)
    assert parts["blocks.1.ffn.experts.down"] == (16,)
    others = {re.sub(r"^blocks.\d.", "", name) for name, _ in model.named_parameters() if name not in parts}
    tables = {"embedding.weight", "head.weight", "final_norm.weight"}
    assert others == {*tables, "attention_norm.weight", "ffn_norm.weight", "ffn.router.weight", "ffn.balance_bias"}


SHARED = {"num_local_experts": 4, "shared_intermediate_size": 48}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "settings", "expected"),
    [
        ("qwen3_moe", {"num_experts": 4, "moe_intermediate_size": 8}, {"mlp.gate.weight": None}),
        ("mixtral", {"num_local_experts": 4}, {"mlp.gate.weight": None, "mlp.experts.gate_up_proj": (48, 48)}),
        ("gpt_oss", {"num_local_experts": 4}, {"mlp.router.weight": None, "mlp.experts.gate_up_proj": (32,)}),
        ("hunyuan_v1_moe", {"num_experts": 4}, {"mlp.gate.wg.weight": None, "mlp.experts.gate_up_proj": (48, 48)}),
        ("granitemoeshared", SHARED, {"shared_mlp.input_linear.weight": (48, 48)}),
        ("deepseek_v3", LATENT, {"self_attn.kv_b_proj.weight": (64,), "mlp.gate_proj.weight": (48,)}),
        ("modernbert-decoder", {"pad_token_id": 0}, {"mlp.Wi.weight": (48, 48)}),
        ("gpt_bigcode", {"n_embd": 32, "n_head": 4, "n_layer": 2}, {"attn.c_attn.weight": (32, 8, 8)}),
        ("gpt_bigcode", {"n_embd": 32, "n_head": 4, "multi_query": False}, {"attn.c_attn.weight": (96,)}),
        ("codegen", {"n_embd": 32, "n_head": 4, "n_layer": 2, "rotary_dim": 8}, {"attn.qkv_proj.weight": (96,)}),
        ("llama", {}, {"mlp.gate_proj.weight": (48,), "input_layernorm.weight": None}),
    ],
)
def test_matrices_of_folders(kind: str, settings: dict[str, int], expected: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.CONFIG_MAPPING[kind](**sizes, num_key_value_heads=2, head_dim=8, vocab_size=64, **settings)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    parts = matrix_parts(model, largest_list(model))
    layer = "transformer.h" if "n_embd" in settings else "model.layers"
    assert {name: parts.get(f"{layer}.1.{name}") for name in expected} == expected
    assert not any(table in name for name in parts for table in ("embed", "lm_head"))


class Routed(nn.Module):
    """Routers by other names than usual: with a row for each expert."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.scores, self.shared = nn.Linear(8, 4), nn.Linear(8, 6)
        self.gate = nn.Sequential(nn.Linear(8, 5))


def test_a_linear_layer_with_a_row_for_each_expert_or_in_their_gate_is_a_router() -> None:
    assert [*matrix_parts(routed := Routed(), [routed])] == [
        *(f"experts.{k}.weight" for k in range(4)),
        "shared.weight",
    ]


class TwoLists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = (nn.ModuleList(nn.Linear(4, 4) for _ in range(2)) for _ in range(2))


def upper_layer(model: Any) -> list[nn.Module]:
    return [model.blocks[-1]]


def refusal_of_other_units(me: Any, where: Rendezvous, folder: str) -> str:
    """Of a checkpoint whose Muon had all layers, by a run whose Muon has the last."""
    begin(me, where, Mesh(1, 1), make_task(optim=MUON, units=upper_layer))
    names = [name for name, _ in me.state.now.model.named_parameters()]
    groups: Any = ({"muon": True, "params": [name for name in names if "blocks" in name and "norm" not in name]},)
    meta = ShardMeta(Counters(), groups, {})
    reader: Any = SimpleNamespace(unknown=lambda _: [], manifest=SimpleNamespace(folder=folder, meta=meta))
    try:
        me.state.restore(reader)
    except ModelRefused as error:
        return str(error)
    return ""


def test_a_checkpoint_with_other_matrices_of_muons_is_refused_by_name(four: Membership) -> None:
    refusal = four.call(0, refusal_of_other_units, four.meeting(), "step_2")
    assert re.search(r"step_2 has blocks.0\S+ trained by Muon, and it is AdamW's now: give the units=", refusal)


def test_muon_without_matrices_and_beside_what_it_cannot_do_is_refused() -> None:
    task, scaling, run = make_task(optim=MUON), ScalingConfig(), RunConfig("refused", run_dir="/tmp/refused")
    for changed, reason in (
        (replace(task, model=partial(nn.Linear, 3, 4)), "no layer has an nn.Linear"),
        (replace(task, optimizer=momentum), "gives one of your own"),
        (replace(task, model=TwoLists), "TwoLists has a second list of layers, high, .* optimizer='adamw'"),
    ):
        with pytest.raises(ValueError, match=f"optimizer='muon': .*{reason}"):
            check_own_optimizer(changed)
    with pytest.raises(ValueError, match=r"cpu_offload=.all.: .* gives muon"):
        check_settings(task, replace(scaling, cpu_offload="all"), run)
    with pytest.raises(ValueError, match="phase=update is Muon's"):
        check_settings(make_task(), scaling, replace(run, faults="kill@step=1,phase=update"))
