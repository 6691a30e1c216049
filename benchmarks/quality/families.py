"""The families of the tables of quality: the same shape at any length, near one density. No training in here."""

from __future__ import annotations

from benchmarks.quality.content import ContentFamily
from benchmarks.quality.small.families import Family


def families(seq_len: int, block: int, num_layers: int = 2) -> dict[str, Family]:
    """One of each family for sequences of `seq_len` tokens, mostly with about a quarter of dense's pairs.

    "one dense layer", with half the window in the others, has that density from 8 layers on. Raises: ValueError for
    fewer than 16 blocks.
    """
    num_blocks = seq_len // block
    if num_blocks < 16:
        raise ValueError(f"seq_len={seq_len}, block={block}: give at least 16 blocks, by a smaller block")
    window, unit = seq_len // 8, f"unit={block}"
    near = f"sinks:{block // 4}+window:{window}"
    texts = {
        "dense": "dense",
        "window": f"window:{window}",
        "sinks + window": near,
        "strided": f"strided:8,{num_blocks // 16},{unit}",
        "longnet": f"longnet:{seq_len // 8}/1,{seq_len // 2}/4,{seq_len}/8",
        "longnet + window": f"longnet:{seq_len // 2}/4,{seq_len}/8+window:{seq_len // 16}",
        "bigbird": f"bigbird:{num_blocks // 16},1,{num_blocks // 16},{unit}",
        "hierarchical": f"hierarchical:2,{unit}",
        "random": f"random:{num_blocks // 8},{unit}",
        "last layer dense": f"{near};dense@{num_layers - 1}",
        "one dense layer": f"sinks:{block // 4}+window:{window // 2};dense@{num_layers // 2}",
        # The dense head is one of those that begin by matching (see `model.Layer`): another would need far longer.
        "1/4 dense + window": (
            f'{{"groups": [{{"heads": [{{"rule": "dense"}}, {{"count": 3, "rule": "window:{window}"}}]}}]}}'
        ),
    }
    found: dict[str, Family] = {name: Family(name, text, block) for name, text in texts.items()}
    found["content top-k"] = ContentFamily("content top-k", "", block, max(2, num_blocks // 8))
    found["causal content"] = ContentFamily("causal content", "", block, max(2, num_blocks // 8), first_query=True)
    return found


MOST_KEPT = 0.25
"""The largest share of dense's pairs that `block_families` keep."""


def block_families(seq_len: int, block: int, num_layers: int = 8) -> dict[str, Family]:
    """Families of whole blocks, as GPUs take them (there `block` is 128), all but two as dense as a quarter of the
    pairs allows: "sinks" are the first block, and content is chosen by a block's first query, which knows no later
    token. The two are "dense", and "one dense layer", with half the window of "sinks + window" in its other layers:
    that is within a quarter from 8 layers on, and not brought up to it.

    Raises `ValueError` where there are fewer than 16 blocks, or where they do not fill the sequence.
    """
    if seq_len % block or seq_len // block < 16:
        raise ValueError(f"seq_len={seq_len}, block={block}: give at least 16 whole blocks, by a smaller block")
    unit = f"unit={block}"

    def most(text: str, least: int) -> int:
        """The largest step that keeps at most a quarter."""
        step = least
        while Family("", text.format(step + 1), block).density(seq_len, 1, 1) <= MOST_KEPT:
            step += 1
        return step

    near, random = f"bigbird:{{}},1,0,{unit}", f"random:{{}},{unit}"
    levels, content = f"hierarchical:{{}},{unit}", f"topk:{{}},{unit}"
    window = most(near, 1)
    texts = {
        "dense": "dense",
        "sinks + window": near.format(window),
        "one dense layer": f"{near.format(max(1, window // 2))};dense@{num_layers // 2}",
        "random": random.format(most(random, 1)),
        "hierarchical": levels.format(most(levels, 1)),
        "causal content": content.format(most(content, 2)),
    }
    return {name: Family(name, text, block) for name, text in texts.items()}
