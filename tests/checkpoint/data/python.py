"""Writes python.pt, beside this file: models and optimizers of PyTorch's after three steps, as a Python program saves them; and
python_next.pt: two more gradients of each, and the weights that they lead to. Made with PyTorch 2.11."""
import copy
import pathlib

import torch

OPTIMIZERS = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.1, betas=(0.8, 0.99), eps=1e-7, amsgrad=True),
    "adam": lambda groups: torch.optim.Adam(groups, lr=1, weight_decay=0.125),  # an int, which Python keeps
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.25, momentum=0.5, nesterov=True),
    "plain_sgd": lambda groups: torch.optim.SGD(groups, lr=0.25),  # momentum_buffer is None
}

torch.manual_seed(0)
now, later = {"epoch": 7, "large": 2**40, "best": 1, "name": "B\u00e4r"}, {}
for name, make in OPTIMIZERS.items():
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1))
    optimizer = make([{"params": [*model[0].parameters(), *model[1].parameters()]},
                      {"params": model[2].parameters(), "lr": 0.05, "weight_decay": 0.0}])

    def step():
        optimizer.zero_grad()
        model(torch.rand(4, 3)).square().sum().backward()
        optimizer.step()
        return [p.grad.clone() for p in model.parameters()]

    for _ in range(3):
        step()
    twin = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1))
    twin.load_state_dict(model.state_dict())
    now[f"{name}_model"] = twin.state_dict()
    now[f"{name}_optimizer"] = copy.deepcopy(optimizer.state_dict())
    later[f"{name}_gradients"] = [step(), step()]
    later[f"{name}_after"] = [p.detach().clone() for p in model.parameters()]
torch.save(now, pathlib.Path(__file__).with_name("python.pt"))
torch.save(later, pathlib.Path(__file__).with_name("python_next.pt"))
