"""Writes blockwise_quant.txt: what bitsandbytes' own CPU function makes of blocks that blockwise_quant_test.cpp makes too.

    pip install bitsandbytes==0.50.2 torch==2.11.0
    python blockwise_quant.py > blockwise_quant.txt

The values go in as float64, for which bitsandbytes looks for the nearest code. For float32 it asks a
table of rounded values, which misses the nearest code in most blocks; the last line counts how often.
"""

import bitsandbytes
import bitsandbytes.functional as functional
import torch

KINDS = ["normal", "tiny", "huge", "mixed", "one", "negative", "zero", "short"]


def numbers(count, seed):
    """Numbers of 24 bits from a linear congruential generator."""
    state = seed
    for _ in range(count):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        yield state >> 40


def block(kind, seed):
    """Values that floats hold exactly."""
    if kind == "zero":
        return [0.0] * 256
    if kind == "one":
        return [0.0] * 100 + [2.5] + [0.0] * 155
    size = 77 if kind == "short" else 256
    drawn = list(numbers(4 * size, seed))
    sums = [sum(drawn[4 * i : 4 * i + 4]) // 4 - 2**23 for i in range(size)]  # between -2^23 and 2^23
    if kind == "mixed":
        return [value / 2 ** (number % 40) for value, number in zip(sums, numbers(size, seed + 1))]
    if kind == "negative":
        return [-abs(value) / 1024 for value in sums]
    power = {"tiny": 2.0**-120, "huge": 2.0**100}.get(kind, 1 / 1024)
    return [value * power for value in sums]


def main():
    print(f"# bitsandbytes {bitsandbytes.__version__}, torch {torch.__version__}: kind, signed, scale, codes")
    differ = count = 0
    for number, kind in enumerate(KINDS * 3):
        for signed in (1, 0):
            values = torch.tensor(block(kind, number), dtype=torch.float64)
            values = values if signed else values.abs()
            code = functional.create_dynamic_map(signed=bool(signed))
            codes, scales = torch.ops.bitsandbytes.quantize_blockwise(values, code, 256)
            scale = float(scales[0]).hex()
            print(kind, number, signed, scale, bytes(codes.tolist()).hex())
            other, _ = torch.ops.bitsandbytes.quantize_blockwise(values.float(), code.clone(), 256)
            differ += int((other != codes).sum())
            count += codes.numel()
    print(f"# of {count} codes {differ} are others by its function for float32")


main()
