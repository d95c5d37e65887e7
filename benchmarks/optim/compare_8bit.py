#!/usr/bin/env python3
"""Compares Python's 8-bit AdamW (bitsandbytes, torchao) with mezzo's, on equal shapes.

    pip install bitsandbytes==0.50.2 torchao
    compare_8bit.py build/bench/benchmarks/adamw_bench

mezzo's time is of the whole step: unscale, check, clip, update, zero gradients. Python's is of `optimizer.step()` alone,
with float32 weights. The programs alternate, since each uses all cores; ratios are medians over alternations. A package
that is not installed is skipped. torchao's step is compiled by torch.compile, which needs a C++ compiler; its first steps,
which compile, are not counted.
"""
import re
import statistics
import subprocess
import sys
import time

import torch
from compare_torch_amp import MODELS

TURNS = 3
ROUNDS = 5  # of each program within a turn, after two that warm up


def optimizers():
    """Compares Python's 8-bit AdamW (bitsandbytes, torchao) with mezzo's, on equal shapes.

    pip install bitsandbytes==0.50.2 torchao
    compare_8bit.py build/bench/benchmarks/adamw_bench

mezzo's time is of the whole step: unscale, check, clip, update, zero gradients. Python's is of `optimizer.step()` alone,
with float32 weights. The programs alternate, since each uses all cores; ratios are medians over alternations. A package
that is not installed is skipped. torchao's step is compiled by torch.compile, which needs a C++ compiler; its first steps,
which compile, are not counted.
"""
    try:
        import bitsandbytes

        yield f"bitsandbytes {bitsandbytes.__version__}", bitsandbytes.optim.AdamW8bit
    except ImportError:
        print("bitsandbytes is not installed")
    try:
        import torchao
        from torchao.optim import AdamW8bit

        yield f"torchao {torchao.__version__}", AdamW8bit
    except ImportError:
        print("torchao is not installed")


class Peer:
    def __init__(self, make, shapes):
        torch.manual_seed(1)
        self.parameters = [torch.randn(shape, requires_grad=True) for shape in shapes]
        for parameter in self.parameters:
            parameter.grad = torch.randn_like(parameter)
        self.optimizer = make(self.parameters, lr=1e-4, weight_decay=0.01)

    def milliseconds(self):
        start = time.perf_counter()
        self.optimizer.step()
        return 1e3 * (time.perf_counter() - start)


def mezzo_milliseconds(program):
    """Compares Python's 8-bit AdamW (bitsandbytes, torchao) with mezzo's, on equal shapes.

    pip install bitsandbytes==0.50.2 torchao
    compare_8bit.py build/bench/benchmarks/adamw_bench

mezzo's time is of the whole step: unscale, check, clip, update, zero gradients. Python's is of `optimizer.step()` alone,
with float32 weights. The programs alternate, since each uses all cores; ratios are medians over alternations. A package
that is not installed is skipped. torchao's step is compiled by torch.compile, which needs a C++ compiler; its first steps,
which compile, are not counted.
"""
    command = [program, str(ROUNDS), "8bit"]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.findall(r"^(.+?): .* tensors\n +8bit +([0-9.]+) ms", text, re.MULTILINE)
    return {name: float(time) for name, time in found}


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    kinds = list(optimizers())
    mezzo = {name: [] for name in MODELS}
    python = {(kind, name): [] for kind, _ in kinds for name in MODELS}
    for _ in range(TURNS):
        for name, median in mezzo_milliseconds(sys.argv[1]).items():
            mezzo[name].append(median)
        for kind, make in kinds:
            for name, shapes in MODELS.items():
                peer = Peer(make, shapes)
                times = [peer.milliseconds() for _ in range(2 + ROUNDS)]
                python[kind, name].append(statistics.median(times[2:]))
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {TURNS} turns")
    for name in MODELS:
        print(f"{name:22} {'mezzo AdamW8bit, whole step':32} {statistics.median(mezzo[name]):10.2f} ms")
        for kind, _ in kinds:
            ratios = [slow / fast for slow, fast in zip(python[kind, name], mezzo[name])]
            print(
                f"{'':22} {kind + ', step alone':32} {statistics.median(python[kind, name]):10.2f} ms"
                f"   x {statistics.median(ratios):.2f}"
            )


if __name__ == "__main__":
    main()
