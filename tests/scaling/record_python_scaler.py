"""Records the state of python_scaler_test.cpp: `python record_python_scaler.py > data/python_scaler.json`.

With a file argument, loads that state and prints the state after two more steps.
"""

import json
import sys

import torch


def run(scaler, gradients):
    parameter = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([parameter], 0.1)
    for gradient in gradients:
        scaler.scale(torch.zeros(1))
        parameter.grad = torch.full((1,), gradient)
        scaler.step(optimizer)
        scaler.update()
    return scaler


def recorded():
    return run(torch.amp.GradScaler("cpu", init_scale=512.0, growth_interval=3),
               (1.0, 1.0, float("inf"), 1.0, 1.0))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        scaler = torch.amp.GradScaler("cpu")
        with open(sys.argv[1]) as file:
            scaler.load_state_dict(json.load(file))
        run(scaler, (1.0, 1.0))
    else:
        scaler = recorded()
    print(json.dumps(scaler.state_dict()))
