"""Writes blockwise_quant.txt: the output of bitsandbytes' CPU function for the blocks of blockwise_quant_test.cpp.

    pip install bitsandbytes==0.50.2 torch==2.11.0
    python blockwise_quant.py > blockwise_quant.txt

Values are passed as float64, for which bitsandbytes finds the nearest qval. For float32 it uses a table of rounded values,
which misses the nearest qval in most blocks; the last line counts how often.
"""

import bitsandbytes
import bitsandbytes.functional as functional
import torch

KINDS = ["normal", "tiny", "huge", "mixed", "one", "negative", "zero", "short"]


def numbers(count, seed):
    """24-bit numbers of a linear congruential generator."""
    state = seed
    for _ in range(count):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        yield state >> 40


def block(kind, seed):
    """Values that are exact in float32."""
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
    print(f"# bitsandbytes {bitsandbytes.__version__}, torch {torch.__version__}: kind, signed, absmax, qvals")
    differ = count = 0
    for number, kind in enumerate(KINDS * 3):
        for signed in (1, 0):
            values = torch.tensor(block(kind, number), dtype=torch.float64)
            values = values if signed else values.abs()
            qmap = functional.create_dynamic_map(signed=bool(signed))
            qvals, absmax = torch.ops.bitsandbytes.quantize_blockwise(values, qmap, 256)
            absmax_text = float(absmax[0]).hex()
            print(kind, number, signed, absmax_text, bytes(qvals.tolist()).hex())
            other, _ = torch.ops.bitsandbytes.quantize_blockwise(values.float(), qmap.clone(), 256)
            differ += int((other != qvals).sum())
            count += qvals.numel()
    print(f"# of {count} qvals, {differ} differ with its function for float32")


main()
