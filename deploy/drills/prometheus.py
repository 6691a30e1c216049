"""Alert rules in a real Prometheus of a drill's own: most often one, with shorter times, since a drill cannot last as a
real fault does.

The rule is the text of rules.yml. Its durations are divided by the drill's speed, and so are the constants in seconds
that the drill names; limits of other kinds stay, but where the drill says so.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from deploy.drills.local_cluster import HOST
from deploy.drills.processes import MARK
from elastic_ring.config import environment
from elastic_ring.files import plain_json
from elastic_ring.runtime.coordinator.folds.metrics_table import PREFIX

SECONDS = {"s": 1, "m": 60, "h": 3600}
ANSWER_S = 10.0


def rule_of(text: str, alert: str) -> str:
    """The lines of one alert in rules.yml. Raises ValueError where there is none."""
    found = re.search(rf"^( *)- alert: {re.escape(alert)}\n(?:\1  .*\n)+", text, re.MULTILINE)
    if found is None:
        raise ValueError(f"there is no alert {alert!r} in the rules")
    return found.group(0)


def faster(rule: str, speed: float, constants: Sequence[tuple[str, str]]) -> str:
    """The rule with all durations divided by `speed`, whole seconds and 1 s at least, and `constants` replaced.

    Raises ValueError where a constant is not in the rule exactly once: it would be another alert's drill.
    """
    for old, new in constants:
        if rule.count(old) != 1:
            raise ValueError(f"the rule has {old!r} {rule.count(old)} times, and the drill replaces one:\n{rule}")
        rule = rule.replace(old, new)

    def divided(found: re.Match[str]) -> str:
        return f"{max(1, round(int(found[1]) * SECONDS[found[2]] / speed))}s"

    return re.sub(r"(?<=[\[: ])(\d+)([smh])(?=[\]:)\n ])", divided, rule)


class Prometheus:
    """A Prometheus that reads `targets` and judges `rule`, one or a whole file of them, `every` so often. Use as a
    context."""

    def __init__(
        self,
        folder: Path,
        port: int,
        targets: Sequence[str],
        rule: str,
        token: str,
        alertmanager: str = "",
        every: str = "1s",
    ) -> None:
        """`alertmanager`: HOST:PORT of the one that is told; nobody if empty."""
        self._folder, self._token = folder, token
        self._targets, self._rule, self._alertmanager = list(targets), rule, alertmanager
        self._port, self._every = port, every
        self.url = f"http://{HOST}:{port}"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Prometheus:
        rules = self._write(self._rule)
        # JSON is YAML.
        (self._folder / "prometheus.yml").write_text(
            json.dumps(
                {
                    "global": {"scrape_interval": self._every, "evaluation_interval": self._every},
                    "rule_files": [str(rules)],
                    "scrape_configs": [{"job_name": "ray", "static_configs": [{"targets": self._targets}]}],
                    **(
                        {"alerting": {"alertmanagers": [{"static_configs": [{"targets": [self._alertmanager]}]}]}}
                        if self._alertmanager
                        else {}
                    ),
                }
            )
        )
        program = shutil.which("prometheus")
        if program is None:
            raise ValueError("the program prometheus is not installed (Debian: apt install prometheus)")
        with (self._folder / "prometheus.log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    program,
                    f"--config.file={self._folder}/prometheus.yml",
                    f"--storage.tsdb.path={self._folder}/data",
                    f"--web.listen-address={HOST}:{self._port}",
                ],
                env={**environment(), MARK: self._token},
                stdout=log,
                stderr=log,
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def replace(self, rule: str) -> None:
        """Have it read another rule."""
        self._write(rule)
        if self._process is not None:
            self._process.send_signal(signal.SIGHUP)

    def _write(self, rule: str) -> Path:
        path = self._folder / "rules.yml"
        is_file = any(line.startswith("groups:") for line in rule.splitlines())
        path.write_text(rule if is_file else f"groups:\n  - name: drill\n    rules:\n{rule}")
        return path

    def alert(self) -> dict[str, Any] | None:
        """The first alert that waits or fires, as Prometheus tells it; None while there is none, or it still starts."""
        if self._process is None or self._process.poll() is not None:
            raise SystemExit(f"drill: prometheus ended; it said:\n{self._said()}")
        found: list[dict[str, Any]] = self._ask("alerts").get("alerts", [])
        firing = [one for one in found if one["state"] == "firing"]
        return next(iter([*firing, *found]), None)

    def sees(self, run: str) -> bool:
        """Whether it has read that the run trains: a metric's first value comes some 10 s after the coordinator."""
        return bool(self.query(f'{PREFIX}elastic_ring_phase{{run="{run}", part="running"}} == 1'))

    def query(self, promql: str) -> list[dict[str, Any]]:
        """The samples that it answers with."""
        return list(self._ask(f"query?query={quote(promql)}").get("result", []))

    def num_rules(self) -> int:
        """How many rules it has judged without an error."""
        groups = self._ask("rules").get("groups", [])
        return sum(rule["health"] == "ok" for group in groups for rule in group["rules"])

    def _ask(self, what: str) -> dict[str, Any]:
        """{} while it still starts."""
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/{what}", timeout=ANSWER_S) as answer:
                told: dict[str, Any] = plain_json(answer.read())["data"]
        except OSError:
            return {}
        return told

    def _said(self) -> str:
        return (self._folder / "prometheus.log").read_text(errors="replace")[-2000:]
