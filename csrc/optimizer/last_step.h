// Counts the steps of an optimizer.
#pragma once

#include <cstdint>

namespace amp_ext {

class LastStep {
 public:
  void take_over(const LastStep& before) { number_ = before.number_; }
  void remember() { ++number_; }
  // Returns the number of steps so far, applied or skipped.
  int64_t number() const { return number_; }

 private:
  int64_t number_ = 0;
};

}  // namespace amp_ext
