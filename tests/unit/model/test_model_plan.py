"""Every preset is built without memory, and its plan says what a rank will hold; up to 1 T on a laptop."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from elastic_ring.attention.patterns.rules import Window
from elastic_ring.attention.patterns.sparse import SparsePattern
from elastic_ring.cli import train
from elastic_ring.cli.settings import FITS, PRESETS
from elastic_ring.forecast.sizing.memory import COMMUNICATOR_BYTES, STATE_BYTES, plan_of
from elastic_ring.gpus import CONTEXT_BYTES, GPUS
from elastic_ring.model.config import model_flops, num_parameters
from elastic_ring.model.transformer import Transformer


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("laptop", 0.5e6, 2e6),
        ("100m", 0.09e9, 0.12e9),
        ("1b", 0.9e9, 1.2e9),
        ("8b", 7.5e9, 8.5e9),
        ("70b", 65e9, 75e9),
        ("1t", 0.95e12, 1.1e12),
        ("30b-a3b", 30e9, 31e9),
        ("1t-moe", 1.0e12, 1.05e12),
    ],
)
def test_a_preset_has_about_the_parameters_that_its_name_says_and_fits_its_ranks(
    name: str, least: float, most: float
) -> None:
    preset = PRESETS[name]()
    plan = plan_of(preset["model"], preset["scaling"], preset["step"])
    with torch.device("meta"):
        built = sum(parameter.numel() for parameter in Transformer(preset["model"]).parameters())
    assert least < plan.num_parameters == built < most
    assert plan.state_bytes + plan.host_bytes == STATE_BYTES * -(-plan.num_parameters // preset["scaling"].cp)
    assert plan.state_bytes + plan.activation_bytes + 2 * plan.largest_unit_bytes < 141e9


@pytest.mark.parametrize("name", [name for name in PRESETS if "laptop" not in name])
def test_a_preset_fits_the_gpu_that_it_names_and_no_smaller_one(name: str) -> None:
    preset = PRESETS[name]()
    verdicts = plan_of(preset["model"], preset["scaling"], preset["step"]).verdicts
    assert next((gpu for gpu in GPUS if verdicts[gpu] and gpu != "A100-80"), None) == FITS.get(name)
    assert verdicts["A100-80"] == (name in FITS and FITS[name] != "H200"), "as much memory as an H100"


def test_a_plan_counts_experts_on_their_own_and_says_how_tokens_meet_them(capsys: pytest.CaptureFixture[str]) -> None:
    for flags, told in (
        ([], "28,991,029,248 in 48 x 128 experts, 8 for a token; tokens are sent to the rank that holds their experts"),
        (["--cp", "2"], "8 for a token; experts are gathered"),
        (["--cp", "24"], "cp=24 does not divide 128 experts: some ranks hold 6 and others fewer; cp=16 or 32"),
        (["--step.experts", "gather"], "8 for a token; experts are gathered"),
    ):
        assert train.main(["--preset", "30b-a3b", "--plan", *flags]) == 0
        printed = capsys.readouterr().out
        assert "3,353,026,560 of them for a token" in printed
        assert told in printed


def test_a_plan_says_a_verdict_for_each_gpu_and_imports_neither_torch_nor_ray() -> None:
    """Which take seconds. The allocator's reserve and two contexts count."""
    code = (
        "import sys; from elastic_ring.cli import main; assert main(['plan', '--preset', '8b']) == 0;"
        "print([name for name in ('torch', 'ray', 'pyarrow') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    lines = done.stdout.splitlines()
    assert lines[-1] == "[]"
    assert [line.split()[0] for line in lines if ": fits" in line or ": does not fit" in line] == list(GPUS)
    assert "  A100-40   39.4 GiB: does not fit; the smallest ring that does is cp=16" in lines
    assert "  H100-80   79.1 GiB: fits; the smallest ring that does is cp=4" in lines
    plan = plan_of(*(PRESETS["8b"]()[part] for part in ("model", "scaling", "step")))
    assert plan.needed_bytes == int(1.25 * plan.gpu_bytes) + 2 * CONTEXT_BYTES + COMMUNICATOR_BYTES


def test_what_the_start_would_refuse_a_plan_refuses_too(capsys: pytest.CaptureFixture[str]) -> None:
    for flags, why in (
        (["--dp", "8"], "global_batch=4 is less than dp=8"),
        (["--copies", "2", "--dp", "1"], "copies='2'"),
        (["--data", "shards:none", "--data.vocab-size", "300"], "data.vocab_size=300"),
        (["--step.experts", "send"], "step.experts='send': the model has no experts"),
    ):
        assert train.main(["--plan", *flags]) == 2
        assert why in capsys.readouterr().err


def test_a_pattern_lowers_the_flops_by_what_attention_leaves_out(capsys: pytest.CaptureFixture[str]) -> None:
    model = PRESETS["laptop"]()["model"]
    of_attention = model_flops(model, 2048) - model_flops(model, 2048, 0.0)
    assert train.main(["--plan", "--pattern", "window:256"]) == 0
    printed = capsys.readouterr().out
    density = SparsePattern((Window(256),)).density(2048)
    flops = model_flops(model, 2048) - (1 - density) * of_attention
    assert f"{flops:.3g} FLOP for a sequence, with {density:.3f} of attention's pairs" in printed


def test_the_plan_of_one_trillion_is_printed_and_nothing_is_started(capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main(["--preset", "1t", "--plan"]) == 0
    printed = capsys.readouterr().out
    assert "1,0" in printed
    assert "on 640 ranks, 3,277 tokens on each" in printed
    assert "the largest part of a block is 2.4 GiB when gathered" in printed
    assert "  H100-80   79.1 GiB: fits; the smallest ring that does is cp=216" in printed
    assert "\n17.6 GiB of it no number of ranks takes away" in printed
    assert "standbys too, takes about 0.8 GiB of each of its GPUs" in printed


def test_one_ring_of_640_gpus_of_80_gb_takes_one_trillion_with_its_moments_on_them() -> None:
    sizes = PRESETS["1t"]()
    scaling = replace(sizes["scaling"], dp=1, cp=640, cpu_offload="none")
    plan = plan_of(sizes["model"], scaling, replace(sizes["step"], global_batch=1))
    assert plan.verdicts["H100-80"]
    assert plan.smallest_ring(GPUS["H100-80"].gib) == 432
    whole = plan_of(sizes["model"], scaling, sizes["step"], built_in=False)
    assert whole.smallest_ring(GPUS["H100-80"].gib) is None, "gathered by the layer, as a model of another library"
    experts = PRESETS["1t-moe"]()
    assert (
        plan_of(*(experts[part] for part in ("model", "scaling", "step"))).smallest_ring(GPUS["H100-80"].gib) == 384
    ), "of rings that divide its experts"


def test_the_plan_counts_the_activations_of_all_sequences_of_a_pass(capsys: pytest.CaptureFixture[str]) -> None:
    for together, told in ((2, "1,024 tokens on each\n"), (4, "2,048 tokens on each of 2 sequences a pass\n")):
        settings = ["--step.sequences-per-pass", str(together), "--global-batch", str(together)]
        assert train.main(["--preset", "laptop", "--dp", "2", "--plan", *settings]) == 0
        assert told in capsys.readouterr().out


def test_the_plan_of_a_run_on_cpus_has_no_word_of_gpus() -> None:
    preset = PRESETS["laptop"]()
    assert not any("GPU" in line for line in plan_of(preset["model"], preset["scaling"], preset["step"]).lines())


@pytest.mark.parametrize(
    ("copies", "held"),
    [
        ("1", "keeps 2 snapshots in host memory, 11.1 GiB, and 11.1 GiB of its peers'"),
        ("2", "keeps 2 snapshots in host memory, 11.1 GiB, and 22.3 GiB of its peers'"),
        ("parity:4", "holds the parity of a group of 4 ranks as much again"),
        ("0", ""),
        ("auto", ""),
    ],
)
def test_the_plan_says_what_host_memory_copies_take(copies: str, held: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main(["--preset", "1b", "--dp", "4", "--global-batch", "4", "--copies", copies, "--plan"]) == 0
    printed = capsys.readouterr().out
    assert (f"copies={copies}" in printed) == bool(held)
    assert held in printed


def test_the_plan_of_8_b_on_two_gpus_splits_the_state_between_gpu_and_host(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["--preset", "8b", "--dp", "1", "--cp", "2", "--global-batch", "1", "--plan"]
    assert train.main([*settings, "--cpu-offload", "optimizer"]) == 0
    printed = capsys.readouterr().out
    assert "a rank holds 29.9 GiB of state" in printed
    assert "29.9 GiB of its state wait in host memory" in printed
    assert "together about 81 GiB of a GPU" in printed
    assert train.main(settings) == 0
    printed = capsys.readouterr().out
    assert "a rank holds 59.8 GiB of state" in printed
    assert "wait in host memory" not in printed
    assert "a step takes most memory in the backward pass of layer 30:" in printed
    assert "31.2 GiB  kept activations" in printed
    assert "together about 111 GiB of a GPU" in printed


def test_flops_are_six_for_each_parameter_and_token_plus_the_causal_triangle() -> None:
    model = PRESETS["8b"]()["model"]
    table = model.vocab_size * model.width
    dense = 6 * (num_parameters(model) - table)
    assert model_flops(model, 1) == dense + 6 * 32 * 128 * 32
    assert model_flops(model, 2048) == 2048 * dense + 6 * 2048**2 * 32 * 128 * 32


def test_a_pinned_kernel_must_exist_for_the_device() -> None:
    trainer = train.build(train.parse(["--preset", "laptop", "--kernel", "aten-cpu"]))
    assert trainer.task.step.kernel == "aten-cpu"
    with pytest.raises(ValueError, match=r"kernel='flash-attn-4' is no attention kernel for device='cpu'.*aten-cpu"):
        train.build(train.parse(["--preset", "laptop", "--kernel", "flash-attn-4"]))
    with pytest.raises(ValueError, match="kernel='nothing'"):
        train.build(train.parse(["--preset", "1b", "--kernel", "nothing"]))
