#include "run_page.h"

#include <functional>
#include <utility>

namespace bert_ner {

RunPage::RunPage(const std::string& file, std::string title, const torch::nn::Module& model,
                 std::int64_t first_step)
    : file_(file),
      report_(std::move(title)),
      overflows_(model, {.stream = nullptr,
                         .callback = [this](const mezzo::Overflow& found) { report_.add(found); }}),
      telemetry_(first_step) {
  telemetry_.write_to(std::ref(report_));
}

void RunPage::on_step(const StepReport& report, double max_norm) {
  telemetry_.record(report.result, report.loss, {.max_norm = max_norm, .tokens = report.tokens});
}

void RunPage::write() {
  telemetry_.flush();
  file_.write(report_.html());
  static_cast<void>(file_.commit());
}

}  // namespace bert_ner
