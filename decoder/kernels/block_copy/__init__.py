"""Copy-on-write plans: the first tokens of one block to another, all layers, keys and values: `copy` in `triton.py`."""
