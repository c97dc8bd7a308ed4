"""The families of models that this build serves, by the names that their files use. Read by the decoder, which computes
them, and by the command line, which refuses others before anything starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

SUPPORTED_ARCHITECTURES: Final = (
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "mixtral", "qwen2_moe",
    "qwen3_moe",
)  # fmt: skip
"""`model_type` in a Hugging Face config.json."""

GGUF_ARCHITECTURES: Final[Mapping[str, str]] = {
    "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma": "gemma", "gemma2": "gemma2",
    "gemma3": "gemma3_text", "phi3": "phi3", "qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe",
}  # fmt: skip
"""`general.architecture` in a GGUF file -> the family that it is."""
