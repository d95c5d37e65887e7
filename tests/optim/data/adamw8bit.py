"""Distance of bitsandbytes' AdamW8bit from torch's AdamW, for adamw8bit_test.cpp.

    pip install bitsandbytes==0.50.2 torch==2.11.0
    python adamw8bit.py

The steps are those of AdamW8bit.MatchesBitsandbytesErrorAfter1000Steps, with the same values.
"""

import bitsandbytes
import torch

SIZE = 8192
STEPS = 1000


def make_values(count, state):
    """Values in [-1, 1) from a linear congruential generator."""
    drawn = []
    for _ in range(count):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        drawn.append((state >> 40) / 2**23 - 1)
    return torch.tensor(drawn, dtype=torch.float32)


def reached(make):
    parameter = make_values(SIZE, 1).requires_grad_()
    target = make_values(SIZE, 2)
    noise = make_values(8 * SIZE, 3).view(8, SIZE)
    optimizer = make([parameter])
    for i in range(STEPS):
        parameter.grad = (parameter.detach() - target) + noise[i % 8] * 4.0 ** -(i % 5)
        optimizer.step()
    return parameter.detach()


def main():
    options = {"lr": 1e-3, "weight_decay": 0.01}
    wide = reached(lambda parameters: torch.optim.AdamW(parameters, **options))
    narrow = reached(lambda parameters: bitsandbytes.optim.AdamW8bit(parameters, **options))
    apart = (narrow - wide).norm() / (wide - make_values(SIZE, 1)).norm()
    print(f"bitsandbytes {bitsandbytes.__version__}, torch {torch.__version__}: {STEPS} steps of AdamW8bit end {apart:.5f} of")
    print("the way apart from torch.optim.AdamW")


main()
