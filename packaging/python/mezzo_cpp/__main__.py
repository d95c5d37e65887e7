"""mezzo-config: prints the paths of mezzo, for build scripts."""

import argparse

from . import __version__, get_cmake_dir, get_include, get_prefix


def main():
    parser = argparse.ArgumentParser(prog="mezzo-config", description=__doc__)
    flags = parser.add_mutually_exclusive_group(required=True)
    flags.add_argument("--version", action="version", version=__version__)
    for flag, get, description in (
        ("--prefix", get_prefix, "the directory for CMAKE_PREFIX_PATH"),
        ("--cmakedir", get_cmake_dir, "the directory for mezzo_DIR"),
        ("--includedir", get_include, "the directory for -I"),
        ("--includes", lambda: "-I" + get_include(), "the compiler's flag"),
    ):
        flags.add_argument(flag, dest="get", action="store_const", const=get, help=description)
    print(parser.parse_args().get())


if __name__ == "__main__":
    main()
