#!/usr/bin/env python3
"""Checks GPU, driver, nvcc and libtorch for ./bootstrap gpu, before the download and the build.

    check_gpu_environment.py LIBTORCH

LIBTORCH is the directory of a libtorch, or `wheel` for the one that will be downloaded, with a matching nvcc.
Prints the compute capability of the first GPU. Exits with 1 and a remedy if a version does not match.
"""
import pathlib
import re
import subprocess
import sys

# The oldest driver for each major version of CUDA: "Minor version compatibility" in NVIDIA's CUDA
# compatibility guide, https://docs.nvidia.com/deploy/cuda-compatibility.
OLDEST_DRIVER = {12: "525.60", 13: "580"}
# PyPI's newest torch for each major version of CUDA, except that of bootstrap-requirements.txt.
NEWEST_TORCH = {12: "2.10.0"}

REQUIREMENTS = pathlib.Path(__file__).resolve().parent.parent / "bootstrap-requirements.txt"


class VersionMismatch(Exception):
    """What does not match, and the remedy."""


def output_of(*command):
    """Returns the output of a command; empty if it does not exist or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""


def parse_gpus(output):
    """Parses the output of nvidia-smi into [{"gpu", "driver", "compute_capability"}]."""
    keys = ("gpu", "driver", "compute_capability")
    rows = [[field.strip() for field in line.split(",")] for line in output.splitlines() if line.count(",") == 2]
    return [dict(zip(keys, row)) for row in rows]


def gpus():
    return parse_gpus(output_of("nvidia-smi", "--query-gpu=name,driver_version,compute_cap", "--format=csv,noheader"))


def numbers(version):
    return [int(number) for number in re.findall(r"\d+", version)]


def cuda_of(libtorch):
    """Returns the major CUDA version that a libtorch was built with."""
    if libtorch == "wheel":
        return int(re.search(r"^nvidia-cuda-runtime==(\d+)", REQUIREMENTS.read_text(), re.MULTILINE)[1])
    directory = pathlib.Path(libtorch)
    library = directory / "lib" / "libtorch_cuda.so"
    if not library.exists():
        raise VersionMismatch(f"{directory} is a libtorch without CUDA (no lib/libtorch_cuda.so): set Torch_DIR to one with CUDA, or "
                     "unset it to download one")
    found = re.search(r"libcudart\.so\.(\d+)", output_of("readelf", "-d", str(library)))
    if not found:
        raise VersionMismatch(f"{library} has no dependency libcudart.so.N (readelf -d)")
    return int(found[1])


def check_driver(gpu, libtorch):
    """Raises VersionMismatch, with the libtorch to use, if the driver is too old for the CUDA of this one. Returns its CUDA version."""
    cuda = cuda_of(libtorch)
    driver, oldest = gpu["driver"], OLDEST_DRIVER.get(cuda)
    if oldest and numbers(driver) < numbers(oldest):
        usable = [major for major in NEWEST_TORCH if numbers(driver) >= numbers(OLDEST_DRIVER[major])]
        other = "".join(f", or use a libtorch for CUDA {major}: python3 -m pip install torch=={NEWEST_TORCH[major]} (or set Torch_DIR), "
                        f"with an nvcc {major} first on PATH" for major in usable)
        raise VersionMismatch(f"the driver {driver} is older than {oldest}, which libtorch for CUDA {cuda} needs: update the driver{other}")
    return cuda


def nvcc_major(output):
    """Parses the major version in the output of `nvcc --version`."""
    found = re.search(r"release (\d+)\.", output)
    if not found:
        raise VersionMismatch("nvcc --version prints no release: put the directory of a working nvcc first on PATH")
    return int(found[1])


def check(found, libtorch, nvcc_output):
    """Returns the compute capability of the first GPU, or raises VersionMismatch."""
    if not found:
        raise VersionMismatch("nvidia-smi lists no GPU")
    gpu = found[0]
    if not re.fullmatch(r"\d+\.\d+", gpu["compute_capability"]):
        raise VersionMismatch(f"nvidia-smi reports no compute capability for {gpu['gpu']} (\"{gpu['compute_capability']}\"): its driver "
                     "is too old")
    cuda = check_driver(gpu, libtorch)
    nvcc = cuda if libtorch == "wheel" else nvcc_major(nvcc_output)
    if nvcc != cuda:
        raise VersionMismatch(f"nvcc has CUDA {nvcc}, libtorch has CUDA {cuda}: put the directory of an nvcc {cuda} first on PATH, "
                     f"or set Torch_DIR to a libtorch for CUDA {nvcc}")
    return gpu["compute_capability"]


def main():
    try:
        print(check(gpus(), sys.argv[1], output_of("nvcc", "--version")))
    except VersionMismatch as mismatch:
        sys.exit(f"check_gpu_environment.py: {mismatch}")


if __name__ == "__main__":
    main()
