"""Access to Ray: the token of a local Ray, the clusters that may be joined unasked, a warning about one without tokens.

Ray listens on all interfaces, even with `--node-ip-address=127.0.0.1`, and whoever has the token can run code on it.
"""

from __future__ import annotations

import getpass
import logging
import os
import re
import secrets
import socket
import stat
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import grpc
import psutil
import ray
from ray._common.utils import get_ray_address_file
from ray._private.ray_logging import stdout_deduplicator
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]
from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc

from elastic_ring.config import environment
from elastic_ring.files import printable

log = logging.getLogger(__name__)

MODE, TOKEN, TOKEN_FILE = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
TLS = "RAY_USE_TLS"  # strangers need a certificate, and this process's own question would have to show it
WORKER_DIED = "^A worker died or was killed while executing a task by an unexpected system error"
"""Ray's paragraph on stdout at each death, planned ones too, that guesses at memory and SIGSEGV. The run's line names
the cause."""
NAMESPACE = "elastic_ring"
"""Of Ray, in which a run's actors have their names."""
FINDS = ("", "auto", "local")
"""Values of RAY_ADDRESS that name no cluster."""
CHOICE = "a cluster's HOST:PORT, or for a Ray of your own to local"
ANSWER_S = 2.0
MAX_ADDRESS_CHARS = 512


def find(*, starts: bool = False) -> str:
    """The address of the cluster to join, by the one rule of all commands: that of RAY_ADDRESS; without it, one that
    `ray start` of this user or root began on this machine. Empty where a caller that `starts` one shall do so.

    A caller that does not, or `auto`, also finds a Ray that another command started for itself. Raises ValueError where
    there is none or a choice.
    """
    address = environment().get("RAY_ADDRESS", "")
    if address not in FINDS or (address == "local" and starts):
        return "" if address == "local" else address
    is_optional = starts and not address
    heads = [head] if (head := local_head()) else sorted(filter(is_listening, _heads_of_raylets(begun=is_optional)))
    if len(heads) > 1:
        raise ValueError(f"RAY_ADDRESS: Ray clusters of {', '.join(heads)} run on this machine: set it to {CHOICE}")
    if not heads and not is_optional:
        raise ValueError(f"RAY_ADDRESS: no Ray cluster of this user or root runs on this machine: set it to {CHOICE}")
    return "".join(heads)


def connect(address: str = "", **how: Any) -> None:
    """Join the cluster at `address`, by default the one that is found. `how`: as `ray.init` takes it.

    Raises ValueError where none is, and where it refuses this process.
    """
    address = address or find()
    try:
        # As Ray does for one that it finds by itself.
        if (
            environment().get("RAY_ADDRESS", "") in FINDS
            and MODE not in environment()
            and AuthenticationTokenLoader.instance().has_token(ignore_auth_mode=True)
        ):
            use({MODE: "token"})
        loader, mode = AuthenticationTokenLoader.instance(), environment().get(MODE, "disabled").lower()
        token = loader.get_raw_token() if mode == "token" and loader.has_token(ignore_auth_mode=True) else ""
        is_asked = mode in ("token", "disabled") and not uses_tls()  # Ray would ask for 20 s, with a line each second
        if is_asked and refusal(address, token) == grpc.StatusCode.UNAUTHENTICATED:
            raise ConnectionError(f"it asks for {'another' if token else 'a'} token")
        _init(address, **how)
    except (ConnectionError, ray.exceptions.AuthenticationError) as error:
        reason = str(error).partition(". ")[0]
        raise ValueError(
            f"RAY_ADDRESS: {address}: no Ray cluster lets this process in ({reason}); one that asks for a token wants "
            f"RAY_AUTH_MODE=token here, and its token in ~/.ray/auth_token or RAY_AUTH_TOKEN; or set it to {CHOICE}"
        ) from error


def start(**how: Any) -> None:
    """Start a Ray on this host that asks for a token and ends with this process. `how`: as `ray.init` takes it."""
    ask_for_token()
    _init("local", **how)


def _init(address: str, **how: Any) -> None:
    """The only call of `ray.init` in this package; its callers have set the token."""
    if stdout_deduplicator.skip_re is None:  # else RAY_DEDUP_LOGS_SKIP_REGEX says what is left out
        stdout_deduplicator.skip_re = re.compile(WORKER_DIED)
    ray.init(address=address, log_to_driver=False, **how)


def local_head() -> str | None:
    """The address of a cluster that this user or root began on this machine by `ray start`, if it still answers."""
    path = get_ray_address_file(None)  # in /tmp/ray: a folder that any user may have made
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        log.warning("%s is passed over (%s): set RAY_ADDRESS to join a cluster", path, error)
        return None
    with open(fd, encoding="utf-8", errors="replace") as file:
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode) or about.st_uid not in (os.geteuid(), 0):
            log.warning(
                "%s is user %d's, whose Ray cluster is passed over: set RAY_ADDRESS to join it", path, about.st_uid
            )
            return None
        address = file.read(MAX_ADDRESS_CHARS).strip()
    if is_listening(address):
        return address
    log.warning("Ray remembers a cluster at %s that does not answer", printable(address))
    return None


def is_listening(address: str) -> bool:
    """Whether a process listens at the address of a cluster's head."""
    host, _, port = address.rpartition(":")
    with suppress(OSError, ValueError):
        socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_S).close()
        return True
    return False


def own_parts() -> dict[str, psutil.Process]:
    """The processes, by name, without which a Ray that this process has started cannot go on; {} if there is none, or
    if there are several raylets: of a cluster of several nodes a run outlives one."""
    parts = defaultdict[str, list[psutil.Process]](list)
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # others come and go
            parts[child.name()].append(child)
    own = {name: parts[name] for name in ("gcs_server", "raylet") if name in parts}
    return {name: ones[0] for name, ones in own.items()} if all(len(ones) == 1 for ones in own.values()) else {}


def ended_part(parts: Mapping[str, psutil.Process]) -> str:
    """The name of a part that has ended, which nobody may have waited for yet; empty if there is none."""

    def is_there(process: psutil.Process) -> bool:
        with suppress(psutil.NoSuchProcess):
            return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        return False

    return next((name for name, process in parts.items() if not is_there(process)), "")


def _heads_of_raylets(*, begun: bool) -> set[str]:
    """The clusters of this user's and root's Rays on this machine, out of containers: of those `begun` by `ray start`
    or of all. With `--temp-dir` they leave no file where it is looked for, and `ray.init()` leaves none."""
    heads = set()
    for process in psutil.process_iter(["cmdline", "uids", "ppid"]):
        words, users = process.info["cmdline"], process.info["uids"]
        if words and users and {*users} <= {os.geteuid(), 0} and Path(words[0]).name == "raylet":
            if (begun and _is_embedded(words, process.info["ppid"])) or _depth(process.pid) != _depth("self"):
                continue
            heads |= {word.partition("=")[2] for word in words if word.startswith("--gcs-address=")}
    return heads - {""}


def _depth(process: int | str) -> int:
    """How many nested namespaces number a process: of one in a container they are more. 0: not known."""
    with suppress(OSError):
        status = Path(f"/proc/{process}/status").read_text(errors="replace")
        return len(status.partition("\nNSpid:")[2].partition("\n")[0].split())
    return 0


def _is_embedded(words: list[str], parent: int) -> bool:
    """Whether a raylet ends with the process that started it, whose number is in the session's name."""
    starter = re.search(r"/session_[\d_-]+_(\d+)/", " ".join(words))
    if starter is None or int(starter[1]) != parent:
        return False
    with suppress(psutil.Error):
        return not re.search(r"\bray(\.scripts\.scripts)? start ", " ".join(psutil.Process(parent).cmdline()))
    return True


def use(variables: Mapping[str, str | None]) -> None:
    """Set variables, None removes one, and have Ray read them again: it reads them only when it is imported."""
    for name, value in variables.items():
        if value is None:
            environment().pop(name, None)
        else:
            environment()[name] = value
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def ask_for_token() -> None:
    """Have a Ray that this process starts ask for a token, as is Ray's default, unless RAY_AUTH_MODE says otherwise.

    The token stays in Ray's place for it, so that other commands of this user reach the Ray. Ray would make the file
    readable for every user of the machine.
    """
    variables = environment()
    if variables.get(MODE, "token").lower() != "token":
        return
    has_token = variables.get(TOKEN) or variables.get(TOKEN_FILE)
    use({MODE: "token", **({} if has_token else _stored("~/.ray/auth_token"))})


def _stored(name: str | Path) -> dict[str, str]:
    """Make the file of the user's token, or close an existing one to others. Returns the variable to set where no file
    can be made."""
    token = secrets.token_hex(32)
    try:
        path = Path(name).expanduser()
        new = path.with_name(f"{path.name}.{token[:8]}")
        path.parent.mkdir(mode=0o700, exist_ok=True)
        if path.exists():
            _close_to_others(path)
            return {}
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
            file.write(token)
        try:
            with suppress(FileExistsError):
                os.link(new, path)  # nobody sees half a token, and one that came meanwhile stays
        finally:
            new.unlink()
    except (OSError, RuntimeError) as error:  # the latter for a user without a name and HOME
        log.warning(
            "no token can be kept (%s): this run has one of its own, and `elastic-ring scale` from elsewhere does not "
            "reach it; set HOME to a folder of yours, or %s",
            error,
            TOKEN,
        )
        return {TOKEN: token}
    return {}


def _close_to_others(path: Path) -> None:
    """Make a file that Ray has left readable for every user (umask other than 077) readable for this user alone."""
    about = path.stat()
    if about.st_uid != os.geteuid() or not about.st_mode & 0o077:
        return  # an administrator's file stays as open as it is
    try:
        path.chmod(stat.S_IMODE(about.st_mode) & 0o700)
    except OSError as error:
        log.warning("other users of this machine can read Ray's token in %s, which cannot be closed: %s", path, error)
        return
    log.warning(
        "other users of this machine could read Ray's token in %s: it is closed now; remove it to have a new one, once "
        "nothing runs with this one",
        path,
    )


@cache
def warn_if_open(head: str) -> None:
    """Warn once of a Ray without a token, which runs anybody's code. `head`: HOST:PORT of its control store."""
    if uses_tls():
        return
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's number without a name
        user = str(os.getuid())
    host, _, port = head.rpartition(":")
    for place in beyond_loopback(host.strip("[]")):
        address = joined(place, int(port))
        if refusal(address) is None:
            log.warning(
                "anyone who can connect to %s can run code on this Ray cluster, as the user %s: it asks for no token "
                "(RAY_AUTH_MODE). How to switch it: docs/quickstart.md, 'On a cluster'",
                address,
                user,
            )
            return


def uses_tls() -> bool:
    return environment().get(TLS, "0").lower() in ("1", "true")


def refusal(address: str, token: str = "") -> grpc.StatusCode | None:
    """Why a control store there gives a client with this token, or without one, no answer; None if it answers."""
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        store = gcs_service_pb2_grpc.NodeInfoGcsServiceStub(channel)
        try:
            store.GetClusterId(gcs_service_pb2.GetClusterIdRequest(), timeout=ANSWER_S, metadata=metadata)
        except grpc.RpcError as error:
            status: grpc.StatusCode = error.code()
            return status
    return None


def beyond_loopback(host: str) -> list[str]:
    """The addresses by which others may reach a head: its own, or this host's where it calls itself loopback."""
    if host != "localhost" and host != "::1" and not host.startswith("127."):
        return [host]
    addresses = [
        interface.address
        for interfaces in psutil.net_if_addrs().values()
        for interface in interfaces
        if interface.family in (socket.AF_INET, socket.AF_INET6)
    ]
    return [address for address in addresses if "%" not in address and address != "::1" and address[:4] != "127."]


def joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
