"""Whole blocks overwritten with zeros, or with NaN, before another owner gets them: `scrub` in `triton.py`."""
