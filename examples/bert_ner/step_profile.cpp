#include "step_profile.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <array>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "formatted.h"

namespace bert_ner {
namespace {

using Clock = std::chrono::steady_clock;
using Inputs = c10::ArrayRef<c10::IValue>;

constexpr const char* kProducts = "matrix products";
constexpr const char* kOutsideOfOps = "outside of ops";
constexpr const char* kOutsideOfPhases = "between";

double milliseconds_since(Clock::time_point begin) {
  return std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
}

bool is_tensor(Inputs inputs, std::size_t index) {
  return index < inputs.size() && inputs[index].isTensor() && inputs[index].toTensor().defined();
}

/// Where the two matrices of a product stand among its inputs; none for other ops.
std::optional<std::size_t> first_matrix(std::string_view name) {
  constexpr std::array<std::string_view, 3> kBare = {"aten::mm", "aten::bmm",
                                                     "aten::mkldnn_linear"};
  constexpr std::array<std::string_view, 2> kAdding = {"aten::addmm", "aten::baddbmm"};
  const auto is = [&](std::string_view one) { return name == one; };
  if (std::ranges::any_of(kBare, is)) return 0;
  if (std::ranges::any_of(kAdding, is)) return 1;
  return std::nullopt;
}

bool is_between_dtypes(Inputs inputs) {
  return is_tensor(inputs, 0) && is_tensor(inputs, 1) &&
         inputs[0].toTensor().scalar_type() != inputs[1].toTensor().scalar_type();
}

struct NamedKind {
  std::string_view part;  ///< of an op's name
  const char* kind;
};

/// The first that fits counts.
constexpr std::array<NamedKind, 11> kKinds = {{{"scaled_dot_product", "fused attention"},
                                               {"flash_attention", "fused attention"},
                                               {"log_softmax", "loss"},
                                               {"nll_loss", "loss"},
                                               {"softmax", "softmax and mask"},
                                               {"masked_fill", "softmax and mask"},
                                               {"layer_norm", "layer norm"},
                                               {"gelu", "activation"},
                                               {"embedding", "embeddings"},
                                               {"dropout", "dropout"},
                                               {"bernoulli", "dropout"}}};

/// An op that runs.
struct Frame final : at::ObserverContext {
  std::string kind;
  Clock::time_point began;
  double inner = 0;  ///< milliseconds of the ops that it calls
};

}  // namespace

/// Of one thread.
struct StepProfile::Recording {
  StepTimes times;
  std::vector<Frame*> open;  ///< ops that run, the innermost last
  std::vector<std::string> phases;

  std::unique_ptr<Frame> begin(const at::RecordFunction& op) {
    auto frame = std::make_unique<Frame>();
    if (op.scope() == at::RecordScope::USER_SCOPE) {
      frame->kind = kOutsideOfOps;
      phases.emplace_back(op.name());
    } else {
      frame->kind = kind_of_op(op.name(), op.inputs());
      if (frame->kind == kProducts) {
        const auto matrix = op.inputs()[*first_matrix(op.name())].toTensor();
        times.operations[matrix.scalar_type()] += matrix_operations(op.name(), op.inputs());
      }
    }
    open.push_back(frame.get());
    frame->began = Clock::now();
    return frame;
  }

  void end(const at::RecordFunction& op, const Frame& frame) {
    const double all = milliseconds_since(frame.began);
    // Ops that began before the profile did have no frame, and end outside of all.
    open.pop_back();
    if (!open.empty()) open.back()->inner += all;
    const auto& phase = phases.empty() ? kOutsideOfPhases : phases.back();
    times.milliseconds[frame.kind][phase] += all - frame.inner;
    if (op.scope() == at::RecordScope::USER_SCOPE) phases.pop_back();
  }

  inline static thread_local Recording* current = nullptr;
};

StepProfile::StepProfile() : recording_(std::make_shared<Recording>()) {
  TORCH_CHECK(Recording::current == nullptr, "a StepProfile of this thread is running; stop it");
  Recording::current = recording_.get();
  const auto begin = [](const at::RecordFunction& op) -> std::unique_ptr<at::ObserverContext> {
    return Recording::current == nullptr ? nullptr : Recording::current->begin(op);
  };
  const auto end = [](const at::RecordFunction& op, at::ObserverContext* context) {
    if (Recording::current == nullptr || context == nullptr) return;
    Recording::current->end(op, *static_cast<Frame*>(context));
  };
  callback_ = at::addThreadLocalCallback(
      at::RecordFunctionCallback(begin, end)
          .needsInputs(true)
          .scopes({at::RecordScope::FUNCTION, at::RecordScope::USER_SCOPE}));
}

StepTimes StepProfile::stop() {
  if (Recording::current == recording_.get()) {
    at::removeCallback(callback_);
    Recording::current = nullptr;
  }
  return recording_->times;
}

StepProfile::~StepProfile() { stop(); }

std::string kind_of_op(std::string_view name, Inputs inputs) {
  if (first_matrix(name)) return kProducts;
  if (name == "aten::copy_") return is_between_dtypes(inputs) ? "casts" : "copies";
  const auto known = std::ranges::find_if(
      kKinds, [&](const NamedKind& one) { return name.find(one.part) != std::string_view::npos; });
  return known == kKinds.end() ? "other ops" : known->kind;
}

double matrix_operations(std::string_view name, Inputs inputs) {
  const auto first = first_matrix(name);
  if (!first || !is_tensor(inputs, *first) || !is_tensor(inputs, *first + 1)) return 0;
  const auto left = inputs[*first].toTensor(), right = inputs[*first + 1].toTensor();
  const auto columns = name == "aten::mkldnn_linear" ? right.size(0) : right.size(-1);
  return 2.0 * static_cast<double>(left.numel()) * static_cast<double>(columns);
}

double peak_operations_per_second(at::ScalarType dtype) {
  constexpr int64_t kSize = 1024;
  constexpr int kRounds = 8;
  const at::NoGradGuard no_grad;
  const auto matrix = at::ones({kSize, kSize}, dtype);
  double best = std::numeric_limits<double>::infinity();
  for (int round = 0; round < kRounds; ++round) {
    const auto began = Clock::now();
    at::mm(matrix, matrix);
    best = std::min(best, milliseconds_since(began));
  }
  return 2.0 * kSize * kSize * kSize / (best / 1e3);
}

std::string format_step_times(const StepTimes& times, int64_t steps) {
  constexpr std::array<const char*, 3> kPhases = {"forward", "backward", "optimizer"};
  using Line = std::pair<std::string, std::vector<double>>;  // kind; phases, between, all
  std::vector<Line> lines;
  Line total{"all", std::vector<double>(kPhases.size() + 2)};
  for (const auto& [kind, phases] : times.milliseconds) {
    Line line{kind, total.second};
    std::ranges::fill(line.second, 0.0);
    for (const auto& [phase, milliseconds] : phases) {
      const auto column = std::ranges::find(kPhases, phase) - kPhases.begin();
      line.second[static_cast<std::size_t>(column)] += milliseconds / static_cast<double>(steps);
      line.second.back() += milliseconds / static_cast<double>(steps);
    }
    for (std::size_t i = 0; i < line.second.size(); ++i) total.second[i] += line.second[i];
    lines.push_back(std::move(line));
  }
  std::ranges::sort(lines, std::greater(), [](const Line& line) { return line.second.back(); });
  lines.push_back(total);
  std::string text =
      "| milliseconds a step | forward | backward | optimizer | between |    all | share |\n"
      "|---------------------|--------:|---------:|----------:|--------:|-------:|------:|\n";
  for (const auto& [kind, values] : lines) {
    text += formatted("| %-19s | %7.2f | %8.2f | %9.2f | %7.2f | %6.2f | %4.0f%% |\n", kind.c_str(),
                      values[0], values[1], values[2], values[3], values[4],
                      100 * values[4] / std::max(total.second[4], 1e-9));
  }
  for (const auto& [dtype, operations] : times.operations) {
    const double a_step = operations / static_cast<double>(steps);
    const double peak = peak_operations_per_second(dtype);
    text += formatted(
        "matrix products in %s: %.2f GFLOP a step, %.2f ms at this machine's %.0f "
        "GFLOP/s\n",
        c10::toString(dtype), a_step / 1e9, 1e3 * a_step / peak, peak / 1e9);
  }
  return text;
}

}  // namespace bert_ner
