#pragma once

#include <cstddef>
#include <random>
#include <vector>

namespace bert_ner {

/// The numbers 0 to count - 1 in random order. Unlike std::shuffle it gives the same order for the
/// same generator with every standard library (the generators are specified to the bit, the
/// distributions are not).
std::vector<std::size_t> shuffled_indices(std::size_t count, std::mt19937_64& generator);

}  // namespace bert_ner
