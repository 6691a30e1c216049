"""What follows from the hosts' reports: findings with a verdict and a way out. Pure: no Ray, no torch, no clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from statistics import median
from typing import Any, Literal

from elastic_ring.wording import few

Verdict = Literal["ok", "note", "warning", "failure"]
Report = Mapping[str, Any]
"""What one host says: `host.report` has the keys. A check that could not be made there is a text under its name in
`errors`."""
Link = tuple[str, str, float, float]
"""Two hosts, seconds for a message of one byte, bytes a second each way."""

GIB = 1 << 30
MUST_AGREE = ("python", "torch", "ray", "elastic_ring", "cuda", "nccl")
LEAST_FILES, GOOD_FILES = 4096, 65_536
LEAST_SHM_BYTES, GOOD_SHM_BYTES = GIB // 8, GIB
LEAST_DISK_BYTES, GOOD_DISK_BYTES = GIB, 20 * GIB
RAISE_FILES = "Raise it before `ray start`: ulimit -n 65536, or LimitNOFILE of the service"
RAISE_SHM = "Ray's object store and NCCL live there: docker run --shm-size, or an emptyDir of medium Memory"
RAISE_DISK = "Free some, or give ray start --temp-dir on a larger disk"
IDLE_GPU_BYTES = GIB
CLOCK_WARNING_S, CLOCK_FAILURE_S = 2.0, 300.0
ON_THE_WAY_S = 30.0
"""The most that a starting worker's report may wait for its reader."""
SLOW_SHARE = 0.5
NUM_NAMED = 4


@dataclass(frozen=True)
class Finding:
    """One line. `hosts`: those that it is about, if not all."""

    check: str
    verdict: Verdict
    says: str
    way_out: str = ""
    hosts: tuple[str, ...] = ()

    def line(self) -> str:
        where = f"{few(self.hosts, NUM_NAMED)}: " if self.hosts else ""
        return f"{self.verdict:<9}{self.check:<11}{where}{self.says}{f'. {self.way_out}' if self.way_out else ''}"


def cheap_findings(reports: Mapping[str, Report], device: str) -> list[Finding]:
    """What the reports alone show; nothing was measured for it."""
    found = [*versions(reports), *_of_hosts(reports, device)]
    return [*found, *gpus(reports)] if device == "cuda" else found


def _of_hosts(reports: Mapping[str, Report], device: str) -> list[Finding]:
    least_shm = LEAST_SHM_BYTES if device == "cuda" else 0
    small = [
        found
        for check, key, least, good, what, way_out in (
            ("ulimits", "open_files", LEAST_FILES, GOOD_FILES, "open files", RAISE_FILES),
            ("/dev/shm", "shm_free_bytes", least_shm, GOOD_SHM_BYTES, "bytes free", RAISE_SHM),
            ("disk", "disk_free_bytes", LEAST_DISK_BYTES, GOOD_DISK_BYTES, "bytes free for Ray's files", RAISE_DISK),
        )
        for found in _least(reports, check, itemgetter(key), least, good, what, way_out)
    ]
    return [*small, *clocks(reports)]


class AtStart:
    """What `host.limits` shows while a run's workers start: what will fail is told, once. What differs between workers
    and the health of GPUs are told by others."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._reports: dict[str, Report] = {}
        self._told: set[tuple[str, str]] = set()

    def look(self, host: str, report: Report, now_unix_s: float) -> list[str]:
        """Lines for what is new, after a worker on `host` has said what its host is like."""
        clock = {"clock_offset_s": report["unix_s"] - now_unix_s, "clock_error_s": ON_THE_WAY_S}
        self._reports[host] = {**report, **clock}
        found = [finding for finding in _of_hosts(self._reports, self._device) if finding.verdict == "failure"]
        new = [finding for finding in found if not self._told.issuperset({(finding.check, h) for h in finding.hosts})]
        self._told.update((finding.check, host) for finding in new for host in finding.hosts)
        return [finding.line() for finding in new]


def will_fail(findings: Iterable[Finding]) -> bool:
    return any(finding.verdict == "failure" for finding in findings)


def versions(reports: Mapping[str, Report]) -> list[Finding]:
    names = sorted({name for report in reports.values() for name in report["versions"]})
    found = []
    for name in names:
        by_version = _grouped({host: report["versions"].get(name, "none") for host, report in reports.items()})
        if len(by_version) > 1:
            text = "; ".join(f"{version} on {few(hosts, NUM_NAMED)}" for version, hosts in by_version.items())
            rarest = min(by_version.values(), key=len)
            found.append(
                Finding(
                    "versions",
                    "failure" if name in MUST_AGREE else "warning",
                    f"{name} differs: {text}",
                    "Install the same on all hosts: workers exchange Python objects, and bits follow from versions",
                    tuple(rarest),
                )
            )
    if found or not reports:
        return found
    same = next(iter(reports.values()))["versions"]
    return [Finding("versions", "ok", ", ".join(f"{name} {version}" for name, version in same.items()))]


def clocks(reports: Mapping[str, Report]) -> list[Finding]:
    known = {host: report["clock_offset_s"] for host, report in reports.items() if "clock_offset_s" in report}
    if not known:
        return []
    middle = median([0.0, *known.values()])  # of who asks, too: of two alone nobody can tell which is wrong
    off = {host: abs(offset - middle) - reports[host]["clock_error_s"] for host, offset in known.items()}
    found = []
    grades: tuple[tuple[Verdict, float, float], ...] = (
        ("failure", CLOCK_FAILURE_S, float("inf")),
        ("warning", CLOCK_WARNING_S, CLOCK_FAILURE_S),
    )
    for verdict, least, most in grades:
        hosts = [host for host, seconds in off.items() if least <= seconds < most]
        if hosts:
            worst = max(off[host] for host in hosts)
            found.append(
                Finding(
                    "clocks",
                    verdict,
                    f"off by {worst:.1f} s",
                    "Run chrony or ntpd: object stores refuse requests of a "
                    "clock that is wrong, and records are put in order by it",
                    tuple(hosts),
                )
            )
    return found or [Finding("clocks", "ok", f"within {max(0.0, *off.values()):.1f} s")]


def gpus(reports: Mapping[str, Report]) -> list[Finding]:
    found = []
    for host, report in reports.items():
        here, promised = report["gpus"], report["ray_gpus"]
        if here is None:
            found.append(
                Finding(
                    "GPUs",
                    "warning",
                    "nothing is known of them: no NVML there",
                    "pip install nvidia-ml-py, and look at nvidia-smi",
                    (host,),
                )
            )
            continue
        if len(here) < promised:
            found.append(
                Finding(
                    "GPUs",
                    "failure",
                    f"Ray counts {promised}, and {len(here)} are there",
                    "Look at dmesg and nvidia-smi, or start Ray with --num-gpus",
                    (host,),
                )
            )
        found += [finding for gpu in here for finding in _of_gpu(host, gpu)]
    for key, what in (("name", "model"), ("max_clock_mhz", "highest clock")):
        by_value = _grouped(
            {
                host: ", ".join(sorted({str(gpu.get(key)) for gpu in report["gpus"] or ()}))
                for host, report in reports.items()
            }
        )
        if len(by_value) > 1:
            text = "; ".join(f"{value} on {few(hosts, NUM_NAMED)}" for value, hosts in by_value.items())
            found.append(
                Finding(
                    "GPUs",
                    "warning",
                    f"their {what} differs: {text}",
                    "The slowest sets the pace, and bits differ between models",
                )
            )
    num = sum(len(report["gpus"] or ()) for report in reports.values())
    return found or [Finding("GPUs", "ok", f"{num}, all idle and healthy")]


def _of_gpu(host: str, gpu: Mapping[str, Any]) -> list[Finding]:
    found = []
    where = f"GPU {gpu['index']} ({gpu['name']})"
    if gpu.get("needs_reset"):
        found.append(Finding("GPUs", "failure", f"{where} has memory rows to remap", "Reset it", (host,)))
    if gpu.get("ecc_errors"):
        found.append(
            Finding(
                "GPUs",
                "warning",
                f"{where} has {gpu['ecc_errors']:.0f} memory errors that were not corrected",
                "Reset it, and replace it if they return",
                (host,),
            )
        )
    if gpu.get("slowed"):
        found.append(
            Finding(
                "GPUs",
                "warning",
                f"{where} is slowed down by heat or its hardware",
                "Look at its cooling and power",
                (host,),
            )
        )
    if gpu["used_bytes"] > IDLE_GPU_BYTES:
        found.append(Finding("GPUs", "note", f"{where} is in use ({gpu['used_bytes'] / GIB:.1f} GiB)", "", (host,)))
    return found


def in_use(reports: Mapping[str, Report]) -> list[str]:
    """The hosts with a GPU that somebody uses: they get no load."""
    return [
        host
        for host, report in reports.items()
        if any(gpu["used_bytes"] > IDLE_GPU_BYTES for gpu in report["gpus"] or ())
    ]


def errors(check: str, told: Mapping[str, str], way_out: str, num_hosts: int, good: str) -> list[Finding]:
    """One failure for each reason that hosts gave; `good` where none did."""
    by_reason: dict[str, list[str]] = {}
    for host, reason in told.items():
        by_reason.setdefault(reason, []).append(host)
    found = [Finding(check, "failure", reason, way_out, tuple(hosts)) for reason, hosts in by_reason.items()]
    return found or [Finding(check, "ok", f"{good}, from {num_hosts} host(s)")]


def storage(answers: Mapping[str, Report], missing: Mapping[str, Sequence[str]], uri: str) -> list[Finding]:
    """`answers`: of each host that wrote, with `won`, whether it made the file that only one may make, and `excludes`;
    `missing`: the hosts whose file another does not see."""
    found = []
    for host, others in missing.items():
        if others:
            found.append(
                Finding(
                    "storage",
                    "failure",
                    f"does not see what {few(others, NUM_NAMED)} wrote to {uri}",
                    "Give a storage_path that is the same place on all hosts: a shared file system, or s3://bucket/prefix",
                    (host,),
                )
            )
    winners = [host for host, answer in answers.items() if answer["won"]]
    weak = [host for host, answer in answers.items() if not answer["excludes"]]
    if weak:
        way_out = "Time alone then keeps two coordinators apart; use a store that has If-None-Match"
        found.append(Finding("storage", "warning", f"{uri} ignores conditional writes", way_out))
    elif len(winners) != 1 and answers and not found:
        found.append(
            Finding(
                "storage",
                "failure",
                f"{len(winners)} of {len(answers)} hosts made the one file",
                "Mount it without caching of names, or give an object store",
            )
        )
    return found


def links(measured: Sequence[Link], what: str) -> list[Finding]:
    """Links that are slower than half of the usual one are named."""
    if not measured:
        return []
    rates, delays = [link[3] for link in measured], [link[2] for link in measured]
    usual = median(rates)
    slow = sorted((link for link in measured if link[3] < SLOW_SHARE * usual), key=lambda link: link[3])
    told = [
        Finding(
            "links",
            "warning",
            f"{what}: {rate / 1e9:.2f} GB/s, the usual is {usual / 1e9:.2f}",
            "Look at its interface, cable and switch, and NCCL_SOCKET_IFNAME",
            (one, other),
        )
        for one, other, _, rate in slow
    ]
    return [
        *told,
        Finding(
            "links",
            "ok",
            f"{what}: {len(measured)} measured, {min(rates) / 1e9:.2f} to "
            f"{max(rates) / 1e9:.2f} GB/s each way, {1e6 * median(delays):,.0f} µs",
        ),
    ]


def ports(reached: Mapping[str, Mapping[str, float | str]]) -> list[Finding]:
    """`reached`: by host the seconds to each other one, or why it was not reached."""
    told = {
        (host, other): answer
        for host, answers in reached.items()
        for other, answer in answers.items()
        if isinstance(answer, str)
    }
    found = [
        Finding(
            "ports",
            "failure",
            f"cannot connect to {other}: {reason}",
            "Open all TCP ports between the hosts of a run, or give both an interface that reaches the other",
            (host,),
        )
        for (host, other), reason in told.items()
    ]
    num = sum(len(answers) for answers in reached.values())
    return found or [Finding("ports", "ok", f"{num} connections between {len(reached)} host(s)")]


def _least(
    reports: Mapping[str, Report],
    check: str,
    of: Callable[[Report], float],
    least: float,
    good: float,
    what: str,
    way_out: str,
) -> list[Finding]:
    """A failure below `least`, a warning below `good`."""
    found = []
    for verdict, low, high in (("failure", float("-inf"), least), ("warning", least, good)):
        hosts = [host for host, report in reports.items() if low <= of(report) < high]
        if hosts:
            fewest = min(int(of(reports[host])) for host in hosts)
            found.append(Finding(check, verdict, f"only {fewest:,} {what}", way_out, tuple(hosts)))  # type: ignore[arg-type]
    lowest = min((int(of(report)) for report in reports.values()), default=0)
    return found or [Finding(check, "ok", f"{lowest:,} {what} or more")]


def _grouped(values: Mapping[str, str]) -> dict[str, list[str]]:
    """The hosts by what each has."""
    found: dict[str, list[str]] = {}
    for host, value in values.items():
        found.setdefault(value, []).append(host)
    return found
