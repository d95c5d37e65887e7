#pragma once

#include <time.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <functional>
#include <string>
#include <utility>
#include <vector>

/// Peers timed in turns, so that a machine that slows down meanwhile slows all of them down; ratios
/// are medians of the rounds' own ratios.
class Interleaved {
 public:
  struct Peer {
    std::string name;
    std::function<void()> prepare;  ///< not timed
    std::function<void()> work;
    std::vector<double> milliseconds;
  };

  /// On a machine that others use too, work on one thread is better timed by that thread's own
  /// clock.
  explicit Interleaved(bool by_thread_clock) : by_thread_clock_(by_thread_clock) {}

  void add(
      std::string name, std::function<void()> work, std::function<void()> prepare = [] {}) {
    peers_.push_back({std::move(name), std::move(prepare), std::move(work), {}});
  }

  void run(int rounds) {
    for (int round = -1; round < rounds; ++round) {  // the first warms up
      for (Peer& peer : peers_) {
        peer.prepare();
        const double start = now();
        peer.work();
        const double taken = now() - start;
        if (round >= 0) peer.milliseconds.push_back(taken);
      }
    }
  }

  const std::vector<Peer>& peers() const { return peers_; }

  double median_ms(std::size_t peer) const { return median(peers_[peer].milliseconds); }
  double best_ms(std::size_t peer) const {
    return *std::min_element(peers_[peer].milliseconds.begin(), peers_[peer].milliseconds.end());
  }
  double median_ratio(std::size_t peer, std::size_t base) const {
    return median(rounds(peer, base, [](double a, double b) { return a / b; }));
  }
  double median_difference(std::size_t peer, std::size_t base) const {
    return median(rounds(peer, base, [](double a, double b) { return a - b; }));
  }

 private:
  template <class Combine>
  std::vector<double> rounds(std::size_t peer, std::size_t base, const Combine& combine) const {
    std::vector<double> result;
    for (std::size_t i = 0; i < peers_[peer].milliseconds.size(); ++i) {
      result.push_back(combine(peers_[peer].milliseconds[i], peers_[base].milliseconds[i]));
    }
    return result;
  }
  double now() const {
    if (!by_thread_clock_) {
      const auto since = std::chrono::steady_clock::now().time_since_epoch();
      return std::chrono::duration<double, std::milli>(since).count();
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
  std::vector<Peer> peers_;
};
