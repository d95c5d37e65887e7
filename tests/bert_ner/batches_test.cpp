#include "batches.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "tiny_bert.h"

namespace bert_ner {
namespace {

using testing::ElementsAre;

class Batches : public testing::Test {
 protected:
  std::vector<Example> examples(std::vector<Sentence> sentences, int64_t max_length = 20) const {
    return make_examples(sentences, tokenizer_, labels_, max_length);
  }
  /// Examples of these lengths, in this order.
  static std::vector<Example> of_lengths(std::initializer_list<std::size_t> lengths) {
    std::vector<Example> examples;
    for (const auto length : lengths) {
      examples.push_back({std::vector<int64_t>(length, 7), {1}, {2}, examples.size()});
    }
    return examples;
  }

  WordPiece tokenizer_ = WordPiece::from_folder(test::tiny_bert_folder());
  Labels labels_{{"O", "B-person"}};
};

TEST_F(Batches, LabelTheFirstPieceOfAWordAlone) {
  const auto made = examples({{{"alice", "worksing", "."}, {"B-person", "O", "O"}, 1}});
  ASSERT_EQ(made.size(), 1U);
  const auto pieces = tokenizer_.encode_word("worksing");
  ASSERT_EQ(pieces.size(), 2U);
  EXPECT_THAT(made[0].ids,
              ElementsAre(tokenizer_.cls_id(), tokenizer_.encode_word("alice")[0], pieces[0],
                          pieces[1], tokenizer_.encode_word(".")[0], tokenizer_.sep_id()));
  const auto batch = collate(made, std::vector<std::size_t>{0}, {0}, 20, torch::kCPU);
  EXPECT_TRUE(torch::equal(batch.labels, torch::tensor({{-100, 1, 0, -100, 0, -100}})));
  EXPECT_EQ(batch.tokens, 6);
  EXPECT_FALSE(batch.mask.defined());
}

TEST_F(Batches, CutWhatIsTooLongBetweenWords) {
  const std::vector<std::string> words{"worksing", "alice", "worksing", "bob", "carol"};
  const auto made =
      examples({{words, std::vector<std::string>(5, "O"), 1}, {{"bob"}, {"B-person"}, 9}},
               /*max_length=*/6);
  ASSERT_EQ(made.size(), 3U);
  EXPECT_THAT(made[0].first_pieces, ElementsAre(1, 3));  // 4 is full: "worksing" would need 5
  EXPECT_THAT(made[1].first_pieces, ElementsAre(1, 3, 4));
  EXPECT_EQ(made[1].sentence, 0U);
  EXPECT_EQ(made[2].sentence, 1U);
  for (const auto& example : made) {
    EXPECT_LE(example.ids.size(), 6U);
    EXPECT_EQ(example.ids.front(), tokenizer_.cls_id());
    EXPECT_EQ(example.ids.back(), tokenizer_.sep_id());
    EXPECT_EQ(example.labels.size(), example.first_pieces.size());
  }
}

TEST_F(Batches, KeepAWordThatIsTooLongOnItsOwn) {
  const auto made = examples({{{"a,b,c,d,e,f"}, {"O"}, 1}}, /*max_length=*/5);
  ASSERT_EQ(made.size(), 1U);
  EXPECT_EQ(made[0].ids.size(), 5U);
  EXPECT_THAT(made[0].first_pieces, ElementsAre(1));
}

TEST_F(Batches, RefuseATagThatIsNoLabel) {
  EXPECT_THROW(examples({{{"rome"}, {"B-place"}, 1}}), std::out_of_range);
}

TEST_F(Batches, HoldExamplesOfLikeLengthAndEachOnce) {
  const auto made = of_lengths({5, 3, 9, 3, 7});
  EXPECT_THAT(length_sorted_batches(made, 2),
              ElementsAre(ElementsAre(1, 3), ElementsAre(0, 4), ElementsAre(2)));
}

TEST_F(Batches, AreShuffledTheSameForTheSameSeedAndEpoch) {
  const auto made = of_lengths({1, 2, 3, 4, 5, 6, 7, 8, 9, 10});
  const auto batches = length_sorted_batches(made, 1);
  const auto order = shuffled(batches, 1, 0);
  EXPECT_EQ(order, shuffled(batches, 1, 0));
  EXPECT_NE(order, shuffled(batches, 1, 1));
  EXPECT_NE(order, shuffled(batches, 2, 0));
  EXPECT_NE(order, shuffled(batches, uint64_t{1} << 40 | 1, 0));
  auto sorted = order;
  std::sort(sorted.begin(), sorted.end());
  EXPECT_EQ(sorted, batches);
}

TEST_F(Batches, PadToTheLongestAndMaskThePadding) {
  const auto made = of_lengths({2, 4});
  const auto batch = collate(made, std::vector<std::size_t>{1, 0}, {.id = 3}, 20, torch::kCPU);
  EXPECT_TRUE(torch::equal(batch.ids, torch::tensor({{7, 7, 7, 7}, {7, 7, 3, 3}})));
  EXPECT_TRUE(torch::equal(batch.mask,
                           torch::tensor({{true, true, true, true}, {true, true, false, false}})));
  EXPECT_EQ(batch.tokens, 6);
}

TEST_F(Batches, RoundLengthsUpToAMultipleWithinTheModelsReach) {
  const auto made = of_lengths({9, 3});
  const std::vector<std::size_t> both{0, 1}, shorter{1};
  EXPECT_EQ(collate(made, both, {0, 8}, 20, torch::kCPU).ids.size(1), 16);
  EXPECT_EQ(collate(made, both, {0, 8}, 12, torch::kCPU).ids.size(1), 12);
  EXPECT_EQ(collate(made, shorter, {0, 8}, 20, torch::kCPU).ids.size(1), 8);
}

}  // namespace
}  // namespace bert_ner
