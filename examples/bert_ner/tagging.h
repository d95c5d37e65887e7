/// \file
/// Tags words with a trained model, for scores and for `bert_ner predict`.
#pragma once

#include <mezzo/autocast/autocast_setting.h>

#include <torch/torch.h>

#include <cstdint>
#include <iosfwd>
#include <span>
#include <string>
#include <vector>

#include "batches.h"
#include "bert.h"
#include "entity_scores.h"
#include "options.h"

namespace bert_ner {

/// The likeliest tag of each word of each sentence. Puts the model into evaluation mode.
/// \param examples as make_examples cut the sentences, `sentences` in number
TagSequences tag_sentences(BertForTokenClassification& model, std::span<const Example> examples,
                           std::size_t sentences, const Labels& labels, Padding padding,
                           int64_t max_length, const mezzo::AutocastSetting& precision);

/// Writes "word TAB tag" lines, a blank line after each sentence, which read_conll takes back.
/// Words are what white space parts: put spaces around punctuation, as the corpora do. In the
/// precision of the amp rows on this device (see setting_for), whatever the model was
/// trained in. \throws InputError for a folder that holds no token classifier or text that is no
/// UTF-8
void predict(const PredictOptions& options, std::ostream& out);

}  // namespace bert_ner
