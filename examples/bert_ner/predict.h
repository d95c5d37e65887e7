/// \file
/// Labels text with a saved model.
#pragma once

#include <iosfwd>
#include <string>
#include <string_view>
#include <vector>

#include "options.h"

namespace bert_ner {

/// The words of a sentence as the corpora have them: parted at white space, and punctuation before
/// and after a word apart. An opening @ or # stays, and so do signs within ("don't", "3.5").
std::vector<std::string> split_words(std::string_view sentence);

/// Writes "word TAB tag" lines, a blank line after each sentence, which read_conll takes back.
/// In the precision of the amp rows on this device (see setting_for), whatever the model was
/// trained in. \throws InputError for a folder that holds no token classifier or text that is no
/// UTF-8
void predict(const PredictOptions& options, std::ostream& out);

}  // namespace bert_ner
