#include "options.h"

#include <array>

#include "formatted.h"
#include "input_error.h"

namespace bert_ner {
namespace {

struct PrecisionName {
  Precision precision;
  std::string flag, title;
};

constexpr std::array kPrecisions = {Precision::fp32,
                                    Precision::amp_no_scale,
                                    Precision::amp,
                                    Precision::bf16_split_master,
                                    Precision::bf16_stochastic,
                                    Precision::fp16};

const PrecisionName& name_of(Precision precision) {
  static const std::array<PrecisionName, kPrecisions.size()> names{
      {{Precision::fp32, "fp32", "fp32"},
       {Precision::amp_no_scale, "amp-no-scale", "amp no scale"},
       {Precision::amp, "amp", "amp dynamic scale"},
       {Precision::bf16_split_master, "bf16-split-master", "bf16 + split master"},
       {Precision::bf16_stochastic, "bf16-stochastic", "bf16 + stochastic rounding"},
       {Precision::fp16, "fp16", "fp16 dynamic scale"}}};
  return names.at(static_cast<std::size_t>(precision));
}

Precision precision_of(const std::string& flag) {
  std::vector<std::string> flags;
  for (const auto precision : kPrecisions) {
    if (flag_of(precision) == flag) return precision;
    flags.push_back(flag_of(precision));
  }
  throw InputError("the precision \"" + flag + "\" is none of " + joined(flags));
}

}  // namespace

std::span<const Precision> all_precisions() { return kPrecisions; }

const std::string& flag_of(Precision precision) { return name_of(precision).flag; }
const std::string& title_of(Precision precision) { return name_of(precision).title; }

bool scales_loss(Precision precision) {
  return precision == Precision::amp || precision == Precision::fp16;
}

bool stores_bfloat16(Precision precision) {
  return precision == Precision::bf16_split_master || precision == Precision::bf16_stochastic;
}

void to_json(nlohmann::json& json, Precision precision) { json = flag_of(precision); }

void from_json(const nlohmann::json& json, Precision& precision) {
  precision = precision_of(json.get<std::string>());
}

}  // namespace bert_ner
