"""Gated activations (Shazeer 2020, GLU variants): `gate` in `triton.py`, SiLU or GELU by tanh, times the other half."""
