"""Weights on disk: GGUF files and Hugging Face directories."""

from decoder.weights.loader import load_model

__all__ = ["load_model"]
