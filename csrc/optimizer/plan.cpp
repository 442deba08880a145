// Locks the plan of an optimizer, and scans and steps its parameters.
#include "optimizer/plan.h"

#include <ATen/core/grad_mode.h>

#include <utility>

#include "optimizer/session.h"

namespace amp_ext {

namespace {

constexpr const char* kHowToGoOn =
    "Load a checkpoint into the model and the optimizer with load_state_dict()";

}  // namespace

Plan::Plan(std::string optimizer, std::string failure)
    : params_({std::move(optimizer), {}, Naming::kGroups}), failure_(std::move(failure)) {}

Plan::Claim::Claim(Plan& plan, const char* operation, bool waits) : plan_(plan) {
  const auto thread = std::this_thread::get_id();
  std::thread::id user;
  while (!plan.user_.compare_exchange_strong(user, thread)) {
    TORCH_CHECK(
        waits && user != thread, plan.params_.operation(), ".", operation, ": thread ", thread,
        " called the optimizer while thread ", user,
        " was inside a call of it. Let one thread at a time use it, for example with a lock.");
    std::this_thread::yield();  // an operation takes microseconds
    user = {};
  }
  if (plan.failure_.empty()) return;
  plan.user_ = std::thread::id();
  TORCH_CHECK(false, plan.params_.operation(), ".", operation,
              ": an earlier step failed after updating ", plan.failure_, ". ", kHowToGoOn, ".");
}

Plan::Claim::~Claim() { plan_.user_ = std::thread::id(); }

Plan::Lock::~Lock() {
  // After an error, no later step may use the scan that was made for this one.
  if (std::uncaught_exceptions() > exceptions_) plan_.scans_.forget();
  plan_.params_.release_params();
  if (plan_.must_forget_) plan_.drop_slots();
}

void Plan::take_over(const Plan& before) {
  params_.inherit_scaled_grads(before.params_);
  outputs_.take_over(before.outputs_);
  last_step_.take_over(before.last_step_);
}

void Plan::forget() {
  must_forget_ = user_.load() != std::thread::id();
  if (!must_forget_) drop_slots();
}

void Plan::drop_slots() {
  params_.drop_slots();
  must_forget_ = false;
  scans_.reset();
  scratch_ = {};
}

void Plan::register_params(std::vector<optim::StateSpec> specs,
                           const std::vector<ParamTable::Param>& params) {
  drop_slots();
  params_.register_params(std::move(specs), params);
}

std::string Plan::note_of_failure() const {
  return c10::str("the step failed after updating ", failure_, ". ", kHowToGoOn,
                  "; until then the optimizer refuses to step.");
}

NormSource Plan::norm_source(const std::optional<double>& max_grad_norm, bool is_given) const {
  return source_of_norm(max_grad_norm.has_value() || is_given, is_given, scans_.has_sums(),
                        params_.is_partitioned());
}

std::vector<GradScanResult> Plan::scan(const at::Tensor& found_inf,
                                       const OptionalTensor& grad_scale,
                                       const optim::ClippingOptions& options, bool sums_squares) {
  sums_squares |= options.max_grad_norm.has_value();
  return scans_.scan(params_, {found_inf, grad_scale, options.skip_nonfinite, sums_squares},
                     scratch_);
}

// Makes all checks and allocations before the first launch, because a launch can't be undone.
void Plan::step(GroupTable& table, GradientOptions options, StateStore& store, bool is_of_scaler,
                const OptionalTensor& max_norm, StepChunks* chunks) {
  const at::NoGradGuard no_grad;
  std::vector<ParamSlot>& slots = params_.slots();
  const NormSource norm = norm_source(options.max_grad_norm, options.sum_of_squares.has_value());
  const bool reads_norm = norm != NormSource::kNone;
  options.grad_norm = outputs_.allocate_norm(params_, reads_norm);
  check_step(params_, slots, table, options, is_of_scaler, store);
  const std::vector<GradScan> scans = scans_.take(params_, options, norm, scratch_);
  const bool had_scale = options.grad_scale.has_value();
  const StepInputs inputs{std::move(options), reads_norm, max_norm};
  const size_t all = slots.size();
  const std::vector<size_t> ends = chunks == nullptr ? std::vector<size_t>{all} : chunks->ends;
  std::vector<StepBatch> batches;
  size_t first = 0;
  for (size_t chunk = 0; chunk < ends.size(); first = ends[chunk++]) {
    const Slots part(slots.data() + first, ends[chunk] - first);
    for (StepBatch& batch : prepare_step(params_.checks(), part, table, inputs, scratch_)) {
      batch.chunk = chunk;
      batches.push_back(std::move(batch));
    }
  }
  const at::Tensor step_applied = outputs_.prepare(params_, inputs, batches);
  StepOutcome outcome;
  try {
    launch_step(batches, table, scratch_, outcome, chunks);
    outputs_.finish(step_applied);
    params_.remember_step(slots, had_scale, /*are_as_seen=*/!scans.empty());
    last_step_.remember();
  } catch (...) {
    set_failure(outcome.text());
    throw;
  }
}

Plan::CopiedStepInputs Plan::prepare_copied_step(const GroupTable& table, GradientOptions options,
                                                 bool is_of_scaler) {
  const at::NoGradGuard no_grad;
  const NormSource norm = norm_source(options.max_grad_norm, options.sum_of_squares.has_value());
  check_options(params_.operation(), table, options);
  for (const ParamSlot& slot : params_.slots()) {
    if (!slot.has_grad()) continue;
    params_.checks().check_grad(slot);
    if (!is_of_scaler) params_.checks().check_carries_no_scale(slot);
  }
  scans_.take(params_, options, norm, scratch_);
  return {options.found_inf, options.sum_of_squares};
}

void Plan::remember_copied_step(bool had_scale) {
  ParamTable::remember_step(params_.slots(), had_scale, /*are_as_seen=*/false);
}

void GroupSettings::read(const std::string& optimizer,
                         const optim::OptimizerDescription& description,
                         const std::vector<const optim::GroupOptions*>& groups) {
  table = description.table(groups);
  clipping = optim::clipping_options(optimizer, groups);
  for (size_t i = 0; i < groups.size(); ++i) {
    specs.push_back(optim::state_spec_of(*groups[i], table.groups[i].requirements));
  }
}

}  // namespace amp_ext
