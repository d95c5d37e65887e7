#!/usr/bin/env python3
"""Trains under Python's DistributedDataParallel over Gloo with 1, 2 and 4 processes, and writes the weights that each
number of them ends with, for mpi_distributed_data_parallel_test.cpp.

    data_parallel.py data_parallel.pt
"""

import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def waves(count, factor):
    return torch.sin(torch.arange(count, dtype=torch.float64) * factor).float()


def train(rank, size, path):
    dist.init_process_group("gloo", init_method=f"file://{path}.meeting{size}", rank=rank, world_size=size)
    model = torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.Tanh(), torch.nn.Linear(12, 2))
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter.copy_((waves(parameter.numel(), 0.7 * (i + 1)) * 0.4).view_as(parameter))
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(20):
        x = waves(24 * 6, 0.1 * (step + 1)).view(24, 6).chunk(size)[rank]
        optimizer.zero_grad()
        (parallel(x) - 0.5).square().mean().backward()
        optimizer.step()
    if rank == 0:
        torch.save(torch.cat([p.detach().flatten() for p in model.parameters()]), f"{path}.{size}")
    dist.destroy_process_group()


if __name__ == "__main__":
    for size in (1, 2, 4):
        mp.spawn(train, args=(size, sys.argv[1]), nprocs=size)
    torch.save({str(size): torch.load(f"{sys.argv[1]}.{size}") for size in (1, 2, 4)}, sys.argv[1])
