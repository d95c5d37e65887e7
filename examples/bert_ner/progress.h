/// \file
/// What a person watching a run sees.
#pragma once

#include <chrono>
#include <cstdint>
#include <iosfwd>
#include <string>

#include "training.h"

namespace bert_ner {

/// One moment of a run.
struct ProgressStatus {
  int64_t epoch = 0, epochs = 0;  ///< which one is under way, from 1, of how many
  int64_t step = 0, steps = 0;    ///< complete, of how many
  double loss = 0;                ///< mean of the last steps
  double scale = 1;
  int64_t skipped = 0;
  double tokens_per_second = 0;
  double seconds_left = 0;
};

/// "epoch 1/3  step 120/718  loss 0.3121  scale 65536  skipped 1  2310 tokens/s  1:05 left"
std::string progress_text(const ProgressStatus& status);

/// "[====>    ] 120/718  loss 0.3121  scale 65536  skipped 1  2310 tokens/s  1:05 left": a bar as
/// long as `width` has room for, without one where there is too little, never longer than `width`.
std::string progress_bar(const ProgressStatus& status, int width);

/// Shows a run's steps: on a terminal one line, rewritten a few times a second; elsewhere a plain
/// line every few seconds. The device is waited for only when a line is written.
class Progress {
 public:
  enum class Style { none, bar, lines };

  /// A bar if standard error is a terminal, else lines; nothing if `quiet`.
  static Style style_for_stderr(bool quiet);

  /// `steps` in all, of which `first_step` were done before this process began, and of those
  /// `skipped` skipped.
  Progress(std::ostream& out, Style style, int64_t epochs, int64_t steps, int64_t first_step,
           int64_t skipped);
  /// Ends the line that is being rewritten.
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void on_step(const StepReport& report, const TrainingPosition& position);
  /// For GradScaler::on_skip, which on a GPU may come some steps late.
  void on_skip(const mezzo::SkippedStep& skipped);
  /// Writes a line of its own, above the bar.
  void say(const std::string& line);
  /// The time since the last step went to something else (a score, a checkpoint): do not count it.
  void restart_clock();

  int64_t tokens() const { return tokens_; }
  double seconds() const { return seconds_; }

 private:
  using Clock = std::chrono::steady_clock;

  void show(const ProgressStatus& status);

  std::ostream& out_;
  Style style_;
  int64_t epochs_, steps_, first_step_, skipped_;
  int64_t tokens_ = 0;
  double seconds_ = 0;
  torch::Tensor loss_sum_;  ///< since the last line, on the device
  int64_t losses_ = 0;
  bool bar_is_open_ = false;
  Clock::time_point step_began_, last_shown_;
};

}  // namespace bert_ner
