"""Weights on disk: GGUF files and Hugging Face directories."""

from decoder.weights.loader import load_model, load_on

__all__ = ["load_model", "load_on"]
