#!/usr/bin/env python3
"""Lists what a checkpoint of mezzo's holds. Needs PyTorch, and nothing of mezzo's.

    read_checkpoint.py runs/ner/checkpoint-000012-step-3400.pt

The weights of a C++ model in a Python model of the same names:

    model.load_state_dict(flatten(read(path)["state"]["model"]))

An AdamW of C++ (mezzo's or libtorch's) in a Python AdamW over the same parameters in the same order:

    optimizer.load_state_dict(adamw_state_dict(read(path)["state"]["optimizer"], optimizer))
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


def adamw_state_dict(saved, optimizer):
    """What `optimizer.load_state_dict` takes: moments, step counts and options of the AdamW that C++ saved. What C++ does not
    have (foreach, fused, ...) is `optimizer`'s. Masters are weights, and stay behind: saved["state"]["0"]["master"]."""
    state, groups = {}, []
    for number, own in enumerate(optimizer.state_dict()["param_groups"]):
        group = saved["param_groups"][f"param_groups/{number}"]
        names = [group[f"params/{i}"] for i in range(int(group["params/size"]))]
        options = {key: group["options"][key] for key in ("lr", "betas", "eps", "weight_decay", "amsgrad")}
        groups.append({**own, **options, "params": [int(name) for name in names]})
        for name in names:
            if name in saved["state"]:
                kept = saved["state"][name]
                moments = {key: kept[key] for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if key in kept}
                state[int(name)] = {"step": torch.tensor(float(kept["step"])), **moments}
    return {"state": state, "param_groups": groups}


if __name__ == "__main__":
    checkpoint = read(sys.argv[1])
    print("step", checkpoint["step"])
    for name, value in flatten(checkpoint["state"]).items():
        is_tensor = isinstance(value, torch.Tensor)
        print(name, f"{value.dtype} {list(value.shape)}" if is_tensor else repr(value))
