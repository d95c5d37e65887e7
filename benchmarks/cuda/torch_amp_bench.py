#!/usr/bin/env python3
"""Python's torch.amp with AdamW(fused=True) on a GPU, on the shapes of cuda_bench.

    torch_amp_bench.py [--small] [--device cpu]

Prints cuda_bench's lines of JSON, measured like it. Needs a Python with torch.
"""
import json
import statistics
import sys
import time

import torch
from torch import nn

SMALL = "--small" in sys.argv
DEVICE = "cpu" if "cpu" in sys.argv else "cuda"
PEER = "Python torch.amp"
SCALE = 65536.0
CYCLES = 100_000_000  # about 60 ms, in which the host runs ahead


def wait():
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def time_once(before, run, is_ahead):
    """Returns (milliseconds of the GPU from begin to end, microseconds of the calls)."""
    before()
    wait()
    if DEVICE == "cpu":
        called = time.perf_counter()
        run()
        took = time.perf_counter() - called
        return took * 1e3, took * 1e6
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if is_ahead:
        torch.cuda._sleep(CYCLES)  # pylint: disable=protected-access
    called = time.perf_counter()
    begin.record()
    run()
    end.record()
    returned = time.perf_counter()
    end.synchronize()
    return begin.elapsed_time(end), (returned - called) * 1e6


def row(what, size, run, before=lambda: None):
    rounds = 1 if SMALL else 11
    idle, ahead = [], []
    for turn in range(-3, rounds):
        for times, is_ahead in ((idle, False), (ahead, True)):
            sample = time_once(before, run, is_ahead)
            if turn >= 0:
                times.append(sample)
    median = lambda times, which: statistics.median(sample[which] for sample in times)
    result = {"what": what, "peer": PEER, "gpu_ms": round(median(ahead, 0), 4), "ms": round(median(idle, 0), 4),
              "host_us": round(median(idle, 1), 1)}
    if size:
        result["gb_per_s"] = round(size / result["gpu_ms"] / 1e6, 1) if result["gpu_ms"] else 0
    print(json.dumps(result), flush=True)


def bert(vocabulary, layers, hidden):
    """As benchmarks/optim/shapes.h has it."""
    inner = 4 * hidden
    shapes = [(vocabulary, hidden), (512, hidden), (2, hidden), (hidden,), (hidden,)]
    layer = 4 * [(hidden, hidden), (hidden,)] + [(inner, hidden), (inner,), (hidden, inner)]
    return shapes + layers * (layer + 5 * [(hidden,)])


def steps(name, shapes):
    parameters = [torch.randn(shape, device=DEVICE, requires_grad=True) for shape in shapes]
    kept = [torch.randn(shape, device=DEVICE) * SCALE for shape in shapes]
    for parameter, gradient in zip(parameters, kept):
        parameter.grad = gradient.clone()
    gradients = [parameter.grad for parameter in parameters]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.01, fused=True)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=SCALE)
    scaler.scale(torch.zeros((), device=DEVICE))

    def step():
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=False)

    count = sum(parameter.numel() for parameter in parameters)
    row("step " + name, 36 * count, step, lambda: torch._foreach_copy_(gradients, kept))


class Layer(nn.Module):
    """As benchmarks/encoder.h has it."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.mix = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x):
        split = lambda h: h.view(h.size(0), h.size(1), self.heads, -1).transpose(1, 2)
        attended = nn.functional.scaled_dot_product_attention(split(self.query(x)), split(self.key(x)), split(self.value(x)))
        h = self.first(x + self.mix(attended.transpose(1, 2).flatten(2)))
        return self.second(h + self.down(nn.functional.gelu(self.up(h))))


class Encoder(nn.Module):
    def __init__(self, vocabulary, width, layers):
        super().__init__()
        self.words, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(512, width)
        self.layers = nn.ModuleList(Layer(width, 12) for _ in range(layers))
        self.tagger = nn.Linear(width, 21)

    def forward(self, tokens):
        x = self.words(tokens) + self.positions(torch.arange(tokens.size(1), device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        return self.tagger(x)


def training(batch, length, vocabulary, width, layers):
    torch.manual_seed(1)
    model = Encoder(vocabulary, width, layers).to(DEVICE)
    tokens = torch.randint(vocabulary, (batch, length), device=DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=SCALE)

    def iterate():
        with torch.autocast(DEVICE, dtype=torch.float16 if DEVICE == "cuda" else torch.bfloat16):
            loss = model(tokens).float().square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=False)

    row(f"training, batch {batch}", 0, iterate)


def main():
    if DEVICE == "cuda" and not torch.cuda.is_available():
        print("torch_amp_bench.py: torch sees no CUDA device; nothing was measured", file=sys.stderr)
        return 77
    if SMALL:
        steps("BERT", bert(50, 1, 8))
        training(2, 8, 50, 24, 1)
        return 0
    steps("BERT-base", bert(30522, 12, 768))
    steps("2000 tensors of 1000", 2000 * [(1000,)])
    for batch in (16, 256):
        training(batch, 128, 30522, 384, 6)
    return 0


if __name__ == "__main__":
    sys.exit(main())
