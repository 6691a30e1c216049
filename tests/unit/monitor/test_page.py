"""The live page: its data from a run's records, and the page itself in a real browser without a display."""

from __future__ import annotations

import http.client
import json
import logging
import re
import resource
import shutil
import socket
import struct
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_ring.cli import status
from elastic_ring.monitor import page as page_module
from elastic_ring.monitor.metrics import METRICS_NAME, write_json
from elastic_ring.monitor.metrics_log import MetricsLog
from elastic_ring.monitor.page import Page, _own_names, page_data, thinned
from tests.unit.deploy.tools import program
from tests.unit.monitor.test_monitor_report import SENTENCE, live_status, metrics


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The records of a run in step 40 that lost a rank in step 21."""
    with MetricsLog(tmp_path) as log:
        for step in range(40):
            log.record(metrics(step))
        log.validated(20, {"val_loss": 3.5})
    clock = {
        "idle": 0.0,
        "forward": 0.5,
        "backward": 1.0,
        "reduce": 0.1,
        "vote": 0.1,
        "apply": 0.1,
        "other": 0.0,
        "data": 0.2,
    }
    doing = {"at_step": 40, "phase": "backward", "in_phase_s": 0.25, "clock": clock}
    stuck = {"at_step": 40, "phase": "forward", "in_phase_s": 99.0}
    members = [
        {"global_rank": rank, "worker": f"w-{rank}", "node": "node-a", "pid": 100 + rank, **does}
        for rank, does in enumerate([doing, doing, doing, stuck])
    ]
    told = live_status(step=40, total_steps=60, updated_unix_s=time.time(), members=members, resumed_from=[{"step": 8}])
    write_json(tmp_path / "status.json", told)
    return tmp_path


@pytest.fixture
def page(run: Path) -> Iterator[Page]:
    with Page(lambda: run) as served:
        thread = threading.Thread(target=served.serve)
        thread.start()
        yield served
        served.stop()
        thread.join(10.0)


def test_the_data_are_those_of_the_records(run: Path) -> None:
    found = page_data(run)
    assert found["ranks"][0]["clock"]["backward"] == 1.0
    assert (found["run"], found["phase"], found["step"], found["total_steps"]) == ("laptop", "running", 40, 60)
    assert found["loss"] == [(step, 5.0 - step / 10) for step in range(40)]
    assert found["validation"] == {"val_loss": [(20, 3.5)]}
    assert found["generations"] == [
        {"generation": 1, "first": 0, "last": 20, "dp": 2, "cp": 2},
        {"generation": 2, "first": 21, "last": 39, "dp": 2, "cp": 2},
    ]
    assert found["recoveries"] == [{"step": 21, "line": SENTENCE}]
    assert [(rank["global_rank"], rank["phase"]) for rank in found["ranks"]][3] == (3, "forward")


def test_a_long_run_is_thinned_and_keeps_its_spikes() -> None:
    points = [(step, 1.0) for step in range(100_000)]
    points[54_321] = (54_321, 99.0)
    found = thinned(points)
    assert len(found) <= 800
    assert max(found, key=lambda point: point[1]) == (54_321, 99.0)
    assert found == sorted(found)


def test_what_cannot_be_read_is_told_and_other_paths_are_not_there(
    page: Page, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with urllib.request.urlopen(f"{page.url}data.json", timeout=10) as answer:
        seen = json.loads(answer.read())
    assert seen["step"] == 40
    assert seen["news_s"] == 0.0, "whatever the age by this host's clock"
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"{page.url}../status.json", timeout=10)
    (run / METRICS_NAME).write_text('{"step": 0}\n{broken\n{"step": 1}\n')
    time.sleep(0.6)  # longer than an answer is kept
    with urllib.request.urlopen(f"{page.url}data.json", timeout=10) as answer:
        seen = json.loads(answer.read())
    assert f"line 2 of {run / METRICS_NAME}" in seen["error"]
    assert 0.5 < seen["news_s"] < 10.0, "nothing has changed since"
    page._look = lambda: (_ for _ in ()).throw(OSError("the disk is away"))
    time.sleep(0.6)
    for _ in range(20):
        with pytest.raises(urllib.error.HTTPError, match="503"):
            urllib.request.urlopen(f"{page.url}data.json", timeout=10)
    assert caplog.text.count("the disk is away") == 1, "whoever asks does not decide how much is logged"


def test_a_port_that_is_taken_and_a_folder_without_a_run_are_refused(
    page: Page, run: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    port = page.url.rstrip("/").rpartition(":")[2]
    assert status.main([str(run), "--serve", port]) == 2
    assert f"--serve {port} on 127.0.0.1" in capsys.readouterr().err
    assert status.main([str(tmp_path_factory.mktemp("empty")), "--serve", "0"]) == 2
    assert "give the --run-dir of a run" in capsys.readouterr().err


@pytest.mark.slow
def test_a_browser_shows_curve_mesh_recovery_and_the_rank_that_stands_still(
    page: Page, run: Path, tmp_path: Path
) -> None:
    browser = program("chromium-headless-shell", "Debian: chromium-headless-shell")
    command = [
        browser,
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path / 'profile'}",
        "--virtual-time-budget=4000",
    ]
    told = json.loads((run / "status.json").read_text())
    write_json(run / "status.json", {**told, "phase": "closing"})
    narrow = subprocess.run(
        [*command, "--window-size=390,1340", "--dump-dom", page.url], capture_output=True, text=True, timeout=120
    )
    widths = [int(width) for width in re.findall(r'viewBox="0 0 (\d+) ', narrow.stdout)]
    assert len(widths) == 6, narrow.stderr
    assert all(300 < width < 390 for width in widths), "a chart's unit is a pixel: its letters keep their size"
    assert narrow.stdout.count("<li>at step 40 the ring closes again</li>") == 1
    write_json(run / "status.json", told)
    command.append("--window-size=1240,1340")
    done = subprocess.run([*command, "--dump-dom", page.url], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    dom = done.stdout
    assert 'data-step="40"' in dom, done.stderr
    assert re.search(r'aria-label="loss" data-points="40"', dom)
    assert len(re.search(r'<polyline[^>]* points="([^"]*)"', dom)[1].split()) == 40  # type: ignore[index]
    assert (dom.count('class="generation"'), dom.count('class="recovery"'), dom.count("data-rank=")) == (2, 5, 4)
    assert dom.count('class="resume"') == 5
    assert SENTENCE in dom
    assert "<li>at step 40 the ring closes again" not in dom
    stuck = re.findall(r'data-rank="(\d)" data-phase="(\w+)" style="background: var\(--red\)', dom)
    assert stuck == [("3", "forward")]
    assert re.findall(r'data-part="(\w+)"', dom) == 3 * ["forward", "backward", "reduce", "vote", "apply"]
    picture = tmp_path / "page.png"
    subprocess.run([*command, f"--screenshot={picture}", page.url], capture_output=True, check=True, timeout=120)
    assert picture.stat().st_size > 20_000
    shutil.rmtree(tmp_path / "profile", ignore_errors=True)


def said_to(page: Page, *pieces: bytes, resets: bool = False) -> bytes:
    """What the page answers to somebody who says this and hangs up."""
    host, _, port = page.url.removeprefix("http://").rstrip("/").rpartition(":")
    answer = b""
    with socket.create_connection((host, int(port)), timeout=20) as stranger, suppress(OSError):
        for piece in pieces:
            stranger.sendall(piece)
        if resets:
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        else:
            stranger.shutdown(socket.SHUT_WR)
            while data := stranger.recv(1 << 16):
                answer += data
    return answer


WORDS = st.one_of(
    st.binary(max_size=300),
    st.sampled_from(
        [
            b"GET / HTTP/1.1\r\n",
            b"GET /data.json HTTP/1.0\r\n\r\n",
            b"GET //../%2e%2e/etc/passwd?\xff HTTP/1.1\r\n\r\n",
            b"GET http://a:b@[ HTTP/1.1\r\n\r\n",
            b"POST / HTTP/9.9\r\n",
            b"Content-Length: -1\r\n",
            b"A" * 70_000,
            b"\r\n\r\n",
            b"X: " + b"y" * 70_000 + b"\r\n",
        ]
    ),
)


def test_whatever_a_stranger_says_to_the_page_there_is_no_traceback_and_it_goes_on(
    page: Page, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    @settings(max_examples=25, deadline=None)
    @given(st.lists(WORDS, max_size=3), st.booleans())
    def says(pieces: list[bytes], resets: bool) -> None:
        said_to(page, *pieces, resets=resets)

    said_to(page, b"GET / HT", resets=True)
    says()
    assert said_to(page, b"GET / HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.0 200 OK")
    assert "Traceback" not in capfd.readouterr().err
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_of_many_who_say_nothing_some_are_served_and_descriptors_that_run_out_are_no_spin(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_module, "MAX_CONNECTIONS", 4)
    with Page(lambda: run) as served:
        thread = threading.Thread(target=served.serve)
        thread.start()
        assert served._server is not None
        address, before = served._server.server_address[:2], threading.active_count()
        silent = [socket.create_connection(address, timeout=20) for _ in range(12)]
        assert sum(sock.recv(1) == b"" for sock in silent[4:]) == 8
        assert threading.active_count() - before <= 4
        waits = socket.socket()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            waits.connect(address)
            cpu_s = time.process_time()
            time.sleep(0.6)  # in which it would try many thousand times
            assert time.process_time() - cpu_s < 0.3
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for sock in (*silent, waits):
                sock.close()
            served.stop()
            thread.join(10.0)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:{}", 200),
        ("localhost:{}", 200),
        ("[::1]:{}", 200),
        (socket.gethostname().upper(), 200),
        ("stranger.example:{}", 421),
        ("localhost.stranger.example", 421),
        ("", 200),
        ("a b", 421),
        ("[::1", 421),
    ],
)
def test_only_the_machine_s_own_names_are_answered(page: Page, host: str, status: int) -> None:
    """A stranger's page whose name leads here by now (DNS rebinding) gets nothing through a browser on this machine."""
    port = int(page.url.rstrip("/").rpartition(":")[2])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.putrequest("GET", "/data.json", skip_host=True)
    connection.putheader("Host", host.format(port))
    connection.endheaders()
    answer = connection.getresponse()
    assert (answer.status, b"loss" in answer.read()) == (status, status == 200)
    connection.close()


def test_a_machine_answers_to_its_name_with_and_without_its_domain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "Node1")
    monkeypatch.setattr(socket, "getfqdn", lambda *_: "node1.cluster.example")
    _own_names.cache_clear()
    page = Page(Path, "127.0.0.1", 0)
    own = [page.answers_to(host) for host in ("node1:80", "NODE1.cluster.example.:80", "localhost.")]
    others = [page.answers_to(host) for host in ("node1.stranger.example", "cluster.example", ".")]
    _own_names.cache_clear()
    assert (own, others) == ([True] * 3, [False] * 3)
