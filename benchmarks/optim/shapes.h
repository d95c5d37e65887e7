#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace optim_bench {

struct Model {
  std::string name;
  std::vector<std::vector<int64_t>> shapes;
};

/// Parameter shapes of a BERT encoder.
inline Model bert(const std::string& name, int64_t vocabulary, int64_t layers, int64_t hidden) {
  Model model{name, {{vocabulary, hidden}, {512, hidden}, {2, hidden}, {hidden}, {hidden}}};
  const int64_t feed_forward = 4 * hidden;
  for (int64_t layer = 0; layer < layers; ++layer) {
    for (int projection = 0; projection < 4; ++projection) {
      model.shapes.push_back({hidden, hidden});
      model.shapes.push_back({hidden});
    }
    model.shapes.insert(model.shapes.end(), {{feed_forward, hidden},
                                             {feed_forward},
                                             {hidden, feed_forward},
                                             {hidden},
                                             {hidden},
                                             {hidden},
                                             {hidden},
                                             {hidden}});
  }
  return model;
}

inline Model tiny_tensors(int64_t count, int64_t size) {
  Model model{std::to_string(count) + " tensors of " + std::to_string(size), {}};
  for (int64_t i = 0; i < count; ++i) model.shapes.push_back({size});
  return model;
}

}  // namespace optim_bench
