// Steps parameters during backward(), so that the gradients of a model never exist all at once.
#pragma once

#include <amp_ext/export.h>
#include <amp_ext/grad_scaler.h>
#include <amp_ext/optim.h>

#include <memory>

namespace amp_ext::optim {

// Makes an optimizer step each parameter as soon as its gradient is complete, and frees the
// gradient. The loop stays as it is: backward() does the work, and step() and update() complete the
// iteration. Python's amp_ext.optim.release_gradients documents what this allows and refuses.
//
//   amp_ext::optim::GradientRelease release(optimizer, &scaler);
//
// Do not use it for parameters that are replicated over ranks: each hook runs before the gradients
// are reduced, so the replicas would drift apart.
class AMP_EXT_API GradientRelease {
 public:
  // Registers the hook of each parameter that requires a gradient. Throws if a parameter has such a
  // hook already, because torch has room for one only. `scaler` scales the losses; null: they are
  // not scaled. A scaler that is disabled counts as null.
  explicit GradientRelease(FusedOptimizer& optimizer, GradScaler* scaler = nullptr);
  ~GradientRelease();  // calls remove()
  GradientRelease(GradientRelease&&) noexcept;
  GradientRelease& operator=(GradientRelease&&) noexcept;

  // Removes the hooks that are still those of this object. Later backward passes accumulate
  // gradients, and step() uses them.
  void remove();

  // Gradients accumulate as usual as long as the returned object lives: for all micro-batches of an
  // iteration but the last.
  [[nodiscard]] std::shared_ptr<const void> paused();

 private:
  std::shared_ptr<FusedOptimizer::Released> released_;  // null after remove()
};

}  // namespace amp_ext::optim
