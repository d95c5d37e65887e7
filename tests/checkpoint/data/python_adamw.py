"""Writes python_adamw.pt, beside this file: an AdamW of PyTorch's after three steps, two more gradients, and the weights
that they lead to. Made with PyTorch 2.11."""
import copy
import pathlib

import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
groups = [{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 0.05, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=0.1, betas=(0.8, 0.99), eps=1e-7, amsgrad=True)


def step():
    optimizer.zero_grad()
    model(torch.rand(4, 3)).square().sum().backward()
    optimizer.step()
    return [p.grad.clone() for p in model.parameters()]


def weights():
    return [p.detach().clone() for p in model.parameters()]


for _ in range(3):
    step()
torch.save({"weights": weights(), "optimizer": copy.deepcopy(optimizer.state_dict()), "gradients": [step(), step()],
            "after": weights()}, pathlib.Path(__file__).with_suffix(".pt"))
