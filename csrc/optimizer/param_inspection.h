// The effect that a step would have on each parameter.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace amp_ext::optim {

// Effect of a step on one parameter, or on its float32 master weight if it has one (a split master
// weight is joined to float32 first). All values are computed in double from the stored numbers.
struct ParamInspection {
  int64_t group = 0;
  int64_t index_in_group = 0;
  double norm = 0.0;            // norm of the parameter before the step
  double update_norm = 0.0;     // norm of the update
  double ratio = 0.0;           // update_norm / norm; 0 if the update is 0
  double largest_update = 0.0;  // largest magnitude of an element of the update
  // Norm of each buffer after the step, with the name of the buffer, such as "exp_avg".
  std::vector<std::pair<std::string, double>> moment_norms;
  // Fraction of elements whose stored value stays the same: `unmoved` in the parameter (0 if it is
  // empty), `unmoved_master` in the master weight (nullopt if there is none).
  double unmoved = 0.0;
  std::optional<double> unmoved_master;
};

struct Inspection {
  bool skipped = false;                 // true if an overflow makes the step write nothing
  std::vector<ParamInspection> params;  // parameters with a gradient, in the order of the groups
};

}  // namespace amp_ext::optim
