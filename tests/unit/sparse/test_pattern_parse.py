"""Patterns as text: what each form means, and that a wrong one is refused with its name and a way out."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch

from elastic_ring.attention.layers import PatternedAttention, of_layer
from elastic_ring.attention.layouts.layout import contiguous
from elastic_ring.attention.patterns.families import BigBird, Dilated, Hierarchical, Profile
from elastic_ring.attention.patterns.layers import LayerGroup, LayerPatterns
from elastic_ring.attention.patterns.parse import parse_pattern, read_pattern
from elastic_ring.attention.patterns.rules import Dense, Sinks, Strided, Window
from experiments.block_function import BlockFunction
from experiments.head_rules import longnet
from tests.unit.attention.attention_rings import one_thread


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("dense", Dense()),
        ("window:512", Window(512)),
        ("sinks:64+window:512", Sinks(64) | Window(512)),
        ("strided:16,2,unit=64", Strided(16, 2, 64)),
        ("bigbird", BigBird()),
        ("bigbird:4,0,seed=7", BigBird(4, 0, 3, 7)),
        ("random:5", BigBird(1, 0, 5)),
        ("hierarchical:2", Hierarchical(2)),
        ("profile:0/1/4,unit=64", Profile((0, 1, 4), 64)),
    ],
)
def test_the_short_form_of_each_family(text, rule):
    pattern = parse_pattern(text)
    assert pattern == LayerPatterns((LayerGroup((rule,)),))
    assert pattern.same_everywhere


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(8, 4), (4, 4), (4, 2), (16, 2)])
def test_a_longnet_shifts_its_heads_as_the_family_does(num_heads, num_kv_heads):
    group = parse_pattern("longnet:512/1,2048/4").of_layer(0)
    wanted = longnet(num_heads, (512, 2048), (1, 4), heads_per_offset=num_heads // num_kv_heads)
    assert group.heads(num_heads, num_kv_heads) == wanted
    near = parse_pattern("longnet:512/1,2048/4+window:64").of_layer(0).heads(num_heads, num_kv_heads)
    assert near == tuple(rule | Window(64) for rule in wanted)


def test_layers_may_differ():
    pattern = parse_pattern("window:512; dense@3,5-6 ;sinks:4+window:64@0")
    assert [pattern.of_layer(i).rules[0] for i in (0, 1, 3, 4, 5, 6, 7)] == [
        Sinks(4) | Window(64),
        Window(512),
        Dense(),
        Window(512),
        Dense(),
        Dense(),
        Window(512),
    ]
    pattern.check(8, 4, 2)


def test_a_file_says_the_same_and_more(tmp_path):
    path = tmp_path / "found.json"
    groups = [
        {"layers": [1], "heads": [{"count": 3, "rule": "window:512"}, {"rule": "dense"}]},
        {"rule": "longnet:512/1,2048/4,unit=128"},
    ]
    path.write_text(json.dumps({"block": 64, "groups": groups, "about": "by hand", "measured": {"density": 0.5}}))
    pattern = read_pattern(str(path))
    assert pattern.block == 64
    assert pattern.of_layer(1).heads(4, 2) == (Window(512), Window(512), Window(512), Dense())
    assert pattern.of_layer(0).heads(4, 2)[2] == Dilated((512, 2048), (1, 4), 1, 128)


REFUSED = {
    "windw:512": "'windw' is no family; choose one of dense, window",
    "": "'' is no family",
    "window": "window needs tokens, for example window:512",
    "window:x": "window takes whole numbers, not 'x'",
    "window:5,6,7": "window takes tokens, ahead; '7' is none of these",
    "window:5,tokens=6": "window has tokens twice; leave one out",
    "window:99999999999999999999999": "window takes numbers of at most 9 digits, not 99999999999999999999999...",
    "dense@0-99999999999": "layers after @ are at most 10,000, not 0-99999999999",
    "window:0": "tokens=0: must be at least 1",
    "runs/window": "is no family, and no such file is there; choose",
    "tests": "'tests' is a folder: name a file in it",
    "window:8;dense": "pattern 'window:8;dense': two groups of rules for all other layers",
    "window:8@0;dense@0-1": "layer 0: name each layer once",
    "dense@one": "layers after @ are numbers and ranges",
    "dense@5-2": "layers after @ are numbers and ranges",
    "longnet:512": "longnet takes segment/rate pairs",
    "longnet:512/1,every=3": "takes a list and unit",
    "longnet:500/2,unit=128": "500 must be a positive multiple of unit_tokens=128",
    "nothing.json": "nothing.json': the file cannot be read",
    "{": "not JSON",
    "{}": 'give an object with "groups"',
    '{"groups": []}': "needs rules for at least one group",
    '{"groups": [{"rule": "dense", "head": 1}]}': "unknown key 'head'",
    '{"groups": [{"layers": "0-3", "rule": "dense"}]}': "a list of numbers counted from 0",
    '{"groups": [{"layers": [0]}]}': "give an object with either a rule or heads",
    '{"groups": [{"heads": [{"count": 0, "rule": "dense"}]}]}': "count=0: how many query heads",
    '{"groups": [{"heads": [{"count": 1, "rule": "longnet:8/2"}]}]}': "longnet shifts its heads itself",
    '{"block": 0, "groups": [{"rule": "dense"}]}': "block=0: a block has at least one token",
    '{"block": "64", "groups": [{"rule": "dense"}]}': "block='64': a whole number",
}


@pytest.mark.parametrize("text", REFUSED)
def test_a_wrong_pattern_is_refused_with_its_name_and_a_way_out(text):
    with pytest.raises(ValueError) as refusal:  # noqa: PT011 (the message is the claim)
        read_pattern(text)
    assert REFUSED[text] in str(refusal.value)


def test_a_long_short_form_is_no_file_name():
    text = "profile:" + "/".join(map(str, range(2000)))
    assert str(read_pattern(text)) == text


def test_an_empty_file_is_named_as_one(tmp_path):
    (tmp_path / "found.json").write_text(" \n")
    with pytest.raises(ValueError, match=r"found\.json is empty: it needs a short form, or JSON"):
        read_pattern(str(tmp_path / "found.json"))


@pytest.mark.parametrize(
    "text",
    [
        "longnet:512/1,2048/4",
        "longnet:512/1,2048/4,unit=128",
        "profile:0/1/4",
        "profile:0/2,unit=64",
        "window:512;dense@3,5",
        "dense",
        "window:512",
        "sinks:64+window:512",
        "strided:16,local=2,unit=64",
        "bigbird",
        "bigbird:window=4,seed=7",
        "hierarchical:base=2",
        "topk:8",
        "topk:8,causal=0,unit=64",
    ],
)
def test_rules_are_told_as_they_are_typed(text):
    assert str(parse_pattern(text)) == text


def test_a_rule_of_ones_own_is_not_told_as_the_one_it_was_made_from():
    @dataclass(frozen=True)
    class Half(Window):
        share: float = 0.5

    assert str(Half(5)).endswith("Half(tokens=5, ahead=0, share=0.5)")
    assert str(LayerPatterns((LayerGroup((Window(8),)),), 64)) == "window:8 in blocks of 64"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("window:8@0-1", "layer 2: the pattern has no rules for it"),
        ("window:8;dense@7", "layer 7: the model has layers 0 to 3"),
        ("dense@9", "layer 9: the model has layers 0 to 3"),
        ("sinks:4+window:8,ahead=7", "ahead=7: training is causal, and no query sees 7 later keys"),
        (
            '{"groups": [{"heads": [{"count": 3, "rule": "dense"}, {"rule": "window:8"}, {"rule": "window:8"}]}]}',
            "rules for 5 heads, the call has 4 query heads",
        ),
    ],
)
def test_a_pattern_that_does_not_fit_the_model_is_refused(text, named):
    with pytest.raises(ValueError, match=named):
        parse_pattern(text).check(4, 4, 2)


def test_the_identity_is_the_same_in_another_process_and_tells_patterns_apart():
    texts = ["window:8", "window:9", "window:8;dense@0", "longnet:8/2", "longnet:8/2,unit=2", "random:2", "random:2,1"]
    identities = [parse_pattern(text).identity for text in texts]
    assert len(set(identities)) == len(texts)
    code = (
        f"from elastic_ring.attention.patterns.parse import parse_pattern; print(parse_pattern({texts[3]!r}).identity)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == identities[3]
    own = LayerPatterns((LayerGroup((BlockFunction(torch.eq),)),))  # type: ignore[arg-type]
    assert " at 0x" not in own.identity


def test_where_layers_differ_the_layer_must_be_named():
    q = torch.randn(1, 12, 2, 8, generator=torch.Generator().manual_seed(0))
    with one_thread():
        mixed = PatternedAttention(parse_pattern("window:3;dense@1"), contiguous(12, 1), 0, None)
        with pytest.raises(ValueError, match=r"use attention.layer\(i\)"):
            mixed(q, q, q)
        with pytest.raises(ValueError, match="layer 4: the pattern has no rules"):
            PatternedAttention(parse_pattern("window:3@0-3"), contiguous(12, 1), 0, None).layer(4)
        alike = PatternedAttention(parse_pattern("window:3"), contiguous(12, 1), 0, None)
        assert torch.equal(alike(q, q, q), of_layer(mixed, 0)(q, q, q))
        dense = of_layer(mixed, 1)(q, q, q)
        torch.testing.assert_close(dense[:, :3], alike(q, q, q)[:, :3])
        assert not torch.allclose(dense[:, 3:], alike(q, q, q)[:, 3:])
