"""Ray's side of `elastic-ring doctor`: one actor on each node that a run would use, asked in turn. Judges nothing."""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util import list_named_actors
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from elastic_ring.config import ScalingConfig, Timeouts
from elastic_ring.data.source import SourceConfig
from elastic_ring.errors import ElasticRingError
from elastic_ring.runtime.doctor import host as on_host
from elastic_ring.runtime.doctor import verdicts
from elastic_ring.runtime.doctor.probe import Place, Probe
from elastic_ring.runtime.doctor.rounds import ALL_PAIRS_HOSTS, rounds
from elastic_ring.runtime.doctor.verdicts import Finding
from elastic_ring.runtime.driver.cluster import NAMESPACE, WORKER_ENVIRONMENT, live_nodes
from elastic_ring.state.storage.folder import Storage

log = logging.getLogger(__name__)

NUM_ASKED = 3
LINKS_S = 240.0
"""For all rounds of pairs of a large cluster: with the rest it takes five minutes."""


@dataclass(frozen=True)
class Examination:
    """What to look at. `storage_uri`: the folder of runs. `kernel`: (dtype, head_dim, query heads per K/V head)."""

    scaling: ScalingConfig
    storage_uri: str
    data: SourceConfig | None = None
    folders: tuple[str, ...] = ()
    kernel: tuple[str, int, int] = ("float32", 32, 2)
    timeouts: Timeouts = field(default_factory=Timeouts)


@dataclass
class _Hosts:
    """The probes by host, and what each said."""

    probes: dict[str, Any]
    timeouts: Timeouts

    def ask(self, call: Callable[[str, Any], Any], limit_s: float, hosts: list[str] | None = None) -> tuple[dict, dict]:
        """({host: answer}, {host: why there is none}) of one call on each host, all at once."""
        asked = {host: call(host, probe) for host, probe in self.probes.items() if hosts is None or host in hosts}
        return collected(asked, limit_s)


def collected(asked: Mapping[str, Any], limit_s: float) -> tuple[dict[str, Any], dict[str, str]]:
    """({host: answer}, {host: why there is none}); waits for `limit_s` in all."""
    ready, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=limit_s) if asked else ([], [])
    done, answers, errors = set(ready), {}, {}
    for host, ref in asked.items():
        if ref not in done:
            errors[host] = f"no answer within {limit_s:.0f} s"
            continue
        try:
            answers[host] = ray.get(ref)
        except ray.exceptions.RayTaskError as error:
            cause = error.cause if isinstance(error.cause, BaseException) else error
            text = cause.message if isinstance(cause, ElasticRingError) else str(cause)
            errors[host] = f"{type(cause).__name__}: {text.strip().splitlines()[0] if text.strip() else ''}"
        except ray.exceptions.RayError as error:
            errors[host] = f"the process ended ({type(error).__name__})"
    return answers, errors


def examine(asked: Examination) -> tuple[dict[str, Any], list[Finding]]:
    """({host: report}, findings). Leaves nothing in the cluster, and nothing on the storage."""
    probes = _started(asked)
    hosts = _Hosts(probes, asked.timeouts)
    try:
        reports, findings = look(hosts, asked)
        findings += _storage(hosts, asked) + _data(hosts, asked)
        places, unheard = hosts.ask(lambda host, probe: probe.listen.remote(), asked.timeouts.probe_s)
        findings += (
            verdicts.errors("ports", unheard, "Look at its log in Ray's dashboard", len(places), "every host listens")
            if unheard
            else []
        )
        findings += _ports(hosts, asked, places)
        findings += _loads(hosts, asked, reports, places)
    finally:
        for probe in probes.values():
            ray.kill(probe)
    return reports, findings


def look(hosts: _Hosts, asked: Examination) -> tuple[dict[str, Any], list[Finding]]:
    """The cheap part: what each host says of itself, and its clock."""
    device, promised = asked.scaling.device, {host: _ray_gpus(host) for host in hosts.probes}
    folder = ray._private.worker._global_node.get_session_dir_path()
    asking = {
        host: probe.do.remote(on_host.report, device, folder, promised[host]) for host, probe in hosts.probes.items()
    }
    reports, silent = collected(asking, asked.timeouts.start_s)
    for host in silent:
        ray.kill(hosts.probes.pop(host))
    for _ in range(NUM_ASKED):
        for host in reports:
            _read_clock(hosts.probes[host], reports[host], asked.timeouts.probe_s)
    findings = verdicts.errors(
        "hosts",
        silent,
        "Look at its raylet's log, and whether the package is installed there",
        len(reports),
        "a process starts and answers",
    )
    return reports, [*findings, *verdicts.cheap_findings(reports, device)]


def _started(asked: Examination) -> dict[str, Any]:
    nodes = [node for node in live_nodes(asked.scaling) if node.num_slots and not node.draining]
    if not nodes:
        raise ValueError(
            f"no node of the cluster has room for a worker ({dict(asked.scaling.resources_per_worker)}): "
            "start Ray on the hosts, or lower resources_per_worker"
        )
    addresses = [node.address for node in nodes]
    env = WORKER_ENVIRONMENT if asked.scaling.device == "cuda" else {}
    made = {}
    for node in nodes:
        # Nodes of one machine have one address.
        name = node.address if addresses.count(node.address) == 1 else f"{node.address}/{node.node[:6]}"
        made[name] = (
            ray.remote(Probe)
            .options(
                num_cpus=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node.node, soft=False),
                runtime_env={"env_vars": env},
            )
            .remote(node.address, asked.scaling.device, asked.timeouts.probe_s)
        )
    return made


def _ray_gpus(host: str) -> int:
    address, _, node_id = host.partition("/")
    return sum(
        int(node["Resources"].get("GPU", 0))
        for node in ray.nodes()
        if node["Alive"] and node["NodeManagerAddress"] == address and node["NodeID"].startswith(node_id)
    )


def _read_clock(probe: Any, report: dict[str, Any], limit_s: float) -> None:
    """Keep the offset of the quickest answer, which is the most exact."""
    begun = time.time()
    with suppress(ray.exceptions.RayError):  # who answers no more is named by the next question
        there = ray.get(probe.clock.remote(), timeout=limit_s)
        error_s = (time.time() - begun) / 2
        if error_s < report.get("clock_error_s", float("inf")):
            report |= {"clock_offset_s": there - begun - error_s, "clock_error_s": error_s}


def _storage(hosts: _Hosts, asked: Examination) -> list[Finding]:
    uri, limit_s = f"{asked.storage_uri.rstrip('/')}/.doctor-{secrets.token_hex(4)}", asked.timeouts.probe_s
    way_out = "Mount it there with the right to write, or give another storage_path"
    answers, failed = hosts.ask(
        lambda host, probe: probe.do.remote(on_host.write_and_claim, uri, host, limit_s / 2), limit_s
    )
    wrote = list(answers)
    missing, unread = hosts.ask(
        lambda host, probe: probe.do.remote(on_host.unseen, uri, wrote, limit_s / 2), limit_s, wrote
    )
    _, left = hosts.ask(lambda host, probe: probe.do.remote(on_host.remove, uri, limit_s / 2), limit_s, wrote)
    told = verdicts.storage(answers, missing, asked.storage_uri)
    if left:
        told.append(Finding("storage", "note", f"{uri} is left behind: {next(iter(left.values()))}", "Remove it"))
    if told and not (failed or unread):
        return told
    shown = f"{Storage(asked.storage_uri).uri} written, read back, one of all made a name"
    return [*verdicts.errors("storage", {**failed, **unread}, way_out, len(answers), shown), *told]


def _data(hosts: _Hosts, asked: Examination) -> list[Finding]:
    if asked.data is None:
        return []
    counts, failed = hosts.ask(
        lambda host, probe: probe.do.remote(on_host.read_data, asked.data, list(asked.folders)), asked.timeouts.start_s
    )
    if len(set(counts.values())) > 1:
        text = ", ".join(f"{count:,} on {host}" for host, count in counts.items())
        return [
            Finding(
                "data",
                "failure",
                f"hosts find different data, by sequences: {text}",
                "Give all hosts the same files: prepare them once, where all see them",
            )
        ]
    shown = f"{max(counts.values(), default=0):,} sequences, the first and the last read"
    return verdicts.errors("data", failed, "Give a path or URI that every host sees", len(counts), shown)


def _ports(hosts: _Hosts, asked: Examination, places: Mapping[str, Any]) -> list[Finding]:
    others = {host: {other: place[0] for other, place in places.items() if other != host} for host in places}
    asking = {host: hosts.probes[host].reach.remote(others[host]) for host in places}
    reached, failed = collected(asking, asked.timeouts.probe_s * (2 + len(places) / 32))
    return [*verdicts.ports(reached), *(verdicts.errors("ports", failed, "", 0, "") if failed else [])]


def _loads(
    hosts: _Hosts, asked: Examination, reports: Mapping[str, Any], places: Mapping[str, tuple[Place, Place, str]]
) -> list[Finding]:
    """Kernels and links, unless somebody would be disturbed."""
    runs = sorted(
        {
            entry["name"].split(":")[1]
            for entry in list_named_actors(all_namespaces=True)
            if entry["namespace"] == NAMESPACE and entry["name"].startswith("er:")
        }
    )
    busy = verdicts.in_use(reports)
    if runs or busy:
        why = f"run {', '.join(runs)} is there" if runs else f"GPUs of {len(busy)} host(s) are in use"
        return [Finding("load", "note", f"kernels and links were not tested: {why}", "Ask again when they are idle")]
    device = asked.scaling.device
    names, failed = hosts.ask(
        lambda host, probe: probe.do.remote(on_host.test_kernels, device, *asked.kernel), asked.timeouts.compile_s
    )
    found = verdicts.errors(
        "kernels",
        failed,
        "Pin another one with --kernel, or look at the driver and the packages",
        len(names),
        f"{', '.join(sorted(set(names.values())))} passed",
    )
    return found + _links(hosts, asked, dict(places))


def _links(hosts: _Hosts, asked: Examination, places: Mapping[str, tuple[Place, Place, str]]) -> list[Finding]:
    """Each pair, or rounds of pairs as time allows, and the ring of all up to ALL_PAIRS_HOSTS hosts."""
    names, measured, failures = list(places), [], dict[str, str]()
    begun, most = time.monotonic(), len(names)
    plan = rounds(len(names), most)
    number = 0
    while number < len(plan):
        answers, failed = collected(_round(hosts, names, places, plan[number], number), asked.timeouts.probe_s)
        failures |= failed
        for one, other in plan[number]:
            pair = [answers.get(f"{names[one]} and {names[other]}/{rank}") for rank in (0, 1)]
            if None not in pair:
                measured.append((names[one], names[other], max(p[0] for p in pair), min(p[1] for p in pair)))  # type: ignore[index]
        number += 1
        if number == 1 and len(names) > ALL_PAIRS_HOSTS:  # now it is known what a round takes
            most = max(1, int(LINKS_S / max(time.monotonic() - begun, 1e-3)))
            plan = rounds(len(names), most)
    way_out = "Look at the interfaces (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME) and the firewall"
    told = verdicts.links(measured, f"{'NCCL' if asked.scaling.device == 'cuda' else 'gloo'} between two hosts")
    if failures:
        told += verdicts.errors("links", {key.rpartition("/")[0]: why for key, why in failures.items()}, way_out, 0, "")
    return told + (_ring(hosts, asked, names, places) if 2 < len(names) <= ALL_PAIRS_HOSTS and not failures else [])


def _round(
    hosts: _Hosts, names: list[str], places: Mapping[str, Any], pairs: list[tuple[int, int]], number: int
) -> dict[str, Any]:
    asking = {}
    for one, other in pairs:
        first, (_, at, secret) = names[one], places[names[one]]
        for rank, host in enumerate((first, names[other])):
            call = hosts.probes[host].exchange.remote(f"{number}", at, secret, rank, 2)
            asking[f"{first} and {names[other]}/{rank}"] = call
    return asking


def _ring(hosts: _Hosts, asked: Examination, names: list[str], places: Mapping[str, Any]) -> list[Finding]:
    _, at, secret = places[names[0]]
    asking = {
        host: hosts.probes[host].exchange.remote("ring", at, secret, rank, len(names))
        for rank, host in enumerate(names)
    }
    answers, failed = collected(asking, asked.timeouts.probe_s)
    if failed:
        return verdicts.errors(
            "links", failed, "Each pair works and the ring does not: look for a switch that is full", 0, ""
        )
    told = [(names[rank - 1], host, *answers[host]) for rank, host in enumerate(names)]
    return verdicts.links(told, "a ring of all hosts")


def as_json(reports: Mapping[str, Any], findings: list[Finding]) -> str:
    told = [vars(finding) for finding in findings]
    return json.dumps({"ok": not verdicts.will_fail(findings), "findings": told, "hosts": reports}, indent=1)
