/// \file
/// A trained model's answers: one tag a word.
#pragma once

#include <mezzo/autocast/autocast_setting.h>

#include <torch/torch.h>

#include <cstdint>
#include <span>
#include <vector>

#include "batches.h"
#include "bert.h"
#include "entity_scores.h"
#include "labels.h"
#include "ranks.h"

namespace bert_ner {

/// The likeliest tag of each word of each sentence. Puts the model into evaluation mode.
/// \param examples as make_examples cut the sentences, `sentences` in number
/// \param ranks share the batches, which are those that one process makes; each gets all answers
TagSequences tag_sentences(BertForTokenClassification& model, std::span<const Example> examples,
                           std::size_t sentences, const Labels& labels, Padding padding,
                           int64_t max_length, int64_t batch_size,
                           const mezzo::AutocastSetting& precision, const Ranks& ranks = {});

/// The tags that the sentences carry.
TagSequences tags_of(std::span<const Sentence> sentences);

}  // namespace bert_ner
