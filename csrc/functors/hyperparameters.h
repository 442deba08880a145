// What describes an optimizer: the hyperparameters that every one has, and its buffers.
#pragma once

#include <limits>

namespace amp_ext {

// What a buffer of the state holds.
enum class BufferRole { kFirstMoment, kSecondMoment, kMaximum };

struct BufferDescription {
  const char* name;  // its key in the state of a parameter; "exp_avgs" is a list of them
  BufferRole role;
};

// An optimizer's own hyperparameters derive from these and describe it to all that step it:
//
//   static constexpr const char* kOperation         the list operation: "adam_"
//   static constexpr const char* kName              the class in Python: "AdamHyperparameters"
//   static constexpr BufferDescription kBuffers[]   its buffers, in the order of the formula
//   const char* why_step() const                    when the formula asks for the step, or null
//   bool needs_buffers() const                      whether it is another without any buffer
//   for_each_field(visit)                           visit("beta1", &Own::beta1), ...
//
// They stay double until `for_tensor`.
struct CommonHyperparameters {
  double lr = 0.0;
  const float* lr_on_device = nullptr;  // [1], or null: `lr` holds the value
  double weight_decay = 0.0;
  bool decoupled_weight_decay = false;
  bool maximize = false;
  double clip_value = std::numeric_limits<double>::infinity();  // of unscaled gradients
  double timestep = 0.0;          // the number of this step where no tensor counts them, from 1
  bool write_back_grads = false;  // store the unscaled, clipped gradients

  // All but `lr` and `clip_value`, which need not be numbers to a caller.
  template <typename Visit>
  static void for_each_field(const Visit& visit) {
    visit("weight_decay", &CommonHyperparameters::weight_decay);
    visit("decoupled_weight_decay", &CommonHyperparameters::decoupled_weight_decay);
    visit("maximize", &CommonHyperparameters::maximize);
    visit("timestep", &CommonHyperparameters::timestep);
    visit("write_back_grads", &CommonHyperparameters::write_back_grads);
  }
};

}  // namespace amp_ext
