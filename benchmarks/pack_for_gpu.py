#!/usr/bin/env python3
"""Packs the programs that run_on_gpu.py runs, for a machine with a GPU and without a network.

    pack_for_gpu.py ARCHIVE

Writes ARCHIVE, a .tar.gz, with the programs in build/cuda-compile, stripped, and their libraries; the model, its weights as float16,
and the data; the Python baselines; and `run`. libtorch and the CUDA libraries must be on the other machine.
"""
import hashlib
import json
import pathlib
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "cuda-compile"
PROGRAMS = ("tests/cuda/mezzo_cuda_tests", "tests/cuda/mezzo_cuda_aten_tests", "benchmarks/cuda/cuda_bench",
            "examples/bert_ner/bert_ner")
SCRIPTS = ("run_on_gpu.py", "check_gpu_environment.py", "cuda/torch_amp_bench.py", "cuda/bert_ner_torch.py")
MODEL = ("config.json", "vocab.txt", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")

# Libraries of the other machine: CUDA, libtorch, glibc.
NOT_PACKED = re.compile(r"lib(torch|c10|cu|nv|nccl|shm|c\.|m\.|dl\.|rt\.|pthread\.|util\.|resolv\.|stdc\+\+|gcc_s)|ld-linux|linux-vdso")

RUN = """#!/bin/sh
# Runs tests, benchmarks, the BERT NER example and compute-sanitizer on this machine's first GPU: see ./run --help.
# PYTHON is a Python with torch, whose libraries are used, and which runs the baselines. Torch_DIR is another libtorch.
here=$(dirname "$0")
command -v "${PYTHON:-python3}" >/dev/null || { echo "run: needs python3" >&2; exit 1; }
exec "${PYTHON:-python3}" "$here/run_on_gpu.py" "$@"
"""


def output_of(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def pack_program(program, directory):
    """Copies a program without symbols, and the libraries that the other machine may not have."""
    (directory / "bin").mkdir(exist_ok=True)
    subprocess.run(["strip", "-o", directory / "bin" / program.name, program], check=True)
    for name, path in re.findall(r"^\s*(\S+) => (/\S+)", output_of("ldd", str(program)), re.MULTILINE):
        if not NOT_PACKED.match(name):
            (directory / "lib").mkdir(exist_ok=True)
            shutil.copy(path, directory / "lib" / name)


def newest_symbols(programs):
    """Returns the versions of glibc and libstdc++ that the programs need."""
    symbols = "".join(output_of("objdump", "-T", str(program)) for program in programs)
    newest = []
    for library in ("GLIBC", "GLIBCXX", "CXXABI"):
        versions = {tuple(map(int, version.split("."))) for version in re.findall(rf"\b{library}_([\d.]+)\b", symbols)}
        if versions:
            newest.append(f"{library}_{'.'.join(map(str, max(versions)))}")
    return ", ".join(newest)


def architectures():
    """Returns the architectures of the kernels, in the syntax of TORCH_CUDA_ARCH_LIST."""
    lines = [line for line in (BUILD / "build.ninja").read_text().splitlines() if "arch=compute_" in line]
    found = set(re.findall(r"arch=compute_(\d+)a?,code=(\[[^\]]*\]|\S+?)(?=[\s\"]|$)", "\n".join(lines)))
    names = {f"{number[:-1]}.{number[-1]}" + ("+PTX" if "compute_" in code else "") for number, code in found}
    return ";".join(sorted(names)) or sys.exit(f"pack_for_gpu.py: {BUILD}/build.ninja has no architecture")


def write_float16(source, target):
    """Copies a safetensors file, with float32 tensors as float16 and without those of the pooler."""
    with open(source, "rb") as file:
        length = struct.unpack("<Q", file.read(8))[0]
        header = json.loads(file.read(length))
        entries, places, offset = {}, [], 0
        for name, entry in header.items():
            if name == "__metadata__" or "pooler" in name:
                continue
            begin, end = entry["data_offsets"]
            is_float = entry["dtype"] == "F32"
            size = (end - begin) // (2 if is_float else 1)
            dtype = "F16" if is_float else entry["dtype"]
            entries[name] = {"dtype": dtype, "shape": entry["shape"], "data_offsets": [offset, offset + size]}
            places.append((8 + length + begin, end - begin, is_float))
            offset += size
        text = json.dumps(entries).encode()
        text += b" " * (-len(text) % 8)
        with open(target, "wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
            for place, size, is_float in places:
                file.seek(place)
                while size:
                    part = file.read(min(size, 1 << 20))
                    size -= len(part)
                    if is_float:
                        numbers = struct.unpack(f"<{len(part) // 4}f", part)
                        part = struct.pack(f"<{len(numbers)}e", *numbers)
                    out.write(part)


def pack_model(directory):
    model = ROOT / ".deps" / "model"
    (directory / "model").mkdir()
    for name in MODEL:
        if (model / name).exists():
            shutil.copy(model / name, directory / "model" / name)
    write_float16(model / "model.safetensors", directory / "model" / "model.safetensors")
    shutil.copy(ROOT / ".deps" / "ner.txt", directory / "ner.txt")


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    archive = pathlib.Path(sys.argv[1])
    programs = [BUILD / program for program in PROGRAMS]
    version = (ROOT / ".deps/libtorch/share/cmake/Torch/TorchConfigVersion.cmake").read_text().split('"')[1]
    with tempfile.TemporaryDirectory() as scratch:
        directory = pathlib.Path(scratch)
        for program in programs:
            pack_program(program, directory)
        pack_model(directory)
        for script in SCRIPTS:
            shutil.copy(ROOT / "benchmarks" / script, directory / pathlib.Path(script).name)
        (directory / "run").write_text(RUN)
        (directory / "run").chmod(0o755)
        try:
            commit = output_of("git", "-C", str(ROOT), "describe", "--always", "--dirty").strip()
        except (OSError, subprocess.CalledProcessError):
            commit = "no git checkout"
        packed = {"commit": commit, "libtorch": version, "architectures": architectures(),
                  "compiler": output_of("c++", "--version").splitlines()[0], "needs": newest_symbols(programs)}
        (directory / "packed.json").write_text(json.dumps(packed, indent=1) + "\n")
        with tarfile.open(archive, "w:gz") as tar:
            for path in sorted(directory.iterdir()):
                tar.add(path, path.name)
    size = archive.stat().st_size / 2**20
    print("\n".join(f"{key}: {value}" for key, value in packed.items()))
    print(f"{archive}: {size:.1f} MiB, sha256 {hashlib.sha256(archive.read_bytes()).hexdigest()[:16]}")
    print(f"On the machine with the GPU, in a new directory: tar xf {archive.name} && ./run")


if __name__ == "__main__":
    main()
