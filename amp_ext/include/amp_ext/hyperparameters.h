// The hyperparameters of the optimizers and of the loss scale. Includes nothing of torch: the
// kernels are compiled with this file, too.
#pragma once

#include <amp_ext/export.h>

#include <cstdint>
#include <limits>
#include <string_view>

namespace amp_ext {

// What a buffer of the state holds. There is one second moment at most.
enum class BufferRole { kFirstMoment, kSecondMoment, kMaximum, kOther };

// The code of 8 bits that a buffer may take. csrc/elements/moment_codes.h has them. One buffer at
// most is in blocks, and no ratio stands beside a magnitude.
enum class BufferCode {
  kNone,       // in bfloat16 where the others have codes
  kRatio,      // to the second moment
  kRoot,       // of the second moment, which the formula returns; in blocks
  kMagnitude,  // and its sign; in blocks
};

struct BufferDescription {
  const char* name;  // its key in the state of a parameter; "exp_avgs" is a list of them
  BufferRole role;
  uint32_t dither_stride = 0;  // of the sequence by which it is dithered; 0: it never is
  BufferCode code = BufferCode::kNone;
};

// Strides of sequences, as parts of 2^32. csrc/elements/dither.h says why these.
inline constexpr uint32_t kFirstMomentStride = 0x61C88647u;   // 0.382
inline constexpr uint32_t kMomentumStride = 0x6A09E667u;      // 0.414
inline constexpr uint32_t kSignMomentStride = 0xABC98389u;    // 0.671
inline constexpr uint32_t kSecondMomentStride = 0x8CB92BA7u;  // 0.550

// An optimizer's own hyperparameters derive from these and describe it to all that step it:
//
//   static constexpr const char* kOperation         the list operation: "adam_"
//   static constexpr const char* kName              the class in Python: "AdamHyperparameters"
//   static constexpr BufferDescription kBuffers[]   its buffers, in the order of the formula
//   const char* why_step() const                    when the formula asks for the step, or null
//   bool needs_buffers() const                      whether it is another without any buffer
//   double decay_of(int buffer) const             constexpr: what a step keeps of a buffer
//   for_each_field(visit)                           visit("beta1", &Own::beta1), ...
//
// They stay double until `for_tensor` of the formula.
struct AMP_EXT_API CommonHyperparameters {
  double lr = 0.0;
  const float* lr_on_device = nullptr;  // [1], or null: `lr` holds the value
  double weight_decay = 0.0;
  bool decoupled_weight_decay = false;
  bool maximize = false;
  double clip_value = std::numeric_limits<double>::infinity();  // of unscaled gradients
  double timestep = 0.0;          // the number of this step where no tensor counts them, from 1
  bool write_back_grads = false;  // store the unscaled, clipped gradients
  bool dither = false;            // what is stored in 16 bits, if it would freeze otherwise

  // All but `lr` and `clip_value`, which need not be numbers to a caller.
  template <typename Visit>
  static void for_each_field(const Visit& visit) {
    visit("weight_decay", &CommonHyperparameters::weight_decay);
    visit("decoupled_weight_decay", &CommonHyperparameters::decoupled_weight_decay);
    visit("maximize", &CommonHyperparameters::maximize);
    visit("timestep", &CommonHyperparameters::timestep);
    visit("write_back_grads", &CommonHyperparameters::write_back_grads);
    visit("dither", &CommonHyperparameters::dither);
  }

  // Whether a field is an option, which every group has: none of these values stands in for one.
  // The other fields are for list operations, or follow from options.
  static bool is_option(std::string_view field) { return field != "timestep" && field != "dither"; }
};

struct AMP_EXT_API AdamHyperparameters : CommonHyperparameters {
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double denominator_floor = 0.0;  // of the corrected second moment, under the root

  static constexpr const char* kOperation = "adam_";
  static constexpr const char* kName = "AdamHyperparameters";
  static constexpr BufferDescription kBuffers[] = {
      {"exp_avg", BufferRole::kFirstMoment, kFirstMomentStride, BufferCode::kRatio},
      {"exp_avg_sq", BufferRole::kSecondMoment, kSecondMomentStride, BufferCode::kRoot},
      {"max_exp_avg_sq", BufferRole::kMaximum}};

  const char* why_step() const { return "unless there is a timestep"; }
  bool needs_buffers() const { return true; }
  constexpr double decay_of(int buffer) const { return buffer == 0 ? beta1 : beta2; }

  template <typename Visit>
  static void for_each_field(const Visit& visit) {
    CommonHyperparameters::for_each_field(visit);
    visit("beta1", &AdamHyperparameters::beta1);
    visit("beta2", &AdamHyperparameters::beta2);
    visit("eps", &AdamHyperparameters::eps);
    visit("denominator_floor", &AdamHyperparameters::denominator_floor);
  }
};

struct AMP_EXT_API LionHyperparameters : CommonHyperparameters {
  double beta1 = 0.9;
  double beta2 = 0.99;

  static constexpr const char* kOperation = "lion_";
  static constexpr const char* kName = "LionHyperparameters";
  static constexpr BufferDescription kBuffers[] = {
      {"exp_avg", BufferRole::kFirstMoment, kSignMomentStride, BufferCode::kMagnitude}};

  const char* why_step() const { return nullptr; }
  bool needs_buffers() const { return true; }
  constexpr double decay_of(int /*buffer*/) const { return beta2; }

  template <typename Visit>
  static void for_each_field(const Visit& visit) {
    CommonHyperparameters::for_each_field(visit);
    visit("beta1", &LionHyperparameters::beta1);
    visit("beta2", &LionHyperparameters::beta2);
  }
};

struct AMP_EXT_API SgdHyperparameters : CommonHyperparameters {
  double momentum = 0.0;
  double dampening = 0.0;
  bool nesterov = false;

  static constexpr const char* kOperation = "sgd_";
  static constexpr const char* kName = "SgdHyperparameters";
  static constexpr BufferDescription kBuffers[] = {
      {"momentum_buffer", BufferRole::kFirstMoment, kMomentumStride, BufferCode::kMagnitude}};

  const char* why_step() const {
    return momentum != 0.0 && dampening != 0.0 ? "with dampening, whose first step differs"
                                               : nullptr;
  }
  bool needs_buffers() const { return momentum != 0.0; }
  constexpr double decay_of(int /*buffer*/) const { return momentum; }

  template <typename Visit>
  static void for_each_field(const Visit& visit) {
    CommonHyperparameters::for_each_field(visit);
    visit("momentum", &SgdHyperparameters::momentum);
    visit("dampening", &SgdHyperparameters::dampening);
    visit("nesterov", &SgdHyperparameters::nesterov);
  }
};

struct AMP_EXT_API LossScaleHyperparameters {
  double growth_factor = 2.0;
  double backoff_factor = 0.5;
  int64_t growth_interval = 2000;
  double min_scale = 0.0;
  double max_scale = std::numeric_limits<double>::infinity();
  int32_t hysteresis = 1;  // overflows since the last growth, of which the last backs off
  bool dynamic = true;
};

struct AMP_EXT_API NormGuardHyperparameters {
  double sigma_factor = 6.0;  // deviations above the mean that a norm may be
  int64_t window = 128;       // norms that an average of the same newest weight would have
  int64_t warmup_steps = 64;  // norms that enter the statistics before they judge
  double max_norm = std::numeric_limits<double>::infinity();
  int64_t patience = 16;  // outliers in a row, of which the last is taken for a new level
  bool clips = false;     // the gradients of outliers down to the limit, instead of skipping
};

}  // namespace amp_ext
