/// \file
/// mezzo-check: what low precision will do to a TorchScript model. See docs/precision-check.md.
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

struct Request {
  std::string model, sample, device = "cpu", dtype;
  std::vector<std::string> inputs;
  double learning_rate = 0;
  bool json = false;
};

/// A random tensor of "float32:8,16", "int64:8,128" (zeros and ones) or "8,16" (float32).
torch::Tensor input_of(const std::string& spec) {
  const std::size_t colon = spec.find(':');
  const std::string name = colon == std::string::npos ? "float32" : spec.substr(0, colon);
  std::vector<std::int64_t> sizes;
  for (const auto& size : CLI::detail::split(spec.substr(colon + 1), ',')) {
    std::int64_t number = 0;
    if (!CLI::detail::lexical_cast(size, number) || number < 1) {
      throw std::invalid_argument("--input " + spec +
                                  ": give sizes like 8,128, or with a dtype int64:8,128");
    }
    sizes.push_back(number);
  }
  if (name == "int64") return torch::randint(2, sizes, torch::kInt64);
  if (name == "int32") return torch::randint(2, sizes, torch::kInt32);
  if (name == "bool") return torch::randint(2, sizes, torch::kInt64).to(torch::kBool);
  const auto dtype = mezzo::detail::parse_dtype(name);
  if (!dtype) {
    throw std::invalid_argument("--input " + spec + ": the dtype is none of " +
                                mezzo::detail::kKnownDtypes + ", int64, int32 and bool");
  }
  return torch::randn(sizes).to(*dtype);
}

/// Returns what `load` reads. libtorch's errors tell of its zip reader, so they are replaced.
template <class Load>
auto read(const std::string& what, const std::string& writer, Load load) {
  try {
    return load();
  } catch (const c10::Error&) {
    throw std::invalid_argument(what + ": cannot be read; write it in Python with " + writer);
  }
}

/// The arguments of `forward`: random tensors, or those that torch.save wrote (a tensor, or a tuple
/// of them); none where neither was asked for.
std::vector<c10::IValue> sample_of(const Request& request, torch::Device device) {
  std::vector<c10::IValue> sample;
  for (const std::string& spec : request.inputs) sample.emplace_back(input_of(spec));
  if (!request.sample.empty()) {
    std::ifstream file(request.sample, std::ios::binary);
    const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
    const auto value = read("--sample " + request.sample, "torch.save(batch, path)",
                            [&] { return torch::pickle_load(bytes); });
    sample = value.isTuple() ? value.toTupleRef().elements().vec() : std::vector{value};
  }
  for (c10::IValue& value : sample) {
    if (value.isTensor()) value = value.toTensor().to(device);
  }
  return sample;
}

nlohmann::json json_of(const mezzo::PrecisionReport& report) {
  nlohmann::json json{{"max_severity", report.max_severity()},
                      {"device", report.device.str()},
                      {"dtype", mezzo::detail::dtype_name(report.dtype)},
                      {"parameters", report.parameters},
                      {"findings", nlohmann::json::array()}};
  for (const auto& finding : report.findings) {
    json["findings"].push_back({{"severity", to_string(finding.severity)},
                                {"check", finding.check},
                                {"where", finding.where},
                                {"reason", finding.reason},
                                {"remedy", finding.remedy}});
  }
  return json;
}

int examine(const Request& request) {
  const torch::Device device(request.device);
  torch::manual_seed(0);  // the same inputs each time
  auto model = read("MODEL " + request.model, "torch.jit.script(model).save(path)",
                    [&] { return torch::jit::load(request.model, device); });
  mezzo::PrecisionCheckOptions options;
  if (request.learning_rate > 0) options.learning_rate = request.learning_rate;
  if (!request.dtype.empty()) {
    options.dtype = request.dtype == "fp16" ? torch::kHalf : torch::kBFloat16;
  }
  const std::vector<c10::IValue> sample = sample_of(request, device);
  const auto report = mezzo::check_precision(model, sample, device, options);
  if (request.json) {
    std::cout << json_of(report).dump(2) << "\n";
  } else {
    std::cout << report;
    if (sample.empty()) {
      std::cout << "\nNothing was run: give --input int64:8,128 or --sample batch.pt\n";
    }
  }
  if (!std::cout.flush()) throw std::runtime_error("standard output cannot be written");
  return report.max_severity();
}

}  // namespace

int main(int argc, char** argv) {
  Request request;
  CLI::App app(
      "Says what low precision will do to a TorchScript model, and what to change.\n"
      "Exit status: 0 nothing but notes, 1 warnings, 2 errors, 3 it cannot be examined.",
      "mezzo-check");
  app.add_option("MODEL", request.model, "TorchScript file, as torch.jit.save wrote it")
      ->required()
      ->check(CLI::ExistingFile);
  auto* const inputs = app.add_option("--input", request.inputs,
                                      "a random argument, 8,16 or int64:8,128; once each");
  app.add_option("--sample", request.sample, "or all arguments in a file of torch.save")
      ->check(CLI::ExistingFile)
      ->excludes(inputs);
  app.add_option("--device", request.device)->check(CLI::IsMember({"cpu", "cuda"}));
  app.add_option("--dtype", request.dtype, "default: bf16 on the CPU, fp16 on CUDA")
      ->check(CLI::IsMember({"bf16", "fp16"}));
  app.add_option("--lr", request.learning_rate, "does rounding lose updates of 16-bit weights?")
      ->check(CLI::PositiveNumber);
  app.add_flag("--json", request.json, "write JSON in place of the report");
  try {
    app.parse(argc, argv);
    return examine(request);
  } catch (const CLI::Success& help) {
    return app.exit(help);
  } catch (const c10::Error& error) {
    std::cerr << "mezzo-check: " << error.what_without_backtrace() << std::endl;
  } catch (const std::exception& error) {
    std::cerr << "mezzo-check: " << error.what() << std::endl;
  }
  return 3;
}
