/// \file
/// From a model and a sample to a DoctorCase, and from a Diagnosis to a report.
#pragma once

#include <mezzo/diagnose/detail/doctor_run.h>
#include <mezzo/diagnose/doctor.h>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/jit/runtime/graph_executor.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <iomanip>
#include <memory>
#include <optional>
#include <ostream>
#include <sstream>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// The tensors of a torch::nn::Module, or of a torch::jit::Module.
template <class Model>
DoctorCase case_of(const Model& model) {
  return {.parameters = NamedOnce().floating(model.named_parameters()),
          .buffers = NamedOnce().all(model.named_buffers())};
}

template <class T>
inline constexpr bool kIsTuple = false;
template <class... T>
inline constexpr bool kIsTuple<std::tuple<T...>> = true;

template <class Module, class Sample>
std::vector<at::Tensor> outputs_of(Module& module, const Sample& sample) {
  const auto call = [&module](const auto&... arguments) { return module.forward(arguments...); };
  std::vector<at::Tensor> outputs;
  const auto keep = [&outputs](const at::Tensor& tensor) { outputs.push_back(tensor); };
  if constexpr (kIsTuple<Sample>) {
    auto result = std::apply(call, sample);
    for_each_tensor(result, keep);
  } else {
    auto result = call(sample);
    for_each_tensor(result, keep);
  }
  return outputs;
}

inline std::vector<at::Tensor> tensors_in(const c10::IValue& value) {
  std::vector<at::Tensor> tensors;
  value.visit([&tensors](const c10::IValue& inner) {
    if (inner.isTensor()) tensors.push_back(inner.toTensor());
    return false;
  });
  return tensors;
}

/// Breaks `text` before column 100; lines but the first begin at `indent`.
inline void write_wrapped(std::ostream& stream, const std::string& text, std::size_t column,
                          std::size_t indent) {
  constexpr std::size_t kWidth = 100;
  std::istringstream words(text);
  bool is_first = true;
  for (std::string word; words >> word; is_first = false) {
    if (!is_first && column + 1 + word.size() > kWidth) {
      stream << "\n" << std::string(indent, ' ');
      column = indent;
    } else if (!is_first) {
      stream << ' ';
      ++column;
    }
    stream << word;
    column += word.size();
  }
  stream << "\n";
}

inline void write_finding(std::ostream& stream, const DoctorFinding& finding) {
  constexpr std::size_t kIndent = 11;
  stream << "  " << std::left << std::setw(kIndent - 2) << to_string(finding.severity)
         << std::right;
  write_wrapped(stream, finding.where + ": " + finding.reason, kIndent, kIndent);
  if (finding.remedy.empty()) return;
  stream << std::string(kIndent, ' ') << "> " << finding.remedy << "\n";  // to copy: not broken
}

inline void write_speeds(std::ostream& stream, const std::vector<DtypeSpeed>& speeds) {
  if (speeds.empty()) return;
  stream << "\nmatrix products on this machine\n";
  for (const DtypeSpeed& speed : speeds) {
    const std::string ratio = digits(speed.gflops / speeds.front().gflops, 2);
    stream << table_line({-12, 10, 0, 8, 0},
                         {"  " + speed.name, digits(speed.gflops), " GFLOP/s", ratio,
                          c10::str(" x float32   ", speed.native ? "native" : "emulated")});
  }
}

inline void write_memory(std::ostream& stream, const Diagnosis& diagnosis) {
  const std::vector<int> widths = {-22, 18, 14};
  stream << "\nmemory with AdamW\n" << table_line(widths, {"  weights", "bytes/parameter", "all"});
  for (const PolicyMemory& row : diagnosis.memory) {
    stream << table_line(widths,
                         {"  " + row.name, digits(row.bytes_a_parameter), bytes_text(row.bytes)});
  }
}

}  // namespace detail

inline std::string_view to_string(FindingSeverity severity) {
  constexpr std::array<std::string_view, 3> names = {"note", "warning", "error"};
  return names.at(static_cast<std::size_t>(severity));
}

inline std::string_view to_string(FindingTopic topic) {
  constexpr std::array<std::string_view, 11> names = {
      "forward", "range",        "hardware", "weight_casts", "float32_ops", "dimensions",
      "threads", "accumulation", "output",   "updates",      "blas"};
  return names.at(static_cast<std::size_t>(topic));
}

inline int Diagnosis::exit_status() const {
  int status = 0;
  for (const DoctorFinding& finding : findings) {
    status = std::max(status, static_cast<int>(finding.severity));
  }
  return status;
}

inline std::ostream& operator<<(std::ostream& stream, const Diagnosis& diagnosis) {
  std::array<int, 3> counts{};
  for (const DoctorFinding& finding : diagnosis.findings) {
    ++counts.at(static_cast<std::size_t>(finding.severity));
  }
  const auto counted = [](int count, const char* what) {
    return c10::str(count, ' ', what, count == 1 ? "" : "s");
  };
  stream << "mezzo's doctor: " << diagnosis.parameters << " parameters on " << diagnosis.device
         << ", looked at for " << detail::dtype_name(diagnosis.dtype) << ": "
         << counted(counts[2], "error") << ", " << counted(counts[1], "warning") << ", "
         << counted(counts[0], "note") << "\n";
  if (!diagnosis.findings.empty()) stream << "\n";
  for (const DoctorFinding& finding : diagnosis.findings) detail::write_finding(stream, finding);
  detail::write_speeds(stream, diagnosis.speeds);
  detail::write_memory(stream, diagnosis);
  return stream;
}

template <DoctorsModel Model, class Sample>
Diagnosis diagnose(Model&& model, const Sample& sample, c10::Device device,
                   const DoctorOptions& options) {
  const auto module = detail::module_pointer(model);
  TORCH_CHECK(module != nullptr,
              "diagnose: the model is an empty holder or a null pointer; construct it first");
  detail::DoctorCase one = detail::case_of(*module);
  detail::for_each_tensor(sample, [&one](const at::Tensor& tensor) { one.add_input(tensor); });
  one.forward = [&module, &sample] { return detail::outputs_of(*module, sample); };
  return detail::Doctor(std::move(one), device, options).examine();
}

inline Diagnosis diagnose(torch::jit::Module model, std::vector<c10::IValue> sample,
                          c10::Device device, const DoctorOptions& options) {
  // What the interpreter runs is then the graph's own ops, and not what a second run fuses.
  const torch::jit::GraphOptimizerEnabledGuard as_written(false);
  detail::DoctorCase one = detail::case_of(model);
  for (const c10::IValue& argument : sample) {
    for (const at::Tensor& tensor : detail::tensors_in(argument)) one.add_input(tensor);
  }
  if (!sample.empty()) {
    one.forward = [&model, &sample] { return detail::tensors_in(model.forward(sample)); };
  }
  return detail::Doctor(std::move(one), device, options).examine();
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
