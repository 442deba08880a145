// Compares each lane of the vectors of one instruction set, and every formula on them, with
// numbers.
//
// Compiled by test_vectors.py with AMP_EXT_ISA and AMP_EXT_VECTOR_BYTES set. Exits with 77 where
// the processor lacks the instructions, and with 1 after naming what differs.
#include <cstdio>

#include "instructions.h"
// Only now, the vectors:
#include "cpu/vector.h"
// After the vectors:
#include "element.h"
#include "kernels.h"

namespace {

using namespace amp_ext;  // NOLINT(build/namespaces)

using Bits = Vector<uint32_t>;
using Ints = Vector<int32_t>;
using Floats = Vector<float>;

int differences = 0;

template <typename T>
bool same(T actual, T expected) {
  return (actual != actual && expected != expected) ||
         std::memcmp(&actual, &expected, sizeof(T)) == 0;
}

template <typename T>
void check(const char* what, T actual, T expected) {
  if (same(actual, expected)) return;
  if (++differences <= 20) {
    std::printf("%s: %.9g instead of %.9g\n", what, static_cast<double>(actual),
                static_cast<double>(expected));
  }
}

uint32_t drawn = 1;
uint32_t draw_bits() {
  drawn = drawn * 1664525u + 1013904223u;
  return drawn ^ (drawn >> 16);
}

// Any float: usual ones, and now and then zero, inf, NaN, one that is subnormal or a tie.
template <typename T>
T draw() {
  constexpr float kSpecial[] = {0.0f,
                                -0.0f,
                                std::numeric_limits<float>::infinity(),
                                65520.0f,
                                1e-40f,
                                -std::numeric_limits<float>::infinity(),
                                1.0f,
                                std::numeric_limits<float>::quiet_NaN()};
  const uint32_t bits = draw_bits();
  if (bits % 16 == 0) return kSpecial[bits / 16 % 8];
  if (bits % 16 == 1) return float_of(bits & ~0xfffu);
  const auto fraction = static_cast<T>(static_cast<int32_t>(draw_bits())) / T(2147483648.0);
  return bits % 16 < 4 ? T(float_of(bits)) : fraction;
}

template <typename T>
Vector<T> draw_vector() {
  Vector<T> vector;
  for (int i = 0; i < kLanes<T>; ++i) vector[i] = draw<T>();
  return vector;
}

// The functions of vector.h.

template <typename Storage>
void check_16_bit_type(const char* name) {
  Storage stored[kLanes<float>];
  for (uint32_t first = 0; first < 0x10000u; first += kLanes<float>) {
    for (int i = 0; i < kLanes<float>; ++i) stored[i].bits = static_cast<uint16_t>(first + i);
    const Floats loaded = load<Floats>(stored);
    for (int i = 0; i < kLanes<float>; ++i) check(name, loaded[i], to_float(stored[i]));
  }
  for (int round = 0; round < 100000; ++round) {
    const Floats value = draw_vector<float>();
    Storage expected;
    store(stored, value);
    for (int i = 0; i < kLanes<float>; ++i) {
      from_float(value[i], expected);
      check(name, to_float(stored[i]), to_float(expected));
    }
  }
  // Odd numbers of vectors, with and without a NaN among them whose bits would be rounded to -0.
  for (const float special : {1.0f, float_of(0x7fffffffu)}) {
    float numbers[3 * kLanes<float>];
    Storage rounded[3 * kLanes<float> + 1];
    for (float& number : numbers) number = 1.0f + static_cast<float>(draw_bits() % 4096) / 1048576;
    numbers[kLanes<float> + 1] = special;
    rounded[3 * kLanes<float>].bits = 12345;
    round_all(numbers, 3 * kLanes<float>, rounded);
    for (int i = 0; i < 3 * kLanes<float>; ++i) {
      Storage expected;
      from_float(numbers[i], expected);
      check("round_all", to_float(rounded[i]), to_float(expected));
    }
    check<int>("the element behind", rounded[3 * kLanes<float>].bits, 12345);
  }
}

template <typename T>
void check_arithmetic() {
  for (int round = 0; round < 20000; ++round) {
    const Vector<T> a = draw_vector<T>();
    const Vector<T> b = draw_vector<T>();
    const Vector<T> root = square_root(a);
    const Vector<T> least = minimum(a, b);
    const Vector<T> most = maximum(a, b);
    const Vector<T> larger_ones = larger(a, b);
    const Vector<T> signs = sign(a);
    const Vector<T> clipped = clip_value(a, T(0.25));
    const Vector<T> chosen = select(is_finite(a), a, b);
    const Vector<T> between = Interpolation<T>::of(0.75, 0.25)(a, b);
    bool any_below = false;
    for (int i = 0; i < kLanes<T>; ++i) {
      const T x = a[i];
      const T y = b[i];
      check<T>("square_root", root[i], square_root(x));
      check<T>("minimum", least[i], x < y ? x : y);
      check<T>("maximum", most[i], x > y ? x : y);
      check<T>("larger", larger_ones[i], larger(x, y));
      check<T>("sign", signs[i], sign(x));
      check<T>("clip_value", clipped[i], clip_value(x, T(0.25)));
      check<T>("select", chosen[i], is_finite(x) ? x : y);
      check<T>("Interpolation", between[i], Interpolation<T>::of(0.75, 0.25)(x, y));
      any_below |= x < y;
    }
    check("any", any(a < b), any_below);
  }
}

void check_integers() {
  for (int round = 0; round < 20000; ++round) {
    const Bits bits = bit_cast<Bits>(draw_vector<float>());
    Ints a = bit_cast<Ints>(bits);
    const Ints b = bit_cast<Ints>(draw_vector<float>());
    uint16_t words[kLanes<float> + 1];
    uint8_t bytes[kLanes<float> + 1];
    words[kLanes<float>] = bytes[kLanes<float>] = 77;
    store_low_bits(words, bits);
    store_low_bits(bytes, bits);
    for (int i = 0; i < kLanes<float>; ++i) {
      check<int>("16 bits", words[i], static_cast<uint16_t>(bits[i]));
      check<int>("8 bits", bytes[i], static_cast<uint8_t>(bits[i]));
      check<int>("minimum of integers", minimum(a, b)[i], std::min<int>(a[i], b[i]));
      check<int>("maximum of integers", maximum(a, b)[i], std::max<int>(a[i], b[i]));
      check<int>("select of integers", select(a < b, a, b)[i], std::min<int>(a[i], b[i]));
    }
    check<int>("the word behind", words[kLanes<float>], 77);
    check<int>("the byte behind", bytes[kLanes<float>], 77);
  }
}

// The formulas: a choice by `if` would not compile with vectors, so that all of them cost what
// their arithmetic costs.
template <typename Functor, typename T, int kBuffers>
void check_formula(const char* name) {
  typename Functor::Hyperparameters hyperparameters;
  hyperparameters.lr = 0.125;
  hyperparameters.timestep = 3;
  hyperparameters.clip_value = 0.75;
  for (int round = 0; round < 4000; ++round) {
    hyperparameters.weight_decay = round % 2 == 0 ? 0.0 : 0.25;
    hyperparameters.maximize = round % 3 == 0;
    const GradientFactor factor{0.5f, 1.0f, 0.0f, false, false};
    const auto constants = TensorConstants<Functor, T>::make(hyperparameters, nullptr, factor);
    constexpr int kNumbers = 2 + kBuffers;  // gradient, parameter, buffers
    constexpr auto kIndices = std::make_integer_sequence<int, kBuffers>();
    Vector<T> vectors[kNumbers];
    for (Vector<T>& vector : vectors) vector = draw_vector<T>();
    T numbers[kLanes<T>][kNumbers];
    for (int i = 0; i < kLanes<T>; ++i) {
      for (int k = 0; k < kNumbers; ++k) numbers[i][k] = vectors[k][i];
      const T grad = constants.unscale_and_clip(numbers[i][0]);
      update_element<-1>(constants, grad, numbers[i][1], numbers[i] + 2, kIndices);
    }
    const Vector<T> grads = constants.unscale_and_clip(vectors[0]);
    update_element<-1>(constants, grads, vectors[1], vectors + 2, kIndices);
    for (int i = 0; i < kLanes<T>; ++i) {
      for (int k = 1; k < kNumbers; ++k) check<T>(name, vectors[k][i], numbers[i][k]);
    }
  }
}

}  // namespace

int main() {
  if (LACKS_INSTRUCTIONS) return 77;
  check_16_bit_type<BFloat16>("bfloat16");
  check_16_bit_type<Half>("float16");
  check_arithmetic<float>();
  check_arithmetic<double>();
  check_integers();
#define AMP_EXT_CHECK(Functor, buffers)                    \
  check_formula<Functor<float>, float, buffers>(#Functor); \
  check_formula<Functor<double>, double, buffers>(#Functor);
  AMP_EXT_FOR_EACH_OPTIMIZER_KERNEL(AMP_EXT_CHECK)
  return differences == 0 ? 0 : 1;
}

AMP_EXT_END_TARGET
