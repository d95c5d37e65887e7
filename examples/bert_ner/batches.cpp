#include "batches.h"

#include <algorithm>
#include <numeric>
#include <random>
#include <stdexcept>

namespace bert_ner {

std::vector<Example> make_examples(std::span<const Sentence> sentences, const WordPiece& tokenizer,
                                   const Labels& labels, int64_t max_length) {
  TORCH_CHECK(max_length >= 3, "max_length must leave room for [CLS], a piece and [SEP], got ",
              max_length);
  const auto room = static_cast<std::size_t>(max_length) - 1;  // and [SEP]
  std::vector<Example> examples;
  for (std::size_t i = 0; i < sentences.size(); ++i) {
    const auto& [words, tags, line] = sentences[i];
    const auto begin = [&] { examples.push_back({{tokenizer.cls_id()}, {}, {}, i}); };
    begin();
    for (std::size_t word = 0; word < words.size(); ++word) {
      auto pieces = tokenizer.encode_word(words[word]);
      pieces.resize(std::min(pieces.size(), room - 1));
      if (examples.back().ids.size() + pieces.size() > room) {
        examples.back().ids.push_back(tokenizer.sep_id());
        begin();
      }
      auto& example = examples.back();
      example.first_pieces.push_back(static_cast<int64_t>(example.ids.size()));
      example.ids.insert(example.ids.end(), pieces.begin(), pieces.end());
      if (tags.empty()) continue;
      const auto label = labels.id(tags[word]);
      if (!label) throw std::out_of_range("unknown label " + tags[word]);
      example.labels.push_back(*label);
    }
    examples.back().ids.push_back(tokenizer.sep_id());
  }
  return examples;
}

BatchList length_sorted_batches(std::span<const Example> examples, int64_t batch_size) {
  TORCH_CHECK(batch_size >= 1, "batch_size must be at least 1, got ", batch_size);
  std::vector<std::size_t> order(examples.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return examples[a].ids.size() < examples[b].ids.size();
  });
  BatchList batches;
  for (std::size_t begin = 0; begin < order.size(); begin += static_cast<std::size_t>(batch_size)) {
    const auto end = std::min(begin + static_cast<std::size_t>(batch_size), order.size());
    batches.emplace_back(order.begin() + static_cast<std::ptrdiff_t>(begin),
                         order.begin() + static_cast<std::ptrdiff_t>(end));
  }
  return batches;
}

BatchList shuffled(const BatchList& batches, uint64_t seed, int64_t epoch) {
  std::seed_seq words{static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32),
                      static_cast<uint32_t>(epoch)};
  std::mt19937_64 generator(words);
  BatchList result;
  result.reserve(batches.size());
  for (const auto i : shuffled_indices(batches.size(), generator)) result.push_back(batches[i]);
  return result;
}

Batch collate(std::span<const Example> examples, std::span<const std::size_t> positions,
              Padding padding, int64_t max_length, torch::Device device) {
  int64_t longest = 0, tokens = 0;
  for (const auto position : positions) {
    const auto length = static_cast<int64_t>(examples[position].ids.size());
    longest = std::max(longest, length);
    tokens += length;
  }
  const auto rows = static_cast<int64_t>(positions.size());
  const auto rounded = (longest + padding.multiple - 1) / padding.multiple * padding.multiple;
  const auto length = std::min(rounded, std::max(longest, max_length));
  auto ids = torch::full({rows, length}, padding.id, torch::kInt64);
  auto labels = torch::full({rows, length}, kIgnoredLabel, torch::kInt64);
  auto mask = torch::zeros({rows, length}, torch::kBool);
  for (int64_t row = 0; row < rows; ++row) {
    const auto& example = examples[positions[static_cast<std::size_t>(row)]];
    std::copy(example.ids.begin(), example.ids.end(), ids.data_ptr<int64_t>() + row * length);
    std::fill_n(mask.data_ptr<bool>() + row * length, example.ids.size(), true);
    for (std::size_t word = 0; word < example.labels.size(); ++word) {
      labels.data_ptr<int64_t>()[row * length + example.first_pieces[word]] = example.labels[word];
    }
  }
  if (mask.all().item<bool>()) mask = torch::Tensor();
  // A copy that blocks would wait for all that the device still has to do.
  const auto moved = [&](const torch::Tensor& tensor) {
    return tensor.defined() ? tensor.to(device, /*non_blocking=*/true) : tensor;
  };
  return {moved(ids), moved(mask), moved(labels), tokens};
}

}  // namespace bert_ner
