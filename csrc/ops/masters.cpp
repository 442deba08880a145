// Refreshes float32 master weights from parameters; splits them into parameter and residual and
// joins the two again, on the CPU.
#include "ops/masters.h"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/eq.h>
#include <ATen/ops/where.h>
#include <amp_ext/ops.h>

#include <cmath>
#include <type_traits>

#include "formats/numbers.h"
#include "formats/split.h"
#include "tensors/tensor_memory.h"

namespace amp_ext {

namespace {

// Joins and splits one element. A split only computes the residual; the parameter keeps its bits.
template <typename Storage, int kBits>
struct Element {
  using Residual = typename Split<Storage, kBits>::Residual;
  static constexpr bool kIsDifference = Split<Storage, kBits>::kIsDifference;

  static float join(Storage param, Residual residual) {
    if constexpr (kIsDifference) {
      return SplitHalf16::join(to_float(param), uint32_t{residual});
    } else {
      return SplitMaster<Storage, kBits>::join(uint32_t{param.bits}, uint32_t{residual});
    }
  }

  // Returns the residual that, joined with the parameter, comes nearest to `master`. If `master`
  // does not round to the parameter, returns 0, so that the joined value is the parameter. A master
  // halfway between two parameters counts as rounding to either of them.
  static Residual residual_for(Storage param, float master) {
    if constexpr (kIsDifference) {
      const float half = float_of((SplitHalf16::unit_exponent(to_float(param)) + 14u) << 23);
      const float limited = SplitHalf16::saturated(master);
      const bool is_near = std::abs(limited - to_float(param)) <= half;
      return is_near ? static_cast<Residual>(SplitHalf16::residual_of(limited, to_float(param)))
                     : Residual{0};
    } else {
      Storage rounded;
      uint32_t param_bits, low_bits;
      from_float(master, rounded);
      SplitMaster<Storage, kBits>::split(master, false, 0u, param_bits, low_bits);
      if (param_bits == param.bits) return static_cast<Residual>(low_bits);
      constexpr auto kLargest = static_cast<Residual>((1u << (kBits - 1)) - 1u);
      return rounded.bits == param.bits ? kLargest : Residual{0};
    }
  }
};

template <typename Function>
void for_format(const at::Tensor& param, bool has_16_bits, const Function& function) {
  const auto for_bits = [&](auto storage) {
    if (has_16_bits) {
      function(Element<decltype(storage), 16>(), storage);
    } else {
      function(Element<decltype(storage), 8>(), storage);
    }
  };
  if (param.scalar_type() == at::kHalf) {
    for_bits(Half());
  } else {
    for_bits(BFloat16());
  }
}

void check_param(const char* operation, const at::Tensor& param) {
  check_is_plain(operation, "param", param);
  TORCH_CHECK(is_16_bit(param.scalar_type()), operation, ": param must be Half or BFloat16, got ",
              param.scalar_type());
}

}  // namespace

at::Tensor residual_elements(const at::Tensor& residual) {
  return residual.scalar_type() == at::kByte ? residual.view(at::kShort).squeeze(-1) : residual;
}

at::Tensor join_fp32(const at::Tensor& param, const at::Tensor& residual) {
  const char* const operation = "join_fp32";
  const at::NoGradGuard no_grad;
  check_param(operation, param);
  check_is_residual(operation, "residual", residual, param);
  const at::Tensor params = param.detach().cpu().contiguous();
  const at::Tensor residuals = residual_elements(residual).cpu().contiguous();
  at::Tensor masters = at::empty_like(params, params.options().dtype(at::kFloat));
  auto* const to = masters.mutable_data_ptr<float>();
  for_format(params, residual.scalar_type() == at::kByte, [&](auto element, auto storage) {
    using Storage = decltype(storage);
    using Residual = typename decltype(element)::Residual;
    const auto* const from = static_cast<const Storage*>(params.const_data_ptr());
    const auto* const from_residual = static_cast<const Residual*>(residuals.const_data_ptr());
    at::parallel_for(0, params.numel(), kGrain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) to[i] = element.join(from[i], from_residual[i]);
    });
  });
  at::Tensor found = at::empty_like(param, param.options().dtype(at::kFloat).requires_grad(false));
  return found.copy_(masters);
}

at::Tensor split_fp32(const at::Tensor& param, const at::Tensor& master, int64_t low_bits) {
  const char* const operation = "split_fp32";
  const at::NoGradGuard no_grad;
  check_param(operation, param);
  check_is_plain(operation, "master", master);
  TORCH_CHECK(low_bits == 16 || low_bits == 8, operation, ": low_bits must be 16 or 8, got ",
              low_bits);
  TORCH_CHECK(master.scalar_type() == at::kFloat && master.sizes().equals(param.sizes()), operation,
              ": master must be Float of sizes ", param.sizes(), ", got ", master.scalar_type(),
              " of sizes ", master.sizes());
  const at::Tensor params = param.detach().cpu().contiguous();
  const at::Tensor masters = master.detach().cpu().contiguous();
  const at::ScalarType dtype = low_bits == 16 ? at::kShort : at::kChar;
  at::Tensor residuals = at::empty_like(params, params.options().dtype(dtype));
  const auto* const from = masters.const_data_ptr<float>();
  for_format(params, low_bits == 16, [&](auto element, auto storage) {
    using Storage = decltype(storage);
    using Residual = typename decltype(element)::Residual;
    const auto* const from_param = static_cast<const Storage*>(params.const_data_ptr());
    auto* const to = static_cast<Residual*>(residuals.mutable_data_ptr());
    at::parallel_for(0, params.numel(), kGrain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) to[i] = element.residual_for(from_param[i], from[i]);
    });
  });
  at::Tensor residual = at::empty_like(param, param.options().dtype(dtype).requires_grad(false));
  residual.copy_(residuals);
  return low_bits == 16 ? residual.unsqueeze(-1).view(at::kByte) : residual;
}

void check_is_residual(const std::string& operation, const std::string& name,
                       const at::Tensor& residual, const at::Tensor& param) {
  check_is_plain(operation, name, residual);
  std::vector<int64_t> sizes = param.sizes().vec();
  if (residual.scalar_type() == at::kByte) sizes.push_back(2);
  TORCH_CHECK(residual.scalar_type() == at::kByte || residual.scalar_type() == at::kChar, operation,
              ": ", name, " must be Float, Byte or Char, got ", residual.scalar_type());
  TORCH_CHECK(residual.sizes().equals(sizes), operation, ": ", name, " must be of sizes ",
              at::IntArrayRef(sizes), ", got ", residual.sizes());
  if (residual.scalar_type() == at::kChar) return;
  bool is_in_pairs = residual.stride(-1) == 1 && residual.storage_offset() % 2 == 0;
  for (int64_t dim = 0; dim + 1 < residual.dim(); ++dim)
    is_in_pairs &= residual.stride(dim) % 2 == 0;
  TORCH_CHECK(is_in_pairs, operation, ": ", name, " must have its last dimension in one piece");
}

at::Tensor refreshed_master(const at::Tensor& param, const at::Tensor& master_param) {
  const at::NoGradGuard no_grad;
  const at::Tensor rounded = master_param.to(param.scalar_type());
  return at::where(rounded.eq(param), master_param, param.to(at::kFloat));
}

void refresh_masters_(const TensorList& params, const TensorList& master_params) {
  check_length("refresh_masters_", "master_params", master_params, params);
  for (size_t i = 0; i < params.size(); ++i) {
    TORCH_CHECK(master_params[i].scalar_type() == at::kFloat &&
                    master_params[i].sizes().equals(params[i].sizes()) &&
                    master_params[i].device() == params[i].device(),
                "refresh_masters_: master_params[", i, "] must be ", at::kFloat, " of sizes ",
                params[i].sizes(), " on ", params[i].device(), ", got ",
                master_params[i].scalar_type(), " of sizes ", master_params[i].sizes(), " on ",
                master_params[i].device());
  }
  for (size_t i = 0; i < params.size(); ++i) {
    master_params[i].copy_(refreshed_master(params[i], master_params[i]));
  }
}

}  // namespace amp_ext
