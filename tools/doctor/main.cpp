/// \file
/// mezzo-doctor: what low precision will do to a TorchScript model. See docs/doctor.md.
#include <mezzo/base/detail/dtype_names.h>
#include <mezzo/base/version.h>
#include <mezzo/diagnose/doctor.h>

#include <torch/script.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <charconv>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace {

constexpr int kCannotExamine = 3;

const std::string kVersion =
    c10::str(MEZZO_VERSION_MAJOR, '.', MEZZO_VERSION_MINOR, '.', MEZZO_VERSION_PATCH);

struct Request {
  std::string model, sample, device = "cpu", dtype;
  std::vector<std::string> inputs;
  int threads = 0;
  std::int64_t micro_batches = 1;
  double learning_rate = 0;
  bool json = false, quick = false;
};

/// "8,128" as sizes. \throws std::invalid_argument
std::vector<std::int64_t> sizes_of(std::string_view text, const std::string& spec) {
  std::vector<std::int64_t> sizes;
  while (true) {
    std::int64_t size = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), size);
    const auto used = static_cast<std::size_t>(end - text.data());
    const bool ends = used == text.size();
    if (error != std::errc() || size < 1 || (!ends && text[used] != ',')) {
      throw std::invalid_argument("--input " + spec +
                                  ": give sizes like 8,128, or with a dtype int64:8,128");
    }
    sizes.push_back(size);
    if (ends) return sizes;
    text.remove_prefix(used + 1);
  }
}

/// A random tensor of "float32:8,16", "int64:8,128" (zeros and ones) or "8,16" (float32).
torch::Tensor input_of(const std::string& spec, torch::Device device) {
  const std::size_t colon = spec.find(':');
  const std::string name = colon == std::string::npos ? "float32" : spec.substr(0, colon);
  const auto sizes =
      sizes_of(std::string_view(spec).substr(colon == std::string::npos ? 0 : colon + 1), spec);
  if (name == "int64" || name == "int32" || name == "bool") {
    const auto dtype = name == "int64"   ? torch::kInt64
                       : name == "int32" ? torch::kInt32
                                         : torch::kBool;
    return torch::randint(2, sizes, torch::kInt64).to(device, dtype);
  }
  const auto dtype = mezzo::detail::dtype_named(name);
  if (!dtype) {
    throw std::invalid_argument("--input " + spec + ": the dtype is none of " +
                                mezzo::detail::kKnownDtypes + ", int64, int32 and bool");
  }
  return torch::randn(sizes).to(device, *dtype);
}

/// Returns what `load` reads. libtorch's errors tell of its zip reader, so they are replaced.
template <class Load>
auto read(const std::string& flag, const std::string& path, const std::string& writer, Load load) {
  try {
    return load();
  } catch (const c10::Error&) {
    throw std::invalid_argument(flag + " " + path + ": cannot be read; write it in Python with " +
                                writer);
  }
}

c10::IValue moved(const c10::IValue& value, torch::Device device) {
  return value.isTensor() ? c10::IValue(value.toTensor().to(device)) : value;
}

/// The arguments of `forward`: those that torch.save wrote (a tensor, or a tuple of them), or
/// random tensors; none where neither was asked for.
std::vector<c10::IValue> sample_of(const Request& request, torch::Device device) {
  std::vector<c10::IValue> sample;
  for (const std::string& spec : request.inputs) sample.emplace_back(input_of(spec, device));
  if (request.sample.empty()) return sample;
  std::ifstream file(request.sample, std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  const auto value = read("--sample", request.sample, "torch.save(batch, path)",
                          [&] { return torch::pickle_load(bytes); });
  if (!value.isTuple()) return {moved(value, device)};
  for (const c10::IValue& element : value.toTupleRef().elements()) {
    sample.push_back(moved(element, device));
  }
  return sample;
}

nlohmann::json json_of(const mezzo::Diagnosis& diagnosis) {
  nlohmann::json json{{"mezzo", kVersion},
                      {"exit_status", diagnosis.exit_status()},
                      {"device", c10::str(diagnosis.device)},
                      {"dtype", mezzo::detail::dtype_name(diagnosis.dtype)},
                      {"parameters", diagnosis.parameters},
                      {"findings", nlohmann::json::array()},
                      {"speeds", nlohmann::json::array()},
                      {"memory", nlohmann::json::array()}};
  for (const auto& finding : diagnosis.findings) {
    json["findings"].push_back({{"severity", to_string(finding.severity)},
                                {"topic", to_string(finding.topic)},
                                {"where", finding.where},
                                {"reason", finding.reason},
                                {"remedy", finding.remedy}});
  }
  for (const auto& speed : diagnosis.speeds) {
    json["speeds"].push_back(
        {{"dtype", speed.name}, {"native", speed.native}, {"gflops", speed.gflops}});
  }
  for (const auto& row : diagnosis.memory) {
    json["memory"].push_back(
        {{"policy", row.name}, {"bytes_a_parameter", row.bytes_a_parameter}, {"bytes", row.bytes}});
  }
  return json;
}

int examine(const Request& request) {
  const torch::Device device(request.device);
  if (device.is_cuda() && !torch::cuda::is_available()) {
    throw std::invalid_argument("--device cuda: libtorch finds no CUDA device");
  }
  if (request.threads > 0) at::set_num_threads(request.threads);
  torch::manual_seed(0);  // the same inputs each time
  const auto model = read("MODEL", request.model, "torch.jit.script(model).save(path)",
                          [&] { return torch::jit::load(request.model, device); });
  mezzo::DoctorOptions options{.measure = !request.quick, .micro_batches = request.micro_batches};
  if (request.learning_rate > 0) options.learning_rate = request.learning_rate;
  if (!request.dtype.empty()) {
    options.dtype = request.dtype == "fp16" ? torch::kHalf : torch::kBFloat16;
  }
  const auto diagnosis = mezzo::diagnose(model, sample_of(request, device), device, options);
  if (request.json) {
    std::cout << json_of(diagnosis).dump(2) << "\n";
  } else {
    std::cout << diagnosis;
    if (request.inputs.empty() && request.sample.empty()) {
      std::cout
          << "\nNothing was run: give a sample, as --input int64:8,128 or --sample batch.pt\n";
    }
  }
  std::cout.flush();
  if (!std::cout) throw std::runtime_error("standard output cannot be written");
  return diagnosis.exit_status();
}

/// Checks a value: where `is_good` is false the message is "--flag VALUE: ADVICE".
template <class IsGood>
CLI::Validator check(IsGood is_good, const std::string& advice) {
  return {[=](const std::string& text) { return is_good(text) ? "" : text + ": " + advice; }, ""};
}

CLI::Validator one_of(const std::string& one, const std::string& other) {
  const auto is_good = [=](const std::string& text) { return text == one || text == other; };
  return check(is_good, "choose " + one + " or " + other);
}

CLI::Validator between(int low, int high) {
  const auto is_good = [=](const std::string& text) {
    int value = 0;
    return CLI::detail::lexical_cast(text, value) && value >= low && value <= high;
  };
  return check(is_good, c10::str("give a whole number from ", low, " to ", high));
}

CLI::Validator positive() {
  const auto is_good = [](const std::string& text) {
    double value = 0;
    return CLI::detail::lexical_cast(text, value) && value > 0;
  };
  return check(is_good, "give a number above 0");
}

CLI::Validator a_file() {
  const auto is_good = [](const std::string& text) {
    return std::filesystem::is_regular_file(text);
  };
  return check(is_good, "there is no such file; check the path");
}

void add_flags(CLI::App& app, Request& request) {
  app.add_option("MODEL", request.model, "TorchScript file, as torch.jit.save wrote it")
      ->required()
      ->check(a_file());
  auto* const inputs = app.add_option("--input", request.inputs,
                                      "an argument of forward, random: 8,16 or int64:8,128; once "
                                      "for each argument");
  app.add_option("--sample", request.sample,
                 "or all arguments in a file of torch.save: a tensor, or a tuple")
      ->check(a_file())
      ->excludes(inputs);
  app.add_option("--device", request.device, "cpu or cuda")->check(one_of("cpu", "cuda"));
  app.add_option("--dtype", request.dtype, "bf16 or fp16 (default: bf16 on the CPU, fp16 on CUDA)")
      ->check(one_of("bf16", "fp16"));
  app.add_option("--threads", request.threads, "CPU threads (default: libtorch's choice)")
      ->check(between(1, 4096));
  app.add_option("--micro-batches", request.micro_batches,
                 "backward passes that add to the gradients before a step (default: 1)")
      ->check(between(1, 1000000));
  app.add_option("--lr", request.learning_rate,
                 "learning rate of weights of 16 bits: are Adam's updates lost to rounding?")
      ->check(positive());
  app.add_flag("--json", request.json, "write JSON in place of the report");
  app.add_flag("--quick", request.quick, "do not time the hardware");
  app.set_version_flag("--version", "mezzo-doctor " + kVersion);
  app.footer(
      "Exit status: 0 nothing but notes, 1 warnings, 2 errors, 3 the model or the sample\n"
      "cannot be examined.");
}

}  // namespace

int main(int argc, char** argv) {
  Request request;
  CLI::App app("Says what low precision will do to a TorchScript model, and what to change.",
               "mezzo-doctor");
  add_flags(app, request);
  try {
    app.parse(argc, argv);
    return examine(request);
  } catch (const CLI::Success& help) {
    return app.exit(help);
  } catch (const CLI::ParseError& error) {
    std::string text = error.what();  // of a value: "--flag: VALUE: ADVICE"
    if (error.get_name() == "ValidationError") text.erase(text.find(':'), 1);
    if (error.get_name() == "ArgumentMismatch")
      text.replace(text.find(':'), text.npos, ": give a value");
    std::cerr << "mezzo-doctor: " << text << " (mezzo-doctor --help lists the flags)" << std::endl;
  } catch (const c10::Error& error) {
    std::cerr << "mezzo-doctor: " << error.what_without_backtrace() << std::endl;
  } catch (const std::exception& error) {
    std::cerr << "mezzo-doctor: " << error.what() << std::endl;
  }
  return kCannotExamine;
}
