"""Who may connect to whom by the NetworkPolicies, read as Kubernetes reads them."""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import ip_address, ip_network
from typing import Any

import pytest

from tests.unit.deploy.test_references import pods
from tests.unit.deploy.tools import Object, built, with_components

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


def test_no_pod_is_open_to_a_stranger(found: list[Object]) -> None:
    ports = (53, 443, 3000, 6379, 8080, 8265, 9090, 9093, 10001, ANY_PORT)
    for name, labels in every_pod():
        for stranger, near in ((STRANGER, True), (STRANGER, False), (WORKER, False), (OUTSIDE, True)):
            reached = [port for port in ports if allowed(found, stranger, labels, port, same_namespace=near)]
            assert reached == [], f"{name} from {stranger}"


def test_what_a_run_and_its_watchers_need_is_open(found: list[Object]) -> None:
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


def test_what_ranks_send_stays_between_rays_pods(found: list[Object]) -> None:
    """Gradients, keys and values, heals: neither encrypted nor authenticated."""
    for target in (STRANGER, OUTSIDE, PROMETHEUS, ALERTMANAGER, REDIS):
        assert not allowed(found, WORKER, target, ANY_PORT), target
    assert not allowed(found, WORKER, REDIS, 6379), "only the head asks Redis"
    assert not allowed(found, PROMETHEUS, WORKER, ANY_PORT)
    assert not allowed(found, REDIS, OUTSIDE, 443)


def test_a_pod_gets_its_own_role_for_the_object_store_and_no_machine_s(found: list[Object], tmp_path: Any) -> None:
    store = policies(with_components(tmp_path, ("s3",)))
    for own in (WORKER, HEAD):
        assert allowed(store, own, POD_IDENTITY, 80)
        assert not allowed(found, own, POD_IDENTITY, 80)
        assert not allowed(store, own, PROVIDER, 80)


def test_notices_of_spot_machines_pass_where_there_are_such(found: list[Object], tmp_path: Any) -> None:
    assert not allowed(found, WORKER, PROVIDER, 80)
    spot = policies(with_components(tmp_path, ("spot",)))
    assert allowed(spot, WORKER, PROVIDER, 80)
    assert not allowed(spot, WORKER, OUTSIDE, 80)
