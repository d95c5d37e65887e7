/// \file
/// Files that a Telemetry writes. Each is a writer for `Telemetry::write_to`; copies write to the
/// same file. Numbers are written so that they read back to the bit, in any locale. After each
/// record the file is flushed to the operating system, so that a run that is killed leaves all of
/// it. They throw c10::Error that names the path where a file cannot be opened or written.
#pragma once

#include <mezzo/base/detail/crc32c.h>
#include <mezzo/base/detail/system.h>
#include <mezzo/base/version.h>
#include <mezzo/diagnose/detail/number_text.h>
#include <mezzo/diagnose/telemetry.h>

#include <c10/util/Exception.h>

#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <string_view>
#include <system_error>
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

/// The sum that stands in a file, so that sums of data that holds sums are not weak.
inline std::string masked_crc(std::string_view bytes) {
  return fixed_bytes(std::rotr(crc32c(bytes.data(), bytes.size()), 15) + 0xA282EAD8U);
}

/// `message` as a TFRecord.
inline std::string framed(std::string_view message) {
  const std::string length = fixed_bytes(static_cast<std::uint64_t>(message.size()));
  return length + masked_crc(length) + std::string(message) + masked_crc(message);
}

/// An Event with its wall time, and the fields that follow.
inline std::string event_record(double wall_time, const std::string& fields) {
  return framed("\x09" + fixed_bytes(std::bit_cast<std::uint64_t>(wall_time)) + fields);
}

}  // namespace detail

/// How a CsvFile is written.
struct CsvFileOptions {
  /// Keeps what is in the file and writes behind it, as a resumed run needs. Steps that ran after
  /// the checkpoint then stand there twice.
  bool append = false;
};

/// A line a step under a line of names; a field is empty where there is no number. "nan", "inf" and
/// "-inf" are written so. What was in the file goes, unless the options say `append`.
class CsvFile {
 public:
  /// Opens the file, and writes the line of names into an empty one.
  explicit CsvFile(const std::string& path, CsvFileOptions options = {})
      : file_(path, options.append ? std::ios::app : std::ios::trunc) {
    if (options.append && !file_.is_empty()) return;
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

/// A TensorBoard event file in `folder`, which is made where it is missing: `tensorboard --logdir
/// folder` shows a curve for each number that there is. In float, as TensorBoard's scalars are.
class TensorBoardFile {
 public:
  /// Opens a new event file in `folder`.
  explicit TensorBoardFile(const std::string& folder)
      : file_(new_path(folder), std::ios::trunc | std::ios::binary) {
    file_.write(detail::event_record(detail::seconds_since_1970(),
                                     detail::bytes_field(3, "brain.Event:2")));
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
    file_.write(detail::event_record(
        record.wall_time, "\x10" + detail::varint(static_cast<std::uint64_t>(record.step)) +
                              detail::bytes_field(5, values)));
  }

 private:
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
