#!/usr/bin/env python3
"""Compares Python's torch.amp with AdamW(fused=True) and mezzo's AdamW, on equal shapes.

    compare_torch_amp.py build/bench/benchmarks/adamw_bench

Time from the end of backward to updated parameters: unscale_, clip_grad_norm_, step, update, gradients zeroed in place.
The programs alternate, since each uses all cores; ratios are medians over alternations. Needs a Python with torch.
"""
import re
import statistics
import subprocess
import sys
import time

import torch

TURNS = 5
ROUNDS = 7  # per alternation, of both programs
SCALE = 65536.0


def bert(vocabulary, layers, hidden):
    """The shapes of benchmarks/optim/shapes.h."""
    inner = 4 * hidden
    shapes = [(vocabulary, hidden), (512, hidden), (2, hidden), (hidden,), (hidden,)]
    layer = 4 * [(hidden, hidden), (hidden,)] + [(inner, hidden), (inner,), (hidden, inner)]
    return shapes + layers * (layer + 5 * [(hidden,)])


MODELS = {
    "encoder": bert(30522, 6, 384),
    "2000 tensors of 64": 2000 * [(64,)],
    "2000 tensors of 1000": 2000 * [(1000,)],
    "BERT-base": bert(30522, 12, 768),
}


class TorchAmp:
    def __init__(self, shapes):
        torch.manual_seed(1)
        self.parameters = [torch.randn(shape, requires_grad=True) for shape in shapes]
        self.gradients = [torch.randn(shape) * SCALE for shape in shapes]
        self.optimizer = torch.optim.AdamW(self.parameters, 1e-4, weight_decay=0.01, fused=True)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
        self.scaler.scale(torch.zeros(()))
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)

    def milliseconds(self):
        for parameter, gradient in zip(self.parameters, self.gradients):
            parameter.grad.copy_(gradient)
        start = time.perf_counter()
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0, foreach=True)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=False)
        return 1e3 * (time.perf_counter() - start)


def mezzo_milliseconds(program):
    """The medians that adamw_bench prints, by model."""
    text = subprocess.run([program, str(ROUNDS)], check=True, capture_output=True, text=True).stdout
    found = re.findall(r"^(.+?): .* tensors\n +mezzo +([0-9.]+) ms", text, re.MULTILINE)
    return {name: float(time) for name, time in found}


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    peers = {name: TorchAmp(shapes) for name, shapes in MODELS.items()}
    python = {name: [] for name in MODELS}
    mezzo = {name: [] for name in MODELS}
    for turn in range(TURNS):
        for name, peer in peers.items():
            times = [peer.milliseconds() for _ in range(ROUNDS)]
            python[name].append(statistics.median(times[1:]))
        for name, median in mezzo_milliseconds(sys.argv[1]).items():
            mezzo[name].append(median)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {TURNS} turns")
    print(f"{'':22} {'mezzo ms':>10} {'torch.amp, fused=True ms':>26} {'ratio':>7}")
    for name in MODELS:
        ratios = [slow / fast for slow, fast in zip(python[name], mezzo[name])]
        print(
            f"{name:22} {statistics.median(mezzo[name]):10.2f}"
            f" {statistics.median(python[name]):26.2f} {statistics.median(ratios):7.2f}"
        )


if __name__ == "__main__":
    main()
