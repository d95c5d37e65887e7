// Compares model, tokenizer and scores of bert_ner with recordings of Python packages.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "../support/temp_dir.h"
#include "machine.h"
#include "model_folder.h"
#include "table.h"
#include "tagging.h"

namespace bert_ner {
namespace {

/// A tiny Hugging Face model and its recorded outputs (make_bert_expectation.py).
class BertModel : public testing::Test {
 protected:
  const std::filesystem::path data_ = BERT_NER_TEST_DATA;
  mezzo::TensorDict expected_ =
      mezzo::load_safetensors(data_ / "tiny_bert_expectation.safetensors");

  BertForTokenClassification model(double dropout = 0) const {
    BertForTokenClassification made(ModelFiles(data_ / "tiny_bert").config, 5, dropout);
    load_weights(made, data_ / "tiny_bert", Head::from_file);
    return made;
  }
};

double largest_difference(const torch::Tensor& a, const torch::Tensor& b) {
  return (a - b).abs().max().item<double>();
}

TEST_F(BertModel, LogitsMatchHuggingFaceForBothAttentions) {
  const auto real = expected_["mask"].unsqueeze(-1);  // padding is ignored
  for (const double dropout : {0.0, 1e-30}) {         // dropout disables the fused kernel
    const auto logits = model(dropout)(expected_["ids"], expected_["mask"]);
    EXPECT_LT(largest_difference(logits * real, expected_["logits"] * real), 1e-5) << dropout;
  }
}

TEST_F(BertModel, GradsMatchHuggingFace) {
  auto trained = model();
  const auto logits = trained(expected_["ids"], expected_["mask"]);
  const auto loss =
      torch::nn::functional::cross_entropy(logits.flatten(0, 1), expected_["labels"].flatten());
  EXPECT_NEAR(loss.item<double>(), expected_["loss"].item<double>(), 1e-5);
  loss.backward();
  for (const auto& parameter : trained->named_parameters()) {
    const auto reference = expected_["grad." + parameter.key()];
    EXPECT_LT(largest_difference(parameter.value().grad(), reference), 2e-5) << parameter.key();
  }
}

TEST(WordPieceTokenizer, MatchesHuggingFaceTokenizers) {
  // BertWordPieceTokenizer of tokenizers 0.23.3, with and without lower-casing, stripped accents
  // and parted ideographs.
  struct Recorded {
    std::string word;
    WordPiece::Ids uncased, cased, with_accents, with_joined_ideographs;
  };
  const std::string vocabulary =
      "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nun\n##aff\n##able\nna\n##ive\nna\u00efve\ndon\n'"
      "\nt\nis\n"
      "##tan\n##bul\ni\n##\u0307\n\u4e2d\n\u6587\n\u4e2d\u6587\n$\na\n##b\nab\nUn\n##"
      "Aff\n\u00e9\ne\n"
      "ss\nstra\u00dfe\n##s\n##z\n";
  const std::vector<Recorded> all{
      {"Unaffable", {5, 6, 7}, {26, 6, 7}, {5, 6, 7}, {5, 6, 7}},
      {"UnAff", {5, 6}, {26, 27}, {5, 6}, {5, 6}},
      {"na\u00efve", {8, 9}, {10}, {10}, {8, 9}},
      {"Na\u00efve", {8, 9}, {1}, {10}, {8, 9}},
      {"don't", {11, 12, 13}, {11, 12, 13}, {11, 12, 13}, {11, 12, 13}},
      {"\u0130stanbul", {14, 15, 16}, {1}, {17, 18, 32, 15, 16}, {14, 15, 16}},
      {"\u4e2d\u6587", {19, 20}, {19, 20}, {19, 20}, {21}},
      {"a\u200bb", {25}, {25}, {25}, {25}},
      {"e\u0301", {29}, {1}, {1}, {29}},
      {"\u00c9", {29}, {1}, {28}, {29}},
      {"$ab", {22, 25}, {22, 25}, {22, 25}, {22, 25}},
      {"Stra\u00dfe", {31}, {1}, {31}, {31}},
      {std::string(101, 'a'), {1}, {1}, {1}, {1}},
      {"a\u00a0b", {23, 1}, {23, 1}, {23, 1}, {23, 1}},
      {"\u200b", {1}, {1}, {1}, {1}}};  // here a word has a piece
  const test_support::TempDir temp_dir;
  temp_dir.write("vocab.txt", vocabulary);
  const auto expect = [&](const char* json, WordPiece::Ids Recorded::*ids) {
    temp_dir.write("tokenizer_config.json", json);
    const WordPiece tokenizer(temp_dir.path());
    for (const auto& one : all) EXPECT_EQ(tokenizer.encode_word(one.word), one.*ids) << one.word;
  };
  expect(R"({"do_lower_case": true, "strip_accents": null})", &Recorded::uncased);
  expect(R"({"do_lower_case": false})", &Recorded::cased);
  expect(R"({"strip_accents": false})", &Recorded::with_accents);
  expect(R"({"tokenize_chinese_chars": false})", &Recorded::with_joined_ideographs);
}

TEST(EntityScores, MatchesSeqeval) {
  const auto score = [](const std::string& truth, const std::string& predicted) {
    const auto tags = [](const std::string& text) {
      std::istringstream words(text);
      return TagSequences{{std::istream_iterator<std::string>(words), {}}};
    };
    const auto found = entity_scores(tags(truth), tags(predicted));
    return std::vector{found.precision, found.recall, found.f1};
  };
  using Scores = std::vector<double>;  // of seqeval 1.2.2: precision, recall, F1
  EXPECT_EQ(score("O O", "B-LOC I-LOC"), (Scores{0, 0, 0}));
  EXPECT_EQ(score("B-LOC O", "O O"), (Scores{0, 0, 0}));
  EXPECT_EQ(score("I-geo O O B-LOC", "I-geo O O B-LOC"), (Scores{1, 1, 1}));
  EXPECT_EQ(score("B-O I-O O O O O", "B-O I-O I-person O O I-geo"), (Scores{1 / 3., 1, 0.5}));
  EXPECT_EQ(score("B-LOC O O O O B-person I-person", "B-LOC B-O O O O I-geo I-person"),
            (Scores{0.25, 0.5, 1 / 3.}));
}

TEST(ShuffledBatches, StartWithLongest) {
  const BatchList sorted{{0, 1}, {2, 3}, {4, 5}, {6, 7}};
  for (const uint64_t seed : {1, 2, 3, 4}) {
    auto shuffled = shuffle_batches(sorted, seed, /*epoch=*/0);
    EXPECT_EQ(shuffled.front(), sorted.back()) << seed;
    std::ranges::sort(shuffled);
    EXPECT_EQ(shuffled, sorted) << seed;
  }
}

TEST(TablePrecisions, IncludesFloat16IfCpuMultipliesIt) {
  for (const char* instructions : {"avx512_fp16", "amx_fp16"}) {
    EXPECT_TRUE(has_float16(torch::kCPU, {{instructions, true}})) << instructions;
    EXPECT_FALSE(has_float16(torch::kCPU, {{instructions, false}})) << instructions;
  }
  EXPECT_FALSE(has_float16(torch::kCPU, {{"avx512_bf16", true}}));

  const auto last = [](torch::ScalarType amp_dtype, bool has_float16_products) {
    return table_precisions({.device_type = torch::kCPU, .dtype = amp_dtype}, has_float16_products)
        .back()
        .flag;
  };
  EXPECT_EQ(last(torch::kBFloat16, true), "fp16");
  EXPECT_EQ(last(torch::kBFloat16, false), "bf16-stochastic");
  EXPECT_EQ(last(torch::kHalf, true), "bf16-stochastic");  // the amp rows are in float16
}

TEST(Table, AveragesRatiosToNeighboringFloat32Steps) {
  RunResult run;
  run.name = "amp";
  run.peak_memory_bytes = int64_t{300} << 20;
  auto reference = run;
  reference.peak_memory_bytes = int64_t{400} << 20;
  const auto text = format_table({{{reference}, {0.9, 1.1}}, {{run}, {2.0, 2.5}}});
  EXPECT_THAT(text, testing::HasSubstr("400 MiB (1.00)"));
  EXPECT_THAT(text, testing::HasSubstr("300 MiB (0.75)"));
  EXPECT_THAT(text, testing::HasSubstr("| 2.25 ± 0.25 |"));
}

}  // namespace
}  // namespace bert_ner
