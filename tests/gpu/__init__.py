"""Tests that need a CUDA device; each skips with its reason where there is none."""
