// What a step would do, as `inspect` of an optimizer tells it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace amp_ext::optim {

// What a step does to one parameter, which means its master where it has one, decoded where that is
// split. Of the numbers that the stored bits stand for, in double.
struct ParamInspection {
  int64_t group = 0;
  int64_t index_in_group = 0;
  double norm = 0.0;            // before the step
  double update_norm = 0.0;     // of what the step adds
  double ratio = 0.0;           // of the two; 0 without an update
  double largest_update = 0.0;  // the largest magnitude of an element
  // After the step, by the names of the buffers: "exp_avg".
  std::vector<std::pair<std::string, double>> moment_norms;
  // The shares of the elements that are stored with the same number after the step as before: by
  // the parameter, and by its master, if it has one. 0 without an element.
  double unmoved = 0.0;
  std::optional<double> unmoved_master;
};

struct Inspection {
  bool skipped = false;                 // the step writes nothing: an overflow
  std::vector<ParamInspection> params;  // those with a gradient, in the order of the groups
};

}  // namespace amp_ext::optim
