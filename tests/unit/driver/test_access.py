"""Who may use a Ray: the file of the token, and the warning about one that asks for none; with Ray's own store."""

from __future__ import annotations

import logging
import os
import pwd
import re
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from ray._private.services import GCS_SERVER_EXECUTABLE, resolve_ip_for_localhost
from ray._private.worker import print_to_stdstream

from deploy.drills.local_cluster import new_access, using
from elastic_ring.config import environment
from elastic_ring.runtime.driver import access, ray_session

OWN = "a" * 64
WAIT = "import sys; print(flush=True); sys.stdin.read()"


@pytest.fixture(scope="module", params=["disabled", "token"])
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    """(RAY_AUTH_MODE, port) of a control store, at the address that Ray makes of 127.0.0.1."""
    host = resolve_ip_for_localhost("127.0.0.1")
    if host.startswith("127."):
        pytest.skip("this machine has no address but loopback")
    folder = tmp_path_factory.mktemp("store")
    process = subprocess.Popen(
        [
            GCS_SERVER_EXECUTABLE,
            f"--log_dir={folder}",
            "--gcs_server_port=0",
            f"--node-ip-address={host}",
            "--metrics-agent-port=0",
            "--session-name=store",
            f"--session-dir={folder}",
        ],
        env={**os.environ, access.MODE: request.param, access.TOKEN: OWN},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = next(line for line in process.stdout if "listening on port" in line)
        yield request.param, int(line.rpartition(" ")[2].strip().rstrip("."))
    finally:
        process.kill()
        process.communicate()


def test_who_asks_for_no_token_is_told_once_loopback_or_not(store, caplog):
    mode, port = store
    places = [access.joined(place, port) for place in access.beyond_loopback("127.0.0.1")]
    reached = [place for place in places if access.refusal(place, OWN) is None]
    assert reached
    for wrong in ("", "b" * 64):
        assert (access.refusal(reached[0], wrong) is None) == (mode == "disabled")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            access.warn_if_open(f"127.0.0.1:{port}")
    told = [record.getMessage() for record in caplog.records if "can run code on this Ray" in record.getMessage()]
    assert len(told) == (mode == "disabled")
    assert all(reached[0] in line for line in told)


def test_a_cluster_that_asks_for_a_token_is_told_in_a_line_at_once(store, monkeypatch):
    mode, port = store
    address = next(access.joined(host, port) for host in access.beyond_loopback("127.0.0.1"))
    joined = list[str]()
    monkeypatch.setattr(access, "_init", lambda address, **how: joined.append(address))
    for own, which in (("", "a"), ("b" * 64, "another")):
        with using({access.MODE: "token" if own else "disabled", access.TOKEN: own}):
            if mode == "disabled":
                access.connect(address)
                continue
            with pytest.raises(ValueError, match=f"lets this process in .it asks for {which} token.; one that asks"):
                access.connect(address)
    with using({access.MODE: "token", access.TOKEN: OWN}):
        access.connect(address)
    assert joined == [address] * (3 if mode == "disabled" else 1)


@contextmanager
def seen_by_another(monkeypatch: pytest.MonkeyPatch, *paths: Path) -> Iterator[None]:
    """What this user made is a stranger's meanwhile."""
    with monkeypatch.context() as patched:
        if os.geteuid():
            patched.setattr(os, "geteuid", lambda: 12345)
        for path in paths if not os.getuid() else ():
            os.chown(path, 65534, 65534)
        yield
        for path in paths if not os.getuid() else ():
            os.chown(path, 0, 0)


def test_only_a_cluster_of_this_user_or_root_is_joined_unasked(tmp_path, monkeypatch, caplog):
    file, link, pipe = tmp_path / "ray_current_cluster", tmp_path / "link", tmp_path / "pipe"
    monkeypatch.setattr(access, "get_ray_address_file", lambda _: str(file))
    assert access.local_head() is None
    assert not caplog.messages
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        file.write_text(address + "\n")
        assert access.local_head() == address
        with seen_by_another(monkeypatch, file):
            assert access.local_head() is None
        assert "whose Ray cluster is passed over: set RAY_ADDRESS to join it" in caplog.messages[-1]
        link.symlink_to(file)
        os.mkfifo(pipe)
        for odd in (link, pipe):
            monkeypatch.setattr(access, "get_ray_address_file", lambda _, odd=odd: str(odd))
            assert access.local_head() is None
            assert "is passed over" in caplog.messages[-1]
    monkeypatch.setattr(access, "get_ray_address_file", lambda _: str(file))
    for dead in (address, "no address"):
        file.write_text(dead)
        assert access.local_head() is None
        assert f"a cluster at {dead} that does not answer" in caplog.messages[-1]


def test_a_ray_without_a_file_is_found_by_its_raylet_if_it_is_this_users(monkeypatch):
    own, theirs, raised = "10.9.8.7:1", "10.9.8.7:2", "10.9.8.7:3"
    with (
        raylet(own, WAIT),
        raylet(theirs, "import os; os.getuid() or os.setuid(65534); " + WAIT),
        raylet(raised, "import os; os.getuid() or os.setresuid(65534, 0, 0); " + WAIT),
    ):
        found = access._heads_of_raylets(begun=True)
        assert own in found
        assert found & {theirs, raised} == ({theirs, raised} if os.geteuid() else set())
        with seen_by_another(monkeypatch):
            assert (own in access._heads_of_raylets(begun=True)) == (os.getuid() == 0)


def test_the_ray_that_another_command_started_for_itself_is_joined_only_by_commands_that_start_none(monkeypatch):
    session = "/tmp/ray/session_2026-01-01_00-00-00_000001_{}/a"
    monkeypatch.setattr(access, "local_head", lambda: None)
    with (
        raylet("10.9.8.7:1", WAIT, session.format(os.getpid())),
        raylet("10.9.8.7:2", WAIT, session.format(os.getpid() + 1)),
    ):
        assert access._heads_of_raylets(begun=True) & {"10.9.8.7:1", "10.9.8.7:2"} == {"10.9.8.7:2"}
        assert access._heads_of_raylets(begun=False) >= {"10.9.8.7:1", "10.9.8.7:2"}


def test_the_ray_of_a_container_is_not_found_on_its_host():
    inside = ["unshare", "--map-root-user", "--pid", "--fork", "--kill-child"]
    if subprocess.run([*inside, "true"], capture_output=True).returncode:
        pytest.skip("this user may make no namespace")
    words = [*inside, "bash", "-c", 'exec -a raylet "$@"', "-", sys.executable]
    with raylet("10.9.8.7:1", WAIT), raylet("10.9.8.7:2", WAIT, before=words):
        for begun in (True, False):
            assert access._heads_of_raylets(begun=begun) & {"10.9.8.7:1", "10.9.8.7:2"} == {"10.9.8.7:1"}


def test_one_rule_says_which_cluster_every_command_joins(monkeypatch):
    monkeypatch.setattr(access, "local_head", lambda: None)
    monkeypatch.setattr(access, "is_listening", lambda head: head != "dead:1")
    begun, embedded = {"begun:1"}, {"begun:1", "embedded:1"}
    for address, heads, starting, other in (
        ("", (begun, embedded), "begun:1", None),
        ("", (set(), {"embedded:1"}), "", "embedded:1"),
        ("local", (begun, begun), "", "begun:1"),
        ("auto", (set(), {"embedded:1"}), "embedded:1", "embedded:1"),
        ("far:1", (begun, begun), "far:1", "far:1"),
    ):
        monkeypatch.setenv("RAY_ADDRESS", address)
        monkeypatch.setattr(access, "_heads_of_raylets", lambda begun, heads=heads: {*heads[not begun], "dead:1"})
        assert access.find(starts=True) == starting
        if other is None:
            with pytest.raises(ValueError, match=r"RAY_ADDRESS: .* set it to"):
                access.find()
        else:
            assert access.find() == other
    monkeypatch.setattr(access, "local_head", lambda: "file:1")
    assert access.find(starts=True) == "far:1"
    monkeypatch.delenv("RAY_ADDRESS")
    assert access.find(starts=True) == access.find() == "file:1"


def test_of_several_clusters_on_this_machine_none_is_taken_by_chance(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(access, "local_head", lambda: None)
    monkeypatch.setattr(access, "is_listening", lambda head: True)
    for heads, told in (
        ({"b:2", "a:1"}, "RAY_ADDRESS: Ray clusters of a:1, b:2 run on this machine"),
        (set(), "no Ray cluster"),
    ):
        monkeypatch.setattr(access, "_heads_of_raylets", lambda begun, heads=heads: heads)
        with pytest.raises(ValueError, match=told):
            access.connect()


@contextmanager
def raylet(address: str, code: str, *more: str, before: Sequence[str] = ("raylet",)) -> Iterator[None]:
    words = [*before, "-c", code, f"--gcs-address={address}", *more]
    program = sys.executable if before == ("raylet",) else None
    with subprocess.Popen(words, executable=program, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield
        finally:
            process.stdin.close()


@pytest.mark.parametrize("command", [["scale", "r", "--spares", "1"], ["drain"]])
def test_a_command_without_the_token_says_what_is_wanted(command, tmp_path):
    """In a process of its own: Ray's core may end one whose cluster does not answer."""
    wrong = {access.MODE: "token", access.TOKEN: "", access.TOKEN_FILE: str(tmp_path / "none")}
    env = {**os.environ, **wrong, "RAY_ADDRESS": "127.0.0.1:1"}
    ended = subprocess.run(
        [sys.executable, "-m", "elastic_ring", *command], env=env, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 2
    start = f"elastic-ring {command[0]}: RAY_ADDRESS: 127.0.0.1:1: no Ray cluster lets this process in ("
    assert start in ended.stderr
    assert "wants RAY_AUTH_MODE=token here, and its token in ~/.ray/auth_token or RAY_AUTH_TOKEN" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_where_a_cluster_refuses_the_way_out_is_a_ray_of_ones_own(monkeypatch, tmp_path):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    wrong = {access.MODE: "token", access.TOKEN: "", access.TOKEN_FILE: str(tmp_path / "none")}
    with using(wrong), pytest.raises(ValueError, match="for a Ray of your own to local"):
        ray_session.cluster(1).__enter__()


def test_the_token_is_made_for_its_user_alone_and_once(tmp_path):
    file = tmp_path / ".ray" / "auth_token"
    assert access._stored(file) == {}
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert list(file.parent.iterdir()) == [file]
    token = file.read_text()
    assert len(token) == 64
    assert access._stored(file) == {}
    assert file.read_text() == token


def test_a_run_without_a_place_for_its_token_has_one_of_its_own(tmp_path, caplog):
    (tmp_path / "home").write_text("no folder")
    first, second = (access._stored(tmp_path / "home" / ".ray" / "auth_token")[access.TOKEN] for _ in range(2))
    assert first != second
    assert "set HOME to a folder of yours" in caplog.text


def test_a_token_that_ray_made_is_closed_to_others(tmp_path, caplog):
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


def test_a_user_without_a_name_and_home_has_a_token_of_the_run(monkeypatch, caplog):
    def nobody(_: int) -> None:
        raise KeyError("uid not found")

    with using({access.MODE: "token", access.TOKEN: "", access.TOKEN_FILE: ""}):
        monkeypatch.setattr(pwd, "getpwuid", nobody)
        monkeypatch.delenv("HOME", raising=False)
        access.ask_for_token()
        assert len(environment()[access.TOKEN]) == 64
    assert "set HOME to a folder of yours" in caplog.text


def test_a_drills_ray_asks_for_the_users_token_or_for_one_of_its_own(monkeypatch):
    monkeypatch.setitem(environment(), access.TOKEN, OWN)
    assert new_access() == {access.MODE: "token", access.TOKEN: OWN}
    monkeypatch.delitem(environment(), access.TOKEN)
    one, another = (new_access() for _ in range(2))
    assert one[access.TOKEN] != another[access.TOKEN]


def test_rays_guesses_at_a_death_are_left_out_and_its_other_lines_are_not(monkeypatch, capsys):
    monkeypatch.setattr(access.stdout_deduplicator, "skip_re", None)
    monkeypatch.setattr(access.ray, "init", lambda **how: None)
    for printed in (True, False):
        for reason in ("A worker died or was killed while executing a task by an unexpected system error.", "2 killed"):
            lines = [f"{reason} {printed}"]
            print_to_stdstream({"lines": lines, "pid": "raylet", "is_err": False}, ignore_prefix=False)
            assert (reason in capsys.readouterr().out) == (printed or reason == "2 killed")
        access._init("local")


def test_no_other_module_of_the_package_starts_or_joins_ray():
    """Who may connect is decided in one place; Ray connects by itself wherever it is used without that."""
    package = Path(access.__file__).parents[2]
    calls = {
        path.name for path in package.rglob("*.py") if re.search(r"^[^\"#`]*\bray\.init\(", path.read_text(), re.M)
    }
    assert calls == {"access.py"}
