#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace bert_ner {

/// Entity-level scores: an entity counts if its type, first and last word are right. A ratio with a
/// denominator of 0 is 0.
struct Score {
  double precision = 0;     ///< correct / predicted
  double recall = 0;        ///< correct / support
  double f1 = 0;            ///< their harmonic mean
  std::size_t support = 0;  ///< entities in the truth
  std::size_t predicted = 0;
  std::size_t correct = 0;
};

/// One list of BIO tags a sentence.
using TagSequences = std::vector<std::vector<std::string>>;

/// Micro average over all types: the values of seqeval's precision_score, recall_score and f1_score
/// in their default mode, which reads tags as conlleval does (an I- after O, or after another type,
/// begins an entity). \throws std::invalid_argument if the numbers of sentences or words differ
Score entity_scores(const TagSequences& truth, const TagSequences& predicted);

}  // namespace bert_ner
