// Declares the names that code blocks of README.md and docs/ assume: a model, its optimizer,
// batches. They are not defined, since the blocks are compiled and not run.
#pragma once

#include <mezzo/autocast.h>
#include <mezzo/checkpoint.h>
#include <mezzo/diagnostics.h>
#include <mezzo/distributed.h>
#include <mezzo/mezzo.h>
#include <mezzo/opt_levels.h>
#include <mezzo/optim.h>

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/torch.h>

#include <chrono>
#include <csignal>
#include <fstream>
#include <iostream>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace docs {

struct NetImpl : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& x) { return layer(x); }
  torch::nn::Linear layer = nullptr;
};
TORCH_MODULE(Net);

struct Batch {
  torch::Tensor data, target;
};

extern Net model, net_d, net_g, block, body, embedding;
extern std::vector<Batch> batches;
extern std::vector<Batch>* loader;
extern std::vector<Batch>* rank_loader;
extern Batch batch, first_batch, last_batch;
extern torch::Tensor x, y, loss, weight, copy, inv_scale;
extern torch::nn::CrossEntropyLoss criterion;
extern torch::Device device;

extern mezzo::GradScaler scaler;
extern mezzo::optim::AdamW optimizer, opt_d, opt_g;
extern torch::optim::SGD sgd;
extern mezzo::LinearSchedule schedule;
extern mezzo::StepResult result;
extern mezzo::AutocastOptions options;
extern const mezzo::OpOverrides overrides;
extern c10::intrusive_ptr<c10d::Backend> world;
extern mezzo::DistributedDataParallel<Net> ddp;

extern std::int64_t step, epoch, accumulate;

// Names of single pages.
namespace page_cuda {
struct Graph {
  void capture_begin();
  void capture_end();
  void replay();
};
extern Graph graph;
mezzo::StepResult iterate();
}  // namespace page_cuda
namespace page_debugging {
struct Batch {
  torch::Tensor x, y;
};
extern std::vector<Batch> batches;
extern mezzo::MetricsLogger logger;
extern mezzo::RunReport report;
extern mezzo::TrainingState state;
extern mezzo::CheckpointManager checkpoints;
}  // namespace page_debugging
namespace page_checkpoints {
struct Loader {
  std::int64_t position() const;
  void seek(std::int64_t position);
};
extern Loader my_loader;
extern torch::data::datasets::TensorDataset dataset;
extern std::int64_t size, num_epochs;
void train(const torch::data::TensorExample& example);
extern std::uint32_t seed;
extern mezzo::TrainingState state;
extern mezzo::CheckpointManager checkpoints;
}  // namespace page_checkpoints
namespace page_distributed {
extern mezzo::TrainingState state;
extern mezzo::DistributedCheckpointManager checkpoints;
extern std::int64_t steps;
extern volatile std::sig_atomic_t stop_requested;
void train_one_step();
}  // namespace page_distributed
namespace page_optimizers {
extern Net averaged_model;
}
namespace page_precision_check {
extern torch::Tensor batch;
}

void train(const c10::intrusive_ptr<c10d::Backend>& world);
double evaluate(const Net& model);
torch::Tensor loss_of(const Net& model, const Batch& batch);
void all_reduce(const torch::Tensor& tensor);

}  // namespace docs
