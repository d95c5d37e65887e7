/// \file
/// Files that a Telemetry writes. Each is a writer for `Telemetry::write_to`; copies write to the
/// same file. Numbers are written so that they read back to the bit, in any locale. After each
/// record the file is flushed to the operating system, so that a run that is killed leaves all of
/// it. They throw c10::Error that names the path where a file cannot be opened or written.
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/diagnose/detail/event_record.h>
#include <mezzo/diagnose/detail/number_text.h>
#include <mezzo/diagnose/telemetry.h>

#include <c10/util/Exception.h>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <utility>

#include <unistd.h>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// A file that is written a record at a time.
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

}  // namespace detail

/// A line a step under a line of names; a field is empty where there is no number. "nan", "inf" and
/// "-inf" are written so. What was in the file goes.
class CsvFile {
 public:
  explicit CsvFile(const std::string& path) : file_(path, std::ios::trunc) {
    std::string line = "step,wall_time";
    for (const auto& [name, value] : TelemetryRecord().numbers()) line += std::string(",") + name;
    file_.write(line + "\n");
  }

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

/// An object a line, appended to what is in the file. A key is missing where there is no number.
/// JSON has no NaN and no infinity: they are the strings "nan", "inf" and "-inf", which Python's
/// `float` reads.
class JsonLinesFile {
 public:
  explicit JsonLinesFile(const std::string& path) : file_(path, std::ios::app) {}

  void operator()(const TelemetryRecord& record) {
    std::string line = "{\"step\":" + std::to_string(record.step) +
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
/// folder` shows a curve for each number that there is. In float, as TensorBoard's scalars are.
class TensorBoardFile {
 public:
  explicit TensorBoardFile(const std::string& folder)
      : file_(new_path(folder), std::ios::trunc | std::ios::binary) {
    file_.write(detail::event_file_header(seconds_since_1970()));
  }

  void operator()(const TelemetryRecord& record) {
    detail::EventSummary summary;
    for (const auto& [name, value] : record.numbers()) {
      if (value) summary.add(name, static_cast<float>(*value));
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
