#include <mezzo/base/detail/hardware.h>

#include <torch/script.h>
#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sys/wait.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "../support/temp_dir.h"

namespace {

using testing::HasSubstr;

/// Runs mezzo-check in a shell.
class MezzoCheckCommand : public testing::Test {
 protected:
  struct Output {
    int status = -1;
    std::string out, err;
  };

  Output run(const std::string& arguments) const {
    const std::string command = std::string("OMP_NUM_THREADS=1 ") + MEZZO_CHECK_COMMAND + " " +
                                arguments + " > " + (temp_dir_.path() / "out").string() + " 2> " +
                                (temp_dir_.path() / "err").string();
    const int status = std::system(command.c_str());
    return {.status = WIFEXITED(status) ? WEXITSTATUS(status) : -1,
            .out = test_support::read_file(temp_dir_.path() / "out"),
            .err = test_support::read_file(temp_dir_.path() / "err")};
  }

  /// Saves a TorchScript model whose one layer fills a mask with `fill`.
  std::string model(const std::string& fill) const {
    torch::jit::Module layer("Layer"), model("Model");
    layer.register_parameter("weight", torch::ones({16, 16}), false);
    layer.define("def forward(self, x):\n  y = torch.matmul(x, self.weight.t())\n" +
                 ("  return y.masked_fill(y > 100, " + fill + ")\n"));
    model.register_module("layer", layer);
    model.define("def forward(self, x):\n  return self.layer.forward(x)\n");
    const std::string path = (temp_dir_.path() / "model.pt").string();
    model.save(path);
    return path;
  }

  /// Number of warnings without a finding of the model: 1 on a CPU without bfloat16 instructions.
  static int num_cpu_warnings() {
    const auto cpu = mezzo::detail::cpu_features();
    return cpu.known && !cpu.bf16 ? 1 : 0;
  }

  test_support::TempDir temp_dir_;
};

TEST_F(MezzoCheckCommand, ExitsWithMaxSeverity) {
  const Output bad = run(model("-1e9") + " --input 8,16 --dtype fp16");
  EXPECT_EQ(bad.status, 2) << bad.err;
  EXPECT_THAT(bad.out,
              HasSubstr("  error    after layer: masked_fill with -1e+09 computes in float16"));
  const Output good = run(model("0.0") + " --input 8,16 --dtype bf16");
  EXPECT_EQ(good.status, num_cpu_warnings()) << good.out << good.err;
  EXPECT_THAT(good.out, HasSubstr("256 parameters on cpu for bfloat16: 0 errors, " +
                                  std::to_string(num_cpu_warnings()) + " warning"));
}

TEST_F(MezzoCheckCommand, WritesJson) {
  const Output output = run(model("-1e9") + " --input float32:8,16 --dtype fp16 --json");
  EXPECT_EQ(output.status, 2);
  const auto json = nlohmann::json::parse(output.out);
  EXPECT_EQ(json.at("max_severity"), "error");
  EXPECT_EQ(json.at("dtype"), "float16");
  EXPECT_EQ(json.at("num_parameters"), 256);
  EXPECT_EQ(json.at("findings").at(0).at("severity"), "error");
  for (const auto& finding : json.at("findings")) {
    for (const char* key : {"severity", "check", "location", "description", "remedy"}) {
      EXPECT_TRUE(finding.at(key).is_string()) << key;
    }
  }
}

TEST_F(MezzoCheckCommand, AcceptsSampleOfTorchSave) {
  const auto path = (temp_dir_.path() / "batch.pt").string();
  const auto bytes = torch::pickle_save(c10::ivalue::Tuple::create({torch::ones({8, 16})}));
  test_support::write_file(path, {bytes.begin(), bytes.end()});
  const Output output = run(model("0.0") + " --sample " + path + "");
  EXPECT_EQ(output.status, num_cpu_warnings()) << output.out << output.err;
  EXPECT_EQ(output.out.find("No forward pass was run"), std::string::npos);
  EXPECT_THAT(
      run(model("0.0") + "").out,
      HasSubstr("\nNo forward pass was run: pass --input int64:8,128 or --sample batch.pt\n"));
}

TEST_F(MezzoCheckCommand, ReportsInvalidArguments) {
  const std::string path = model("0.0");
  EXPECT_EQ(run("nowhere.pt").status, 3);
  EXPECT_THAT(run("nowhere.pt").err, HasSubstr("nowhere.pt"));
  test_support::write_file(temp_dir_.path() / "text.pt", "no TorchScript");
  const Output text = run((temp_dir_.path() / "text.pt").string());
  EXPECT_EQ(text.status, 3);
  EXPECT_THAT(text.err, HasSubstr("text.pt: cannot be read; save it in Python with torch.jit"));
  const Output sizes = run(path + " --input 8x16");
  EXPECT_EQ(sizes.status, 3);
  EXPECT_THAT(sizes.err, HasSubstr("--input 8x16: expected sizes such as 8,128"));
  EXPECT_THAT(run(path + " --input float8:8,16").err, HasSubstr("int64, int32 and bool"));
  EXPECT_THAT(run(path + " --dtype bf17").err, HasSubstr("--dtype: bf17 not in {bf16,fp16}"));
  EXPECT_EQ(run(path + " --dtype bf17").status, 3);
  EXPECT_EQ(run("--help").status, 0);
}

}  // namespace
