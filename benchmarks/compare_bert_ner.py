#!/usr/bin/env python3
"""Compares the BERT NER example with the same training in Python's torch.amp and AdamW(fused=True), on equal batches.

    compare_bert_ner.py build/bert-ner/examples/bert_ner/bert_ner MODEL CONLL [--turns N] [--max-steps N]

First checks that both programs compute the same losses: that of step 1, from the same initial weights, and that of the last
step. The programs alternate, since each uses all cores; ratios are medians over the turns. Needs a Python with torch.
"""
import argparse
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile

import torch

BASELINE = pathlib.Path(__file__).parent / "cuda" / "bert_ner_torch.py"
PRECISIONS = {"fp32": "fp32", "amp": "bf16"}  # of the example, and of the baseline
# Relative difference of the losses in step 1 and in the last step. The programs add in different orders, which later steps amplify.
TOLERANCES = {"fp32": (1e-4, 0.05), "amp": (1e-2, 0.05)}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", help="bert_ner, as ./bootstrap bert-ner builds it")
    parser.add_argument("model")
    parser.add_argument("conll")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--max-steps", type=int, default=30)
    return parser.parse_args()


def run_example(options, precision, steps):
    """Returns (training options, loss of the last step, tokens per second)."""
    with tempfile.TemporaryDirectory() as directory:
        results = pathlib.Path(directory) / "results.json"
        command = [options.program, "--model", options.model, "--data", options.conll, "--precision", precision,
                   "--max-steps", str(steps), "--json", results]
        progress = subprocess.run(command, check=True, capture_output=True, text=True).stderr
        measured = json.loads(results.read_text())
    loss = re.findall(r"^step \d+/\d+  loss ([0-9.]+)", progress, re.MULTILINE)[-1]
    return measured["training"], float(loss), measured["rows"][0]["tokens_per_second"]


def run_baseline(options, precision, steps, training):
    """Returns (loss of the last step, tokens per second)."""
    command = [sys.executable, BASELINE, options.model, options.conll, "--device", "cpu", "--precision", PRECISIONS[precision],
               "--max-steps", str(steps)]
    for name in ("batch_size", "epochs", "learning_rate", "warmup", "seed"):
        command += ["--" + name.replace("_", "-"), str(training[name])]
    measured = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    return measured["loss"], measured["tokens_per_second"]


def check_losses(precision, step, tolerance, example, baseline):
    difference = abs(example - baseline) / abs(baseline)
    print(f"{precision}, step {step}: loss {example:.4f}, Python {baseline:.4f}")
    if not difference <= tolerance:
        sys.exit(f"compare_bert_ner.py: the programs do not train alike: the losses differ by {difference:.2%}")


def main():
    options = arguments()
    # Both wait as the example's table does, on cores that other programs may use.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    threads = os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))
    speeds = {precision: ([], []) for precision in PRECISIONS}
    for precision in PRECISIONS:
        training, loss, _ = run_example(options, precision, 1)
        check_losses(precision, 1, TOLERANCES[precision][0], loss, run_baseline(options, precision, 1, training)[0])
    for _ in range(options.turns):
        for precision, (example, baseline) in speeds.items():
            training, loss, speed = run_example(options, precision, options.max_steps)
            python_loss, python_speed = run_baseline(options, precision, options.max_steps, training)
            check_losses(precision, options.max_steps, TOLERANCES[precision][1], loss, python_loss)
            example.append(speed)
            baseline.append(python_speed)
    print(f"torch {torch.__version__}, {threads} threads, {options.turns} turns of {options.max_steps} steps, "
          f"batches of {training['batch_size']}; tokens per second")
    print(f"{'':6} {'mezzo':>8} {'torch.amp, fused=True':>22} {'ratio':>6}")
    for precision, (example, baseline) in speeds.items():
        ratio = statistics.median(a / b for a, b in zip(example, baseline))
        print(f"{precision:6} {statistics.median(example):8.0f} {statistics.median(baseline):22.0f} {ratio:6.2f}")


if __name__ == "__main__":
    main()
