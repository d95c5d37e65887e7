#!/usr/bin/env python3
"""Checks that headers include only headers of lower layers, and that umbrella headers are complete.

    check_layers.py INCLUDE_DIRECTORY

Prints each violation, and exits with 1 if there is one. The components and their layers are described in CONTRIBUTING.md.
"""

import pathlib
import re
import sys

# Components by layer, from the bottom up. A component includes components of lower layers only.
LAYERS = [
    ["base"],
    ["kernels"],
    ["optim", "autocast"],
    ["scaling"],
    ["opt_levels", "diagnostics", "checkpoint", "distributed"],
]
EXCEPTIONS = {("distributed", "checkpoint")}  # distributed checkpoints are checkpoints
# Public headers that the umbrella header of their component leaves out: they need MPI, NCCL or mezzo::compiled.
NOT_IN_UMBRELLA = re.compile(r"distributed/(mpi|gloo)_|optim/compiled\.h")

# Headers that must not include kernels, directly or indirectly: kernels take seconds to compile.
WITHOUT_KERNELS = ["mezzo/optim/ema.h"]
DECLARATIONS = {"mezzo/kernels/graph_capture.h", "mezzo/kernels/kernel_dispatch.h"}  # kernels' headers that define none

LAYER = {component: layer for layer, components in enumerate(LAYERS) for component in components}
INCLUDE = re.compile(r'#\s*include\s*[<"](mezzo/[^>"]+)[>"]')


def get_component(path):
    """The component of `path`, which begins with mezzo/; None for an umbrella header."""
    parts = path.split("/")
    return parts[1] if len(parts) > 2 else None


def violation(path, included):
    """Why the header at `path` must not include `included`; None if it may."""
    component, other = get_component(path), get_component(included)
    if component is None or component == other:
        return None
    if other is None:
        return "a component must not include an umbrella header"
    if other not in LAYER:
        return f"{other} is not a component"
    if (component, other) in EXCEPTIONS or LAYER[other] < LAYER[component]:
        return None
    return f"{component} is in layer {LAYER[component]}, {other} in layer {LAYER[other]}: only lower layers may be included"


def include_path_to_kernels(include, path, seen):
    """The chain of includes from `path` to a header of the kernels; empty if there is none."""
    if path in seen or not (include / path).exists():
        return []
    seen.add(path)
    for included in INCLUDE.findall((include / path).read_text(encoding="utf-8")):
        is_kernel = get_component(included) == "kernels" and included not in DECLARATIONS
        chain = [included] if is_kernel else include_path_to_kernels(include, included, seen)
        if chain:
            return [path, *chain]
    return []


def main():
    include = pathlib.Path(sys.argv[1])
    headers = sorted(path for path in include.glob("mezzo/**/*") if path.suffix in {".h", ".cuh", ".cu", ".cpp"})
    violations = []
    for header in headers:
        path = header.relative_to(include).as_posix()
        component = get_component(path)
        if component is not None and component not in LAYER:
            violations.append(f"{header}: {component} is not a component; the components are {', '.join(LAYER)}")
            continue
        for number, line in enumerate(header.read_text(encoding="utf-8").splitlines(), 1):
            found = INCLUDE.search(line)
            if not found:
                continue
            reason = violation(path, found[1])
            if not (include / found[1]).exists():
                reason = "this header does not exist"
            if reason is not None:
                violations.append(f"{header}:{number}: {line.strip()}: {reason}")
    for component in LAYER:
        umbrella = include / f"mezzo/{component}.h"
        if not umbrella.exists():
            continue
        exported = set(INCLUDE.findall(umbrella.read_text(encoding="utf-8")))
        for header in sorted((include / "mezzo" / component).glob("*.h")):
            path = header.relative_to(include).as_posix()
            if path not in exported and not NOT_IN_UMBRELLA.search(path):
                violations.append(f"{umbrella} does not include {path}")
    for header in WITHOUT_KERNELS:
        chain = include_path_to_kernels(include, header, set())
        if chain:
            violations.append(f"{include / header} includes kernels: {' -> '.join(chain)}")
    if not headers:
        violations.append(f"{include} has no headers of mezzo")
    print("\n".join(violations))
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
