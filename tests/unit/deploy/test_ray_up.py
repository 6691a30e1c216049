"""The files for `ray up`: Ray's own validator, unknown fields refused, commands as `ray start` knows them."""

from __future__ import annotations

import copy
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import botocore.session
import pytest
import ray.autoscaler
import yaml
from botocore.validate import ParamValidator
from click import ClickException
from jsonschema import Draft7Validator, ValidationError
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.scripts.scripts import start

from tests.unit.deploy.tools import DEPLOY, strict

FILES = ("aws", "gcp", "local")
SCHEMA = json.loads((Path(ray.autoscaler.__file__).parent / "ray-schema.json").read_text(encoding="utf-8"))
PROVIDER = {
    "aws": {"type", "region", "availability_zone", "cache_stopped_nodes", "use_internal_ips"},
    "gcp": {"type", "region", "availability_zone", "project_id"},
    "local": {"type", "head_ip", "worker_ips"},
}
"""What these providers of Ray's read; Ray's schema lets them have anything."""


def read(name: str) -> Any:
    return yaml.safe_load((DEPLOY / "ray-up" / f"{name}.yaml").read_text(encoding="utf-8"))


def problems(name: str, config: Any) -> Iterator[str]:
    """What is wrong with a file for this provider."""
    try:
        validate_config(prepare_config(copy.deepcopy(config)))
    except (ValidationError, ValueError, KeyError, RuntimeError, AssertionError, ClickException) as error:
        yield str(error)
        return
    own = {key: value for key, value in config.items() if key not in ("min_workers",)}
    yield from (
        error.message for error in Draft7Validator(strict(SCHEMA)).iter_errors(own) if "required" not in error.message
    )
    yield from (f"provider: {key}" for key in set(config["provider"]) ^ PROVIDER[name])
    if name == "aws":
        shape = botocore.session.get_session().get_service_model("ec2").operation_model("RunInstances").input_shape
        for kind, node in config["available_node_types"].items():
            asked = {"MinCount": 1, "MaxCount": 1, **node["node_config"]}
            report = ParamValidator().validate(asked, shape)
            if report.has_errors():
                yield f"{kind}: {report.generate_report()}"


def fields(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], str]]:
    if isinstance(node, dict):
        for key, value in node.items():
            yield path, key
            yield from fields(value, (*path, key))
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from fields(value, (*path, index))


@pytest.mark.parametrize("name", FILES)
def test_ray_accepts_the_file(name):
    assert list(problems(name, read(name))) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_a_misspelled_field_is_refused(name):
    """All but names of one's own, and Google's machine settings, whose schema is not at hand offline."""
    config, missed = read(name), []
    for path, key in fields(config):
        free = path[-1:] in (("resources",), ("labels",), ("file_mounts",), ("available_node_types",))
        if free or (name == "gcp" and "node_config" in path):
            continue
        wrong: Any = copy.deepcopy(config)
        holder = wrong
        for step in path:
            holder = holder[step]
        holder[f"{key}x"] = holder.pop(key)
        if next(problems(name, wrong), None) is None:
            missed.append("/".join(map(str, (*path, key))))
    assert missed == []


@pytest.mark.parametrize("name", FILES)
def test_ray_start_knows_every_option_and_every_node_asks_for_the_token(name):
    known = {option for parameter in start.params for option in parameter.opts}
    config = read(name)
    commands = [c for kind in ("head", "worker") for c in config[f"{kind}_start_ray_commands"] if "ray start" in c]
    assert len(commands) == 2
    for command in commands:
        words = shlex.split(command.split("ray start", 1)[1])
        assert {word.split("=")[0] for word in words} <= known
        assert "RAY_AUTH_MODE=token" in command
        assert "--metrics-export-port=8080" in command
    assert config["file_mounts"]["~/.ray/auth_token"]
    core = Path(ray.__file__).parent / "core" / "src" / "ray" / "gcs" / "gcs_server"
    settings = set(re.findall(r"RAY_([a-z_]+)=", " ".join(commands)))
    assert settings
    assert [setting for setting in settings if setting.encode() not in core.read_bytes()] == []


@pytest.mark.parametrize("name", ["aws", "gcp"])
def test_a_machine_takes_a_worker_for_each_gpu_and_a_spare(name):
    config = read(name)
    for kind, node in config["available_node_types"].items():
        if kind == config["head_node_type"]:
            assert node["resources"] == {"CPU": 0}
        else:
            assert node["resources"] == {"CPU": 9, "GPU": 8}
            assert node["labels"] == {ray._raylet.RAY_NODE_MARKET_TYPE_KEY: "spot" if kind == "spot" else "on-demand"}
    assert "/shared" in " ".join(config["initialization_commands"])
