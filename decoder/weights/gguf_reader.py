"""The head of a GGUF file: its fields and where its tensors lie, with no Python object for each word of the vocabulary.

Invariant: what a field holds, a long one too, is found as the very bytes of the file. Called by `source.py`, which
needs everything but the vocabulary, and by `decoder/cache_key.py`, which hashes it.
"""

from __future__ import annotations

import struct
from typing import Any, Final

import gguf

_LONG_ARRAY: Final = 256
_SCALAR_BYTES: Final[dict[int, int]] = {
    gguf.GGUFValueType.INT8: 1,
    gguf.GGUFValueType.INT32: 4,
    gguf.GGUFValueType.UINT32: 4,
    gguf.GGUFValueType.FLOAT32: 4,
}


class GgufReader(gguf.GGUFReader):  # type: ignore[misc,unused-ignore]
    """A reader that steps over long arrays: the vocabulary is large. Elements of those are not among their `parts`."""

    def field_bytes(self, prefix: str) -> dict[str, bytes]:
        """Type and value of each field whose name begins with `prefix`, by name, as they stand in the file."""
        starts = sorted(field.offset for field in self.fields.values())
        ends = dict(zip(starts, [*starts[1:], self._tensors_offset()], strict=True))
        raw: Any = self.data
        content = memoryview(raw)
        return {
            name: bytes(content[field.offset + 8 + len(name.encode()) : ends[field.offset]])
            for name, field in self.fields.items()
            if name.startswith(prefix)
        }

    def _tensors_offset(self) -> int:
        return int(self.tensors[0].field.offset if self.tensors else self.data_offset)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if raw_type != gguf.GGUFValueType.ARRAY or self.byte_order == "S":
            return super()._get_field_parts(orig_offs, raw_type)
        raw: Any = self.data
        data = memoryview(raw)
        kind, count = struct.unpack_from("<IQ", data, orig_offs)
        size = _SCALAR_BYTES.get(kind)
        end = orig_offs + 12
        if count < _LONG_ARRAY or (size is None and kind != gguf.GGUFValueType.STRING):
            return super()._get_field_parts(orig_offs, raw_type)
        if size is not None:
            end += count * size
        else:
            for _ in range(count):
                end += 8 + struct.unpack_from("<Q", data, end)[0]
        return end - orig_offs, [], [], [gguf.GGUFValueType.ARRAY, gguf.GGUFValueType(kind)]
