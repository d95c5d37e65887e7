#!/usr/bin/env python3
"""Checks this machine for ./bootstrap gpu, before anything is downloaded or built: GPU, driver, nvcc and libtorch.

    check_gpu_environment.py LIBTORCH

LIBTORCH is a libtorch's folder, or the word `wheel` for the one that is to be downloaded, with an nvcc that fits it.
Prints the compute capability to compile for, that of the first GPU. Ends with 1 where something does not fit, and says
what to do.
"""
import pathlib
import re
import subprocess
import sys

# The oldest driver for programs of a CUDA version, by its major number: "Minor version compatibility" in NVIDIA's CUDA
# compatibility guide, https://docs.nvidia.com/deploy/cuda-compatibility.
OLDEST_DRIVER = {12: "525.60", 13: "580"}


REQUIREMENTS = pathlib.Path(__file__).resolve().parent.parent / "bootstrap-requirements.txt"


class Misfit(Exception):
    """What does not fit, and what to do."""


def output_of(*command):
    """Returns what a command prints; empty where it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""


def gpus_of(said):
    """Returns [{"gpu", "driver", "compute_capability"}] of what nvidia-smi prints."""
    keys = ("gpu", "driver", "compute_capability")
    rows = [[field.strip() for field in line.split(",")] for line in said.splitlines() if line.count(",") == 2]
    return [dict(zip(keys, row)) for row in rows]


def gpus():
    return gpus_of(output_of("nvidia-smi", "--query-gpu=name,driver_version,compute_cap", "--format=csv,noheader"))


def numbers(version):
    return [int(number) for number in re.findall(r"\d+", version)]


def cuda_of(libtorch):
    """Returns the major number of the CUDA version that a libtorch was built with."""
    if libtorch == "wheel":
        return int(re.search(r"^nvidia-cuda-runtime==(\d+)", REQUIREMENTS.read_text(), re.MULTILINE)[1])
    folder = pathlib.Path(libtorch)
    library = folder / "lib" / "libtorch_cuda.so"
    if not library.exists():
        raise Misfit(f"{folder} is a libtorch without CUDA (no lib/libtorch_cuda.so): set Torch_DIR to one with CUDA, or "
                     "unset it, and one is downloaded")
    found = re.search(r"libcudart\.so\.(\d+)", output_of("readelf", "-d", str(library)))
    if not found:
        raise Misfit(f"{library} does not say which CUDA it needs (readelf -d prints no libcudart.so.N)")
    return int(found[1])


def nvcc_major(said):
    """Returns the major number that `nvcc --version` prints."""
    found = re.search(r"release (\d+)\.", said)
    if not found:
        raise Misfit("nvcc --version prints no release: put the folder of a working nvcc first on PATH")
    return int(found[1])


def check(found, libtorch, nvcc_says):
    """Returns the compute capability of the first GPU, or raises Misfit."""
    if not found:
        raise Misfit("nvidia-smi names no GPU")
    gpu = found[0]
    if not re.fullmatch(r"\d+\.\d+", gpu["compute_capability"]):
        raise Misfit(f"nvidia-smi gives no compute capability for {gpu['gpu']} (\"{gpu['compute_capability']}\"): its driver "
                     "is too old")
    cuda = cuda_of(libtorch)
    oldest = OLDEST_DRIVER.get(cuda)
    if oldest and numbers(gpu["driver"]) < numbers(oldest):
        raise Misfit(f"the driver {gpu['driver']} is older than {oldest}, which libtorch for CUDA {cuda} needs: update the "
                     "driver, or set Torch_DIR to a libtorch for an older CUDA")
    nvcc = cuda if libtorch == "wheel" else nvcc_major(nvcc_says)
    if nvcc != cuda:
        raise Misfit(f"nvcc is of CUDA {nvcc}, and libtorch of CUDA {cuda}: put the folder of an nvcc {cuda} first on PATH, "
                     f"or set Torch_DIR to a libtorch for CUDA {nvcc}")
    return gpu["compute_capability"]


def main():
    try:
        print(check(gpus(), sys.argv[1], output_of("nvcc", "--version")))
    except Misfit as misfit:
        sys.exit(f"check_gpu_environment.py: {misfit}")


if __name__ == "__main__":
    main()
