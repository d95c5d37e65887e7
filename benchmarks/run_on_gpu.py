#!/usr/bin/env python3
"""Runs tests, benchmarks, the BERT NER example and compute-sanitizer on this machine's first GPU, in about eight minutes.

    run_on_gpu.py [--out DIRECTORY] [--budget SECONDS] [PART...]
    run_on_gpu.py --list

In a checkout it runs the programs of `./bootstrap gpu`, and writes to benchmarks/results. In an unpacked archive of
`./bootstrap gpu-pack`, where it is `./run`, it runs the archive's programs, and writes to the directory `results`. It needs
Python's standard library, and no network.

Parts run one after another, the most important first, each with a time limit. Output is printed and written to gpu.log
immediately; the report gpu.md and gpu.json are rewritten after each part and each row of a benchmark, so that a killed run
leaves its results. Exits with 1 if a part failed.
"""
import argparse
import json
import os
import pathlib
import platform
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

import check_gpu_environment

HERE = pathlib.Path(__file__).resolve().parent
PACKED = HERE / "packed.json"  # in an archive

# The BERT NER example's option and environment for each precision. `amp` on CUDA is autocast to float16 unless the environment
# overrides it. TF32 is float32 with rounded products.
PRECISIONS = {"fp32": ("fp32", {}), "tf32": ("fp32", {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}),
              "fp16": ("amp", {"MEZZO_MIXED_PRECISION": "fp16"}), "bf16": ("amp", {"MEZZO_MIXED_PRECISION": "bf16"})}

# Only mezzo's kernels are checked, to save time. initcheck must observe every write, so it checks all kernels, without the caching
# allocator, which graph capture needs.
ONLY_MEZZO = ["--kernel-name", "kernel_substring=mezzo"]
SANITIZERS = {"memcheck": ONLY_MEZZO, "racecheck": ONLY_MEZZO, "synccheck": ONLY_MEZZO, "initcheck": []}
ERRORS_FOUND = 99
# Tests that take minutes under a sanitizer: huge tensors, and ATen's kernels.
SLOW_TESTS = "*EveryElement:*Beyond2To32*:AutocastEveryOp.*"

NO_GPU = 77  # exit status of a program without a GPU
NO_DEVICE = "libtorch sees no CUDA device"  # why a test skips itself


class Stopped(Exception):
    """The run was interrupted by a signal, for example from a scheduler."""


# --- Parts and programs -------------------------------------------------------------------------------------------------


class Programs:
    """Paths of the programs, the model and the baselines, in a checkout or an archive."""

    def __init__(self):
        if PACKED.exists():
            self.root, self.results = HERE, HERE / "results"
            self.directories = [HERE / "bin"]
            self.model, self.data = HERE / "model", HERE / "ner.txt"
            self.baselines = HERE
        else:
            self.root, self.results = HERE.parent, HERE / "results"
            self.directories = [self.root / "build" / "cuda" / directory
                            for directory in ("tests/cuda", "benchmarks/cuda", "examples/bert_ner")]
            self.model, self.data = self.root / ".deps" / "model", self.root / ".deps" / "ner.txt"
            self.baselines = HERE / "cuda"

    def find(self, name):
        for directory in self.directories:
            if (directory / name).exists():
                return directory / name
        return self.directories[0] / name


class Part:
    """A command with a time limit in seconds. `skip_reason` is why it cannot run on this machine, or None."""

    def __init__(self, name, title, kind, command, limit, environment=None, skip_reason=None):
        self.name, self.title, self.kind, self.command, self.limit = name, title, kind, command, limit
        self.environment, self.skip_reason = environment or {}, skip_reason


def sanitizer(root):
    """The path of compute-sanitizer, or None."""
    directories = [os.environ.get("CUDA_HOME", "/usr/local/cuda"), root / ".deps" / "cuda"]
    return shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path=os.pathsep.join(f"{directory}/bin" for directory in directories))


def all_parts(programs, python_skip_reason, out):
    """Returns the parts in order. `python_skip_reason` is why the Python baselines cannot run, or None."""
    tests, aten_tests = programs.find("mezzo_cuda_tests"), programs.find("mezzo_cuda_aten_tests")
    report = lambda name: f"--gtest_output=json:{out / (name + '.json')}"
    no_model = None if (programs.model / "model.safetensors").exists() else f"no model in {programs.model}"
    parts = [
        Part("tests", "tests, mezzo's kernels", "tests", [tests, report("tests")], 90),
        Part("aten-tests", "tests, ATen's kernels", "tests",
             [aten_tests, "--gtest_filter=-KernelsCuda.*", report("aten-tests")], 60),
        Part("bench", "benchmarks", "rows", [programs.find("cuda_bench")], 120),
        Part("bench-python", "benchmarks, Python's torch.amp", "rows",
             [sys.executable, programs.baselines / "torch_amp_bench.py"], 60, skip_reason=python_skip_reason),
    ]
    for name, (precision, environment) in PRECISIONS.items():
        command = [programs.find("bert_ner"), "--quiet", "--device", "cuda", "--precision", precision, "--model",
                   programs.model, "--data", programs.data, "--json", out / f"main-{name}.json"]
        parts.append(Part(f"main-{name}", f"BERT NER, {name}", "main", command, 30, environment, no_model))
        baseline = [sys.executable, programs.baselines / "bert_ner_torch.py", programs.model, programs.data, "--precision", name]
        parts.append(Part(f"main-{name}-python", f"BERT NER, {name}, Python's torch.amp", "rows", baseline, 40,
                          skip_reason=python_skip_reason or no_model))
    tool = sanitizer(programs.root)
    no_tool = None if tool else "compute-sanitizer is neither on PATH nor in CUDA's directory; PyPI has nvidia-cuda-sanitizer-api"
    for name, kernels in SANITIZERS.items():
        excluded = SLOW_TESTS + ("" if kernels else ":*Graph*:*Captur*")
        command = [tool, "--tool", name, "--error-exitcode", str(ERRORS_FOUND), *kernels, tests, "--gtest_brief=1",
                   f"--gtest_filter=-{excluded}"]
        environment = {} if kernels else {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        parts.append(Part(name, f"compute-sanitizer {name}", "sanitizer", command, 45, environment, no_tool))
    return parts


def torch_of_python():
    """The directory of Python's torch, or None."""
    script = ("import importlib.util, os; spec = importlib.util.find_spec('torch'); "
              "print(spec.submodule_search_locations[0] if spec else '')")
    directory = check_gpu_environment.output_of(sys.executable, "-c", script).strip()
    return pathlib.Path(directory) if directory else None


def named_torch():
    """The libtorch of Torch_DIR, or None."""
    package = os.environ.get("Torch_DIR")
    if not package:
        return None
    directory = pathlib.Path(package)
    return next((root for root in (directory, *directory.parents) if (root / "lib" / "libtorch_cuda.so").exists()), directory)


def version_of(libtorch):
    package = libtorch / "share/cmake/Torch/TorchConfigVersion.cmake"
    found = re.search(r'PACKAGE_VERSION "([^"]*)"', package.read_text()) if package.exists() else None
    return found[1] if found else None


def use_libraries_of(libtorch):
    """Puts a libtorch and the CUDA libraries next to it on LD_LIBRARY_PATH."""
    directories = [HERE / "lib", libtorch / "lib", *sorted((libtorch.parent / "nvidia").glob("*/lib")),
               pathlib.Path("/usr/local/cuda/lib64")]
    old = os.environ.get("LD_LIBRARY_PATH")
    os.environ["LD_LIBRARY_PATH"] = os.pathsep.join([*(str(directory) for directory in directories if directory.is_dir()),
                                                    *([old] if old else [])])


def check_pack(gpu):
    """Exits with a message if the archive does not match this machine. Returns packed.json."""
    packed = json.loads(PACKED.read_text())
    libtorch = named_torch() or torch_of_python()
    if libtorch is None:
        sys.exit("run: no libtorch was found: set Torch_DIR, or run with a python3 that has torch (PYTHON=... ./run)")
    version = version_of(libtorch)
    if version and version.split("+")[0].split(".")[:2] != packed["libtorch"].split(".")[:2]:
        sys.exit(f"run: the programs were built for libtorch {packed['libtorch']}, but {libtorch} has {version}: pack again "
                 "with that version")
    capability, built = gpu["compute_capability"], packed["architectures"]
    if not runs_on(capability, built):
        sys.exit(f"run: the kernels were compiled for {built}, but {gpu['gpu']} has {capability}: pack again with "
                 f"TORCH_CUDA_ARCH_LIST={capability}")
    try:
        check_gpu_environment.check_driver(gpu, libtorch)
    except check_gpu_environment.VersionMismatch as mismatch:
        sys.exit(f"run: {mismatch}")
    use_libraries_of(libtorch)
    return dict(packed, libtorch=version or packed["libtorch"], libtorch_folder=str(libtorch))


def runs_on(capability, built):
    """Whether a GPU runs kernels of these architectures: of its major version and not newer, or PTX that is not newer."""
    number = lambda version: tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    for architecture in re.split(r"[ ;,]+", built):
        if number(architecture)[0] == number(capability)[0] and number(architecture) <= number(capability):
            return True
        if architecture.endswith("+PTX") and number(architecture) <= number(capability):
            return True
    return False


# --- Running parts ------------------------------------------------------------------------------------------------------


class Runner:
    """Runs commands, and writes their output and results."""

    def __init__(self, out, machine):
        self.out, self.log = out, (out / "gpu.log").open("w")
        self.results = {"machine": machine, "parts": {}, "rows": [], "not_run": {}}
        self.process, self.saving = None, threading.Lock()

    def say(self, line):
        print(line, flush=True)
        self.log.write(line + "\n")
        self.log.flush()

    def save(self):
        """Replaces gpu.md and gpu.json atomically."""
        with self.saving:
            for name, text in (("gpu.json", json.dumps(self.results, indent=1) + "\n"), ("gpu.md", page(self.results))):
                part = self.out / (name + ".part")
                part.write_text(text)
                part.replace(self.out / name)

    def read(self, name, pipe, lines):
        for line in pipe:
            line = line.rstrip("\n")
            lines.append(line)
            self.say(f"[{name}] {line}")
            if line.startswith('{"what"'):
                try:
                    self.results["rows"].append(dict(json.loads(line), part=name))
                except ValueError:
                    continue
                self.save()

    def kill_current(self):
        """Kills the running command."""
        if self.process is not None and self.process.poll() is None:
            self.kill(self.process.pid, interrupt_first=False)

    def kill(self, group, interrupt_first):
        """Kills a process group. SIGINT first lets a sanitizer print its findings."""
        for number in (signal.SIGINT, signal.SIGKILL) if interrupt_first else (signal.SIGKILL,):
            try:
                os.killpg(group, number)
            except ProcessLookupError:
                return
            if number == signal.SIGINT:
                try:
                    self.process.wait(5)
                except subprocess.TimeoutExpired:
                    pass

    def run(self, part, limit):
        """Runs a command. Returns its outcome and its lines of output."""
        self.say(f"== {part.title}: at most {limit:.0f} s: {' '.join(str(word) for word in part.command)}")
        start, lines = time.monotonic(), []
        try:
            self.process = subprocess.Popen(
                [str(word) for word in part.command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
                env=dict(os.environ, PYTHONUNBUFFERED="1", **part.environment))
        except OSError as error:
            self.say(f"[{part.name}] {error}")
            return {"exit_code": None, "ended": f"cannot start: {error.strerror}", "seconds": 0}, lines
        reader = threading.Thread(target=self.read, args=(part.name, self.process.stdout, lines), daemon=True)
        reader.start()
        outcome = {}
        try:
            code = self.process.wait(limit)
            outcome.update(exit_code=code, ended=describe_exit(code))
        except subprocess.TimeoutExpired:
            self.kill(self.process.pid, interrupt_first=True)
            outcome.update(exit_code=None, stopped_after=round(limit), ended=f"stopped after {limit:.0f} s")
        except Stopped:
            self.kill_current()
            self.results["parts"][part.name] = {"title": part.title, "ok": False, "ended": "stopped from outside", "summary": ""}
            self.save()
            raise
        self.kill(self.process.pid, interrupt_first=False)  # remaining children would keep the pipe open
        reader.join(5)
        outcome["seconds"] = round(time.monotonic() - start, 1)
        return outcome, list(lines)

    def run_part(self, part, left):
        outcome, lines = self.run(part, min(part.limit, left))
        evaluate = {"tests": evaluate_tests, "sanitizer": evaluate_sanitizer, "rows": evaluate_rows, "main": evaluate_bert_ner}[part.kind]
        outcome.update(title=part.title, **evaluate(self, part, outcome, lines))
        if not outcome["ok"]:
            outcome["last_lines"] = lines[-20:]
            if outcome["exit_code"] not in (0, None) and lines and not outcome.get("failed"):
                outcome["summary"] += f"; {lines[-1][:200]}"
        self.results["parts"][part.name] = outcome
        self.say(f"== {part.title}: {status_of(outcome)} after {outcome['seconds']} s; {outcome['summary']}")
        self.save()


def describe_exit(code):
    if code == 0:
        return "ok"
    if code == NO_GPU:
        return "no GPU was found"
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit status {code}"


def evaluate_tests(runner, part, outcome, lines):
    """Reads GoogleTest's report, or the output of a program that crashed without writing one."""
    report = runner.out / f"{part.name}.json"
    written = json.loads(report.read_text()) if report.exists() else {}
    tests = [test for suite in written.get("testsuites", []) for test in suite["testsuite"]]
    names = lambda chosen: [f"{test['classname']}.{test['name']}" for test in tests if chosen(test)]
    failed, skipped = names(lambda test: "failures" in test), names(lambda test: test["result"] == "SKIPPED")
    passed = len(tests) - len(failed) - len(skipped)
    if not tests:
        output = "\n".join(lines)
        passed = len(re.findall(r"^\[ +OK \]", output, re.MULTILINE))
        failed = sorted(set(re.findall(r"^\[ +FAILED +\] (\w+\.\w+)", output, re.MULTILINE)))
        began = re.findall(r"^\[ RUN +\] (\S+)", output, re.MULTILINE)
        if outcome["exit_code"] != 0 and began:
            failed.append(f"{began[-1]} (crashed)")
    summary = f"{passed} passed"
    for title, which in (("failed", failed), ("skipped", skipped)):
        summary += f", {title}: {', '.join(which)}" if which else ""
    sees_gpu = not any(NO_DEVICE in line for line in lines)
    if not sees_gpu:
        summary = NO_DEVICE
    for test in skipped if sees_gpu else ():
        runner.results["not_run"][f"{test} ({part.title})"] = f"skipped; [{part.name}] in gpu.log has the reason"
    ok = outcome["exit_code"] == 0 and passed > 0 and sees_gpu
    return {"ok": ok, "passed": passed, "failed": failed, "skipped": skipped, "summary": summary}


# The first line of a finding; its further lines are indented.
FINDING = re.compile(r"^========= (?:Invalid|Misaligned|Uninitialized|Barrier|Error|Warning: Race|Race|Program hit)")


def findings_of(lines):
    """Returns compute-sanitizer's findings in mezzo's kernels, each as a list of lines."""
    findings = []
    for line in lines:
        if FINDING.match(line):
            findings.append([line])
        elif findings and line.startswith("=========     "):
            findings[-1].append(line)
        else:
            findings.append([])
    return [lines for lines in findings if any("mezzo" in line for line in lines)]


def evaluate_sanitizer(runner, part, outcome, lines):
    """Evaluates the output of compute-sanitizer, not the tests that run under it, which are another part. If the tool was stopped, its
    output until then counts. If it checks all kernels, only findings in mezzo's count."""
    findings = findings_of(lines)
    output = "\n".join(lines)
    found = re.search(r"ERROR SUMMARY: (\d+) error", output) or re.search(r"RACECHECK SUMMARY: (\d+) hazards? displayed", output)
    if found and part.name != "initcheck":
        errors = max(int(found[1]), len(findings))
    elif found or findings or "stopped_after" in outcome:
        errors = len(findings)
    else:
        errors = None
    summary = "no summary was printed" if errors is None else f"{errors} errors"
    if found and outcome["exit_code"] not in (0, ERRORS_FOUND):
        summary += "; a test failed"
    shown = [line.removeprefix("=========").strip() for finding in findings for line in finding[:2]][:8]
    return {"ok": errors == 0, "errors": errors, "summary": "; ".join([summary, *shown])}


def evaluate_rows(runner, part, outcome, lines):
    rows = [row for row in runner.results["rows"] if row["part"] == part.name]
    failed = [f"{row['what']} of {row['peer']}" for row in rows if row.get("failed")]
    summary = f"{len(rows) - len(failed)} rows" + (f", failed: {', '.join(failed)}" if failed else "")
    return {"ok": outcome["exit_code"] == 0 and bool(rows) and not failed, "summary": summary}


def evaluate_bert_ner(runner, part, outcome, lines):
    """Reads bert_ner's JSON into a row like those of the baselines."""
    report = runner.out / f"{part.name}.json"
    written = (json.loads(report.read_text()).get("rows") or [None])[0] if report.exists() else None
    if written is None:
        return {"ok": False, "summary": "no result"}
    runner.results["rows"].append(
        {"part": part.name, "what": f"BERT NER, {part.name.removeprefix('main-')}", "peer": "mezzo", "f1": written.get("f1"),
         "tokens_per_second": written.get("tokens_per_second"), "peak_memory_bytes": written.get("peak_memory_bytes")})
    return {"ok": outcome["exit_code"] == 0, "summary": ""}


# --- The report ---------------------------------------------------------------------------------------------------------


def status_of(outcome):
    if outcome["ok"]:
        return outcome["ended"] if "stopped_after" in outcome else "ok"
    return "FAILED" if outcome["ended"] == "ok" else f"FAILED: {outcome['ended']}"


def number(value, form):
    return "-" if value is None else format(value, form)


def with_ratios(rows, key):
    """Yields (row, row[key] divided by that of mezzo's row with the same `what`), grouped by `what`."""
    groups = {}
    for row in rows:
        groups.setdefault(row["what"], []).append(row)
    for group in groups.values():
        own = next((row[key] for row in group if row["peer"] == "mezzo" and row.get(key)), None)
        for row in group:
            yield row, row[key] / own if own and row.get(key) else None


def page(results):
    """The report, in Markdown."""
    machine = results["machine"]
    lines = [f"# {machine['gpu']}", "",
             ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in machine.items() if key != "gpu"),
             "", "| part | | s | |", "|---|---|---:|---|"]
    for outcome in results["parts"].values():
        lines.append(f"| {outcome['title']} | {status_of(outcome)} | {outcome.get('seconds', '-')} | "
                     f"{outcome['summary'].replace('|', '/')} |")
    timed = [row for row in results["rows"] if "gpu_ms" in row]
    copy = next((row["gb_per_s"] for row in timed if row["what"] == "copy"), None)
    of_copy = lambda row: row["gb_per_s"] / copy if copy and row.get("gb_per_s") else None
    if timed:
        lines += ["", "GPU time of the kernels, relative to mezzo's; bandwidth, relative to a copy's.", "",
                  "| times mezzo's | of a copy | benchmark | | GPU ms | from idle ms | host us | launches |",
                  "|---:|---:|---|---|---:|---:|---:|---:|"]
        lines += [f"| {number(ratio, '.2f')} | {number(of_copy(row), '.2f')} | {row['what']} | {row['peer']} | "
                  f"{row['gpu_ms']:.3f} | {number(row.get('ms'), '.3f')} | {number(row.get('host_us'), '.0f')} | "
                  f"{row.get('launches', '-')} |" for row, ratio in with_ratios(timed, "gpu_ms")]
    jobs = [row for row in results["rows"] if "f1" in row]
    if jobs:
        lines += ["", "| times mezzo's speed | BERT NER | | F1 | tokens/s | peak MB |", "|---:|---|---|---:|---:|---:|"]
        for row, ratio in with_ratios(jobs, "tokens_per_second"):
            memory = row.get("peak_memory_bytes")
            lines.append(f"| {number(ratio, '.2f')} | {row['what']} | {row['peer']} | {number(row['f1'], '.4f')} | "
                         f"{number(row['tokens_per_second'], '.0f')} | {number(memory / 1e6 if memory else None, '.0f')} |")
    if results["not_run"]:
        lines += ["", "Not run here:", ""] + [f"- {what}: {why}" for what, why in results["not_run"].items()]
    return "\n".join(lines) + "\n"


# --- Main ---------------------------------------------------------------------------------------------------------------


def machine_of(gpus, packed):
    """The GPU, its driver, and the build of the programs."""
    found = dict(gpus[0], system=platform.platform())
    if packed:
        return dict(found, **{key: packed[key] for key in ("libtorch", "commit", "architectures", "compiler")})
    nvcc = re.search(r"release ([\d.]+)", check_gpu_environment.output_of("nvcc", "--version"))
    if nvcc:
        found["nvcc"] = nvcc[1]
    libtorch = version_of(HERE.parent / ".deps" / "libtorch")
    return dict(found, libtorch=libtorch) if libtorch else found


def python_skip_reason():
    """Why the Python baselines cannot run on this machine, or None."""
    answer = check_gpu_environment.output_of(sys.executable, "-c", "import torch; print(torch.cuda.is_available())").strip()
    return {"True": None, "False": "Python's torch sees no GPU"}.get(answer, f"{sys.executable} has no torch")


def stop(_signal, _frame):
    raise Stopped


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--out", type=pathlib.Path, help="output directory")
    arguments.add_argument("--budget", type=float, default=900, help="total seconds, after which no part starts")
    arguments.add_argument("--limit", type=float, help="seconds for each part, instead of its own limit")
    arguments.add_argument("--list", action="store_true", help="print the parts")
    arguments.add_argument("parts", nargs="*", metavar="PART")
    options = arguments.parse_args()
    began = time.monotonic()
    programs = Programs()
    out = (options.out or programs.results).resolve()
    if options.list:
        for part in all_parts(programs, None, out):
            print(f"{part.name:18} {part.title}, {part.limit} s")
        return 0
    gpus = check_gpu_environment.gpus()
    if not gpus:
        sys.exit("run_on_gpu.py: nvidia-smi lists no GPU; nothing was run")
    packed = check_pack(gpus[0]) if PACKED.exists() else None
    parts = all_parts(programs, python_skip_reason(), out)
    unknown = set(options.parts) - {part.name for part in parts}
    if unknown:
        sys.exit(f"run_on_gpu.py: unknown parts: {', '.join(sorted(unknown))}; see --list")
    out.mkdir(parents=True, exist_ok=True)
    for part in parts:
        (out / f"{part.name}.json").unlink(missing_ok=True)  # of an earlier run
    runner = Runner(out, machine_of(gpus, packed))
    if len(gpus) > 1:
        runner.results["not_run"]["NCCL between GPUs"] = "not part of this run; see `bert_ner --help` for several ranks"
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, stop)
    status = None
    try:
        for part in parts:
            if options.parts and part.name not in options.parts:
                continue
            left = options.budget - (time.monotonic() - began)
            part.limit = options.limit or part.limit
            skip_reason = part.skip_reason or ("no time was left" if left < 5 else None)
            if skip_reason:
                runner.results["not_run"][part.title] = skip_reason
                runner.say(f"== {part.title}: not run: {skip_reason}")
                runner.save()
                continue
            runner.run_part(part, left)
    except Stopped:
        runner.kill_current()
        status = 143
    runner.save()
    print(page(runner.results))
    failed = [outcome["title"] for outcome in runner.results["parts"].values() if not outcome["ok"]]
    print(f"{out / 'gpu.md'}:", "failed: " + ", ".join(failed) if failed else "all passed")
    return status or (1 if failed else 0)


if __name__ == "__main__":
    sys.exit(main())
