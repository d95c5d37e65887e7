"""mezzo-config: prints where mezzo is, for build scripts."""

import argparse

from . import __version__, get_cmake_dir, get_include, get_prefix


def main():
    parser = argparse.ArgumentParser(prog="mezzo-config", description=__doc__)
    one = parser.add_mutually_exclusive_group(required=True)
    one.add_argument("--version", action="version", version=__version__)
    for flag, where, what in (
        ("--prefix", get_prefix, "the folder for CMAKE_PREFIX_PATH"),
        ("--cmakedir", get_cmake_dir, "the folder for mezzo_DIR"),
        ("--includedir", get_include, "the folder for -I"),
        ("--includes", lambda: "-I" + get_include(), "the compiler's flag"),
    ):
        one.add_argument(flag, dest="answer", action="store_const", const=where, help=what)
    print(parser.parse_args().answer())


if __name__ == "__main__":
    main()
