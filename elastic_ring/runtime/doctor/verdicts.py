"""The doctor's rules, and its findings by them from the hosts' reports. Pure: no Ray, no torch, no clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import median
from typing import Literal, TypedDict

from elastic_ring.files import few
from elastic_ring.runtime.agent.health import GpuReport

Verdict = Literal["ok", "note", "warning", "failure"]
Limit = Literal["open_files", "shm_free_bytes", "disk_free_bytes"]
Band = tuple[Verdict, float, float]
"""From the second number up to the third."""
Link = tuple[str, str, float, float]
"""Two hosts, seconds for a message of one byte, bytes a second each way."""

GIB = 1 << 30
MUST_AGREE = ("python", "torch", "ray", "elastic_ring", "cuda", "nccl")
IDLE_GPU_BYTES = GIB
CLOCK_WARNING_S, CLOCK_FAILURE_S = 2.0, 300.0
ON_THE_WAY_S = 30.0
"""The most that a starting worker's report may wait for its reader."""
SLOW_SHARE = 0.5
NUM_NAMED = 4


class HostReport(TypedDict, total=False):
    """`host.report`, and the offset of the clock that `examine` measures. `gpus` is None without NVML."""

    open_files: int
    shm_free_bytes: int
    disk_free_bytes: int
    unix_s: float
    versions: dict[str, str]
    ray_gpus: int
    gpus: list[GpuReport] | None
    clock_offset_s: float
    clock_error_s: float


Reports = Mapping[str, HostReport]


@dataclass(frozen=True)
class Finding:
    """One line of the doctor. `hosts`: empty if it is about all."""

    check: str
    verdict: Verdict
    says: str
    way_out: str = ""
    hosts: tuple[str, ...] = ()

    def line(self) -> str:
        where = f"{few(self.hosts, NUM_NAMED)}: " if self.hosts else ""
        return f"{self.verdict:<9}{self.check:<11}{where}{self.says}{f'. {self.way_out}' if self.way_out else ''}"


NTP = "Run chrony or ntpd: object stores refuse requests of a clock that is wrong, and records are put in order by it"
VERSIONS = "Install the same on all hosts: workers exchange Python objects, and bits follow from versions"
OPEN_FILES = "Raise it before `ray start`: ulimit -n 65536, or LimitNOFILE of the service"
SHM = "Ray's object store and NCCL live there: docker run --shm-size, or an emptyDir of medium Memory"
DISK = "Free some, or give ray start --temp-dir on a larger disk"
LIMITS: tuple[tuple[str, Limit, int, int, str, str], ...] = (
    ("ulimits", "open_files", 4096, 65_536, "open files", OPEN_FILES),
    ("/dev/shm", "shm_free_bytes", GIB // 8, GIB, "bytes free", SHM),
    ("disk", "disk_free_bytes", GIB, 20 * GIB, "bytes free for Ray's files", DISK),
)
"""Check, entry of the report, the number below which a run fails, the one below which it is scarce, unit, way out."""
ECC = "has {ecc_errors:.0f} memory errors that were not corrected", "Reset it, and replace it if they return"
SLOWED = "is slowed down by heat or its hardware", "Look at its cooling and power"
GPU_RULES: tuple[tuple[Verdict, Callable[[GpuReport], object], str, str], ...] = (
    ("failure", lambda gpu: gpu.get("needs_reset"), "has memory rows to remap", "Reset it"),
    ("warning", lambda gpu: gpu.get("ecc_errors"), *ECC),
    ("warning", lambda gpu: gpu.get("slowed"), *SLOWED),
    ("note", lambda gpu: gpu["used_bytes"] > IDLE_GPU_BYTES, "is in use ({used_gib:.1f} GiB)", ""),
)


def cheap_findings(reports: Reports, device: str) -> list[Finding]:
    """Findings from the reports alone, without measurements."""
    findings = [*versions(reports), *_limits(reports, device)]
    return [*findings, *gpus(reports)] if device == "cuda" else findings


def _limits(reports: Reports, device: str) -> list[Finding]:
    findings = []
    for check, entry, least, good, unit, way_out in LIMITS:
        needed = 0 if entry == "shm_free_bytes" and device != "cuda" else least
        numbers = {host: report[entry] for host, report in reports.items()}
        bands: tuple[Band, ...] = (("failure", 0, needed), ("warning", needed, good))
        ok = f"{min(numbers.values(), default=0):,} {unit} or more"
        findings += _graded(check, numbers, bands, f"only {{:,}} {unit}", way_out, ok, worst=min)
    offsets = {host: report["clock_offset_s"] for host, report in reports.items() if "clock_offset_s" in report}
    if not offsets:
        return findings
    middle = median([0.0, *offsets.values()])  # with the asking host: of two clocks alone either may be wrong
    off = {host: abs(offset - middle) - reports[host]["clock_error_s"] for host, offset in offsets.items()}
    bands = ("failure", CLOCK_FAILURE_S, inf), ("warning", CLOCK_WARNING_S, CLOCK_FAILURE_S)
    ok = f"within {max(0.0, *off.values()):.1f} s"
    return findings + _graded("clocks", off, bands, "off by {:.1f} s", NTP, ok, worst=max)


def _graded(
    check: str,
    numbers: Mapping[str, float],
    bands: Iterable[Band],
    says: str,
    way_out: str,
    ok: str,
    worst: Callable[[Iterable[float]], float],
) -> list[Finding]:
    """A finding for each band with a host's number in it, which says the worst; without any, `ok`."""
    findings = []
    for verdict, low, high in bands:
        if inside := {host: number for host, number in numbers.items() if low <= number < high}:
            findings.append(Finding(check, verdict, says.format(worst(inside.values())), way_out, tuple(inside)))
    return findings or [Finding(check, "ok", ok)]


class AtStart:
    """Reports failures by `host.limits`, each once, while a run's workers start. Differences between workers and the
    health of GPUs are reported elsewhere."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._reports: dict[str, HostReport] = {}
        self._reported: set[tuple[str, str]] = set()

    def look(self, host: str, report: HostReport, now_unix_s: float) -> list[str]:
        """Lines for new failures, after the report of a worker on `host`."""
        offset_s = report["unix_s"] - now_unix_s
        self._reports[host] = {**report, "clock_offset_s": offset_s, "clock_error_s": ON_THE_WAY_S}
        failures = [finding for finding in _limits(self._reports, self._device) if finding.verdict == "failure"]
        new = [row for row in failures if not self._reported.issuperset({(row.check, name) for name in row.hosts})]
        self._reported.update((finding.check, name) for finding in new for name in finding.hosts)
        return [finding.line() for finding in new]


def will_fail(findings: Iterable[Finding]) -> bool:
    return any(finding.verdict == "failure" for finding in findings)


def versions(reports: Reports) -> list[Finding]:
    findings = []
    for name in sorted({name for report in reports.values() for name in report["versions"]}):
        hosts = _hosts_by({host: report["versions"].get(name, "none") for host, report in reports.items()})
        verdict: Verdict = "failure" if name in MUST_AGREE else "warning"
        findings += _difference("versions", verdict, f"{name} differs", VERSIONS, hosts, min(hosts.values(), key=len))
    if findings or not reports:
        return findings
    same = next(iter(reports.values()))["versions"]
    return [Finding("versions", "ok", ", ".join(f"{name} {version}" for name, version in same.items()))]


def gpus(reports: Reports) -> list[Finding]:
    findings, present = [], {host: report["gpus"] or [] for host, report in reports.items()}
    for host, report in reports.items():
        if report["gpus"] is None:
            sentence, way_out = (
                "nothing is known of them: no NVML there",
                "pip install nvidia-ml-py, and look at nvidia-smi",
            )
            findings.append(Finding("GPUs", "warning", sentence, way_out, (host,)))
        elif len(report["gpus"]) < report["ray_gpus"]:
            sentence = f"Ray counts {report['ray_gpus']}, and {len(report['gpus'])} are there"
            way_out = "Look at dmesg and nvidia-smi, or start Ray with --num-gpus"
            findings.append(Finding("GPUs", "failure", sentence, way_out, (host,)))
        for gpu in present[host]:
            for verdict, holds, says, way_out in GPU_RULES:
                if holds(gpu):
                    sentence = says.format(**gpu, used_gib=gpu["used_bytes"] / GIB)
                    label = f"GPU {gpu['index']} ({gpu['name']})"
                    findings.append(Finding("GPUs", verdict, f"{label} {sentence}", way_out, (host,)))
    pace = "The slowest sets the pace, and bits differ between models"
    for label, values in (
        ("model", {host: {str(gpu.get("name")) for gpu in gpus} for host, gpus in present.items()}),
        ("highest clock", {host: {str(gpu.get("max_clock_mhz")) for gpu in gpus} for host, gpus in present.items()}),
    ):
        hosts = _hosts_by({host: ", ".join(sorted(texts)) for host, texts in values.items()})
        findings += _difference("GPUs", "warning", f"their {label} differs", pace, hosts)
    return findings or [Finding("GPUs", "ok", f"{sum(map(len, present.values()))}, all idle and healthy")]


def in_use(reports: Reports) -> list[str]:
    """The hosts with a GPU in use: they get no load."""
    gpus_of = {host: report["gpus"] or () for host, report in reports.items()}
    return [host for host, gpus in gpus_of.items() if any(gpu["used_bytes"] > IDLE_GPU_BYTES for gpu in gpus)]


def errors(
    check: str, reasons: Mapping[str, str], way_out: str = "", ok: str = "", num_hosts: int = 0
) -> list[Finding]:
    """One failure for each reason of hosts; without any, `ok`, from `num_hosts` hosts."""
    failures = [Finding(check, "failure", why, way_out, tuple(hosts)) for why, hosts in _hosts_by(reasons).items()]
    return failures or ([Finding(check, "ok", f"{ok}, from {num_hosts} host(s)")] if ok else [])


def storage(answers: Mapping[str, Mapping[str, bool]], missing: Mapping[str, Sequence[str]], uri: str) -> list[Finding]:
    """`answers`: of each host that wrote, with `won`, whether it made the one file that only one may make,
    `excludes` and `locks`; `missing`: by host, the hosts whose file it does not see."""
    way_out = "Give a storage_path that is the same place on all hosts: a shared file system, or s3://bucket/prefix"
    findings = [
        Finding("storage", "failure", f"does not see what {few(absent, NUM_NAMED)} wrote to {uri}", way_out, (host,))
        for host, absent in missing.items()
        if absent
    ]
    num_won = sum(answer["won"] for answer in answers.values())
    if without := [host for host, answer in answers.items() if not answer["locks"]]:
        way_out = "Run one driver at a time where callbacks are used, or mount it with locks (Lustre: -o flock)"
        findings.append(
            Finding("storage", "warning", f"the file system of {uri} has no locks (flock)", way_out, (*without,))
        )
    if not all(answer["excludes"] for answer in answers.values()):
        way_out = "Time alone then keeps two coordinators apart; use a store that has If-None-Match"
        findings.append(Finding("storage", "warning", f"{uri} ignores conditional writes", way_out))
    elif num_won != 1 and answers and not any(missing.values()):
        sentence = f"{num_won} of {len(answers)} hosts made the one file"
        way_out = "Mount it without caching of names, or give an object store"
        findings.append(Finding("storage", "failure", sentence, way_out))
    return findings


def links(measured: Sequence[Link], medium: str) -> list[Finding]:
    """Names the links that are slower than SLOW_SHARE of the median."""
    if not measured:
        return []
    rates, delays = sorted(link[3] for link in measured), [link[2] for link in measured]
    usual, way_out = median(rates), "Look at its interface, cable and switch, and NCCL_SOCKET_IFNAME"
    slow = sorted((link for link in measured if link[3] < SLOW_SHARE * usual), key=lambda link: link[3])
    sentence = f"{medium}: {{:.2f}} GB/s, the usual is {usual / 1e9:.2f}"
    findings = [Finding("links", "warning", sentence.format(link[3] / 1e9), way_out, link[:2]) for link in slow]
    spread = f"{rates[0] / 1e9:.2f} to {rates[-1] / 1e9:.2f} GB/s each way, {1e6 * median(delays):,.0f} µs"
    return [*findings, Finding("links", "ok", f"{medium}: {len(measured)} measured, {spread}")]


def ports(reached: Mapping[str, Mapping[str, str]]) -> list[Finding]:
    """`reached`: by host and peer the reason why the peer cannot be connected to, empty if it can."""
    pairs = [(host, peer, reason) for host, reasons in reached.items() for peer, reason in reasons.items()]
    way_out = "Open all TCP ports between the hosts of a run, or give both an interface that reaches the other"
    return [
        Finding("ports", "failure", f"cannot connect to {peer}: {reason}", way_out, (host,))
        for host, peer, reason in pairs
        if reason
    ] or [Finding("ports", "ok", f"{len(pairs)} connections between {len(reached)} host(s)")]


def _difference(
    check: str, verdict: Verdict, label: str, way_out: str, hosts: Mapping[str, Sequence[str]], odd: Sequence[str] = ()
) -> list[Finding]:
    """A finding where hosts have more than one value. `odd`: the hosts to name."""
    values = "; ".join(f"{value} on {few(names, NUM_NAMED)}" for value, names in hosts.items())
    return [Finding(check, verdict, f"{label}: {values}", way_out, tuple(odd))] if len(hosts) > 1 else []


def _hosts_by(values: Mapping[str, str]) -> dict[str, list[str]]:
    hosts: dict[str, list[str]] = {}
    for host, value in values.items():
        hosts.setdefault(value, []).append(host)
    return hosts
