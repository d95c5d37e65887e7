#!/usr/bin/env python3
"""Writes the state of torch.amp's GradScaler for scaler_safetensors_test.cpp.

  pip install torch safetensors==0.8.0 && make_scaler_safetensors.py data/python_scaler.safetensors

With a file that is there, loads it instead and prints the state after one more step.
"""
import pathlib
import sys

import torch
from safetensors.torch import load_file, save_file


def run(scaler, gradients):
    parameter = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([parameter], 0.1)
    for gradient in gradients:
        scaler.scale(torch.zeros(1))
        parameter.grad = torch.full((1,), gradient)
        scaler.step(optimizer)
        scaler.update()
    return scaler


path = pathlib.Path(sys.argv[1])
if path.exists():
    scaler = torch.amp.GradScaler("cpu")
    scaler.load_state_dict({key: tensor.item() for key, tensor in load_file(path).items()})
    print(run(scaler, (1.0,)).state_dict())
else:
    scaler = run(torch.amp.GradScaler("cpu", init_scale=512.0, growth_interval=3),
                 (1.0, 1.0, float("inf"), 1.0, 1.0))
    save_file({key: torch.tensor(value) for key, value in scaler.state_dict().items()}, path)
