"""The quickstart's commands on two hosts of one machine, each with a home of its own: an open cluster trains, is
switched to a token, and the same submission goes on from the newest checkpoint.

In namespaces: `ray stop` ends every Ray that it sees, and hosts have a /tmp/ray of their own, in which each deletes
what its own jobs need no more.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from ray._private.services import resolve_ip_for_localhost

from elastic_ring.cli.endings import COMPLETE
from elastic_ring.monitor.metrics import read_metrics
from tests.ray.conftest import ROOT, ran

PORT, DASHBOARD = 7491, 9491
NUM_STEPS = 150
OWN = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "bash", "-euc")
SCRIPT = """
mkdir -p $HOMES/first $HOMES/second $HOMES/stranger
at() {{ local home=$1; shift; HOME=$HOMES/$home unshare --mount bash -euc "mount -t tmpfs none /tmp/ray; $*"; }}
asks() {{ at stranger 'ray status --address=$HEAD >/dev/null 2>&1 && echo "let in" || echo refused'; }}

at first 'RAY_AUTH_MODE=disabled {start_first}'
at second 'RAY_AUTH_MODE=disabled {start_second}'
echo "open: $(asks)"
at second 'export RAY_AUTH_MODE=disabled; until {submit} --submission-id one --no-wait {command}; do sleep 1; done'
timeout 120 bash -c 'until [ $(cat $RUN/metrics.jsonl 2>/dev/null | wc -l) -gt 25 ]; do sleep 0.2; done'
at second 'RAY_AUTH_MODE=disabled ray job stop one'
ray stop

at first '{first_block}'
at second 'RAY_AUTH_MODE=token {start_second}' >/dev/null 2>&1 && echo "joined without the token"
at second '{second_block}'
echo "switched: $(asks)"
at second 'for try in $(seq 20); do ({third_block}) && break; sleep 3; done'
ls -l $HOMES/first/.ray/auth_token $HOMES/second/.ray/auth_token
ray stop
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.soak
def test_an_open_cluster_of_two_hosts_is_switched_to_one_token_and_its_run_goes_on(tmp_path):
    if subprocess.run([*OWN[:-2], "true"], check=False).returncode:
        pytest.skip("this user may not make namespaces")
    page = (ROOT / "docs" / "quickstart.md").read_text()
    (block,) = re.findall(r"```\n(\(umask 077; ray get-auth-token.*?)```", page, re.DOTALL)
    first, homes, run = resolve_ip_for_localhost("127.0.0.1"), tmp_path / "homes", tmp_path / "demo"
    start_first = f"ray start --head --num-cpus=1 --port={PORT} --dashboard-port={DASHBOARD}"
    start_second = f"ray start --address={first}:{PORT} --num-cpus=1"
    command = (
        f"-- python jobs/train_1t.py --run-name demo --run-dir {run} --dp 1 --cp 2 --spares 0 --cpus-per-worker 1 "
        f"--context 256 --checkpoint-every-steps 10 --faults none --global-batch 2 --steps {NUM_STEPS}"
    )
    submit = "ray job submit --working-dir ."
    here = {
        "ray start --head": start_first,
        "ray start --address=FIRST:6379": start_second,
        "ssh FIRST cat .ray/auth_token": f"cat {homes}/first/.ray/auth_token",
        "-- python jobs/train_1t.py --run-name demo --run-dir /shared/runs/demo": command,
    }
    for written, tried in here.items():
        assert block.count(written) == 1, f"the quickstart has another command than {written!r}"
        block = block.replace(written, tried)
    first_block, second_block, third_block = block.split("\n\n")
    script = SCRIPT.format(
        start_first=start_first,
        start_second=start_second,
        submit=submit,
        command=command,
        first_block=first_block,
        second_block=second_block,
        third_block=third_block,
    )
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{DASHBOARD}",
        "HOMES": str(homes),
        "HEAD": f"{first}:{PORT}",
        "RUN": str(run),
    }
    Path("/tmp/ray").mkdir(exist_ok=True)
    done = ran(*OWN, script, cwd=ROOT, env=environment, timeout_s=400.0)
    said = done.stdout
    assert "open: let in" in said
    assert "joined without the token" not in said
    assert "switched: refused" in said
    assert said.count("-rw-------") == 2
    (resumed,) = re.findall(r"resumes at step (\d+)", said) or [said[-3000:] + done.stderr[-3000:]]
    assert int(resumed) >= 20, "the newest checkpoint before the switch is taken"
    assert [line["step"] for line in read_metrics(run)] == list(range(NUM_STEPS))
    assert "bit-exact" in said


JOINED = """
mkdir -p /tmp/ray && mount -t tmpfs none /tmp/ray
echo 127.0.0.1:1 > /tmp/ray/ray_current_cluster  # of a cluster that was killed
{python} -m ray.scripts.scripts start --head --num-cpus=2 --port={port} --temp-dir={folder} --include-dashboard=false
{python} -m elastic_ring drain --node-id 00 || echo "drain: $?"
{python} -m elastic_ring train --run-dir run --dp 1 --cp 1 --spares 0 --context 64 --faults none --steps 3 | tee out
echo "its last line: $(tail -n 1 out)"
{python} -m ray.scripts.scripts stop --force
"""


@pytest.mark.slow
def test_a_cluster_that_ray_start_began_in_another_folder_is_joined_by_every_command(tmp_path):
    """In namespaces of its own, where no other Ray runs; with what Ray remembers of a cluster that is gone."""
    if subprocess.run([*OWN[:-2], "true"], check=False).returncode:
        pytest.skip("this user may not make namespaces")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0", "HOME": str(tmp_path)}
    address = f"{resolve_ip_for_localhost('127.0.0.1')}:{PORT}"
    with tempfile.TemporaryDirectory() as folder:  # with a short name, as Ray's sockets want it
        script = JOINED.format(python=sys.executable, port=PORT, folder=folder)
        done = ran(*OWN, script, cwd=tmp_path, env=environment)
    text = done.stdout + done.stderr
    assert "Ray lists no such node" in text
    assert "drain: 2" in text
    assert f"its last line: {COMPLETE.begins}" in text
    assert f"joined the Ray at {address}" in text
    assert "3 steps, loss " in text
