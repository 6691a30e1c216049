"""What the doctor says of reports, which pairs it measures together, and how two hosts measure a link."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest

from elastic_ring.runtime.doctor import host, verdicts
from elastic_ring.runtime.doctor.examine import rounds
from elastic_ring.runtime.doctor.host import Probe

GIB = verdicts.GIB


def report(**changes: Any) -> dict[str, Any]:
    return {
        "versions": {"python": "3.11.7", "torch": "2.13.0", "driver": "580.1"},
        "open_files": 1 << 20,
        "shm_free_bytes": 64 * GIB,
        "disk_free_bytes": 100 * GIB,
        "ray_gpus": 1,
        "clock_offset_s": 0.1,
        "clock_error_s": 0.1,
        "gpus": [{"index": 0, "name": "H100", "used_bytes": 0, "max_clock_mhz": 1980}],
        **changes,
    }


def test_hosts_that_agree_and_have_enough_are_told_in_a_line_each():
    found = verdicts.cheap_findings({"a": report(), "b": report()}, "cuda")
    assert [finding.verdict for finding in found] == ["ok"] * 6
    assert not verdicts.will_fail(found)
    assert "python 3.11.7" in found[0].line()


@pytest.mark.parametrize(
    ("check", "verdict", "odd"),
    [
        ("versions", "failure", {"versions": {"python": "3.12.1", "torch": "2.13.0", "driver": "580.1"}}),
        ("versions", "warning", {"versions": {"python": "3.11.7", "torch": "2.13.0", "driver": "570.9"}}),
        ("ulimits", "failure", {"open_files": 1024}),
        ("ulimits", "warning", {"open_files": 8192}),
        ("/dev/shm", "failure", {"shm_free_bytes": 64 << 20}),
        ("disk", "warning", {"disk_free_bytes": 5 * GIB}),
        ("clocks", "failure", {"clock_offset_s": -1000.0}),
        ("clocks", "warning", {"clock_offset_s": 30.0}),
        ("GPUs", "failure", {"ray_gpus": 2}),
        ("GPUs", "warning", {"gpus": None}),
        ("GPUs", "warning", {"gpus": [{**report()["gpus"][0], "slowed": 1.0}]}),
        ("GPUs", "warning", {"gpus": [{**report()["gpus"][0], "ecc_errors": 2.0}]}),
        ("GPUs", "failure", {"gpus": [{**report()["gpus"][0], "needs_reset": 1.0}]}),
        ("GPUs", "note", {"gpus": [{**report()["gpus"][0], "used_bytes": 40 * GIB}]}),
    ],
)
def test_the_host_that_differs_is_named_with_a_way_out(check, verdict, odd):
    reports = {"a": report(), "odd": report(**odd), "c": report()}
    found = [finding for finding in verdicts.cheap_findings(reports, "cuda") if finding.hosts]
    assert next((finding.check, finding.verdict, finding.hosts) for finding in found) == (check, verdict, ("odd",))
    assert found[0].way_out or verdict == "note"
    assert verdicts.will_fail(found) == (verdict == "failure")
    assert verdicts.in_use(reports) == (["odd"] if verdict == "note" else [])


def test_at_a_start_what_will_fail_is_told_once_for_each_host():
    at_start, now = verdicts.AtStart("cuda"), time.time()
    good = {"open_files": 1 << 20, "shm_free_bytes": 64 * GIB, "disk_free_bytes": 100 * GIB, "unix_s": now}
    assert set(host.limits("")) == set(good)
    assert at_start.look("a", good, now + 1) == []
    few = {**good, "open_files": 1024}
    (line,) = at_start.look("b", few, now + 1)
    assert line.startswith("failure  ulimits    b: only 1,024 open files")
    assert at_start.look("b", few, now + 1) == []
    (line,) = at_start.look("c", {**good, "unix_s": now - 1000}, now)
    assert "clocks" in line


def test_a_storage_that_is_not_one_place_and_a_slow_link_are_named():
    answers = {name: {"won": True, "excludes": True, "locks": True} for name in "ab"}
    apart = verdicts.storage(answers, {"a": ["b"], "b": ["a"]}, "/data")
    assert [(finding.verdict, finding.hosts) for finding in apart] == [("failure", ("a",)), ("failure", ("b",))]
    assert "the same place" in apart[0].line()
    assert verdicts.storage(answers, {"a": [], "b": []}, "/data")[0].says == "2 of 2 hosts made the one file"
    answers["b"] = {"won": False, "excludes": True, "locks": True}
    assert verdicts.storage(answers, {"a": [], "b": []}, "/data") == []
    answers["b"] = {"won": False, "excludes": False, "locks": True}
    assert verdicts.storage(answers, {}, "/data")[0].verdict == "warning"
    answers["b"] = {"won": False, "excludes": True, "locks": False}
    told = verdicts.storage(answers, {}, "/data")
    assert [(finding.verdict, finding.hosts, finding.says) for finding in told] == [
        ("warning", ("b",), "the file system of /data has no locks (flock)")
    ]

    told = verdicts.links([("a", "b", 1e-4, 1e9), ("a", "c", 1e-4, 1e9), ("b", "c", 1e-4, 0.4e9)], "gloo")
    assert [(finding.verdict, finding.hosts) for finding in told] == [("warning", ("b", "c")), ("ok", ())]
    told = verdicts.ports({"a": {"b": ""}, "b": {"a": "10.0.0.1: timed out"}})
    assert [(finding.verdict, finding.hosts) for finding in told] == [("failure", ("b",))]


def test_a_round_gives_each_host_one_partner_and_no_pair_comes_twice():
    for num_hosts in (0, 1, 2, 3, 7, 16):
        plan = rounds(num_hosts, 3)
        pairs = [pair for pairs in plan for pair in pairs]
        assert sorted(pairs) == list(combinations(range(num_hosts), 2)), num_hosts
    for num_hosts, most in ((1000, 40), (100, 2000), (999, 60), (17, 4)):
        plan = rounds(num_hosts, most)
        pairs = [pair for pairs in plan for pair in pairs]
        assert len(set(pairs)) == len(pairs)
        assert len(plan) <= max(most, 1)
        for pairs in plan:
            hosts = [name for pair in pairs for name in pair]
            assert len(set(hosts)) == len(hosts) == num_hosts - num_hosts % 2
    assert len(rounds(100, 2000)) == 99, "all pairs, where time allows"


def test_two_hosts_reach_each_other_and_measure_their_link():
    probes = {name: Probe("127.0.0.1", "cpu", 20.0) for name in "ab"}
    stores = {name: probe.listen() for name, probe in probes.items()}
    reached = probes["a"].reach({"b": stores["b"], "none": replace(stores["b"], port=1)})
    assert reached == {"b": "", "none": "127.0.0.1: Connection refused"}
    with ThreadPoolExecutor() as pool:
        measured = list(pool.map(lambda rank: probes["ab"[rank]].exchange("0", stores["a"], rank, 2), (0, 1)))
    for seconds, rate in measured:
        assert 0 < seconds < 5
        assert rate > 1e6


def test_a_host_writes_claims_and_sees_the_others(tmp_path):
    uri = str(tmp_path / "runs")
    answers = {name: host.write_and_claim(uri, name, 1.0) for name in ("10.0.0.1/ab", "10.0.0.2")}
    assert [answer["won"] for answer in answers.values()] == [True, False]
    assert host.unseen(uri, [*answers, "gone"], 1.0) == ["gone"]
    host.remove(uri, 1.0)
    assert not any((tmp_path / "runs").iterdir()) if (tmp_path / "runs").exists() else True
    own = host.report("cpu")  # as a worker asks at its start
    assert own["disk_free_bytes"] > 0
    assert verdicts.versions({"a": own})[0].verdict == "ok"
    assert own["gpus"] == []
