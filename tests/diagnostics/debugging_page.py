#!/usr/bin/env python3
"""Generates a test from each C++ block in docs/debugging.md.

    debugging_page.py PAGE OUTPUT

The tests use the fixture in debugging_page.h.
"""

import pathlib
import re
import sys


def main():
    page = pathlib.Path(sys.argv[1]).read_text(encoding="utf-8")
    blocks = re.findall(r"^```cpp\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 8, f"{len(blocks)} blocks in {sys.argv[1]}"
    tests = [f"TEST_F(DebuggingPage, Block{i}Runs) {{\n{block}}}\n" for i, block in enumerate(blocks, start=1)]
    header = pathlib.Path(__file__).resolve().with_suffix(".h")
    text = f'#include "{header}"\n\n' + "\n".join(tests)
    output = pathlib.Path(sys.argv[2])
    if not output.exists() or output.read_text(encoding="utf-8") != text:
        output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
