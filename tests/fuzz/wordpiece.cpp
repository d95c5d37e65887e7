#include "wordpiece.h"

#include <string>

#include "../support/scratch.h"
#include "targets.h"
#include "text.h"

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
    for (const auto id : tokenizer.encode(bytes)) {
      require(id >= 0 && id < static_cast<std::int64_t>(tokenizer.size()), "an id is a token's");
    }
    require(!tokenizer.encode_word(bytes).empty(), "a word has a piece");
  } catch (const bert_ner::InputError&) {
  }
}

}  // namespace fuzz
