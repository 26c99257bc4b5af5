"""Rows in 8 bits: each number in float8 e4m3, and one float32 scale for each row of one token in one layer.

Not one scale for all layers of a token: their norms differ, and where one is small more of its numbers would be nearer
to zero than e4m3 can say (SmolLM2, layers 2 and 30, norms 68 and 885: 0.1% of layer 2 would be zero, not 0.0004%).

Packed rows are uint8 `[n, layers, hidden + 4]`: the codes, then the four bytes of the scale, little-endian. They stand
together so that a row is written, hashed, copied and cut off as one piece, and a crash cannot part the two.

The scale is a power of two, about the smallest with which no number is above 448, e4m3's largest. Then division and
multiplication are exact, what comes back fits bfloat16, and the one error is e4m3's own rounding. With `peak`, the
largest absolute value of the row, below 2**127:

    |x - x'| <= max(|x| / 16, scale / 1024)        scale <= max(peak / 224, 2**-116)

The second one is where numbers are below scale / 64, which e4m3 has in steps of scale / 512. A row with a number that
is not finite comes back as NaN.
"""

from __future__ import annotations

import torch

DTYPE = "float8_e4m3fn"
SCALE_BYTES = 4
LARGEST = 448.0

# Of peak / 448: below it e4m3's smallest number, times the scale, would be none of bfloat16's normal ones.
SMALLEST = 2.0**-117

HALF_BIAS = 2.0 ** (15 - 7)

# float32 bytes of what is converted at a time: they stay in a core's cache.
CHUNK_BYTES = 2 << 20


def pack_rows(rows: torch.Tensor) -> torch.Tensor:
    """Floating-point rows `[n, layers, hidden]` as packed ones, uint8 `[n, layers, hidden + 4]`."""
    count, layers, hidden = rows.shape
    peaks = rows.abs().amax(dim=-1).float()
    packed = torch.empty((count, layers, hidden + SCALE_BYTES), dtype=torch.uint8, device=rows.device)
    pack_into(packed, rows, peaks, make_scratch(layers, hidden, CHUNK_BYTES, rows.device))
    return packed


def make_scratch(layers: int, hidden: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """Memory for the conversion of some rows at a time: float32 `[rows, layers, hidden]`, at least one row."""
    return torch.empty((max(1, nbytes // (4 * layers * hidden)), layers, hidden), dtype=torch.float32, device=device)


def pack_into(packed: torch.Tensor, rows: torch.Tensor, peaks: torch.Tensor, scratch: torch.Tensor) -> None:
    """Fill `packed` from rows of which the largest absolute values are `peaks`, float32 `[n, layers]`."""
    least = (peaks / LARGEST).clamp(min=SMALLEST)
    # A number over its mantissa, 0.5 to 1, is the power of two above it; exp2 and ldexp are not exact everywhere.
    scales = (least / torch.frexp(least).mantissa)[:, :, None]
    codes = packed[:, :, :-SCALE_BYTES].view(torch.float8_e4m3fn)
    for start in range(0, len(rows), len(scratch)):
        here = slice(start, start + len(scratch))
        scaled = scratch[: len(rows[here])]
        scaled.copy_(rows[here])
        codes[here] = scaled.div_(scales[here])
    packed[:, :, -SCALE_BYTES:] = scales.view(torch.uint8)


def unpack_rows(packed: torch.Tensor) -> torch.Tensor:
    """Packed rows as bfloat16 `[n, layers, hidden]`, each number exactly its code times its scale."""
    count, layers, width = packed.shape
    hidden = width - SCALE_BYTES
    rows = torch.empty((count, layers, hidden), dtype=torch.bfloat16)
    # A copy, wherever it begins: the bytes of a float32 must be at a multiple of 4 to be seen as one.
    scales = packed[:, :, -SCALE_BYTES:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    scales *= HALF_BIAS
    chunk = max(1, CHUNK_BYTES // (4 * layers * hidden))
    for start in range(0, count, chunk):
        here = slice(start, start + chunk)
        rows[here] = _view_as_halves(packed[here, :, :hidden]).float().mul_(scales[here])
    return rows


def _view_as_halves(codes: torch.Tensor) -> torch.Tensor:
    """The numbers over HALF_BIAS, float16. torch's own conversion is not vectorised on a CPU and takes seven times as
    long (2.8 to 2.13).

    The bits s eeee mmm of e4m3 at the places of a float16, s 0eeee mmm0000000, are the same number, subnormal or not,
    but for the bias of the exponent: 15 and not 7.
    """
    shifted = codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000)
    return shifted.view(torch.float16)
