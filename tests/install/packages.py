#!/usr/bin/env python3
"""Builds a package of mezzo from a checkout, installs it into its own prefix, and finds it from a CMake project.

    packages.py wheel|deb|conan|vcpkg SOURCE BUILD TORCH CMAKE

SOURCE is the checkout, BUILD a directory for this test, TORCH a libtorch, CMAKE a CMake program, 3.25 or newer.
Exits with 77 if the packaging tool is not installed, and prints its name.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

MISSING_TOOL = 77

PROJECT = """cmake_minimum_required(VERSION 3.25)
project(user LANGUAGES CXX)
find_package(mezzo CONFIG REQUIRED)
get_target_property(includes mezzo::mezzo INTERFACE_INCLUDE_DIRECTORIES)
message(STATUS "found mezzo ${mezzo_VERSION} in ${includes}")
"""

# The functions that vcpkg's documentation describes for ports. vcpkg itself is neither in Debian nor on PyPI.
VCPKG = """
set(CURRENT_PACKAGES_DIR "${PREFIX}")
function(vcpkg_cmake_configure)
  cmake_parse_arguments(PARSE_ARGV 0 arg "" "SOURCE_PATH" "OPTIONS")
  execute_process(COMMAND ${CMAKE_COMMAND} -S ${arg_SOURCE_PATH} -B ${PREFIX}-build ${arg_OPTIONS}
                  -DCMAKE_INSTALL_PREFIX=${PREFIX} COMMAND_ERROR_IS_FATAL ANY)
endfunction()
function(vcpkg_cmake_install)
  execute_process(COMMAND ${CMAKE_COMMAND} --install ${PREFIX}-build COMMAND_ERROR_IS_FATAL ANY)
endfunction()
function(vcpkg_cmake_config_fixup)  # vcpkg moves the package to share/mezzo
  cmake_parse_arguments(PARSE_ARGV 0 arg "" "CONFIG_PATH" "")
  if(NOT EXISTS ${PREFIX}/${arg_CONFIG_PATH}/mezzo-config.cmake)
    message(FATAL_ERROR "no package in ${arg_CONFIG_PATH}")
  endif()
endfunction()
function(vcpkg_install_copyright)
  cmake_parse_arguments(PARSE_ARGV 0 arg "" "" "FILE_LIST")
  file(COPY ${arg_FILE_LIST} DESTINATION ${PREFIX}/share/mezzo)
endfunction()
include("${PORT}/portfile.cmake")
"""


def run(*command, **options):
    print("+", *command, flush=True)
    return subprocess.run([str(word) for word in command], check=True, **options)


def skip(tool):
    print(f"skipped: {tool} is not installed")
    sys.exit(MISSING_TOOL)


def wheel(source, build, cmake):
    if subprocess.run([sys.executable, "-c", "import scikit_build_core, pip"], stderr=subprocess.DEVNULL).returncode:
        skip("scikit-build-core for " + sys.executable)
    target = build / "site"
    run(sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--target", target, source,
        env=dict(os.environ, PATH=f"{Path(cmake).parent}{os.pathsep}{os.environ['PATH']}"))
    prefix = run(sys.executable, "-m", "mezzo_cpp", "--prefix", env=dict(os.environ, PYTHONPATH=str(target)),
                 capture_output=True, text=True).stdout.strip()
    for flag, file in (("--includedir", "mezzo/mezzo.h"), ("--cmakedir", "mezzo-config.cmake")):
        directory = run(sys.executable, "-m", "mezzo_cpp", flag, env=dict(os.environ, PYTHONPATH=str(target)),
                     capture_output=True, text=True).stdout.strip()
        assert (Path(directory) / file).is_file(), (flag, directory)
    return Path(prefix)


def deb(source, build, cmake):
    if not shutil.which("dpkg-deb"):
        skip("dpkg-deb")
    run(cmake, "-S", source, "-B", build / "tree", "-DMEZZO_BUILD_TESTS=OFF", "-DMEZZO_BUILD_EXAMPLES=OFF",
        "-DMEZZO_USE_MPI=OFF")
    run(Path(cmake).parent / "cpack", "-G", "DEB", "-B", build, cwd=build / "tree")
    (package,) = build.glob("libmezzo-dev_*_all.deb")
    run("dpkg-deb", "--extract", package, build / "root")
    return build / "root/usr"


def conan(source, build, cmake):
    if not shutil.which("conan"):
        skip("conan")
    env = dict(os.environ, CONAN_HOME=str(build / "home"))
    run("conan", "profile", "detect", env=env)
    run("conan", "create", source / "packaging/conan", "-s", "compiler.cppstd=20", env=env)
    (header,) = (build / "home").glob("p/b/*/p/include/mezzo/mezzo.h")
    return header.parents[2]


def vcpkg(source, build, cmake):
    (build / "port.cmake").write_text(VCPKG)
    run(cmake, f"-DPREFIX={build / 'prefix'}", f"-DPORT={source / 'packaging/vcpkg/ports/mezzo'}", "-P",
        build / "port.cmake")
    return build / "prefix"


def read_version(source):
    header = (source / "include/mezzo/base/version.h").read_text()
    return ".".join(re.findall(r"define MEZZO_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)", header))


def main():
    kind, source, build, torch, cmake = sys.argv[1], *(Path(argument) for argument in sys.argv[2:])
    shutil.rmtree(build, ignore_errors=True)
    build.mkdir(parents=True)
    prefix = {"wheel": wheel, "deb": deb, "conan": conan, "vcpkg": vcpkg}[kind](source, build, cmake)
    project = build / "user"
    project.mkdir()
    (project / "CMakeLists.txt").write_text(PROJECT)
    output = run(cmake, "-S", project, "-B", project / "build", f"-DCMAKE_PREFIX_PATH={prefix};{torch}",
               capture_output=True, text=True).stdout
    expected = f"found mezzo {read_version(source)} in {prefix.resolve()}"
    assert expected in output.replace(str(prefix), str(prefix.resolve())), (expected, output)
    port = source / "packaging/vcpkg/ports/mezzo/vcpkg.json"
    assert f'"version": "{read_version(source)}"' in port.read_text(), f"{port} does not have the version of version.h"
    print(expected)


if __name__ == "__main__":
    main()
