/// \file
/// Files that a Telemetry writes. Each is a writer for `Telemetry::write_to`; copies write to the
/// same file. Numbers are written so that they read back to the bit, in any locale. After each
/// record the file is flushed to the operating system, so that a run that is killed leaves all of
/// it. They throw c10::Error that names the path where a file cannot be opened or written.
#pragma once

#include <mezzo/base/detail/crc32c.h>
#include <mezzo/base/version.h>
#include <mezzo/diagnose/detail/number_text.h>
#include <mezzo/diagnose/telemetry.h>

#include <c10/util/Exception.h>

#include <unistd.h>

#include <bit>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// A file that is written a record at a time; what was written is the operating system's at once.
class RecordFile {
 public:
  RecordFile(std::string path, std::ios::openmode mode)
      : path_(std::move(path)), file_(std::make_shared<std::ofstream>(path_, mode)) {
    TORCH_CHECK(file_->is_open(), path_, ": cannot be written; does its folder exist?");
  }

  /// Whether nothing stands in it; of a file that is appended to.
  bool is_empty() {
    file_->seekp(0, std::ios::end);
    return file_->tellp() == std::streampos(0);
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

/// `text` as a field of a CSV file: in quotes where a comma, a quote or an end of line needs them.
inline std::string csv_text(const std::string& text) {
  if (text.find_first_of(",\"\r\n") == std::string::npos) return text;
  std::string quoted = "\"";
  for (const char c : text) quoted += c == '"' ? std::string("\"\"") : std::string(1, c);
  return quoted + "\"";
}

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

enum class WireType : std::uint8_t { varint = 0, fixed64 = 1, bytes = 2, fixed32 = 5 };

inline std::string field_key(std::uint32_t number, WireType type) {
  return varint((number << 3U) | static_cast<std::uint32_t>(type));
}

inline std::string bytes_field(std::uint32_t number, std::string_view bytes) {
  return field_key(number, WireType::bytes) + varint(bytes.size()) + std::string(bytes);
}

/// The sum that stands in a file, so that sums of data that holds sums are not weak.
inline std::string masked_crc(std::string_view bytes) {
  return fixed_bytes(std::rotr(crc32c(bytes.data(), bytes.size()), 15) + 0xA282EAD8U);
}

/// `message` as a TFRecord.
inline std::string framed(std::string_view message) {
  const std::string length = fixed_bytes(static_cast<std::uint64_t>(message.size()));
  return length + masked_crc(length) + std::string(message) + masked_crc(message);
}

inline std::string event_wall_time(double seconds) {
  return field_key(1, WireType::fixed64) + fixed_bytes(std::bit_cast<std::uint64_t>(seconds));
}

/// The record that every event file begins with.
inline std::string event_file_header(double wall_time) {
  return framed(event_wall_time(wall_time) + bytes_field(3, "brain.Event:2"));
}

/// The scalars of one step.
class EventSummary {
 public:
  void add(std::string_view tag, float value) {
    values_ += bytes_field(1, bytes_field(1, tag) + field_key(2, WireType::fixed32) +
                                  fixed_bytes(std::bit_cast<std::uint32_t>(value)));
  }

  std::string record(double wall_time, std::int64_t step) const {
    return framed(event_wall_time(wall_time) + field_key(2, WireType::varint) +
                  varint(static_cast<std::uint64_t>(step)) + bytes_field(5, values_));
  }

 private:
  std::string values_;
};

}  // namespace detail

/// How a CsvFile is written.
struct CsvFileOptions {
  /// Keeps what is in the file and writes behind it, as a resumed run needs. Steps that ran after
  /// the checkpoint then stand there twice.
  bool append = false;
};

/// A line a step under a line of names; a field is empty where there is no number. "nan", "inf" and
/// "-inf" are written so. The last column is the record's name. What was in the file goes, unless
/// the options say `append`.
class CsvFile {
 public:
  /// Opens the file, and writes the line of names into an empty one.
  explicit CsvFile(const std::string& path, CsvFileOptions options = {})
      : file_(path, options.append ? std::ios::app : std::ios::trunc) {
    if (options.append && !file_.is_empty()) return;
    std::string line = "step,wall_time";
    for (const auto& [name, value] : TelemetryRecord().numbers()) line += std::string(",") + name;
    file_.write(line + ",name\n");
  }

  /// Writes a line.
  void operator()(const TelemetryRecord& record) {
    std::string line = std::to_string(record.step) + "," + detail::number_text(record.wall_time);
    for (const auto& [name, value] : record.numbers()) {
      line += ",";
      if (value) line += detail::number_text(*value);
    }
    file_.write(line + "," + detail::csv_text(record.name) + "\n");
  }

 private:
  detail::RecordFile file_;
};

/// An object a line, appended to what is in the file. A key is missing where there is no number,
/// and "name" where the record has none. JSON has no NaN and no infinity: they are the strings
/// "nan", "inf" and "-inf", which Python's `float` reads.
class JsonLinesFile {
 public:
  /// Opens the file, whose lines before it keeps.
  explicit JsonLinesFile(const std::string& path) : file_(path, std::ios::app) {}

  /// Writes a line.
  void operator()(const TelemetryRecord& record) {
    std::string line = "{";
    if (!record.name.empty()) line += "\"name\":" + detail::json_text(record.name) + ",";
    line += "\"step\":" + std::to_string(record.step) +
            ",\"wall_time\":" + detail::number_text(record.wall_time);
    for (const auto& [name, value] : record.numbers()) {
      if (value) line += std::string(",\"") + name + "\":" + detail::json_number(*value);
    }
    file_.write(line + "}\n");
  }

 private:
  detail::RecordFile file_;
};

/// A TensorBoard event file in `folder`, which is made where it is missing: `tensorboard --logdir
/// folder` shows a curve for each number that there is: "loss", or "generator/loss" of a record
/// with a name. In float, as TensorBoard's scalars are.
class TensorBoardFile {
 public:
  /// Opens a new event file in `folder`.
  explicit TensorBoardFile(const std::string& folder)
      : file_(new_path(folder), std::ios::trunc | std::ios::binary) {
    file_.write(detail::event_file_header(seconds_since_1970()));
  }

  /// Writes the scalars of a record.
  void operator()(const TelemetryRecord& record) {
    detail::EventSummary summary;
    const std::string source = record.name.empty() ? std::string() : record.name + "/";
    for (const auto& [name, value] : record.numbers()) {
      if (value) summary.add(source + name, static_cast<float>(*value));
    }
    file_.write(summary.record(record.wall_time, record.step));
  }

 private:
  static double seconds_since_1970() {
    return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch())
        .count();
  }

  /// One file a process: TensorBoard reads all in a folder as one run.
  static std::string new_path(const std::string& folder) {
    std::error_code error;
    std::filesystem::create_directories(folder, error);
    TORCH_CHECK(!error, folder, ": cannot be made: ", error.message());
    const auto seconds = static_cast<std::int64_t>(seconds_since_1970());
    return folder + "/events.out.tfevents." + std::to_string(seconds) + ".mezzo." +
           std::to_string(::getpid());
  }

  detail::RecordFile file_;
};

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
