"""The adapters that a request may name, for `ListModels`: those of the node's folder whose configuration is served.

It reads small files alone and never a tensor, so it says nothing about whether one fits a model. Called on a thread.
"""

from __future__ import annotations

from typing import Final

from common.adapter_config import read_adapter_config
from common.adapter_folder import AdapterFolder
from common.errors import TesseraError
from tessera.inference.v1 import inference_pb2

MAX_LISTED: Final = 1024


def list_adapters(folder: AdapterFolder) -> list[inference_pb2.Adapter]:
    """The first `MAX_LISTED` by name. One that is damaged, not served, or gone meanwhile, is not there."""
    found = []
    for name in folder.names():
        try:
            config = read_adapter_config(folder.locate(name).directory)
        except (TesseraError, OSError):
            continue
        found.append(inference_pb2.Adapter(name=name, base_model=config.base_model, rank=config.rank))
        if len(found) == MAX_LISTED:
            break
    return found
