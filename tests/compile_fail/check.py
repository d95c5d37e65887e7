#!/usr/bin/env python3
"""check.py BUILD_DIRECTORY UNIT SOURCE...: checks the errors of code that must not compile.

UNIT, which includes the sources, is compiled as BUILD_DIRECTORY/compile_commands.json says. Each source begins with lines
"// error: REGEX" or "// note: REGEX"; as many lines of the compiler's output must match as the sources have. A source with a line
"// flags: FLAGS" is compiled alone, with these flags and UNIT's include directories, and must have one error.
"""
import collections
import json
import pathlib
import re
import shlex
import subprocess
import sys

build, unit, *sources = sys.argv[1:]
commands = json.loads((pathlib.Path(build) / "compile_commands.json").read_text())
entry = next(entry for entry in commands if pathlib.Path(entry["file"]).resolve() == pathlib.Path(unit).resolve())
command = shlex.split(entry["command"])
failures = []


def compile_stderr(arguments, directory):
    return subprocess.run([*arguments, "-fsyntax-only"], cwd=directory, capture_output=True, text=True)


def check(result, expected):
    if result.returncode == 0:
        failures.append("compiles")
    lines = result.stderr.splitlines()
    for pattern, count in expected.items():
        if sum(bool(re.search(pattern, line)) for line in lines) < count:
            failures.append(f"not printed {count} times: {pattern}")
    return result.stderr


output = ""
unit_expected = collections.Counter()
unit_sources = []
for source in map(pathlib.Path, sources):
    text = source.read_text()
    expected = collections.Counter(re.findall(r"^// (?:error|note): (.+)$", text, re.M))
    flags = re.search(r"^// flags: (.+)$", text, re.M)
    if not expected:
        failures.append(f"{source}: expects nothing")
    if flags is None:
        unit_expected.update(expected)
        unit_sources.append(source)
        continue
    directories = [a for i, a in enumerate(command) if a.startswith(("-I", "-isystem")) or command[i - 1] == "-isystem"]
    result = compile_stderr([command[0], *flags[1].split(), *directories, source.name], source.parent)
    output += check(result, expected)
    errors = sum("error:" in line for line in result.stderr.splitlines())
    if errors != 1:
        failures.append(f"{source}: {errors} errors")
result = compile_stderr(command, entry["directory"])
output += check(result, unit_expected)
failures += [f"{source}: no error" for source in unit_sources if f"{source.name}:" not in result.stderr]
if failures:
    sys.exit(output + "\n".join(failures))
