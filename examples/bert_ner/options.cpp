#include "options.h"

#include <array>

#include "input_error.h"

namespace bert_ner {
namespace {

struct PrecisionName {
  Precision precision;
  std::string flag, title;
};

const PrecisionName& name_of(Precision precision) {
  static const std::array<PrecisionName, 3> names{
      {{Precision::fp32, "fp32", "fp32"},
       {Precision::amp_no_scale, "amp-no-scale", "amp no scale"},
       {Precision::amp, "amp", "amp dynamic scale"}}};
  return names.at(static_cast<std::size_t>(precision));
}

Precision precision_of(const std::string& flag) {
  for (const auto precision : {Precision::fp32, Precision::amp_no_scale, Precision::amp}) {
    if (flag_of(precision) == flag) return precision;
  }
  throw InputError("the precision \"" + flag + "\" is none of fp32, amp-no-scale, amp");
}

}  // namespace

const std::string& flag_of(Precision precision) { return name_of(precision).flag; }
const std::string& title_of(Precision precision) { return name_of(precision).title; }

void to_json(nlohmann::json& json, const DataOptions& options) {
  json = {{"data", options.data},
          {"train", options.train},
          {"valid", options.valid},
          {"test", options.test},
          {"held_out", options.held_out}};
}

void from_json(const nlohmann::json& json, DataOptions& options) {
  json.at("data").get_to(options.data);
  json.at("train").get_to(options.train);
  json.at("valid").get_to(options.valid);
  json.at("test").get_to(options.test);
  json.at("held_out").get_to(options.held_out);
}

void to_json(nlohmann::json& json, const TrainingOptions& options) {
  json = {{"precision", flag_of(options.precision)},
          {"learning_rate", options.learning_rate},
          {"epochs", options.epochs},
          {"batch_size", options.batch_size},
          {"accumulate", options.accumulate},
          {"warmup", options.warmup},
          {"max_grad_norm", options.max_grad_norm},
          {"weight_decay", options.weight_decay},
          {"dropout", options.dropout},
          {"class_weights", options.class_weights},
          {"seed", options.seed}};
}

void from_json(const nlohmann::json& json, TrainingOptions& options) {
  options.precision = precision_of(json.at("precision").get<std::string>());
  json.at("learning_rate").get_to(options.learning_rate);
  json.at("epochs").get_to(options.epochs);
  json.at("batch_size").get_to(options.batch_size);
  json.at("accumulate").get_to(options.accumulate);
  json.at("warmup").get_to(options.warmup);
  json.at("max_grad_norm").get_to(options.max_grad_norm);
  json.at("weight_decay").get_to(options.weight_decay);
  json.at("dropout").get_to(options.dropout);
  json.at("class_weights").get_to(options.class_weights);
  json.at("seed").get_to(options.seed);
}

}  // namespace bert_ner
