"""Records the averages of ema_test.cpp: `python ema_averages.py > ema_averages.txt`.

Each line has a name and, after each update, the average of a float64 weight that is n * n at update n. Needs torch and diffusers.
"""

import torch
from diffusers.training_utils import EMAModel


def record(name, **options):
    weight = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    ema = EMAModel([weight], **options)
    ema.step([weight])  # copies the weights, as Ema's constructor does
    averages = []
    for n in range(1, 31):
        with torch.no_grad():
            weight.fill_(n * n)
        ema.step([weight])
        averages.append(ema.shadow_params[0].item())
    print(name, *map(repr, averages))


if __name__ == "__main__":
    record("num_updates", decay=0.7)
    record("power", decay=0.999, use_ema_warmup=True)
    record("slow_power", decay=0.8, use_ema_warmup=True, inv_gamma=2.0, power=0.75)
