#include <mezzo/checkpoint/checkpoint.h>
#include <mezzo/checkpoint/detail/archive_conversion.h>
#include <mezzo/checkpoint/detail/checkpoint_file.h>
#include <mezzo/checkpoint/detail/load_plan.h>
#include <mezzo/checkpoint/detail/root_dict.h>
#include <mezzo/optim/adamw.h>
#include <mezzo/optim/adamw8bit.h>
#include <mezzo/optim/detail/optimizer_archive.h>
#include <mezzo/optim/lamb.h>
#include <mezzo/optim/lion.h>
#include <mezzo/optim/master_weights.h>
#include <mezzo/optim/muon.h>
#include <mezzo/optim/sgd.h>

#include <c10/util/Exception.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "../support/pickle_bytes.h"
#include "../support/temp_dir.h"
#include "targets.h"

namespace fuzz {
namespace {

namespace bytes = test_support::pickle_bytes;
using test_support::pickle_bytes::byte;
using test_support::pickle_bytes::text;

/// A model of two matrices and an optimizer after one step.
struct Training {
  torch::nn::Linear model{torch::nn::LinearOptions(3, 2).bias(false)};
  torch::nn::Linear second{torch::nn::LinearOptions(3, 2).bias(false)};
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  std::unique_ptr<mezzo::MasterWeights> masters;
  mezzo::TrainingState state;
  std::string initial_bytes;

  void step() {
    for (const auto& layer : {model, second}) {
      layer->weight.mutable_grad() = at::ones_like(layer->weight);
    }
    masters ? (void)masters->step() : (void)optimizer->step();
  }
};

using Groups = std::vector<torch::optim::OptimizerParamGroup>;
using Fields = std::vector<std::pair<std::string, std::string>>;

std::string float_value(double value) {
  std::uint64_t number = 0;
  std::memcpy(&number, &value, sizeof number);
  const std::string low_first = bytes::number(number, 8);
  return "G" + std::string(low_first.rbegin(), low_first.rend());
}
std::string small_int(int value) { return "K" + byte(value); }
constexpr const char* kFalse = "\x89";

/// A class of optimizers and the contents of its state dict.
struct OptimizerClass {
  const char* name;
  bool is_mezzo_class;
  std::function<std::unique_ptr<torch::optim::Optimizer>(Groups)> make;
  std::vector<const char*> moments;
  Fields options;
  bool has_masters = false;
};

template <class Optimizer, class Options>
auto factory(Options options) {
  return [options](Groups groups) -> std::unique_ptr<torch::optim::Optimizer> {
    return std::make_unique<Optimizer>(std::move(groups), options);
  };
}

const std::vector<OptimizerClass>& optimizer_classes() {
  namespace mezzo_optim = mezzo::optim;
  namespace torch_optim = torch::optim;
  static const std::string betas = float_value(0.9) + float_value(0.99) + "\x86";
  static const Fields adam{{"betas", betas},
                           {"eps", float_value(1e-8)},
                           {"weight_decay", float_value(0)},
                           {"amsgrad", kFalse}};
  static const Fields sgd{{"momentum", float_value(0.9)},
                          {"dampening", float_value(0)},
                          {"weight_decay", float_value(0)},
                          {"nesterov", kFalse}};
  static const std::vector<OptimizerClass> all{
      {"AdamW",
       true,
       factory<mezzo_optim::AdamW>(torch_optim::AdamWOptions(1e-3)),
       {"exp_avg", "exp_avg_sq"},
       adam},
      {"Adam",
       true,
       factory<mezzo_optim::Adam>(torch_optim::AdamOptions(1e-3)),
       {"exp_avg", "exp_avg_sq"},
       adam},
      {"SGD",
       true,
       factory<mezzo_optim::SGD>(torch_optim::SGDOptions(1e-3).momentum(0.9)),
       {"momentum_buffer"},
       sgd},
      {"Lion",
       true,
       factory<mezzo_optim::Lion>(mezzo_optim::LionOptions(1e-3)),
       {"exp_avg"},
       {{"betas", betas}, {"weight_decay", float_value(0)}}},
      {"LAMB",
       true,
       factory<mezzo_optim::LAMB>(mezzo_optim::LAMBOptions(1e-3)),
       {"exp_avg", "exp_avg_sq"},
       {{"betas", betas},
        {"eps", float_value(1e-8)},
        {"weight_decay", float_value(0)},
        {"bias_correction", kFalse},
        {"use_nvlamb", kFalse}}},
      {"Muon",
       true,
       factory<mezzo_optim::Muon>(mezzo_optim::MuonOptions(1e-3)),
       {"momentum_buffer"},
       {{"weight_decay", float_value(0)},
        {"momentum", float_value(0.9)},
        {"nesterov", kFalse},
        {"ns_coefficients", float_value(3) + float_value(-4) + float_value(2) + "\x87"},
        {"eps", float_value(1e-7)},
        {"ns_steps", small_int(5)},
        {"adjust_lr_fn", text("original")}}},
      {"AdamW8bit",
       true,
       factory<mezzo_optim::AdamW8bit>(torch_optim::AdamWOptions(1e-3)),
       {"exp_avg", "exp_avg_sq"},
       adam},
      {"AdamW",
       false,
       factory<torch_optim::AdamW>(torch_optim::AdamWOptions(1e-3)),
       {"exp_avg", "exp_avg_sq"},
       adam},
      {"Adam",
       false,
       factory<torch_optim::Adam>(torch_optim::AdamOptions(1e-3)),
       {"exp_avg", "exp_avg_sq"},
       adam},
      {"SGD",
       false,
       factory<torch_optim::SGD>(torch_optim::SGDOptions(1e-3).momentum(0.9)),
       {"momentum_buffer"},
       sgd},
      {"RMSprop",
       false,
       factory<torch_optim::RMSprop>(torch_optim::RMSpropOptions(1e-3)),
       {"square_avg"},
       {{"alpha", float_value(0.9)},
        {"eps", float_value(1e-8)},
        {"weight_decay", float_value(0)},
        {"momentum", float_value(0)},
        {"centered", kFalse}}},
      {"Adagrad",
       false,
       factory<torch_optim::Adagrad>(torch_optim::AdagradOptions(1e-3)),
       {"sum"},
       {{"lr_decay", float_value(0)},
        {"weight_decay", float_value(0)},
        {"initial_accumulator_value", float_value(0)},
        {"eps", float_value(1e-8)}}},
      {"SGD",
       false,
       factory<torch_optim::SGD>(torch_optim::SGDOptions(1e-3).momentum(0.9)),
       {"momentum_buffer"},
       sgd,
       /*has_masters=*/true},
  };
  return all;
}

/// Writes a pickle. `decisions` may replace any part of a valid one.
class Writer {
 public:
  explicit Writer(std::string_view& decisions) : decisions_(decisions) {}

  bool is_changed = false;  ///< whether any part was replaced

  /// Returns `value` or a replacement.
  std::string maybe_replace(const std::string& value) {
    const unsigned char choice = take_byte(decisions_);
    if (choice < 244) return value;
    is_changed = true;
    switch (choice % 4) {
      case 0:
        return "";
      case 1:
        return value + value;
      default:
        return any_object(0);
    }
  }

  std::string dict(const Fields& fields) {
    std::string all = take_byte(decisions_) < 250 ? "}" : bytes::empty_ordered_dict();
    for (const auto& [key, value] : fields)
      all += maybe_replace(text(key)) + maybe_replace(value) + "s";
    return maybe_replace(all);
  }

  std::string tensor(const std::string& type, int key, std::vector<std::int64_t> sizes) {
    std::vector<std::int64_t> strides(sizes.size(), 1);
    std::int64_t count = 1;
    for (std::size_t i = sizes.size(); i > 0; --i)
      strides[i - 1] = std::exchange(count, count * sizes[i - 1]);
    for (std::int64_t& size : sizes) size = maybe_replace_number(size);
    for (std::int64_t& stride : strides) stride = maybe_replace_number(stride);
    const std::string storage =
        bytes::storage(take_byte(decisions_) < 248 ? type : any_type(), std::to_string(key % 6),
                       maybe_replace_number(count));
    return maybe_replace(
        bytes::tensor(maybe_replace(storage), maybe_replace_number(0), sizes, strides));
  }

  std::string any_object(int depth) {
    const unsigned char choice = take_byte(decisions_);
    switch (depth > 80 ? choice % 6 : choice % 24) {
      case 0:
        return small_int(choice);
      case 1:
        return float_value(choice / 16.0 - 8);
      case 2:
        return text(std::string(choice, 'a'));
      case 3:
        return choice % 2 == 0 ? "N" : "\x88";
      case 4:
        return bytes::integer(maybe_replace_number(choice));
      case 5:
        return "h" + byte(choice % 8);
      case 6:
      case 7:
        return container("](", ")e", choice % 5, depth).replace(2, 0, "");
      case 8:
      case 9:
        return container("(", "t", choice % 4, depth);
      case 10:
      case 11:
        return container("}(", "u", 2 * (choice % 3), depth);
      case 12:
        return any_object(depth + 1) + "q" + byte(choice % 8);
      case 13:
        return "]q" + byte(choice % 8) + any_object(depth + 1) + "a";
      case 14:
        return tensor(any_type(), choice, {choice % 4, 2});
      case 15:
        return sparse(choice, depth);
      case 16:
        return quantized(choice, depth);
      case 17:
        return bytes::global("torch._utils", "_rebuild_parameter") +
               container("(", "t", choice % 4, depth) + "R";
      case 18:
        return any_global(choice) + container("(", "t", choice % 4, depth) + "R";
      case 19:
        return any_global(choice);
      case 20:
        return any_object(depth + 1) + any_object(depth + 1) + "b";
      case 21:
        return exponential(choice % 40);
      case 22:
        return nesting(choice);
      default:
        return std::string(1, static_cast<char>(take_byte(decisions_)));
    }
  }

 private:
  std::int64_t maybe_replace_number(std::int64_t number) {
    const unsigned char choice = take_byte(decisions_);
    constexpr std::array<std::int64_t, 8> kEdgeCases{
        0, -1, 1, 255, 1 << 30, std::int64_t{1} << 40, INT64_MAX, INT64_MIN};
    is_changed = is_changed || choice >= 248;
    return choice < 248 ? number : kEdgeCases[choice - 248];
  }
  std::string any_type() {
    is_changed = true;
    constexpr std::array kTypes{"Float", "Double",       "Half",  "BFloat16", "Long",     "Byte",
                                "Bool",  "ComplexFloat", "QInt8", "Short",    "QUInt4x2", "No"};
    return kTypes[take_byte(decisions_) % kTypes.size()] + std::string("Storage");
  }
  std::string container(const char* begin, const char* end, int count, int depth) {
    std::string all = begin[0] == ']' ? "](" : begin;
    for (int i = 0; i < count; ++i) all += any_object(depth + 1);
    return all + (end[0] == ')' ? "e" : end);
  }
  std::string sparse(int choice, int depth) {
    return bytes::global("torch._utils", "_rebuild_sparse_tensor") + "(" + small_int(choice % 3) +
           bytes::tuple({maybe_replace_number(2), maybe_replace_number(2)}) + kFalse +
           tensor("LongStorage", 4, {2, 1}) + tensor("FloatStorage", 0, {1}) +
           (choice % 7 == 0 ? any_object(depth + 1) : "") + "tR";
  }
  std::string quantized(int choice, int depth) {
    const std::string parameters = choice % 2 == 0 ? float_value(0.5) + small_int(0)
                                                   : tensor("FloatStorage", 0, {choice % 5}) +
                                                         tensor("LongStorage", 4, {choice % 5}) +
                                                         small_int(choice % 3);
    return maybe_replace(bytes::quantized(
        bytes::storage("QInt8Storage", "0", 4), {maybe_replace_number(4)},
        {maybe_replace_number(1)}, choice % 2 == 0 ? "per_tensor_affine" : "per_channel_affine",
        choice % 9 == 0 ? any_object(depth + 1) : parameters));
  }
  static std::string any_global(int choice) {
    constexpr std::array<std::pair<const char*, const char*>, 9> kNames{
        {{"os", "system"},
         {"torch", "FloatStorage"},
         {"torch._utils", "_rebuild_tensor_v2"},
         {"torch._utils", "_rebuild_qtensor"},
         {"collections", "OrderedDict"},
         {"torch._utils", "_rebuild_sparse_tensor"},
         {"torch.jit._pickle", "restore_type_tag"},
         {"torch", "per_tensor_affine"},
         {"torch._utils", "_rebuild_device_tensor_from_numpy"}}};
    const auto& [module, name] = kNames[static_cast<std::size_t>(choice) % kNames.size()];
    return bytes::global(module, name);
  }
  /// A tuple whose size doubles with each level, by references to the level before.
  static std::string exponential(int levels) {
    std::string all = ")q" + byte(0);
    for (int i = 1; i <= levels; ++i)
      all += "h" + byte(i - 1) + "h" + byte(i - 1) + "\x86q" + byte(i);
    return container_of(all, levels + 1);
  }
  static std::string container_of(const std::string& items, int /*count*/) {
    return "](" + items + "e";
  }
  static std::string nesting(int levels) {
    return std::string(static_cast<std::size_t>(levels), ']') +
           std::string(static_cast<std::size_t>(levels > 0 ? levels - 1 : 0), 'a');
  }

  std::string_view& decisions_;
};

/// Returns the bytes of a checkpoint. Sets `is_changed` if it is not valid.
std::string make_file(const OptimizerClass& saved, std::string_view& decisions, bool& is_changed) {
  Writer writer(decisions);
  const bool is_python = take_byte(decisions) % 2 == 1;
  const auto weight = [&](const char* type, int key) { return writer.tensor(type, key, {2, 3}); };
  Fields states;
  std::string state = "}";
  for (int i = 0; i < 2; ++i) {
    Fields fields{{"step", writer.tensor("FloatStorage", 5, {})}};
    for (const char* moment : saved.moments) fields.emplace_back(moment, weight("FloatStorage", i));
    state += writer.maybe_replace(small_int(i)) + writer.dict(fields) + "s";
  }
  Fields group = saved.options;
  group.emplace_back("lr", float_value(1e-3));
  group.emplace_back("params", writer.maybe_replace("](" + small_int(0) + small_int(1) + "e"));
  Fields optimizer{{"pytorch_version", text("1.5.0")},
                   {"state", state},
                   {"param_groups", "]" + writer.dict(group) + "a"}};
  if (saved.is_mezzo_class) {
    optimizer.emplace_back("optimizer_class", text(saved.name));
    optimizer.emplace_back("applied_steps", small_int(1));
    optimizer.emplace_back("seed", small_int(0));
  }
  if (saved.has_masters) {
    optimizer = {{"mezzo_master_weights", small_int(1)},   {"optimizer_class", text("SGD")},
                 {"applied_steps", small_int(1)},          {"masters/0", weight("FloatStorage", 2)},
                 {"masters/1", weight("FloatStorage", 3)}, {"optimizer", writer.dict(optimizer)}};
  }
  if (!is_python) {
    const auto signature = [](const char* name) {
      return text("[2, 3] " + std::string(name) + ".weight");
    };
    optimizer.emplace_back(
        "class", text((saved.has_masters ? "MasterWeights of " : "") + std::string(saved.name)));
    optimizer.emplace_back("weight_storage", text(""));
    optimizer.emplace_back("parameters", "]](" + signature("model") + signature("second") + "ea");
  }
  const char* const type = saved.has_masters ? "BFloat16Storage" : "FloatStorage";
  const auto model = [&](int key) { return writer.dict({{"weight", weight(type, key)}}); };
  Fields root_dict{
      {"model", model(2)}, {"second", model(3)}, {"optimizer", writer.dict(optimizer)}};
  if (!is_python) {
    root_dict.emplace_back("mezzo",
                           writer.dict({{"format", small_int(2)}, {"step", small_int(7)}}));
  }
  bytes::Records records{{"4", std::string(32, '\0')}, {"5", std::string("\0\0\x80\x3f", 4)}};
  for (int i = 0; i < 4; ++i) records[std::to_string(i)] = std::string(64, static_cast<char>(i));
  std::string file = bytes::zip(writer.dict(root_dict), records);
  is_changed = writer.is_changed;
  if (is_python) return file;
  std::string comment(mezzo::detail::kCommentBegin);
  comment.append(mezzo::detail::kCheckpointFormat).append(mezzo::detail::kCommentEnd);
  file[file.size() - 2] = static_cast<char>(comment.size() + mezzo::detail::kCrcDigits);
  file += comment;
  return file + mezzo::detail::crc32c_hex(file.data(), file.size());
}

void append_bytes(std::string& all, const c10::IValue& value) {
  if (value.isTensor()) {
    const at::Tensor tensor = value.toTensor().contiguous();
    all += c10::toString(tensor.scalar_type());
    all.append(static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes());
  } else if (value.isGenericDict()) {
    for (const auto& entry : value.toGenericDict()) {
      append_bytes(all, entry.key());
      append_bytes(all, entry.value());
    }
  } else if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) append_bytes(all, element);
  } else if (value.isString()) {
    all += value.toStringRef();
  } else {
    all += c10::str(value);
  }
}

std::string state_bytes(const Training& run) {
  std::string all;
  append_bytes(all, mezzo::detail::collect_values(run.state.entries()));
  return all;
}

std::unique_ptr<Training> make_training(const OptimizerClass& optimizer_class) {
  auto run = std::make_unique<Training>();
  for (const auto& layer : {run->model, run->second}) {
    layer->weight.detach().fill_(0.5);
  }
  if (optimizer_class.has_masters) {
    run->model->to(at::kBFloat16);
    run->second->to(at::kBFloat16);
  }
  Groups groups;
  groups.emplace_back(std::vector<at::Tensor>{run->model->weight, run->second->weight});
  run->optimizer = optimizer_class.make(std::move(groups));
  if (optimizer_class.has_masters)
    run->masters = std::make_unique<mezzo::MasterWeights>(*run->optimizer);
  run->step();
  run->state.add("model", run->model).add("second", run->second);
  if (optimizer_class.has_masters) {
    run->state.add("optimizer", *run->masters);
  } else {
    run->state.add("optimizer", *run->optimizer);
  }
  run->initial_bytes = state_bytes(*run);
  return run;
}

double cpu_seconds() {
  std::timespec now{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

}  // namespace

/// Loads a file of a training run with one class of optimizer, written from a grammar, into a run
/// with the same class or another. Either the file loads and the run continues, or loading throws
/// and changes nothing.
void pickle(std::string_view decisions) {
  static const test_support::TempDir temp_dir;
  static std::vector<std::unique_ptr<Training>> runs(optimizer_classes().size());
  const unsigned char first = take_byte(decisions), second = take_byte(decisions);
  const std::size_t saved = first % optimizer_classes().size();
  const std::size_t loaded = second < 192 ? saved : second % optimizer_classes().size();
  if (runs[loaded] == nullptr) runs[loaded] = make_training(optimizer_classes()[loaded]);
  Training& run = *runs[loaded];
  bool is_changed = false;
  const std::string file = make_file(optimizer_classes()[saved], decisions, is_changed);
  const auto path = temp_dir.write("x.pt", file);
  const double begin = cpu_seconds();
  bool is_loaded = false;
  try {
    if (second % 8 == 7) {  // the optimizer's own load, without the checks of a checkpoint
      const auto read = mezzo::detail::read_checkpoint(path);
      auto archive = mezzo::detail::dict_to_archive(
          mezzo::detail::to_archive_dict(read.values.at("optimizer")));
      if (run.masters) {
        run.masters->load(archive);
      } else {
        mezzo::detail::load_atomically(archive, *run.optimizer);
      }
    } else {
      mezzo::load_checkpoint(path, run.state);
    }
    is_loaded = true;
  } catch (const mezzo::detail::InvalidCheckpointError&) {  // of read_checkpoint
  } catch (const c10::Error&) {
  } catch (const std::out_of_range&) {  // of `values.at`
  }
  require(cpu_seconds() - begin < 1, "a small file loads within a second");
  require(is_loaded || is_changed || saved != loaded, "a valid file loads");
  if (!is_loaded) {
    require(state_bytes(run) == run.initial_bytes, "a file that does not load changes nothing");
    return;
  }
  try {
    run.step();
  } catch (const c10::Error&) {  // only the step validates some states
  }
  runs[loaded] = nullptr;
}

}  // namespace fuzz
