/// \file
/// mezzo-check: which problems low precision will cause for a TorchScript model. See
/// docs/precision-check.md.
#include <mezzo/base/detail/dtype_names.h>
#include <mezzo/diagnostics/precision_check.h>

#include <torch/script.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <cstdint>
#include <exception>
#include <fstream>
#include <iostream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

struct Arguments {
  std::string model, sample, device = "cpu", dtype;
  std::vector<std::string> inputs;
  double learning_rate = 0;
  bool json = false;
};

/// Returns a random tensor for "float32:8,16", "int64:8,128" (zeros and ones) or "8,16" (float32).
torch::Tensor make_input(const std::string& spec) {
  const std::size_t colon = spec.find(':');
  const std::string name = colon == std::string::npos ? "float32" : spec.substr(0, colon);
  std::vector<std::int64_t> sizes;
  for (const auto& size : CLI::detail::split(spec.substr(colon + 1), ',')) {
    std::int64_t value = 0;
    if (!CLI::detail::lexical_cast(size, value) || value < 1) {
      throw std::invalid_argument("--input " + spec +
                                  ": expected sizes such as 8,128, or with a dtype int64:8,128");
    }
    sizes.push_back(value);
  }
  if (name == "int64") return torch::randint(2, sizes, torch::kInt64);
  if (name == "int32") return torch::randint(2, sizes, torch::kInt32);
  if (name == "bool") return torch::randint(2, sizes, torch::kInt64).to(torch::kBool);
  const auto dtype = mezzo::detail::parse_dtype(name);
  if (!dtype) {
    throw std::invalid_argument("--input " + spec + ": unknown dtype; use one of " +
                                mezzo::detail::kKnownDtypes + ", int64, int32 and bool");
  }
  return torch::randn(sizes).to(*dtype);
}

/// Returns `load()`. Replaces libtorch's errors, which describe its zip reader.
template <class Load>
auto read(const std::string& what, const std::string& save_call, Load load) {
  try {
    return load();
  } catch (const c10::Error&) {
    throw std::invalid_argument(what + ": cannot be read; save it in Python with " + save_call);
  }
}

/// Returns the arguments of `forward`: random tensors, or those of a torch.save file (a tensor or a
/// tuple); none if neither was given.
std::vector<c10::IValue> make_sample(const Arguments& arguments, torch::Device device) {
  std::vector<c10::IValue> sample;
  for (const std::string& spec : arguments.inputs) sample.emplace_back(make_input(spec));
  if (!arguments.sample.empty()) {
    std::ifstream file(arguments.sample, std::ios::binary);
    const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
    const auto value = read("--sample " + arguments.sample, "torch.save(batch, path)",
                            [&] { return torch::pickle_load(bytes); });
    sample = value.isTuple() ? value.toTupleRef().elements().vec() : std::vector{value};
  }
  for (c10::IValue& value : sample) {
    if (value.isTensor()) value = value.toTensor().to(device);
  }
  return sample;
}

nlohmann::json to_json(const mezzo::PrecisionReport& report) {
  nlohmann::json json{{"max_severity", to_string(report.max_severity())},
                      {"device", report.device.str()},
                      {"dtype", mezzo::detail::dtype_name(report.dtype)},
                      {"num_parameters", report.num_parameters},
                      {"findings", nlohmann::json::array()}};
  for (const auto& finding : report.findings) {
    json["findings"].push_back({{"severity", to_string(finding.severity)},
                                {"check", finding.check},
                                {"location", finding.location},
                                {"description", finding.description},
                                {"remedy", finding.remedy}});
  }
  return json;
}

int check(const Arguments& arguments) {
  const torch::Device device(arguments.device);
  torch::manual_seed(0);  // the same inputs each time
  auto model = read("MODEL " + arguments.model, "torch.jit.script(model).save(path)",
                    [&] { return torch::jit::load(arguments.model, device); });
  mezzo::PrecisionCheckOptions options;
  if (arguments.learning_rate > 0) options.learning_rate = arguments.learning_rate;
  if (!arguments.dtype.empty()) {
    options.dtype = arguments.dtype == "fp16" ? torch::kHalf : torch::kBFloat16;
  }
  const std::vector<c10::IValue> sample = make_sample(arguments, device);
  const auto report = mezzo::check_precision(model, sample, device, options);
  if (arguments.json) {
    std::cout << to_json(report).dump(2) << "\n";
  } else {
    std::cout << report;
    if (sample.empty()) {
      std::cout << "\nNo forward pass was run: pass --input int64:8,128 or --sample batch.pt\n";
    }
  }
  if (!std::cout.flush()) throw std::runtime_error("failed to write to standard output");
  return static_cast<int>(report.max_severity());
}

}  // namespace

int main(int argc, char** argv) {
  Arguments arguments;
  CLI::App app(
      "Checks which problems low precision will cause for a TorchScript model.\n"
      "Exit status: 0 notes at most, 1 warnings, 2 errors, 3 the check could not run.",
      "mezzo-check");
  app.add_option("MODEL", arguments.model, "file of torch.jit.save")
      ->required()
      ->check(CLI::ExistingFile);
  auto* const inputs = app.add_option("--input", arguments.inputs,
                                      "random argument, 8,16 or int64:8,128; once per argument");
  app.add_option("--sample", arguments.sample, "torch.save file with all arguments")
      ->check(CLI::ExistingFile)
      ->excludes(inputs);
  app.add_option("--device", arguments.device)->check(CLI::IsMember({"cpu", "cuda"}));
  app.add_option("--dtype", arguments.dtype, "default: bf16 on the CPU, fp16 on CUDA")
      ->check(CLI::IsMember({"bf16", "fp16"}));
  app.add_option("--lr", arguments.learning_rate,
                 "learning rate, to check updates of 16-bit weights")
      ->check(CLI::PositiveNumber);
  app.add_flag("--json", arguments.json, "print JSON instead of text");
  try {
    app.parse(argc, argv);
    return check(arguments);
  } catch (const CLI::Success& help) {
    return app.exit(help);
  } catch (const c10::Error& error) {
    std::cerr << "mezzo-check: " << error.what_without_backtrace() << std::endl;
  } catch (const std::exception& error) {
    std::cerr << "mezzo-check: " << error.what() << std::endl;
  }
  return 3;
}
