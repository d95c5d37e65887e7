#!/usr/bin/env python3
"""How much of mezzo one scaler.step(AdamW, {.max_norm = 1}) runs on the CPU: its files, its functions, and how often
a call leads from one room (a folder of include/mezzo) to another; calls within kernels/ are left out of the last.

    step_path.py PROGRAM OBJECT INCLUDE [--files N] [--functions N] [--changes N] [--list]

PROGRAM is one_step.cpp, built with --coverage and -finstrument-functions from OBJECT. Ends with 1 where a number is
above its limit. --list prints each file with its functions.
"""
import argparse
import collections
import json
import os
import re
import subprocess
import sys
import tempfile


def output_of(*command, **options):
    return subprocess.run(command, check=True, capture_output=True, text=True, **options).stdout


def functions_by_file(object_file, include):
    """{file below include/mezzo: {line: name}} of what was run, from gcov; a template counts once."""
    report = output_of("gcov", "--json-format", "--stdout", object_file)
    found = collections.defaultdict(dict)
    for line in report.splitlines():
        for source in json.loads(line)["files"]:
            path = os.path.abspath(source["file"])
            if not path.startswith(include + "/mezzo/"):
                continue
            for function in source["functions"]:
                if function["execution_count"]:
                    name = function["demangled_name"].split("(")[0]
                    found[os.path.relpath(path, include)][function["start_line"]] = name
    return found


def room_changes(program, trace, include):
    places = output_of("addr2line", "-e", program, stdin=open(trace))
    rooms = re.findall(re.escape(include) + r"/mezzo/(\w+)/", places)
    return sum(before != after for before, after in zip(rooms, rooms[1:]))


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("program", "object", "include"):
        arguments.add_argument(name)
    for name in ("--files", "--functions", "--changes"):
        arguments.add_argument(name, type=int)
    arguments.add_argument("--list", action="store_true")
    given = arguments.parse_args()
    include = os.path.abspath(given.include)
    with tempfile.TemporaryDirectory() as folder:
        trace = os.path.join(folder, "trace")
        subprocess.run([given.program, trace], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        found = functions_by_file(given.object, include)
        measured = {
            "files": len(found),
            "functions": sum(len(functions) for functions in found.values()),
            "changes": room_changes(given.program, trace, include),
        }
    if not measured["files"] or not measured["changes"]:
        sys.exit("step_path.py: nothing was measured; is PROGRAM built with --coverage and -finstrument-functions?")
    for name, number in measured.items():
        limit = getattr(given, name)
        print(f"{number} {name}" + ("" if limit is None else f" (at most {limit})"))
    if given.list:
        for file, functions in sorted(found.items()):
            print(f"\n{file}: {len(functions)}")
            for line, name in sorted(functions.items()):
                print(f"  {line:4} {name}")
    sys.exit(any(getattr(given, name) is not None and number > getattr(given, name)
                 for name, number in measured.items()))


if __name__ == "__main__":
    main()
