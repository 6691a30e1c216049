"""Alert rules, dashboard and Prometheus's files: parsed by Prometheus's own tool, and naming what a run exports."""

from __future__ import annotations

import argparse
import json
import re
import runpy
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from ray.dashboard.modules.reporter.reporter_agent import METRICS_GAUGES

from deploy.drills import alert as drill_of
from deploy.drills.alerts import DRILLS
from deploy.drills.prometheus import faster, rule_of
from deploy.monitoring.make_dashboard import OF_RAY
from elastic_ring.config import ScalingConfig, StepConfig, check_together
from elastic_ring.faults import parse_faults
from elastic_ring.runtime.coordinator.folds.metrics_table import TABLE
from tests.unit.deploy.tools import DEPLOY, ROOT, program, promtool

MONITORING = DEPLOY / "monitoring"
RULES, RULES_TEST, DASHBOARD = (
    (MONITORING / name).read_text(encoding="utf-8") for name in ("rules.yml", "rules_test.yml", "dashboard.json")
)
METRIC = re.compile(r"\b(ray_\w+)(?:\{([^}]*)\})?")
MATCHER = re.compile(r'(cause|part)(?:=|=~|!=)\\?"([^"\\]*)\\?"')
SUFFIXES = ("_bucket", "_sum", "_count")


def unknown(text: str) -> Iterator[str]:
    """Metrics, and values of their labels, that a PromQL text names and no run exports."""
    table = {metric.exported_name: metric for metric in TABLE}
    for histogram in [metric for metric in TABLE if metric.kind == "histogram"]:
        table |= {histogram.exported_name + suffix: histogram for suffix in SUFFIXES}
    for name, matchers in METRIC.findall(text):
        if name in OF_RAY or name == "ray_cluster":
            continue
        if name not in table:
            yield name
            continue
        for label, values in MATCHER.findall(matchers):
            if label not in table[name].labels:
                yield f"{name}{{{label}}}"
            closed = table[name].values
            if not isinstance(closed, str):
                yield from (f"{name}: {value}" for value in values.split("|") if value not in closed)


def alerts() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES)["groups"] for rule in group["rules"]]


def expressions(node: Any) -> Iterator[str]:
    """Every PromQL expression of the dashboard."""
    if isinstance(node, dict):
        yield from ([node["expr"]] if "expr" in node else [])
        node = list(node.values())
    if isinstance(node, list):
        for part in node:
            yield from expressions(part)


def test_the_rules_are_what_prometheus_accepts():
    checked = promtool("check", "rules", MONITORING / "rules.yml")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert f"{len(alerts())} rules found" in checked.stdout


def test_each_alert_fires_when_it_should_and_a_healthy_run_is_silent():
    tested = promtool("test", "rules", MONITORING / "rules_test.yml")
    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_a_rule_whose_limit_is_wrong_is_caught_by_the_rules_tests(tmp_path):
    assert RULES.count("> 0.91") == 1
    (tmp_path / "rules.yml").write_text(RULES.replace("> 0.91", "> 0.98"))
    tests = yaml.safe_load(RULES_TEST)
    tests["tests"] = [test for test in tests["tests"] if test["name"] == "capacity"]
    (tmp_path / "rules_test.yml").write_text(yaml.safe_dump(tests))
    tested = promtool("test", "rules", tmp_path / "rules_test.yml")
    assert tested.returncode == 1
    assert "ElasticRingMemoryPressure" in tested.stderr


def test_every_alert_has_a_test_in_which_it_fires_a_section_in_the_runbook_and_a_severity():
    cases = [case for test in yaml.safe_load(RULES_TEST)["tests"] for case in test.get("alert_rule_test", ())]
    fired = {case["alertname"] for case in cases if case.get("exp_alerts")}
    names = [alert["alert"] for alert in alerts()]
    assert fired == set(names)
    runbook = (ROOT / "docs" / "runbook.md").read_text(encoding="utf-8")
    sections = re.findall(r"^### (ElasticRing\w+)\n\n(.*?)(?=^##|\Z)", runbook, re.MULTILINE | re.DOTALL)
    assert [name for name, _ in sections] == names
    for name, section in sections:
        assert re.findall(r"^- \*\*([\w ]+)\*\*:", section, re.MULTILINE) == ["Means", "Look at", "Do"], name
    for alert in alerts():
        assert alert["annotations"]["runbook"] == f"docs/runbook.md#{alert['alert'].lower()}"
        assert alert["labels"]["severity"] in ("page", "ticket")


def test_the_runbook_names_the_alerts_that_have_no_drill():
    runbook = (ROOT / "docs" / "runbook.md").read_text(encoding="utf-8")
    named = re.findall(r"`(ElasticRing\w+)`", runbook[: runbook.index("\n## ")])
    assert named == [alert["alert"] for alert in alerts() if alert["alert"] not in DRILLS] != []


def test_the_rules_of_the_drills_are_accepted_by_prometheus_and_have_shorter_times(tmp_path):
    for name, drill in DRILLS.items():
        measured = drill.measured() if drill.measured is not None and not drill.gpus else ()
        rule = faster(rule_of(RULES, name), drill.speed, (*drill.constants, *measured))
        assert not re.search(r"\d[mh]\b", rule), rule
        assert drill.gpus == 0 or "cuda" in drill.train or "ray_node_gpu" in rule
        (tmp_path / f"{name}.yml").write_text(f"groups:\n  - name: drill\n    rules:\n{rule}")
    checked = promtool("check", "rules", *sorted(tmp_path.glob("*.yml")))
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_a_drill_without_its_gpus_is_refused_and_its_fault_too(monkeypatch):
    monkeypatch.setattr(drill_of, "num_gpus", lambda: 1)
    monkeypatch.setattr(drill_of.shutil, "which", lambda program: program)
    options = argparse.Namespace(rules=str(ROOT / "deploy" / "monitoring" / "rules.yml"))
    with pytest.raises(ValueError, match=r"ElasticRingHopLatency needs 2 GPU\(s\), and this machine has 1"):
        drill_of.fires("ElasticRingHopLatency", options)
    with pytest.raises(ValueError, match="poison@step=1,phase=idle,rank=0: only a GPU has such a fault"):
        check_together(ScalingConfig(), StepConfig(), parse_faults("poison@step=1"))


def test_a_drills_rule_is_refused_where_the_rule_has_changed():
    rule = rule_of(RULES, "ElasticRingNoProgress")
    assert "20 * max" in faster(rule, 60.0, [("600", "10")])
    with pytest.raises(ValueError, match="'601' 0 times"):
        faster(rule, 60.0, [("601", "10")])
    with pytest.raises(ValueError, match="no alert 'ElasticRingNothing'"):
        rule_of(RULES, "ElasticRingNothing")


@pytest.mark.parametrize("text", [RULES, RULES_TEST, DASHBOARD], ids=["rules", "rules_test", "dashboard"])
def test_every_metric_and_label_that_is_asked_for_is_exported(text):
    assert METRIC.search(text)
    assert list(unknown(text)) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("max(ray_elastic_ring_los)", ["ray_elastic_ring_los"]),
        ('ray_elastic_ring_phase{part="runing"}', ["ray_elastic_ring_phase: runing"]),
        ('ray_elastic_ring_recoveries{run="r", part="died"}', ["ray_elastic_ring_recoveries{part}"]),
        ("ray_node_mem", ["ray_node_mem"]),
        ('ray_elastic_ring_phase{part=~"ended|forming"} and ray_node_mem_used', []),
    ],
)
def test_the_search_for_unknown_metrics_finds_a_planted_one(text, found):
    assert list(unknown(text)) == found


def test_rays_own_metrics_are_those_of_the_installed_ray():
    assert [name for name in OF_RAY if name.removeprefix("ray_") not in METRICS_GAUGES] == []


def test_the_dashboard_is_what_the_script_makes_of_the_table():
    made = runpy.run_path(str(MONITORING / "make_dashboard.py"))["build"]()
    assert made == DASHBOARD, "run deploy/monitoring/make_dashboard.py"


def test_every_metric_is_on_the_dashboard_and_every_expression_is_parsed_by_prometheus(tmp_path):
    asked = list(expressions(json.loads(DASHBOARD)))
    text = "\n".join(asked)
    assert [name for name in [*(m.exported_name for m in TABLE), *OF_RAY] if not re.search(rf"\b{name}", text)] == []
    rules = [{"record": f"panel:{index}", "expr": one} for index, one in enumerate(asked)]
    (tmp_path / "panels.yml").write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    checked = promtool("check", "rules", tmp_path / "panels.yml")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    (tmp_path / "panels.yml").write_text(
        yaml.safe_dump({"groups": [{"name": "x", "rules": [{"record": "a", "expr": asked[0] + ")"}]}]})
    )
    assert promtool("check", "rules", tmp_path / "panels.yml").returncode == 1


@pytest.mark.parametrize("name", ["prometheus.yml", "prometheus-hosts.yml"])
def test_prometheus_accepts_its_configuration_and_refuses_a_misspelled_one(name, tmp_path):
    checked = promtool("check", "config", MONITORING / name)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    typo = (MONITORING / name).read_text(encoding="utf-8").replace("scrape_interval", "scrape_intervall")
    (tmp_path / name).write_text(typo)
    assert promtool("check", "config", "--syntax-only", tmp_path / name).returncode == 1


def test_alertmanager_accepts_its_configuration_and_every_alert_that_it_names_is_there():
    file = MONITORING / "alertmanager.yml"
    amtool = program("amtool", "prometheus-alertmanager")
    checked = subprocess.run([amtool, "check-config", str(file)], capture_output=True, text=True, timeout=60)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    inhibited = yaml.safe_load(file.read_text(encoding="utf-8"))["inhibit_rules"]
    matchers = [m for rule in inhibited for kind in ("source_matchers", "target_matchers") for m in rule[kind]]
    names = [re.compile(matcher.split("=", 1)[1].lstrip("~ ").strip('"')) for matcher in matchers]
    known = [alert["alert"] for alert in alerts()]
    assert names
    for pattern in names:
        options = re.sub(r"^ElasticRing\((.*)\)$", r"\1", pattern.pattern).split("|")
        assert sum(bool(pattern.fullmatch(name)) for name in known) == len(options), pattern.pattern
