#include "progress.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <ostream>

#include "formatted.h"

namespace bert_ner {
namespace {

constexpr auto kBarInterval = std::chrono::milliseconds(200);
constexpr auto kLineInterval = std::chrono::seconds(5);

/// 3725 -> "1:02:05"
std::string clock_text(double seconds) {
  const long long whole = std::llround(std::max(seconds, 0.0));
  const long long hours = whole / 3600, minutes = whole / 60 % 60;
  if (hours > 0) return formatted("%lld:%02lld:%02lld", hours, minutes, whole % 60);
  return formatted("%lld:%02lld", minutes, whole % 60);
}

/// "120/718  loss 0.3121  scale 65536  skipped 1  2310 tokens/s  1:05 left"
std::string numbers_text(const ProgressStatus& status) {
  return formatted("%lld/%lld  loss %.4f  scale %g  skipped %lld  %.0f tokens/s  ",
                   static_cast<long long>(status.step), static_cast<long long>(status.steps),
                   status.loss, status.scale, static_cast<long long>(status.skipped),
                   status.tokens_per_second) +
         clock_text(status.seconds_left) + " left";
}

int terminal_width() {
  winsize size{};
  const bool known = ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
  return known ? size.ws_col : 80;
}

}  // namespace

std::string progress_text(const ProgressStatus& status) {
  return formatted("epoch %lld/%lld  step ", static_cast<long long>(status.epoch),
                   static_cast<long long>(status.epochs)) +
         numbers_text(status);
}

std::string progress_bar(const ProgressStatus& status, int width) {
  constexpr int kShortestBar = 6, kLongestBar = 40, kBrackets = 3;
  std::string text = numbers_text(status);
  const int room = width - static_cast<int>(text.size()) - kBrackets;
  if (room >= kShortestBar) {
    const int length = std::min(room, kLongestBar);
    const double part = status.steps > 0
                            ? static_cast<double>(status.step) / static_cast<double>(status.steps)
                            : 1.0;
    const auto done =
        static_cast<std::size_t>(std::clamp(static_cast<int>(part * length), 0, length));
    std::string bar(static_cast<std::size_t>(length), ' ');
    std::fill_n(bar.begin(), done, '=');
    if (done < bar.size()) bar[done] = '>';
    text = "[" + bar + "] " + text;
  }
  return text.substr(0, static_cast<std::size_t>(std::max(width, 0)));
}

Progress::Style Progress::style_for_stderr(bool quiet) {
  if (quiet) return Style::none;
  return isatty(STDERR_FILENO) == 1 ? Style::bar : Style::lines;
}

Progress::Progress(std::ostream& out, Style style, int64_t epochs, int64_t steps,
                   int64_t first_step, int64_t skipped)
    : out_(out),
      style_(style),
      epochs_(epochs),
      steps_(steps),
      first_step_(first_step),
      skipped_(skipped),
      step_began_(Clock::now()),
      last_shown_(step_began_) {}

Progress::~Progress() {
  if (bar_is_open_) out_ << std::endl;
}

void Progress::on_step(const StepReport& report, const TrainingPosition& position) {
  loss_sum_ = losses_ == 0 ? report.loss : loss_sum_ + report.loss;
  ++losses_;
  tokens_ += report.tokens;
  const auto now = Clock::now();
  seconds_ += std::chrono::duration<double>(now - step_began_).count();
  step_began_ = now;
  const auto interval = style_ == Style::bar ? Clock::duration(kBarInterval) : kLineInterval;
  if (style_ == Style::none || (now - last_shown_ < interval && position.steps != steps_)) return;
  last_shown_ = now;
  const double a_step = seconds_ / static_cast<double>(position.steps - first_step_);
  show({.epoch = std::min(position.epoch + 1, epochs_),
        .epochs = epochs_,
        .step = position.steps,
        .steps = steps_,
        .loss = loss_sum_.item<double>() / static_cast<double>(losses_),
        .scale = report.result.scale(),
        .skipped = skipped_,
        .tokens_per_second = static_cast<double>(tokens_) / seconds_,
        .seconds_left = a_step * static_cast<double>(steps_ - position.steps)});
  losses_ = 0;
}

void Progress::show(const ProgressStatus& status) {
  if (style_ == Style::lines) {
    out_ << progress_text(status) << std::endl;
    return;
  }
  constexpr const char* kEraseLine = "\r\x1b[K";
  out_ << kEraseLine << progress_bar(status, terminal_width() - 1) << std::flush;
  bar_is_open_ = true;
}

void Progress::on_skip(const mezzo::SkippedStep& skipped) {
  ++skipped_;
  say(skipped.message());
}

void Progress::say(const std::string& line) {
  if (style_ == Style::none) return;
  if (bar_is_open_) out_ << "\r\x1b[K";
  bar_is_open_ = false;
  out_ << line << std::endl;
}

void Progress::restart_clock() { step_began_ = Clock::now(); }

}  // namespace bert_ner
