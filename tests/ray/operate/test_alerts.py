"""A run that fails rings: its metrics through Ray, Prometheus with our rules, Alertmanager, and a webhook's request."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psutil
import pytest
import ray
import yaml

from elastic_ring.errors import UserCodeFailed
from tests.ray.conftest import ALONE, notes, ran, tiny_trainer, wait_for
from tests.unit.deploy.tools import DEPLOY, program

MONITORING = DEPLOY / "monitoring"
NAME = "rings-the-bell"


@pytest.fixture
def fired() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The address of a webhook, and what it was sent."""
    received: list[dict[str, Any]] = []

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            received.append({"path": self.path, **body})
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hook)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", received
    server.shutdown()
    server.server_close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def configure(folder: Path, hook: str, alertmanager: int) -> None:
    """Our own files, with addresses of this test and shorter waits; the list of nodes as Ray's dashboard writes it."""
    (node,) = ray.nodes()
    nodes = [{"labels": {"job": "ray"}, "targets": [f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}"]}]
    (folder / "nodes.json").write_text(json.dumps(nodes))
    shutil.copy(MONITORING / "rules.yml", folder)
    prometheus = yaml.safe_load((MONITORING / "prometheus-hosts.yml").read_text())
    prometheus["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    prometheus["alerting"]["alertmanagers"][0]["static_configs"][0]["targets"] = [f"127.0.0.1:{alertmanager}"]
    prometheus["scrape_configs"][0]["file_sd_configs"][0]["files"] = [str(folder / "nodes.json")]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(prometheus))
    routes = yaml.safe_load((MONITORING / "alertmanager.yml").read_text())
    routes["route"]["group_wait"] = "0s"
    for receiver in routes["receivers"]:
        receiver["webhook_configs"][0]["url"] = f"{hook}/{receiver['name']}"
    (folder / "alertmanager.yml").write_text(yaml.safe_dump(routes))


@pytest.fixture
def prometheus(local_ray: None, tmp_path: Path, fired: tuple[str, Any]) -> Iterator[str]:
    """The address of a Prometheus that scrapes this Ray and tells an Alertmanager, which tells the webhook."""
    folder = tmp_path / "monitoring"
    folder.mkdir()
    port, alertmanager = free_port(), free_port()
    configure(folder, fired[0], alertmanager)
    commands = [
        [
            program("prometheus-alertmanager", "Debian: prometheus-alertmanager"),
            f"--config.file={folder}/alertmanager.yml",
            f"--storage.path={folder}/alerts",
            f"--web.listen-address=127.0.0.1:{alertmanager}",
            "--cluster.listen-address=",
        ],
        [
            program("prometheus", "Debian: prometheus"),
            f"--config.file={folder}/prometheus.yml",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
    ]
    with (folder / "log").open("w") as log:
        processes = [subprocess.Popen(command, stdout=log, stderr=log) for command in commands]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        for process in processes:
            process.terminate()
        assert [process.wait(30) for process in processes] == [0, 0], (folder / "log").read_text()[-3000:]


def ask(prometheus: str, query: str) -> list[tuple[dict[str, str], float]]:
    """(labels, value) of every series that a query gives."""
    try:
        with urllib.request.urlopen(f"{prometheus}/api/v1/query?query={quote(query)}", timeout=30.0) as answer:
            found = json.loads(answer.read())["data"]["result"]
    except OSError:  # it is still starting
        return []
    return [(one["metric"], float(one["value"][1])) for one in found]


@pytest.mark.slow
def test_a_run_that_fails_reaches_the_pager_and_only_it(prometheus, fired, tmp_path):
    trainer = tiny_trainer(tmp_path, NAME, faults="raise@step=3,phase=forward; raise@step=3,phase=backward", **ALONE)
    with pytest.raises(UserCodeFailed):
        trainer.fit()
    wait_for(lambda: any(found["path"] == "/pager" for found in fired[1]))
    (labels, steps) = ask(prometheus, f'max by (run) (ray_elastic_ring_committed_steps{{run="{NAME}"}})')[0]
    assert (labels, steps) == ({"run": NAME}, 3.0)
    assert {found["path"] for found in fired[1]} == {"/pager"}
    (alert,) = fired[1][0]["alerts"]
    assert alert["status"] == "firing"
    assert {name: alert["labels"][name] for name in ("alertname", "run", "severity")} == {
        "alertname": "ElasticRingRunFailed",
        "run": NAME,
        "severity": "page",
    }
    assert alert["annotations"]["summary"] == f"Run {NAME} has ended with an error."


@pytest.mark.soak
def test_a_drill_makes_its_alert_fire_says_what_to_look_at_and_leaves_nothing(tmp_path):
    """That of the connections which break though nobody dies: three times, for real, in a Ray of the drill's own."""
    program("prometheus", "Debian: prometheus")
    alert = ["-m", "elastic_ring", "drill", "alert", "ElasticRingCommunicationErrors"]
    command = [sys.executable, *alert, f"--rules={MONITORING / 'rules.yml'}", f"--storage-path={tmp_path}"]
    marked = {**os.environ, "MARK_OF_THIS_TEST": tmp_path.name}  # every process of the drill inherits it
    done = ran(*command, env=marked, timeout_s=400.0)
    first, severity, *rest = done.stdout.splitlines()
    assert re.fullmatch(r"ElasticRingCommunicationErrors fires: Exchanges of run \S+ broke 3 times within .*", first)
    assert severity == "severity: ticket"
    assert rest[0].startswith("- **Look at**: the peer that the recovery lines name.")
    (folder,) = tmp_path.glob("ElasticRing*")
    recoveries = [line["recovery"] for line in notes(folder, "recovery")]
    assert [recovery["kind"] for recovery in recoveries] == ["peer"] * 3
    assert all(recovery["survivor_pids_kept"] for recovery in recoveries)
    assert [process for process in psutil.process_iter() if _is_marked(process, tmp_path.name)] == []


def _is_marked(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get("MARK_OF_THIS_TEST") == mark and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
