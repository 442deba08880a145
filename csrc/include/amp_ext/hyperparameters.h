// Hyperparameters of the optimizers and of the loss scale. Includes no torch header, because the
// kernels are compiled with this file.
#pragma once

#include <amp_ext/export.h>

#include <cstdint>
#include <limits>
#include <string_view>

namespace amp_ext {

// Role of a state buffer. An optimizer has at most one second moment.
enum class BufferRole { kFirstMoment, kSecondMoment, kMaximum, kOther };

// 8-bit format in which a buffer can be stored (see csrc/formats/moment_codes.h). A blockwise
// format has one exponent for each block of 32 elements. An optimizer has at most one blockwise
// buffer and can't combine kRatio with kMagnitude.
enum class BufferCode {
  kNone,       // no 8-bit format; if other buffers are in 8 bits, this one is in bfloat16
  kRatio,      // ratio of a first moment to the square root of the second moment
  kRoot,       // blockwise: square root of the second moment, as the formula returns it
  kMagnitude,  // blockwise: magnitude and sign of the value itself
};

struct BufferDescription {
  // Key in the state of a parameter, such as "exp_avg". List operations use the plural "exp_avgs".
  const char* name;
  BufferRole role;
  // Stride of the Weyl sequence that dithers the buffer, in units of 2^-32; 0 for no dithering.
  uint32_t dither_stride = 0;
  BufferCode code = BufferCode::kNone;
  // Option that a group must set to have this buffer, such as "amsgrad"; null if every group has
  // it. Only the last buffer may have an option.
  const char* option = nullptr;
};

// Strides of the sequences that dither buffers (csrc/formats/dither.h), in units of 2^-32.
inline constexpr uint32_t kFirstMomentStride = 0x61C88647u;   // 0.382
inline constexpr uint32_t kMomentumStride = 0x6A09E667u;      // 0.414
inline constexpr uint32_t kSignMomentStride = 0xABC98389u;    // 0.671
inline constexpr uint32_t kSecondMomentStride = 0x8CB92BA7u;  // 0.550

// Base of the hyperparameters of each optimizer. A derived struct also describes the optimizer, by
// these members:
//
//   static constexpr const char* kOperation         the list operation: "adam_"
//   static constexpr const char* kName              the class in Python: "AdamHyperparameters"
//   static constexpr BufferDescription kBuffers[]   the buffers, in the order of the formula
//   const char* why_step() const                    when the formula needs the step number, or null
//   bool needs_buffers() const                      false if the formula can run without buffers;
//                                                   this struct returns true
//   double decay_of(int buffer) const               constexpr: factor of the old buffer in a step
//   for_each_field(visit)                           visit("beta1", &Own::beta1), ...
//
// All values are doubles. The formula of the optimizer converts them in its function `for_tensor`.
struct AMP_EXT_API CommonHyperparameters {
  double lr = 0.0;
  const float* lr_on_device = nullptr;  // [1] on the device, used instead of `lr`, or null
  double weight_decay = 0.0;
  bool decoupled_weight_decay = false;
  bool cautious_weight_decay = false;  // needs decoupled decay; see can_decay()
  bool maximize = false;
  // Magnitude to which elements of the unscaled gradients are clipped; inf: no clipping.
  double clip_value = std::numeric_limits<double>::infinity();
  double timestep = 0.0;          // number of this step, from 1; used if no tensor counts the steps
  bool write_back_grads = false;  // store the unscaled, clipped gradients in place of the gradients
  // If true, dithers the low-precision values that rounding to nearest would freeze.
  bool dither = false;

  // Calls visit(name, pointer to member) for all fields except `lr` and `clip_value`, because
  // callers may pass these two as a tensor or None.
  template <typename Visit>
  static void for_each_field(const Visit& visit) {
    visit("weight_decay", &CommonHyperparameters::weight_decay);
    visit("decoupled_weight_decay", &CommonHyperparameters::decoupled_weight_decay);
    visit("cautious_weight_decay", &CommonHyperparameters::cautious_weight_decay);
    visit("maximize", &CommonHyperparameters::maximize);
    visit("timestep", &CommonHyperparameters::timestep);
    visit("write_back_grads", &CommonHyperparameters::write_back_grads);
    visit("dither", &CommonHyperparameters::dither);
  }

  // True if the field is an option of a parameter group. The other fields are set by list
  // operations or derived from options.
  static bool is_option(std::string_view field) { return field != "timestep" && field != "dither"; }

  bool needs_buffers() const { return true; }

  // False if two options contradict each other: coupled decay is not cautious.
  bool can_decay() const { return decoupled_weight_decay || !cautious_weight_decay; }
};

struct AMP_EXT_API AdamHyperparameters : CommonHyperparameters {
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double denominator_floor = 0.0;  // lower bound of the bias-corrected second moment (not its root)

  static constexpr const char* kOperation = "adam_";
  static constexpr const char* kName = "AdamHyperparameters";
  static constexpr BufferDescription kBuffers[] = {
      {"exp_avg", BufferRole::kFirstMoment, kFirstMomentStride, BufferCode::kRatio},
      {"exp_avg_sq", BufferRole::kSecondMoment, kSecondMomentStride, BufferCode::kRoot},
      {"max_exp_avg_sq", BufferRole::kMaximum, 0, BufferCode::kNone, "amsgrad"}};

  const char* why_step() const { return "unless there is a timestep"; }
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
  static constexpr BufferDescription kBuffers[] = {{"momentum_buffer", BufferRole::kFirstMoment,
                                                    kMomentumStride, BufferCode::kMagnitude,
                                                    "momentum"}};

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

// The momentum of Muon. Its update is orthogonalized as a whole (MuonOptions in amp_ext/options.h).
struct AMP_EXT_API MuonHyperparameters : CommonHyperparameters {
  double momentum = 0.95;
  bool nesterov = true;

  MuonHyperparameters() { decoupled_weight_decay = true; }

  static constexpr const char* kOperation = "muon_";
  static constexpr const char* kName = "MuonHyperparameters";
  static constexpr BufferDescription kBuffers[] = {
      {"momentum_buffer", BufferRole::kFirstMoment, kMomentumStride, BufferCode::kMagnitude}};

  static bool is_option(std::string_view field) { return field != "dither"; }
  const char* why_step() const { return nullptr; }
  constexpr double decay_of(int /*buffer*/) const { return momentum; }

  template <typename Visit>
  static void for_each_field(const Visit& visit) {
    visit("weight_decay", &MuonHyperparameters::weight_decay);
    visit("cautious_weight_decay", &MuonHyperparameters::cautious_weight_decay);
    visit("momentum", &MuonHyperparameters::momentum);
    visit("nesterov", &MuonHyperparameters::nesterov);
    visit("dither", &MuonHyperparameters::dither);
  }
};

struct AMP_EXT_API LossScaleHyperparameters {
  double growth_factor = 2.0;
  double backoff_factor = 0.5;
  int64_t growth_interval = 2000;
  double min_scale = 0.0;
  double max_scale = std::numeric_limits<double>::infinity();
  // Number of overflows, counted since the scale last grew, after which the scale shrinks.
  int32_t hysteresis = 1;
  bool dynamic = true;
};

}  // namespace amp_ext
