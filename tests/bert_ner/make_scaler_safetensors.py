#!/usr/bin/env python3
"""Writes the state of torch.amp's GradScaler for scaler_safetensors_test.cpp.

  pip install torch safetensors==0.8.0 && make_scaler_safetensors.py data/python_scaler.safetensors

With a file that is there, loads it instead and prints the state after one more step.
"""
import pathlib
import sys

import torch
from safetensors.torch import load_file, save_file

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "scaling"))
from record_python_scaler import recorded, run

path = pathlib.Path(sys.argv[1])
if path.exists():
    scaler = torch.amp.GradScaler("cpu")
    scaler.load_state_dict({key: tensor.item() for key, tensor in load_file(path).items()})
    print(run(scaler, (1.0,)).state_dict())
else:
    save_file({key: torch.tensor(value) for key, value in recorded().state_dict().items()}, path)
