"""The drill `alert`: a small real run with a planted fault, until a real Prometheus says that the alert fires."""

from __future__ import annotations

import argparse
import logging
import re
import secrets
import shutil
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any

from deploy.drills.alerts import DRILLS, SMALL, AlertDrill
from deploy.drills.local_cluster import LocalCluster, free_ports
from deploy.drills.planted import Scene
from deploy.drills.processes import start_training
from deploy.drills.prometheus import Prometheus, faster, rule_of
from elastic_ring.config import RunConfig
from elastic_ring.runtime.agent.health import Nvml

log = logging.getLogger(__name__)

FIRES_S = 240.0
TERMINATED = 143
ALL = "all"
LOOK_S = 0.5


def alert(options: argparse.Namespace) -> int:
    """Exit status 0 once the alert fires, 1 when it does not within FIRES_S. Raises ValueError for what is missing."""
    if options.alert == ALL:
        return every_alert(options)
    fired_s = fires(options.alert, options)
    return 0 if fired_s is not None else 1


def every_alert(options: argparse.Namespace) -> int:
    """Every drill, one after the other; prints after how many seconds each alert fired; returns 1 if one did not."""
    took: dict[str, float | None] = {}
    for name, drill in DRILLS.items():
        if drill.gpus > num_gpus():
            log.info("%s is left out: it needs %d GPU(s)", name, drill.gpus)
            continue
        try:
            took[name] = fires(name, options)
        except SystemExit as error:  # the others can still be tried
            if error.code == TERMINATED:
                raise
            print(error)
            took[name] = None
    lines = [f"| {name} | {'did not fire' if s is None else f'{s:.0f}'} |" for name, s in took.items()]
    print("\n".join(["| alert | seconds from the planted fault until it fires |", "|---|---|", *lines]))
    return 0 if None not in took.values() else 1


def num_gpus() -> int:
    """Of this machine, as NVML tells."""
    nvml = Nvml()
    return len(nvml.read()) if nvml.open() else 0


def fires(name: str, options: argparse.Namespace) -> float | None:
    """Seconds from the planted fault, or else from the run's start, until the alert fires; None if it does not."""
    if name not in DRILLS:
        raise ValueError(f"there is no drill for the alert {name!r}: give {ALL} or one of {', '.join(DRILLS)}")
    rules = Path(options.rules)
    if not rules.is_file():
        raise ValueError(f"--rules {rules}: there is no such file; give deploy/monitoring/rules.yml of the project")
    if shutil.which("prometheus") is None:
        raise ValueError("the program prometheus is not installed (Debian: apt install prometheus)")
    try:
        import_module("ray.dashboard.optional_deps")  # without them Ray's agent serves no metrics, and says nothing
    except ImportError as error:
        raise ValueError(f"Ray serves no metrics here ({error}): pip install 'ray[default]'") from None
    drill = DRILLS[name]
    if drill.gpus > num_gpus():
        raise ValueError(f"the drill of {name} needs {drill.gpus} GPU(s), and this machine has {num_gpus()}")
    rule = faster(rule_of(rules.read_text(), name), drill.speed, drill.constants)
    log.info("%s: %s; the rule's times are divided by %g", name, drill.plants, drill.speed)
    with tempfile.TemporaryDirectory(prefix="er-", ignore_cleanup_errors=True) as folder, ExitStack() as stack:
        return _watch(name, drill, rule, Path(folder), options, stack)


def _watch(
    name: str, drill: AlertDrill, rule: str, folder: Path, options: argparse.Namespace, stack: ExitStack
) -> float | None:
    """The run, its fault, and what Prometheus says of it."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))  # what the drill has started ends with it
    stack.callback(signal.signal, signal.SIGTERM, before)
    token = secrets.token_hex(8)
    run = RunConfig(name=f"{name}-{secrets.token_hex(2)}", storage_path=options.storage_path)
    cluster = stack.enter_context(LocalCluster(folder / "ray", drill.cpus, token))
    (port,) = free_ports(1)
    prometheus = stack.enter_context(
        Prometheus(folder, port, cluster.metrics, rule, token, alertmanager=options.alertmanager)
    )
    prepared = drill.prepare(folder) if drill.prepare is not None else ()
    arguments = [
        *SMALL,
        *drill.train,
        *prepared,
        *options.train,
        "--run-name",
        run.name,
        "--storage-path",
        options.storage_path,
    ]
    training = start_training(arguments, folder / "train.log", token, cluster.variables)
    scene = Scene(run, cluster, training, token)
    stack.callback(training.wait)  # left in reverse: first the scene ends, then everything is killed
    stack.callback(cluster.__exit__)
    stack.callback(scene.over.set)
    if drill.plant is not None:
        _plant(name, drill, rule, scene, prometheus, folder / "train.log")
    begun_s, told = time.monotonic(), _fires(prometheus, folder / "train.log", training)
    if told is None:
        print(f"{name} has not fired within {FIRES_S:.0f} s; the run: {run.folder}")
        return None
    took_s = time.monotonic() - begun_s
    log.info("fires %.0f s later", took_s)
    print(_said(name, told, run, Path(options.rules)))
    if options.hold_s:
        print(f"for {options.hold_s:g} s: {prometheus.url}/alerts", flush=True)
        time.sleep(options.hold_s)
    return took_s


def _plant(name: str, drill: AlertDrill, rule: str, scene: Scene, prometheus: Prometheus, said: Path) -> None:
    """Once the run trains, Prometheus sees it, and the alert is silent."""
    if drill.after_steps:
        try:
            scene.until("the first steps", lambda: scene.num_steps() >= drill.after_steps)
            scene.until("that Prometheus sees the run", lambda: prometheus.sees(scene.run.name))
        except SystemExit as error:
            raise SystemExit(f"{error}\n{said.read_text(errors='replace')[-2000:]}") from None
        if (early := prometheus.alert()) is not None and early["state"] == "firing":
            raise SystemExit(f"drill: {name} fires before anything is planted: a false alarm")
    assert drill.plant is not None
    if drill.measured is not None:
        prometheus.replace(faster(rule, 1.0, drill.measured()))
    drill.plant(scene)
    log.info("planted after %d steps", scene.num_steps())


def _fires(prometheus: Prometheus, said: Path, training: Any) -> dict[str, Any] | None:
    """The alert once it fires."""
    deadline, refused = time.monotonic() + FIRES_S, False
    while time.monotonic() < deadline:
        found = prometheus.alert()
        if found is not None and found["state"] == "firing":
            return found
        if training.poll() == 2 and not refused:
            raise SystemExit(f"drill: the run was refused:\n{said.read_text(errors='replace')[-2000:]}")
        time.sleep(LOOK_S)
    return None


def _said(name: str, fired: dict[str, Any], run: RunConfig, rules: Path) -> str:
    """What fired, and what the runbook says to look at."""
    notes = fired["annotations"]
    lines = [f"{name} fires: {notes['summary']}", f"severity: {fired['labels']['severity']}"]
    page = rules.resolve().parents[2] / notes["runbook"].partition("#")[0]
    section = re.search(rf"^### {name}\n(.*?)(?=^##|\Z)", page.read_text(), re.M | re.S) if page.is_file() else None
    lines += re.findall(r"^- \*\*(?:Look at|Do)\*\*.*?(?=^- |\Z)", section[1], re.M | re.S) if section else []
    status = f"elastic-ring status {run.folder}"
    return "\n".join([*(line.rstrip() for line in lines), f"runbook: {notes['runbook']}", f"the run: {status}"])
