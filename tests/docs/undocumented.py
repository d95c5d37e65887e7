#!/usr/bin/env python3
"""Prints public classes and members without documentation, and exits with 1 if there is one.

    undocumented.py ROOT DOXYGEN OUTPUT_DIRECTORY
"""

import pathlib
import subprocess
import sys

root, doxygen, directory = pathlib.Path(sys.argv[1]), *sys.argv[2:4]
settings = (root / "docs/site/Doxyfile").read_text(encoding="utf-8") + f"""
OUTPUT_DIRECTORY = {directory}
EXTRACT_ALL = NO
WARN_IF_UNDOCUMENTED = YES
WARN_AS_ERROR = NO
"""
pathlib.Path(directory).mkdir(parents=True, exist_ok=True)
run = subprocess.run([doxygen, "-"], input=settings, cwd=root, capture_output=True, text=True, check=True)
undocumented = sorted({line for line in run.stderr.splitlines() if line.endswith("is not documented.")})
print("\n".join(undocumented))
if undocumented or not (root / "include/mezzo/mezzo.h").exists():
    sys.exit(1)
