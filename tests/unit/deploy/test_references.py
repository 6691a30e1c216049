"""What the manifests name is there: services, ports, claims, secrets, labels, flags, settings, variables, images."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from functools import cache
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
from tests.unit.deploy.tools import BUILT, COMPONENTS, DEPLOY, ROOT, Object, built, everything, with_components

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


def test_every_service_leads_to_a_port_of_its_pods() -> None:
    for name, service in named("Service").items():
        found = chosen(service["spec"]["selector"])
        assert found, name
        for port in service["spec"]["ports"]:
            for pod in found:
                known = {p["name"]: p["containerPort"] for c in pod["containers"] for p in c["ports"]}
                assert known.get(port["targetPort"]) == port["port"], (name, port, known)


def test_every_address_in_a_manifest_is_a_service_and_its_port() -> None:
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


def test_claims_secrets_and_mounts_are_there() -> None:
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


def test_policies_and_budgets_choose_pods_that_exist_and_open_ports_that_they_have() -> None:
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


def test_workers_spread_by_labels_that_they_have() -> None:
    for name, labels, pod in pods():
        for constraint in pod.get("topologySpreadConstraints", ()):
            assert constraint["labelSelector"]["matchLabels"].items() <= labels.items(), name


# ---------------------------------------------------------------- what Ray and elastic_ring are told


@pytest.mark.parametrize("name", [name for name in BUILT if "kuberay" in name])
def test_ray_start_knows_every_parameter_and_metrics_are_where_prometheus_looks(name: str) -> None:
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


def test_every_variable_for_ray_is_one_of_its_settings_and_none_is_overridden(tmp_path: Path) -> None:
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


def test_labels_of_worker_groups_are_those_that_ray_knows(tmp_path: Path) -> None:
    (spec,) = clusters(with_components(tmp_path, COMPONENTS))
    labels = [group["labels"] for group in spec["workerGroupSpecs"]]
    assert labels == [{ray._raylet.RAY_NODE_MARKET_TYPE_KEY: "on-demand"}, {"ray.io/market-type": "spot"}]


def test_the_drain_hook_is_a_command_and_ends_before_the_pod_is_killed(capsys: pytest.CaptureFixture[str]) -> None:
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
def test_every_training_parses_and_writes_where_all_nodes_see_it(where: str, words: list[str]) -> None:
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


def test_with_an_object_store_no_volume_is_shared_and_every_ray_pod_has_the_credentials(tmp_path: Path) -> None:
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
def test_the_largest_mesh_of_a_job_fits_the_most_workers_of_its_cluster(job: str) -> None:
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
def test_the_images_have_what_the_project_asks_for(name: str) -> None:
    text = dockerfile(name)
    assert wrong_with(text) == []
    assert wrong_with(text.replace("COPY jobs jobs", "COPY job jobs")) == ["COPY job"]
    assert wrong_with(text.replace("torch>=2.11", "torch>=2.10")) == ["torch>=2.10,<2.14"]
    assert not re.search(r"^ENTRYPOINT", text, re.MULTILINE)
    (user,) = re.findall(r"^USER (\d+)$", text, re.MULTILINE)
    assert re.search(rf"useradd --uid {user} ", text)
    users = {pod["securityContext"]["runAsUser"] for _, _, pod in pods() if pod["containers"][0]["name"][:4] == "ray-"}
    assert users == {int(user)}
    (python,) = re.findall(r"^ARG BASE=python:(\d+\.\d+)-", text, re.MULTILINE)
    assert f"Programming Language :: Python :: {python}" in PROJECT["classifiers"]
    (asked,) = [Requirement(one) for one in PROJECT["dependencies"] if Requirement(one).name == "ray"]
    assert asked.specifier.contains(ray_of_images())


def test_the_images_packages_are_locked_to_versions_that_the_project_allows() -> None:
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


def test_manifests_and_pages_name_the_images_of_this_version() -> None:
    tags = {tag.format(PROJECT["version"]) for tag in IMAGES.values()}
    asked = {image for d in everything() for image in values(d, "image") if image.startswith("elastic-ring")}
    assert asked == tags
    assert dict(re.findall(r"docker build -f deploy/docker/(\S+) -t (\S+)", README)) == {
        name: tag.format(PROJECT["version"]) for name, tag in IMAGES.items()
    }
    assert set(re.findall(r"elastic-ring:[\w.-]+", README)) - {f"elastic-ring:{PROJECT['version']}."} <= tags


# ---------------------------------------------------------------- the page


def test_the_page_explains_every_object_and_component_and_names_no_other() -> None:
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


def test_the_road_to_the_cluster_has_the_names_that_the_operator_gives() -> None:
    """The head's service is NAME-head-svc, the token's secret NAME with the key auth_token."""
    (name,) = named("RayCluster")
    assert f"port-forward service/{name}-head-svc 8265:8265" in README
    assert f"get secret {name} -o jsonpath='{{.data.auth_token}}'" in README


def test_every_path_that_the_page_names_is_there() -> None:
    named_paths = re.findall(r"deploy/[\w./-]*[\w]", README)
    assert len(named_paths) >= 8
    assert [path for path in named_paths if not (ROOT / path).exists()] == []
