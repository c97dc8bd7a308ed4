"""Decode where many sequences share a long run of leading blocks: `plan.py` on the host, `attend` in `triton.py`.

The shared run is read once for all rows of a slot of sequences, without a mask; each sequence's rest is a paged
decode of its own; both give logarithms of their sums and are merged by them (cascade attention: Ye et al. 2024;
Hydragen, Juravsky et al. 2024; ChunkAttention, Ye et al. 2024). Both halves are `paged_decode`'s kernel, so results are
repeatable bit for bit; they equal those of one paged decode within rounding.
"""
