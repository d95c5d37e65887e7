/// \file
/// A run as an HTML page.
#pragma once

#include <mezzo/diagnose/run_report.h>
#include <mezzo/diagnose/telemetry.h>

#include <cstdint>
#include <string>

#include "atomic_file.h"
#include "training.h"

namespace bert_ner {

/// Loss, loss scale with skipped steps, and gradient norm, step by step, through mezzo's Telemetry.
class RunPage {
 public:
  /// \param first_step of the run, more than 1 where it is resumed
  /// \throws InputError for a file that cannot be written, before the hours of training
  RunPage(const std::string& file, std::string title, std::int64_t first_step);

  void on_step(const StepReport& report, double max_norm);

  /// Puts the page in its place. \throws InputError
  void write();

 private:
  AtomicFile file_;
  mezzo::RunReport report_;
  mezzo::Telemetry telemetry_;
};

}  // namespace bert_ner
