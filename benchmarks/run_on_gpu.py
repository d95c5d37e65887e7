#!/usr/bin/env python3
"""The first ten minutes on a GPU: tests, sanitizers, benchmarks and the main job, on this machine's first GPU.

`./bootstrap gpu` builds what this runs. All results go to benchmarks/results/gpu.json, and what a person wants to
know of them, one page, to benchmarks/results/gpu.md. What cannot be run here is named there with its reason. Each
part has its share of eight minutes; one that needs more is stopped and named, too. Exits with 1 if a part failed.
"""
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "gpu"
RESULTS = ROOT / "benchmarks" / "results"

# Seconds, together eight minutes.
TESTS_MAY_TAKE, SANITIZER_MAY_TAKE, BENCHMARKS_MAY_TAKE, A_PRECISION_MAY_TAKE = 60, 50, 70, 35

# How the main job is run in each precision. On CUDA `amp` is autocast to float16 unless the environment says otherwise;
# TF32 is float32 whose products libtorch rounds.
PRECISIONS = {"fp32": ("fp32", {}), "tf32": ("fp32", {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}),
              "fp16": ("amp", {"MEZZO_AUTOCAST": "fp16"}), "bf16": ("amp", {"MEZZO_AUTOCAST": "bf16"})}

SANITIZERS = ("memcheck", "racecheck", "synccheck")


def run(command, limit, environment=None):
    """Returns how the command went, and what it printed on standard output and error."""
    print("$", " ".join(str(word) for word in command), flush=True)
    start = time.monotonic()
    try:
        done = subprocess.run(command, cwd=ROOT, check=False, timeout=limit, capture_output=True, text=True,
                              errors="replace", env=dict(os.environ, **(environment or {})))
        outcome = {"exit_code": done.returncode}
        said, complained = done.stdout, done.stderr
    except subprocess.TimeoutExpired as stopped:
        outcome = {"exit_code": None, "stopped_after": limit}
        said, complained = ((text or b"").decode(errors="replace") for text in (stopped.stdout, stopped.stderr))
    except OSError as error:
        outcome, said, complained = {"exit_code": None, "error": str(error)}, "", ""
    outcome["seconds"] = round(time.monotonic() - start, 1)
    if outcome["exit_code"] != 0:
        outcome["last_lines"] = (said + complained).splitlines()[-20:]
        print("\n".join(outcome["last_lines"]), flush=True)
    return outcome, said, complained


def run_for_file(command, report, limit, environment=None):
    """The same for a command that writes JSON to `report`; returns how it went and what it wrote."""
    report.unlink(missing_ok=True)
    outcome = run(command, limit, environment)[0]
    return outcome, json.loads(report.read_text()) if report.exists() else None


def test_outcome(outcome, written):
    """What googletest's report says."""
    tests = [test for suite in (written or {}).get("testsuites", []) for test in suite["testsuite"]]
    names = lambda chosen: [f"{test['classname']}.{test['name']}" for test in tests if chosen(test)]
    outcome["failed"] = names(lambda test: "failures" in test)
    outcome["skipped"] = names(lambda test: test["result"] == "SKIPPED")
    outcome["passed"] = len(tests) - len(outcome["failed"]) - len(outcome["skipped"])
    # A test that skips itself has shown nothing, and neither has a program without any.
    outcome["ok"] = outcome["exit_code"] == 0 and outcome["passed"] > 0 and not outcome["skipped"]
    return outcome


def run_tests(program):
    report = BUILD / f"{program}.json"
    command = [BUILD / "tests" / "cuda" / program, f"--gtest_output=json:{report}"]
    return test_outcome(*run_for_file(command, report, TESTS_MAY_TAKE))


def sanitizer_outcome(outcome, said):
    """What compute-sanitizer's last line says; it prints one of the two for each tool."""
    errors = re.search(r"ERROR SUMMARY: (\d+) error", said)
    hazards = re.search(r"RACECHECK SUMMARY: (\d+) hazards? displayed \((\d+) errors?, (\d+) warnings?\)", said)
    found = errors or hazards
    outcome["errors"] = int(found[1]) if found else None
    outcome["ok"] = outcome["exit_code"] == 0 and outcome["errors"] == 0
    return outcome


def sanitizer():
    """Where compute-sanitizer is, or None."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=f"{home}/bin")


def run_sanitizers(skipped):
    program = sanitizer()
    if program is None:
        for tool in SANITIZERS:
            skipped[tool] = "compute-sanitizer is neither on PATH nor in CUDA's folder"
        return {}
    outcomes = {}
    for tool in SANITIZERS:
        outcome, said, complained = run([program, "--tool", tool, "--error-exitcode", "99",
                                         BUILD / "tests" / "cuda" / "mezzo_cuda_tests", "--gtest_brief=1"],
                                        SANITIZER_MAY_TAKE)
        outcomes[tool] = sanitizer_outcome(outcome, said + complained)
        if "stopped_after" in outcome:
            skipped[f"{tool} to its end"] = f"it was stopped after {SANITIZER_MAY_TAKE} s, which says nothing"
            outcomes[tool]["ok"] = True
    return outcomes


def run_benchmarks():
    outcome, said, _ = run([BUILD / "benchmarks" / "cuda" / "cuda_bench"], BENCHMARKS_MAY_TAKE)
    try:
        outcome["rows"] = json.loads(said)
    except ValueError:
        outcome["rows"] = None
    outcome["ok"] = outcome["exit_code"] == 0 and bool(outcome["rows"])
    return outcome


def run_main_job(name):
    precision, environment = PRECISIONS[name]
    report = BUILD / f"main_job_{name}.json"
    program = BUILD / "examples" / "bert_ner" / "bert_ner"
    outcome, written = run_for_file([program, "--device", "cuda", "--precision", precision, "--model", ".deps/model",
                                     "--data", ".deps/ner.txt", "--json", report],
                                    report, A_PRECISION_MAY_TAKE, environment)
    outcome["result"] = written
    outcome["ok"] = outcome["exit_code"] == 0 and written is not None
    return outcome


def gpus_of(said):
    """[{"gpu", "driver", "compute_capability"}] of what nvidia-smi prints."""
    keys = ("gpu", "driver", "compute_capability")
    rows = [[field.strip() for field in line.split(",")] for line in said.splitlines() if line.count(",") == 2]
    return [dict(zip(keys, row)) for row in rows]


def machine(skipped):
    """The GPU, its driver, and what the programs were built with."""
    try:
        said = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version,compute_cap", "--format=csv,noheader"],
                              capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        said = ""
    gpus = gpus_of(said)
    if not gpus:
        sys.exit("run_on_gpu.py: nvidia-smi names no GPU here; nothing was run")
    found = dict(gpus[0])
    try:
        nvcc = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
        found["nvcc"] = nvcc.split("release ")[1].split(",")[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        skipped["nvcc's version"] = "nvcc is not on PATH any more"
    package = ROOT / ".deps" / "libtorch" / "share/cmake/Torch/TorchConfigVersion.cmake"
    if package.exists():
        found["libtorch"] = package.read_text().split('"')[1]
    if len(gpus) < 2:
        skipped["NCCL between GPUs"] = f"this machine has {len(gpus)} GPU"
    else:
        skipped["NCCL between GPUs"] = "no part of this run; see `bert_ner --help` for several ranks"
    return found


# --- One page ----------------------------------------------------------------------------------------------------------


def verdict(outcome):
    if "stopped_after" in outcome:
        return f"stopped after {outcome['stopped_after']} s"
    return "ok" if outcome["ok"] else "FAILED"


def score_of(result):
    """(F1, tokens a second, peak memory in MB) of a run's JSON; None where it is missing."""
    rows = (result or {}).get("rows") or [{}]
    memory = rows[0].get("peak_memory_bytes")
    return rows[0].get("f1"), rows[0].get("tokens_per_second"), memory / 1e6 if memory else None


def page(results):
    """What a person wants to know."""
    number = lambda value, form: "-" if value is None else format(value, form)
    lines = [f"# {results['machine']['gpu']}", "",
             ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in results["machine"].items() if key != "gpu"),
             "", "| part | | |", "|---|---|---|"]
    for key, title in (("tests_with_mezzo_kernels", "tests, mezzo's kernels"),
                       ("tests_with_aten_kernels", "tests, ATen's kernels")):
        outcome = results[key]
        lines.append(f"| {title} | {verdict(outcome)} | {outcome['passed']} passed"
                     + (f", failed: {', '.join(outcome['failed'])}" if outcome["failed"] else "")
                     + (f", skipped: {', '.join(outcome['skipped'])}" if outcome["skipped"] else "") + " |")
    for tool, outcome in results["sanitizers"].items():
        lines.append(f"| {tool} | {verdict(outcome)} | {number(outcome['errors'], 'd')} errors |")
    lines.append(f"| benchmarks | {verdict(results['benchmarks'])} | |")
    lines += ["", "| benchmark | | ms | GB/s | launches |", "|---|---|---:|---:|---:|"]
    for row in results["benchmarks"].get("rows") or []:
        launches = row["launches"] if row["launches"] >= 0 else "-"
        speed = f"{row['gb_per_s']:.0f}" if row["gb_per_s"] else "-"
        lines.append(f"| {row['what']} | {row['peer']} | {row['ms']:.3f} | {speed} | {launches} |")
    lines += ["", "| main job | | F1 | tokens/s | peak MB |", "|---|---|---:|---:|---:|"]
    for name, outcome in results["main_job"].items():
        f1, speed, memory = score_of(outcome["result"])
        lines.append(f"| {name} | {verdict(outcome)} | {number(f1, '.4f')} | {number(speed, '.0f')} | "
                     f"{number(memory, '.0f')} |")
    if results["skipped"]:
        lines += ["", "Not run here:"] + [f"- {what}: {why}" for what, why in results["skipped"].items()]
    return "\n".join(lines) + "\n"


def failures(results):
    parts = {key: value for key, value in results.items() if key not in ("machine", "skipped")}
    parts.update(parts.pop("sanitizers"))
    parts.update({f"main job {name}": outcome for name, outcome in parts.pop("main_job").items()})
    return [name for name, outcome in parts.items() if not outcome["ok"]]


def main():
    skipped = {}
    results = {"machine": machine(skipped), "tests_with_mezzo_kernels": run_tests("mezzo_cuda_tests"),
               "tests_with_aten_kernels": run_tests("mezzo_cuda_aten_tests"), "sanitizers": run_sanitizers(skipped),
               "benchmarks": run_benchmarks(), "main_job": {name: run_main_job(name) for name in PRECISIONS},
               "skipped": skipped}
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "gpu.json").write_text(json.dumps(results, indent=2) + "\n")
    (RESULTS / "gpu.md").write_text(page(results))
    print(page(results))
    failed = failures(results)
    print("benchmarks/results/gpu.json:", "failed: " + ", ".join(failed) if failed else "all went well")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
