#!/usr/bin/env python3
"""Makes one of mezzo's packages from a checkout, installs it aside, and has a project find it.

  packages.py wheel|deb|conan|vcpkg SOURCE BUILD TORCH CMAKE

SOURCE is the checkout, BUILD a folder for this test alone, TORCH a libtorch, CMAKE a program of 3.25 or newer.
Ends with 77 where the tool that makes the package is not there, and says which.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

MISSING_TOOL = 77

PROJECT = """cmake_minimum_required(VERSION 3.25)
project(stranger LANGUAGES CXX)
find_package(mezzo CONFIG REQUIRED)
get_target_property(includes mezzo::mezzo INTERFACE_INCLUDE_DIRECTORIES)
message(STATUS "found mezzo ${mezzo_VERSION} in ${includes}")
"""

# What vcpkg's own functions do for a port, as its documentation has them: vcpkg itself is not in Debian or on PyPI.
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
function(vcpkg_cmake_config_fixup)  # vcpkg moves the folder to share/mezzo
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


def absent(tool):
    print(f"not tried: there is no {tool}")
    sys.exit(MISSING_TOOL)


def wheel(source, build, cmake):
    if subprocess.run([sys.executable, "-c", "import scikit_build_core, pip"], stderr=subprocess.DEVNULL).returncode:
        absent("scikit-build-core for " + sys.executable)
    target = build / "site"
    run(sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--target", target, source,
        env=dict(os.environ, PATH=f"{Path(cmake).parent}{os.pathsep}{os.environ['PATH']}"))
    answer = run(sys.executable, "-m", "mezzo_cpp", "--prefix", env=dict(os.environ, PYTHONPATH=str(target)),
                 capture_output=True, text=True).stdout.strip()
    for flag, file in (("--includedir", "mezzo/mezzo.h"), ("--cmakedir", "mezzo-config.cmake")):
        folder = run(sys.executable, "-m", "mezzo_cpp", flag, env=dict(os.environ, PYTHONPATH=str(target)),
                     capture_output=True, text=True).stdout.strip()
        assert (Path(folder) / file).is_file(), (flag, folder)
    return Path(answer)


def deb(source, build, cmake):
    if not shutil.which("dpkg-deb"):
        absent("dpkg-deb")
    run(cmake, "-S", source, "-B", build / "tree", "-DMEZZO_BUILD_TESTS=OFF", "-DMEZZO_BUILD_EXAMPLES=OFF",
        "-DMEZZO_USE_MPI=OFF")
    run(Path(cmake).parent / "cpack", "-G", "DEB", "-B", build, cwd=build / "tree")
    (package,) = build.glob("libmezzo-dev_*_all.deb")
    run("dpkg-deb", "--extract", package, build / "root")
    return build / "root/usr"


def conan(source, build, cmake):
    if not shutil.which("conan"):
        absent("conan")
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


def version_of(source):
    header = (source / "include/mezzo/base/version.h").read_text()
    return ".".join(re.findall(r"define MEZZO_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)", header))


def main():
    kind, source, build, torch, cmake = sys.argv[1], *(Path(argument) for argument in sys.argv[2:])
    shutil.rmtree(build, ignore_errors=True)
    build.mkdir(parents=True)
    prefix = {"wheel": wheel, "deb": deb, "conan": conan, "vcpkg": vcpkg}[kind](source, build, cmake)
    stranger = build / "stranger"
    stranger.mkdir()
    (stranger / "CMakeLists.txt").write_text(PROJECT)
    said = run(cmake, "-S", stranger, "-B", stranger / "build", f"-DCMAKE_PREFIX_PATH={prefix};{torch}",
               capture_output=True, text=True).stdout
    expected = f"found mezzo {version_of(source)} in {prefix.resolve()}"
    assert expected in said.replace(str(prefix), str(prefix.resolve())), (expected, said)
    port = source / "packaging/vcpkg/ports/mezzo/vcpkg.json"
    assert f'"version": "{version_of(source)}"' in port.read_text(), f"{port} has another version than version.h"
    print(expected)


if __name__ == "__main__":
    main()
