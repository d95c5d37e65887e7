#pragma once

#include <cstdint>
#include <vector>

using Shapes = std::vector<std::vector<int64_t>>;

/// A BERT of `layers` layers: 22.6 M parameters for (6, 384, 1536), 109 M for (12, 768, 3072).
inline Shapes bert_shapes(int layers, int64_t hidden, int64_t feed_forward) {
  Shapes shapes{{30522, hidden}, {512, hidden}, {2, hidden}, {hidden}, {hidden}};
  for (int layer = 0; layer < layers; ++layer) {
    for (int projection = 0; projection < 4; ++projection) {
      shapes.insert(shapes.end(), {{hidden, hidden}, {hidden}});
    }
    shapes.insert(shapes.end(), {{hidden}, {hidden}, {hidden}, {hidden}});
    shapes.insert(shapes.end(),
                  {{feed_forward, hidden}, {feed_forward}, {hidden, feed_forward}, {hidden}});
  }
  return shapes;
}

/// 2,000 tensors of 64 to 1,088 elements.
inline Shapes tiny_shapes() {
  Shapes shapes;
  for (int64_t i = 0; i < 2000; ++i) shapes.push_back({64 + (i * 37) % 1025});
  return shapes;
}
