/// \file
/// Telemetry: what a run did, step by step, without making the host wait for it; and the files that
/// it writes.
#pragma once

#include <mezzo/base/detail/capture.h>
#include <mezzo/base/detail/crc32c.h>
#include <mezzo/base/detail/system.h>
#include <mezzo/base/version.h>
#include <mezzo/diagnose/finding.h>
#include <mezzo/optim/step_result.h>

#include <ATen/core/Tensor.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Event.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <array>
#include <atomic>
#include <bit>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// A tensor of one element on its way to the host.
class LateNumber {
 public:
  explicit LateNumber(const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    TORCH_CHECK(tensor.numel() == 1, "Telemetry::record: loss has ", tensor.numel(),
                " elements; give its mean or sum");
    const c10::InferenceMode no_inference(false);
    const at::Device device = tensor.device();
    host_ = empty_on_host({}, at::kFloat, device);
    host_.copy_(tensor.detach().reshape({}).to(at::kFloat), /*non_blocking=*/true);
    if (device.is_cpu()) return;
    arrives_.emplace(device.type());
    arrives_->record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  }

  bool ready() const { return !arrives_ || arrives_->query(); }

  /// None of an undefined tensor. May wait for the device.
  std::optional<double> value() const {
    if (!host_.defined()) return std::nullopt;
    if (arrives_) arrives_->synchronize();
    return *host_.const_data_ptr<float>();
  }

 private:
  at::Tensor host_;
  std::optional<c10::Event> arrives_;
};

}  // namespace detail

/// What is known of one step, once it is. What nobody told or measured is unset.
struct TelemetryRecord {
  std::int64_t step = 0;                      ///< counted from the Telemetry's first
  double wall_time = 0;                       ///< when `record` was called, in seconds since 1970
  std::optional<double> loss = std::nullopt;  ///< as given to `record`
  double scale = 1;                           ///< the loss scale that the gradients carried
  bool skipped = false;  ///< whether an inf or NaN in a gradient skipped the step
  std::optional<double> grad_norm = std::nullopt;          ///< unscaled, before clipping
  std::optional<double> tokens_per_second = std::nullopt;  ///< since the record before
  double seconds = 0;                                  ///< since the record before; 0: not known
  std::optional<double> learning_rate = std::nullopt;  ///< as given to `record`
  /// Most bytes so far that libtorch's allocator had in use on the loss's device; of a loss on the
  /// CPU what the process has resident now (Linux).
  std::optional<double> memory_bytes = std::nullopt;

  /// Returns the columns of files, with their names; `skipped` is 0 or 1.
  std::array<std::pair<const char*, std::optional<double>>, 7> numbers() const {
    return {{{"loss", loss},
             {"scale", scale},
             {"skipped", skipped ? 1.0 : 0.0},
             {"grad_norm", grad_norm},
             {"tokens_per_second", tokens_per_second},
             {"memory_bytes", memory_bytes},
             {"learning_rate", learning_rate}}};
  }
};

/// What only the training program knows of a step.
struct TelemetryStep {
  std::int64_t tokens = 0;  ///< or samples, since the step before; 0: not counted
  std::optional<double> learning_rate = std::nullopt;  ///< that the step had
};

namespace detail {

inline double seconds_since_1970() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

/// Returns TelemetryRecord::memory_bytes of a loss.
inline std::optional<double> memory_in_use(const at::Tensor& loss) {
  if (!loss.defined()) return std::nullopt;
  if (loss.is_cuda()) {
    const auto stats =
        at::getDeviceAllocator(loss.device().type())->getDeviceStats(loss.device().index());
    constexpr auto kAll = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    return static_cast<double>(stats.allocated_bytes[kAll].peak);
  }
  return resident_bytes();
}

}  // namespace detail

/// Collects the steps of one optimizer and hands them to writers in order. It keeps each step's
/// handle and asks it again at the next `record`, so records come some steps late where a device
/// decides. Nothing waits until `flush`, or until 1024 steps are kept: then `record` waits for the
/// earliest. A step costs some microseconds on the host, and on a device one copy of the loss. Give
/// each of several models a Telemetry of its own.
///
///     mezzo::Telemetry telemetry;
///     telemetry.write_to(mezzo::CsvFile("run.csv"));
///     for (...) {
///       auto result = scaler.step(optimizer, {.max_norm = 1.0});
///       scaler.update();
///       telemetry.record(result, loss, {.tokens = 4096});
///     }
///
/// One thread at a time. Writers are called from `record`, `flush` and the destructor.
class Telemetry {
 public:
  /// Hears of each record, on the thread that calls `record` or `flush`.
  using Writer = std::function<void(const TelemetryRecord&)>;

  /// \param first_step  the number of the first recorded step: more than 1 in a resumed run
  explicit Telemetry(std::int64_t first_step = 1) : next_step_(first_step) {}
  /// Hands over what is left, as `flush` does. What a writer throws here becomes a warning.
  ~Telemetry() {
    try {
      flush();
    } catch (const std::exception& error) {
      TORCH_WARN("Telemetry: the last records were not written: ", error.what());
    }
  }
  Telemetry(const Telemetry&) = delete;
  Telemetry& operator=(const Telemetry&) = delete;

  /// `writer` gets all records that are not handed over yet. A CsvFile, a TensorBoardFile, a
  /// DivergenceWatch, a `std::ref` to a RunReport (run_report.h), or any callable.
  void write_to(Writer writer) { writers_.push_back(std::move(writer)); }

  /// Notes a step. `loss` has one element, is not scaled, and is only read; undefined: no loss.
  /// \throws c10::Error for a loss of several elements; what a step's result throws, whose record
  ///   is then lost; and what the first writer throws that does, once all have had the record
  void record(const StepResult& result, const at::Tensor& loss, const TelemetryStep& step = {}) {
    constexpr std::size_t kMost = 1024;
    detail::LateNumber late_loss(loss);
    TelemetryRecord record{.step = next_step_++,
                           .wall_time = detail::seconds_since_1970(),
                           .learning_rate = step.learning_rate,
                           .memory_bytes = detail::memory_in_use(loss)};
    const auto before = std::exchange(last_call_, std::chrono::steady_clock::now());
    if (before) record.seconds = std::chrono::duration<double>(*last_call_ - *before).count();
    if (before && step.tokens > 0) {
      record.tokens_per_second = static_cast<double>(step.tokens) / record.seconds;
    }
    pending_.push_back({record, result, std::move(late_loss)});
    if (pending_.size() > kMost) hand_over_first();
    while (!pending_.empty() && pending_.front().result.ready() && pending_.front().loss.ready()) {
      hand_over_first();
    }
  }

  /// Begins to time the next step: what the host did since the last one (a score, a checkpoint)
  /// does not count into its tokens a second. Before the first step it lets that one count too.
  void restart_clock() { last_call_ = std::chrono::steady_clock::now(); }

  /// Waits for the device, and hands over all that was recorded.
  void flush() {
    while (!pending_.empty()) hand_over_first();
  }

 private:
  struct Pending {
    TelemetryRecord record;
    StepResult result;
    detail::LateNumber loss;
  };

  /// May wait for the device.
  void hand_over_first() {
    Pending first = std::move(pending_.front());
    pending_.pop_front();  // also where its result, or a writer, throws: the next are not held up
    TelemetryRecord& record = first.record;
    record.loss = first.loss.value();
    record.scale = first.result.scale();
    record.skipped = !first.result.ran();
    record.grad_norm = first.result.grad_norm();
    std::exception_ptr error;
    for (const Writer& writer : writers_) {
      try {
        writer(record);
      } catch (...) {
        if (error == nullptr) error = std::current_exception();
      }
    }
    if (error != nullptr) std::rethrow_exception(error);
  }

  std::int64_t next_step_;
  std::optional<std::chrono::steady_clock::time_point> last_call_;
  std::deque<Pending> pending_;
  std::vector<Writer> writers_;
};

namespace detail {

/// A file that is written a record at a time, and shared by its copies. What was written is the
/// operating system's at once, so that a run that is killed leaves all of it. Numbers read back to
/// the bit, in any locale.
class RecordFile {
 public:
  RecordFile(std::string path, std::ios::openmode mode)
      : path_(std::move(path)), file_(std::make_shared<std::ofstream>(path_, mode)) {
    TORCH_CHECK(file_->is_open(), path_, ": cannot be written; does its folder exist?");
  }

  void write(const std::string& text) {
    file_->write(text.data(), static_cast<std::streamsize>(text.size()));
    file_->flush();
    TORCH_CHECK(file_->good(), path_, ": could not be written; is the disk full?");
  }

 private:
  std::string path_;
  std::shared_ptr<std::ofstream> file_;
};

// The few bytes of protocol buffers and TFRecord framing that a TensorBoard event file of scalars
// is made of (tensorflow/core/util/event.proto, framework/summary.proto, lib/io/record_writer.cc).

/// Little-endian, whatever the machine.
template <class Unsigned>
std::string fixed_bytes(Unsigned value) {
  std::string bytes;
  for (std::size_t i = 0; i < sizeof(value); ++i) {
    bytes += static_cast<char>(static_cast<unsigned char>(value >> (8 * i)));
  }
  return bytes;
}

inline std::string varint(std::uint64_t value) {
  std::string bytes;
  for (; value >= 0x80U; value >>= 7U) bytes += static_cast<char>(0x80U | (value & 0x7FU));
  return bytes + static_cast<char>(value);
}

/// A field of bytes. Keys of other fields below are number << 3 | type: 0 a varint, 1 eight bytes,
/// 5 four.
inline std::string bytes_field(std::uint64_t number, std::string_view bytes) {
  return varint(number << 3U | 2U) + varint(bytes.size()) + std::string(bytes);
}

}  // namespace detail

/// How a CsvFile is written.
struct CsvFileOptions {
  /// Keeps what is in the file and writes behind it, as a resumed run needs. Steps that ran after
  /// the checkpoint then stand there twice.
  bool append = false;
};

/// A writer for Telemetry::write_to: a line a step under a line of names; a field is empty where
/// there is no number. "nan", "inf" and
/// "-inf" are written so. What was in the file goes, unless the options say `append`.
class CsvFile {
 public:
  /// Opens the file, and writes the line of names into an empty one.
  explicit CsvFile(const std::string& path, CsvFileOptions options = {})
      : file_(path, options.append ? std::ios::app : std::ios::trunc) {
    std::error_code none;  // of a file that has no size
    if (options.append && std::filesystem::file_size(path, none) > 0) return;
    std::string line = "step,wall_time";
    for (const auto& [name, value] : TelemetryRecord().numbers()) line += std::string(",") + name;
    file_.write(line + "\n");
  }

  /// Writes a line.
  void operator()(const TelemetryRecord& record) {
    std::string line = std::to_string(record.step) + "," + detail::number_text(record.wall_time);
    for (const auto& [name, value] : record.numbers()) {
      line += ",";
      if (value) line += detail::number_text(*value);
    }
    file_.write(line + "\n");
  }

 private:
  detail::RecordFile file_;
};

/// A writer for Telemetry::write_to: a TensorBoard event file in `folder`, which is made where it
/// is missing: `tensorboard --logdir folder` shows a curve for each number that there is. In float,
/// as TensorBoard's scalars are.
class TensorBoardFile {
 public:
  /// Opens a new event file in `folder`.
  explicit TensorBoardFile(const std::string& folder)
      : file_(new_path(folder), std::ios::trunc | std::ios::binary) {
    write(detail::seconds_since_1970(), detail::bytes_field(3, "brain.Event:2"));
  }

  /// Writes the scalars of a record.
  void operator()(const TelemetryRecord& record) {
    std::string values;
    for (const auto& [name, value] : record.numbers()) {
      if (!value) continue;
      const auto number = std::bit_cast<std::uint32_t>(static_cast<float>(*value));
      values += detail::bytes_field(
          1, detail::bytes_field(1, name) + "\x15" + detail::fixed_bytes(number));
    }
    write(record.wall_time, "\x10" + detail::varint(static_cast<std::uint64_t>(record.step)) +
                                detail::bytes_field(5, values));
  }

 private:
  /// Writes an Event of a time and `fields` as a TFRecord: its length and itself, each with a sum.
  void write(double wall_time, const std::string& fields) {
    using detail::fixed_bytes;
    const std::string event =
        "\x09" + fixed_bytes(std::bit_cast<std::uint64_t>(wall_time)) + fields;
    std::string record;
    for (const std::string& part : {fixed_bytes(std::uint64_t{event.size()}), event}) {
      // Masked, so that sums of data that holds sums are not weak.
      const std::uint32_t sum = detail::crc32c(part.data(), part.size());
      record += part + fixed_bytes(std::rotr(sum, 15) + 0xA282EAD8U);
    }
    file_.write(record);
  }

  /// A name of its own for each file of the process: TensorBoard reads all in a folder as one run.
  static std::string new_path(const std::string& folder) {
    static std::atomic<int> files = 0;
    std::error_code error;
    std::filesystem::create_directories(folder, error);
    TORCH_CHECK(!error, folder, ": cannot be made: ", error.message());
    const auto seconds = static_cast<std::int64_t>(detail::seconds_since_1970());
    return folder + "/events.out.tfevents." + std::to_string(seconds) + ".mezzo." +
           std::to_string(detail::process_id()) + "." + std::to_string(files++);
  }

  detail::RecordFile file_;
};

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
