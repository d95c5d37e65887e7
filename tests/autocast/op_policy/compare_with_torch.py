#!/usr/bin/env python3
"""Compares mezzo's op lists with those that PyTorch tests its own autocast by.

    compare_with_torch.py PRINT_OP_LISTS

walks torch/testing/_internal/autocast_test_lists.py. Every op there must have the category that its
list says; and on the CPU every call there must give, under torch.autocast, the dtype that mezzo's
category predicts. Exits with 77 (skipped) where Python has no such torch.
"""

import subprocess
import sys

SKIPPED = 77
LOWER = {"lower_precision"}
FP32 = {"fp32", "fp32_set_opt_dtype", "fp32_append_dtype"}
PROMOTE = {"promote"}
INFER = {"fallthrough"}
CATEGORIES = {
    "torch_16": LOWER, "nn_16": LOWER, "torch_fp16": LOWER, "nn_fp16": LOWER, "methods_fp16": LOWER,
    "torch_fp32": FP32, "nn_fp32": FP32, "methods_fp32": FP32,
    "torch_need_autocast_promote": PROMOTE,
    "torch_expect_builtin_promote": INFER, "methods_expect_builtin_promote": INFER,
}
# Methods whose op has another name; every other dunder method is an operator that no list names.
OPERATORS = {"__matmul__": "matmul", "__pow__": "pow", "__rpow__": "pow"}


def mezzo_lists(program):
    """device -> op without overload -> the set of its overloads' categories."""
    lists = {"cpu": {}, "cuda": {}}
    printed = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    for line in printed.splitlines():
        device, op, category = line.split()
        name = op.removeprefix("aten::").split(".")[0]
        lists[device].setdefault(name, set()).add(category)
    return lists


def entries(lists):
    """(list name, op, arguments, keyword arguments) of everything in one of torch's classes."""
    for list_name in CATEGORIES:
        for entry in getattr(lists, list_name, []):
            keywords = next((part for part in entry[2:] if isinstance(part, dict)), {})
            yield list_name, entry[0], entry[1], keywords


def wrong_category(mezzo, device, list_name, op):
    found = mezzo[device].get(OPERATORS.get(op, op), {"fallthrough"})
    if found & CATEGORIES[list_name]:
        return None
    return f"{device} {op}: torch has it in {list_name}, mezzo as {', '.join(sorted(found))}"


def wrong_dtype(torch, mezzo, list_name, op, arguments, keywords):
    """For the CPU: runs the call as torch's tests do."""
    category = next(iter(mezzo["cpu"].get(op, {"fallthrough"}) & CATEGORIES[list_name]))
    namespace = torch._C._nn if list_name.startswith("nn_") else torch
    if not hasattr(namespace, op):
        return None
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        result = getattr(namespace, op)(*arguments, **keywords)
    result = result[0] if isinstance(result, (tuple, list)) else result
    expected = torch.bfloat16 if category == "lower_precision" else torch.float32
    if result.dtype == expected:
        return None
    return f"cpu {op}: mezzo predicts {expected}, torch gives {result.dtype}"


def main():
    try:
        import torch
        from torch.testing._internal import autocast_test_lists as theirs
    except ImportError as error:
        print(f"skipped: {error}")
        return SKIPPED
    mezzo = mezzo_lists(sys.argv[1])
    sources = {"cpu": theirs.AutocastCPUTestLists("cpu"), "cuda": theirs.AutocastTestLists("cpu")}
    compared, ran, problems = 0, 0, []
    for device, lists in sources.items():
        for list_name, op, arguments, keywords in entries(lists):
            compared += 1
            problem = wrong_category(mezzo, device, list_name, op)
            if problem is None and device == "cpu" and CATEGORIES[list_name] is not INFER:
                ran += 1
                problem = wrong_dtype(torch, mezzo, list_name, op, arguments, keywords)
            if problem is not None:
                problems.append(problem)
    print(f"torch {torch.__version__}: {compared} entries compared, {ran} of them run")
    print("\n".join(problems))
    return 1 if problems or compared == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
