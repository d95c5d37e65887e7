#!/usr/bin/env python3
"""Measures the compile time of mezzo: CPU seconds, memory of the compiler, and sizes of objects and programs.

    compile_time.py [--compiler g++] [--mezzo DIRECTORY] [--torch DIRECTORY] [--flags='-O2'] [--only TEXT]

CPU seconds depend on other programs, so compare rows of one run only. The memory that g++ allocates in total (-ftime-report; 0 for
other compilers) is the same in every run, and grows with the seconds. To compare two versions, pass another checkout with --mezzo.
Programs with a training loop are run once, as a check.
"""

import argparse
import os
import pathlib
import re
import subprocess
import tempfile
import typing

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
DEFINITIONS = ["-DUSE_C10D_GLOO", "-DUSE_DISTRIBUTED", "-DUSE_RPC", "-DUSE_TENSORPIPE"]  # of libtorch's CMake package


class Cost(typing.NamedTuple):
    seconds: float
    mebibytes: float  # peak
    allocated: float  # total, in mebibytes


class Row(typing.NamedTuple):
    name: str
    units: tuple  # (source, definitions) of each translation unit
    has_loop: bool = False
    is_compiled: bool = False  # links mezzo::compiled


ROWS = (
    Row("torch/torch.h, unused", (("torch_only.cpp", ()),)),
    Row("autocast/autocast.h and scaling/grad_scaler.h, unused", (("autocast_and_scaler.cpp", ()),)),
    Row("mezzo.h, unused", (("mezzo_unused.cpp", ()),)),
    Row("mezzo.h, unused, mezzo::compiled", (("mezzo_unused.cpp", ()),), is_compiled=True),
    Row("libtorch's loop", (("torch_loop.cpp", ()),), has_loop=True),
    Row("README's loop", (("loop.cpp", ()),), has_loop=True),
    Row("two units with README's loop", (("loop.cpp", ()), ("loop.cpp", ("-Dtrain=train_too",))), has_loop=True),
    Row("README's loop, mezzo::compiled", (("loop.cpp", ()),), has_loop=True, is_compiled=True),
    Row("README's loop, checkpoints", (("checkpoint_loop.cpp", ()),)),
    Row("README's loop, checkpoints, compiled", (("checkpoint_loop.cpp", ()),), is_compiled=True),
    Row("two units with it, mezzo::compiled", (("loop.cpp", ()), ("loop.cpp", ("-Dtrain=train_too",))), has_loop=True,
         is_compiled=True),
)


def allocated_by(report):
    """Parses the mebibytes in the last column of -ftime-report's TOTAL."""
    total = re.search(r"^ *TOTAL.*?([0-9]+)([kMG])$", report, re.MULTILINE)
    return float(total[1]) * {"k": 1 / 1024, "M": 1, "G": 1024}[total[2]] if total else 0.0


def run(command):
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen([str(word) for word in command], stderr=log)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        log.seek(0)
        text = log.read()
    if process.returncode != 0:
        raise SystemExit(f"{text}{command[0]} failed: {' '.join(map(str, command))}")
    return Cost(usage.ru_utime, usage.ru_maxrss / 1024, allocated_by(text))


class Compiler:
    def __init__(self, options, directory):
        self.directory = directory
        self.torch = options.torch
        self.command = [options.compiler, "-std=c++20", *options.flags.split(), "-ftime-report", *DEFINITIONS,
                        f"-I{options.mezzo}/include"]
        for include in ("include", "include/torch/csrc/api/include"):
            self.command += ["-isystem", self.torch / include]
        self.cache = {}

    def compile(self, source, definitions):
        """Returns the object file and its cost. Compiles each source once."""
        key = (source, definitions)
        if key not in self.cache:
            target = self.directory / f"{len(self.cache)}.o"
            self.cache[key] = target, run([*self.command, *definitions, "-c", source, "-o", target])
        return self.cache[key]

    def link(self, objects):
        program = self.directory / "program"
        libraries = self.torch / "lib"
        run([self.command[0], *objects, "-o", program, f"-Wl,-rpath,{libraries}", "-Wl,--no-as-needed",
             libraries / "libtorch_cpu.so", libraries / "libc10.so", "-ldl"])
        run([program])
        return program


def kibibytes(paths):
    return sum(path.stat().st_size for path in paths) / 1024


def measure(row, compiler, library):
    extra = ("-DMEZZO_COMPILED_LIB",) if row.is_compiled else ()
    made = [compiler.compile(HERE / source, definitions + extra) for source, definitions in row.units]
    objects = [target for target, _ in made]
    seconds = sum(cost.seconds for _, cost in made)
    peak = max(cost.mebibytes for _, cost in made)
    allocated = sum(cost.allocated for _, cost in made)
    program = ""
    if row.has_loop:
        main, _ = compiler.compile(HERE / "main.cpp", ())
        program = f"{kibibytes([compiler.link([*objects, main, *(library if row.is_compiled else [])])]):10.0f} KiB"
    print(f"{row.name:38} {seconds:7.1f} s {peak:7.0f} MiB {allocated:7.0f} MiB {kibibytes(objects):8.0f} KiB {program}",
          flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compiler", default="g++")
    parser.add_argument("--mezzo", type=pathlib.Path, default=ROOT, help="the checkout to measure")
    parser.add_argument("--torch", type=pathlib.Path, default=ROOT / ".deps/libtorch")
    parser.add_argument("--flags", default="-O2")
    parser.add_argument("--only", default="", help="rows whose name contains this text")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as directory:
        compiler = Compiler(options, pathlib.Path(directory))
        rows = [row for row in ROWS if options.only in row.name]
        print(f"{'':38} {'CPU':>9} {'peak':>11} {'allocated':>11} {'objects':>12} {'program':>14}")
        library = []
        if any(row.is_compiled and row.has_loop for row in rows):
            sources = sorted((options.mezzo / "include/mezzo").rglob("*.cpp"))
            made = [compiler.compile(source, ("-DMEZZO_COMPILED_LIB",)) for source in sources]
            library = [target for target, _ in made]
            print(f"{'mezzo::compiled':38} {sum(cost.seconds for _, cost in made):7.1f} s "
                  f"{max(cost.mebibytes for _, cost in made):7.0f} MiB "
                  f"{sum(cost.allocated for _, cost in made):7.0f} MiB {kibibytes(library):8.0f} KiB", flush=True)
        for row in rows:
            measure(row, compiler, library)


if __name__ == "__main__":
    main()
