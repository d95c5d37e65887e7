// Every kernel is tested: after all tests of this program, each instantiation that mezzo_cuda.cu
// can launch was launched, and it can launch each kernel that its sources define.

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <regex>
#include <set>
#include <sstream>
#include <string>

#include "cuda_emulation.h"

namespace {

std::set<std::string> kernels_in_sources() {
  std::set<std::string> names;
  const std::regex kernel("__global__ void(?:\\s+__launch_bounds__\\([\\w, ]+\\))?\\s+(\\w+)\\(");
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

bool is_mezzo_kernel(const std::string& kernel) {
  return kernel.find("mezzo::") != std::string::npos;
}

TEST(KernelCoverage, EveryKernelHasLaunch) {
  const std::set<std::string> names = kernels_in_sources();
  EXPECT_GE(names.size(), 8U) << "the pattern does not match";
  for (const std::string& name : names) {
    bool has_launch = false;
    for (const auto& [kernel, count] : cuda_emulation::launches()) {
      has_launch =
          has_launch || (is_mezzo_kernel(kernel) && kernel.find("::" + name) != std::string::npos);
    }
    EXPECT_TRUE(has_launch) << name << " is defined but has no launch";
  }
}

class AllKernelsRan : public testing::Environment {
  void TearDown() override {
    if (GTEST_FLAG_GET(filter) != "*") return;
    int kernels = 0;
    for (const auto& [kernel, count] : cuda_emulation::launches()) {
      if (!is_mezzo_kernel(kernel)) continue;
      ++kernels;
      EXPECT_GT(count, 0) << "not launched by any test: " << kernel;
    }
    EXPECT_GE(kernels, 44);
  }
};

[[maybe_unused]] testing::Environment* const all_kernels_ran =
    testing::AddGlobalTestEnvironment(new AllKernelsRan);

}  // namespace
