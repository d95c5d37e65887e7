"""Where mezzo's C++ headers and its CMake package lie."""

from importlib.metadata import version as _version
from pathlib import Path as _Path

__version__ = _version("mezzo-cpp")

_PREFIX = _Path(__file__).resolve().parent / "prefix"


def get_prefix():
    """The folder to put on CMAKE_PREFIX_PATH."""
    return str(_PREFIX)


def get_include():
    """The folder that holds mezzo/mezzo.h: an entry of include_paths in torch.utils.cpp_extension."""
    return str(_PREFIX / "include")


def get_cmake_dir():
    """The folder that holds mezzo-config.cmake: what mezzo_DIR may be set to."""
    return str(_PREFIX / "share" / "cmake" / "mezzo")
