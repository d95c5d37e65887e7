#include <mezzo/autocast/op_policy.h>

#include <c10/util/Exception.h>

#include "targets.h"

namespace fuzz {

/// The text of an OpPolicy: what is taken reads back from what it prints.
void policy(std::string_view bytes) {
  try {
    const auto policy = mezzo::OpPolicy::parse(bytes);
    const auto again = mezzo::OpPolicy::parse(policy.to_string());
    require(again.edits() == policy.edits(), "a policy reads back what it printed");
    require(policy.with(again).edits() == policy.edits(), "a policy on itself changes nothing");
  } catch (const c10::Error&) {
  }
}

}  // namespace fuzz
