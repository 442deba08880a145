// What is remembered of the last step, to notice mistakes before the next one.
#pragma once

#include <amp_ext/export.h>

#include <cstdint>
#include <optional>
#include <string>

#include "optimizer/param_table.h"

namespace amp_ext {

class AMP_EXT_API LastStep {
 public:
  // Copies what does not depend on the registered parameters.
  void take_over(const LastStep& before);
  // Forgets which parameter find_uncounted_write() compares, because the parameters are dropped.
  void forget_sample() { sample_.reset(); }

  // Remembers a step of all parameters.
  void remember(const ParamTable& params);
  // Returns the number of steps so far, applied or skipped.
  int64_t number() const { return number_; }

  // Finds a 16-bit CPU parameter that was written without a change of its version counter, such as
  // through .data: the next step would undo the write from the float32 master. Compares a few
  // elements of one parameter per step. Returns its index, but only the first time.
  std::optional<size_t> find_uncounted_write(const ParamTable& params);

 private:
  // The parameter that find_uncounted_write() compares with its master before the next step.
  struct MasterSample {
    size_t slot;             // index of the slot
    int64_t master_version;  // version counter of the master after the last step
  };

  int64_t number_ = 0;
  std::optional<MasterSample> sample_;
  bool finds_writes_ = true;  // false once find_uncounted_write() has reported a write
};

// Returns the warning about an uncounted write to the parameter that is called `param`.
AMP_EXT_API std::string warning_of_write(const std::string& optimizer, const std::string& param);

}  // namespace amp_ext
