/// \file
/// What will low precision do to this model, on this machine? Looks at the hardware, the model's
/// values and one traced forward pass, and says what to change, before a run is spent on it:
///
///     const auto diagnosis = mezzo::diagnose(model, batch.ids, torch::kCPU);
///     std::cout << diagnosis;                            // a report for people
///     return diagnosis.exit_status();                    // and a number for scripts
///
/// The command `mezzo-doctor model.pt` does it for a TorchScript file. docs/doctor.md has examples.
#pragma once

#include <mezzo/autocast/autocast_setting.h>
#include <mezzo/base/detail/dtype_names.h>
#include <mezzo/base/model_list.h>
#include <mezzo/base/version.h>
#include <mezzo/diagnose/finding.h>

#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <ostream>
#include <sstream>
#include <string>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// All that was found. The topics of findings are "forward" (the pass throws, gives inf or NaN, or
/// differs from float32's), "range" (values, constants and eps that the dtype does not hold),
/// "hardware", "dimensions" (sizes that are no multiples of 8) and "updates" (16-bit weights that
/// an update of the learning rate's size leaves as they are).
struct Diagnosis {
  c10::Device device = c10::Device(c10::DeviceType::CPU);  ///< that was asked for
  at::ScalarType dtype = at::kBFloat16;                    ///< that the model was looked at for
  std::int64_t parameters = 0;                             ///< elements of all parameters
  std::vector<Finding> findings = {};                      ///< the worst first

  /// Returns 0 for nothing but notes, 1 for a warning, 2 for an error.
  int exit_status() const {
    int status = 0;
    for (const Finding& finding : findings) {
      status = std::max(status, static_cast<int>(finding.severity));
    }
    return status;
  }
};

/// Writes a report for a terminal of 100 columns.
inline std::ostream& operator<<(std::ostream& stream, const Diagnosis& diagnosis) {
  std::array<int, 3> counts{};
  for (const Finding& finding : diagnosis.findings) {
    ++counts.at(static_cast<std::size_t>(finding.severity));
  }
  std::ostringstream text;
  text << "mezzo's doctor: " << std::to_string(diagnosis.parameters) << " parameters on "
       << diagnosis.device << ", looked at for " << detail::dtype_name(diagnosis.dtype) << ": "
       << counts[2] << " errors, " << counts[1] << " warnings, " << counts[0] << " notes\n\n";
  for (const Finding& finding : diagnosis.findings) text << finding;
  return stream << text.str();
}

/// What the doctor looks for.
struct DoctorOptions {
  /// Half or bfloat16; unset: default_autocast_dtype(device).
  std::optional<at::ScalarType> dtype = std::nullopt;
  PolicyRef policy = {};  ///< as the training's regions have it
  /// Of training with weights of 16 bits and WeightStorage::plain. Adam moves a weight by about the
  /// rate; unset: updates are not looked at.
  std::optional<double> learning_rate = std::nullopt;
};

/// Examines `model`: reads its parameters and buffers, and runs `forward` on `sample` in float32
/// and under autocast, with gradients enabled but no backward pass. Nothing of it needs a GPU, and
/// half can be examined on a CPU without instructions for it.
///
/// \param model   a module holder, a std::shared_ptr to a module, a module, or a torch::jit::Module
/// \param sample  what `forward` takes; a std::tuple where it takes several arguments; of a
///   torch::jit::Module the std::vector of IValues, and of an empty one nothing is run
/// \param device  where model and sample are
///
/// Parameters are only read; buffers and the default random generators are afterwards what they
/// were. The model runs in the mode, `train()` or `eval()`, that it is in. What `forward` throws
/// becomes a finding. Waits for the device.
/// \throws c10::Error for a model without parameters or on another device, for a device or dtype
///   that has no autocast, and inside of an autocast region
template <class Model, class Sample>
Diagnosis diagnose(Model&& model, const Sample& sample, c10::Device device,
                   const DoctorOptions& options = {});

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#include <mezzo/diagnose/detail/doctor_impl.h>  // IWYU pragma: export
