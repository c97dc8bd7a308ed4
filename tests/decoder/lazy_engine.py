"""A pytest plugin: tests of the engine run on the lazy device of `ahead_rig.py`, with its checks, not step by step.

`test_engine_ahead.py` starts pytest with it, in processes of their own.
"""

from __future__ import annotations

from typing import Any

from tests.decoder import ahead_rig, rig

_init = rig.Node.__init__


def _init_lazy(self: rig.Node, num_blocks: int = 64, *, model: Any = None, **options: Any) -> None:
    plain = model is None and type(self) is rig.Node and not {"lateness", "client_class"} & set(options)
    if plain:
        self.__class__ = ahead_rig.AheadNode
        self.__init__(num_blocks, **options)  # type: ignore[misc]
    else:
        _init(self, num_blocks, model=ahead_rig.LazyRecall() if model is None else model, **options)


rig.Node.__init__ = _init_lazy  # type: ignore[method-assign,assignment]
