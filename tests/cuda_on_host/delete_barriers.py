#!/usr/bin/env python3
"""Shows that the tests of the kernels on the host can fail: deletes each barrier and each check of a tail or an
alignment in turn, and says which of the tests notices.

    delete_barriers.py SOURCE_DIR BUILD_DIR [PATTERN]

BUILD_DIR is where mezzo_cuda_on_host was built; its commands are asked of Ninja. With PATTERN only changes in
whose name it is found are made. Fails if a change goes unnoticed.
"""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

KERNELS = "include/mezzo/kernels"

# name, file, what it says, what it is to say instead; of a barrier, each place in turn.
CHANGES = [
    ("step: packs beyond the end", "cuda/optimizer_step.cuh", "count - count % Streams::kPack : 0", "count + 7 : 0"),
    ("step: the tail after the packs", "cuda/optimizer_step.cuh", "at < count; at += kStepThreads) single(at)",
     "at < 0; at += kStepThreads) single(at)"),
    ("step: unaligned taken for aligned", "cuda/optimizer_step.cuh",
     "% alignof(StepPack<T, kPack>) == 0", "% 1 == 0"),
    ("LAMB: a skipped step", "cuda/lamb_step.cuh", "if (is_skipped(inputs)) return;\n  using", "using"),
    ("a block's end beyond the row's", "launch_table.h", "end < elements ? end : elements", "end"),
    ("unscale: the tail after the packs", "cuda/unscale.cuh", "i < count; i += blockDim.x", "i < 0; i += blockDim.x"),
    ("unscale: unaligned taken for aligned", "cuda/unscale.cuh", "% sizeof(Vector) == 0", "% 1 == 0"),
    ("summary: the tail after the packs", "cuda/gradient_summary.cuh", "i < count; i += threads) visit",
     "i < 0; i += threads) visit"),
    ("summary: four packs at once beyond the end", "cuda/gradient_summary.cuh",
     "i + int64_t{kPacksAtOnce - 1} * threads < packs", "i < packs"),
    ("summary: unaligned taken for aligned", "cuda/gradient_summary.cuh", "% sizeof(Pack) == 0", "% 1 == 0"),
    ("summary: squares that no float holds", "cuda/gradient_summary.cuh", "sum >= 0x1p-102F && sum <= 0x1p127F",
     "true"),
    ("merge: warps that are not there", "cuda/gradient_summary.cuh", "if (threadIdx.x < kWarps) {", "if (true) {"),
]
BARRIER = re.compile(r"__syncthreads\(\);")
BARRIER_OR = "__syncthreads_or(nonfinite != 0) != 0"


def changes(source):
    """Yields (name, file, changed text)."""
    for file in sorted((source / KERNELS / "cuda").glob("*.cuh")):
        text = file.read_text()
        for number, match in enumerate(BARRIER.finditer(text), 1):
            line = text.count("\n", 0, match.start()) + 1
            changed = text[:match.start()] + text[match.end():]
            yield f"barrier {number} of {file.name} (line {line})", file, changed
        if BARRIER_OR in text:
            yield f"__syncthreads_or of {file.name}", file, text.replace(BARRIER_OR, "nonfinite != 0")
    for name, path, old, new in CHANGES:
        file = source / KERNELS / path
        text = file.read_text()
        if text.count(old) != 1:
            sys.exit(f"{path} no longer has exactly one `{old}`: put right the list in {sys.argv[0]}")
        yield name, file, text.replace(old, new)


def commands(build):
    """How the unit of the kernels is compiled, and where its object lies."""
    for unit in json.loads((build / "compile_commands.json").read_text()):
        if unit["file"].endswith("mezzo_cuda.cu") and "-DMEZZO_DEVICE_ON_HOST" in unit["command"]:
            return unit
    sys.exit(f"{build}/compile_commands.json does not say how mezzo_cuda.cu is compiled for the host")


def main():
    source, build = pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2]).resolve()
    wanted = sys.argv[3] if len(sys.argv) > 3 else ""
    unit = commands(build)
    link = subprocess.run(["ninja", "-C", build, "-t", "commands", "mezzo_cuda_on_host"], check=True,
                          capture_output=True, text=True).stdout.strip().splitlines()[-1]
    output = re.search(r" -o (\S+)", unit["command"]).group(1)
    program = re.search(r" -o (\S+)", link).group(1)
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    if subprocess.run([build / program], capture_output=True, check=False, env=environment).returncode:
        sys.exit(f"{build / program} fails as it is: what it says of a change means nothing")
    unnoticed = []
    for name, file, text in list(changes(source)):  # each is there, before hours of compiling
        if not re.search(wanted, name):
            continue
        with tempfile.TemporaryDirectory() as folder:
            copy = pathlib.Path(folder) / "include"
            shutil.copytree(source / "include", copy)
            (copy / file.relative_to(source / "include")).write_text(text)
            compile_changed = unit["command"].replace(str(source / "include"), str(copy)).replace(
                f" -o {output}", f" -o {folder}/kernels.o") + " -w"
            subprocess.run(compile_changed, shell=True, cwd=unit["directory"], check=True, capture_output=True)
            linked = link.replace(output, f"{folder}/kernels.o").replace(f" -o {program}", f" -o {folder}/program")
            subprocess.run(linked, shell=True, cwd=build, check=True, capture_output=True)
            try:
                run = subprocess.run([f"{folder}/program", "--gtest_fail_fast"], timeout=600, capture_output=True,
                                     text=True, errors="replace", env=environment)
                # Where it crashed, the last that began; those that fail_fast leaves out begin, too.
                last = (re.findall(r"\[  FAILED  \] (\S+)", run.stdout)[:1] or
                        re.findall(r"\[ RUN      \] (\S+)", run.stdout))
                noticed = (last or ["before any test"])[-1] if run.returncode else ""
            except subprocess.TimeoutExpired:
                noticed = "never ends"
        print(f"{name:55} {noticed or 'nobody notices'}", flush=True)
        if not noticed:
            unnoticed.append(name)
    if unnoticed:
        sys.exit(f"{len(unnoticed)} changes go unnoticed: {', '.join(unnoticed)}")


if __name__ == "__main__":
    main()
