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

void to_json(nlohmann::json& json, Precision precision) { json = flag_of(precision); }

void from_json(const nlohmann::json& json, Precision& precision) {
  precision = precision_of(json.get<std::string>());
}

}  // namespace bert_ner
