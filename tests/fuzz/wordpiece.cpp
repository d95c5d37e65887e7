#include "wordpiece.h"

#include <string>

#include "../support/scratch.h"
#include "input_error.h"
#include "targets.h"

namespace fuzz {

/// vocab.txt, tokenizer_config.json and a text to encode, parted by NUL; an empty configuration is
/// none.
void wordpiece(std::string_view bytes) {
  static const test_support::Scratch scratch;
  const auto vocabulary = take_until(bytes, '\0'), configuration = take_until(bytes, '\0');
  test_support::put_bytes(scratch.path() / "vocab.txt", std::string(vocabulary));
  std::filesystem::remove(scratch.path() / "tokenizer_config.json");
  if (!configuration.empty()) {
    test_support::put_bytes(scratch.path() / "tokenizer_config.json", std::string(configuration));
  }
  try {
    const auto tokenizer = bert_ner::WordPiece::from_folder(scratch.path());
    const auto encoding = tokenizer.encode(bytes, /*add_special_tokens=*/true);
    require(encoding.ids.size() == encoding.tokens.size() &&
                encoding.ids.size() == encoding.offsets.size(),
            "an encoding has as many ids as tokens and offsets");
    for (const auto id : encoding.ids) {
      require(id >= 0 && id < static_cast<std::int64_t>(tokenizer.size()), "an id is a token's");
    }
    for (const auto& [begin, end] : encoding.offsets) {
      require(begin <= end && end <= bytes.size(), "a piece lies in its text");
    }
    require(!tokenizer.encode_word(bytes).empty(), "a word has a piece");
  } catch (const bert_ner::InputError&) {
  }
}

}  // namespace fuzz
