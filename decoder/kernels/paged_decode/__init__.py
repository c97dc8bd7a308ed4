"""Attention of a few query positions per sequence to a long paged context: `plan.py`, then `attend` in `triton.py`.

Split keys with a combine as in Flash-Decoding (Dao et al. 2023), scheduled as stream-K (Osama et al. 2023; for
attention LeanAttention, Sanovar et al. 2024): the tiles of all (sequence, key head) pairs form one list, and each
program takes an equal run of it, whatever the lengths. The list is built once a step, on the device, and shared by
all layers. The query heads of a group, times the query positions, are the rows of one matrix product (grouped-query
packing). Partial results lie in fixed slots and are merged in a fixed order, without atomics: two runs agree bit for
bit. How a context is cut depends on the batch, so results of different batches agree within rounding only.
"""
