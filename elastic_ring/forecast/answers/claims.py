"""Thirty claims of earlier write-ups on training one trillion parameters, each held against one configuration.

A row says what was claimed, what is computed, whether it holds, and what would have to be true. Unless a claim says
otherwise, the run is the 1t preset on H100s of eight a host, with the published failure prior.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Literal

from elastic_ring.config import RunConfig, ScalingConfig, StepConfig
from elastic_ring.forecast.answers.money import PriceList, energy_kw
from elastic_ring.forecast.answers.report import short
from elastic_ring.forecast.goodput import DAY, PRIORS, RunShape, mean_goodput
from elastic_ring.forecast.scenario import Forecast, Scenario, default_efficiency, forecast
from elastic_ring.forecast.sizing.machines import CLASSES, GPUS, named_fleet
from elastic_ring.forecast.sizing.memory import SNAPSHOT_BYTES, STATE_BYTES
from elastic_ring.forecast.sizing.step_time import Attention
from elastic_ring.model.config import num_parameters, preset
from elastic_ring.model.flops import model_flops

Verdict = Literal["holds", "does not hold", "holds in part", "cannot be told"]
Answer = tuple[str, Verdict, str]
MODEL = preset("1t")
N = num_parameters(MODEL)
SEQ, PEAK = 8192, GPUS["H100-80"].peak_flops
FLOP_TOKEN = model_flops(MODEL, SEQ) / SEQ
GIB = 2**30


@dataclass(frozen=True)
class Statement:
    number: int
    text: str
    computed: str
    verdict: Verdict
    needs: str

    def line(self) -> str:
        return f"| {self.number} | {self.text} | {self.computed} | {self.verdict} | {self.needs} |"


class Book:
    """What the rows share: prices, and scenarios by size."""

    def __init__(self, prices: PriceList) -> None:
        self.prices = prices

    @cache  # noqa: B019 (one book a command)
    def run(
        self,
        gpus: int,
        tokens: float = 1e12,
        name: str = "1t",
        gpu: str = "H100-80",
        cp: int = 0,
        seq: int = SEQ,
        offload: str = "none",
    ) -> Scenario:
        """`gpus` in rings of `cp` (as many as a ring of all if left out), a batch of 4 M tokens."""
        fleet = named_fleet(gpu)
        ring = min(cp or gpus, gpus)
        scaling = ScalingConfig(dp=gpus // ring, cp=ring, spares=0, device="cuda", cpu_offload=offload)  # type: ignore[arg-type]
        batch = max(gpus // ring, 4_194_304 // seq)
        step = StepConfig(
            steps=1,
            global_batch=batch,
            context_tokens=seq,
            param_dtype="bfloat16",
            sequences_per_pass=min(16, batch // (gpus // ring)),
        )
        return Scenario(
            preset(name),
            scaling,
            step,
            RunConfig(),
            fleet,
            default_efficiency(fleet),
            PRIORS["published"],
            self.prices.find(gpu, "on demand"),
            tokens,
        )

    @cache  # noqa: B019
    def told(self, gpus: int, tokens: float = 1e12, name: str = "1t", gpu: str = "H100-80", cp: int = 0) -> Forecast:
        return forecast(self.run(gpus, tokens, name, gpu, cp), num_draws=1_000)

    def days(self, gpus: int, tokens: float, mfu: float, goodput: float = 0.95) -> float:
        return FLOP_TOKEN * tokens / (gpus * PEAK * mfu * goodput) / DAY

    def usd_hour(self, gpu: str = "H100-80", kind: str = "on demand") -> float:
        return self.prices.find(gpu, kind).usd_hour[1]


def _memory(book: Book) -> dict[int, Answer]:
    run, whole = book.run(400), 32e12
    plan = run.plan
    terms = plan.memory.fullest.terms
    largest = sorted(terms.items(), key=lambda term: -term[1])[:4]
    by_kind = ", ".join(f"{name} {size / 1e9:.0f}" for name, size in largest)
    tokens = {offload: _most_tokens(book, offload) for offload in ("none", "all")}
    kv = 2 * MODEL.num_kv_heads * MODEL.head_dim * 2 * 1_048_576 / 1000
    kept = MODEL.num_layers * MODEL.width * 2 * 1_048_576 / 1000
    floor = f"{plan.needed_bytes / GIB:.0f} GiB a rank, {plan.floor_bytes / GIB:.0f} of it on any number of ranks"
    return {
        1: (
            f"{floor}; state {STATE_BYTES * N / 1e12:.0f} of {whole / 1e12:.0f} TB",
            "holds in part" if run.fits else "does not hold",
            "a plan fits at 8 K tokens; nobody has run it",
        ),
        2: (f"{by_kind} GB at the fullest moment", "does not hold", "state of 16 bytes a parameter on more GPUs"),
        3: (
            f"8B on H100, cp 8: {short(tokens['none'])} tokens a GPU, {short(tokens['all'])} with state on the host",
            "holds in part",
            "a model of 8B or less",
        ),
        4: (
            f"{kept / 1e9:.1f} GB of kept activations and {kv * MODEL.num_layers / 1e9:.2f} GB of K/V a device",
            "does not hold",
            "activations in host memory: K/V of one layer alone are less",
        ),
        23: (
            f"{SNAPSHOT_BYTES * N / 1e12:.1f} TB a checkpoint, as many s at 1 TB/s; 500 TB keep "
            f"{500e12 / (SNAPSHOT_BYTES * N):.0f}; training waits 0.05 s",
            "holds in part",
            "1 TB/s is enough; 50 TB/s and 2 PB of NVMe buy nothing, as copies are taken beside a step",
        ),
        26: (
            f"{2 * 2 * N / 1e12:.1f} TB gathered by each ring in a pass",
            "does not hold",
            "attention that costs nothing sends none of this: weights grow with the model",
        ),
    }


def _most_tokens(book: Book, offload: str) -> int:
    """The largest power of two of tokens on a GPU with which 8B fits."""
    most = 0
    for power in range(10, 22):
        one = book.run(8, name="8b", cp=8, seq=8 * 2**power, offload=offload)
        one = dataclasses.replace(one, step=dataclasses.replace(one.step, sequences_per_pass=1))
        most = 2**power if one.fits else most
    return most


def _time(book: Book) -> dict[int, Answer]:
    eff = CLASSES["elastic-ring/hopper"]
    run = book.run(512, cp=512)
    middle = run.medians()
    step_s = float(run.step_s(middle))
    mfu = run.job.flops / (step_s * PEAK)
    rate = run.tokens_per_step / step_s
    thousand = [book.days(1000, tokens, mfu) for tokens in (1e9, 1e12)]
    two_weeks = book.days(400, 1e12, 1.0, 1.0)
    needed = 15_000 * FLOP_TOKEN
    return {
        5: (f"{FLOP_TOKEN:.2e} a token, 6ND and attention at 8 K", "does not hold", "6e12: a thousandth"),
        6: (
            f"{800 * PEAK / 1e18:.2f} EFLOP/s dense bf16, {1600 * PEAK / 1e18:.2f} in FP8",
            "does not hold",
            f"{267e18 / PEAK:,.0f} GPUs",
        ),
        7: (
            f"1 B: {thousand[0] * 24:.0f} h, 1 T: {thousand[1]:.0f} days at {mfu:.0%} MFU",
            "does not hold",
            f"{book.days(1000, 1e12, 1.0, 1.0) / 250:.0%} MFU at full goodput for 250 days",
        ),
        8: (
            f"15,000 token/s need {needed / (0.4 * PEAK):,.0f} H100 at 40 % MFU; 2 T then take "
            f"{2e12 / 15_000 / DAY / 30.4:.0f} months",
            "does not hold",
            f"{2e12 / (152 * DAY):,.0f} token/s",
        ),
        9: (
            f"fitted: matrix products {eff.matmul:.0%}, attention of both passes {eff.attention:.0%} of peak; FA2 "
            f"{CLASSES['fsdp-fa2/hopper'].attention:.0%}",
            "does not hold",
            "forward passes alone, long sequences, heads of 128 (74 % measured)",
        ),
        10: (f"{two_weeks:.0f} days at all of peak", "does not hold", f"{two_weeks / 14 * 1000:,.0f} H100 at 40 %"),
        24: _ring(book),
        25: _density(book),
        30: (
            f"{rate:,.0f} token/s on 512; the fit has seen {eff.seen[0]} GPUs and {short(eff.seen[1])} parameters: "
            f"extrapolated x {10 * N / eff.seen[1]:.0f} for 10T",
            "cannot be told",
            "a stage of 500B, measured",
        ),
    }


def _ring(book: Book) -> Answer:
    """A hop of K/V at 1 M tokens over 512 ranks, and what of a step is not kernels."""
    run = book.run(512, cp=512, seq=1_048_576)
    parts = run.step_of(run.medians()).parts
    waits = float(parts["launches and messages that wait"]) / float(sum(parts.values()))
    hop = 4.0 * MODEL.num_kv_heads * MODEL.head_dim * run.job.tokens
    verdict: Verdict = "holds in part"
    return (
        f"a hop of {hop / 1e6:.1f} MB takes {hop / 50e9 * 1e3:.2f} ms; {waits:.0%} of a step waits for messages",
        verdict,
        "hops are short; the gathers of 1T over the network are what waits",
    )


def _density(book: Book) -> Answer:
    gains = []
    for seq in (SEQ, 1_048_576):
        dense = book.run(512, cp=512, seq=seq)
        thin = dataclasses.replace(dense, pattern=lambda cp: Attention(density=0.05, fetched=0.1, sparse=1.0))
        middle = dense.medians()
        gains.append(float(dense.step_s(middle)) / float(thin.step_s(middle)))
    return (
        f"density 0.05: {gains[0]:.2f} x at 8 K, {gains[1]:.2f} x at 1 M of the whole step",
        "does not hold",
        "attention alone: 20 x at density 0.05; the step keeps its matrix products",
    )


def _money(book: Book) -> dict[int, Answer]:
    price, low, high = book.usd_hour(), *(book.prices.find("H100-80", "on demand").usd_hour[k] for k in (0, 2))
    hours = book.days(1000, 1e12, 0.4) * 24 * 1000
    fleet = named_fleet("H100-80")
    owned = book.prices.owned
    up_front = owned.usd_up_front(2000)
    mw = {n: energy_kw(fleet, n) / 1e3 for n in (400, 800, 2000)}
    five_months = mw[2000] * 1e3 * 24 * 152 * owned.usd_per_kwh
    a100 = book.usd_hour("A100-80")
    p4de = 1000 * 8 * 250 * 24
    ratio = CLASSES["fsdp-fa2/ampere"].matmul * GPUS["A100-80"].peak_flops / (CLASSES["fsdp-fa2/hopper"].matmul * PEAK)
    return {
        11: (
            f"1 T tokens at 40 % MFU: {short(hours)} GPU-hours, {short(hours * low)} to {short(hours * high)} USD",
            "holds in part",
            f"training alone of 14 to 48 M: {14e6 / hours:.2f} to {48e6 / hours:.2f} USD a GPU-hour",
        ),
        12: (
            f"{short(p4de * 40.97 / 8)} USD at 40.97 an instance-hour of then; {short(p4de * a100)} at {a100} a GPU",
            "does not hold",
            f"{48e6 / p4de:.2f} USD a GPU-hour",
        ),
        13: (
            f"{800 * 730 * low / 1e6:.1f} to {800 * 730 * high / 1e6:.1f} M a month",
            "does not hold",
            f"{12e6 / 800 / 730:.1f} USD a GPU-hour, twice that of 2023's list",
        ),
        14: (
            f"{up_front / 1e6:.0f} M for 2,000 H100 with network and storage",
            "does not hold",
            f"{140e6 / (up_front / 2000):,.0f} GPUs",
        ),
        15: (
            f"{mw[2000]:.1f} MW for 2,000; {five_months / 1e6:.1f} M for 5 months, {five_months * 2.4e-6:.1f} a year",
            "does not hold",
            f"{15 / mw[2000] * 2000:,.0f} GPUs for 15 MW",
        ),
        16: (f"{mw[400]:.2f} MW with PUE 1.3", "does not hold", f"{2 / mw[400] * 400:,.0f} GPUs"),
        28: (
            f"{ratio:.0%} of the H100's matrix products, {a100 / price:.0%} of its price",
            "does not hold",
            "85 % would need a peak of 840 TFLOP/s; an A100 has 312",
        ),
        29: (
            f"{fleet.spec.host_watts * 1.3 / (PEAK * 0.4 / 1e12):.1f} W a TFLOP/s at 40 % MFU",
            "holds",
            f"any MFU above {fleet.spec.host_watts * 1.3 / 150 / (PEAK / 1e12):.1%}",
        ),
    }


def _luck(book: Book) -> dict[int, Answer]:
    prior = PRIORS["published"]
    losses = [1000 * 250 * 24 / hours for hours in prior.gpu_hours]
    share = _goodput(1000, spares=0)
    spared = {spares: _goodput(1600, spares) for spares in (0, 16, 32, 64, 400)}
    best = max(spared, key=lambda spares: spared[spares] / (1600 + spares))
    told = book.told(2048, cp=512)
    chance = told.probability(250 * DAY, 150e6)
    stop = _shape(1000, 0).outcome(1, _shape(1000, 0).detect_s, _shape(1000, 0).dp)
    return {
        17: (
            f"{losses[2]:.0f} to {losses[0]:.0f} losses are to be expected: 100 %",
            "does not hold",
            f"a loss each {1000 * 250 * 24 / -math.log(0.4):,.0f} GPU-hours, 100 times better than published",
        ),
        18: (
            "the risks as stated let 0.70 x 0.85 x 0.75 x 0.65 = 29 % pass",
            "cannot be told",
            "observations: nobody counted such risks",
        ),
        19: (
            f"goodput {share:.1%} on 1,000 without spares, losses by themselves cost {float(stop.stop_s):.0f} s each",
            "holds in part",
            "spares for what is away; recovery is far below 5 minutes, 3 of 419 needed a person",
        ),
        20: (
            ", ".join(f"{spares}: {good:.1%}" for spares, good in spared.items()) + f"; most for its money: {best}",
            "does not hold",
            "repairs of weeks, or fleets that lose a host an hour",
        ),
        21: (
            f"the product is {0.7 * 0.6 * 0.5:.0%}, not 42 %, if they are independent",
            "does not hold",
            "0.7 x 0.6 alone is 42 %",
        ),
        22: (
            f"1 T tokens on 2,048 in 250 days, 150 M USD: {chance['both']:.0%} (time {chance['deadline']:.0%}, money "
            f"{chance['budget']:.0%})",
            "does not hold",
            f"{book.days(2048, 1e12, 1.0) / 250:.0%} MFU; at 8 K tokens the gathers of 1T are what waits",
        ),
        27: (_stages(book), "does not hold", _mfu_of_stages()),
    }


def _shape(gpus: int, spares: int) -> RunShape:
    return RunShape(
        gpus // 200,
        200,
        spares,
        8,
        32,
        128,
        20.0,
        heal_s=2.0,
        rebuild_s=5.0,
        detect_s=5.0,
        interval_s=1800.0,
        wait_s=0.05,
        restore_s=60.0,
    )


def _goodput(gpus: int, spares: int) -> float:
    return float(mean_goodput(_shape(gpus, spares), PRIORS["published"]))


def _stages(book: Book) -> str:
    rates = []
    for parameters, gpus in ((100e9, 400), (500e9, 1000), (1e12, 2000)):
        rates.append(f"{short(parameters)} on {gpus}: {gpus * PEAK * 0.4 / (6 * parameters):,.0f} token/s")
    return "; ".join(rates) + " at 40 % MFU"


def _mfu_of_stages() -> str:
    first, last = 6e11 * 2e3 / (100 * PEAK), 6e12 * 15e3 / (2000 * PEAK)
    return f"an MFU of {first:.1%} for 100B on 100, {last:.1%} for 1T on 2,000"


TEXTS = (
    "1T trains on 400 H100 80 GB, 32 TB together",
    "a GPU holds 2 + 12 (host) + 2 + 8 + 4 + 2 + 4 GB; 46 of 80 free",
    "23 K, 131 K, 0.5 to 1 M tokens a GPU",
    "1 M context is 1 GB a device on 1,000",
    "6e15 FLOP a token",
    "800 H100 are 267 EFLOP/s FP16, 534 FP8",
    "1,000 H100: 1 B tokens 6 h, 1 T 250 days",
    "15,000 token/s; 2 T in 5 months",
    "75 % utilisation (35 % FA2); > 80 % of peak",
    "1 T tokens in two weeks on 400",
    "training 14, 28, 48 M; total 89, 168, 320 M",
    "1,000 p4de x 250 days = 48 M",
    "12 M a month for 800 H100",
    "infrastructure 140 M (or 120)",
    "15 to 20 MW; 5.4 M for 5 months; 17.5 M a year",
    "2 MW for 400 H100",
    "60 % chance of a hardware failure in 250 days",
    "risks: communication 30 %, OOM 40 to 15, others 25 and 35",
    "uptime 99.5 %, MTTR < 5 min, > 95 % automatic",
    "20 % spares (2,000 for 1,600)",
    "70 % x 60 % x 50 % = 42 %",
    "success 70, 85, 92 %",
    "checkpoints at 1 TB/s, 500 TB, 50 TB/s, 2 PB NVMe",
    "a hop 25 GB/s, < 10 ms; overhead < 15 %",
    "block-sparse 5 to 300 x",
    "communication independent of model size",
    "100B 2,000, 500B 8,000, 1T 15,000 token/s",
    "A100: 85 % of H100's performance, 60 % of cost",
    "< 150 W an effective TFLOP/s",
    "linear scaling to 10T; 100 M to 1 B tokens",
)
PARTS: tuple[Callable[[Book], dict[int, Answer]], ...] = (_memory, _time, _money, _luck)


def claims(prices: PriceList) -> list[Statement]:
    """All thirty, in order."""
    book = Book(prices)
    answers: dict[int, Answer] = {}
    for part in PARTS:
        answers |= part(book)
    return [Statement(number, text, *answers[number]) for number, text in enumerate(TEXTS, 1)]


def page(found: list[Statement]) -> str:
    head = "| # | claim | computed | verdict | what would have to be true |\n|---|---|---|---|---|"
    return "\n".join([head, *(one.line() for one in found)])
