"""Weights on disk: GGUF files and Hugging Face directories."""

from decoder.weights.loader import WeightsDtype, load_model, load_on

__all__ = ["WeightsDtype", "load_model", "load_on"]
