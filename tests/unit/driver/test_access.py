"""Who may use a Ray: the file of the token, and the warning about one that asks for none; with Ray's own store."""

from __future__ import annotations

import logging
import os
import pwd
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray._private.services import GCS_SERVER_EXECUTABLE, resolve_ip_for_localhost

from elastic_ring.config import environment
from elastic_ring.runtime.driver import access

OWN = "a" * 64


@pytest.fixture(scope="module", params=["disabled", "token"])
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    """(RAY_AUTH_MODE, port) of a control store, at the address that Ray makes of 127.0.0.1."""
    host = resolve_ip_for_localhost("127.0.0.1")
    if host.startswith("127."):
        pytest.skip("this machine has no address but loopback")
    folder = tmp_path_factory.mktemp("store")
    process = subprocess.Popen(
        [GCS_SERVER_EXECUTABLE, f"--log_dir={folder}", "--gcs_server_port=0", f"--node-ip-address={host}",
         "--metrics-agent-port=0", "--session-name=store", f"--session-dir={folder}"],
        env={**os.environ, access.MODE: request.param, access.TOKEN: OWN},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        line = next(line for line in process.stdout if "listening on port" in line)
        yield request.param, int(line.rpartition(" ")[2].strip().rstrip("."))
    finally:
        process.kill()
        process.communicate()


def test_who_asks_for_no_token_is_told_once_loopback_or_not(
    store: tuple[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    mode, port = store
    reached = [one for one in access.beyond_loopback("127.0.0.1") if access.answers(access.joined(one, port), OWN)]
    assert reached
    for wrong in ("", "b" * 64):
        assert access.answers(access.joined(reached[0], port), wrong) == (mode == "disabled")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            access.warn_if_open(f"127.0.0.1:{port}")
    told = [record.getMessage() for record in caplog.records if "can run code on this Ray" in record.getMessage()]
    assert len(told) == (mode == "disabled")
    assert all(access.joined(reached[0], port) in line for line in told)


def test_the_token_is_made_for_its_user_alone_and_once(tmp_path: Path) -> None:
    file = tmp_path / ".ray" / "auth_token"
    assert access._stored(file) == {}
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert list(file.parent.iterdir()) == [file]
    token = file.read_text()
    assert len(token) == 64
    assert access._stored(file) == {}
    assert file.read_text() == token


def test_a_run_without_a_place_for_its_token_has_one_of_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "home").write_text("no folder")
    first, second = (access._stored(tmp_path / "home" / ".ray" / "auth_token")[access.TOKEN] for _ in range(2))
    assert first != second
    assert "set HOME to a folder of yours" in caplog.text


def test_a_token_that_ray_made_is_closed_to_others(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As of `ray.init()` of a preparation in Python, before a training."""
    file = tmp_path / ".ray" / "auth_token"
    file.parent.mkdir()
    file.write_text(OWN)
    for mode in (0o644, 0o660):
        file.chmod(mode)
        caplog.clear()
        for _ in range(2):
            assert access._stored(file) == {}
        assert (stat.S_IMODE(file.stat().st_mode), file.read_text()) == (0o600, OWN)
        assert ["remove it to have a new one" in line for line in caplog.messages] == [True]


def test_a_user_without_a_name_and_home_has_a_token_of_the_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def nobody(_: int) -> None:
        raise KeyError("uid not found")

    with access.using({access.MODE: "token", access.TOKEN: "", access.TOKEN_FILE: ""}):
        monkeypatch.setattr(pwd, "getpwuid", nobody)
        monkeypatch.delenv("HOME", raising=False)
        access.ask_for_token()
        assert len(environment()[access.TOKEN]) == 64
    assert "set HOME to a folder of yours" in caplog.text


def test_a_drills_ray_asks_for_the_users_token_or_for_one_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(environment(), access.TOKEN, OWN)
    assert access.new_access() == {access.MODE: "token", access.TOKEN: OWN}
    monkeypatch.delitem(environment(), access.TOKEN)
    one, another = (access.new_access() for _ in range(2))
    assert one[access.TOKEN] != another[access.TOKEN]
