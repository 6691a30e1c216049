"""A resolver that does not answer is found: a real one of this machine, and an address where nobody is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_ring.runtime.agent.health import LIMIT_S, lookup_s, resolver_warning

ASK = "from elastic_ring.runtime.agent.health import lookup_s; print(lookup_s('192.0.2.77'))"


def test_an_address_in_the_hosts_file_is_looked_up_at_once_and_nobody_is_warned() -> None:
    took_s = lookup_s("127.0.0.1")
    assert took_s < LIMIT_S
    assert resolver_warning("n", "127.0.0.1", took_s) == ""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: another /etc/resolv.conf, in a mount namespace of its own")
def test_a_resolver_that_does_not_answer_is_warned_about(tmp_path: Path) -> None:
    """Packets to the resolver vanish: it is another port's silence, as loopback drops nothing that nobody reads."""
    conf = tmp_path / "resolv.conf"
    conf.write_text("nameserver 127.0.0.53\noptions timeout:5 attempts:1\n")
    silent = "import socket, sys, subprocess\ns = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
    silent += "s.bind(('127.0.0.53', 53))\nsys.exit(subprocess.call([sys.executable, '-c', sys.argv[1]]))"
    script = f'mount --bind {conf} /etc/resolv.conf && ip link set lo up && exec {sys.executable} -c "$0" "$1"'
    done = subprocess.run(
        ["unshare", "--mount", "--net", "sh", "-c", script, silent, ASK],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )
    assert done.returncode == 0, done.stderr
    took_s = float(done.stdout)
    assert LIMIT_S <= took_s < LIMIT_S + 2.0
    assert resolver_warning("n", "192.0.2.77", took_s).startswith(
        "node n: its resolver does not answer for its own address"
    )
