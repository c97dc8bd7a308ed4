"""Attention of a ragged batch of chunks to their paged context: `attend` and `plan` in `triton.py`.

The algorithm is FlashAttention-2's (Dao 2023, section 3.1) over pages (PagedAttention, Kwon et al. 2023): one program
takes a block of query rows and walks the keys that they may see. A chunk's own keys are in its pages already
(`kv_write`), so the prefix and the chunk are one range. Where chunks are short, the query heads of a group are packed
into the rows, so that a page is read once for all of them.
"""
