"""The doctor on a real cluster of two nodes, of which one is different: it says which, in what, and what to do."""

from __future__ import annotations

import json

import psutil
import pytest

from elastic_ring.cli import main
from elastic_ring.config import ScalingConfig
from elastic_ring.data.source import StdlibText
from elastic_ring.runtime.doctor.examine import Examination, examine
from tests.ray.conftest import cluster_of


@pytest.mark.slow
def test_the_doctor_names_the_host_that_would_fail_and_a_good_cluster_passes(tmp_path, monkeypatch, capsys):
    homes = [tmp_path / "home", tmp_path / "elsewhere"]
    for home in homes:
        home.mkdir()
    monkeypatch.setenv("HOME", str(homes[0]))
    with cluster_of(head_cpus=1) as cluster:
        words = ["doctor", "--json", "--storage-path", str(tmp_path / "runs"), "--cpus-per-worker", "1"]
        assert main(words) == 0
        good = json.loads(capsys.readouterr().out)
        assert good["ok"]
        assert {finding["check"] for finding in good["findings"]} >= {"versions", "storage", "data", "ports", "kernels"}

        odd = cluster.add_node(num_cpus=1, env_vars={"HOME": str(homes[1])})  # its ~ is another place
        raylet = psutil.Process(odd.all_processes["raylet"][0].process.pid)
        for process in (raylet, *raylet.children(recursive=True)):
            process.rlimit(psutil.RLIMIT_NOFILE, (1024, 1024))
        scaling = ScalingConfig(dp=1, cp=2, spares=0, resources_per_worker={"CPU": 1.0})
        reports, findings = examine(Examination(scaling, "~/runs", StdlibText(96)))
        name = next(host for host in reports if host.endswith(odd.node_id[:6]))
        failures = {finding.check: finding for finding in findings if finding.verdict == "failure"}
        assert failures["ulimits"].hosts == (name,)
        assert "ulimit -n 65536" in failures["ulimits"].line()
        assert "the same place on all hosts" in failures["storage"].line()
        assert set(failures) == {"ulimits", "storage"}
        links = [finding.says for finding in findings if finding.check == "links"]
        assert any("gloo between two hosts: 1 measured" in text for text in links)
        assert not any(path.name.startswith(".doctor") for home in homes for path in (home / "runs").iterdir())
