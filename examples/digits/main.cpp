// Training and validation on real data: 1,797 scans of handwritten digits (UCI, 8x8 pixels) in a
// DataLoader. Saves the model with the best validation accuracy. Exits with 1 if the accuracy is
// below 90 %.
#include <mezzo/mezzo.h>

#include <torch/torch.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace {

struct Digits : torch::data::Dataset<Digits> {
  Digits(torch::Tensor images_, torch::Tensor labels_)
      : images(std::move(images_)), labels(std::move(labels_)) {}
  torch::data::Example<> get(size_t i) override {
    const auto row = static_cast<int64_t>(i);
    return {images[row], labels[row]};
  }
  torch::optional<size_t> size() const override { return labels.size(0); }
  torch::Tensor images, labels;
};

/// Reads a CSV file whose lines have 64 pixels from 0 to 16 and a digit.
torch::Tensor read_table(const char* path) {
  std::ifstream file(path);
  TORCH_CHECK(file, path, " cannot be opened: ./bootstrap test downloads it to .deps/digits.csv");
  std::vector<float> values;
  for (std::string line; std::getline(file, line);) {
    std::istringstream cells(line);
    for (std::string cell; std::getline(cells, cell, ',');) values.push_back(std::stof(cell));
  }
  return torch::tensor(values).view({-1, 65});
}

}  // namespace

int main(int count, char** arguments) try {
  torch::manual_seed(0);
  const torch::Tensor table = read_table(count > 1 ? arguments[1] : "digits.csv");
  const auto images = (table.slice(1, 0, 64) / 16).view({-1, 1, 8, 8});
  const auto labels = table.select(1, 64).to(torch::kLong);
  const auto make_loader = [&](int64_t begin, int64_t end) {
    auto data = Digits(images.slice(0, begin, end), labels.slice(0, begin, end))
                    .map(torch::data::transforms::Stack<>());
    return torch::data::make_data_loader(std::move(data), 64);  // shuffles
  };
  const auto training = make_loader(0, 1400), validation = make_loader(1400, table.size(0));

  const torch::Device device = torch::cuda::is_available() ? torch::kCUDA : torch::kCPU;
  const mezzo::AutocastOptions precision{.device_type = device.type()};
  torch::nn::Sequential model(
      torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 16, 3).padding(1)), torch::nn::ReLU(),
      torch::nn::Conv2d(torch::nn::Conv2dOptions(16, 32, 3).padding(1)), torch::nn::ReLU(),
      torch::nn::MaxPool2d(2), torch::nn::Flatten(), torch::nn::Linear(512, 10));
  model->to(device);
  mezzo::optim::AdamW optimizer(model->parameters(), mezzo::optim::AdamWOptions(3e-3));
  mezzo::GradScaler scaler;

  double best = 0;
  for (int epoch = 1; epoch <= 12; ++epoch) {
    model->train();
    for (const auto& batch : *training) {
      optimizer.zero_grad();
      const auto loss = mezzo::autocast(precision, [&] {
        return torch::nn::functional::cross_entropy(model->forward(batch.data.to(device)),
                                                    batch.target.to(device));
      });
      scaler.scale(loss).backward();
      scaler.step(optimizer);
      scaler.update();
    }
    model->eval();
    const torch::NoGradGuard no_grad;
    auto correct = torch::zeros({}, torch::TensorOptions(torch::kLong).device(device));
    int64_t total = 0;
    for (const auto& batch : *validation) {
      const auto logits =
          mezzo::autocast(precision, [&] { return model->forward(batch.data.to(device)); });
      correct +=
          logits.argmax(1).eq(batch.target.to(device)).sum();  // no item(), which would synchronize
      total += batch.target.size(0);
    }
    const double accuracy = correct.item<double>() / static_cast<double>(total);
    std::printf("epoch %d: %.1f %% of %lld validation digits\n", epoch, 100 * accuracy,
                static_cast<long long>(total));
    if (accuracy > best) torch::save(model, "digits.pt");
    best = std::max(best, accuracy);
  }
  return best >= 0.9 ? 0 : 1;
} catch (const c10::Error& error) {
  std::fprintf(stderr, "digits: %s\n", error.what_without_backtrace());
  return 2;
}
