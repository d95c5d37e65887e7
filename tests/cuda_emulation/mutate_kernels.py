#!/usr/bin/env python3
"""Mutation test of the kernels and the host code around them: applies one mutation at a time, including the deletion of
each barrier, and reports the test that detects it.

    mutate_kernels.py SOURCE_DIR BUILD_DIR [PATTERN]

BUILD_DIR is where Ninja built mezzo_cuda_emulation_tests. PATTERN selects mutations by name. Fails if a mutation is not
detected.
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

# name, file in KERNELS, old text, new text.
CHANGES = [
    ("step: vectors beyond the end", "cuda/optimizer_step.cuh", "(count - num_head) / kVectorSize * kVectorSize",
     "(count - num_head + kVectorSize - 1) / kVectorSize * kVectorSize"),
    ("step: no tail after the vectors", "cuda/optimizer_step.cuh", "k < count - num_vectorized; k += kStepThreads",
     "k < 0; k += kStepThreads"),
    ("misaligned memory is vectorized", "cuda/aligned_vector.cuh", "return misalignment == 0 ? 0 :", "return true ? 0 :"),
    ("8 bits: absmax of half a warp", "cuda/adamw8bit_step.cuh", "int lanes = 16; lanes > 0", "int lanes = 8; lanes > 0"),
    ("8 bits: elements beyond the end", "cuda/adamw8bit_step.cuh", "if (i < count) visit(k, i);", "visit(k, i);"),
    ("8 bits: signed second moment", "cuda/adamw8bit_step.cuh", "quantize_block<kMoment == 0, ScalarVec<float>>(maps.get<kMoment == 0>(), value,",
     "quantize_block<true, ScalarVec<float>>(maps.get<kMoment == 0>(), value,"),
    ("full metadata is not launched", "cuda/mezzo_cuda.cu", "    flush();\n    push_back(metadata, i);",
     "    metadata.clear();\n    push_back(metadata, i);"),
    ("a chunk ends beyond its tensor", "multi_tensor_metadata.h", "end < numel ? end : numel", "end"),
    ("unscale: no tail after the vectors", "cuda/gradients.cuh", "i < chunk.num_scalars; i += blockDim.x", "i < 0; i += blockDim.x"),
    ("grad stats: no tail after the vectors", "cuda/gradients.cuh", "i < chunk.num_scalars; i += threads) visit",
     "i < 0; i += threads) visit"),
    ("grad stats: unrolled vectors beyond the end", "cuda/gradients.cuh",
     "i + int64_t{kUnroll - 1} * threads < chunk.num_vectors", "i < chunk.num_vectors"),
    ("grad stats: squares beyond float32", "cuda/gradients.cuh", "sum >= 0x1p-102F && sum <= 0x1p127F", "true"),
    ("merge: warps that do not exist", "cuda/gradients.cuh", "threadIdx.x < kWarps ? warp_partials", "true ? warp_partials"),
    ("grad stats: more partial results than threads", "cuda/gradients.cuh", "i < count; i += kThreads) thread_stats.merge",
     "i < kThreads && i < count; i += kThreads) thread_stats.merge"),
    ("step: found_inf of two devices", "cuda/optimizer_step.cuh",
     "step_args.found_inf != nullptr && *step_args.found_inf != 0.0F",
     "step_args.found_inf != nullptr && *step_args.found_inf == 1.0F"),
    ("state steps: found_inf of two devices", "cuda/optimizer_step.cuh", "found_inf != nullptr && *found_inf != 0.0F) return",
     "found_inf != nullptr && *found_inf == 1.0F) return"),
    ("step: more groups than a launch holds", "multi_tensor_metadata.h", "is_new && num_groups_ == kMaxGroups", "false"),
    ("step: only the gradient is misaligned", "cuda/optimizer_step.cuh",
     "gradient.is_aligned = first.gradient.elements_before_vectors(kVectorSize) == 0;", ""),
    ("step: only the parameter is misaligned", "cuda/optimizer_step.cuh",
     "head = elements_before_vectors(parameter, sizeof(Stored), kVectorSize)", "head = 0"),
    ("step: only a moment is misaligned", "cuda/optimizer_step.cuh", "is_aligned = is_aligned && elements_before_vectors(",
     "is_aligned = is_aligned || elements_before_vectors("),
    ("step: only the model param or low bits are misaligned", "cuda/optimizer_step.cuh",
     "elements_before_vectors(first.low_bits_or_model_param, 2, kVectorSize) == 0", "true"),
    ("state steps beyond one launch", "cuda/mezzo_cuda.cu", "begin += StateStepsMetadata::kCapacity) {", "begin += count) {"),
    ("the scale changes without a version", "cuda/mezzo_cuda.cu", "tensors.scale.unsafeGetTensorImpl()->bump_version();",
     ""),
    ("pinned memory is freed before its kernel completes", "cuda/mezzo_cuda.cu",
     "  at::getHostAllocator(device.type())\n"
     "      ->record_event(data, pinned.storage().data_ptr().get_context(), stream);\n", ""),
    ("pinning in a capture without the relaxed mode", "cuda/mezzo_cuda.cu",
     "const RelaxedCaptureModeGuard relaxed;\n  return at::empty", "return at::empty"),
    ("unscale: the stream of the previous device", "cuda/mezzo_cuda.cu",
     "const DeviceGuard guard(found_inf.device());\n  const Stream stream = current_stream();",
     "const Stream stream = current_stream();\n  const DeviceGuard guard(found_inf.device());"),
]

# name, file in HEADERS, old text, new text: host code around the kernels.
HOST_CHANGES = [
    ("step future: the event is recorded before the kernel", "scaling/detail/device_step_future.h",
     "    copy_to_host(to_device(scale, device_), stats.to(device_));\n    if (!is_captured_)\n"
     "      event_.record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));",
     "    if (!is_captured_)\n"
     "      event_.record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));\n"
     "    copy_to_host(to_device(scale, device_), stats.to(device_));"),
    ("step future: ready before its event", "scaling/detail/device_step_future.h",
     "is_ready_ = event_.query();", "is_ready_ = true;"),
    ("step future: read before its event", "scaling/detail/device_step_future.h",
     "event_.synchronize();", ""),
    ("skip message before the next scale", "scaling/detail/skip_reporter.h",
     "if (skipped_scale && !next_scale) return;", "if (!next_scale) next_scale = skipped_scale;"),
    ("a shared gradient is zeroed in the kernel", "optim/detail/fused_optimizer_base_inl.h",
     "inputs.zero_grad = inputs.zero_grad && !gradients_overlap(params);", ""),
    ("a step count restarts on a device", "optim/detail/applied_steps.h", "values.push_back(static_cast<float>(count.value()));",
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
    directory_mutations = [(KERNELS, change) for change in CHANGES] + [(HEADERS, change) for change in HOST_CHANGES]
    for directory, (name, path, old, new) in directory_mutations:
        file = source / directory / path
        text = file.read_text()
        if text.count(old) != 1:
            sys.exit(f"{path} must have exactly one `{old}`: update the list in {sys.argv[0]}")
        yield name, file, text.replace(old, new)


def read_compile_commands(build):
    """The compile commands of the program's translation units, with their objects and included headers."""
    # Without the GPU tests, which take as long as all others to compile: they link to functions of the other units.
    units = [unit for unit in json.loads((build / "compile_commands.json").read_text())
             if "mezzo_cuda_emulation_tests.dir" in unit["command"] and "gpu_tests" not in unit["command"]]
    for unit in units:
        unit["object"] = re.search(r" -o (\S+)", unit["command"]).group(1)
        deps = subprocess.run(["ninja", "-C", build, "-t", "deps", unit["object"]], check=True, capture_output=True,
                              text=True).stdout
        unit["headers"] = {(build / line.strip()).resolve() for line in deps.splitlines()[1:] if line.strip()}
    if not units:
        sys.exit(f"{build}/compile_commands.json has no commands of mezzo_cuda_emulation_tests")
    return units


def main():
    source, build = pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2]).resolve()
    wanted = sys.argv[3] if len(sys.argv) > 3 else ""
    units = read_compile_commands(build)
    link = subprocess.run(["ninja", "-C", build, "-t", "commands", "mezzo_cuda_emulation_tests"], check=True,
                          capture_output=True, text=True).stdout.strip().splitlines()[-1]
    program = re.search(r" -o (\S+)", link).group(1)
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    if subprocess.run([build / program], capture_output=True, check=False, env=environment).returncode:
        sys.exit(f"{build / program} fails without a mutation")
    undetected = []
    for name, file, text in list(changes(source)):  # checks all patterns before hours of compiling
        if not re.search(wanted, name):
            continue
        with tempfile.TemporaryDirectory() as directory:
            copy = pathlib.Path(directory) / "include"
            shutil.copytree(source / "include", copy)
            (copy / file.relative_to(source / "include")).write_text(text)
            linked = link.replace(f" -o {program}", f" -o {directory}/program")
            for number, unit in enumerate(units):
                if file not in unit["headers"] and str(file) != unit["file"]:
                    continue
                compiled = f"{directory}/{number}.o"
                compile_changed = unit["command"].replace(str(source / "include"), str(copy)).replace(
                    f" -o {unit['object']}", f" -o {compiled}") + " -w"
                subprocess.run(compile_changed, shell=True, cwd=unit["directory"], check=True, capture_output=True)
                linked = linked.replace(unit["object"], compiled)
            subprocess.run(linked, shell=True, cwd=build, check=True, capture_output=True)
            try:
                run = subprocess.run([f"{directory}/program", "--gtest_fail_fast"], timeout=600, capture_output=True,
                                     text=True, errors="replace", env=environment)
                # After a crash, the last test that began; tests that fail_fast skips begin, too.
                last = (re.findall(r"\[  FAILED  \] (\S+)", run.stdout)[:1] or
                        re.findall(r"\[ RUN      \] (\S+)", run.stdout))
                detected = (last or ["before the first test"])[-1] if run.returncode else ""
            except subprocess.TimeoutExpired:
                detected = "timeout"
        print(f"{name:55} {detected or 'NOT DETECTED'}", flush=True)
        if not detected:
            undetected.append(name)
    if undetected:
        sys.exit(f"{len(undetected)} mutations were not detected: {', '.join(undetected)}")


if __name__ == "__main__":
    main()
