"""Tests of ./bootstrap gpu, ./bootstrap gpu-pack and benchmarks/run_on_gpu.py on a fake machine with a GPU."""

import fnmatch
import json
import pathlib
import re
import shutil
import signal
import struct
import subprocess
import tarfile
import tempfile
import time
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
NVIDIA_SMI = """case $1 in
  -L) for i in $(seq 1000); do echo "GPU $i: NVIDIA H100 80GB HBM3 (UUID: GPU-0)"; done ;;  # more than a pipe buffers
  *) echo "NVIDIA H100 80GB HBM3, ${DRIVER:-580.65.06}, 9.0" ;;
esac
"""
GOOGLETEST = """for word in "$@"; do
  case $word in --gtest_output=json:*) echo '{"testsuites": [{"testsuite": [
      {"classname": "Suite", "name": "Test", "result": "COMPLETED"'"${TEST_FAILS:+, \\"failures\\": []}"'}]}]}' >"${word#--gtest_output=json:}" ;; esac
done
[ -z "${TEST_FAILS:-}" ] || { echo "[  FAILED  ] Suite.Test"; exit 1; }
"""
COMPUTE_SANITIZER = """tool=$2
echo "========= COMPUTE-SANITIZER"
[ -z "${INVALID_WRITE:-}" ] || [ $tool != memcheck ] || {
  echo "========= Invalid __global__ write of size 4 bytes"
  echo "=========     at void mezzo::v0_3_0::detail::step_kernel<float>(mezzo::ParamListMetadata)+0x2f0"
  sleep 60
}
if [ $tool = racecheck ]; then
  echo "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"
else
  echo "========= ERROR SUMMARY: 0 errors"
fi
[ -z "${TEST_FAILS:-}" ] || exit 1  # with the status of the program
"""
BERT_NER = """while [ $# -gt 0 ]; do
  [ "$1" != --json ] || echo '{"rows": [{"f1": 0.5, "tokens_per_second": 1000, "peak_memory_bytes": 1e9}]}' >"$2"
  shift
done
"""
# Copies fake programs into the build directory.
CMAKE = """case $1 in
  --version) echo "cmake version 3.31.6"; exit ;;
esac
echo "cmake $* for ${TORCH_CUDA_ARCH_LIST:-any} with $(readlink .deps/libtorch) and $(command -v nvcc)" >>built
[ -z "${BUILD_FAILS:-}" ] || { echo "error: no rule" >&2; exit 1; }
case $* in *cuda-compile*) directory=build/cuda-compile ;; *) directory=build/cuda ;; esac
mkdir -p $directory/tests/cuda $directory/benchmarks/cuda $directory/examples/bert_ner
cp fakes/googletest $directory/tests/cuda/mezzo_cuda_tests
cp fakes/googletest $directory/tests/cuda/mezzo_cuda_aten_tests
cp fakes/cuda_bench $directory/benchmarks/cuda/cuda_bench
cp fakes/bert_ner $directory/examples/bert_ner/bert_ner
echo 'FLAGS = "--generate-code=arch=compute_80,code=[sm_80]" "--generate-code=arch=compute_90,code=[compute_90,sm_90]"' >$directory/build.ninja
"""
PIP = """while [ $# -gt 0 ]; do
  [ "$1" != -r ] || sed 's/ .*//' "$2" >>installed
  shift
done
mkdir -p .deps/venv/lib/python3.0/site-packages/torch/lib .deps/venv/lib/python3.0/site-packages/nvidia/cu13/bin
touch .deps/venv/lib/python3.0/site-packages/torch/lib/libtorch_cuda.so
cp fakes/nvcc .deps/venv/lib/python3.0/site-packages/nvidia/cu13/bin/nvcc
"""


class FakeMachine:
    """A checkout on a machine with a fake H100, CUDA toolkit and libtorch. Keyword arguments `machine` are environment variables."""

    def __init__(self, directory):
        self.root = pathlib.Path(directory)
        for part in ("bootstrap", "benchmarks/run_on_gpu.py", "benchmarks/check_gpu_environment.py", "benchmarks/pack_for_gpu.py",
                     "benchmarks/cuda/torch_amp_bench.py", "benchmarks/cuda/bert_ner_torch.py", "bootstrap-requirements.txt"):
            (self.root / part).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / part, self.root / part)
        for directory in (".deps/model", ".deps/venv/bin", "mine/share/cmake/Torch", "mine/lib", "fakes"):
            (self.root / directory).mkdir(parents=True)
        for file in (".deps/ner.txt", "mine/share/cmake/Torch/TorchConfig.cmake", "mine/lib/libtorch_cuda.so"):
            (self.root / file).touch()
        (self.root / "mine/share/cmake/Torch/TorchConfigVersion.cmake").write_text('set(PACKAGE_VERSION "2.15.0")\n')
        self.write_model([1.5, -2.0])
        rows = [{"what": "copy", "peer": "copy_", "gpu_ms": 0.05, "ms": 0.06, "host_us": 9, "gb_per_s": 4000.0},
                {"what": "step", "peer": "mezzo", "gpu_ms": 0.1, "ms": 0.2, "host_us": 50, "gb_per_s": 3000.0, "launches": 2},
                {"what": "step", "peer": "ATen", "gpu_ms": 0.25, "ms": 0.3, "host_us": 80, "gb_per_s": 1200.0}]
        bench = "\n".join(f"echo '{json.dumps(row)}'" for row in rows)
        for name, text in {"nvidia-smi": NVIDIA_SMI, "cmake": CMAKE, "googletest": GOOGLETEST, "bert_ner": BERT_NER,
                           "compute-sanitizer": COMPUTE_SANITIZER, "cuda_bench": bench, "ninja": "", "strip": 'cp "$3" "$2"',
                           "g++": "cat >/dev/null", "c++": "echo g++", "readelf": "echo 'NEEDED [libcudart.so.13]'",
                           "ldd": "echo ' libown.so.1 => '$PWD'/fakes/libown.so.1 (0x0)'; echo ' libc.so.6 => /lib/libc.so.6 (0x0)'",
                           "objdump": "echo '(GLIBC_2.9) a'; echo '(GLIBC_2.34) b'", "libown.so.1": "",
                           "nvcc": "echo 'Cuda compilation tools, release 13.0, V13.0.88'"}.items():
            self.write("fakes/" + name, text)
        for name in ("pip", "python"):
            self.write(".deps/venv/bin/" + name, PIP)

    def write(self, name, text):
        (self.root / name).write_text("#!/bin/bash\n" + text)
        (self.root / name).chmod(0o755)

    def write_model(self, weights):
        header = json.dumps({"w": {"dtype": "F32", "shape": [len(weights)], "data_offsets": [0, 4 * len(weights)]}}).encode()
        (self.root / ".deps/model/model.safetensors").write_bytes(
            struct.pack("<Q", len(header)) + header + struct.pack(f"<{len(weights)}f", *weights))

    def environment(self, **machine):
        environment = {"PATH": f"{self.root}/fakes:/usr/bin:/bin", "HOME": "/nowhere", "Torch_DIR": f"{self.root}/mine", **machine}
        return {key: value for key, value in environment.items() if value is not None}

    def bootstrap(self, *arguments, **machine):
        return subprocess.run(["bash", "bootstrap", *(arguments or ["gpu"])], cwd=self.root, capture_output=True, text=True,
                              check=False, env=self.environment(**machine))

    def text(self, name):
        return (self.root / name).read_text() if (self.root / name).exists() else ""

    def report(self):
        """The lines of gpu.md, without seconds."""
        return re.sub(r"\| \d+\.\d \|", "| s |", self.text("benchmarks/results/gpu.md")).splitlines()


class Bootstrap(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.machine = FakeMachine(directory.name)

    def assert_fails_with(self, message, **machine):
        """The command fails with this message, and installs and builds nothing."""
        done = self.machine.bootstrap(**machine)
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn(message, done.stderr)
        self.assertEqual((self.machine.text("built"), self.machine.text("installed")), ("", ""))

    def test_usage_lists_commands(self):
        done = subprocess.run(["bash", ROOT / "bootstrap"], capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 0)
        for command in ("gpu", "gpu-pack", "sass"):
            self.assertIn(f"./bootstrap {command}", done.stdout)

    def test_runs_all_parts(self):
        done = self.machine.bootstrap(TORCH_CUDA_ARCH_LIST="7.5 8.0 9.0 10.0+PTX")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn("cmake --workflow --preset cuda for 9.0 with " + str(self.machine.root / "mine"), self.machine.text("built"))
        for line in ("# NVIDIA H100 80GB HBM3", "| tests, mezzo's kernels | ok | s | 1 passed |",
                     "| compute-sanitizer memcheck | ok | s | 0 errors |", "| compute-sanitizer initcheck | ok | s | 0 errors |",
                     "| 1.00 | 0.75 | step | mezzo | 0.100 | 0.200 | 50 | 2 |",
                     "| 2.50 | 0.30 | step | ATen | 0.250 | 0.300 | 80 | - |",
                     "| 1.00 | BERT NER, bf16 | mezzo | 0.5000 | 1000 | 1000 |"):
            self.assertIn(line, self.machine.report())
        self.assertRegex(self.machine.text("benchmarks/results/gpu.md"), "- BERT NER, bf16, Python's torch.amp: .* has no torch")
        parts = re.findall("^== (.*?): at most", self.machine.text("benchmarks/results/gpu.log"), re.MULTILINE)
        self.assertLess(parts.index("BERT NER, bf16"), parts.index("compute-sanitizer memcheck"))

    def test_fails_for_old_driver(self):
        message = "the driver {} is older than 580, which libtorch for CUDA 13 needs: update the driver{}"
        cuda_12 = ", or use a libtorch for CUDA 12: python3 -m pip install torch==2.10.0"
        for torch_dir in ({}, {"Torch_DIR": None}):
            self.assert_fails_with(message.format("570.86.15", cuda_12), DRIVER="570.86.15", **torch_dir)
        self.assert_fails_with(message.format("470.57.02", "\n"), DRIVER="470.57.02")

    def test_fails_for_python_without_wheel(self):
        self.machine.write(".deps/venv/bin/python", "echo 10")
        self.assert_fails_with("PyPI's libtorch is for Python 3.11 to 3.15, and .deps/venv/bin/python is 3.10", Torch_DIR=None)

    def test_fails_for_libtorch_without_cuda(self):
        (self.machine.root / "mine/lib/libtorch_cuda.so").unlink()
        self.assert_fails_with("is a libtorch without CUDA")

    def test_fails_for_nvcc_of_other_cuda_version(self):
        self.machine.write("fakes/nvcc", "echo 'Cuda compilation tools, release 12.4, V12.4.131'")
        self.assert_fails_with("nvcc has CUDA 12, libtorch has CUDA 13")

    def test_fails_without_nvcc_for_own_libtorch(self):
        self.machine.write("fakes/nvcc", "exit 127")
        self.assert_fails_with("put the directory of nvcc on PATH")

    def test_installs_nvcc_that_matches_pypi_libtorch(self):
        matching = (self.machine.root / "fakes/nvcc").read_text()
        self.machine.write(".deps/venv/bin/python", PIP.replace("cp fakes/nvcc", "cp fakes/matching_nvcc"))
        self.machine.write("fakes/matching_nvcc", matching)
        self.machine.write("fakes/nvcc", "echo 'Cuda compilation tools, release 12.4, V12.4.131'")
        done = self.machine.bootstrap(Torch_DIR=None)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn("nvidia-cuda-nvcc==", self.machine.text("installed"))
        self.assertIn(".deps/cuda/bin/nvcc", self.machine.text("built"))

    def test_ignores_old_python_torch(self):
        (self.machine.root / "python/torch").mkdir(parents=True)
        (self.machine.root / "python/torch/__init__.py").write_text(
            "import types\n__version__ = '2.9.1+cu128'\nversion = types.SimpleNamespace(cuda='12.8')\n")
        done = self.machine.bootstrap(Torch_DIR=None, PYTHONPATH=str(self.machine.root / "python"))
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn("Python's torch 2.9.1+cu128 is not used: mezzo's kernels need 2.10 or newer", done.stderr)
        self.assertIn("torch==", self.machine.text("installed"))
        self.assertNotIn("nvidia-cuda-nvcc==", self.machine.text("installed"))

    def test_fails_if_build_fails(self):
        done = self.machine.bootstrap(BUILD_FAILS="1")
        self.assertEqual(done.returncode, 1)
        self.assertEqual(self.machine.text("benchmarks/results/gpu.md"), "")

    def test_reports_failed_parts(self):
        self.machine.write("fakes/bert_ner", "echo 'CUDA error: out of memory' >&2; exit 1")
        done = self.machine.bootstrap()
        self.assertEqual(done.returncode, 1)
        self.assertIn("failed: BERT NER, fp32, BERT NER, tf32, BERT NER, fp16, BERT NER, bf16", done.stdout)
        self.assertIn("CUDA error: out of memory", done.stdout)

    def test_reports_program_that_cannot_start(self):
        self.machine.write("fakes/cuda_bench", "exit 0")
        self.machine.bootstrap()
        (self.machine.root / "build/cuda/benchmarks/cuda/cuda_bench").unlink()
        done = subprocess.run(["python3", "benchmarks/run_on_gpu.py", "bench"], cwd=self.machine.root, capture_output=True,
                              text=True, check=False, env=self.machine.environment())
        self.assertEqual(done.returncode, 1)
        self.assertIn("| benchmarks | FAILED: cannot start: No such file or directory |", done.stdout)

    def test_reports_libtorch_without_gpu(self):
        googletest = (self.machine.root / "fakes/googletest").read_text()
        (self.machine.root / "fakes/googletest").write_text(googletest + "echo 'x_test.cpp:1: libtorch sees no CUDA device here'\n")
        done = self.machine.bootstrap("gpu", "tests")
        self.assertEqual(done.returncode, 1)
        self.assertIn("| tests, mezzo's kernels | FAILED | s | libtorch sees no CUDA device |", self.machine.report())

    def test_failed_test_does_not_fail_sanitizer(self):
        done = self.machine.bootstrap(TEST_FAILS="1")
        self.assertEqual(done.returncode, 1)
        self.assertIn("failed: tests, mezzo's kernels, tests, ATen's kernels\n", done.stdout)
        self.assertIn("| compute-sanitizer memcheck | ok | s | 0 errors; a test failed |", self.machine.report())

    def test_stopped_sanitizer_with_finding_fails(self):
        done = self.machine.bootstrap("gpu", "--limit", "2", "memcheck", INVALID_WRITE="1")
        self.assertEqual(done.returncode, 1)
        self.assertIn("failed: compute-sanitizer memcheck", done.stdout)
        self.assertIn("| compute-sanitizer memcheck | FAILED: stopped after 2 s | s | 1 errors; Invalid __global__ write of size "
                      "4 bytes", "\n".join(self.machine.report()))

    def test_stops_hanging_program_that_ignores_signals(self):
        self.machine.write("fakes/cuda_bench", "trap '' INT TERM; (trap '' INT TERM; sleep 60) & sleep 60")
        begin = time.monotonic()
        done = self.machine.bootstrap("gpu", "--limit", "1", "bench", "tests")
        self.assertLess(time.monotonic() - begin, 30)
        self.assertIn("| benchmarks | FAILED: stopped after 1 s | s | 0 rows |", self.machine.report())
        self.assertIn("| tests, mezzo's kernels | ok | s | 1 passed |", self.machine.report())
        self.assertEqual(done.returncode, 1)

    def test_reports_parts_without_time_left(self):
        done = self.machine.bootstrap("gpu", "--budget", "1")
        self.assertIn("- tests, mezzo's kernels: no time was left", done.stdout)

    def start_and_wait_for_row(self):
        row = '{"what": "step", "peer": "mezzo", "gpu_ms": 0.1, "gb_per_s": 1000.0}'
        self.machine.write("fakes/cuda_bench", f"echo '{row}'; sleep 60")
        self.machine.bootstrap("gpu", "tests")
        process = subprocess.Popen(["python3", "benchmarks/run_on_gpu.py", "bench"], cwd=self.machine.root,
                                   stdout=subprocess.DEVNULL, env=self.machine.environment())
        self.addCleanup(process.kill)
        for _ in range(300):
            if "step" in self.machine.text("benchmarks/results/gpu.md"):
                return process
            time.sleep(0.1)
        return self.fail("no row was written")

    def test_kill_preserves_rows(self):
        process = self.start_and_wait_for_row()
        process.kill()
        process.wait()
        self.assertIn("| 1.00 | - | step | mezzo | 0.100 | - | - | - |", self.machine.report())
        left = json.loads(self.machine.text("benchmarks/results/gpu.json"))["rows"]
        self.assertEqual([row["what"] for row in left], ["step"])

    def test_sigterm_writes_report(self):
        process = self.start_and_wait_for_row()
        process.send_signal(signal.SIGTERM)
        self.assertEqual(process.wait(20), 143)
        self.assertIn("| benchmarks | FAILED: stopped from outside |", "\n".join(self.machine.report()))

    def test_filters_match_tests(self):
        """Each pattern of GoogleTest's filters in run_on_gpu.py matches a test."""
        script = (ROOT / "benchmarks/run_on_gpu.py").read_text()
        patterns = {pattern for text in re.findall(r'"([^"]*\*[^"]*)"', script) for pattern in re.split(":", text.rpartition("=-")[2])
                    if re.fullmatch(r"[\w.*]+", pattern)}
        sources = [*(ROOT / "tests/cuda").glob("*.cpp"), *(ROOT / "tests/autocast").rglob("*_test.cpp")]
        tests = [".".join(names) for source in sources for names in re.findall(r"^TEST\w*\(\s*(\w+),\s*(\w+)\)", source.read_text(), re.M)]
        self.assertGreaterEqual(len(patterns), 4)
        self.assertEqual([pattern for pattern in patterns if not fnmatch.filter(tests, pattern)], [])

    # --- ./bootstrap gpu-pack ---

    def unpack(self, **machine):
        """Packs and unpacks an archive. Returns its directory."""
        done = self.machine.bootstrap("gpu-pack", "gpu.tar.gz", **machine)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        with tarfile.open(self.machine.root / "gpu.tar.gz") as archive:
            archive.extractall(self.machine.root / "node")
        return self.machine.root / "node"

    def run_archive(self, node, *arguments, **machine):
        return subprocess.run([node / "run", *arguments], cwd="/", capture_output=True, text=True, check=False,
                              env=self.machine.environment(**machine))

    def test_pack_has_libraries_and_float16_weights(self):
        node = self.unpack()
        packed = json.loads((node / "packed.json").read_text())
        self.assertEqual((packed["architectures"], packed["libtorch"], packed["needs"]), ("8.0;9.0+PTX", "2.15.0", "GLIBC_2.34"))
        self.assertEqual(sorted(path.name for path in (node / "lib").iterdir()), ["libown.so.1"])
        weights = (node / "model/model.safetensors").read_bytes()
        self.assertEqual(struct.unpack("<2e", weights[-4:]), (1.5, -2.0))

    def test_unpacked_archive_runs(self):
        node = self.unpack()
        (node / "bin/cuda_bench").write_text("#!/bin/bash\necho '{\"what\": \"'$LD_LIBRARY_PATH'\", \"peer\": \"mezzo\"}'\n")
        done = self.run_archive(node)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        page = (node / "results/gpu.md").read_text()
        self.assertIn("| tests, mezzo's kernels | ok |", page)
        self.assertIn("libtorch 2.15.0", page)
        self.assertIn(f'"what": "{node}/lib:{self.machine.root}/mine/lib', done.stdout)

    def test_archive_fails_without_libtorch(self):
        done = self.run_archive(self.unpack(), Torch_DIR=None)
        self.assertEqual(done.returncode, 1)
        self.assertIn("no libtorch was found: set Torch_DIR, or run with a python3 that has torch", done.stderr)

    def test_archive_fails_for_other_libtorch_version(self):
        node = self.unpack()
        (self.machine.root / "mine/share/cmake/Torch/TorchConfigVersion.cmake").write_text('set(PACKAGE_VERSION "2.10.1")\n')
        done = self.run_archive(node)
        self.assertEqual(done.returncode, 1)
        self.assertIn("the programs were built for libtorch 2.15.0, but", done.stderr)

    def test_archive_fails_for_old_driver(self):
        done = self.run_archive(self.unpack(), DRIVER="570.86.15")
        self.assertEqual(done.returncode, 1)
        self.assertIn("run: the driver 570.86.15 is older than 580", done.stderr)

    def test_archive_fails_for_other_gpu_architecture(self):
        node = self.unpack()
        self.machine.write("fakes/nvidia-smi", 'echo "Tesla V100, 580.65.06, 7.0"')
        done = self.run_archive(node)
        self.assertEqual(done.returncode, 1)
        self.assertIn("pack again with TORCH_CUDA_ARCH_LIST=7.0", done.stderr)


if __name__ == "__main__":
    unittest.main()
