"""Attention that training does not reach, for custom loops and benchmarks. Put a checkout's root on PYTHONPATH.

- `block_function.BlockFunction(lambda query, key: (query - key) % 3 == 0)` is a rule from a function of blocks.
- `head_rules.mixed((6, Window(1024)), (2, Dense()))` gives each head a rule.
- `pattern_choice.choose(pattern, seq_len, cp, sizes)` picks layout and exchange for one pattern, with its reasons.

`elastic_ring` must not import from here.
"""
