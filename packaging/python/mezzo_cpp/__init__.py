"""Paths of mezzo's C++ headers and CMake package."""

from importlib.metadata import version as _version
from pathlib import Path as _Path

__version__ = _version("mezzo-cpp")

_PREFIX = _Path(__file__).resolve().parent / "prefix"


def get_prefix():
    """Returns the directory for CMAKE_PREFIX_PATH."""
    return str(_PREFIX)


def get_include():
    """Returns the directory of mezzo/mezzo.h, for include_paths in torch.utils.cpp_extension."""
    return str(_PREFIX / "include")


def get_cmake_dir():
    """Returns the directory of mezzo-config.cmake, for mezzo_DIR."""
    return str(_PREFIX / "share" / "cmake" / "mezzo")
