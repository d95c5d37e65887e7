#include "checkpoint.h"

#include <array>
#include <cstring>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "atomic_file.h"
#include "fingerprint.h"
#include "formatted.h"
#include "input_error.h"
#include "json_file.h"
#include "safetensors.h"
#include "tensor_views.h"

namespace bert_ner {
namespace {

namespace fs = std::filesystem;
using mezzo::optim::AdamWParamState;
using nlohmann::json;

constexpr const char* kStateTensors = "training_state.safetensors";
constexpr int kFormat = 1;

torch::Generator generator_of(torch::Device device) {
  return at::globalContext().defaultGenerator(device);
}

torch::Tensor random_state(torch::Device device) {
  auto generator = generator_of(device);
  const std::lock_guard<std::mutex> lock(generator.mutex());
  return generator.get_state();
}

/// "cpu", "cuda:0.rank1". A rank's only GPU is number 0, whichever it has on its machine.
std::string random_state_name(torch::Device device, int rank) {
  return (device.is_cpu() ? "cpu" : "cuda:0") +
         (rank == 0 ? std::string() : ".rank" + std::to_string(rank));
}

/// Everything that moves besides the weights, by name.
std::map<std::string, torch::Tensor> state_tensors(const Trainer& trainer,
                                                   const RandomStates& random) {
  std::map<std::string, torch::Tensor> tensors;
  const auto& states = trainer.optimizer.state();
  for (const auto& parameter : trainer.model->named_parameters()) {
    const auto found = states.find(parameter.value().unsafeGetTensorImpl());
    if (found == states.end()) continue;
    const auto& state = static_cast<const AdamWParamState&>(*found->second);
    const std::string name = "optimizer." + parameter.key();
    tensors[name + ".exp_avg"] = state.exp_avg();
    tensors[name + ".exp_avg_sq"] = state.exp_avg_sq();
    tensors[name + ".step"] = torch::tensor(state.step(), torch::kInt64);
  }
  for (const auto& [key, value] : trainer.scaler.state_dict()) {
    tensors["scaler." + key] = torch::tensor(value, torch::kFloat64);
  }
  tensors["schedule.applied_steps"] =
      torch::tensor(trainer.schedule.applied_steps(), torch::kInt64);
  for (const auto& [name, state] : random) tensors["random." + name] = state;
  for (auto& [name, tensor] : tensors) tensor = tensor.cpu().contiguous();
  return tensors;
}

void write_state(const fs::path& folder, const Trainer& trainer, const RandomStates& random) {
  const auto tensors = state_tensors(trainer, random);
  std::vector<TensorView> views;
  for (const auto& [name, tensor] : tensors) views.push_back(view_of(name, tensor));
  static_cast<void>(write_safetensors(folder / kStateTensors, views));
}

std::map<std::string, uint64_t> fingerprints_of(const fs::path& folder) {
  std::map<std::string, uint64_t> fingerprints;
  for (const auto& entry : fs::directory_iterator(folder)) {
    fingerprints[entry.path().filename().string()] = fingerprint_of_file(entry.path());
  }
  return fingerprints;
}

void write_record(const fs::path& folder, const RunRecord& record) {
  json state = record;
  state["format"] = kFormat;
  AtomicFile file(folder / kRunRecordFile);
  file.write(state.dump(2) + "\n");
  static_cast<void>(file.commit());
}

/// The tensors of a checkpoint, asked for by name.
class StateReader {
 public:
  explicit StateReader(const fs::path& folder)
      : path_((folder / kStateTensors).string()), file_(folder / kStateTensors) {}

  bool has(const std::string& name) const { return file_.find(name) != nullptr; }

  torch::Tensor read(const std::string& name, torch::ScalarType type,
                     std::optional<at::IntArrayRef> shape = std::nullopt) const {
    const auto* view = file_.find(name);
    if (view == nullptr) fail("lacks " + name);
    auto tensor = to_tensor(*view);
    if (tensor.scalar_type() != type || (shape && tensor.sizes() != *shape)) {
      fail(name + " has another shape or dtype than this model's");
    }
    return tensor;
  }

  std::map<std::string, double> read_scalars(const std::string& prefix) const {
    std::map<std::string, double> scalars;
    for (const auto& view : file_.tensors()) {
      if (!view.name.starts_with(prefix)) continue;
      const auto value = read(view.name, torch::kFloat64, at::IntArrayRef{});
      scalars[view.name.substr(prefix.size())] = value.item<double>();
    }
    return scalars;
  }

  [[noreturn]] void fail(const std::string& what) const {
    throw InputError(path_ + ": " + what + "; resume from a folder that --save wrote");
  }

 private:
  std::string path_;
  SafetensorsFile file_;
};

void load_optimizer(const StateReader& reader, Trainer& trainer) {
  for (const auto& parameter : trainer.model->named_parameters()) {
    const auto& value = parameter.value();
    const std::string name = "optimizer." + parameter.key();
    if (!reader.has(name + ".step")) continue;  // never had a gradient
    const auto moment = [&](const char* which) {
      return reader.read(name + which, value.scalar_type(), value.sizes()).to(value.device());
    };
    auto state = std::make_unique<AdamWParamState>();
    state->step(reader.read(name + ".step", torch::kInt64, at::IntArrayRef{}).item<int64_t>());
    state->exp_avg(moment(".exp_avg"));
    state->exp_avg_sq(moment(".exp_avg_sq"));
    trainer.optimizer.state()[value.unsafeGetTensorImpl()] = std::move(state);
  }
}

int ranks_of(const StateReader& reader) {
  int ranks = 1;
  while (reader.has("random." + random_state_name(torch::kCPU, ranks))) ++ranks;
  return ranks;
}

void load_random_state(const StateReader& reader, torch::Device device, int rank) {
  const auto state = reader.read("random." + random_state_name(device, rank), torch::kUInt8);
  auto generator = generator_of(device);
  const std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_state(state);
}

/// The ranges that the command line keeps; someone may have edited the file since.
void check_ranges(const RunRecord& record, const fs::path& path) {
  const auto require = [&](bool in_range, const char* field) {
    if (in_range) return;
    throw InputError(path.string() + ": \"" + field +
                     "\" is out of range; resume from a folder that --save wrote");
  };
  const auto& training = record.training;
  constexpr int64_t kMost = 1'000'000'000;
  const auto is_count = [](int64_t value) { return value >= 1 && value <= kMost; };
  const auto is_within = [](double value, double low, double high) {
    return value >= low && value <= high;
  };
  require(is_count(training.epochs), "epochs");
  require(is_count(training.batch_size), "batch_size");
  require(is_count(training.accumulate), "accumulate");
  require(is_within(training.learning_rate, 0, 10), "learning_rate");
  require(is_within(training.warmup, 0, 1), "warmup");
  require(is_within(training.dropout, 0, 0.99), "dropout");
  require(is_within(training.max_grad_norm, 1e-9, 1e9), "max_grad_norm");
  require(is_within(training.weight_decay, 0, 1), "weight_decay");
  require(is_within(record.data.held_out, 0, 1), "held_out");
  const auto& position = record.position;
  require(position.epoch >= 0 && position.epoch <= training.epochs, "epoch");
  require(position.group >= 0, "group");
  require(position.steps >= 0, "steps");
}

}  // namespace

RandomStates random_states(torch::Device device, const Ranks& ranks) {
  RandomStates states;
  const auto gather = [&](torch::Device of) {
    const auto own = random_state(of);
    const auto* const bytes = static_cast<const char*>(own.const_data_ptr());
    int rank = 0;
    for (const auto& text : ranks.texts_of_all({bytes, own.nbytes()})) {
      auto& state = states[random_state_name(of, rank++)];
      state = torch::empty({static_cast<int64_t>(text.size())}, torch::kUInt8);
      std::memcpy(state.mutable_data_ptr(), text.data(), text.size());
    }
  };
  gather(torch::kCPU);
  if (!device.is_cpu()) gather(device);
  return states;
}

void seed_rank(uint64_t seed, int64_t steps, int rank) {
  const auto halves = [](uint64_t value) {
    constexpr int kHalf = 32;
    return std::array{static_cast<uint32_t>(value), static_cast<uint32_t>(value >> kHalf)};
  };
  const auto [seed_low, seed_high] = halves(seed);
  const auto [steps_low, steps_high] = halves(static_cast<uint64_t>(steps));
  std::seed_seq words{seed_low, seed_high, steps_low, steps_high, static_cast<uint32_t>(rank)};
  torch::manual_seed(std::mt19937_64(words)());
}

AtomicFile::Durability save_checkpoint(const fs::path& dir, const Trainer& trainer,
                                       const ModelFiles& files, const Labels& labels,
                                       const RandomStates& random, RunRecord record) {
  record.position = trainer.position;
  const auto name = formatted("step-%06lld", static_cast<long long>(record.position.steps));
  return replace_checkpoint(dir, name, [&](const fs::path& folder) {
    write_model_folder(folder, files, trainer.model, labels);
    write_state(folder, trainer, random);
    record.files = fingerprints_of(folder);
    write_record(folder, record);
  });
}

RunRecord read_run_record(const fs::path& folder) {
  const auto path = folder / kRunRecordFile;
  if (!fs::exists(path)) {
    throw InputError(path.string() +
                     ": no such file; --resume takes a folder that --save wrote, and --model one "
                     "that holds a model alone");
  }
  const auto state = read_json(path);
  try {
    if (state.at("format") != kFormat) {
      throw InputError(path.string() + ": is of another version of this program (format " +
                       state.at("format").dump() + ", here " + std::to_string(kFormat) +
                       "); resume it with that one, or start a run with --model");
    }
    auto record = state.get<RunRecord>();
    check_ranges(record, path);
    return record;
  } catch (const json::exception& error) {
    throw InputError(path.string() + ": is no state of a run (" + error.what() +
                     "); resume from a folder that --save wrote");
  }
}

void check_files(const fs::path& folder, const RunRecord& record) {
  for (const auto& [name, fingerprint] : record.files) {
    if (fingerprint_of_file(folder / name) == fingerprint) continue;
    throw InputError((folder / name).string() + ": is not the file that was saved together with " +
                     kRunRecordFile +
                     "; resume from another checkpoint, or start anew with --model");
  }
}

void load_training_state(const fs::path& folder, const RunRecord& record, Trainer& trainer,
                         const Ranks& ranks) {
  const StateReader reader(folder);
  load_optimizer(reader, trainer);
  if (trainer.scaler.is_enabled()) trainer.scaler.load_state_dict(reader.read_scalars("scaler."));
  const auto applied =
      reader.read("schedule.applied_steps", torch::kInt64, at::IntArrayRef{}).item<int64_t>();
  if (applied < 0 || applied > record.position.steps) {
    reader.fail("schedule.applied_steps is out of range");
  }
  trainer.schedule.set_applied_steps(applied);
  trainer.position = record.position;
  const auto device = trainer.model->parameters().front().device();
  if (ranks_of(reader) != ranks.size()) {
    return seed_rank(record.training.seed, record.position.steps, ranks.rank());
  }
  load_random_state(reader, torch::kCPU, ranks.rank());
  if (!device.is_cpu()) load_random_state(reader, device, ranks.rank());
}

}  // namespace bert_ner
