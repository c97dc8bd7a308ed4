"""Queries and keys normed and rotated, keys and values stored in their pages: `write` in `triton.py`.

One pass over the rows of a step, prefill and decode alike: root mean square norm of a head (as in Qwen 3), rotary
embedding (Su et al. 2021; halves of a head against each other, from tables, so that every scaling rule is the
caller's), quantisation by the largest magnitude of a (token, head), and the store. The null block is never written.
"""
