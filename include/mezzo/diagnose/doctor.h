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
#include <mezzo/base/detail/for_each_tensor.h>
#include <mezzo/base/model_list.h>
#include <mezzo/base/version.h>

#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>
#include <torch/csrc/jit/api/module.h>

#include <cstdint>
#include <iosfwd>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// How bad a finding is.
enum class FindingSeverity : std::uint8_t {
  note,     ///< good to know
  warning,  ///< costs speed, memory or digits
  error,    ///< makes inf or NaN, or throws
};

/// "note", "warning", "error"
std::string_view to_string(FindingSeverity severity);

/// What a finding is about.
enum class FindingTopic : std::uint8_t {
  forward,       ///< the forward pass throws, or gives inf or NaN
  range,         ///< a weight, buffer, input, constant or eps that the dtype does not hold
  hardware,      ///< a dtype that this machine emulates, or is slow in
  weight_casts,  ///< weights that autocast casts again and again
  float32_ops,   ///< ops that run in float32 under autocast
  dimensions,    ///< sizes that are no multiple of 8
  threads,       ///< more of them than cores, or fewer
  accumulation,  ///< gradients of many micro-batches that are added up in 16 bits
  output,        ///< a result of 16 bits, which a loss outside of the region would be computed from
  updates,  ///< weights of 16 bits that an update of the learning rate's size leaves as they are
  blas,     ///< on CUDA: how cuBLAS adds up in 16 bits, and whether its products repeat to the bit
};

/// "forward", "range", ...: the enumerator's own name.
std::string_view to_string(FindingTopic topic);

/// One thing that was found, and what to do about it.
struct DoctorFinding {
  FindingSeverity severity = FindingSeverity::note;  ///< how bad it is
  FindingTopic topic = FindingTopic::forward;        ///< what it is about
  /// The module, parameter, buffer or op, by its name in the model; "after encoder.0" for an op
  /// without parameters behind that module.
  std::string where = {};
  std::string reason = {};  ///< what was seen, with numbers, and why it matters
  std::string remedy = {};  ///< a line of code; empty where nothing is to do, or known to help
};

/// How fast this machine multiplies matrices of a dtype.
struct DtypeSpeed {
  std::string name;     ///< "float32", "bfloat16", "float16"
  bool native = false;  ///< whether the hardware has instructions for it, as far as it tells
  double gflops = 0;    ///< 10^9 additions and multiplications a second
};

/// What one way to keep the weights costs, with AdamW.
struct PolicyMemory {
  std::string name;              ///< "O1: autocast bf16"
  double bytes_a_parameter = 0;  ///< weight, gradient, optimizer state, copies that autocast reads
  std::int64_t bytes = 0;        ///< of all parameters
};

/// All that was found.
struct Diagnosis {
  c10::Device device = c10::Device(c10::DeviceType::CPU);  ///< that was asked for
  at::ScalarType dtype = at::kBFloat16;                    ///< that the model was looked at for
  std::int64_t parameters = 0;                             ///< elements of all parameters
  std::vector<DtypeSpeed> speeds = {};       ///< float32 first; empty with `measure = false`
  std::vector<PolicyMemory> memory = {};     ///< a row for each way to keep the weights
  std::vector<DoctorFinding> findings = {};  ///< the worst first

  /// 0: nothing but notes. 1: a warning. 2: an error.
  int exit_status() const;
};

/// A report for a terminal of 100 columns.
inline std::ostream& operator<<(std::ostream& stream, const Diagnosis& diagnosis);

/// What the doctor looks for.
struct DoctorOptions {
  /// Half or bfloat16; unset: default_autocast_dtype(device).
  std::optional<at::ScalarType> dtype = std::nullopt;
  std::optional<bool> cache = std::nullopt;  ///< as the training's regions have it
  PolicyRef policy = {};                     ///< likewise
  bool measure = true;                       ///< whether to time the hardware, which takes a second
  /// How many backward passes add to the gradients before a step.
  std::int64_t micro_batches = 1;
  /// Of training with weights of 16 bits and WeightStorage::plain. Adam moves a weight by about the
  /// rate; unset: updates are not looked at.
  std::optional<double> learning_rate = std::nullopt;
};

/// A module holder, a std::shared_ptr to a torch::nn::Module, or a module that is a variable.
template <class Model>
concept DoctorsModel = detail::ModelHandle<std::remove_cvref_t<Model>> ||
    detail::ModuleVariable<std::remove_reference_t<Model>>;

/// Examines `model`: reads its parameters and buffers, and runs `forward` on `sample` in float32
/// and under autocast, with gradients enabled but no backward pass. Nothing of it needs a GPU, and
/// half can be examined on a CPU without instructions for it.
///
/// \param sample  what `forward` takes; a std::tuple where it takes several arguments
/// \param device  where model and sample are
///
/// Parameters are only read; buffers and the default random generators are afterwards what they
/// were. The model runs in the mode, `train()` or `eval()`, that it is in. What `forward` throws
/// becomes a finding. A policy that a remedy names has been run, and its result compared with
/// float32's: this installs overrides of the ops that are tried (install_op_overrides), so that no
/// other thread may run ops meanwhile. Waits for the device.
/// \throws c10::Error for a model without parameters or on another device, for a device or dtype
///   that has no autocast, and inside of an autocast region
template <DoctorsModel Model, class Sample>
Diagnosis diagnose(Model&& model, const Sample& sample, c10::Device device,
                   const DoctorOptions& options = {});

/// Examines a TorchScript model, as the other overload does.
/// \param sample  the arguments of `forward`; none: nothing is run
inline Diagnosis diagnose(torch::jit::Module model, std::vector<c10::IValue> sample,
                          c10::Device device, const DoctorOptions& options = {});

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#include <mezzo/diagnose/detail/doctor_impl.h>  // IWYU pragma: export
