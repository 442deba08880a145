// Quantizes moments to 8 bits and dequantizes them, on the CPU; rounds to nearest.
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <amp_ext/ops.h>

#include <algorithm>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "formats/moment_codes.h"
#include "tensors/tensor_memory.h"

namespace amp_ext {

namespace {

// Returns the tensor on the CPU, dense in memory. Dense tensors keep their memory order.
at::Tensor dense_on_cpu(const at::Tensor& tensor) {
  const at::Tensor here = tensor.detach().cpu();
  return here.is_non_overlapping_and_dense() ? here : here.contiguous();
}

// Returns `tensor` on the CPU in the memory order of `layout`, so that one index addresses the same
// element in both tensors.
at::Tensor laid_out_as(const at::Tensor& layout, const at::Tensor& tensor) {
  const at::Tensor here = tensor.detach().cpu();
  if (have_same_dense_layout(here, layout)) return here;
  return at::empty_like(layout, here.options()).copy_(here);
}

void check_tensor(const char* operation, const char* name, const at::Tensor& tensor,
                  at::ScalarType dtype, at::IntArrayRef sizes) {
  check_is_plain(operation, name, tensor);
  TORCH_CHECK(tensor.scalar_type() == dtype && tensor.sizes().equals(sizes), operation, ": ", name,
              " must be ", dtype, " of sizes ", sizes, ", got ", tensor.scalar_type(), " of sizes ",
              tensor.sizes());
}

// Returns the sizes of a tensor's block exponents. Throws unless dimension 0 has the largest
// stride, because each block must lie within one row of dimension 0.
std::vector<int64_t> sizes_of_exponents(const char* operation, const char* name,
                                        const at::Tensor& tensor) {
  int64_t row = 1;
  int64_t largest = 0;
  for (int64_t dim = 1; dim < tensor.dim(); ++dim) {
    row *= tensor.size(dim);
    if (tensor.size(dim) > 1) largest = std::max(largest, tensor.stride(dim));
  }
  TORCH_CHECK(tensor.dim() >= 2 && row % kBlockSize == 0 &&
                  (tensor.size(0) < 2 || tensor.stride(0) >= largest),
              operation, ": ", name, " must have rows of a multiple of ", kBlockSize,
              " elements, dimension 0 outermost, got sizes ", tensor.sizes(), " and strides ",
              tensor.strides());
  return {tensor.size(0), row / kBlockSize};
}

bool is_of_roots(const char* operation, const std::string& code) {
  TORCH_CHECK(code == "q8s" || code == "q8m", operation, ": code must be 'q8s' or 'q8m', got '",
              code, "'");
  return code == "q8s";
}

template <typename Code>
void encode_block(const float* moments, uint8_t* codes, uint8_t& exponent) {
  float measured[kBlockSize];
  uint32_t largest = 0;
  for (int i = 0; i < kBlockSize; ++i) {
    // A step quantizes the square root of a second moment, and any other moment unchanged.
    constexpr bool kIsRoot = std::is_same_v<Code, RootCode>;
    measured[i] = Code::measured(kIsRoot ? square_root(moments[i]) : moments[i]);
    const uint32_t bits = bits_of(measured[i]) & 0x7fffffffu;
    largest = std::max(largest, Code::lifted(bits, false, 0u));
  }
  const BlockUnit unit = BlockUnit::above(largest, Code::kLastUnit, Code::kReserve);
  exponent = static_cast<uint8_t>(unit.byte);
  for (int i = 0; i < kBlockSize; ++i) {
    const uint32_t code = Code::encode(measured[i], unit.inverse(), false, 0u);
    codes[i] = static_cast<uint8_t>(unit.is_nan() ? 0 : code);
  }
}

template <typename Code>
void decode_block(const uint8_t* codes, uint8_t exponent, float* moments) {
  const BlockUnit unit{exponent};
  for (int i = 0; i < kBlockSize; ++i) {
    moments[i] = Code::number(Code::decode(uint32_t{codes[i]}, unit.value()));
  }
}

}  // namespace

at::Tensor quantize_ratios(const at::Tensor& moment, const at::Tensor& second_moment) {
  const char* const operation = "quantize_ratios";
  const at::NoGradGuard no_grad;
  check_tensor(operation, "moment", moment, at::kFloat, moment.sizes());
  check_tensor(operation, "second_moment", second_moment, at::kFloat, moment.sizes());
  const at::Tensor moments = dense_on_cpu(moment);
  const at::Tensor seconds = laid_out_as(moments, second_moment);
  at::Tensor codes = at::empty_like(moments, moments.options().dtype(at::kChar));
  const auto* const from = moments.const_data_ptr<float>();
  const auto* const beside = seconds.const_data_ptr<float>();
  auto* const to = codes.mutable_data_ptr<int8_t>();
  at::parallel_for(0, codes.numel(), kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const uint32_t unit = unit_below_root(bits_of(beside[i]));
      to[i] = static_cast<int8_t>(RatioCode::encode(from[i], unit, false, 0u));
    }
  });
  return codes.to(moment.device());
}

at::Tensor dequantize_ratios(const at::Tensor& codes, const at::Tensor& second_moment) {
  const char* const operation = "dequantize_ratios";
  const at::NoGradGuard no_grad;
  check_tensor(operation, "codes", codes, at::kChar, codes.sizes());
  check_tensor(operation, "second_moment", second_moment, at::kFloat, codes.sizes());
  const at::Tensor all = dense_on_cpu(codes);
  const at::Tensor seconds = laid_out_as(all, second_moment);
  at::Tensor moments = at::empty_like(all, all.options().dtype(at::kFloat));
  const auto* const from = all.const_data_ptr<int8_t>();
  const auto* const beside = seconds.const_data_ptr<float>();
  auto* const to = moments.mutable_data_ptr<float>();
  at::parallel_for(0, all.numel(), kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const uint32_t unit = unit_below_root(bits_of(beside[i]));
      to[i] = RatioCode::decode(uint32_t{static_cast<uint8_t>(from[i])}, unit);
    }
  });
  return moments.to(codes.device());
}

std::pair<at::Tensor, at::Tensor> quantize_blockwise(const at::Tensor& moment,
                                                     const std::string& code) {
  const char* const operation = "quantize_blockwise";
  const at::NoGradGuard no_grad;
  const bool of_roots = is_of_roots(operation, code);
  check_tensor(operation, "moment", moment, at::kFloat, moment.sizes());
  const std::vector<int64_t> sizes = sizes_of_exponents(operation, "moment", moment);
  const at::Tensor moments = dense_on_cpu(moment);
  at::Tensor codes = at::empty_like(moments, moments.options().dtype(at::kByte));
  at::Tensor exponents = at::empty(sizes, codes.options());
  const auto* const from = moments.const_data_ptr<float>();
  auto* const to = codes.mutable_data_ptr<uint8_t>();
  auto* const to_exponents = exponents.mutable_data_ptr<uint8_t>();
  at::parallel_for(0, exponents.numel(), kGrain / kBlockSize, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const auto encode = of_roots ? &encode_block<RootCode> : &encode_block<MomentumCode>;
      encode(from + i * kBlockSize, to + i * kBlockSize, to_exponents[i]);
    }
  });
  return {codes.to(moment.device()), exponents.to(moment.device())};
}

at::Tensor dequantize_blockwise(const at::Tensor& codes, const at::Tensor& exponents,
                                const std::string& code) {
  const char* const operation = "dequantize_blockwise";
  const at::NoGradGuard no_grad;
  const bool of_roots = is_of_roots(operation, code);
  check_tensor(operation, "codes", codes, at::kByte, codes.sizes());
  const std::vector<int64_t> sizes = sizes_of_exponents(operation, "codes", codes);
  check_tensor(operation, "exponents", exponents, at::kByte, sizes);
  const at::Tensor all = dense_on_cpu(codes);
  const at::Tensor all_exponents = exponents.detach().cpu().contiguous();
  at::Tensor moments = at::empty_like(all, all.options().dtype(at::kFloat));
  const auto* const from = all.const_data_ptr<uint8_t>();
  const auto* const from_exponents = all_exponents.const_data_ptr<uint8_t>();
  auto* const to = moments.mutable_data_ptr<float>();
  at::parallel_for(0, exponents.numel(), kGrain / kBlockSize, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const auto decode = of_roots ? &decode_block<RootCode> : &decode_block<MomentumCode>;
      decode(from + i * kBlockSize, from_exponents[i], to + i * kBlockSize);
    }
  });
  return moments.to(codes.device());
}

}  // namespace amp_ext
