#!/usr/bin/env python3
"""Roofline of mezzo's CUDA kernels on each card: derived from the table of analyze_sass.py, not measured.

    ./bootstrap sass >sass.txt; roofline.py sass.txt

A kernel's time per element is that of the slowest of five resources: memory for its bytes, a multiprocessor's four
schedulers for its instructions (one per clock each, for 32 threads), and the units for integers, for float64 and for
reciprocals and roots. Integer multiplications have separate units but are counted as integers: the bound may be too
high, never too low. Printed are the slowest resource and its time relative to memory's: 1.00 is memory-bound. Latency,
caches, clocks below the boost clock and the begin and end of a launch are left out and make kernels slower.

Rates per clock and multiprocessor: "Throughput of Native Arithmetic Instructions" in NVIDIA's CUDA C++ Programming Guide,
https://docs.nvidia.com/cuda/cuda-c-programming-guide/. Multiprocessors, boost clock (GHz) and bandwidth (GB/s): the
card's data sheet at https://www.nvidia.com.
"""

import dataclasses
import pathlib
import sys

import analyze_sass


@dataclasses.dataclass
class Card:
    sm: str
    multiprocessors: int
    clock: float
    bandwidth: float
    fp64: int          # results per clock and multiprocessor
    special: int = 16
    integer: int = 64  # 32-bit additions, comparisons, shifts, logic; published up to 9.0, assumed for newer cards
    issue: int = 128   # 4 schedulers x 32 threads


CARDS = {
    "A100 80GB": Card("80", 108, 1.41, 2039, 32),
    "A10": Card("86", 72, 1.695, 600, 2),
    "RTX 3090": Card("86", 82, 1.695, 936, 2),
    "L4": Card("89", 58, 2.04, 300, 2),
    "RTX 4090": Card("89", 128, 2.52, 1008, 2),
    "H100 SXM": Card("90", 132, 1.83, 3350, 64),
    "H200": Card("90", 132, 1.83, 4800, 64),
    "B200": Card("100", 148, 1.85, 7700, 64),
    "RTX 5090": Card("120", 170, 2.41, 1792, 2),
}


def times_of(row, card):
    """Picoseconds per element of each resource."""
    clocks = card.multiprocessors * card.clock * 1e-3  # of all multiprocessors, per picosecond
    return {"memory": row["bytes"] / card.bandwidth * 1e3,
            "issue": row["instructions"] / (card.issue * clocks),
            "integer": row.get("integer", 0) / (card.integer * clocks),
            "fp64": row.get("fp64", 0) / (card.fp64 * clocks),
            "special": row.get("special", 0) / (card.special * clocks)}


def bound_of(row, card):
    """(slowest resource, its time relative to memory's)"""
    times = times_of(row, card)
    slowest = max(times, key=lambda name: (times[name], name == "memory"))
    return slowest, times[slowest] / times["memory"]


def table_of(rows):
    counted = {(row["kernel"], row["sm"]): row for row in rows if "instructions" in row}
    kernels = sorted({kernel for kernel, _ in counted if "large table" not in kernel})
    lines = ["derived, not measured: the slowest resource, and its time relative to memory's", "",
             f"{'':{analyze_sass.WIDTH}} " + " ".join(f"{name:>12}" for name in CARDS)]
    for kernel in kernels:
        cells = []
        for card in CARDS.values():
            row = counted.get((kernel, card.sm))
            cells.append("-" if row is None else "{} {:.2f}".format(*bound_of(row, card)))
        lines.append(f"{kernel:{analyze_sass.WIDTH}} " + " ".join(f"{cell:>12}" for cell in cells))
    return "\n".join(lines)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    print(table_of(analyze_sass.rows_of_table(pathlib.Path(sys.argv[1]).read_text())))
