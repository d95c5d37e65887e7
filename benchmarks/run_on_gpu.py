#!/usr/bin/env python3
"""Runs the CUDA tests and the main job on this machine's GPU into benchmarks/results/gpu.json.

`./bootstrap gpu` builds what this runs. Exits with 1 if anything failed; the results say what.
"""
import json
import pathlib
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "gpu"
RESULTS = ROOT / "benchmarks" / "results" / "gpu.json"


def run(command, report):
    """Runs the command, which writes JSON to `report`; returns how it went and what it wrote."""
    print("$", " ".join(str(word) for word in command), flush=True)
    report.unlink(missing_ok=True)
    start = time.monotonic()
    exit_code = subprocess.run(command, cwd=ROOT, check=False).returncode
    outcome = {"exit_code": exit_code, "seconds": round(time.monotonic() - start, 1)}
    return outcome, json.loads(report.read_text()) if report.exists() else None


def run_tests(program):
    report = BUILD / f"{program}.json"
    command = [BUILD / "tests" / "cuda" / program, f"--gtest_output=json:{report}"]
    outcome, written = run(command, report)
    tests = [test for suite in (written or {}).get("testsuites", []) for test in suite["testsuite"]]
    names = lambda chosen: [f"{test['classname']}.{test['name']}" for test in tests if chosen(test)]
    outcome["failed"] = names(lambda test: "failures" in test)
    outcome["skipped"] = names(lambda test: test["result"] == "SKIPPED")
    outcome["passed"] = len(tests) - len(outcome["failed"]) - len(outcome["skipped"])
    # A test that skips itself has shown nothing, and neither has a program without any.
    outcome["ok"] = outcome["exit_code"] == 0 and outcome["passed"] > 0 and not outcome["skipped"]
    return outcome


def run_main_job():
    report = BUILD / "main_job.json"
    program = BUILD / "examples" / "bert_ner" / "bert_ner"
    outcome, written = run([program, "--device", "cuda", "--model", ".deps/model",
                            "--data", ".deps/ner.txt", "--json", report], report)
    outcome["table"] = written
    outcome["ok"] = outcome["exit_code"] == 0 and written is not None
    return outcome


def machine():
    """The GPU, its driver, and what the programs were built with."""
    gpu = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version,compute_cap",
                          "--format=csv,noheader"],
                         capture_output=True, text=True, check=True).stdout.splitlines()[0]
    name, driver, compute_capability = (field.strip() for field in gpu.split(","))
    nvcc = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    package = ROOT / ".deps" / "libtorch" / "share/cmake/Torch/TorchConfigVersion.cmake"
    version = package.read_text().split('"')[1]
    return {"gpu": name, "driver": driver, "compute_capability": compute_capability,
            "nvcc": nvcc.split("release ")[1].split(",")[0], "libtorch": version}


def main():
    results = {"machine": machine(), "tests_with_mezzo_kernels": run_tests("mezzo_cuda_tests"),
               "tests_with_aten_kernels": run_tests("mezzo_cuda_aten_tests"),
               "main_job": run_main_job()}
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=2) + "\n")
    failed = [part for part, outcome in results.items() if not outcome.get("ok", True)]
    print(f"{RESULTS.relative_to(ROOT)}:",
          "failed: " + ", ".join(failed) if failed else "all went well")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
