"""./bootstrap gpu and benchmarks/run_on_gpu.py without a GPU: a walk over a pretended card."""

import json
import pathlib
import shutil
import subprocess
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
NVIDIA_SMI = """case $1 in
  -L) for i in $(seq 1000); do echo "GPU $i: NVIDIA H100 80GB HBM3 (UUID: GPU-0)"; done ;;  # more than a pipe holds
  *) echo "NVIDIA H100 80GB HBM3, ${DRIVER:-580.65.06}, 9.0" ;;
esac
"""
GOOGLETEST = """for word in "$@"; do
  case $word in --gtest_output=json:*) echo '{"testsuites": [{"testsuite": [
      {"classname": "Suite", "name": "Test", "result": "COMPLETED"}]}]}' >"${word#--gtest_output=json:}" ;; esac
done
"""
COMPUTE_SANITIZER = """tool=$2
echo "========= COMPUTE-SANITIZER"
[ -z "${INVALID_WRITE:-}" ] || [ $tool != memcheck ] || {
  echo "========= Invalid __global__ write of size 4 bytes"
  echo "=========     at void mezzo::v0_3_0::detail::step_kernel<float>(mezzo::StepTable)+0x2f0"
  sleep 60
}
if [ $tool = racecheck ]; then
  echo "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"
else
  echo "========= ERROR SUMMARY: 0 errors"
fi
"""
BERT_NER = """while [ $# -gt 0 ]; do
  [ "$1" != --json ] || echo '{"rows": [{"f1": 0.5, "tokens_per_second": 1000, "peak_memory_bytes": 1e9}]}' >"$2"
  shift
done
"""
# Configures and builds: that is, it puts the pretended programs where the real ones would be.
CMAKE = """case $1 in
  --version) echo "cmake version 3.31.6"; exit ;;
esac
echo "cmake $* for ${TORCH_CUDA_ARCH_LIST:-any} with $(readlink .deps/libtorch) and $(command -v nvcc)" >>built
[ -z "${BUILD_FAILS:-}" ] || { echo "error: no rule" >&2; exit 1; }
mkdir -p build/gpu/tests/cuda build/gpu/benchmarks/cuda build/gpu/examples/bert_ner
cp fakes/googletest build/gpu/tests/cuda/mezzo_cuda_tests
cp fakes/googletest build/gpu/tests/cuda/mezzo_cuda_aten_tests
cp fakes/cuda_bench build/gpu/benchmarks/cuda/cuda_bench
cp fakes/bert_ner build/gpu/examples/bert_ner/bert_ner
"""
PIP = """while [ $# -gt 0 ]; do
  [ "$1" != -r ] || sed 's/ .*//' "$2" >>installed
  shift
done
mkdir -p .deps/venv/lib/python3.0/site-packages/torch/lib .deps/venv/lib/python3.0/site-packages/nvidia/cu13/bin
touch .deps/venv/lib/python3.0/site-packages/torch/lib/libtorch_cuda.so
cp fakes/nvcc .deps/venv/lib/python3.0/site-packages/nvidia/cu13/bin/nvcc
"""


class Card:
    """A checkout on a machine that pretends to have an H100, a toolkit and a libtorch; `machine` changes it."""

    def __init__(self, folder):
        self.root = pathlib.Path(folder)
        for part in ("bootstrap", "benchmarks/run_on_gpu.py", "benchmarks/gpu_machine.py", "cmake/requirements.txt"):
            (self.root / part).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / part, self.root / part)
        for folder in (".deps/model", ".deps/venv/bin", "mine/share/cmake/Torch", "mine/lib", "fakes"):
            (self.root / folder).mkdir(parents=True)
        for file in (".deps/ner.txt", "mine/share/cmake/Torch/TorchConfig.cmake", "mine/lib/libtorch_cuda.so"):
            (self.root / file).touch()
        bench = json.dumps([{"what": "step", "peer": "mezzo", "ms": 0.1, "gb_per_s": 2000.0, "launches": 2}])
        for name, text in {"nvidia-smi": NVIDIA_SMI, "cmake": CMAKE, "googletest": GOOGLETEST, "bert_ner": BERT_NER,
                           "compute-sanitizer": COMPUTE_SANITIZER, "cuda_bench": f"echo '{bench}'", "ninja": "",
                           "g++": "cat >/dev/null", "readelf": "echo 'NEEDED [libcudart.so.13]'",
                           "nvcc": "echo 'Cuda compilation tools, release 13.0, V13.0.88'"}.items():
            self.write("fakes/" + name, text)
        for name in ("pip", "python"):
            self.write(".deps/venv/bin/" + name, PIP)

    def write(self, name, text):
        (self.root / name).write_text("#!/bin/bash\n" + text)
        (self.root / name).chmod(0o755)

    def bootstrap(self, **machine):
        environment = {"PATH": f"{self.root}/fakes:/usr/bin:/bin", "HOME": "/nowhere", "Torch_DIR": "mine", **machine}
        return subprocess.run(["bash", "bootstrap", "gpu"], cwd=self.root, capture_output=True, text=True, check=False,
                              env={key: value for key, value in environment.items() if value is not None})

    def text(self, name):
        return (self.root / name).read_text() if (self.root / name).exists() else ""


class Bootstrap(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.card = Card(folder.name)

    def assert_ends_with(self, words, **machine):
        """The command fails with these words, before anything is installed or built."""
        done = self.card.bootstrap(**machine)
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn(words, done.stderr)
        self.assertEqual((self.card.text("built"), self.card.text("installed")), ("", ""))

    def test_names_its_commands(self):
        said = subprocess.run(["bash", ROOT / "bootstrap"], capture_output=True, text=True, check=False)
        self.assertEqual(said.returncode, 0)
        for command in ("gpu", "sass"):
            self.assertIn(f"./bootstrap {command}", said.stdout)

    def test_goes_all_the_way(self):
        done = self.card.bootstrap(TORCH_CUDA_ARCH_LIST="7.5 8.0 9.0 10.0+PTX")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn("cmake --workflow --preset gpu for 9.0 with " + str(self.card.root / "mine"), self.card.text("built"))
        page = self.card.text("benchmarks/results/gpu.md").splitlines()
        for line in ("# NVIDIA H100 80GB HBM3", "| tests, mezzo's kernels | ok | 1 passed |", "| memcheck | ok | 0 errors |",
                     "| initcheck | ok | 0 errors |", "| step | mezzo | 0.100 | 2000 | 2 |",
                     "| bf16 | ok | 0.5000 | 1000 | 1000 |"):
            self.assertIn(line, page)

    def test_says_that_the_driver_is_too_old(self):
        self.assert_ends_with("the driver 570.86.15 is older than 580, which libtorch for CUDA 13 needs", DRIVER="570.86.15")

    def test_says_that_libtorch_has_no_cuda(self):
        (self.card.root / "mine/lib/libtorch_cuda.so").unlink()
        self.assert_ends_with("is a libtorch without CUDA")

    def test_says_that_nvcc_is_of_another_cuda_than_ones_own_libtorch(self):
        self.card.write("fakes/nvcc", "echo 'Cuda compilation tools, release 12.4, V12.4.131'")
        self.assert_ends_with("nvcc is of CUDA 12, and libtorch of CUDA 13")

    def test_asks_for_an_nvcc_for_ones_own_libtorch(self):
        self.card.write("fakes/nvcc", "exit 127")
        self.assert_ends_with("put the folder of nvcc on PATH")

    def test_takes_pypis_nvcc_where_the_machines_does_not_fit_pypis_libtorch(self):
        fitting = (self.card.root / "fakes/nvcc").read_text()
        self.card.write(".deps/venv/bin/python", PIP.replace("cp fakes/nvcc", "cp fakes/fitting"))
        self.card.write("fakes/fitting", fitting)
        self.card.write("fakes/nvcc", "echo 'Cuda compilation tools, release 12.4, V12.4.131'")
        done = self.card.bootstrap(Torch_DIR=None)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn("nvidia-cuda-nvcc==", self.card.text("installed"))
        self.assertIn(".deps/cuda/bin/nvcc", self.card.text("built"))

    def test_passes_over_a_torch_of_pythons_that_is_too_old(self):
        (self.card.root / "python/torch").mkdir(parents=True)
        (self.card.root / "python/torch/__init__.py").write_text(
            "import types\n__version__ = '2.9.1+cu128'\nversion = types.SimpleNamespace(cuda='12.8')\n")
        done = self.card.bootstrap(Torch_DIR=None, PYTHONPATH=str(self.card.root / "python"))
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn("Python's torch 2.9.1+cu128 is not used: mezzo's kernels need 2.10 or newer", done.stderr)
        self.assertIn("torch==", self.card.text("installed"))
        self.assertNotIn("nvidia-cuda-nvcc==", self.card.text("installed"))

    def test_ends_where_the_build_fails(self):
        done = self.card.bootstrap(BUILD_FAILS="1")
        self.assertEqual(done.returncode, 1)
        self.assertEqual(self.card.text("benchmarks/results/gpu.md"), "")

    def test_names_what_failed_on_the_card(self):
        self.card.write("fakes/bert_ner", "echo 'CUDA error: out of memory' >&2; exit 1")
        done = self.card.bootstrap()
        self.assertEqual(done.returncode, 1)
        self.assertIn("failed: main job fp32, main job tf32, main job fp16, main job bf16", done.stdout)
        self.assertIn("CUDA error: out of memory", done.stdout)

    def test_a_sanitizer_that_found_something_and_was_stopped_has_failed(self):
        runner = self.card.root / "benchmarks/run_on_gpu.py"
        runner.write_text(runner.read_text().replace("= 50, 45, 70, 30", "= 50, 2, 70, 30"))
        done = self.card.bootstrap(INVALID_WRITE="1")
        self.assertEqual(done.returncode, 1)
        self.assertIn("failed: memcheck", done.stdout)
        self.assertIn("| memcheck | FAILED | 1 errors<br>Invalid __global__ write of size 4 bytes", done.stdout)


if __name__ == "__main__":
    unittest.main()
