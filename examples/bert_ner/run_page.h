/// \file
/// A run as an HTML page.
#pragma once

#include <mezzo/diagnose/overflow_report.h>
#include <mezzo/diagnose/run_report.h>
#include <mezzo/diagnose/telemetry.h>

#include <cstdint>
#include <string>

#include "atomic_file.h"
#include "training.h"

namespace bert_ner {

/// Loss, loss scale with skipped steps, gradient norm, and which gradients overflowed, step by
/// step, through mezzo's Telemetry.
class RunPage {
 public:
  /// \param model whose gradients are named; \param first_step of the run, more than 1 where it is
  /// resumed
  /// \throws InputError for a file that cannot be written, before the hours of training
  RunPage(const std::string& file, std::string title, const torch::nn::Module& model,
          std::int64_t first_step);

  void on_step(const StepReport& report, double max_norm);
  /// For GradScaler::on_skip.
  void on_skip(const mezzo::SkippedStep& skipped) { overflows_(skipped); }

  /// Puts the page in its place. \throws InputError
  void write();

 private:
  AtomicFile file_;
  mezzo::RunReport report_;
  mezzo::OverflowReport overflows_;
  mezzo::Telemetry telemetry_;
};

}  // namespace bert_ner
