"""A header carries plain data exactly, is refused where it holds anything else, and runs no code when it is read."""

from __future__ import annotations

import hashlib
import json
import math
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD

from elastic_ring.errors import DigestMismatch
from elastic_ring.state.header import Counters, Header, Slot, TensorSpec
from elastic_ring.state.shard import Shard
from elastic_ring.state.transfer import DIGEST_BYTES, MAX_HEADER_BYTES, Link, receive_shard, send_shard
from tests.unit.attention.attention_rings import ThreadRings, in_threads, one_thread

SPEC = TensorSpec(torch.bfloat16, (3, 0), False)


def header(skeleton: Any) -> Header:
    return Header(2, Counters(7, 1, 0), skeleton, (SPEC, TensorSpec(torch.int64, (), True)), "0" * 64)


@pytest.mark.parametrize(
    "skeleton",
    [
        None,
        True,
        0,
        -(2**70),
        0.1 + 0.2,
        5e-324,
        -0.0,
        math.inf,
        "text \U0001f600 \x00",
        {0: {"exp_avg": Slot(0), "step": Slot(1)}, "0": None, 1.5: [], (1, "a"): {}, None: ()},
        [{"betas": (0.9, 0.999), "foreach": None, "fused": False, "params": [0, 1]}, [[()]]],
        {"tensor": 1, "list": [{"dict": []}], "dtype": torch.bfloat16},
    ],
)
def test_plain_data_arrives_as_it_was_types_included(skeleton: Any) -> None:
    sent = header(skeleton)
    arrived = Header.from_bytes(sent.to_bytes())
    assert arrived == sent
    assert repr(arrived) == repr(sent)  # 1, 1.0 and True are equal, and so are 0.0 and -0.0
    assert math.isnan(Header.from_bytes(header(math.nan).to_bytes()).skeleton)


def test_subclasses_of_plain_data_arrive_as_what_they_derive_from() -> None:
    sent = header({"d": OrderedDict(a=1), "s": torch.Size([2, 3]), "f": torch.tensor(0.5).double().numpy()[()]})
    assert Header.from_bytes(sent.to_bytes()).skeleton == {"d": {"a": 1}, "s": (2, 3), "f": 0.5}


def test_a_donor_refuses_what_no_header_can_carry_and_names_it() -> None:
    param = torch.zeros(2)
    optimizer = SGD([param], lr=0.1)
    optimizer.param_groups[0]["schedule"] = [lambda step: step]
    shard = Shard(0, {"p": param}, optimizer)
    with pytest.raises(
        ValueError, match=r"\['optimizer'\]\['param_groups'\]\[0\]\['schedule'\]\[0\] is a builtins.func"
    ):
        send_shard(shard, Link(None))


class Exploit:
    """Touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._path,)


def as_data(**changes: Any) -> bytes:
    return json.dumps({**json.loads(header({}).to_bytes()), **changes}).encode()


MALFORMED = {
    "no object": b"[]",
    "no JSON": b"\x80\x04",
    "deep": b"[" * 100_000,
    "a field is missing": json.dumps({"cp_rank": 0}).encode(),
    "a field too many": as_data(more=1),
    "a rank that is none": as_data(cp_rank=-1),
    "counters of another name": as_data(counters={"applied": 1, "other": 2}),
    "counters that are none": as_data(counters={"applied": True}),
    "an attribute of torch that is no dtype": as_data(layout=[["load", [1], False]]),
    "a shape that is none": as_data(layout=[["float32", "11", False]]),
    "a negative size": as_data(layout=[["float32", [-1], False]]),
    "a tensor that is not there": as_data(skeleton={"tensor": 2}),
    "an unknown tag": as_data(skeleton={"object": "os.system"}),
    "two tags": as_data(skeleton={"list": [], "tuple": []}),
    "a bare list": as_data(skeleton=[1]),
    "a key that cannot be one": as_data(skeleton={"dict": [[{"list": []}, 1]]}),
    "a digest that is none": as_data(digest="../../etc"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_header_is_refused(name: str) -> None:
    with pytest.raises(DigestMismatch, match="malformed"):
        Header.from_bytes(MALFORMED[name])


@pytest.mark.parametrize("kind", ["a pickle", "no parameters", "other parameters", "too long", "negative length"])
def test_a_newcomer_runs_nothing_of_what_a_stranger_sends_and_keeps_its_shard(kind: str, tmp_path: Path) -> None:
    """Over a real link: the digest of the header itself is right, as a stranger's would be."""
    param = torch.arange(3.0)
    newcomer = Shard(1, {"p": param}, SGD([param], lr=0.1))
    before = newcomer.digest()
    other = Shard(1, {"q": torch.zeros(3)}, SGD([torch.zeros(3)], lr=0.1))
    data = {
        "a pickle": pickle.dumps(Exploit(tmp_path / "executed")),
        "other parameters": other.pack()[0].to_bytes(),
        "no parameters": header([]).to_bytes(),
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
