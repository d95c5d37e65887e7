/// \file
/// Who owns a node of autograd's graph: std::shared_ptr with a deleter of its own up to libtorch
/// 2.11, c10::intrusive_ptr in later versions.
#pragma once

#include <mezzo/base/version.h>

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

#include <memory>
#include <type_traits>
#include <utility>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

template <class Node>
using NodePtr = std::conditional_t<std::is_same_v<decltype(torch::autograd::Edge::function),
                                                  std::shared_ptr<torch::autograd::Node>>,
                                   std::shared_ptr<Node>, c10::intrusive_ptr<Node>>;

template <class Node, class... Args>
NodePtr<Node> make_node(Args&&... args) {
  if constexpr (std::is_same_v<NodePtr<Node>, std::shared_ptr<Node>>) {
    // libtorch's deleter, found by the argument's type: it takes a long chain of nodes apart
    // without recursion.
    return {new Node(std::forward<Args>(args)...), [](Node* node) { deleteNode(node); }};
  } else {
    return c10::make_intrusive<Node>(std::forward<Args>(args)...);
  }
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
