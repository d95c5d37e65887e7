/// \file
/// A trained model's answers: one tag a word, for scores and for `bert_ner predict`.
#pragma once

#include <mezzo/autocast/autocast_setting.h>

#include <torch/torch.h>

#include <cstdint>
#include <iosfwd>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "batches.h"
#include "bert.h"
#include "entity_scores.h"
#include "options.h"
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

/// The words of a sentence as the corpora have them: parted at white space, and punctuation before
/// and after a word apart. An opening @ or # stays, and so do signs within ("don't", "3.5").
std::vector<std::string> split_words(std::string_view sentence);

/// Writes "word TAB tag" lines, a blank line after each sentence, which read_conll takes back.
/// In the precision of the amp rows on this device (see setting_for), whatever the model was
/// trained in. \throws InputError for a folder that holds no token classifier or text that is no
/// UTF-8
void predict(const PredictOptions& options, std::ostream& out);

}  // namespace bert_ner
