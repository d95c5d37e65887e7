#include "run_inputs.h"

#include <string>

#include "input_error.h"
#include "machine.h"
#include "training.h"

namespace bert_ner {
namespace {

namespace fs = std::filesystem;

/// Lengths of batches are rounded up to it. Tensor cores want 8; on a CPU oneDNN compiles and keeps
/// kernels for each length: of the README's tweets 10 in place of 54, for 11 % more padding.
constexpr int64_t kLengthMultiple = 8;

std::string absolute(const std::string& path) {
  return path.empty() ? path : fs::absolute(path).lexically_normal().string();
}

BertConfig config_with_dropout(const ModelFiles& files, const TrainingOptions& training) {
  auto config = bert_config_of(files);
  config.hidden_dropout = config.attention_dropout = training.dropout;
  return config;
}

/// Whether the run can go on here exactly as it would have gone on there.
void check_record(const RunOrigin& origin, const RunInputs& inputs) {
  const auto& [record, position] = *origin.saved;
  const std::string run = origin.folder.string() + ": the run ";
  if (record.data_fingerprint != inputs.data.fingerprint() ||
      labels_of(inputs.files) != inputs.data.labels) {
    throw InputError(run + "had other sentences; put back the data it began with");
  }
  if (record.model_fingerprint != fingerprint_of(inputs.files, inputs.data.labels)) {
    throw InputError(run +
                     "had another config.json, vocab.txt or tokenizer; put back the files that it "
                     "saved");
  }
  if (position.group > inputs.epoch_steps ||
      position.steps != position.epoch * inputs.epoch_steps + position.group) {
    throw InputError(run +
                     "cannot have been at this place: its epoch, group and steps do not fit "
                     "together; resume from a folder that --save wrote");
  }
  if (record.device != origin.options.device) {
    throw InputError(run + "was on " + record.device + "; pass --device " + record.device);
  }
  if (record.autocast != describe(inputs.precision)) {
    throw InputError(run + "had autocast " + record.autocast + ", here it would be " +
                     describe(inputs.precision) + "; set MEZZO_AUTOCAST as it was");
  }
}

}  // namespace

RunOrigin origin_of(const RunOptions& options) {
  RunOrigin origin{options.model, std::nullopt, options};
  if (!options.resume.empty()) {
    origin.folder = options.resume;
    origin.saved = read_saved_run(origin.folder);
    origin.options.model = origin.saved->record.model;
    origin.options.data = origin.saved->record.data;
    origin.options.training = origin.saved->record.training;
    return origin;
  }
  auto& data = origin.options.data;
  for (auto* path : {&origin.options.model, &data.data, &data.train, &data.valid, &data.test}) {
    *path = absolute(*path);
  }
  return origin;
}

RunInputs::RunInputs(const RunOrigin& origin, int gpu)
    : device(find_device(origin.options.device, gpu)),
      precision(setting_for(origin.options.training.precision, device)),
      files(read_model_files(origin.folder)),
      config(config_with_dropout(files, origin.options.training)),
      tokenizer(load_tokenizer(files, config)),
      data(load_dataset(origin.options.data, origin.options.training.seed)) {
  const auto examples_of = [&](const std::vector<Sentence>& sentences) {
    return make_examples(sentences, tokenizer, data.labels, config.max_position_embeddings);
  };
  train = examples_of(data.train);
  valid = examples_of(data.valid);
  test = examples_of(data.test);
  batches = length_sorted_batches(train, origin.options.training.batch_size);
  epoch_steps = steps_per_epoch(batches.size(), origin.options.training.accumulate);
  if (origin.saved) check_record(origin, *this);
}

Padding RunInputs::padding() const { return {tokenizer.pad_id(), kLengthMultiple}; }

}  // namespace bert_ner
