#!/usr/bin/env python3
"""check.py BUILD_FOLDER UNIT SOURCE...: what must not compile says why.

The unit, which includes all sources, is compiled as BUILD_FOLDER/compile_commands.json says. Each source begins with lines
"// error: WORDS" or "// note: WORDS", regular expressions of what the compiler says; as many lines must match as sources expect.
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
command = next(one for one in commands if pathlib.Path(one["file"]).resolve() == pathlib.Path(unit).resolve())
said = subprocess.run([*shlex.split(command["command"]), "-fsyntax-only"], cwd=command["directory"], capture_output=True,
                      text=True)
expected = collections.Counter()
for source in map(pathlib.Path, sources):
    words = re.findall(r"^// (?:error|note): (.+)$", source.read_text(), re.M)
    expected.update(words)
    if not words or f"{source.name}:" not in said.stderr:
        print(f"{source}: the compiler says nothing of it, or the file does not say what it should")
        said.returncode = 0
wrong = {words: count for words, count in expected.items()
         if sum(bool(re.search(words, line)) for line in said.stderr.splitlines()) < count}
for words, count in wrong.items():
    print(f"not said {count} times: {words}")
if wrong or said.returncode == 0:
    sys.exit(said.stderr)
