// The hyperparameters that every optimizer has. They stay double until `for_tensor`.
#pragma once

#include <limits>

namespace amp_ext {

struct CommonHyperparameters {
  double lr = 0.0;
  const float* lr_on_device = nullptr;  // [1], or null: `lr` holds the value
  double weight_decay = 0.0;
  bool decoupled_weight_decay = false;
  bool maximize = false;
  double clip_value = std::numeric_limits<double>::infinity();  // of unscaled gradients
  double timestep = 0.0;          // the number of this step where no tensor counts them, from 1
  bool write_back_grads = false;  // store the unscaled, clipped gradients
};

}  // namespace amp_ext
