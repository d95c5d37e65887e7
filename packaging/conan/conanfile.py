"""mezzo for Conan 2: `conan create packaging/conan` in a checkout.

ConanCenter has no libtorch, so the recipe requires none: the project that uses mezzo says where its libtorch is, by
CMAKE_PREFIX_PATH or Torch_DIR, as without Conan. find_package(mezzo) reads the package that mezzo itself installs,
with its components (cuda, compiled, mpi, nccl), and not one that Conan writes.
"""

import os
import re

from conan import ConanFile
from conan.tools.build import check_min_cppstd
from conan.tools.cmake import CMake, CMakeToolchain
from conan.tools.files import copy, load


class MezzoConan(ConanFile):
    name = "mezzo"
    description = "Mixed-precision training for libtorch, header-only"
    license = "BSD-3-Clause"
    topics = ("libtorch", "mixed-precision", "deep-learning", "header-only")
    package_type = "header-library"
    settings = "os", "arch", "compiler", "build_type"
    no_copy_source = True

    @property
    def _checkout(self):
        return os.path.join(self.recipe_folder, "..", "..")

    def set_version(self):
        header = load(self, os.path.join(self._checkout, "include", "mezzo", "base", "version.h"))
        self.version = ".".join(re.findall(r"define MEZZO_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)", header))

    def export_sources(self):
        for pattern in ("CMakeLists.txt", "LICENSE", "cmake/*", "include/*"):
            copy(self, pattern, self._checkout, self.export_sources_folder)

    def validate(self):
        check_min_cppstd(self, 20)

    def package_id(self):
        self.info.clear()

    def generate(self):
        toolchain = CMakeToolchain(self)
        toolchain.cache_variables.update(
            {"MEZZO_BUILD_TESTS": "OFF", "MEZZO_BUILD_EXAMPLES": "OFF", "MEZZO_USE_MPI": "OFF",
             "CMAKE_INSTALL_DATADIR": "share"})
        toolchain.generate()

    def package(self):
        cmake = CMake(self)
        cmake.configure()
        cmake.install()

    def package_info(self):
        self.cpp_info.bindirs = []
        self.cpp_info.libdirs = []
        self.cpp_info.builddirs = [os.path.join("share", "cmake", "mezzo")]
        self.cpp_info.set_property("cmake_find_mode", "none")  # mezzo installs its own
