// Reads the options of Muon, and knows the coefficients that have a name.
#include <algorithm>
#include <array>
#include <string_view>

#include "python/option_values.h"

namespace amp_ext::python {

namespace {

// Amsel, Persson, Musco and Gower, "The Polar Express", arXiv 2505.16932. To be used with
// kPolarFactor: without it, rounding to bfloat16 may make a singular value larger than 1, which the
// first polynomials amplify without limit.
constexpr std::array<double, 3> kPolarExpress[] = {
    {8.28721201814563, -23.595886519098837, 17.300387312530933},
    {4.107059111542203, -2.9478499167379106, 0.5448431082926601},
    {3.9486908534822946, -2.908902115962949, 0.5518191394370137},
    {3.3184196573706015, -2.488488024314874, 0.51004894012372},
    {2.300652019954817, -1.6689039845747493, 0.4188073119525673},
    {1.891301407787398, -1.2679958271945868, 0.37680408948524835},
    {1.8750014808534479, -1.2500016453999487, 0.3750001645474248},
    {1.875, -1.25, 0.375}};
constexpr double kPolarFactor = 1.01;

bool read_triple(PyObject* object, std::array<double, 3>& triple) {
  if (!PyTuple_Check(object) && !PyList_Check(object)) return false;
  if (PySequence_Fast_GET_SIZE(object) != 3) return false;
  for (int i = 0; i < 3; ++i) {
    if (!number_in(PySequence_Fast_GET_ITEM(object, i), triple[i])) return false;
  }
  return true;
}

// Reads a triple, several triples, or a name.
bool read_coefficients(PyObject* object, MuonOptions& options) {
  options.ns_coefficients.clear();
  if (is_text(object, "polar_express")) {
    for (auto [a, b, c] : kPolarExpress) {
      // The last polynomial keeps 1 where it is.
      const double factor = a == 1.875 ? 1.0 : kPolarFactor;
      const double square = factor * factor;
      options.ns_coefficients.push_back(
          {a / factor, b / (factor * square), c / (factor * square * square)});
    }
    options.norm_factor = kPolarFactor;
    return true;
  }
  std::array<double, 3> triple;
  if (read_triple(object, triple)) {
    options.ns_coefficients.push_back(triple);
    return true;
  }
  if (!PyTuple_Check(object) && !PyList_Check(object)) return false;
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(object); ++i) {
    if (!read_triple(PySequence_Fast_GET_ITEM(object, i), triple)) return false;
    options.ns_coefficients.push_back(triple);
  }
  return !options.ns_coefficients.empty();
}

}  // namespace

bool read_muon_options(PyObject* dict, MuonOptions& options) {
  const auto option = [&](const char* name) { return PyDict_GetItemString(dict, name); };
  const auto integer = [&](const char* name, double least, int64_t& result) {
    double number = 0.0;
    const bool fits = number_in(option(name), number) && number >= least && number <= 0x1p62;
    if (fits) result = static_cast<int64_t>(number);
    return fits;
  };
  PyObject *const coefficients = option("ns_coefficients"), *const adjust = option("adjust_lr_fn"),
                  *const flatten = option("flatten");
  if (coefficients == nullptr || adjust == nullptr || flatten == nullptr) return false;
  if (flatten != Py_None) {
    bool is_flattened = false;
    if (!flag_in(flatten, is_flattened)) return false;
    options.flatten = is_flattened;
  }
  if (adjust == Py_None || is_text(adjust, "original")) {
    options.adjust_lr = AdjustLr::kOriginal;
  } else if (is_text(adjust, "match_rms_adamw")) {
    options.adjust_lr = AdjustLr::kMatchRmsAdamW;
  } else if (is_text(adjust, "spectral_unclamped")) {
    options.adjust_lr = AdjustLr::kSpectralUnclamped;
  } else {
    return false;
  }
  return read_coefficients(coefficients, options) && integer("ns_steps", 0.0, options.ns_steps) &&
         integer("scratch_bytes", 0.0, options.scratch_bytes) &&
         number_in(option("eps"), options.eps) && options.eps >= 0.0 &&
         flag_in(option("transposed"), options.transposed);
}

}  // namespace amp_ext::python
