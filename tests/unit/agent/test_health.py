"""What an agent makes of its node's counters: sums over interfaces and ports, and which GPU gets worse.

What NVML itself answers is tested on GPUs (tests/gpu/test_health_on_gpu.py).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_ring.runtime.agent.health import (
    INFINIBAND_KEYS,
    LIMIT_S,
    HealthThread,
    Nvml,
    infiniband_counters,
    is_of_the_device,
    is_slowed,
    lookup_s,
    network_counters,
    resolver_warning,
    worse,
)

WELL = {"temperature_celsius": 60.0, "ecc_errors": 2.0, "remapped_rows": 1.0, "needs_reset": 0.0, "xid_errors": 0.0}


def test_the_kernels_counters_of_this_node_are_read() -> None:
    found = network_counters()
    assert found["errors"] >= 0
    assert found["drops"] >= 0


def test_ports_of_infiniband_are_summed_and_a_counter_that_a_driver_lacks_counts_as_none(tmp_path: Path) -> None:
    for port, values in (("mlx5_0/ports/1", (1, 2, 100)), ("mlx5_1/ports/1", (3, 4, 200))):
        folder = tmp_path / "sys/class/infiniband" / port / "counters"
        folder.mkdir(parents=True)
        names = ("symbol_error", "link_downed", "port_xmit_data")
        for name, value in zip(names, values, strict=True):
            (folder / name).write_text(f"{value}\n")
    (tmp_path / "sys/class/infiniband/mlx5_0/ports/1/counters/port_rcv_data").write_text("N/A (no PMA)\n")
    assert infiniband_counters(tmp_path) == dict(zip(INFINIBAND_KEYS, (10, 0, 1200, 0), strict=True))
    assert infiniband_counters(tmp_path / "elsewhere") == {}


def test_a_gpu_whose_counters_rise_is_told_once_and_others_are_not() -> None:
    told: list[str] = []
    health = HealthThread(told.append, lambda: {"errors": 0})
    bad = {**WELL, "ecc_errors": 4.0, "needs_reset": 1.0}
    health.look({"0": {**WELL, "ecc_errors": 0.0, "remapped_rows": 0.0}, "1": WELL})
    assert told == [
        "GPU 1 has 2 uncorrected memory error(s), 1 remapped memory row(s) from before: it may fail; look at dmesg and "
        "nvidia-smi -q"
    ]
    health.look({"0": {**WELL, "ecc_errors": 0.0, "remapped_rows": 0.0, "temperature_celsius": 91.0}, "1": bad})
    health.look({"0": {**WELL, "ecc_errors": 0.0, "remapped_rows": 0.0}, "1": bad})
    assert told[1:] == [
        "GPU 1 has 2 uncorrected memory error(s), 1 memory row(s) to remap that wait for a reset, or cannot be "
        "remapped since the last look: it may fail; look at dmesg and nvidia-smi -q"
    ]
    assert health.take() == {"network": {"errors": 0}, "gpus": health._gpus}
    assert health.take() is None


def test_a_counter_that_began_anew_is_no_rise() -> None:
    assert worse({"0": WELL}, {"0": {**WELL, "ecc_errors": 0.0}}) == []
    assert worse({"0": WELL}, {"0": {**WELL, "xid_errors": 1.0}}) == [
        "GPU 0 has 1 Xid error(s) since the last look: it may fail; look at dmesg and nvidia-smi -q"
    ]


def test_a_programs_own_faults_say_nothing_of_its_gpu() -> None:
    assert [xid for xid in (13, 31, 43, 45, 48, 63, 64, 74, 79, 95, 119) if is_of_the_device(xid)] == [
        48,
        63,
        64,
        74,
        79,
        95,
        119,
    ]


@pytest.mark.parametrize(("reasons", "slowed"), [(0x0, False), (0x1, False), (0x4, False), (0x8, True), (0x44, True)])
def test_heat_and_hardware_slow_a_gpu_down_and_idling_and_power_limits_do_not(reasons: int, slowed: bool) -> None:
    assert is_slowed(reasons) is slowed


def test_a_node_without_a_gpu_has_nothing_to_tell() -> None:
    nvml = Nvml()
    if nvml.open():
        pytest.skip("this node has a GPU; tests/gpu/test_health_on_gpu.py reads it")
    assert nvml.read() == {}
    assert not nvml.wait(0.0)


# ------------------------------------------------------------ the resolver


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
