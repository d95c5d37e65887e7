/// \file
/// The sentences of a run and the labels that its model learns.
#pragma once

#include <cstdint>
#include <vector>

#include "conll.h"
#include "labels.h"
#include "options.h"

namespace bert_ner {

struct Dataset {
  std::vector<Sentence> train;
  std::vector<Sentence> valid;  ///< scored after each epoch
  std::vector<Sentence> test;   ///< scored at the end; empty where none was given
  Labels labels;                ///< of the training part, or of the one file that was split

  /// A number that changes with any word or tag, to tell whether a run is resumed on its own data.
  uint64_t fingerprint() const;
};

/// \throws InputError naming file and line for what read_conll refuses and for a tag, in the
/// validation or test part, that no training sentence has.
Dataset load_dataset(const DataOptions& options, uint64_t seed);

}  // namespace bert_ner
