// One update of averages of weights over lists of tensors.
#include "optimizer/weight_average.h"

#include <amp_ext/ops.h>

#include <utility>

#include "tensors/tensor_memory.h"

namespace amp_ext {

void average_weights_(const AverageLists& lists, AverageOptions options) {
  const char* const operation = "average_weights_";
  const TensorList &params = lists.params, &averages = lists.averages;
  options.dtype = at::kFloat;  // unused here: each average has its own dtype
  const std::string wrong = wrong_in(options);
  TORCH_CHECK(wrong.empty(), operation, ": ", wrong);
  check_is_plain(operation, "counters", lists.counters);
  const at::Device device = lists.counters.device();
  check_device(operation, "counters", device);
  TORCH_CHECK(lists.counters.scalar_type() == at::kLong && lists.counters.numel() == 2 &&
                  lists.counters.is_contiguous(),
              operation, ": counters must be two neighbouring Long elements, got ",
              lists.counters.scalar_type(), " of sizes ", lists.counters.sizes());
  if (lists.step_applied.has_value()) {
    check_number(operation, "step_applied", *lists.step_applied, at::kFloat, device);
  }
  check_length(operation, "averages", averages, params);
  if (lists.master_params.has_value()) {
    check_length(operation, "master_params", *lists.master_params, params);
  }
  TORCH_CHECK(!lists.global_offsets.has_value() || lists.global_offsets->size() == params.size(),
              operation, ": global_offsets must have ", params.size(), " numbers, got ",
              lists.global_offsets.has_value() ? lists.global_offsets->size() : 0);
  std::vector<AveragedWeight> weights;
  std::vector<MemoryUse> uses;
  for (size_t i = 0; i < params.size(); ++i) {
    const auto index = static_cast<int64_t>(i);
    const std::string name = c10::str("params[", i, "]"), average = c10::str("averages[", i, "]");
    check_is_plain(operation, name, params[i]);
    check_is_plain(operation, average, averages[i]);
    TORCH_CHECK(dtype_of(params[i]).has_value(), operation, ": ", name,
                " must be Float, Double, Half or BFloat16, got ", params[i].scalar_type());
    TORCH_CHECK(params[i].device() == device, operation, ": ", name, " must be on ", device,
                ", got ", params[i].device());
    const auto dtype = averages[i].scalar_type();
    TORCH_CHECK((dtype == at::kFloat || dtype == at::kBFloat16) &&
                    averages[i].sizes().equals(params[i].sizes()) &&
                    averages[i].device() == device && averages[i].is_non_overlapping_and_dense(),
                operation, ": ", average, " must be Float or BFloat16, dense, of sizes ",
                params[i].sizes(), " on ", device, ", got ", dtype, " of sizes ",
                averages[i].sizes(), " and strides ", averages[i].strides(), " on ",
                averages[i].device());
    uses.push_back({&averages[i], true, 0, index});
    uses.push_back({&params[i], false, 1, index});
    const int64_t first = lists.global_offsets.has_value() ? (*lists.global_offsets)[i] : 0;
    weights.push_back({nullptr, params[i], {}, first, 0, index});
    if (!lists.master_params.has_value()) continue;
    const at::Tensor& master = (*lists.master_params)[i];
    weights.back().master = master;
    const std::string master_name = c10::str("master_params[", i, "]");
    TORCH_CHECK(is_16_bit(params[i].scalar_type()), operation, ": ", name,
                " must be Half or BFloat16 beside a master, got ", params[i].scalar_type());
    TORCH_CHECK(master.device() == device, operation, ": ", master_name, " must be on ", device,
                ", got ", master.device());
    uses.push_back({&master, false, 2, index});
    if (master.scalar_type() != at::kFloat) {
      check_is_residual(operation, master_name, master, params[i]);
      continue;
    }
    check_is_plain(operation, master_name, master);
    TORCH_CHECK(master.sizes().equals(params[i].sizes()), operation, ": ", master_name,
                " must be of sizes ", params[i].sizes(), ", got ", master.sizes());
  }
  check_no_overlap(operation, uses, [](const MemoryUse& use) {
    constexpr const char* kNames[] = {"averages[", "params[", "master_params["};
    return c10::str(kNames[use.list], use.index, "]");
  });
  StepScratch scratch;
  launch_average(weights, averages, options, lists.counters,
                 lists.step_applied.value_or(at::Tensor()), scratch);
}

}  // namespace amp_ext
