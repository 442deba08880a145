// Steps a formula with more buffers than any of the package, in an unusual order, as the engine of
// one instruction set does, or as kernels do.
//
// Compiled by test_four_buffers.py for AVX2, without vectors, or for the emulator. Exits with 1
// after naming what is wrong.
#include <cstdio>

#ifdef AMP_EXT_CUDA_EMULATOR
#include "cuda/step.cuh"
#define AMP_EXT_END_TARGET
#else
#include "cpu/standard_headers.h"
#if AMP_EXT_VECTOR_BYTES == 32
AMP_EXT_TARGET("avx2,fma,f16c")
#else
#undef AMP_EXT_END_TARGET
#define AMP_EXT_END_TARGET
#endif
// Only now, the vectors:
#include "cpu/engine_body.h"
#endif

namespace {

using namespace amp_ext;  // NOLINT(build/namespaces)

// Two first moments around the second one, and the last gradient.
struct ShuffledHyperparameters : CommonHyperparameters {
  double beta_fast = 0.9;
  double beta_slow = 0.99;
  double beta_second = 0.995;

  static constexpr BufferDescription kBuffers[] = {
      {"last_grad", BufferRole::kOther},
      {"exp_avg_slow", BufferRole::kFirstMoment, kSignMomentStride, BufferCode::kRatio},
      {"exp_avg_sq", BufferRole::kSecondMoment, kSecondMomentStride, BufferCode::kRoot},
      {"exp_avg", BufferRole::kFirstMoment, kFirstMomentStride, BufferCode::kRatio}};
  double kept_share(int buffer) const {
    const double shares[] = {0.0, beta_slow, beta_second, beta_fast};
    return shares[buffer];
  }
};
constexpr int kBuffers = 4;
constexpr int kSecond = 2;
static_assert(BufferDescriptions::of<ShuffledHyperparameters>(kBuffers).fit_together());

template <typename T>
struct Shuffled {
  using Hyperparameters = ShuffledHyperparameters;

  T lr, fast, slow, second;

  static AMP_EXT_INLINE Shuffled for_tensor(const Hyperparameters& hyperparameters, double lr,
                                            double /*step*/) {
    return {static_cast<T>(lr), static_cast<T>(1.0 - hyperparameters.beta_fast),
            static_cast<T>(1.0 - hyperparameters.beta_slow),
            static_cast<T>(1.0 - hyperparameters.beta_second)};
  }
  template <typename V>
  AMP_EXT_INLINE V operator()(V grad, V& param, V& last_grad, V& exp_avg_slow, V& exp_avg_sq,
                              V& exp_avg) const {
    exp_avg = exp_avg + fast * (grad - exp_avg);
    exp_avg_slow = exp_avg_slow + slow * (grad - exp_avg_slow);
    exp_avg_sq = exp_avg_sq + second * (grad * grad - exp_avg_sq);
    const V root = square_root(exp_avg_sq);
    param = param - lr * (exp_avg + exp_avg_slow + (grad - last_grad)) / (root + T(0.01));
    last_grad = grad;
    return root;
  }
};

constexpr int64_t kNumel = 37 * kBlockSize;

template <typename Kinds>
void take_step(const TensorRecord& record, const ShuffledHyperparameters& hyperparameters) {
  using Formula = Shuffled<float>;
#ifdef AMP_EXT_CUDA_EMULATOR
  using Streams = cuda::Streams<Kinds>;
  bool is_launched = false;
  int64_t launched = 0;
  StepLaunch launch = {{}, &record, 1, &hyperparameters, {}, nullptr, &is_launched};
  launch.inputs.skip_nonfinite = true;
  cuda::launch_step<Formula, Streams, cuda::StepShape<Shuffled, Streams>>(launch, nullptr, nullptr,
                                                                          launched);
#else
  const GradientFactor factor{1.0f, 1.0f, 1.0, 0.0f, false, /*skip_nonfinite=*/true};
  const auto constants = TensorConstants<Formula, float>::make(hyperparameters, nullptr, factor);
  using Streams = cpu::AMP_EXT_ISA::Streams<Kinds>;
  cpu::AMP_EXT_ISA::step_tile_of<Streams>(constants, cpu::Tile{record, 0, 0, 0, kNumel, 0});
#endif
}

// The state of a parameter as numbers.
struct State {
  double param[kNumel];
  double buffers[kBuffers][kNumel];
  uint32_t units[kNumel];  // of the ratios
};

struct Memory {
  alignas(64) float param[kNumel];
  alignas(64) float grad[kNumel];
  alignas(64) char buffers[kBuffers][kNumel * sizeof(float)] = {};
  alignas(64) uint8_t exponents[kNumel / kBlockSize];

  template <typename Kind>
  float number(int buffer, int64_t i, uint32_t unit) const {
    const uint32_t code = static_cast<uint8_t>(buffers[buffer][i]);
    if constexpr (Kind::kFormat == BufferFormat::kRatio8) {
      return RatioCode::decode(code, unit);
    } else if constexpr (Kind::kFormat == BufferFormat::kBlockwise8) {
      const float root = Kind::Code::decode(code, BlockUnit{exponents[i / kBlockSize]}.value());
      return Kind::Code::number(root);
    } else {
      return to_float(reinterpret_cast<const typename Kind::Stored*>(buffers[buffer])[i]);
    }
  }
  template <typename Kinds, int... index>
  void read(State& state, std::integer_sequence<int, index...>) const {
    for (int64_t i = 0; i < kNumel; ++i) {
      using Second = typename Kinds::template Buffer<kSecond>;
      const float second = number<Second>(kSecond, i, 0);
      state.param[i] = param[i];
      state.units[i] = unit_below_root(bits_of(second));
      ((state.buffers[index][i] =
            number<typename Kinds::template Buffer<index>>(index, i, state.units[i])),
       ...);
    }
  }
};

// A number as it comes back from memory.
template <typename Kind>
float stored(double value, uint32_t unit, uint8_t exponent, bool dithers, uint32_t word) {
  const auto number = static_cast<float>(value);
  if constexpr (Kind::kFormat == BufferFormat::kRatio8) {
    return RatioCode::decode(RatioCode::encode(number, unit, dithers, word), unit);
  } else if constexpr (Kind::kFormat == BufferFormat::kBlockwise8) {
    const BlockUnit block{exponent};
    const float root = Kind::Code::measured(static_cast<float>(std::sqrt(value)));
    const uint32_t code = Kind::Code::encode(root, block.inverse(), dithers, word);
    return Kind::Code::number(Kind::Code::decode(code, block.value()));
  } else {
    typename Kind::Stored rounded;
    from_float(number, rounded);
    const bool is_dithered = dithers && sizeof rounded == 2;
    return is_dithered ? float_of(dithered_to_upper_bits(number, word) & 0xffff0000u)
                       : to_float(rounded);
  }
}

// Float32 may round a number near to a border to the other code, not many numbers.
template <typename Kinds, int buffer>
void compare(const State& wanted, const State& found, const Memory& memory, int step,
             uint8_t dithered, int& faults) {
  constexpr uint32_t kStride = ShuffledHyperparameters::kBuffers[buffer].dither_stride;
  const bool dithers = (dithered & kDithersBuffer0 << buffer) != 0;
  int64_t others = 0;
  for (int64_t i = 0; i < kNumel; ++i) {
    const double expected = stored<typename Kinds::template Buffer<buffer>>(
        wanted.buffers[buffer][i], found.units[i], memory.exponents[i / kBlockSize], dithers,
        dither_phase(i) + step * kStride);
    const double error = std::abs(found.buffers[buffer][i] - expected);
    others += !(error <= 1e-5 * std::abs(expected) + 1e-12);
  }
  if (others <= kNumel / 100) return;
  std::printf("%d numbers of %s differ at step %d, dithered %d\n", static_cast<int>(others),
              ShuffledHyperparameters::kBuffers[buffer].name, step, dithers);
  ++faults;
}

template <typename Buffers, int... index>
int faults_with(const ShuffledHyperparameters& given,
                std::integer_sequence<int, index...> indices) {
  using Kinds =
      KindsOf<Combination<Plain<float>, Plain<float>, Buffers>, ShuffledHyperparameters, kBuffers>;
  static Memory memory;
  static State state, wanted;
  memory = Memory();
  std::memset(memory.exponents, 1, sizeof memory.exponents);
  for (int64_t i = 0; i < kNumel; ++i) memory.param[i] = 0.01f * static_cast<float>(i % 201 - 100);
  TensorRecord record;
  record.param = memory.param;
  record.grad = memory.grad;
  record.exponents = memory.exponents;
  record.numel = kNumel;
  ((record.buffers[index] = memory.buffers[index]), ...);
  ((record.buffer_formats[index] = Kinds::template Buffer<index>::kFormat), ...);
  ShuffledHyperparameters hyperparameters = given;
  hyperparameters.lr = 0.01;
  record.dithered = dithered_numbers(hyperparameters) & ~kDithersParam;
  int faults = 0;
  for (int step = 1; step <= 20; ++step) {
    hyperparameters.timestep = step;
    memory.template read<Kinds>(wanted, indices);
    const auto formula = Shuffled<double>::for_tensor(hyperparameters, hyperparameters.lr, step);
    for (int64_t i = 0; i < kNumel; ++i) {
      const auto drawn = static_cast<uint32_t>(i * 2654435761u + step * 40503u) * 2246822519u;
      const float size = 0.001f * static_cast<float>(1 + i / kBlockSize);
      memory.grad[i] = size * (static_cast<float>(drawn >> 16) / 32768.0f - 0.8f);
      if ((i + step) % 97 == 0) {  // is skipped
        memory.grad[i] = std::numeric_limits<float>::quiet_NaN();
      } else {
        formula(static_cast<double>(memory.grad[i]), wanted.param[i], wanted.buffers[index][i]...);
      }
    }
    take_step<Kinds>(record, hyperparameters);
    memory.template read<Kinds>(state, indices);
    (compare<Kinds, index>(wanted, state, memory, step, record.dithered, faults), ...);
    for (int64_t i = 0; i < kNumel; ++i) {
      if (std::abs(state.param[i] - wanted.param[i]) <= 1e-6) continue;
      std::printf("parameter %d is %g, not %g, at step %d\n", static_cast<int>(i), state.param[i],
                  wanted.param[i], step);
      ++faults;
    }
  }
  return faults;
}

}  // namespace

int main() {
  int faults = 0;
  constexpr auto kIndices = std::make_integer_sequence<int, kBuffers>();
  ShuffledHyperparameters nearest, some, all;
  some.dither = all.dither = true;
  all.beta_fast = 0.99;  // would freeze, too
  for (const auto& hyperparameters : {nearest, some, all}) {
    faults += faults_with<Uniform<float>>(hyperparameters, kIndices);
    faults += faults_with<Uniform<BFloat16>>(hyperparameters, kIndices);
    faults += faults_with<Coded<Codes::kAll>>(hyperparameters, kIndices);
    faults += faults_with<Coded<Codes::kAllButRoots>>(hyperparameters, kIndices);
  }
  return faults > 0 ? 1 : 0;
}

AMP_EXT_END_TARGET
