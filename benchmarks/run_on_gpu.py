#!/usr/bin/env python3
"""Tests, sanitizers, benchmarks and the main job on this machine's first GPU, in eight minutes.

`./bootstrap gpu` builds the programs. All results go to benchmarks/results/gpu.json, and one page for a person to
benchmarks/results/gpu.md. The page names every part that cannot be run here, with its reason. Each part has its share
of the eight minutes; a part that needs more is stopped, and the page says so. Exits with 1 if a part failed.
"""
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import gpu_machine

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "gpu"
RESULTS = ROOT / "benchmarks" / "results"

# Seconds, together eight minutes.
TESTS_MAY_TAKE, SANITIZER_MAY_TAKE, BENCHMARKS_MAY_TAKE, A_PRECISION_MAY_TAKE = 50, 45, 70, 30

# How the main job is run in each precision. On CUDA `amp` is autocast to float16 unless the environment says otherwise;
# TF32 is float32 whose products libtorch rounds.
PRECISIONS = {"fp32": ("fp32", {}), "tf32": ("fp32", {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}),
              "fp16": ("amp", {"MEZZO_AUTOCAST": "fp16"}), "bf16": ("amp", {"MEZZO_AUTOCAST": "bf16"})}

# Mezzo's kernels alone are checked, so that the time is enough. initcheck has to see who writes memory, and so checks
# all; each tensor has memory of its own there, which captures do not allow.
ONLY_MEZZOS = ["--kernel-name", "kernel_substring=mezzo"]
SANITIZERS = {"memcheck": ONLY_MEZZOS, "racecheck": ONLY_MEZZOS, "synccheck": ONLY_MEZZOS, "initcheck": []}
ERRORS_FOUND = 99
OWN_MEMORY = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


def stop(process):
    """Ends a process with its children; returns what they printed. A first signal lets them write what they hold."""
    for number in (signal.SIGINT, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            return process.communicate(timeout=5)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            pass
    return process.communicate()


def run(command, limit, environment=None):
    """Returns how the command went, and what it printed on standard output and error."""
    print("$", " ".join(str(word) for word in command), flush=True)
    start = time.monotonic()
    try:
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                   errors="replace", env=dict(os.environ, **(environment or {})), start_new_session=True)
        try:
            said, complained = process.communicate(timeout=limit)
            outcome = {"exit_code": process.returncode}
        except subprocess.TimeoutExpired:
            said, complained = stop(process)
            outcome = {"exit_code": None, "stopped_after": limit}
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


# How a finding begins; the lines that belong to it are indented.
FINDING = re.compile(r"^========= (?:Invalid|Misaligned|Uninitialized|Barrier|Error|Warning: Race|Race|Program hit)")


def findings_of(said):
    """Returns compute-sanitizer's findings in mezzo's kernels, each as its lines."""
    findings = []
    for line in said.splitlines():
        if FINDING.match(line):
            findings.append([line])
        elif findings and line.startswith("=========     "):
            findings[-1].append(line)
        else:
            findings.append([])
    return [lines for lines in findings if any("mezzo" in line for line in lines)]


def sanitizer_outcome(outcome, said, checks_all=False):
    """Judges what compute-sanitizer printed; a tool that was stopped is judged by what it printed until then.

    With `checks_all` only findings in mezzo's kernels count; otherwise the tool's own sum at the end counts too."""
    findings = findings_of(said)
    errors = re.search(r"ERROR SUMMARY: (\d+) error", said)
    hazards = re.search(r"RACECHECK SUMMARY: (\d+) hazards? displayed", said)
    found = errors or hazards
    outcome["findings"] = [line.removeprefix("=========").strip() for lines in findings for line in lines[:2]][:8]
    outcome["to_its_end"] = found is not None
    if found and not checks_all:
        outcome["errors"] = max(int(found[1]), len(findings))
    elif found or findings or "stopped_after" in outcome:
        outcome["errors"] = len(findings)
    else:
        outcome["errors"] = None
    went_well = outcome["exit_code"] == 0 or "stopped_after" in outcome
    # Its exit status of 99 says that there were errors, and which count is known by now.
    went_well = went_well or (outcome["exit_code"] == ERRORS_FOUND and checks_all)
    outcome["ok"] = went_well and outcome["errors"] == 0
    return outcome


def sanitizer():
    """Where compute-sanitizer is, or None."""
    folders = [os.environ.get("CUDA_HOME", "/usr/local/cuda"), ROOT / ".deps" / "cuda"]
    return shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path=os.pathsep.join(f"{folder}/bin" for folder in folders))


def run_sanitizers(skipped):
    program = sanitizer()
    if program is None:
        for tool in SANITIZERS:
            skipped[tool] = "compute-sanitizer is neither on PATH nor in CUDA's folder; PyPI has nvidia-cuda-sanitizer-api"
        return {}
    outcomes = {}
    for tool, kernels in SANITIZERS.items():
        tests = [BUILD / "tests" / "cuda" / "mezzo_cuda_tests", "--gtest_brief=1"]
        if not kernels:
            tests.append("--gtest_filter=-*Graph*:*Captur*")
        outcome, said, complained = run([program, "--tool", tool, "--error-exitcode", str(ERRORS_FOUND), *kernels, *tests],
                                        SANITIZER_MAY_TAKE, None if kernels else OWN_MEMORY)
        outcomes[tool] = sanitizer_outcome(outcome, said + complained, checks_all=not kernels)
        if "stopped_after" in outcome:
            skipped[f"{tool} to its end"] = (f"it was stopped after {SANITIZER_MAY_TAKE} s, with {outcome['errors']} errors "
                                             "until then")
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


def machine(skipped):
    """The GPU, its driver, and what the programs were built with."""
    gpus = gpu_machine.gpus()
    if not gpus:
        sys.exit("run_on_gpu.py: nvidia-smi names no GPU here; nothing was run")
    found = dict(gpus[0])
    nvcc = re.search(r"release ([\d.]+)", gpu_machine.output_of("nvcc", "--version"))
    if nvcc:
        found["nvcc"] = nvcc[1]
    else:
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
    if not outcome["ok"]:
        return "FAILED"
    return f"stopped after {outcome['stopped_after']} s" if "stopped_after" in outcome else "ok"


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
        lines.append(f"| {tool} | {verdict(outcome)} | {number(outcome['errors'], 'd')} errors"
                     + "".join(f"<br>{finding}" for finding in outcome["findings"]) + " |")
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
