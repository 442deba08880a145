// NormGuard of the C++ interface, which skips or clips steps with unusual gradient norms.
#include <ATen/core/ivalue.h>
#include <amp_ext/norm_guard.h>
#include <amp_ext/optim.h>

#include <limits>
#include <utility>

#include "libtorch/optimizer_impl.h"
#include "libtorch/values.h"
#include "optimizer/norm_statistics.h"
#include "scaler/scaler_ranges.h"

namespace amp_ext::optim {

namespace {

void check_option(const char* name, double value) {
  const std::string wanted = wanted_of_scaler(name, value);
  TORCH_CHECK(wanted.empty(), "NormGuard: ", name, " must be ", wanted, ", got ", value);
}

NormGuardHyperparameters checked(const NormGuardOptions& options) {
  check_option("sigma_factor", options.sigma_factor());
  check_option("window", static_cast<double>(options.window()));
  check_option("warmup_steps", static_cast<double>(options.warmup_steps()));
  if (options.max_norm().has_value()) check_option("max_norm", *options.max_norm());
  check_option("patience", static_cast<double>(options.patience()));
  TORCH_CHECK(options.action() == "skip" || options.action() == "clip",
              "NormGuard: action must be 'skip' or 'clip', got '", options.action(), "'");
  return {
      options.sigma_factor(), options.window(),
      options.warmup_steps(), options.max_norm().value_or(std::numeric_limits<double>::infinity()),
      options.patience(),     options.action() == "clip"};
}

}  // namespace

NormGuard::NormGuard(NormGuardOptions options)
    : options_(std::move(options)),
      statistics_(std::make_shared<NormStatistics>(checked(options_))) {}

NormGuard::~NormGuard() = default;

bool NormGuard::last_step_skipped(bool wait) const { return statistics_->last_step_skipped(wait); }

NormGuardStats NormGuard::stats(bool wait) const {
  const NormSummary summary = statistics_->read(wait);
  return {summary.norms, summary.last_norm, summary.mean,      deviation_of(summary),
          summary.limit, summary.outliers,  summary.nonfinite, summary.last_outlier};
}

NormGuardHistory NormGuard::history(bool wait) const {
  NormHistory of_statistics = statistics_->history(wait);
  NormGuardHistory history;
  history.norms = std::move(of_statistics.norms);
  history.withheld = std::move(of_statistics.withheld);
  for (size_t i = 0; i < history.norms.size(); ++i) {
    history.numbers.push_back(of_statistics.first_norm + static_cast<int64_t>(i));
  }
  return history;
}

c10::IValue NormGuard::state_dict() const {
  const NormSummary summary = statistics_->read(/*wait=*/true);
  Dict dict = new_dict();
  NormSummary::for_each_field(
      [&](const char* name, auto field) { dict.insert(name, summary.*field); });
  return dict;
}

void NormGuard::load_state_dict(const c10::IValue& state_dict) {
  const char* const operation = "NormGuard.load_state_dict";
  const Dict dict = dict_of(operation, state_dict);
  NormSummary summary;
  NormSummary::for_each_field([&](const char* name, auto field) {
    const c10::IValue value = entry_of(operation, dict, name);
    auto& number = summary.*field;
    using Number = std::decay_t<decltype(number)>;
    const bool is_numeric = value.isInt() || (std::is_same_v<Number, double> && value.isDouble());
    const std::string wanted = wanted_of_scaler(name, is_numeric ? number_in(value) : NAN);
    TORCH_CHECK(wanted.empty(), operation, ": ", name, " must be ", wanted, ", got ", shown(value));
    number = static_cast<Number>(number_in(value));
  });
  statistics_->load(summary);
}

void FusedOptimizer::norm_guard(std::shared_ptr<NormGuard> guard) {
  Impl& impl = checked("norm_guard");
  if (guard != nullptr) {
    const std::shared_ptr<const void> other = guard->optimizer_.lock();
    TORCH_CHECK(other == nullptr || other == identity(), impl.optimizer_class.name,
                ": norm_guard already belongs to another optimizer. Make a NormGuard for each "
                "optimizer.");
    guard->optimizer_ = identity();
  }
  if (impl.norm_guard != nullptr && impl.norm_guard != guard) impl.norm_guard->optimizer_.reset();
  impl.plan->outputs().set_guard(guard != nullptr ? guard->statistics_ : nullptr);
  impl.norm_guard = std::move(guard);
}

std::shared_ptr<NormGuard> FusedOptimizer::norm_guard() const {
  return checked("norm_guard").norm_guard;
}

}  // namespace amp_ext::optim
