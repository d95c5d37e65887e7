#pragma once

#include <time.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <functional>
#include <string>
#include <utility>
#include <vector>

/// Times several candidates in turns, so that changes of the machine's speed affect all of them.
/// Ratios are medians over the rounds.
class Interleaved {
 public:
  struct Candidate {
    std::string name;
    std::function<void()> prepare;  ///< not timed
    std::function<void()> work;
    std::vector<double> milliseconds;
  };

  /// On a shared machine, single-threaded work is timed more accurately by the thread's clock.
  explicit Interleaved(bool by_thread_clock) : by_thread_clock_(by_thread_clock) {}

  void add(
      std::string name, std::function<void()> work, std::function<void()> prepare = [] {}) {
    candidates_.push_back({std::move(name), std::move(prepare), std::move(work), {}});
  }

  void run(int rounds) {
    for (int round = -1; round < rounds; ++round) {  // the first round is a warm-up
      for (Candidate& candidate : candidates_) {
        candidate.prepare();
        const double start = now();
        candidate.work();
        const double elapsed = now() - start;
        if (round >= 0) candidate.milliseconds.push_back(elapsed);
      }
    }
  }

  const std::vector<Candidate>& candidates() const { return candidates_; }

  double median_ms(std::size_t candidate) const {
    return median(candidates_[candidate].milliseconds);
  }
  double best_ms(std::size_t candidate) const {
    return *std::min_element(candidates_[candidate].milliseconds.begin(),
                             candidates_[candidate].milliseconds.end());
  }
  double median_ratio(std::size_t candidate, std::size_t base) const {
    return median(rounds(candidate, base, [](double a, double b) { return a / b; }));
  }
  double median_difference(std::size_t candidate, std::size_t base) const {
    return median(rounds(candidate, base, [](double a, double b) { return a - b; }));
  }

 private:
  template <class Combine>
  std::vector<double> rounds(std::size_t candidate, std::size_t base,
                             const Combine& combine) const {
    std::vector<double> result;
    for (std::size_t i = 0; i < candidates_[candidate].milliseconds.size(); ++i) {
      result.push_back(
          combine(candidates_[candidate].milliseconds[i], candidates_[base].milliseconds[i]));
    }
    return result;
  }
  double now() const {
    if (!by_thread_clock_) {
      const auto time = std::chrono::steady_clock::now().time_since_epoch();
      return std::chrono::duration<double, std::milli>(time).count();
    }
    timespec time{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) * 1e3 + static_cast<double>(time.tv_nsec) * 1e-6;
  }
  static double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
  }

  bool by_thread_clock_;
  std::vector<Candidate> candidates_;
};
