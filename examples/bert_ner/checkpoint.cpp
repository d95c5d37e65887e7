#include "checkpoint.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <map>
#include <system_error>
#include <utility>
#include <vector>

#include "atomic_file.h"
#include "input_error.h"
#include "json_file.h"
#include "safetensors.h"
#include "tensor_views.h"

namespace bert_ner {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using torch::optim::AdamWParamState;

constexpr const char* kLatest = "latest";
constexpr const char* kStateJson = "training_state.json";
constexpr const char* kStateTensors = "training_state.safetensors";
constexpr int kFormat = 1;

/// For what goes wrong before `latest` is moved.
[[noreturn]] void refuse(const fs::path& path, const std::string& what, int error) {
  throw InputError(path.string() + ": " + what + ": " + std::generic_category().message(error) +
                   "; the checkpoint that was there before is untouched");
}

/// Brings a folder's names to the disk. \returns 0 or the system's error.
int sync_folder(const fs::path& folder) {
  const int descriptor = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) return errno;
  const int error = fsync(descriptor) == 0 ? 0 : errno;
  close(descriptor);
  return error;
}

void require_sync(const fs::path& folder) {
  const int error = sync_folder(folder);
  if (error != 0) refuse(folder, "cannot be flushed to the disk", error);
}

/// A folder that disappears again unless it is kept.
class ScratchFolder {
 public:
  explicit ScratchFolder(fs::path path) : path_(std::move(path)) {
    std::error_code error;
    fs::remove_all(path_, error);
    fs::create_directories(path_, error);
    if (error) refuse(path_, "cannot be created", error.value());
  }
  ~ScratchFolder() {
    std::error_code ignored;
    if (!kept_) fs::remove_all(path_, ignored);
  }
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;

  const fs::path& path() const { return path_; }
  void rename_to(const fs::path& target) {
    if (std::rename(path_.c_str(), target.c_str()) != 0) refuse(target, "cannot be made", errno);
    kept_ = true;
  }

 private:
  fs::path path_;
  bool kept_ = false;
};

/// `name`, or `name`-2, `name`-3, ... where that is taken.
std::string free_name(const fs::path& dir, const std::string& name) {
  std::string candidate = name;
  for (int i = 2; fs::exists(fs::symlink_status(dir / candidate)); ++i) {
    candidate = name + "-" + std::to_string(i);
  }
  return candidate;
}

void point_latest_to(const fs::path& dir, const std::string& name) {
  const auto link = dir / kLatest, scratch = dir / ".latest.new";
  if (fs::exists(fs::symlink_status(link)) && !fs::is_symlink(link)) {
    throw InputError(link.string() +
                     ": is in the way of the link to the newest checkpoint; move it elsewhere");
  }
  std::error_code error;
  fs::remove(scratch, error);
  fs::create_symlink(name, scratch, error);
  if (error) refuse(link, "cannot be linked", error.value());
  if (std::rename(scratch.c_str(), link.c_str()) != 0) refuse(link, "cannot be replaced", errno);
}

/// Removes checkpoints other than `kept`, and what a killed process left half written.
void remove_others(const fs::path& dir, const std::string& kept) {
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(dir)) {
    const auto name = entry.path().filename().string();
    const bool partial = name.starts_with(".partial-");
    const bool checkpoint = name.starts_with("step-") && fs::exists(entry.path() / kStateJson);
    if (partial || (checkpoint && name != kept)) fs::remove_all(entry.path(), ignored);
  }
}

torch::Generator generator_of(torch::Device device) {
  return at::globalContext().defaultGenerator(device);
}

torch::Tensor random_state(torch::Device device) {
  auto generator = generator_of(device);
  const std::lock_guard<std::mutex> lock(generator.mutex());
  return generator.get_state();
}

/// Everything that moves besides the weights, by name.
std::map<std::string, torch::Tensor> state_tensors(const Trainer& trainer) {
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
  const auto device = trainer.model->parameters().front().device();
  tensors["random.cpu"] = random_state(torch::kCPU);
  if (!device.is_cpu()) tensors["random." + device.str()] = random_state(device);
  for (auto& [name, tensor] : tensors) tensor = tensor.cpu().contiguous();
  return tensors;
}

void write_state(const fs::path& folder, const Trainer& trainer, const RunRecord& record) {
  const auto tensors = state_tensors(trainer);
  std::vector<TensorView> views;
  for (const auto& [name, tensor] : tensors) views.push_back(view_of(name, tensor));
  static_cast<void>(write_safetensors(folder / kStateTensors, views));
  const json state = {{"format", kFormat},
                      {"data", record.data},
                      {"training", record.training},
                      {"device", record.device},
                      {"autocast", record.precision},
                      {"data_fingerprint", record.data_fingerprint},
                      {"epoch", record.position.epoch},
                      {"group", record.position.group},
                      {"steps", record.position.steps},
                      {"skipped", record.position.skipped}};
  AtomicFile file(folder / kStateJson);
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

void load_random_state(const StateReader& reader, torch::Device device) {
  const auto state = reader.read("random." + device.str(), torch::kUInt8);
  auto generator = generator_of(device);
  const std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_state(state);
}

}  // namespace

fs::path latest_checkpoint(const fs::path& dir) {
  const auto link = dir / kLatest;
  // Resolved once: a run that saves to the folder it resumed from moves the link under its feet.
  return fs::exists(link) ? fs::canonical(link) : dir;
}

AtomicFile::Durability replace_checkpoint(const fs::path& dir, const std::string& name,
                                          const std::function<void(const fs::path&)>& write) {
  std::error_code error;
  fs::create_directories(dir, error);
  if (error) refuse(dir, "cannot be created", error.value());
  ScratchFolder scratch(dir / (".partial-" + name));
  try {
    write(scratch.path());
  } catch (const InputError& failure) {
    throw InputError(std::string(failure.what()) + "; the checkpoint before is untouched");
  }
  require_sync(scratch.path());
  const auto final_name = free_name(dir, name);
  scratch.rename_to(dir / final_name);
  require_sync(dir);
  point_latest_to(dir, final_name);
  if (sync_folder(dir) != 0) return AtomicFile::Durability::unknown;
  remove_others(dir, final_name);
  return AtomicFile::Durability::durable;
}

AtomicFile::Durability save_checkpoint(const fs::path& dir, const Trainer& trainer,
                                       const ModelFiles& files, const Labels& labels,
                                       RunRecord record) {
  record.position = trainer.position;
  char name[32];
  std::snprintf(name, sizeof name, "step-%06lld", static_cast<long long>(record.position.steps));
  return replace_checkpoint(dir, name, [&](const fs::path& folder) {
    write_model_folder(folder, files, trainer.model, labels);
    write_state(folder, trainer, record);
  });
}

RunRecord read_run_record(const fs::path& folder) {
  const auto path = folder / kStateJson;
  if (!fs::exists(path)) {
    throw InputError(path.string() +
                     ": no such file; --resume takes a folder that --save wrote, and --model one "
                     "that holds a model alone");
  }
  const auto state = read_json(path);
  try {
    if (state.at("format") != kFormat) throw InputError(path.string() + ": is of another version");
    RunRecord record;
    state.at("data").get_to(record.data);
    state.at("training").get_to(record.training);
    state.at("device").get_to(record.device);
    state.at("autocast").get_to(record.precision);
    state.at("data_fingerprint").get_to(record.data_fingerprint);
    state.at("epoch").get_to(record.position.epoch);
    state.at("group").get_to(record.position.group);
    state.at("steps").get_to(record.position.steps);
    state.at("skipped").get_to(record.position.skipped);
    return record;
  } catch (const json::exception& error) {
    throw InputError(path.string() + ": is no state of a run (" + error.what() +
                     "); resume from a folder that --save wrote");
  }
}

void load_training_state(const fs::path& folder, const RunRecord& record, Trainer& trainer) {
  const StateReader reader(folder);
  load_optimizer(reader, trainer);
  if (trainer.scaler.is_enabled()) trainer.scaler.load_state_dict(reader.read_scalars("scaler."));
  trainer.schedule.set_applied_steps(
      reader.read("schedule.applied_steps", torch::kInt64, at::IntArrayRef{}).item<int64_t>());
  trainer.position = record.position;
  const auto device = trainer.model->parameters().front().device();
  load_random_state(reader, torch::kCPU);
  if (!device.is_cpu()) load_random_state(reader, device);
}

}  // namespace bert_ner
