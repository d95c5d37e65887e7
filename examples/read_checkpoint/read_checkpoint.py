#!/usr/bin/env python3
"""Lists what a checkpoint of mezzo's holds. Needs PyTorch, and nothing of mezzo's.

    read_checkpoint.py runs/ner/checkpoint-000012-step-3400.pt

The weights of a C++ model in a Python model of the same names:

    model.load_state_dict(flatten(read(path)["state"]["model"]))
"""
import sys

import torch


def read(path):
    """{"step": 3400, "state": {"model": {...}, "optimizer": {...}, "epoch": 7}}, tensors on the CPU."""
    return torch.load(path, map_location="cpu", weights_only=True)


def flatten(value, name=""):
    """{"encoder": {"weight": w}} as a state_dict has it: {"encoder.weight": w}."""
    if not isinstance(value, dict):
        return {name: value}
    prefix = name + "." if name else ""
    return {k: v for key, child in value.items() for k, v in flatten(child, prefix + key).items()}


if __name__ == "__main__":
    checkpoint = read(sys.argv[1])
    print("step", checkpoint["step"])
    for name, value in flatten(checkpoint["state"]).items():
        is_tensor = isinstance(value, torch.Tensor)
        print(name, f"{value.dtype} {list(value.shape)}" if is_tensor else repr(value))
