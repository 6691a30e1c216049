"""Attention that training does not reach, for custom loops and benchmarks. Put a checkout's root on PYTHONPATH.

- `cuda_graphs.make_graphed(ring, q, k, v)` captures a ring's passes: for 8 K tokens a GPU, or thin patterns.
- `peer_exchange.PeerRing(schedule, cp_rank, group, PeerMemory(cp_rank, cp, device))` sends dense hops through the copy
  engines of one host. Call `memory.connect(group)` first, on every rank; `memory.release()` unblocks waiting streams.
- `gated.GatedSparseAttention` mixes block means, chosen blocks and a window; `gated_ring.GatedRing` so on CPU rings.
- `block_function.BlockFunction(lambda query, key: (query - key) % 3 == 0)` is a rule from a function of blocks.
- `head_rules.mixed((6, Window(1024)), (2, Dense()))` gives each head a rule.
- `pattern_choice.choose(pattern, seq_len, cp, sizes)` picks layout and exchange for one pattern, with its reasons.

`elastic_ring` must not import from here.
"""
