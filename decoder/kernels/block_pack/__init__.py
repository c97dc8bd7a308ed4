"""Whole blocks to one contiguous buffer and back, for colder tiers: `pack` and `unpack` in `triton.py`."""
