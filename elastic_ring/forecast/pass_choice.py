"""Chooses the sequences of a pass and whether activations are kept: the fastest that fits, by the forecast. Pure."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from itertools import product

from elastic_ring.config import RunConfig, ScalingConfig, StepConfig
from elastic_ring.forecast.goodput import PRIORS
from elastic_ring.forecast.scenario import Scenario, default_efficiency
from elastic_ring.forecast.sizing.machines import named_fleet
from elastic_ring.forecast.sizing.step_time import Attention, Latent
from elastic_ring.model.config import ModelSizes

AUTO, AS_SET = "auto", "as set"
SLACK = 1.02
"""Of the choices whose step is at most so many times the fastest, the one with fewest sequences is best."""
CPU_PASS_TOKENS = 1024
"""Tokens of a rank in a pass on CPUs, at most: a rank of the laptop preset computes no faster with more
(benchmarks/results/steps/2026-11-29-defaults-CPU.md)."""
SMALLEST_GPU = "A100-40"
"""Stands for GPUs without a forecast: activations are kept if a rank fits this one."""


@dataclass(frozen=True)
class PassChoice:
    """`reason`: one line for the start."""

    num_sequences: int
    keeps_activations: bool
    reason: str

    def settings(self, step: StepConfig, scaling: ScalingConfig) -> tuple[StepConfig, ScalingConfig]:
        """The settings with the choice in them."""
        return (
            dataclasses.replace(step, sequences_per_pass=self.num_sequences),
            dataclasses.replace(scaling, keep_activations=self.keeps_activations),
        )


def choose_pass(
    model: ModelSizes | None,
    scaling: ScalingConfig,
    step: StepConfig,
    run: RunConfig,
    gpu: str | None,
    density: float = 1.0,
) -> PassChoice:
    """Resolve "auto" in `step.sequences_per_pass` and `scaling.keep_activations`; other values stay.

    `model`: None if it has no plan. `gpu`: the type of the run's GPUs, None if it has no forecast. `density`: of
    attention. Both settings are one choice: among those whose plan fits the GPU, with `dp` and with `min_dp` rings, the
    fewest sequences within 2 % of the fastest step (`SLACK`).
    """
    why_one = "its model has no plan" if model is None else model.one_a_pass
    if model is None or scaling.device == "cpu":
        number, reason = step.micro_batch, why_one or f"at most {CPU_PASS_TOKENS:,} tokens a rank on CPUs"
        if step.sequences_per_pass != AUTO:
            reason = AS_SET
        elif not why_one:
            share = -(-step.global_batch // scaling.dp)
            number = min(share, max(1, CPU_PASS_TOKENS // step.rank_tokens(scaling.cp)))
        return PassChoice(number, scaling.keep_activations is True, f"{_sequences(number)}: {reason}")
    if gpu is None and not why_one:
        why_one = "no forecast of the run's GPUs"
    fleet, attention = named_fleet(gpu or SMALLEST_GPU), Attention(density=density)
    scenario = Scenario(
        model=model.config,
        scaling=scaling,
        step=step,
        run=run,
        fleet=fleet,
        eff=default_efficiency(fleet),
        failures=PRIORS["published"],
        price=None,
        tokens=0.0,
        pattern=lambda cp: attention,
        built_in=model.is_built_in,
        num_own=model.num_parameters,
        latent=Latent(model.latent, 0) if model.latent else None,
        num_trained=model.num_trained,
    )
    return fastest_pass(scenario, why_one)


def fastest_pass(base: Scenario, one_a_pass: str = "") -> PassChoice:
    """The choice for a scenario on GPUs; `one_a_pass` as in `ModelSizes`."""
    model, step, scaling = base.model, base.step, base.scaling
    share, counts = -(-step.global_batch // scaling.dp), [step.micro_batch]
    if step.sequences_per_pass == AUTO and not one_a_pass:
        counts = sorted({share, *(2**power for power in range(share.bit_length()))})
    keeps = [scaling.keep_activations is True]
    if scaling.keep_activations == AUTO and model.checkpoint_activations and not model.offload_activations:
        keeps = [True, False]
    steps_s: dict[tuple[int, bool], float] = {}
    for number, kept in product(counts, keeps):
        scenario = base.with_settings(*PassChoice(number, kept, "").settings(step, scaling))
        fewest = dataclasses.replace(scenario.scaling, dp=scaling.min_dp, max_dp=None)
        if scenario.fits and scenario.with_settings(scenario.step, fewest).fits:
            steps_s[number, kept] = float(scenario.step_s(scenario.medians()))
    if not steps_s:
        reason = one_a_pass or f"no plan fits {base.fleet.gpu}"
        return PassChoice(counts[0], keeps[-1], f"{_sequences(counts[0])}: {reason}")
    fastest_s = min(steps_s.values())
    number, kept = min(
        (choice for choice, step_s in steps_s.items() if step_s <= fastest_s * SLACK),
        key=lambda choice: (choice[0], steps_s[choice]),
    )
    activations = f", activations {'kept' if kept else 'recomputed'}" if model.checkpoint_activations else ""
    because = one_a_pass or f"{steps_s[number, kept]:.3g} s a step on {base.fleet.gpu} by the forecast"
    because = because if step.sequences_per_pass == AUTO else AS_SET
    return PassChoice(number, kept, f"{_sequences(number)}{activations}: {because}")


def with_choice(base: Scenario) -> Scenario:
    """The scenario with "auto" resolved by `fastest_pass`."""
    return base.with_settings(*fastest_pass(base).settings(base.step, base.scaling))


def _sequences(number: int) -> str:
    return "one sequence a pass" if number == 1 else f"{number} sequences a pass"
