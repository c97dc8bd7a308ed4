"""Rows of keys or values as int8 or e4m3 elements with a scale each, inside the fused write on a GPU.

As `decoder/kernels/row_scales.py` and `stored_rows.py` say, bit for bit. Called by `triton.py`.
"""

# Types inside kernels are Triton's.
# mypy: disable-error-code="operator,arg-type,assignment,no-untyped-call,no-any-return"

from __future__ import annotations

import triton.language as tl

from decoder.kernels.gpu import kernel


@kernel
def error_rates(
    norm: tl.tensor, columns: tl.tensor, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, NORM: tl.constexpr
) -> tl.tensor:
    """How much the error of each column of a key counts: the size of queries there, by the weights of their norm, over
    the largest, as the nearest power of two, at least 2**-8. Columns that are rotated together count alike, and without
    a norm all do."""
    if NORM:
        half: tl.constexpr = ROTARY_DIM // 2
        partner = tl.where(columns < half, columns + half, tl.where(columns < ROTARY_DIM, columns - half, columns))
        own = tl.load(norm + columns, mask=columns < HEAD_DIM, other=0.0).to(tl.float32)
        other = tl.load(norm + partner, mask=columns < HEAD_DIM, other=0.0).to(tl.float32)
        size = tl.maximum(own.to(tl.int32, bitcast=True) & 0x7FFFFFFF, other.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
        # A number is rounded to the next power of two from the square root of two on.
        exponent = (size + 0x4AFB0D) & 0x7F800000
        rates = tl.maximum(exponent - tl.max(exponent, 0) + 0x3F800000, 0x3B800000).to(tl.float32, bitcast=True)
    else:
        rates = columns * 0.0 + 1.0
    return rates


@kernel
def misfit(x: tl.tensor, scale: tl.tensor, unit: tl.tensor, rates: tl.tensor) -> tl.tensor:
    """Of rows x with such scales [rows], stored as e4m3: the squared errors times their columns' rates, in whole units,
    summed.

    Sums below 2**24 are exact, and so the same in whatever order they are taken: an error is at most 256 units, and a
    head has at most 256 elements. Rates are powers of two of at most 1. Products here are exact, or rounded before a
    sum, so contraction changes nothing.
    """
    y = x * tl.div_rn(1.0, scale)[:, None]
    y = tl.minimum(tl.maximum(y, -448.0), 448.0)
    bits = y.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
    error = (x - bits.to(tl.float32, bitcast=True) * scale[:, None]) * unit[:, None] * rates[None, :]
    whole = (error + 12582912.0) - 12582912.0
    return tl.sum(whole * whole, 1)


@kernel
def fitted(x: tl.tensor, bits: tl.tensor, rates: tl.tensor) -> tl.tensor:
    """Of scales with such bits, and of them times 17/16 to 31/16, the bits of those with the least squared error of
    rows x as e4m3, the first of equals: a key's largest elements are its head's outliers, whose rounding is most of the
    error of a product, unless queries are small there."""
    least = bits.to(tl.float32, bitcast=True)
    exponent = tl.minimum(256 - (bits >> 23), 254)
    unit = (exponent << 23).to(tl.float32, bitcast=True)  # 4 over the power of two below the scale
    best = misfit(x, least, unit, rates)
    for sixteenths in tl.static_range(1, 16):
        tried = ((least * (1.0 + sixteenths * 0.0625)).to(tl.int32, bitcast=True) + 0xFFFF) & -0x10000
        found = misfit(x, tried.to(tl.float32, bitcast=True), unit, rates)
        bits = tl.where(found < best, tried, bits)
        best = tl.minimum(found, best)
    return bits


@kernel
def quantize(x: tl.tensor, KIND: tl.constexpr, KEYS: tl.constexpr, rates: tl.tensor) -> tl.tensor:
    """Rows of x as stored elements, and the bits of each row's scale. KEYS: they are keys, whose e4m3 scales are
    `fitted`, with such rates.

    A scale is a bfloat16 number, rounded up, at least the smallest normal one; NaN for a row with a NaN or an infinity.
    Divisions are exact to the last bit, so that the CPU's form stores the same bytes.
    """
    peak = 127.0 if KIND == 1 else 448.0
    # Compared as integers, so that no NaN is lost.
    most = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    scale = tl.div_rn(most.to(tl.float32, bitcast=True), peak).to(tl.int32, bitcast=True)
    scale = tl.maximum((scale + 0xFFFF) & -0x10000, 0x00800000)
    scale = tl.where(most < 0x7F800000, scale, 0x7FC00000)
    if KEYS and KIND != 1:
        scale = fitted(x, scale, rates)
    y = tl.div_rn(x, scale.to(tl.float32, bitcast=True)[:, None])
    if KIND == 1:
        # The low bits of y + 1.5 * 2**23 are y rounded to an integer, half to even.
        shifted = tl.minimum(tl.maximum(y, -127.0), 127.0) + 12582912.0
        stored = shifted.to(tl.int32, bitcast=True).to(tl.int8)
    else:
        # e4m3 by hand, half to even: above 2**-6 in the bits of float32, below in steps of 2**-9.
        y = tl.minimum(tl.maximum(y, -448.0), 448.0)
        bits = y.to(tl.uint32, bitcast=True)
        sign = (bits >> 24) & 0x80
        bits = bits & 0x7FFFFFFF
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
        shifted = tl.abs(y) * 512.0 + 8388608.0
        subnormal = shifted.to(tl.uint32, bitcast=True) & 0xF
        stored = (sign | tl.where(tl.abs(y) < 0.015625, subnormal, normal)).to(tl.uint8)
        if KIND == 2:
            stored = stored.to(tl.float8e4nv, bitcast=True)
    return stored, (scale >> 16).to(tl.int16)
