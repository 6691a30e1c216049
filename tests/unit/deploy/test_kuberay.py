"""The Kubernetes objects, as `kubectl apply -k` would send them: their schemas, and KubeRay's own rules."""

from __future__ import annotations

import copy
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from tests.unit.deploy.tools import BUILT, COMPONENTS, Object, built, errors_of, problems, with_components

FREE = {"labels", "annotations", "matchLabels", "rayStartParams", "requests", "limits", "nodeSelector", "data"}
"""Maps whose keys are names of one's own; what they refer to is checked in test_references.py."""


def clusters(documents: tuple[Object, ...]) -> Iterator[Object]:
    """Every RayCluster spec, a RayJob's too."""
    for document in documents:
        if document["kind"] == "RayCluster":
            yield document["spec"]
        if document["kind"] == "RayJob":
            yield document["spec"]["rayClusterSpec"]


def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], str]]:
    """(path, key) of every field that a schema names."""
    if isinstance(node, dict):
        for key, value in node.items():
            plain_selector = path[-1:] == ("selector",) and "matchLabels" not in node  # a Service's
            if path[-1:] not in [(name,) for name in FREE] and not plain_selector:
                yield path, key
            yield from places(value, (*path, key))
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from places(value, (*path, index))


def misspelled(document: Object, path: tuple[Any, ...], key: str) -> Object:
    made = copy.deepcopy(document)
    holder: Any = made
    for step in path:
        holder = holder[step]
    holder[f"{key}x"] = holder.pop(key)
    return made


@pytest.mark.parametrize("name", BUILT)
def test_every_object_is_what_its_kind_allows(name):
    documents = built(name)
    assert {f"{d['kind']} {d['metadata']['name']}": errors for d in documents if (errors := errors_of(d))} == {}
    assert {d["metadata"].get("namespace") for d in documents if d["kind"] != "Namespace"} == {"elastic-ring"}


@pytest.mark.slow
@pytest.mark.parametrize("name", [BUILT[0], *(pytest.param(name, marks=pytest.mark.slow) for name in BUILT[1:])])
def test_a_misspelled_field_is_refused_wherever_it_is(name):
    """Each field of each object once: where it comes more than once, at its first place in that object."""
    missed = []
    for document in built(name):
        first = {key: path for path, key in reversed(list(places(document)))}
        missed += [
            f"{document['kind']} {document['metadata']['name']}: {'/'.join(map(str, (*path, key)))}"
            for key, path in first.items()
            if next(problems(misspelled(document, path, key)), None) is None
        ]
    assert missed == []


def test_the_components_fit_together_and_into_the_schemas(tmp_path):
    documents = with_components(tmp_path, COMPONENTS)
    assert {f"{d['kind']} {d['metadata']['name']}": errors for d in documents if (errors := errors_of(d))} == {}
    (spec,) = clusters(documents)
    assert spec["gcsFaultToleranceOptions"]["backend"] == "rocksdb"
    assert not any("redis" in document["metadata"]["name"] for document in documents)
    first, second = (group["template"]["spec"]["containers"][0] for group in spec["workerGroupSpecs"])
    assert first == second, "spot workers are copied before everything is in the first group"
    assert weakened(documents) == []


def test_redis_reads_its_password_where_no_other_process_does(tmp_path):
    program = tmp_path / "redis-server"
    program.write_text('#!/bin/sh\necho "$@"\ncat\n')
    program.chmod(0o755)
    (redis,) = (one for one in built("kuberay/clusters/cpu") if one["kind"] == "StatefulSet")
    container = redis["spec"]["template"]["spec"]["containers"][0]
    variables = {"PATH": f"{tmp_path}:/usr/bin:/bin", "REDIS_PASSWORD": "hidden"}
    ran = subprocess.run(
        [*container["command"], *container["args"]],
        env=variables,
        capture_output=True,
        text=True,
        check=True,
        timeout=10,
    )
    arguments, *config = ran.stdout.splitlines()
    assert arguments == "--dir /data --appendonly yes --appendfsync always -"
    assert config == ['requirepass "hidden"']


@pytest.mark.parametrize("component", COMPONENTS)
def test_each_component_fits_alone(component, tmp_path):
    documents = with_components(tmp_path, (component,))
    assert [errors for document in documents if (errors := errors_of(document))] == []
    assert weakened(documents) == []


def weakened(documents: tuple[Object, ...]) -> list[str]:
    """What lets a pod do more than the namespace's profile `baseline`, or shows a secret in a process's arguments."""
    found = []
    for document in documents:
        if document["kind"] == "Namespace":
            found += [label for label, value in document["metadata"]["labels"].items() if value == "privileged"]
    for path, value in leaves(documents):
        if path[-1] in ("privileged", "allowPrivilegeEscalation", "hostNetwork", "hostPID", "hostIPC") and value:
            found.append("/".join(map(str, path)))
        if path[-2:-1] == ("add",) or path[-1] in ("hostPath", "hostPort"):
            found.append("/".join(map(str, path)))
        if {"args", "command"} & set(path) and "$(" in str(value):
            found.append("/".join(map(str, path)))
    return found


def leaves(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    inner = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list | tuple) else ()
    for key, value in inner:
        yield (*path, key), value
        yield from leaves(value, (*path, key))


def broken_rules(spec: Object) -> list[str]:
    """What KubeRay's operator refuses, or does not carry out, beyond its schema (its validation.go)."""
    groups = [("head", spec["headGroupSpec"]), *((g["groupName"], g) for g in spec["workerGroupSpecs"])]
    found = []
    for name, group in groups:
        pod = group["template"]["spec"]
        if spec["autoscalerOptions"]["version"] == "v2" and pod.get("restartPolicy", "Never") != "Never":
            found.append(f"{name}: restartPolicy with autoscaler v2")
        if group.get("resources") and {"num-cpus", "num-gpus"} & set(group["rayStartParams"]):
            found.append(f"{name}: resources and rayStartParams")
        if "labels" in group["rayStartParams"]:
            found.append(f"{name}: labels in rayStartParams")
        names = {variable["name"] for variable in pod["containers"][0]["env"]}
        found += [
            f"{name}: {own}"
            for own in names
            & {
                "RAY_AUTH_TOKEN",
                "RAY_AUTH_MODE",
                "RAY_REDIS_ADDRESS",
                "REDIS_PASSWORD",
                "RAY_gcs_storage",
                "RAY_enable_autoscaler_v2",
            }
        ]
        if not 0 <= group.get("minReplicas", 0) <= group.get("replicas", 0) <= group.get("maxReplicas", 0):
            found.append(f"{name}: replicas")
    tolerance = spec["gcsFaultToleranceOptions"]
    if tolerance.get("backend") == "rocksdb" and {"redisAddress", "redisPassword"} & set(tolerance):
        found.append("redis beside rocksdb")
    return found + (["upgradeStrategy"] if "upgradeStrategy" in spec else [])


@pytest.mark.parametrize("name", [name for name in BUILT if "kuberay" in name])
def test_the_operators_own_rules_are_kept(name):
    (spec,) = clusters(built(name))
    assert broken_rules(spec) == []
    wrong = copy.deepcopy(spec)
    wrong["headGroupSpec"]["template"]["spec"]["restartPolicy"] = "Always"
    wrong["workerGroupSpecs"][0]["minReplicas"] = 99
    assert len(broken_rules(wrong)) == 2
    for document in built(name):
        if document["kind"] in ("RayCluster", "RayJob"):
            assert len(document["metadata"]["name"]) <= 47
