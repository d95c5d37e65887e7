#!/usr/bin/env python3
"""Tests, benchmarks, the BERT NER example and sanitizers on this machine's first GPU, in about eight minutes.

    run_on_gpu.py [--out FOLDER] [--budget SECONDS] [PART...]
    run_on_gpu.py --list

In a checkout it runs what `./bootstrap gpu` has built, and writes to benchmarks/results; in an unpacked archive of
`./bootstrap gpu-pack`, where it is `./run`, it runs what is packed there, and writes to the folder `results`. It needs
Python's standard library, and nothing of the network.

Parts run one after another, in the order that tells most first, each for at most its own time. Output is printed and
written to gpu.log as it comes; gpu.md, the page, and gpu.json are written anew after each part and each row of a benchmark,
so that a run that is killed leaves what it has found. Exits with 1 if a part failed.
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
PACKED = HERE / "packed.json"  # of an archive

# How the BERT NER example is run in each precision. On CUDA `amp` is autocast to float16 unless the environment says otherwise;
# TF32 is float32 whose products libtorch rounds.
PRECISIONS = {"fp32": ("fp32", {}), "tf32": ("fp32", {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}),
              "fp16": ("amp", {"MEZZO_MIXED_PRECISION": "fp16"}), "bf16": ("amp", {"MEZZO_MIXED_PRECISION": "bf16"})}

# Mezzo's kernels alone are checked, so that the time is enough. initcheck has to see who writes memory, and so checks
# all; each tensor has memory of its own there, which captures do not allow.
ONLY_MEZZOS = ["--kernel-name", "kernel_substring=mezzo"]
SANITIZERS = {"memcheck": ONLY_MEZZOS, "racecheck": ONLY_MEZZOS, "synccheck": ONLY_MEZZOS, "initcheck": []}
ERRORS_FOUND = 99
# Tests that a sanitizer would watch for minutes: of huge tensors, and of other kernels than mezzo's.
TOO_LARGE = "*EveryElement:*BeyondTwoTo32*:EveryOp.*"

NO_GPU = 77  # the exit status of a program that sees none
SEES_NONE = "libtorch sees no CUDA device"  # what a test says then, and skips itself


class Stopped(Exception):
    """Somebody ends this run: the machine's scheduler, or a person."""


# --- What runs, and where it is -----------------------------------------------------------------------------------------


class Programs:
    """Where the programs, the model and the peers are: in a checkout or in an archive."""

    def __init__(self):
        if PACKED.exists():
            self.root, self.results = HERE, HERE / "results"
            self.folders = [HERE / "bin"]
            self.model, self.data = HERE / "model", HERE / "ner.txt"
            self.peers = HERE
        else:
            self.root, self.results = HERE.parent, HERE / "results"
            self.folders = [self.root / "build" / "cuda" / folder
                            for folder in ("tests/cuda", "benchmarks/cuda", "examples/bert_ner")]
            self.model, self.data = self.root / ".deps" / "model", self.root / ".deps" / "ner.txt"
            self.peers = HERE / "cuda"

    def find(self, name):
        for folder in self.folders:
            if (folder / name).exists():
                return folder / name
        return self.folders[0] / name


class Part:
    """A command with its share of the time. `why_not` says why it cannot run here, if it cannot."""

    def __init__(self, name, title, kind, command, limit, environment=None, why_not=None):
        self.name, self.title, self.kind, self.command, self.limit = name, title, kind, command, limit
        self.environment, self.why_not = environment or {}, why_not


def sanitizer(root):
    """Where compute-sanitizer is, or None."""
    folders = [os.environ.get("CUDA_HOME", "/usr/local/cuda"), root / ".deps" / "cuda"]
    return shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path=os.pathsep.join(f"{folder}/bin" for folder in folders))


def all_parts(programs, python_lacks, out):
    """Returns the parts in their order; `python_lacks` says why Python's peers cannot run, or is empty."""
    tests, aten_tests = programs.find("mezzo_cuda_tests"), programs.find("mezzo_cuda_aten_tests")
    report = lambda name: f"--gtest_output=json:{out / (name + '.json')}"
    no_model = None if (programs.model / "model.safetensors").exists() else f"no model in {programs.model}"
    parts = [
        Part("tests", "tests, mezzo's kernels", "tests", [tests, report("tests")], 90),
        Part("aten-tests", "tests, ATen's kernels", "tests",
             [aten_tests, "--gtest_filter=-KernelsCuda.*", report("aten-tests")], 60),
        Part("bench", "benchmarks", "rows", [programs.find("cuda_bench")], 120),
        Part("bench-python", "benchmarks, Python's torch.amp", "rows",
             [sys.executable, programs.peers / "torch_amp_bench.py"], 60, why_not=python_lacks),
    ]
    for name, (precision, environment) in PRECISIONS.items():
        command = [programs.find("bert_ner"), "--quiet", "--device", "cuda", "--precision", precision, "--model",
                   programs.model, "--data", programs.data, "--json", out / f"main-{name}.json"]
        parts.append(Part(f"main-{name}", f"BERT NER, {name}", "main", command, 30, environment, no_model))
        peer = [sys.executable, programs.peers / "bert_ner_torch.py", programs.model, programs.data, "--precision", name]
        parts.append(Part(f"main-{name}-python", f"BERT NER, {name}, Python's torch.amp", "rows", peer, 40,
                          why_not=python_lacks or no_model))
    tool = sanitizer(programs.root)
    lacks_tool = None if tool else "compute-sanitizer is neither on PATH nor in CUDA's folder; PyPI has nvidia-cuda-sanitizer-api"
    for name, kernels in SANITIZERS.items():
        left_out = TOO_LARGE + ("" if kernels else ":*Graph*:*Captur*")
        command = [tool, "--tool", name, "--error-exitcode", str(ERRORS_FOUND), *kernels, tests, "--gtest_brief=1",
                   f"--gtest_filter=-{left_out}"]
        environment = {} if kernels else {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        parts.append(Part(name, f"compute-sanitizer {name}", "sanitizer", command, 45, environment, lacks_tool))
    return parts


def torch_of_python():
    """The folder of Python's torch, or None; and the version."""
    script = ("import importlib.util, os; spec = importlib.util.find_spec('torch'); "
              "print(spec.submodule_search_locations[0] if spec else '')")
    folder = check_gpu_environment.output_of(sys.executable, "-c", script).strip()
    return pathlib.Path(folder) if folder else None


def named_torch():
    """The libtorch that Torch_DIR names, or None."""
    package = os.environ.get("Torch_DIR")
    if not package:
        return None
    folder = pathlib.Path(package)
    return next((root for root in (folder, *folder.parents) if (root / "lib" / "libtorch_cuda.so").exists()), folder)


def version_of(libtorch):
    package = libtorch / "share/cmake/Torch/TorchConfigVersion.cmake"
    found = re.search(r'PACKAGE_VERSION "([^"]*)"', package.read_text()) if package.exists() else None
    return found[1] if found else None


def use_libraries_of(libtorch):
    """Lets packed programs find a libtorch, and CUDA's libraries beside it."""
    folders = [HERE / "lib", libtorch / "lib", *sorted((libtorch.parent / "nvidia").glob("*/lib")),
               pathlib.Path("/usr/local/cuda/lib64")]
    old = os.environ.get("LD_LIBRARY_PATH")
    os.environ["LD_LIBRARY_PATH"] = os.pathsep.join([*(str(folder) for folder in folders if folder.is_dir()),
                                                    *([old] if old else [])])


def check_pack(gpu):
    """Ends the run, in words, where the archive does not fit this machine. Returns what was packed."""
    packed = json.loads(PACKED.read_text())
    libtorch = named_torch() or torch_of_python()
    if libtorch is None:
        sys.exit("run: no libtorch here: set Torch_DIR, or run with a python3 that has torch (PYTHON=... ./run)")
    version = version_of(libtorch)
    if version and version.split("+")[0].split(".")[:2] != packed["libtorch"].split(".")[:2]:
        sys.exit(f"run: the programs are built for libtorch {packed['libtorch']}, and {libtorch} is {version}: pack again on a "
                 "machine with that version, with Torch_DIR")
    own, made = gpu["compute_capability"], packed["architectures"]
    if not fits(own, made):
        sys.exit(f"run: the kernels are compiled for {made}, and {gpu['gpu']} is {own}: pack again with "
                 f"TORCH_CUDA_ARCH_LIST={own}")
    use_libraries_of(libtorch)
    return dict(packed, libtorch=version or packed["libtorch"], libtorch_folder=str(libtorch))


def fits(own, made):
    """Whether a GPU runs kernels of these architectures: its own major version, or PTX that is no newer."""
    number = lambda version: tuple(int(digits) for digits in re.findall(r"\d+", version)[:2])
    for architecture in re.split(r"[ ;,]+", made):
        if number(architecture)[0] == number(own)[0] and number(architecture) <= number(own):
            return True
        if architecture.endswith("+PTX") and number(architecture) <= number(own):
            return True
    return False


# --- Running a part -----------------------------------------------------------------------------------------------------


class Runner:
    """Runs commands and keeps what they say; its files are always those of the latest part."""

    def __init__(self, out, machine):
        self.out, self.log = out, (out / "gpu.log").open("w")
        self.results = {"machine": machine, "parts": {}, "rows": [], "not_run": {}}
        self.process, self.saving = None, threading.Lock()

    def say(self, line):
        print(line, flush=True)
        self.log.write(line + "\n")
        self.log.flush()

    def save(self):
        """Replaces the page and the results: whoever reads them never sees a half."""
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

    def end(self):
        """Ends what runs now."""
        if self.process is not None and self.process.poll() is None:
            self.kill(self.process.pid, with_mercy=False)

    def kill(self, group, with_mercy):
        """Ends a process with its children. A first signal lets a sanitizer write what it holds."""
        for number in (signal.SIGINT, signal.SIGKILL) if with_mercy else (signal.SIGKILL,):
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
        """Returns how the command ended, and what it printed."""
        self.say(f"== {part.title}: at most {limit:.0f} s: {' '.join(str(word) for word in part.command)}")
        start, lines = time.monotonic(), []
        try:
            self.process = subprocess.Popen(
                [str(word) for word in part.command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
                env=dict(os.environ, PYTHONUNBUFFERED="1", **part.environment))
        except OSError as error:
            self.say(f"[{part.name}] {error}")
            return {"exit_code": None, "ended": f"cannot be started: {error.strerror}", "seconds": 0}, lines
        reader = threading.Thread(target=self.read, args=(part.name, self.process.stdout, lines), daemon=True)
        reader.start()
        outcome = {}
        try:
            code = self.process.wait(limit)
            outcome.update(exit_code=code, ended=ended(code))
        except subprocess.TimeoutExpired:
            self.kill(self.process.pid, with_mercy=True)
            outcome.update(exit_code=None, stopped_after=round(limit), ended=f"stopped after {limit:.0f} s")
        except Stopped:
            self.end()
            self.results["parts"][part.name] = {"title": part.title, "ok": False, "ended": "stopped from outside", "words": ""}
            self.save()
            raise
        self.kill(self.process.pid, with_mercy=False)  # children that outlive it would hold the pipe
        reader.join(5)
        outcome["seconds"] = round(time.monotonic() - start, 1)
        return outcome, list(lines)

    def take(self, part, left):
        outcome, lines = self.run(part, min(part.limit, left))
        judge = {"tests": judge_tests, "sanitizer": judge_sanitizer, "rows": judge_rows, "main": judge_main}[part.kind]
        outcome.update(title=part.title, **judge(self, part, outcome, lines))
        if not outcome["ok"]:
            outcome["last_lines"] = lines[-20:]
            if outcome["exit_code"] not in (0, None) and lines and not outcome.get("failed"):
                outcome["words"] += f"; {lines[-1][:200]}"
        self.results["parts"][part.name] = outcome
        self.say(f"== {part.title}: {verdict(outcome)} after {outcome['seconds']} s; {outcome['words']}")
        self.save()


def ended(code):
    if code == 0:
        return "ok"
    if code == NO_GPU:
        return "sees no GPU"
    if code < 0:
        return f"died of {signal.Signals(-code).name}"
    return f"exit status {code}"


def judge_tests(runner, part, outcome, lines):
    """What googletest's report says; a program that died has none, but has printed names."""
    report = runner.out / f"{part.name}.json"
    written = json.loads(report.read_text()) if report.exists() else {}
    tests = [test for suite in written.get("testsuites", []) for test in suite["testsuite"]]
    names = lambda chosen: [f"{test['classname']}.{test['name']}" for test in tests if chosen(test)]
    failed, skipped = names(lambda test: "failures" in test), names(lambda test: test["result"] == "SKIPPED")
    passed = len(tests) - len(failed) - len(skipped)
    if not tests:
        said = "\n".join(lines)
        passed = len(re.findall(r"^\[ +OK \]", said, re.MULTILINE))
        failed = sorted(set(re.findall(r"^\[ +FAILED +\] (\w+\.\w+)", said, re.MULTILINE)))
        began = re.findall(r"^\[ RUN +\] (\S+)", said, re.MULTILINE)
        if outcome["exit_code"] != 0 and began:
            failed.append(f"{began[-1]} (the last that began)")
    words = f"{passed} passed"
    for title, which in (("failed", failed), ("skipped", skipped)):
        words += f", {title}: {', '.join(which)}" if which else ""
    sees_gpu = not any(SEES_NONE in line for line in lines)
    if not sees_gpu:
        words = SEES_NONE
    for test in skipped if sees_gpu else ():
        runner.results["not_run"][f"{test} ({part.title})"] = f"it skipped itself; [{part.name}] in gpu.log says why"
    ok = outcome["exit_code"] == 0 and passed > 0 and sees_gpu
    return {"ok": ok, "passed": passed, "failed": failed, "skipped": skipped, "words": words}


# How a finding begins; the lines that belong to it are indented.
FINDING = re.compile(r"^========= (?:Invalid|Misaligned|Uninitialized|Barrier|Error|Warning: Race|Race|Program hit)")


def findings_of(lines):
    """Returns compute-sanitizer's findings in mezzo's kernels, each as its lines."""
    findings = []
    for line in lines:
        if FINDING.match(line):
            findings.append([line])
        elif findings and line.startswith("=========     "):
            findings[-1].append(line)
        else:
            findings.append([])
    return [lines for lines in findings if any("mezzo" in line for line in lines)]


def judge_sanitizer(runner, part, outcome, lines):
    """Judges what compute-sanitizer printed, and not the tests that ran under it, which have a part of their own. A tool
    that was stopped is judged by what it printed until then; of one that checks all kernels, findings in mezzo's count."""
    findings = findings_of(lines)
    said = "\n".join(lines)
    found = re.search(r"ERROR SUMMARY: (\d+) error", said) or re.search(r"RACECHECK SUMMARY: (\d+) hazards? displayed", said)
    if found and part.name != "initcheck":
        errors = max(int(found[1]), len(findings))
    elif found or findings or "stopped_after" in outcome:
        errors = len(findings)
    else:
        errors = None
    words = "it printed no summary" if errors is None else f"{errors} errors"
    if found and outcome["exit_code"] not in (0, ERRORS_FOUND):
        words += "; a test under it failed"
    shown = [line.removeprefix("=========").strip() for finding in findings for line in finding[:2]][:8]
    return {"ok": errors == 0, "errors": errors, "words": "; ".join([words, *shown])}


def judge_rows(runner, part, outcome, lines):
    rows = [row for row in runner.results["rows"] if row["part"] == part.name]
    failed = [f"{row['what']} of {row['peer']}" for row in rows if row.get("failed")]
    words = f"{len(rows) - len(failed)} rows" + (f", failed: {', '.join(failed)}" if failed else "")
    return {"ok": outcome["exit_code"] == 0 and bool(rows) and not failed, "words": words}


def judge_main(runner, part, outcome, lines):
    """bert_ner's JSON, as a row like those of its peers."""
    report = runner.out / f"{part.name}.json"
    written = (json.loads(report.read_text()).get("rows") or [None])[0] if report.exists() else None
    if written is None:
        return {"ok": False, "words": "no result"}
    runner.results["rows"].append(
        {"part": part.name, "what": f"BERT NER, {part.name.removeprefix('main-')}", "peer": "mezzo", "f1": written.get("f1"),
         "tokens_per_second": written.get("tokens_per_second"), "peak_memory_bytes": written.get("peak_memory_bytes")})
    return {"ok": outcome["exit_code"] == 0, "words": ""}


# --- One page -----------------------------------------------------------------------------------------------------------


def verdict(outcome):
    if outcome["ok"]:
        return outcome["ended"] if "stopped_after" in outcome else "ok"
    return "FAILED" if outcome["ended"] == "ok" else f"FAILED: {outcome['ended']}"


def number(value, form):
    return "-" if value is None else format(value, form)


def with_ratios(rows, key):
    """Returns (row, its `key` divided by mezzo's of the same `what`), in the order in which each `what` came first."""
    groups = {}
    for row in rows:
        groups.setdefault(row["what"], []).append(row)
    for group in groups.values():
        own = next((row[key] for row in group if row["peer"] == "mezzo" and row.get(key)), None)
        for row in group:
            yield row, row[key] / own if own and row.get(key) else None


def page(results):
    """What a person wants to know."""
    machine = results["machine"]
    lines = [f"# {machine['gpu']}", "",
             ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in machine.items() if key != "gpu"),
             "", "| part | | s | |", "|---|---|---:|---|"]
    for outcome in results["parts"].values():
        lines.append(f"| {outcome['title']} | {verdict(outcome)} | {outcome.get('seconds', '-')} | "
                     f"{outcome['words'].replace('|', '/')} |")
    timed = [row for row in results["rows"] if "gpu_ms" in row]
    copy = next((row["gb_per_s"] for row in timed if row["what"] == "copy"), None)
    of_copy = lambda row: row["gb_per_s"] / copy if copy and row.get("gb_per_s") else None
    if timed:
        lines += ["", "GPU time of the kernels alone, as a multiple of mezzo's; bandwidth as a part of a copy's.", "",
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


# --- The whole ----------------------------------------------------------------------------------------------------------


def machine_of(gpus, packed):
    """The GPU, its driver, and what the programs were built with."""
    found = dict(gpus[0], system=platform.platform())
    if packed:
        return dict(found, **{key: packed[key] for key in ("libtorch", "commit", "architectures", "compiler")})
    nvcc = re.search(r"release ([\d.]+)", check_gpu_environment.output_of("nvcc", "--version"))
    if nvcc:
        found["nvcc"] = nvcc[1]
    libtorch = version_of(HERE.parent / ".deps" / "libtorch")
    return dict(found, libtorch=libtorch) if libtorch else found


def why_no_python():
    """Why Python's peers cannot run here; empty where they can."""
    said = check_gpu_environment.output_of(sys.executable, "-c", "import torch; print(torch.cuda.is_available())").strip()
    return {"True": None, "False": "Python's torch sees no GPU"}.get(said, f"{sys.executable} has no torch")


def stop(_signal, _frame):
    raise Stopped


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--out", type=pathlib.Path, help="where to write")
    arguments.add_argument("--budget", type=float, default=900, help="seconds in all, after which no part begins")
    arguments.add_argument("--limit", type=float, help="seconds for each part, in place of its own")
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
        sys.exit("run_on_gpu.py: nvidia-smi names no GPU here; nothing was run")
    packed = check_pack(gpus[0]) if PACKED.exists() else None
    parts = all_parts(programs, why_no_python(), out)
    unknown = set(options.parts) - {part.name for part in parts}
    if unknown:
        sys.exit(f"run_on_gpu.py: no part is called {', '.join(sorted(unknown))}; --list names them")
    out.mkdir(parents=True, exist_ok=True)
    for part in parts:
        (out / f"{part.name}.json").unlink(missing_ok=True)  # of a run before
    runner = Runner(out, machine_of(gpus, packed))
    if len(gpus) > 1:
        runner.results["not_run"]["NCCL between GPUs"] = "no part of this run; see `bert_ner --help` for several ranks"
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, stop)
    status = None
    try:
        for part in parts:
            if options.parts and part.name not in options.parts:
                continue
            left = options.budget - (time.monotonic() - began)
            part.limit = options.limit or part.limit
            why_not = part.why_not or ("no time was left" if left < 5 else None)
            if why_not:
                runner.results["not_run"][part.title] = why_not
                runner.say(f"== {part.title}: not run: {why_not}")
                runner.save()
                continue
            runner.take(part, left)
    except Stopped:
        runner.end()
        status = 143
    runner.save()
    print(page(runner.results))
    failed = [outcome["title"] for outcome in runner.results["parts"].values() if not outcome["ok"]]
    print(f"{out / 'gpu.md'}:", "failed: " + ", ".join(failed) if failed else "all went well")
    return status or (1 if failed else 0)


if __name__ == "__main__":
    sys.exit(main())
