"""Writes a GGUF model again with its matrices unpacked, so that two engines compute with equal weights.

Engines differ in what they do with 4-bit weights: one keeps them packed, one unpacks them at load. To compare them in
bf16, both get what unpacking gives, rounded to bfloat16 and stored as float16 (which most readers take, bf16 fewer):
every bfloat16 from 2**-14 up is exact in it, and a smaller one is off by less than 2**-25. Names, order of rows,
metadata and tokenizer stay as they are.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from cli.errors import CommandError

_OWN_FIELDS = ("general.architecture", "general.file_type", "general.quantization_version")
_FILE_TYPE_F16 = 1
_LARGEST_FLOAT16 = 65504.0


def round_to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Nearest bfloat16 of each value, ties to even, as float32. Finite values alone."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    result: NDArray[np.float32] = rounded.astype(np.uint32).view(np.float32)
    return result


def rewrite_gguf(source: Path, target: Path) -> None:
    """Write `source` to `target` with its matrices as bfloat16 values in float16; vectors become float32.

    Raises CommandError on a file that cannot be read, or holds a type or value that cannot be unpacked.
    """
    try:
        reader = gguf.GGUFReader(source)
    except (ValueError, IndexError, OSError) as error:
        raise CommandError(f"{source.name} is no readable GGUF file: {error}") from None
    writer = gguf.GGUFWriter(target, str(reader.fields["general.architecture"].contents()))
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in _OWN_FIELDS:
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind is gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, sub_type=inner)
    writer.add_file_type(_FILE_TYPE_F16)
    for tensor in reader.tensors:
        shape = tuple(int(size) for size in reversed(tensor.shape))
        try:
            values = np.asarray(gguf.dequantize(tensor.data, tensor.tensor_type), np.float32).reshape(shape)
        except NotImplementedError:
            raise CommandError(f"{source.name}: cannot unpack {tensor.tensor_type.name} of {tensor.name}") from None
        if values.ndim > 1:
            if not np.abs(values).max(initial=0.0) <= _LARGEST_FLOAT16:
                raise CommandError(f"{source.name}: {tensor.name} holds a value that float16 cannot")
            writer.add_tensor(tensor.name, round_to_bfloat16(values).astype(np.float16))
        else:
            writer.add_tensor(tensor.name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
