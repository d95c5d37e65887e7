"""What benchmarks/run_on_gpu.py makes of outputs that were recorded, and of what is missing: no GPU is needed."""

import os
import pathlib
import subprocess
import sys
import unittest
from unittest import mock

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import run_on_gpu  # noqa: E402

MEMCHECK = "========= COMPUTE-SANITIZER\n[==========] 40 tests ran.\n========= ERROR SUMMARY: 0 errors\n"
FOUND = """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 16 bytes
=========     at summary_kernel+0x2f0
========= ERROR SUMMARY: 3 errors
"""
RACES = "========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)\n"
NO_RACES = "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"


def report(*results):
    """What googletest writes of tests that went so."""
    tests = [{"classname": "Suite", "name": f"Test{i}", "result": "SKIPPED" if one == "skipped" else "COMPLETED",
              **({"failures": [{"failure": "no"}]} if one == "failed" else {})} for i, one in enumerate(results)]
    return {"testsuites": [{"testsuite": tests}]}


def results():
    """Of a run in which all went well on a machine without compute-sanitizer."""
    tests = run_on_gpu.test_outcome({"exit_code": 0, "seconds": 3.0}, report("passed", "passed"))
    job = {"exit_code": 0, "ok": True, "result": {"rows": [
        {"f1": 0.4321, "tokens_per_second": 12345.6, "peak_memory_bytes": 500000000}]}}
    return {"machine": {"gpu": "NVIDIA H100", "driver": "580.1", "compute_capability": "9.0"},
            "tests_with_mezzo_kernels": tests, "tests_with_aten_kernels": dict(tests),
            "sanitizers": {},
            "benchmarks": {"exit_code": 0, "ok": True, "rows": [
                {"what": "check BERT-base", "peer": "mezzo", "ms": 0.16, "gb_per_s": 2700.4, "launches": 2},
                {"what": "training", "peer": "mezzo", "ms": 9.5, "gb_per_s": 0.0, "launches": -1}]},
            "main_job": {"fp32": job},
            "skipped": {"memcheck": "compute-sanitizer is neither on PATH nor in CUDA's folder"}}


class Tests(unittest.TestCase):
    def test_all_passed(self):
        outcome = run_on_gpu.test_outcome({"exit_code": 0}, report("passed", "passed"))
        self.assertTrue(outcome["ok"])
        self.assertEqual(outcome["passed"], 2)

    def test_what_failed_or_was_skipped_has_its_name(self):
        outcome = run_on_gpu.test_outcome({"exit_code": 1}, report("passed", "failed", "skipped"))
        self.assertFalse(outcome["ok"])
        self.assertEqual((outcome["failed"], outcome["skipped"]), (["Suite.Test1"], ["Suite.Test2"]))

    def test_nothing_but_skipped_tests_have_shown_nothing(self):
        self.assertFalse(run_on_gpu.test_outcome({"exit_code": 0}, report("skipped"))["ok"])
        self.assertFalse(run_on_gpu.test_outcome({"exit_code": 0}, None)["ok"])


class Sanitizers(unittest.TestCase):
    def test_verdicts(self):
        for said, exit_code, errors, ok in [(MEMCHECK, 0, 0, True), (FOUND, 99, 3, False), (RACES, 99, 2, False),
                                            (NO_RACES, 0, 0, True), ("", 0, None, False), (MEMCHECK, 1, 0, False)]:
            outcome = run_on_gpu.sanitizer_outcome({"exit_code": exit_code}, said)
            self.assertEqual((outcome["errors"], outcome["ok"]), (errors, ok), said)

    def test_a_missing_program_is_named(self):
        skipped = {}
        with mock.patch.object(run_on_gpu, "sanitizer", return_value=None):
            self.assertEqual(run_on_gpu.run_sanitizers(skipped), {})
        self.assertEqual(set(skipped), set(run_on_gpu.SANITIZERS))

    def test_one_that_is_stopped_is_named_and_fails_nothing(self):
        skipped = {}
        stopped = ({"exit_code": None, "stopped_after": 50}, "", "")
        with mock.patch.object(run_on_gpu, "sanitizer", return_value="compute-sanitizer"), \
                mock.patch.object(run_on_gpu, "run", return_value=stopped):
            outcomes = run_on_gpu.run_sanitizers(skipped)
        self.assertTrue(all(outcome["ok"] for outcome in outcomes.values()))
        self.assertIn("memcheck to its end", skipped)


class Commands(unittest.TestCase):
    def setUp(self):
        silence = mock.patch("builtins.print")
        silence.start()
        self.addCleanup(silence.stop)

    def test_one_that_takes_too_long_is_stopped(self):
        outcome, said, _ = run_on_gpu.run([sys.executable, "-c",
                                           "import time; print('begun', flush=True); time.sleep(60)"], 2)
        self.assertEqual((outcome["exit_code"], outcome["stopped_after"], said), (None, 2, "begun\n"))

    def test_a_program_that_is_not_there_fails(self):
        outcome = run_on_gpu.run(["/nowhere/program"], 5)[0]
        self.assertIsNone(outcome["exit_code"])
        self.assertIn("/nowhere/program", outcome["error"])

    def test_the_last_lines_of_a_failure_are_kept(self):
        outcome = run_on_gpu.run([sys.executable, "-c", "import sys; print(*range(99), sep='\\n'); sys.exit(3)"], 20)[0]
        self.assertEqual((outcome["exit_code"], outcome["last_lines"][-1], len(outcome["last_lines"])), (3, "98", 20))

    def test_each_precision_has_its_environment(self):
        calls = {}
        def pretend(command, report_file, limit, environment):
            calls[command[command.index("--precision") + 1], tuple(environment)] = environment
            return {"exit_code": 0}, {"rows": []}
        with mock.patch.object(run_on_gpu, "run_for_file", side_effect=pretend):
            for name in run_on_gpu.PRECISIONS:
                self.assertTrue(run_on_gpu.run_main_job(name)["ok"])
        self.assertEqual(calls["fp32", ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",)],
                         {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"})
        self.assertIn(("fp32", ()), calls)

    def test_all_together_take_less_than_ten_minutes(self):
        parts = (2 * run_on_gpu.TESTS_MAY_TAKE + len(run_on_gpu.SANITIZERS) * run_on_gpu.SANITIZER_MAY_TAKE
                 + run_on_gpu.BENCHMARKS_MAY_TAKE + len(run_on_gpu.PRECISIONS) * run_on_gpu.A_PRECISION_MAY_TAKE)
        self.assertLessEqual(parts, 8 * 60)


class Page(unittest.TestCase):
    def test_says_what_was_found_and_what_was_not_run(self):
        page = run_on_gpu.page(results())
        for line in ("# NVIDIA H100", "driver 580.1, compute capability 9.0",
                     "| tests, mezzo's kernels | ok | 2 passed |",
                     "| check BERT-base | mezzo | 0.160 | 2700 | 2 |", "| training | mezzo | 9.500 | - | - |",
                     "| fp32 | ok | 0.4321 | 12346 | 500 |",
                     "- memcheck: compute-sanitizer is neither on PATH nor in CUDA's folder"):
            self.assertIn(line, page.splitlines())
        self.assertLess(len(page.splitlines()), 60)

    def test_says_what_failed(self):
        found = results()
        self.assertEqual(run_on_gpu.failures(found), [])
        found["main_job"]["fp16"] = {"exit_code": 1, "ok": False, "result": None}
        found["sanitizers"]["racecheck"] = run_on_gpu.sanitizer_outcome({"exit_code": 99}, RACES)
        self.assertEqual(run_on_gpu.failures(found), ["racecheck", "main job fp16"])
        page = run_on_gpu.page(found)
        self.assertIn("| fp16 | FAILED | - | - | - |", page.splitlines())
        self.assertIn("| racecheck | FAILED | 2 errors |", page.splitlines())


class Machine(unittest.TestCase):
    def test_gpus(self):
        said = "NVIDIA H100 80GB HBM3, 580.65.06, 9.0\nNVIDIA H100 80GB HBM3, 580.65.06, 9.0\n"
        self.assertEqual(len(run_on_gpu.gpus_of(said)), 2)
        self.assertEqual(run_on_gpu.gpus_of(said)[0]["compute_capability"], "9.0")
        self.assertEqual(run_on_gpu.gpus_of("NVIDIA-SMI has failed\n"), [])

    def test_no_gpu_is_said(self):
        done = subprocess.run([sys.executable, ROOT / "benchmarks" / "run_on_gpu.py"], capture_output=True, text=True,
                              env=dict(os.environ, PATH="/nowhere"), check=False)
        self.assertEqual(done.returncode, 1)
        self.assertIn("names no GPU here; nothing was run", done.stderr)


class Bootstrap(unittest.TestCase):
    def run_bootstrap(self, *words):
        return subprocess.run(["bash", ROOT / "bootstrap", *words], capture_output=True, text=True, check=False,
                              env={"PATH": "/usr/bin:/bin", "HOME": "/nowhere"})

    def test_names_its_commands(self):
        said = self.run_bootstrap()
        self.assertEqual(said.returncode, 0)
        for command in ("gpu", "sass"):
            self.assertIn(f"./bootstrap {command}", said.stdout)


if __name__ == "__main__":
    unittest.main()
