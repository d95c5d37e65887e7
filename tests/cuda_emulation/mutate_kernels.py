#!/usr/bin/env python3
"""Shows that the tests of the kernels on the host can fail: makes one change after the other in the kernels and the
host's code around them, each barrier deleted among them, and says which test notices.

    mutate_kernels.py SOURCE_DIR BUILD_DIR [PATTERN]

BUILD_DIR is where mezzo_cuda_emulation_tests was built; its commands are asked of Ninja. With PATTERN only changes in whose
name it is found are made. Fails if a change goes unnoticed.
"""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

HEADERS = "include/mezzo"
KERNELS = HEADERS + "/kernels"

# name, file in KERNELS, what it says, what it is to say instead.
CHANGES = [
    ("step: packs beyond the end", "cuda/optimizer_step.cuh", "(count - before) / kPack * kPack", "(count - before + kPack - 1) / kPack * kPack"),
    ("step: the tail after the packs", "cuda/optimizer_step.cuh", "i < count - packed; i += kStepThreads",
     "i < 0; i += kStepThreads"),
    ("step: unaligned taken for aligned", "cuda/optimizer_step.cuh",
     "return beyond == 0 ? 0 :", "return true ? 0 :"),
    ("8 bits: a scale of half a warp", "cuda/adamw8bit_step.cuh", "int lanes = 16; lanes > 0", "int lanes = 8; lanes > 0"),
    ("8 bits: elements beyond the end", "cuda/adamw8bit_step.cuh", "if (at < count) visit(i, at);", "visit(i, at);"),
    ("8 bits: a table that is full is not launched", "cuda/mezzo_cuda.cu", "if (table.full()) launch_steps();",
     "if (table.full()) table.clear();"),
    ("8 bits: a second moment with signs", "cuda/adamw8bit_step.cuh", "quantize_block<kMoment == 0,", "quantize_block<true,"),
    ("a block's end beyond the row's", "launch_table.h", "end < elements ? end : elements", "end"),
    ("unscale: the tail after the packs", "cuda/gradients.cuh", "i < packed.rest; i += blockDim.x", "i < 0; i += blockDim.x"),
    ("gradients: unaligned taken for aligned", "cuda/gradients.cuh", "beyond == 0 ? 0 : Pack::kSize",
     "true ? 0 : Pack::kSize"),
    ("summary: the tail after the packs", "cuda/gradients.cuh", "i < slice.rest; i += threads) visit",
     "i < 0; i += threads) visit"),
    ("summary: four packs at once beyond the end", "cuda/gradients.cuh",
     "i + int64_t{kUnroll - 1} * threads < slice.packs", "i < slice.packs"),
    ("summary: squares that no float holds", "cuda/gradients.cuh", "sum >= 0x1p-102F && sum <= 0x1p127F",
     "true"),
    ("merge: warps that are not there", "cuda/gradients.cuh", "threadIdx.x < kWarps ? of_warp", "true ? of_warp"),
    ("summary: more partial results than threads", "cuda/gradients.cuh", "i < count; i += kThreads) own.merge",
     "i < kThreads && i < count; i += kThreads) own.merge"),
    ("summary: a table that is full is not launched", "cuda/mezzo_cuda.cu",
     "if (table.full()) launch_table();", "if (table.full()) table.clear();"),
    ("step: found_inf of two devices", "cuda/optimizer_step.cuh", "step_args.found_inf != nullptr && *step_args.found_inf != 0.0F",
     "step_args.found_inf != nullptr && *step_args.found_inf == 1.0F"),
    ("counts: found_inf of two devices", "cuda/optimizer_step.cuh", "found_inf != nullptr && *found_inf != 0.0F) return",
     "found_inf != nullptr && *found_inf == 1.0F) return"),
    ("step: more groups than a page holds", "launch_table.h", "(is_new && groups_ == kGroups)", "false"),
    ("step: a gradient alone unaligned", "cuda/optimizer_step.cuh", "gradient.is_aligned = first.gradient.elements_before_packs(kPack) == 0;",
     ""),
    ("step: a parameter alone unaligned", "cuda/optimizer_step.cuh", "head = elements_before_packs(parameter, sizeof(Stored), kPack)",
     "head = 0"),
    ("step: a moment alone unaligned", "cuda/optimizer_step.cuh", "agree = agree && elements_before_packs(first.moments[k], sizeof(StoredMoment), kPack) == 0;",
     ""),
    ("step: a copy or low half alone unaligned", "cuda/optimizer_step.cuh",
     "!has_low_bits_or_model_param || elements_before_packs(first.low_bits_or_model_param, 2, kPack) == 0", "true"),
    ("counters beyond one launch", "cuda/mezzo_cuda.cu", "begin += StateStepsMetadata::kCapacity) {", "begin += counters.size()) {"),
    ("the scale changes without a version", "cuda/mezzo_cuda.cu", "tensors.scale.unsafeGetTensorImpl()->bump_version();",
     ""),
    ("memory that a kernel writes on the host, freed too early", "cuda/mezzo_cuda.cu",
     "  at::getHostAllocator(device.type())\n"
     "      ->record_event(place, pinned.storage().data_ptr().get_context(), stream);\n", ""),
    ("memory is pinned in a capture without leave", "cuda/mezzo_cuda.cu",
     "const RelaxedCaptureModeGuard allowed;\n  return at::empty", "return at::empty"),
    ("unscale: the stream of the device before", "cuda/mezzo_cuda.cu",
     "const DeviceGuard guard(found_inf.device());\n  const Stream stream = current_stream();",
     "const Stream stream = current_stream();\n  const DeviceGuard guard(found_inf.device());"),
]

# The same in HEADERS, of what the host does around the kernels.
HOST_CHANGES = [
    ("a letter's event before its kernel", "scaling/detail/device_step_future.h",
     "copy_to_host(to_device(scale, device_), stats.to(device_));\n    if (!is_captured_)\n      "
     "event_.record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));",
     "if (!is_captured_) event_.record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));\n"
     "    write(to_device(scale, device_), stats.to(device_));"),
    ("a letter before its event has come", "scaling/detail/device_step_future.h",
     "is_ready_ = event_.query();", "is_ready_ = true;"),
    ("the host's own step before its letter has come", "scaling/detail/device_step_future.h",
     "event_.synchronize();", ""),
    ("a line before the next scale has come", "scaling/detail/skip_reporter.h",
     "if (skipped_scale && !next_scale) return;", "if (!next_scale) next_scale = skipped_scale;"),
    ("a gradient of two parameters is cleared on the way", "optim/detail/fused_optimizer_base_inl.h",
     "step_args.zero_grad = step_args.zero_grad && !gradients_overlap(params);", ""),
    ("a count begins anew on a device", "optim/detail/applied_steps.h", "values.push_back(static_cast<float>(count.value()));",
     "values.push_back(0.0F);"),
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
    in_folders = [(KERNELS, change) for change in CHANGES] + [(HEADERS, change) for change in HOST_CHANGES]
    for folder, (name, path, old, new) in in_folders:
        file = source / folder / path
        text = file.read_text()
        if text.count(old) != 1:
            sys.exit(f"{path} no longer has exactly one `{old}`: put right the list in {sys.argv[0]}")
        yield name, file, text.replace(old, new)


def units_of(build):
    """How each unit of the program is compiled, with its object and the headers that it includes."""
    # Without the GPU's own tests, which take as long as all others to compile: they call what the units before them in the
    # link bring.
    units = [unit for unit in json.loads((build / "compile_commands.json").read_text())
             if "mezzo_cuda_emulation_tests.dir" in unit["command"] and "gpu_tests" not in unit["command"]]
    for unit in units:
        unit["object"] = re.search(r" -o (\S+)", unit["command"]).group(1)
        said = subprocess.run(["ninja", "-C", build, "-t", "deps", unit["object"]], check=True, capture_output=True,
                              text=True).stdout
        unit["headers"] = {(build / line.strip()).resolve() for line in said.splitlines()[1:] if line.strip()}
    if not units:
        sys.exit(f"{build}/compile_commands.json does not say how mezzo_cuda_emulation_tests is compiled")
    return units


def main():
    source, build = pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2]).resolve()
    wanted = sys.argv[3] if len(sys.argv) > 3 else ""
    units = units_of(build)
    link = subprocess.run(["ninja", "-C", build, "-t", "commands", "mezzo_cuda_emulation_tests"], check=True,
                          capture_output=True, text=True).stdout.strip().splitlines()[-1]
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
            linked = link.replace(f" -o {program}", f" -o {folder}/program")
            for number, unit in enumerate(units):
                if file not in unit["headers"] and str(file) != unit["file"]:
                    continue
                compiled = f"{folder}/{number}.o"
                compile_changed = unit["command"].replace(str(source / "include"), str(copy)).replace(
                    f" -o {unit['object']}", f" -o {compiled}") + " -w"
                subprocess.run(compile_changed, shell=True, cwd=unit["directory"], check=True, capture_output=True)
                linked = linked.replace(unit["object"], compiled)
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
