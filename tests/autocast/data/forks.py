#!/usr/bin/env python3
"""Writes forks.pt, many_forks.pt and interface.pt beside it, with libtorch 2.11's Python: scripts whose parts libtorch
runs with other executors."""
import pathlib

import torch


@torch.jit.interface
class Layer(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pass


class Linear(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.l = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.l(x)


class Forks(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = Linear(), Linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left = torch.jit.fork(self.a, x)
        right = self.b(x)
        return torch.jit.wait(left) + right


class ManyForks(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = Linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        futures = [torch.jit.fork(self.a, x) for _ in range(3)]
        out = x
        for future in futures:
            out = out + torch.jit.wait(future)
        return out


class Interface(torch.nn.Module):
    layer: Layer

    def __init__(self):
        super().__init__()
        self.layer = Linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer.forward(x)


torch.manual_seed(0)
for name, module in (("forks", Forks()), ("many_forks", ManyForks()), ("interface", Interface())):
    torch.jit.save(torch.jit.script(module), str(pathlib.Path(__file__).with_name(f"{name}.pt")))
