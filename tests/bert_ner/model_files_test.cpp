#include "model_files.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sys/stat.h>

#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>

#include "text.h"
#include "tiny_bert.h"

namespace bert_ner {
namespace {

using test::copy_tiny_bert;
using test_support::Scratch;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

/// The message of the InputError that `call` throws, or what went wrong instead.
std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const InputError& error) {
    return error.what();
  }
  return "no error";
}

std::string load_error(const std::filesystem::path& folder) {
  return error_of([&] { test::load_tiny_bert(folder); });
}

/// Rewrites the weights of a folder, each tensor as `change` gives it back (no name: left out).
void rewrite_weights(const std::filesystem::path& folder,
                     const std::function<void(std::string& name, torch::Tensor& tensor)>& change) {
  NamedTensors tensors;
  for (auto [name, tensor] : read_safetensors(folder / "model.safetensors").tensors) {
    change(name, tensor);
    if (!name.empty()) tensors.emplace_back(name, tensor);
  }
  write_safetensors(folder / "model.safetensors", tensors);
}

void change_config(const std::filesystem::path& folder, const char* field,
                   const nlohmann::json& value) {
  const auto path = folder / "config.json";
  auto config = nlohmann::json::parse(std::ifstream(path));
  if (value.is_null()) {
    config.erase(field);
  } else {
    config[field] = value;
  }
  std::ofstream(path) << config.dump();
}

torch::Tensor logits_of(BertForTokenClassification model) {
  return model(torch::arange(12).view({2, 6}));
}

TEST(ModelFiles, LoadsNamesWithoutThePrefixAndTheOlderLayerNorms) {
  const Scratch scratch;
  const auto folder = copy_tiny_bert(scratch);
  rewrite_weights(folder, [](std::string& name, torch::Tensor&) {
    if (name.starts_with("bert.")) name.erase(0, 5);
    if (const auto at = name.find("LayerNorm.weight"); at != name.npos) {
      name.replace(at, name.npos, "LayerNorm.gamma");
    }
    if (const auto at = name.find("LayerNorm.bias"); at != name.npos) {
      name.replace(at, name.npos, "LayerNorm.beta");
    }
  });
  EXPECT_TRUE(
      torch::equal(logits_of(test::load_tiny_bert(folder)), logits_of(test::load_tiny_bert())));
}

TEST(ModelFiles, ConvertsOtherFloatingPointDtypes) {
  const Scratch scratch;
  const auto folder = copy_tiny_bert(scratch);
  rewrite_weights(folder,
                  [](std::string&, torch::Tensor& tensor) { tensor = tensor.to(torch::kHalf); });
  const auto difference =
      logits_of(test::load_tiny_bert(folder)) - logits_of(test::load_tiny_bert());
  EXPECT_LT(difference.abs().max().item<double>(), 0.05);
  EXPECT_GT(difference.abs().max().item<double>(), 0.0);
}

TEST(ModelFiles, LeavesOtherHeadsAloneAndNamesThem) {
  const Scratch scratch;
  const auto folder = copy_tiny_bert(scratch);
  rewrite_weights(folder, [](std::string& name, torch::Tensor&) {
    if (name == "classifier.bias") name = "pooler.dense.bias";
    if (name == "classifier.weight") name = "cls.predictions.transform.dense.weight";
  });
  const auto files = read_model_files(folder);
  BertForTokenClassification model(bert_config_of(files), 7);
  const auto classifier = model->classifier->weight.clone();
  EXPECT_THAT(
      load_weights(model, folder, Head::fresh),
      testing::UnorderedElementsAre("pooler.dense.bias", "cls.predictions.transform.dense.weight"));
  EXPECT_TRUE(torch::equal(model->classifier->weight, classifier));
  EXPECT_THAT(load_error(folder),
              AllOf(HasSubstr("model.safetensors: lacks "), HasSubstr("classifier.weight")));
}

TEST(ModelFiles, NamesTensorsOfAnotherShape) {
  const Scratch scratch;
  const auto folder = copy_tiny_bert(scratch);
  rewrite_weights(folder, [](std::string& name, torch::Tensor& tensor) {
    if (name.ends_with("layer.1.output.dense.weight")) tensor = tensor.narrow(1, 0, 23);
  });
  EXPECT_THAT(load_error(folder),
              AllOf(HasSubstr("layer.1.output.dense.weight is [16, 23]"),
                    HasSubstr("config.json makes it [16, 24]"), HasSubstr("of the same model?")));
}

TEST(ModelFiles, NamesMissingAndUnknownTensors) {
  const Scratch scratch;
  const auto one_layer_more = copy_tiny_bert(scratch, "more");
  change_config(one_layer_more, "num_hidden_layers", 3);
  EXPECT_THAT(load_error(one_layer_more),
              AllOf(HasSubstr("lacks bert.encoder.layer.2."), HasSubstr("and 11 more")));
  const auto one_layer_less = copy_tiny_bert(scratch, "less");
  change_config(one_layer_less, "num_hidden_layers", 1);
  EXPECT_THAT(load_error(one_layer_less),
              AllOf(HasSubstr("does not provide for"), HasSubstr("bert.encoder.layer.1.")));
}

TEST(ModelFiles, RefusesWeightsThatAreNoNumbersWithAPoint) {
  const Scratch scratch;
  const auto folder = copy_tiny_bert(scratch);
  rewrite_weights(folder, [](std::string& name, torch::Tensor& tensor) {
    if (name == "classifier.bias") tensor = tensor.to(torch::kInt64);
  });
  EXPECT_THAT(load_error(folder), HasSubstr("classifier.bias is of dtype I64"));
}

TEST(ModelFiles, SaysWhatIsWrongWithTheConfiguration) {
  struct Case {
    const char* field;
    nlohmann::json value;
    const char* message;
  };
  const std::vector<Case> cases{
      {"hidden_size", nullptr, "\"hidden_size\" is missing"},
      {"hidden_size", "16", "must be a whole number from 1 to 2^31"},
      {"hidden_size", 18, "must be a multiple of num_attention_heads, 4"},
      {"num_hidden_layers", 0, "must be a whole number from 1"},
      {"vocab_size", 1e30, "must be a whole number from 1"},
      {"vocab_size", 7, "vocab.txt: has 82 tokens, config.json's vocab_size is 7"},
      {"hidden_dropout_prob", 2.5, "must be a number from 0 to 1"},
      {"hidden_act", "swish", "must be one of: gelu, gelu_new, gelu_pytorch_tanh, relu"},
      {"max_position_embeddings", 2, "must be 3 or more"},
      {"model_type", "roberta", "must be one of: bert"},
      {"position_embedding_type", "relative_key", "must be one of: absolute"}};
  for (const auto& [field, value, message] : cases) {
    const Scratch scratch;
    const auto folder = copy_tiny_bert(scratch);
    change_config(folder, field, value);
    const auto error = error_of([&] {
      const auto files = read_model_files(folder);
      load_tokenizer(files, bert_config_of(files));
    });
    EXPECT_THAT(error, AllOf(HasSubstr(folder.string()), HasSubstr(message))) << field;
  }
}

TEST(ModelFiles, ComparesSizesBeforeItTakesMemoryForThem) {
  for (const char* field : {"num_hidden_layers", "hidden_size", "vocab_size",
                            "max_position_embeddings", "type_vocab_size", "intermediate_size"}) {
    const Scratch scratch;
    const auto folder = copy_tiny_bert(scratch);
    const auto check = [&] { check_sizes(bert_config_of(read_model_files(folder)), folder); };
    EXPECT_EQ(error_of(check), "no error");
    change_config(folder, field, 1'000'000);
    EXPECT_THAT(error_of(check), AllOf(HasSubstr("model.safetensors: holds 5701 numbers"),
                                       HasSubstr(" in its matrices alone")))
        << field;
  }
}

TEST(ModelFiles, RefusesWhatIsNoFileInTheVocabularysPlace) {
  const Scratch scratch;
  const auto folder = copy_tiny_bert(scratch);
  std::filesystem::remove(folder / "vocab.txt");
  ASSERT_EQ(mkfifo((folder / "vocab.txt").c_str(), 0600), 0);  // nobody will write to it
  EXPECT_THAT(error_of([&] { read_model_files(folder); }),
              HasSubstr("vocab.txt: is not a regular file"));
}

TEST(ModelFiles, SaysWhatIsMissing) {
  const Scratch scratch;
  EXPECT_THAT(error_of([&] { read_model_files(scratch / "nowhere"); }),
              HasSubstr("is not a folder"));
  const auto folder = copy_tiny_bert(scratch);
  std::filesystem::remove(folder / "model.safetensors");
  EXPECT_THAT(load_error(folder),
              AllOf(HasSubstr("model.safetensors: no such file"), HasSubstr("pytorch_model.bin"),
                    HasSubstr("AutoModel.from_pretrained")));
  std::filesystem::remove(folder / "vocab.txt");
  EXPECT_THAT(error_of([&] { read_model_files(folder); }), HasSubstr("vocab.txt"));
  change_config(folder, "id2label", nullptr);
  const auto config =
      ModelFiles{folder, nlohmann::json::parse(std::ifstream(folder / "config.json")), {}};
  EXPECT_THAT(error_of([&] { labels_of(config); }),
              AllOf(HasSubstr("has no \"id2label\""), HasSubstr("saved with --save")));
}

TEST(ModelFiles, WritesAFolderThatItReadsBack) {
  const Scratch scratch;
  const auto files = read_model_files(test::tiny_bert_folder());
  const Labels labels({"O", "B-x", "I-x"});
  BertForTokenClassification model(bert_config_of(files), 3);
  model->eval();
  write_model_folder(scratch.path(), files, model, labels);

  const auto again = read_model_files(scratch.path());
  EXPECT_EQ(again.texts, files.texts);
  EXPECT_EQ(labels_of(again), labels);
  BertForTokenClassification loaded(bert_config_of(again), 3);
  EXPECT_THAT(load_weights(loaded, scratch.path(), Head::from_file), ElementsAre());
  loaded->eval();
  EXPECT_TRUE(torch::equal(logits_of(loaded), logits_of(model)));
}

}  // namespace
}  // namespace bert_ner
