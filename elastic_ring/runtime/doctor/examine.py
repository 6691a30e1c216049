"""Ray's side of `elastic-ring doctor`: asks one actor on each node that a run would use. Judges nothing."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util import list_named_actors
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from elastic_ring.config import ScalingConfig, Timeouts
from elastic_ring.data.source import SourceConfig
from elastic_ring.errors import ElasticRingError
from elastic_ring.runtime.doctor import host as on_host
from elastic_ring.runtime.doctor import verdicts
from elastic_ring.runtime.doctor.host import Probe
from elastic_ring.runtime.doctor.verdicts import Finding, HostReport
from elastic_ring.runtime.driver.cluster import NAMESPACE, WORKER_ENVIRONMENT, live_nodes
from elastic_ring.runtime.groups.transport import StoreAddress
from elastic_ring.state.storage.folder import Storage

NUM_CLOCK_READINGS = 3
LINKS_S = 240.0
"""For all rounds of pairs of a large cluster: with the rest it takes five minutes."""
ALL_PAIRS_HOSTS = 16
"""The most hosts for which each pair is measured."""
Stores = dict[str, StoreAddress]
"""By host, as `Probe.listen` returns them."""


@dataclass(frozen=True)
class Examination:
    """A request. `storage_uri`: the folder of runs. `kernel`: (dtype, head_dim, query heads per K/V head)."""

    scaling: ScalingConfig
    storage_uri: str
    data: SourceConfig | None = None
    folders: tuple[str, ...] = ()
    kernel: tuple[str, int, int] = ("float32", 32, 2)
    timeouts: Timeouts = field(default_factory=Timeouts)


def examine(request: Examination) -> tuple[dict[str, HostReport], list[Finding]]:
    """({host: report}, findings). Leaves nothing in the cluster, and nothing on the storage."""
    examiner = _Examiner(request, _start(request))
    try:
        reports = examiner.read_reports()
        examiner.test_storage()
        examiner.read_data()
        examiner.load(reports, examiner.reach_ports())
    finally:
        for probe in examiner.probes.values():
            ray.kill(probe)
    return reports, examiner.findings


def as_json(reports: Mapping[str, HostReport], findings: list[Finding]) -> str:
    rows = [vars(finding) for finding in findings]
    return json.dumps({"ok": not verdicts.will_fail(findings), "findings": rows, "hosts": reports}, indent=1)


def _start(request: Examination) -> dict[str, ActorHandle]:
    nodes = [node for node in live_nodes(request.scaling) if node.num_slots and not node.draining]
    if not nodes:
        raise ValueError(
            f"no node of the cluster has room for a worker ({dict(request.scaling.resources_per_worker)}): "
            "start Ray on the hosts, or lower resources_per_worker"
        )
    addresses = [node.address for node in nodes]
    env = {"env_vars": WORKER_ENVIRONMENT if request.scaling.device == "cuda" else {}}
    probes = {}
    for node in nodes:
        # Nodes of one machine have one address.
        name = node.address if addresses.count(node.address) == 1 else f"{node.address}/{node.node[:6]}"
        here = NodeAffinitySchedulingStrategy(node.node, soft=False)
        actor = ray.remote(Probe).options(num_cpus=0, scheduling_strategy=here, runtime_env=env)
        probes[name] = actor.remote(node.address, request.scaling.device, request.timeouts.probe_s)
    return probes


def collect(refs: Mapping[Any, Any], limit_s: float) -> tuple[dict, dict]:
    """({host: answer}, {host: reason for none}); waits for `limit_s` in all."""
    ready, _ = ray.wait(list(refs.values()), num_returns=len(refs), timeout=limit_s) if refs else ([], [])
    done, answers, errors = set(ready), {}, {}
    for host, ref in refs.items():
        if ref not in done:
            errors[host] = f"no answer within {limit_s:.0f} s"
            continue
        try:
            answers[host] = ray.get(ref)
        except ray.exceptions.RayTaskError as error:
            cause = error.cause if isinstance(error.cause, BaseException) else error
            text = (cause.message if isinstance(cause, ElasticRingError) else str(cause)).strip()
            errors[host] = f"{type(cause).__name__}: {text.splitlines()[0] if text else ''}"
        except ray.exceptions.RayError as error:
            errors[host] = f"the process ended ({type(error).__name__})"
    return answers, errors


@dataclass
class _Examiner:
    """`probes`: by host, without silent ones."""

    request: Examination
    probes: dict[str, ActorHandle]
    findings: list[Finding] = field(default_factory=list)

    def ask(
        self, call: Callable[[str, Any], Any], limit_s: float, hosts: Iterable[str] | None = None
    ) -> tuple[dict, dict]:
        """`collect` of call(host, probe) on each host, all at once."""
        hosts = self.probes if hosts is None else hosts
        return collect({host: call(host, self.probes[host]) for host in hosts}, limit_s)

    def read_reports(self) -> dict[str, HostReport]:
        """Ask each host for its report and its clock: the cheap part."""
        device, timeouts = self.request.scaling.device, self.request.timeouts
        folder = ray._private.worker._global_node.get_session_dir_path()
        nodes = [node for node in ray.nodes() if node["Alive"]]

        def num_gpus(host: str) -> int:
            address, _, node_id = host.partition("/")
            own = (node for node in nodes if node["NodeManagerAddress"] == address)
            return sum(int(node["Resources"].get("GPU", 0)) for node in own if node["NodeID"].startswith(node_id))

        reports, silent = self.ask(
            lambda host, probe: probe.do.remote(on_host.report, device, folder, num_gpus(host)), timeouts.start_s
        )
        for host in silent:
            ray.kill(self.probes.pop(host))
        for host, report in [*reports.items()] * NUM_CLOCK_READINGS:
            begun = time.time()
            with suppress(ray.exceptions.RayError):  # the next question names a host that answers no more
                there = ray.get(self.probes[host].do.remote(time.time), timeout=timeouts.probe_s)
                error_s = (time.time() - begun) / 2
                if error_s < report.get("clock_error_s", float("inf")):  # the quickest answer is the most exact
                    report |= {"clock_offset_s": there - begun - error_s, "clock_error_s": error_s}
        way_out = "Look at its raylet's log, and whether the package is installed there"
        self.findings += verdicts.errors("hosts", silent, way_out, "a process starts and answers", len(reports))
        self.findings += verdicts.cheap_findings(reports, device)
        return reports

    def test_storage(self) -> None:
        request, limit_s = self.request, self.request.timeouts.probe_s
        uri, wait_s = f"{request.storage_uri.rstrip('/')}/.doctor-{secrets.token_hex(4)}", limit_s / 2
        answers, failed = self.ask(
            lambda host, probe: probe.do.remote(on_host.write_and_claim, uri, host, wait_s), limit_s
        )
        wrote = list(answers)
        missing, unread = self.ask(
            lambda host, probe: probe.do.remote(on_host.unseen, uri, wrote, wait_s), limit_s, wrote
        )
        _, left = self.ask(lambda host, probe: probe.do.remote(on_host.remove, uri, wait_s), limit_s, wrote)
        findings = verdicts.storage(answers, missing, request.storage_uri)
        if left:
            remains = f"{uri} is left behind: {next(iter(left.values()))}"
            findings.append(Finding("storage", "note", remains, "Remove it"))
        way_out = "Mount it there with the right to write, or give another storage_path"
        ok = "" if findings else f"{Storage(request.storage_uri).uri} written, read back, one of all made a name"
        self.findings += verdicts.errors("storage", {**failed, **unread}, way_out, ok, len(answers)) + findings

    def read_data(self) -> None:
        data, folders = self.request.data, list(self.request.folders)
        if data is None:
            return
        counts, failed = self.ask(
            lambda host, probe: probe.do.remote(on_host.read_data, data, folders), self.request.timeouts.start_s
        )
        if len(set(counts.values())) > 1:
            text = ", ".join(f"{count:,} on {host}" for host, count in counts.items())
            way_out = "Give all hosts the same files: prepare them once, where all see them"
            self.findings.append(
                Finding("data", "failure", f"hosts find different data, by sequences: {text}", way_out)
            )
            return
        ok = f"{max(counts.values(), default=0):,} sequences, the first and the last read"
        self.findings += verdicts.errors("data", failed, "Give a path or URI that every host sees", ok, len(counts))

    def reach_ports(self) -> Stores:
        """Open a store on each host; whether the other hosts reach it is a finding."""
        limit_s = self.request.timeouts.probe_s
        stores, unheard = self.ask(lambda host, probe: probe.listen.remote(), limit_s)
        self.findings += verdicts.errors("ports", unheard, "Look at its log in Ray's dashboard")
        reached, failed = self.ask(
            lambda host, probe: probe.reach.remote({name: stores[name] for name in stores if name != host}),
            limit_s * (2 + len(stores) / 32),
            stores,
        )
        self.findings += [*verdicts.ports(reached), *verdicts.errors("ports", failed)]
        return stores

    def load(self, reports: Mapping[str, HostReport], stores: Stores) -> None:
        """Test kernels and links, unless that would disturb a run or another user."""
        actors = [entry["name"] for entry in list_named_actors(all_namespaces=True) if entry["namespace"] == NAMESPACE]
        runs = sorted({name.split(":")[1] for name in actors if name.startswith("er:")})
        busy = verdicts.in_use(reports)
        if runs or busy:
            why = f"run {', '.join(runs)} is there" if runs else f"GPUs of {len(busy)} host(s) are in use"
            sentence = f"kernels and links were not tested: {why}"
            self.findings.append(Finding("load", "note", sentence, "Ask again when they are idle"))
            return
        device, kernel = self.request.scaling.device, self.request.kernel
        names, failed = self.ask(
            lambda host, probe: probe.do.remote(on_host.test_kernels, device, *kernel), self.request.timeouts.compile_s
        )
        way_out = "Pin another one with --kernel, or look at the driver and the packages"
        ok = f"{', '.join(sorted(set(names.values())))} passed"
        self.findings += verdicts.errors("kernels", failed, way_out, ok, len(names))
        self.measure_links(stores)

    def measure_links(self, stores: Stores) -> None:
        """Measure each pair, or rounds of pairs as time allows, and the ring of all up to ALL_PAIRS_HOSTS hosts."""
        names, limit_s = list(stores), self.request.timeouts.probe_s
        measured, failures, begun, number = [], dict[str, str](), time.monotonic(), 0
        plan = rounds(len(names), len(names))
        while number < len(plan):
            pairs = [(names[first], names[second]) for first, second in plan[number]]
            refs = {
                (*pair, rank): ref
                for pair in pairs
                for rank, ref in enumerate(self.exchange(f"{number}", stores, pair))
            }
            answers, failed = collect(refs, limit_s)
            failures |= {f"{first} and {second}": why for (first, second, _), why in failed.items()}
            for pair in pairs:
                if (*pair, 0) in answers and (*pair, 1) in answers:
                    delays, rates = zip(answers[*pair, 0], answers[*pair, 1], strict=True)
                    measured.append((*pair, max(delays), min(rates)))
            number += 1
            if number == 1 and len(names) > ALL_PAIRS_HOSTS:  # the first round shows the time of each
                plan = rounds(len(names), max(1, int(LINKS_S / max(time.monotonic() - begun, 1e-3))))
        medium = "NCCL" if self.request.scaling.device == "cuda" else "gloo"
        self.findings += verdicts.links(measured, f"{medium} between two hosts")
        way_out = "Look at the interfaces (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME) and the firewall"
        self.findings += verdicts.errors("links", failures, way_out)
        if failures or not 2 < len(names) <= ALL_PAIRS_HOSTS:
            return
        answers, failed = collect(dict(zip(names, self.exchange("ring", stores, names), strict=True)), limit_s)
        ring = [] if failed else [(names[rank - 1], host, *answers[host]) for rank, host in enumerate(names)]
        self.findings += verdicts.links(ring, "a ring of all hosts")
        way_out = "Each pair works and the ring does not: look for a switch that is full"
        self.findings += verdicts.errors("links", failed, way_out)

    def exchange(self, tag: str, stores: Stores, hosts: Sequence[str]) -> list[Any]:
        """References by rank: each host sends to the next one, the last to the first."""
        store, size = stores[hosts[0]], len(hosts)
        return [self.probes[host].exchange.remote(tag, store, rank, size) for rank, host in enumerate(hosts)]


def rounds(num_hosts: int, most: int) -> list[list[tuple[int, int]]]:
    """Rounds of disjoint pairs of the hosts 0 to num_hosts - 1, in which no pair comes twice.

    All pairs of up to ALL_PAIRS_HOSTS hosts; of more hosts at most `most` rounds, spread over all, so that each is
    measured with about as many partners, near and far. The circle method of tournaments: one host stays, the others
    move on.
    """
    size = num_hosts + num_hosts % 2  # with an odd number one host rests in each round
    total = max(0, size - 1)
    every = num_hosts <= ALL_PAIRS_HOSTS or most >= total
    plan = []
    for number in range(total) if every else sorted({index * total // most for index in range(most)}):
        circle = [size - 1, *((number + place) % total for place in range(total))]
        pairs = [sorted((circle[place], circle[total - place])) for place in range(size // 2)]
        plan.append([(low, high) for low, high in pairs if high < num_hosts])
    return plan
