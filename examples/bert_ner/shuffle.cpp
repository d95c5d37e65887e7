#include "shuffle.h"

#include <cstdint>
#include <numeric>
#include <utility>

namespace bert_ner {
namespace {

// Uniform in [0, bound): draws that fall into the incomplete last multiple of `bound` are drawn
// again.
std::uint64_t draw_below(std::uint64_t bound, std::mt19937_64& generator) {
  const std::uint64_t surplus = (std::mt19937_64::max() % bound + 1) % bound;
  const std::uint64_t last = std::mt19937_64::max() - surplus;
  std::uint64_t drawn = generator();
  while (drawn > last) drawn = generator();
  return drawn % bound;
}

}  // namespace

std::vector<std::size_t> shuffled_indices(std::size_t count, std::mt19937_64& generator) {
  std::vector<std::size_t> indices(count);
  std::iota(indices.begin(), indices.end(), std::size_t{0});
  for (std::size_t last = count; last > 1; --last) {
    std::swap(indices[last - 1], indices[draw_below(last, generator)]);
  }
  return indices;
}

}  // namespace bert_ner
