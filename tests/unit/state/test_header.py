"""A header carries plain values exactly, is refused where it holds anything else, and runs no code when it is read."""

from __future__ import annotations

import hashlib
import json
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD

from elastic_ring.errors import DigestMismatch
from elastic_ring.state.header import MAX_DEPTH, Counters, Header, ShardMeta, TensorSpec, plain_value
from elastic_ring.state.shard import Shard
from elastic_ring.state.transfer import DIGEST_BYTES, MAX_HEADER_BYTES, Link, receive_shard, send_shard
from tests.unit.attention.attention_rings import ThreadRings, in_threads, one_thread

LAYOUT = {"params/p": TensorSpec("BF16", (3, 0), False), "optimizer/p/step": TensorSpec("I64", (), True)}


def header(value: Any = None) -> Header:
    return Header(2, ShardMeta(Counters(7, 1, 0), ({"params": ["p"]},), {"p": {"value": value}}), LAYOUT, "0" * 64)


def arrived(value: Any) -> Any:
    sent = header(value)
    received = Header.from_bytes(sent.to_bytes())
    assert (received.layout, received.meta.counters) == (sent.layout, sent.meta.counters)
    return received.meta.plain["p"]["value"]


NUMBERS = (0, -(2**70), 0.1 + 0.2, 5e-324, -0.0, math.inf)


@pytest.mark.parametrize("value", [None, True, *NUMBERS, "\U0001f600 \x00", {"a": [1, {}, [[]]], "0": None}])
def test_plain_values_arrive_as_they_were_types_included(value):
    assert plain_value(value, "it") == value
    assert repr(arrived(value)) == repr(value)  # 1, 1.0 and True are equal, and so are 0.0 and -0.0


def test_values_of_other_types_become_what_they_stand_for():
    assert math.isnan(arrived(math.nan))
    mixed = {"size": torch.Size([2, 3]), "float": torch.tensor(0.5).double().numpy()[()], "rate": torch.tensor(3.0)}
    assert plain_value(mixed, "it") == {"size": [2, 3], "float": 0.5, "rate": 3.0}


@pytest.mark.parametrize("value", [lambda step: step, {1: 2}, torch.zeros(2), torch.bfloat16])
def test_a_donor_refuses_what_no_header_can_carry_and_names_it(value):
    param = torch.zeros(2)
    optimizer = SGD([param], lr=0.1)
    optimizer.param_groups[0]["schedule"] = [value]
    with pytest.raises(ValueError, match=r"optimizer=SGD: schedule of group 0\[0\] is a "):
        send_shard(Shard(0, {"p": param}, optimizer), Link(None))


def test_values_that_are_nested_too_deeply_are_refused():
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(ValueError, match=f"at most {MAX_DEPTH} levels"):
        plain_value(endless, "it")


class Exploit:
    """Touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._path,)


RIGHT = json.loads(header().to_bytes())


def as_data(**changes: Any) -> bytes:
    return json.dumps({**RIGHT, **changes}).encode()


def with_meta(**changes: Any) -> bytes:
    return as_data(meta={**RIGHT["meta"], **changes})


MALFORMED = {
    "no object": b"[]",
    "no JSON": b"\x80\x04",
    "deep": b"[" * 100_000,
    "a field is missing": json.dumps({"cp_rank": 0}).encode(),
    "a field too many": as_data(more=1),
    "a rank that is none": as_data(cp_rank=-1),
    "counters of another name": with_meta(counters={"applied": 1, "other": 2}),
    "counters that are none": with_meta(counters={"applied": True}),
    "groups without parameters": with_meta(groups=[{}]),
    "parameters that are no names": with_meta(groups=[{"params": [0]}]),
    "state that is of no parameter": with_meta(plain={"p": 1}),
    "an attribute of torch that is no dtype": as_data(layout={"params/p": ["load", [1], False]}),
    "a shape that is none": as_data(layout={"params/p": ["F32", "11", False]}),
    "a negative size": as_data(layout={"params/p": ["F32", [-1], False]}),
    "a digest that is none": as_data(digest="../../etc"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_header_is_refused(name):
    with pytest.raises(DigestMismatch, match="malformed"):
        Header.from_bytes(MALFORMED[name])


@pytest.mark.parametrize(
    "kind", ["a pickle", "no parameters", "other parameters", "other settings", "too long", "negative length"]
)
def test_a_newcomer_runs_nothing_of_what_a_stranger_sends_and_keeps_its_shard(kind, tmp_path):
    """Over a real link: the digest of the header itself is right, as a stranger's would be."""
    param = torch.arange(3.0)
    newcomer = Shard(1, {"p": param}, SGD([param], lr=0.1))
    before = newcomer.digest()
    other = Shard(1, {"q": torch.zeros(3)}, SGD([torch.zeros(3)], lr=0.1))
    other.optimizer.param_groups[0]["params"] = list(other.params.values())
    settings = json.loads(newcomer.pack()[0].to_bytes())
    settings["meta"]["groups"][0]["lr"] = "fast"
    data = {
        "a pickle": pickle.dumps(Exploit(tmp_path / "executed")),
        "other parameters": other.pack()[0].to_bytes(),
        "other settings": json.dumps(settings).encode(),
        "no parameters": json.dumps({**settings, "layout": {}}).encode(),
    }.get(kind, b"")
    length = {"too long": MAX_HEADER_BYTES + 1, "negative length": -1}.get(kind, DIGEST_BYTES + len(data))
    with one_thread():
        group = ThreadRings().groups(2, fresh=True)

    def send() -> None:
        group[0].send([torch.tensor([length])], 1, 0).wait()
        if data:
            head = torch.frombuffer(bytearray(hashlib.sha256(data).digest() + data), dtype=torch.uint8)
            group[0].send([head], 1, 0).wait()

    def work(rank: int) -> None:
        if rank == 0:
            send()
            return
        with pytest.raises(DigestMismatch):
            receive_shard(newcomer, Link(group[1]))

    in_threads(2, work)
    assert newcomer.digest() == before
    assert not list(tmp_path.iterdir())
