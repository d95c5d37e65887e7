#!/usr/bin/env python3
"""What including and using mezzo costs the compiler: CPU seconds, its memory, and the size of what it makes.

    compile_time.py [--compiler g++] [--mezzo FOLDER] [--torch FOLDER] [--flags='-O2'] [--only WORD]

CPU seconds grow where other programs share the cores, so compare what one run prints. What g++ allocates in all
(-ftime-report; 0 of other compilers) is the same in every run, and grows with the seconds. For a change's before and after
give --mezzo another checkout. Nothing is run but one program a line that has a loop, to see that it links and trains.
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
DEFINITIONS = ["-DUSE_C10D_GLOO", "-DUSE_DISTRIBUTED", "-DUSE_RPC", "-DUSE_TENSORPIPE"]  # as libtorch's package gives them


class Cost(typing.NamedTuple):
    seconds: float
    mebibytes: float  # the most at one time
    allocated: float  # in all, in mebibytes


class Line(typing.NamedTuple):
    name: str
    units: tuple  # (source, definitions) of each
    has_loop: bool = False
    is_compiled: bool = False  # links mezzo::compiled


LINES = (
    Line("torch/torch.h, unused", (("torch_only.cpp", ()),)),
    Line("autocast/autocast.h and scaling/grad_scaler.h, unused", (("autocast_and_scaler.cpp", ()),)),
    Line("mezzo.h, unused", (("mezzo_unused.cpp", ()),)),
    Line("mezzo.h, unused, mezzo::compiled", (("mezzo_unused.cpp", ()),), is_compiled=True),
    Line("libtorch's loop", (("torch_loop.cpp", ()),), has_loop=True),
    Line("README's loop", (("loop.cpp", ()),), has_loop=True),
    Line("two units of it", (("loop.cpp", ()), ("loop.cpp", ("-Dtrain=train_too",))), has_loop=True),
    Line("README's loop, mezzo::compiled", (("loop.cpp", ()),), has_loop=True, is_compiled=True),
    Line("two units, mezzo::compiled", (("loop.cpp", ()), ("loop.cpp", ("-Dtrain=train_too",))), has_loop=True,
         is_compiled=True),
)


def allocated_by(report):
    """The mebibytes in the last column of -ftime-report's TOTAL."""
    total = re.search(r"^ *TOTAL.*?([0-9]+)([kMG])$", report, re.MULTILINE)
    return float(total[1]) * {"k": 1 / 1024, "M": 1, "G": 1024}[total[2]] if total else 0.0


def run(command):
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen([str(word) for word in command], stderr=said)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        said.seek(0)
        text = said.read()
    if process.returncode != 0:
        raise SystemExit(f"{text}{command[0]} failed: {' '.join(map(str, command))}")
    return Cost(usage.ru_utime, usage.ru_maxrss / 1024, allocated_by(text))


class Compiler:
    def __init__(self, options, folder):
        self.folder = folder
        self.torch = options.torch
        self.command = [options.compiler, "-std=c++20", *options.flags.split(), "-ftime-report", *DEFINITIONS,
                        f"-I{options.mezzo}/include"]
        for include in ("include", "include/torch/csrc/api/include"):
            self.command += ["-isystem", self.torch / include]
        self.known = {}

    def compile(self, source, definitions):
        """The object and its cost; what is the same as before is not compiled again."""
        key = (source, definitions)
        if key not in self.known:
            target = self.folder / f"{len(self.known)}.o"
            self.known[key] = target, run([*self.command, *definitions, "-c", source, "-o", target])
        return self.known[key]

    def link(self, objects):
        program = self.folder / "program"
        libraries = self.torch / "lib"
        run([self.command[0], *objects, "-o", program, f"-Wl,-rpath,{libraries}", "-Wl,--no-as-needed",
             libraries / "libtorch_cpu.so", libraries / "libc10.so", "-ldl"])
        run([program])
        return program


def kibibytes(paths):
    return sum(path.stat().st_size for path in paths) / 1024


def measure(line, compiler, library):
    extra = ("-DMEZZO_COMPILED_LIB",) if line.is_compiled else ()
    made = [compiler.compile(HERE / source, definitions + extra) for source, definitions in line.units]
    objects = [target for target, _ in made]
    seconds = sum(cost.seconds for _, cost in made)
    peak = max(cost.mebibytes for _, cost in made)
    allocated = sum(cost.allocated for _, cost in made)
    program = ""
    if line.has_loop:
        main, _ = compiler.compile(HERE / "main.cpp", ())
        program = f"{kibibytes([compiler.link([*objects, main, *(library if line.is_compiled else [])])]):10.0f} KiB"
    print(f"{line.name:38} {seconds:7.1f} s {peak:7.0f} MiB {allocated:7.0f} MiB {kibibytes(objects):8.0f} KiB {program}",
          flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compiler", default="g++")
    parser.add_argument("--mezzo", type=pathlib.Path, default=ROOT, help="the checkout that is measured")
    parser.add_argument("--torch", type=pathlib.Path, default=ROOT / ".deps/libtorch")
    parser.add_argument("--flags", default="-O2")
    parser.add_argument("--only", default="", help="lines whose name has this in it")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        compiler = Compiler(options, pathlib.Path(folder))
        lines = [line for line in LINES if options.only in line.name]
        print(f"{'':38} {'CPU':>9} {'peak':>11} {'allocated':>11} {'objects':>12} {'program':>14}")
        library = []
        if any(line.is_compiled and line.has_loop for line in lines):
            sources = sorted((options.mezzo / "include/mezzo").rglob("*.cpp"))
            made = [compiler.compile(source, ("-DMEZZO_COMPILED_LIB",)) for source in sources]
            library = [target for target, _ in made]
            print(f"{'mezzo::compiled itself, once':38} {sum(cost.seconds for _, cost in made):7.1f} s "
                  f"{max(cost.mebibytes for _, cost in made):7.0f} MiB "
                  f"{sum(cost.allocated for _, cost in made):7.0f} MiB {kibibytes(library):8.0f} KiB", flush=True)
        for line in lines:
            measure(line, compiler, library)


if __name__ == "__main__":
    main()
