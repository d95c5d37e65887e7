#include "doctor.h"

#include <mezzo/diagnose/doctor.h>

#include <tuple>

#include "machine.h"

namespace bert_ner {

std::vector<std::string> doctors_warnings(Trainer& trainer, const Batch& batch) {
  const auto& autocast = trainer.autocast();
  if (!autocast.enabled) return {};
  const auto diagnosis =
      mezzo::diagnose(trainer.model, std::make_tuple(batch.ids, batch.mask), batch.ids.device(),
                      {.dtype = dtype_of(autocast),
                       .cache = autocast.cache,
                       .policy = autocast.policy,
                       .measure = false});  // machine_notes say that
  std::vector<std::string> lines;
  for (const auto& finding : diagnosis.findings) {
    if (finding.severity == mezzo::FindingSeverity::note) continue;
    lines.push_back(std::string(to_string(finding.severity)) + ": " + finding.where + ": " +
                    finding.reason + (finding.remedy.empty() ? "" : "; try " + finding.remedy));
  }
  return lines;
}

}  // namespace bert_ner
