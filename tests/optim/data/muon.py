"""muon.py FILE [COUNT [PROGRAM]]: records COUNT (12) random trainings with Python's torch.optim.Muon, and the resulting
weights. With PROGRAM (mezzo_tests) it then compares mezzo's results on this machine bitwise."""
import os
import pathlib
import random
import subprocess
import sys

try:
    import torch
except ImportError as missing:
    print(f"not compared: {missing}")
    sys.exit(77)

file, count = pathlib.Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 12
torch.manual_seed(0)
random.seed(0)
torch.set_num_threads(1)
cases = []
for _ in range(count):
    options = {
        "lr": random.choice([1e-3, 2e-2]),
        "weight_decay": random.choice([0.0, 0.1]),
        "momentum": random.choice([0.0, 0.9, 0.95]),
        "nesterov": random.random() < 0.7,
        "ns_coefficients": random.choice([(3.4445, -4.7750, 2.0315), (2.0, -1.5, 0.5)]),
        "eps": random.choice([1e-7, 1e-3]),
        "ns_steps": random.choice([0, 1, 5]),
        "adjust_lr_fn": random.choice(["original", "match_rms_adamw"]),
    }
    dtype = random.choice([torch.float32, torch.float32, torch.bfloat16, torch.float64])
    options["nesterov"] |= dtype == torch.bfloat16  # without, Python's step writes its mean
    weights = [torch.randn(random.randint(1, 9), random.randint(1, 9), dtype=dtype) * 0.02 for _ in range(2)]
    parameters = [weight.clone() for weight in weights]
    optimizer = torch.optim.Muon(parameters, **options)
    gradients = []
    for _ in range(3):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter) * random.choice([1.0, 1e-3])
        if random.random() < 0.3:
            parameters[0].grad = None
        gradients.append([torch.empty(0) if p.grad is None else p.grad.clone() for p in parameters])
        optimizer.step()
    cases.append({"weights": weights, "gradients": gradients, "expected": parameters, **options})
torch.save(cases, file)
if len(sys.argv) > 3:
    test = subprocess.run([sys.argv[3], "--gtest_filter=Muon*"], capture_output=True, text=True, check=False,
                          env={**os.environ, "MEZZO_MUON_CASES": str(file)})
    print(test.stdout + test.stderr)
    sys.exit(test.returncode or "Running 0 tests" in test.stdout)
