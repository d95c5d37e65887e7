#!/usr/bin/env python3
"""Counts the public classes and members without a sentence of their own in the API reference.

    undocumented.py ROOT DOXYGEN FOLDER MOST      with more than MOST it exits with 1; --list in place of MOST names them

The number may fall, and MOST in CMakeLists.txt with it.
"""

import pathlib
import subprocess
import sys

root, doxygen, folder, most = pathlib.Path(sys.argv[1]), *sys.argv[2:5]
settings = (root / "docs/site/Doxyfile").read_text(encoding="utf-8") + f"""
OUTPUT_DIRECTORY = {folder}
EXTRACT_ALL = NO
WARN_IF_UNDOCUMENTED = YES
WARN_AS_ERROR = NO
"""
pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
run = subprocess.run([doxygen, "-"], input=settings, cwd=root, capture_output=True, text=True, check=True)
bare = sorted({line for line in run.stderr.splitlines() if line.endswith("is not documented.")})
if most == "--list":
    print("\n".join(bare))
else:
    print(f"{len(bare)} without a sentence, at most {most}")
    if not (root / "include/mezzo/mezzo.h").exists() or len(bare) > int(most):
        print("\n".join(bare))
        sys.exit(1)
