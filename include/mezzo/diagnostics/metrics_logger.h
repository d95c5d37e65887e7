/// \file
/// MetricsLogger: what a run did, step by step, without making the host wait for it; and what it
/// writes: files, and RunReport, a run as one HTML page.
#pragma once

#include <mezzo/base/detail/crc32c.h>
#include <mezzo/base/detail/float_bits.h>
#include <mezzo/base/detail/platform.h>
#include <mezzo/base/version.h>
#include <mezzo/diagnostics/tensor_summary.h>
#include <mezzo/kernels/graph_capture.h>
#include <mezzo/optim/step_result.h>

#include <ATen/core/Tensor.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Event.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/version.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <ctime>
#include <deque>
#include <exception>
#include <filesystem>
#include <fstream>
#include <functional>
#include <ios>
#include <limits>
#include <locale>
#include <map>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// What is known of one step, once it is. What nobody told or measured is unset.
struct StepMetrics {
  std::int64_t step = 0;                      ///< counted from the MetricsLogger's first
  double wall_time = 0;                       ///< when `record` was called, in seconds since 1970
  std::optional<double> loss = std::nullopt;  ///< as given to `record`
  double scale = 1;                           ///< the loss scale that the gradients carried
  bool skipped = false;  ///< whether an inf or NaN in a gradient skipped the step
  std::optional<double> grad_norm = std::nullopt;          ///< unscaled, before clipping
  std::optional<double> tokens_per_second = std::nullopt;  ///< since the record before
  double seconds = 0;                                  ///< since the record before; 0: not known
  std::optional<double> learning_rate = std::nullopt;  ///< as given to `record`
  /// With a loss on a CUDA device, the peak number of bytes that libtorch's allocator had in use
  /// there; with any other loss, the current resident memory of the process (Linux); unset without
  /// a loss.
  std::optional<double> memory_bytes = std::nullopt;

  /// Returns the columns of files, with their names; `skipped` is 0 or 1.
  std::array<std::pair<const char*, std::optional<double>>, 7> scalars() const {
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
struct StepMetricsOptions {
  std::int64_t tokens = 0;  ///< or samples, since the step before; 0: not counted
  std::optional<double> learning_rate = std::nullopt;  ///< that the step had
};

namespace detail {

/// A tensor of one element on its way to the host.
class AsyncScalar {
 public:
  explicit AsyncScalar(const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    TORCH_CHECK(tensor.numel() == 1, "MetricsLogger::record: loss has ", tensor.numel(),
                " elements; give its mean or sum");
    const c10::InferenceMode no_inference(false);
    const at::Device device = tensor.device();
    const auto dtype = tensor.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    host_ = empty_host_tensor({}, dtype, device);
    host_.copy_(tensor.detach().reshape({}).to(dtype), /*non_blocking=*/true);
    if (device.is_cpu()) return;
    arrives_.emplace(device.type());
    arrives_->record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  }

  bool ready() const {
    if (!arrives_) return true;
    const RelaxedCaptureModeGuard relaxed(arrives_->device());
    return arrives_->query();
  }

  /// None of an undefined tensor. May wait for the device.
  std::optional<double> value() const {
    if (!host_.defined()) return std::nullopt;
    if (arrives_) {
      const RelaxedCaptureModeGuard relaxed(arrives_->device());
      arrives_->synchronize();
    }
    return host_.item<double>();
  }

 private:
  at::Tensor host_;
  std::optional<c10::Event> arrives_;
};

inline double seconds_since_1970() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

/// Returns StepMetrics::memory_bytes of a loss.
inline std::optional<double> memory_in_use(const at::Tensor& loss) {
  if (!loss.defined()) return std::nullopt;
  if (loss.is_cuda()) {
    const auto stats =
        at::getDeviceAllocator(loss.device().type())->getDeviceStats(loss.device().index());
    constexpr auto kAll = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    return static_cast<double>(stats.allocated_bytes[kAll].peak);
  }
  return resident_memory_bytes();
}

/// A file that is written a record at a time, and shared by its copies. What was written is the
/// operating system's at once, so that a run that is killed leaves all of it. Numbers read back to
/// the bit, in any locale.
class FlushedFile {
 public:
  FlushedFile(std::string path, std::ios::openmode mode)
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

/// Returns `text` as HTML shows it, also inside of an attribute.
inline std::string escape_html(std::string text) {
  const std::pair<const char*, const char*> entities[] = {
      {"&", "&amp;"}, {"<", "&lt;"}, {">", "&gt;"}, {"\"", "&quot;"}};
  for (const auto& [from, to] : entities) c10::ReplaceAll(text, from, to);
  return text;
}

inline constexpr const char* kReportStyle = R"(
:root{color-scheme:light dark;--ink:#1c2330;--soft:#5b6575;--line:#dfe3ea;--page:#f6f7f9;
--card:#fff;--curve:#2458c5;--mark:#d2452f}
@media(prefers-color-scheme:dark){:root{--ink:#e4e8ef;--soft:#98a2b3;--line:#323a48;--page:#12161d;
--card:#1a202a;--curve:#79a6ff;--mark:#ff7d66}}
*{box-sizing:border-box}
body{margin:0 auto;padding:1rem;max-width:70rem;background:var(--page);color:var(--ink);
font:16px/1.45 system-ui,sans-serif;font-variant-numeric:tabular-nums}
h1{font-size:1.4rem;margin:.2rem 0 1rem;overflow-wrap:anywhere}h2{font-size:1.1rem;margin:0 0 .6rem}
dl{display:grid;grid-template-columns:repeat(auto-fit,minmax(8.5rem,1fr));gap:.6rem;margin:0 0 1rem}
dl div,figure,section{background:var(--card);border:1px solid var(--line);border-radius:.6rem}
dl div{padding:.6rem .8rem}dt,figcaption,.y{color:var(--soft)}dt{font-size:.85rem}
dd{margin:0;font-size:1.15rem}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,26rem),1fr));gap:1rem;
margin-bottom:1rem}
figure,section{margin:0 0 1rem;padding:.8rem 1rem}.charts figure{margin:0}
.charts figure:last-child:nth-child(odd){grid-column:1/-1}figcaption{margin-bottom:.7rem}
.chart{display:grid;grid-template-columns:4.6rem 1fr;font-size:.8rem}
.y{position:relative}.y span{position:absolute;right:.5rem;transform:translateY(50%)}
svg{width:100%;height:11rem;display:block;overflow:visible}
.ticks{grid-column:2;position:relative;height:1.2rem;margin-top:.35rem;color:var(--soft)}
.ticks span{position:absolute;transform:translateX(-50%);white-space:nowrap}
.bad dd,.trouble{color:var(--mark)}.trouble{font-weight:600;margin:0 0 1rem}
path{fill:none;vector-effect:non-scaling-stroke}
.grid{stroke:var(--line)}.mark{stroke:var(--mark);stroke-opacity:.7}
.curve{stroke:var(--curve);stroke-width:2;stroke-linejoin:round;stroke-linecap:round}
pre{margin:.6rem 0 0;overflow-x:auto}
)";

inline std::string section_html(const std::string& title, const std::string& text) {
  return "<section><h2>" + escape_html(title) + "</h2><pre>" + escape_html(text) +
         "</pre></section>\n";
}

/// What is drawn of a run, step by step, where a record has it.
struct Chart {
  std::string title;
  bool logarithmic;  ///< by powers of two; then a value that is not positive is a gap
  std::function<std::optional<double>(const StepMetrics&)> value;
  /// Why a step is marked; empty: it is not.
  std::function<std::string(const StepMetrics&)> mark = [](const auto&) { return ""; };
};

/// Returns a curve of at most 1000 points, means of neighbours, as a figure; nothing where no
/// record has its value. It is inline SVG, in which are only lines, since it stretches to the
/// page's width; text is HTML beside it. What is not finite is a gap.
inline std::string chart_html(const Chart& chart, const std::vector<StepMetrics>& records) {
  constexpr double kGap = std::numeric_limits<double>::quiet_NaN();
  const auto first = static_cast<double>(records.front().step);
  const double width = std::max(static_cast<double>(records.back().step) - first, 1.0);
  // Places in a square of 100 by 100, which has y downwards.
  const auto across = [&](double x) { return format_significant(100 * (x - first) / width, 6); };
  const std::size_t each = (records.size() + 999) / 1000;
  std::vector<std::pair<double, double>> points;
  std::string marks, labels, grid, curve, ticks;
  bool is_known = false;
  double sum = 0, count = 0;
  for (std::size_t i = 0; i < records.size(); ++i) {
    const auto step = static_cast<double>(records[i].step);
    const std::optional<double> value = chart.value(records[i]);
    is_known |= value.has_value();
    if (i % each == 0) {
      points.emplace_back(step, kGap);
      sum = count = 0;
    }
    if (value && !is_nonfinite(*value)) points.back().second = (sum += *value) / ++count;
    const std::string why = chart.mark(records[i]);
    if (why.empty()) continue;
    marks += "<path class=mark d='M" + across(step) + " 0V100'><title>" + why + "</title></path>";
  }
  if (!is_known) return {};
  double low = std::numeric_limits<double>::max(), high = std::numeric_limits<double>::lowest();
  for (auto& [x, y] : points) {
    if (chart.logarithmic) y = y > 0 ? std::log2(y) : kGap;
    if (is_nonfinite(y)) continue;
    low = std::min(low, y);
    high = std::max(high, y);
  }
  if (low > high) low = high = 0;
  if (low == high) high = low + 1;
  if (chart.logarithmic) {  // a quarter is a power of two
    low = std::floor(low);
    high = low + 4 * std::ceil((high - low) / 4);
  }
  const auto down = [&](double y) {
    return format_significant(100 - 100 * (y - low) / (high - low), 5);
  };
  for (const int quarter : {0, 1, 2, 3, 4}) {
    const double y = low + (high - low) * quarter / 4, x = std::round(first + width * quarter / 4);
    labels += "<span style='bottom:" + std::to_string(25 * quarter) + "%'>" +
              (chart.logarithmic ? "2^" + format_significant(y, 4) : format_significant(y)) +
              "</span>";
    grid += "<path class=grid d='M0 " + down(y) + "H100'/>";
    ticks += "<span style='left:" + across(x) + "%'>" + format_significant(x, 10) + "</span>";
  }
  bool is_drawing = false;
  for (const auto& [x, y] : points) {
    const bool is_gap = is_nonfinite(y);
    // A lone point is seen by "h0", since ends of lines are round.
    if (!is_gap) curve += (is_drawing ? "L" : "M") + across(x) + " " + down(y) + "h0";
    is_drawing = !is_gap;
  }
  return "<figure><figcaption>" + chart.title + "</figcaption><div class=chart><div class=y>" +
         labels +
         "</div><svg viewBox='0 0 100 100' preserveAspectRatio=none role=img aria-label='" +
         chart.title + "'>" + grid + marks + "<path class=curve d='" + curve +
         "'/></svg><div class=ticks>" + ticks + "</div></div></figure>\n";
}

}  // namespace detail

/// Collects the steps of one optimizer and hands them to writers in order. It keeps each step's
/// handle and asks it again at the next `record`, so records come some steps late where a device
/// decides. Nothing waits until `flush`, or until 1024 steps are kept: then `record` waits for the
/// earliest. A step costs some microseconds on the host, and on a device one copy of the loss.
///
///     mezzo::MetricsLogger logger;
///     logger.add_callback(mezzo::CsvWriter("run.csv"));
///     for (...) {
///       auto result = scaler.step(optimizer, {.max_norm = 1.0});
///       scaler.update();
///       logger.record(result, loss, {.tokens = 4096});
///     }
///
/// One thread at a time. Writers are called from `record`, `flush` and the destructor.
class MetricsLogger {
 public:
  /// Hears of each record, on the thread that calls `record` or `flush`.
  using Callback = std::function<void(const StepMetrics&)>;

  /// \param first_step  the number of the first recorded step: more than 1 in a resumed run
  explicit MetricsLogger(std::int64_t first_step = 1) : next_step_(first_step) {}
  /// Hands over what is left, as `flush` does. What a writer throws here becomes a warning.
  ~MetricsLogger() {
    try {
      flush();
    } catch (const std::exception& error) {
      TORCH_WARN("MetricsLogger: the last records were not written: ", error.what());
    } catch (...) {
      TORCH_WARN(
          "MetricsLogger: the last records were not written: a writer threw something that is no "
          "std::exception");
    }
  }
  MetricsLogger(const MetricsLogger&) = delete;
  MetricsLogger& operator=(const MetricsLogger&) = delete;

  /// Adds a writer, which gets all records that are not handed over yet.
  ///
  /// A writer may add another, which begins with the next record. While `is_pending()` of a writer
  /// is true, an exception of any writer is stored and thrown later, so that an TraceOnSkips ends
  /// its trace before a DivergenceMonitor stops the run.
  /// \param writer  a CsvWriter, a TensorBoardWriter, a DivergenceMonitor, an TraceOnSkips, a
  /// `std::ref`
  ///   to a RunReport, or any callable
  template <class W>
  void add_callback(W writer) {
    using Own = std::unwrap_reference_t<W>;
    if constexpr (requires(const Own& own) { own.is_pending(); }) {
      const auto shared = std::make_shared<W>(std::move(writer));
      callbacks_.push_back({[shared](const StepMetrics& record) { (*shared)(record); },
                            [shared] {
                              const Own& own = *shared;
                              return own.is_pending();
                            }});
    } else {
      callbacks_.push_back({std::move(writer), [] { return false; }});
    }
  }

  /// Notes a step. `loss` has one element, is not scaled, and is only read; undefined: no loss.
  /// \throws c10::Error for a loss of several elements; what a step's result throws, whose record
  ///   is then lost; and what the first writer throws that does, once all have had the record
  void record(const StepResult& result, const at::Tensor& loss,
              const StepMetricsOptions& step = {}) {
    constexpr std::size_t kMost = 1024;
    detail::AsyncScalar late_loss(loss);
    StepMetrics record{.step = next_step_++,
                       .wall_time = detail::seconds_since_1970(),
                       .learning_rate = step.learning_rate,
                       .memory_bytes = detail::memory_in_use(loss)};
    const auto before = std::exchange(last_call_, std::chrono::steady_clock::now());
    if (before) record.seconds = std::chrono::duration<double>(*last_call_ - *before).count();
    if (before && step.tokens > 0) {
      record.tokens_per_second = static_cast<double>(step.tokens) / record.seconds;
    }
    pending_.push_back({record, result, std::move(late_loss)});
    if (pending_.size() > kMost) deliver_first();
    while (!pending_.empty() && pending_.front().result.ready() && pending_.front().loss.ready()) {
      deliver_first();
    }
  }

  /// Begins to time the next step: what the host did since the last one (a score, a checkpoint)
  /// does not count into its tokens a second. Before the first step it lets that one count too.
  void restart_clock() { last_call_ = std::chrono::steady_clock::now(); }

  /// Waits for the device, and hands over all that was recorded.
  void flush() {
    while (!pending_.empty()) deliver_first();
    if (error_ != nullptr) std::rethrow_exception(std::exchange(error_, nullptr));
  }

 private:
  struct Pending {
    StepMetrics record;
    StepResult result;
    detail::AsyncScalar loss;
  };

  /// May wait for the device.
  void deliver_first() {
    Pending first = std::move(pending_.front());
    pending_.pop_front();  // also where its result, or a writer, throws: the next are not held up
    StepMetrics& record = first.record;
    record.loss = first.loss.value();
    record.scale = first.result.scale();
    record.skipped = !first.result.applied();
    record.grad_norm = first.result.grad_norm();
    for (std::size_t i = 0, count = callbacks_.size(); i < count; ++i) {
      try {
        callbacks_[i].write(record);
      } catch (...) {
        if (error_ == nullptr) error_ = std::current_exception();
      }
    }
    const bool is_pending = std::any_of(callbacks_.begin(), callbacks_.end(),
                                        [](const CallbackEntry& one) { return one.is_pending(); });
    if (error_ != nullptr && !is_pending) std::rethrow_exception(std::exchange(error_, nullptr));
  }

  std::int64_t next_step_;
  std::optional<std::chrono::steady_clock::time_point> last_call_;
  std::deque<Pending> pending_;
  struct CallbackEntry {
    Callback write;
    std::function<bool()> is_pending;
  };
  std::deque<CallbackEntry> callbacks_;  // adding a writer does not move the others
  std::exception_ptr error_;             // the first of a writer, until it is rethrown
};

/// How a CsvWriter is written.
struct CsvWriterOptions {
  /// Keeps what is in the file and writes behind it, as a resumed run needs. Steps that ran after
  /// the checkpoint then stand there twice.
  bool append = false;
};

/// A writer for MetricsLogger::add_callback: a line a step under a line of names; a field is empty
/// where there is no number. "nan", "inf" and "-inf" are written so. What was in the file goes,
/// unless the options say `append`.
class CsvWriter {
 public:
  /// Opens the file, and writes the line of names into an empty one.
  explicit CsvWriter(const std::string& path, CsvWriterOptions options = {})
      : file_(path, options.append ? std::ios::app : std::ios::trunc) {
    std::error_code none;  // of a file that has no size
    if (options.append && std::filesystem::file_size(path, none) > 0) return;
    std::string line = "step,wall_time";
    for (const auto& [name, value] : StepMetrics().scalars()) line += std::string(",") + name;
    file_.write(line + "\n");
  }

  /// Writes a line.
  void operator()(const StepMetrics& record) {
    std::string line = std::to_string(record.step) + "," + detail::format_number(record.wall_time);
    for (const auto& [name, value] : record.scalars()) {
      line += ",";
      if (value) line += detail::format_number(*value);
    }
    file_.write(line + "\n");
  }

 private:
  detail::FlushedFile file_;
};

/// A writer for MetricsLogger::add_callback: a TensorBoard event file in `folder`, which is made
/// where it is missing: `tensorboard --logdir folder` shows a curve for each number that there is.
/// In float, as TensorBoard's scalars are.
class TensorBoardWriter {
 public:
  /// Opens a new event file in `folder`.
  explicit TensorBoardWriter(const std::string& folder)
      : file_(new_path(folder), std::ios::trunc | std::ios::binary) {
    write(detail::seconds_since_1970(), detail::bytes_field(3, "brain.Event:2"));
  }

  /// Writes the scalars of a record.
  void operator()(const StepMetrics& record) {
    std::string values;
    for (const auto& [name, value] : record.scalars()) {
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

  detail::FlushedFile file_;
};

/// Keeps the records of a run, 150 bytes each, and makes a page of them: its scores and options,
/// the loss scale with skipped steps marked, loss, gradient norm, learning rate, speed
/// and memory, and what other tools print. The page needs no network and no script, follows the
/// reader's light or dark setting, and fits a phone.
///
/// docs/debugging.md ("What did the run do?") has a loop that writes one.
class RunReport {
 public:
  /// Begins an empty report.
  explicit RunReport(std::string title) : title_(std::move(title)) {}
  RunReport(const RunReport&) = delete;  // a MetricsLogger would write to its copy: give std::ref
  RunReport& operator=(const RunReport&) = delete;

  /// Adds one more step: a MetricsLogger's writer.
  void operator()(const StepMetrics& record) { records_.push_back(record); }

  /// Sets a result for which more is better and 0 is nothing: "F1", 0.513. A score that is 0,
  /// negative or not finite is red, and a line below the title says so. A later score or option of
  /// the same name replaces the earlier one.
  void set_score(const std::string& name, double value) { scores_[name] = value; }

  /// Sets a line of what there is to know of the run: "learning rate", "0.0004"; "ended", "by
  /// SIGTERM". Versions and date are on the page by themselves.
  void set_hparam(const std::string& name, const std::string& value) { options_[name] = value; }

  /// Adds a section with what `printable` prints: a text, an AnomalyTrace, an UnderflowReport, a
  /// PrecisionReport.
  template <class Printable>
  void add_section(const std::string& title, const Printable& printable) {
    std::ostringstream text;
    text.imbue(std::locale::classic());
    text << printable;
    sections_ += detail::section_html(title, text.str());
  }

  /// Returns the page as it stands.
  std::string html() const {
    const std::string title = detail::escape_html(title_);
    return "<!doctype html>\n<html lang=en><meta charset=utf-8>"
           "<meta name=viewport content='width=device-width,initial-scale=1'><title>" +
           title + "</title><style>" + detail::kReportStyle + "</style>\n<h1>" + title + "</h1>\n" +
           tiles_html() + (records_.empty() ? "" : charts_html()) + sections_ + options_html();
  }

  /// Writes the page into a file. \throws c10::Error if it cannot be written
  void save(const std::string& path) const {
    detail::FlushedFile(path, std::ios::trunc).write(html());
  }

 private:
  std::string tiles_html() const {
    using detail::format_significant;
    std::string tiles, troubles;
    const auto add = [&](const std::string& name, const std::string& value, bool is_bad = false) {
      tiles += std::string(is_bad ? "<div class=bad>" : "<div>") + "<dt>" +
               detail::escape_html(name) + "</dt><dd>" + detail::escape_html(value) + "</dd></div>";
    };
    for (const auto& [name, value] : scores_) {
      const bool is_nothing = !(value > 0) || detail::is_nonfinite(value);
      add(name, format_significant(value, 3), is_nothing);
      if (!is_nothing) continue;
      troubles += (troubles.empty() ? "" : ", ") + detail::escape_html(name) + " is " +
                  format_significant(value);
    }
    if (!troubles.empty()) {
      troubles =
          "<p class=trouble>" + troubles + ": this run has learnt nothing that counts.</p>\n";
    }
    if (!records_.empty()) {
      double seconds = 0, tokens = 0, memory = 0;
      std::int64_t skipped = 0;
      for (const StepMetrics& record : records_) {
        skipped += record.skipped ? 1 : 0;
        memory = std::max(memory, record.memory_bytes.value_or(0));
        if (!record.tokens_per_second) continue;
        seconds += record.seconds;
        tokens += *record.tokens_per_second * record.seconds;
      }
      const StepMetrics& last = records_.back();
      add("steps", std::to_string(last.step - records_.front().step + 1));
      add("skipped", std::to_string(skipped));
      if (last.loss)
        add("last loss", format_significant(*last.loss, 4), detail::is_nonfinite(*last.loss));
      add("loss scale", format_significant(last.scale, 8));
      if (seconds > 0)
        add("mean tokens/s", format_significant(std::round(tokens / seconds * 10) / 10, 8));
      if (memory > 0) add("most memory at a step, MiB", format_significant(memory / 1048576, 5));
    }
    return troubles + (tiles.empty() ? "" : "<dl>" + tiles + "</dl>\n");
  }

  std::string charts_html() const {
    using Record = StepMetrics;
    const auto is_bad = [](const Record& record) {
      const bool bad = record.loss && detail::is_nonfinite(*record.loss);
      return bad ? "loss is " + detail::format_number(*record.loss) : "";
    };
    const auto is_skipped = [](const Record& record) {
      return record.skipped ? "step " + std::to_string(record.step) + " skipped" : "";
    };
    std::string html;
    for (const detail::Chart& chart : std::vector<detail::Chart>{
             {"loss, by step; red: inf or NaN", false, &Record::loss, is_bad},
             {"loss scale, by step; red: skipped", true, &Record::scale, is_skipped},
             {"gradient norm before clipping, by step; red: skipped", true,
              [](const Record& one) { return one.skipped ? std::nullopt : one.grad_norm; },
              is_skipped},
             {"learning rate, by step", false, &Record::learning_rate},
             {"tokens/s, by step", false, &Record::tokens_per_second},
             {"memory, MiB, by step", false, [](const Record& one) {
                return one.memory_bytes ? std::optional(*one.memory_bytes / 1048576) : std::nullopt;
              }}}) {
      html += detail::chart_html(chart, records_);
    }
    return "<div class=charts>\n" + html + "</div>\n";
  }

  std::string options_html() const {
    const std::tm utc = detail::to_utc(std::time(nullptr));
    std::array<char, 32> date{};
    std::strftime(date.data(), date.size(), "%Y-%m-%d %H:%M UTC", &utc);
    std::string text;
    for (const auto& [name, value] : options_) text += name + ": " + value + "\n";
    text +=
        c10::str("mezzo: ", MEZZO_VERSION_MAJOR, ".", MEZZO_VERSION_MINOR, ".", MEZZO_VERSION_PATCH,
                 "\nlibtorch: ", TORCH_VERSION, "\nwritten: ", date.data());
    return detail::section_html("The run", text);
  }

  std::string title_;
  std::map<std::string, double> scores_;
  std::map<std::string, std::string> options_;
  std::vector<StepMetrics> records_;
  std::string sections_;
};

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
