// No kernel goes untested: when all tests of this program have run, each kernel that mezzo_cuda.cu
// can launch, with each of its template arguments, was launched; and it can launch each that its
// sources define.

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <regex>
#include <set>
#include <sstream>
#include <string>

#include "host_device.h"

namespace {

std::set<std::string> kernels_of_sources() {
  std::set<std::string> names;
  const std::regex kernel("__global__ void(?: __launch_bounds__\\([\\w, ]+\\))?\\s+(\\w+)\\(");
  for (const auto& entry : std::filesystem::directory_iterator(MEZZO_CUDA_SOURCES)) {
    std::ostringstream text;
    text << std::ifstream(entry.path()).rdbuf();
    const std::string source = text.str();
    for (std::sregex_iterator match(source.begin(), source.end(), kernel), end; match != end;
         ++match) {
      names.insert((*match)[1]);
    }
  }
  return names;
}

bool is_mezzos(const std::string& kernel) { return kernel.find("mezzo::") != std::string::npos; }

TEST(EveryKernel, IsLaunchedSomewhere) {
  const std::set<std::string> names = kernels_of_sources();
  EXPECT_GE(names.size(), 8U) << "the pattern no longer finds them";
  for (const std::string& name : names) {
    bool is_known = false;
    for (const auto& [kernel, count] : cuda_emulation::launches()) {
      is_known = is_known || (is_mezzos(kernel) && kernel.find("::" + name) != std::string::npos);
    }
    EXPECT_TRUE(is_known) << name << " is in the sources, and nothing launches it";
  }
}

class EveryKernelRan : public testing::Environment {
  void TearDown() override {
    if (GTEST_FLAG_GET(filter) != "*") return;
    int kernels = 0;
    for (const auto& [kernel, count] : cuda_emulation::launches()) {
      if (!is_mezzos(kernel)) continue;
      ++kernels;
      EXPECT_GT(count, 0) << "no test launches " << kernel;
    }
    EXPECT_GE(kernels, 44);
  }
};

[[maybe_unused]] testing::Environment* const every_kernel_ran =
    testing::AddGlobalTestEnvironment(new EveryKernelRan);

}  // namespace
