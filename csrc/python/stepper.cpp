// Walks over the groups, gradients and states of a Python optimizer, and takes its steps.
#include "python/stepper.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <string_view>
#include <thread>
#include <type_traits>
#include <unordered_map>

#include "formats/moment_codes.h"
#include "ops/scalars.h"
#include "python/option_values.h"

namespace amp_ext::python {

namespace {

PyObject* interned(const std::string& name) { return PyUnicode_InternFromString(name.c_str()); }

// Names of the options that all optimizers have. The module must have no state, so each optimizer
// has its own references.
struct OptionNames {
  PyObject *params = interned("params"), *lr = interned("lr"),
           *master_weights = interned("master_weights"), *state_dtype = interned("state_dtype"),
           *rounding = interned("rounding"), *max_grad_norm = interned("max_grad_norm"),
           *clip_value = interned("clip_value"), *skip_nonfinite = interned("skip_nonfinite");
};

// Reads the options that decide about states, and whether values may be dithered.
bool read_format(PyObject* group, const OptionNames& name, GroupFormat& format) {
  PyObject* const masters = PyDict_GetItemWithError(group, name.master_weights);
  PyObject* const moments = PyDict_GetItemWithError(group, name.state_dtype);
  PyObject* const rounding = PyDict_GetItemWithError(group, name.rounding);
  if (masters == nullptr || moments == nullptr || rounding == nullptr) return false;
  using Masters = GroupFormat::Masters;
  bool has_masters = false;
  if (is_text(masters, "split")) {
    format.masters = Masters::kSplit;
  } else if (is_text(masters, "split8")) {
    format.masters = Masters::kSplit8;
  } else if (!PyUnicode_Check(masters) && flag_in(masters, has_masters)) {
    format.masters = has_masters ? Masters::kFloat32 : Masters::kNone;
  } else {
    return false;
  }
  if (is_text(moments, "float32")) {
    format.moments = at::kFloat;
  } else if (is_text(moments, "bfloat16")) {
    format.moments = at::kBFloat16;
  } else if (is_text(moments, "8bit") || is_text(moments, "8bit-bf16")) {
    format.is_coded = true;
    format.codes_roots = is_text(moments, "8bit");
  } else if (moments != Py_None) {
    return false;  // also a torch.dtype, whose name Python's check of the groups puts in its place
  }
  const bool wants = rounding == Py_None ? moments != Py_None : is_text(rounding, "dither");
  if (!wants && rounding != Py_None && !is_text(rounding, "nearest")) return false;
  // With a full master and float32 moments, only the parameter is rounded: the master loses
  // nothing.
  const bool stores_low_precision = format.masters == Masters::kNone ||
                                    format.masters == Masters::kSplit8 ||
                                    format.moments != at::kFloat;
  format.dithers = stores_low_precision && wants;
  return true;
}

template <typename Hyperparameters>
class OptionReaderOf : public OptionReader {
 public:
  OptionReaderOf() {
    params = names_.params;
    buffers = Hyperparameters::kBuffers;
    buffer_count = static_cast<int>(std::size(Hyperparameters::kBuffers));
    Hyperparameters::for_each_field([&](const char* name, auto) {
      const bool is_beta = std::string_view(name).substr(0, 4) == "beta";
      fields_.push_back({interned(is_beta ? "betas" : name), is_beta ? number_of_betas_ : -1});
      number_of_betas_ += is_beta;
    });
    if (buffers[buffer_count - 1].option != nullptr)
      option_of_last_ = interned(buffers[buffer_count - 1].option);
    keys.push_back({interned("step"), kStep, 0});
    const char* const masters[] = {"master_param", "master_low_bf16", "master_low_fp16",
                                   "master_low8_bf16", "master_low8_fp16"};
    for (int8_t form = 0; form < 5; ++form)
      keys.push_back({interned(masters[form]), kMaster, form});
    for (int i = 0; i < buffer_count; ++i) {
      const auto part = static_cast<int8_t>(kBuffer0 + i);
      const std::string name = buffers[i].name;
      keys.push_back({interned(name), part, 0});
      const BufferCode code = buffers[i].code;
      if (code == BufferCode::kNone) continue;
      const char* const suffix = code == BufferCode::kRatio  ? "_q8h"
                                 : code == BufferCode::kRoot ? "_q8s"
                                                             : "_q8m";
      keys.push_back({interned(name + suffix), part, 1});
      if (code != BufferCode::kRatio) keys.push_back({interned(name + "_exp"), kExponents, 0});
    }
  }

  bool read(PyObject* group, GroupFormat& format, OptionalTensor& lr) override {
    Hyperparameters& one = all_.emplace_back();
    PyObject* const rate = PyDict_GetItemWithError(group, names_.lr);
    if (rate != nullptr && !PyFloat_CheckExact(rate) && THPVariable_Check(rate)) {
      lr = THPVariable_Unpack(rate);
      if (lr->numel() != 1) return false;
    } else if (!number_in(rate, one.lr)) {
      return false;
    }
    size_t next = 0;
    bool are_read = true;
    Hyperparameters::for_each_field([&](const char* field, auto member) {
      const Field& source = fields_[next++];
      if (!Hyperparameters::is_option(field) || !are_read) return;
      PyObject* value = PyDict_GetItemWithError(group, source.option);
      if (source.index >= 0) {
        const bool fits =
            value != nullptr && PyTuple_Check(value) && PyTuple_GET_SIZE(value) == number_of_betas_;
        value = fits ? PyTuple_GET_ITEM(value, source.index) : nullptr;
      }
      if constexpr (std::is_same_v<std::decay_t<decltype(one.*member)>, bool>) {
        are_read = flag_in(value, one.*member);
      } else {
        are_read = number_in(value, one.*member);
      }
    });
    double max_grad_norm = 0.0;
    PyObject* const norm = PyDict_GetItemWithError(group, names_.max_grad_norm);
    if (!are_read || !one.can_decay() ||
        !limit_in(PyDict_GetItemWithError(group, names_.clip_value), one.clip_value) ||
        norm == nullptr || !limit_in(norm, max_grad_norm) ||
        !flag_in(PyDict_GetItemWithError(group, names_.skip_nonfinite), format.skip_nonfinite) ||
        !read_format(group, names_, format)) {
      return false;
    }
    one.dither = format.dithers;
    if (norm != Py_None) format.max_grad_norm = max_grad_norm;
    format.buffer_count = buffer_count;
    if (option_of_last_ != nullptr) {
      PyObject* const option = PyDict_GetItemWithError(group, option_of_last_);
      double number = 0.0;  // a flag, or a number such as momentum
      if (option != Py_None && !number_in(option, number)) return false;
      if (number == 0.0) --format.buffer_count;
    }
    format.formula_counts = one.why_step() != nullptr;
    return true;
  }

  void skip() override { all_.emplace_back(); }
  void clear() override { all_.clear(); }
  void put_into(StepGroups& groups) override { groups.refer_to(all_); }

 private:
  struct Field {
    PyObject* option;
    int index;  // among the numbers of the option; -1: the option is the number
  };
  const OptionNames names_;
  std::vector<Field> fields_;
  PyObject* option_of_last_ = nullptr;
  int number_of_betas_ = 0;
  std::vector<Hyperparameters> all_;
};

bool is_param(PyObject* object) {
  return Py_TYPE(object) == reinterpret_cast<PyTypeObject*>(ParameterClass) ||
         Py_TYPE(object) == reinterpret_cast<PyTypeObject*>(THPVariableClass) ||
         THPVariable_Check(object);
}

// Prefetches the first bytes of an object, which may lie in two cache lines. Does nothing for null,
// such as the storage of a sparse tensor: prefetching null searches the page tables.
AMP_EXT_INLINE void prefetch_begin(const void* object) {
  if (object == nullptr) return;
  __builtin_prefetch(object);
  __builtin_prefetch(static_cast<const char*>(object) + 63);
}

// Returns what tells the orders of elements in the same memory apart.
uint64_t layout_of(const at::Tensor& tensor) {
  uint64_t hash = 0;
  if (tensor.is_contiguous()) return hash;
  for (const int64_t stride : tensor.strides()) hash = (hash + stride + 1) * 0x9E3779B97F4A7C15u;
  return hash;
}

at::Tensor new_scalar(const at::Device& device, at::ScalarType dtype) {
  const OutsideInferenceMode normal;
  return at::zeros({}, at::TensorOptions(device).dtype(dtype));
}

// Steps of fewer elements on the CPU end sooner than another thread would get the GIL.
constexpr int64_t kSmallStep = int64_t{1} << 17;

}  // namespace

std::unique_ptr<OptionReader> formula_named(const std::string& hyperparameters) {
#define AMP_EXT_MAKE(Functor)                             \
  if (hyperparameters == Functor##Hyperparameters::kName) \
    return std::make_unique<OptionReaderOf<Functor##Hyperparameters>>();
  AMP_EXT_FOR_EACH_OPTIMIZER(AMP_EXT_MAKE)
  AMP_EXT_MAKE(Muon)
#undef AMP_EXT_MAKE
  throw py::value_error("there are no hyperparameters of this name: " + hyperparameters);
}

class CompiledStepper::Claim {
 public:
  // With `waits`, waits until a call of another thread has ended, as hooks of released gradients
  // do.
  Claim(CompiledStepper& stepper, const char* operation, bool waits = false) : stepper_(stepper) {
    while (stepper.is_in_use_.exchange(true)) {
      TORCH_CHECK(waits, stepper.optimizer_, ".", operation,
                  ": another thread is inside a call of this optimizer. Let one thread at a time "
                  "use it, for example with a lock.");
      const py::gil_scoped_release release;
      std::this_thread::yield();  // a call takes microseconds
    }
  }
  ~Claim() {
    stepper_.clear();
    stepper_.is_in_use_ = false;
  }
  Claim(const Claim&) = delete;
  Claim& operator=(const Claim&) = delete;

 private:
  CompiledStepper& stepper_;
};

class CompiledStepper::WithoutGil {
 public:
  explicit WithoutGil(CompiledStepper& stepper) : objects_(stepper.objects_) {
    for (PyObject* const each : objects_) Py_INCREF(each);
    owned_.reserve(stepper.grads_.size());
    for (const at::Tensor*& grad : stepper.grads_) {
      owned_.push_back(*grad);
      grad = &owned_.back();
    }
    released_.emplace();
  }
  ~WithoutGil() {
    take_back();
    for (PyObject* const each : objects_) Py_DECREF(each);
  }
  // Acquires the GIL. The tensors stay alive.
  void take_back() { released_.reset(); }

 private:
  const std::vector<PyObject*> objects_;
  std::vector<at::Tensor> owned_;
  std::optional<py::gil_scoped_release> released_;
};

namespace {

std::vector<std::string> names_of_buffers(const OptionReader& formula) {
  std::vector<std::string> found;
  for (int i = 0; i < formula.buffer_count; ++i) found.emplace_back(formula.buffers[i].name);
  return found;
}

}  // namespace

MuonFormula::MuonFormula(const std::string& optimizer)
    : algorithm(interned("algorithm")),
      reader(formula_named(MuonHyperparameters::kName)),
      step(optimizer, Naming::kGroups, reader->buffers[0].name) {}

CompiledStepper::CompiledStepper(std::string optimizer, const std::string& hyperparameters)
    : optimizer_(std::move(optimizer)),
      muon_(hyperparameters == MuonHyperparameters::kName
                ? std::make_unique<MuonFormula>(optimizer_)
                : nullptr),
      reader_(formula_named(muon_ == nullptr ? hyperparameters : AdamHyperparameters::kName)),
      step_(optimizer_, Naming::kGroups, names_of_buffers(*reader_)) {}

void CompiledStepper::clear() {
  step_.clear();
  scan_.clear();
  reader_->clear();
  if (muon_ != nullptr) {
    muon_->step.clear();
    muon_->reader->clear();
    muon_->options.clear();
  }
  formats_.clear();
  formulas_.clear();
  lrs_.clear();
  lists_.clear();
  places_.clear();
  grads_.clear();
  grad_places_.clear();
  objects_.clear();
  masters_.clear();
  shards_ = nullptr;
  numel_ = 0;
  is_on_cpu_ = true;
}

void CompiledStepper::forget_scan() {
  const Claim claim(*this, "scan_gradients", /*waits=*/true);
  scanned_.clear();
  scanned_sum_.reset();
}

void CompiledStepper::forget_masters() {
  const Claim claim(*this, "load_state_dict", /*waits=*/true);
  seen_.clear();
}

bool CompiledStepper::read_groups(const py::object& param_groups) {
  if (!PyList_Check(param_groups.ptr())) return false;
  const Py_ssize_t count = PyList_GET_SIZE(param_groups.ptr());
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* const group = PyList_GET_ITEM(param_groups.ptr(), i);
    if (!PyDict_Check(group)) return false;
    if (!read_group(group)) return false;
    PyObject* const params = PyDict_GetItemWithError(group, reader_->params);
    // Reading an iterator or a set again may give other parameters.
    if (params == nullptr || PyIter_Check(params) || PyAnySet_Check(params)) return false;
    lists_.push_back(py::reinterpret_steal<py::object>(PySequence_Fast(params, "params")));
    if (!lists_.back()) return clear_error();
    if (formats_[i].max_grad_norm != formats_[0].max_grad_norm ||
        formats_[i].skip_nonfinite != formats_[0].skip_nonfinite) {
      return false;
    }
  }
  reader_->put_into(groups_);
  for (Py_ssize_t i = 0; i < count; ++i) groups_.groups[i].lr = lrs_[i];
  if (muon_ != nullptr) {
    muon_->reader->put_into(muon_->groups);
    for (Py_ssize_t i = 0; i < count; ++i) muon_->groups.groups[i].lr = lrs_[i];
  }
  return true;
}

// Each formula has an element for each group, so that one index serves both.
bool CompiledStepper::read_group(PyObject* group) {
  GroupFormat& format = formats_.emplace_back();
  OptionalTensor& lr = lrs_.emplace_back();
  formulas_.push_back(reader_.get());
  if (muon_ == nullptr) return reader_->read(group, format, lr);
  MuonOptions& options = muon_->options.emplace_back();
  PyObject* const algorithm = PyDict_GetItemWithError(group, muon_->algorithm);
  if (algorithm == nullptr) return false;
  if (is_text(algorithm, "adamw")) {
    muon_->reader->skip();
    return reader_->read(group, format, lr);
  }
  formulas_.back() = muon_->reader.get();
  reader_->skip();
  return is_text(algorithm, "muon") && read_muon_options(group, options) &&
         muon_->reader->read(group, format, lr);
}

void CompiledStepper::place_params(const py::object& params) {
  std::vector<PyObject*> chosen;
  for (const py::handle param : params.is_none() ? py::object(py::tuple()) : params)
    chosen.push_back(param.ptr());
  std::sort(chosen.begin(), chosen.end());
  // A hook of released gradients chooses one parameter of many.
  PyObject* const only = chosen.size() == 1 ? chosen[0] : nullptr;
  const auto is_chosen = [&](PyObject* param) {
    return only != nullptr ? param == only
                           : std::binary_search(chosen.begin(), chosen.end(), param);
  };
  int64_t number = 0;
  for (size_t group = 0; group < lists_.size(); ++group) {
    PyObject** const items = PySequence_Fast_ITEMS(lists_[group].ptr());
    const Py_ssize_t count = PySequence_Fast_GET_SIZE(lists_[group].ptr());
    for (Py_ssize_t i = 0; i < count; ++i, ++number) {
      if (!params.is_none() && !is_chosen(items[i])) continue;
      places_.push_back({items[i], static_cast<int32_t>(group), static_cast<int32_t>(i), number});
    }
  }
}

const at::Tensor* CompiledStepper::grad_of(const ParamPlace& place) const {
  if (!shards_->empty()) {
    const OptionalTensor& grad = shards_->at(place.number).grad;
    return grad.has_value() ? &*grad : nullptr;
  }
  const at::Tensor& grad = THPVariable_Unpack(place.object).unsafeGetTensorImpl()->grad();
  return grad.defined() ? &grad : nullptr;
}

int64_t CompiledStepper::version_of_param(const ParamPlace& place, const at::Tensor& param) const {
  return version_of(param) + (shards_->empty() ? 0 : shards_->at(place.number).version);
}

int64_t CompiledStepper::version_of_grad(const ParamPlace& place, const at::Tensor& grad) const {
  return version_of(grad) + (shards_->empty() ? 0 : shards_->at(place.number).grad_version);
}

// Looks at each entry once, and expects the keys in the order of the last parameter.
void CompiledStepper::take_entries(Collected& one) {
  PyObject *key = nullptr, *value = nullptr;
  int number = 0;
  const std::vector<OptionReader::Key>& keys = one.formula->keys;
  if (predicted_for_ != one.formula) {
    std::fill(std::begin(predicted_), std::end(predicted_), OptionReader::Key());
    predicted_for_ = one.formula;
  }
  for (Py_ssize_t position = 0; PyDict_Next(one.entries, &position, &key, &value) != 0; ++number) {
    const OptionReader::Key* known = nullptr;
    if (number < kPredicted && predicted_[number].name == key) {
      known = &predicted_[number];
    } else {
      for (const OptionReader::Key& each : keys) {
        if (each.name == key) known = &each;
      }
      if (known == nullptr && PyUnicode_CheckExact(key) && PyUnicode_CHECK_INTERNED(key) == 0) {
        for (const OptionReader::Key& each : keys) {
          if (PyUnicode_Compare(each.name, key) == 0) known = &each;
        }
      }
      if (known == nullptr) continue;
      if (number < kPredicted) predicted_[number] = *known;
    }
    if (value == Py_None) continue;
    if (known->part == kStep && !formats_[one.place->group].counts_steps()) continue;
    one.is_readable &= one.found[known->part] == nullptr && is_param(value);
    one.found[known->part] = value;
    one.forms[known->part] = known->form;
  }
}

bool CompiledStepper::collect_block(Collected* block, const ParamPlace* places, size_t count,
                                    PyObject* states, Py_ssize_t& position) {
  for (size_t i = 0; i < count; ++i) {
    block[i].place = &places[i];
    block[i].formula = formulas_[places[i].group];
    prefetch_begin(places[i].object);
  }
  for (size_t i = 0; i < count; ++i) {
    if (!is_param(places[i].object)) return false;
    block[i].param = &THPVariable_Unpack(places[i].object);
    prefetch(block[i].param->unsafeGetTensorImpl());
  }
  for (size_t i = 0; i < count; ++i) {
    // The states are usually in the order of the parameters.
    PyObject *key = nullptr, *value = nullptr;
    Py_ssize_t next = position;
    if (PyDict_Next(states, &next, &key, &value) != 0 && key == places[i].object) {
      position = next;
    } else {
      value = PyDict_GetItemWithError(states, places[i].object);
      if (value == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
    }
    block[i].entries = value;
    prefetch_begin(block[i].param->unsafeGetTensorImpl()->autograd_meta());  // has the gradient
    if (value != nullptr) prefetch(reinterpret_cast<PyDictObject*>(value));
  }
  for (size_t i = 0; i < count; ++i) {
    const c10::TensorImpl* const impl = block[i].param->unsafeGetTensorImpl();
    if (impl->is_python_dispatch() && shards_->empty()) return false;
    block[i].grad = grad_of(places[i]);
    block[i].is_readable = block[i].entries == nullptr || PyDict_Check(block[i].entries);
    if (block[i].grad == nullptr) continue;
    prefetch(block[i].grad->unsafeGetTensorImpl());
    prefetch_begin(impl->unsafe_storage().unsafeGetStorageImpl());
    if (block[i].entries == nullptr || !block[i].is_readable) continue;
    const auto* const keys =
        reinterpret_cast<const char*>(reinterpret_cast<PyDictObject*>(block[i].entries)->ma_keys);
    prefetch_begin(keys);
    prefetch_begin(keys + 64);
  }
  for (size_t i = 0; i < count; ++i) {
    block[i].found.fill(nullptr);
    block[i].forms.fill(0);
    if (block[i].grad == nullptr) continue;
    if (block[i].entries != nullptr && block[i].is_readable) take_entries(block[i]);
    for (PyObject* const each : block[i].found) {
      prefetch_begin(each);
    }
    prefetch_begin(storage_of(*block[i].grad));
  }
  const auto for_each_entry = [&](const auto& visit) {
    for (size_t i = 0; i < count; ++i) {
      if (!block[i].is_readable) continue;
      for (PyObject* const each : block[i].found) {
        if (each != nullptr) visit(*THPVariable_Unpack(each).unsafeGetTensorImpl());
      }
    }
  };
  for_each_entry([](const c10::TensorImpl& impl) { prefetch(&impl); });
  for_each_entry([](const c10::TensorImpl& impl) {
    prefetch_begin(impl.unsafe_storage().unsafeGetStorageImpl());
  });
  return true;
}

ParamTensors CompiledStepper::tensors_of(const Collected& one) const {
  const GroupFormat& format = formats_[one.place->group];
  ParamTensors tensors;
  tensors.group = one.place->group;
  tensors.index = one.place->index;
  tensors.buffer_count = format.buffer_count;
  tensors.set(kParam, *one.param);
  tensors.set(kGrad, *one.grad);
  const auto take = [&](int part) {
    if (one.found[part] != nullptr) tensors.set(part, THPVariable_Unpack(one.found[part]));
  };
  take(kMaster);
  if (format.counts_steps()) take(kStep);
  bool has_blocks_here = false;
  for (int i = 0; i < format.buffer_count; ++i) {
    take(kBuffer0 + i);
    has_blocks_here |= one.forms[kBuffer0 + i] == 1 && has_blocks(one.formula->buffers[i].code);
  }
  if (has_blocks_here) take(kExponents);
  return tensors;
}

bool CompiledStepper::fits_options(const Collected& one, const ParamTensors& tensors) const {
  const GroupFormat& format = formats_[one.place->group];
  const at::Tensor& param = *one.param;
  const at::ScalarType dtype = param.scalar_type();
  using Masters = GroupFormat::Masters;
  const bool has_master = is_16_bit(dtype) && format.masters != Masters::kNone;
  if (has_master != (tensors.tensors[kMaster] != nullptr)) return false;
  if (has_master) {
    const int of_fp16 = dtype == at::kHalf ? 1 : 0;
    const int wanted = format.masters == Masters::kFloat32 ? 0
                       : format.masters == Masters::kSplit ? 1 + of_fp16
                                                           : 3 + of_fp16;
    const at::Tensor& master = tensors[kMaster];
    if (one.forms[kMaster] != wanted || master.device() != param.device()) return false;
    if (wanted == 0 && master.scalar_type() != at::kFloat) return false;
  }
  if (format.counts_steps()) {
    if (tensors.tensors[kStep] == nullptr) return false;
    const at::Tensor& step = tensors[kStep];
    if (step.scalar_type() != at::kFloat || step.device() != param.device()) return false;
  }
  const bool is_coded = format.is_coded && dtype != at::kDouble;
  const bool may_have_blocks =
      is_coded &&
      (shards_->empty() ? blocks_in_row(param) > 0 : shards_->at(one.place->number).has_blocks);
  const Codes codes = !may_have_blocks     ? Codes::kRatios
                      : format.codes_roots ? Codes::kAll
                                           : Codes::kAllButRoots;
  at::ScalarType wanted = is_coded ? at::kBFloat16 : dtype;
  if (dtype != at::kDouble && format.moments != at::ScalarType::Undefined) wanted = format.moments;
  for (int i = 0; i < format.buffer_count; ++i) {
    if (tensors.tensors[kBuffer0 + i] == nullptr) return false;
    const at::Tensor& buffer = tensors[kBuffer0 + i];
    const bool has_code = is_coded && is_among(one.formula->buffers[i].code, codes);
    if (one.forms[kBuffer0 + i] != (has_code ? 1 : 0)) return false;
    if (!has_code && buffer.scalar_type() != wanted) return false;
    if (buffer.device() != param.device()) return false;
  }
  return true;
}

void CompiledStepper::add(const Collected& one, ParamTensors& tensors) {
  const ParamPlace& place = *one.place;
  const at::Tensor& param = *one.param;
  for (int i = 0; i < tensors.buffer_count; ++i) {
    TORCH_CHECK(tensors.tensors[kBuffer0 + i] != nullptr, optimizer_, ": ",
                one.formula->buffers[i].name, " of group ", place.group, ", param ", place.index,
                " must be present");
  }
  objects_.push_back(place.object);
  for (PyObject* const each : one.found) {
    if (each != nullptr) objects_.push_back(each);
  }
  if (!shards_->empty()) tensors.global_offset = shards_->at(place.number).global_offset;
  if (tensors.tensors[kMaster] != nullptr && tensors[kMaster].scalar_type() == at::kFloat) {
    const auto number = static_cast<size_t>(place.number);
    if (number >= seen_.size()) seen_.resize(number + 1);
    const MasterSeen& seen = seen_[number];
    tensors.master_is_current = seen.param.has_value() && is_plain(param) &&
                                seen.param->is(param, version_of_param(place, param)) &&
                                seen.data == param.const_data_ptr() &&
                                seen.layout == layout_of(param) &&
                                seen.master->_unsafe_get_target() == storage_of(tensors[kMaster]);
    masters_.push_back(
        {&place, param.unsafeGetTensorImpl(), one.found[kMaster], tensors.master_is_current});
  }
  if (one.formula == reader_.get()) {
    step_.add(tensors, groups_);
  } else {
    muon_->step.add(tensors);
  }
  grads_.push_back(one.grad);
  grad_places_.push_back(&place);
  numel_ += param.numel();
  is_on_cpu_ &= param.is_cpu();
}

bool CompiledStepper::collect(const py::object& state, bool trusts_states, py::list& incomplete) {
  constexpr size_t kBlock = 16;
  Collected block[kBlock];
  Py_ssize_t position = 0;
  // The last parameter whose state fits the options, and its tensors. Most parameters are like it.
  // Not if moments are quantized, because their format depends on the sizes.
  Collected fitting{};
  ParamTensors of_fitting;
  const auto is_alike = [&](const Collected& one, const ParamTensors& tensors) {
    return one.forms == fitting.forms && tensors.kinds == of_fitting.kinds &&
           tensors.group == of_fitting.group && !formats_[tensors.group].is_coded;
  };
  for (size_t first = 0; first < places_.size(); first += kBlock) {
    const size_t count = std::min(kBlock, places_.size() - first);
    if (!collect_block(block, &places_[first], count, state.ptr(), position)) return false;
    for (size_t i = 0; i < count; ++i) {
      const Collected& one = block[i];
      if (one.grad == nullptr) continue;
      if (!one.is_readable) {
        incomplete.append(py::make_tuple(one.place->group, one.place->index));
        continue;
      }
      ParamTensors tensors = tensors_of(one);
      if (!trusts_states && !is_alike(one, tensors)) {
        if (!fits_options(one, tensors)) {
          incomplete.append(py::make_tuple(one.place->group, one.place->index));
          continue;
        }
        fitting = one;
        of_fitting = tensors;
      }
      if (incomplete.empty()) add(one, tensors);
    }
  }
  return true;
}

// Forgets gradients whose memory is gone, so that later steps without a scaler compare nothing.
void CompiledStepper::check_carries_no_scale() {
  scaled_.erase(std::remove_if(scaled_.begin(), scaled_.end(),
                               [](const SeenTensor& seen) { return seen.storage.expired(); }),
                scaled_.end());
  if (scaled_.empty()) return;
  std::unordered_map<const c10::StorageImpl*, const SeenTensor*> by_storage;
  for (const SeenTensor& seen : scaled_) {
    by_storage.emplace(seen.storage._unsafe_get_target(), &seen);
  }
  for (size_t i = 0; i < grads_.size(); ++i) {
    const ParamPlace& place = *grad_places_[i];
    const auto found = by_storage.find(storage_of(*grads_[i]));
    TORCH_CHECK(
        found == by_storage.end() ||
            !found->second->is(*grads_[i], version_of_grad(place, *grads_[i])),
        optimizer_, ": grad of group ", place.group, ", param ", place.index,
        " still carries the loss scale, because scaler.step(optimizer) has already used this "
        "gradient. Don't call optimizer.step() as well, and call zero_grad() before the next "
        "backward(). If you unscaled the gradient in a way that torch does not count, such as "
        "through .data, add an in-place operation that torch counts: grad.mul_(1).");
  }
}

// A skipped step leaves gradients scaled that it should have written back. On a GPU only the device
// knows of it, so they count as unscaled.
void CompiledStepper::remember_scaled() {
  scaled_.clear();
  for (size_t i = 0; i < grads_.size(); ++i) {
    const ParamPlace& place = *grad_places_[i];
    if (groups_.groups[place.group].hyperparameters->write_back_grads) continue;
    const at::Tensor& grad = *grads_[i];
    scaled_.push_back({grad.storage().getWeakStorageImpl(), version_of_grad(place, grad)});
  }
}

// Runs after all launches, because parameters that are views of one tensor share its version
// counter. A caller that passes shards increments the version of each DTensor that was stepped.
void CompiledStepper::remember_masters() {
  for (size_t i = 0; i < masters_.size(); ++i) {
    prefetch_versions(i, masters_.size(), [&](size_t at) { return masters_[at].param; });
    const MasterOfStep& one = masters_[i];
    MasterSeen& seen = seen_[one.place->number];
    const at::Tensor& param = THPVariable_Unpack(one.place->object);
    const bool is_dtensor = !shards_->empty() && shards_->at(one.place->number).is_dtensor;
    const int64_t version = version_of_param(*one.place, param) + (is_dtensor ? 1 : 0);
    if (one.is_current) {  // the step has changed nothing but the version
      seen.param->version = version;
      continue;
    }
    seen.master = THPVariable_Unpack(one.object).storage().getWeakStorageImpl();
    SeenTensor::remember(seen.param, param, version);
    seen.data = param.const_data_ptr();
    seen.layout = layout_of(param);
  }
}

std::vector<std::pair<int64_t, uint64_t>> CompiledStepper::hashes_of_grads() const {
  std::vector<std::pair<int64_t, uint64_t>> hashes;
  hashes.reserve(grads_.size());
  for (size_t i = 0; i < grads_.size(); ++i) {
    const auto address = reinterpret_cast<uint64_t>(grads_[i]->const_data_ptr());
    const auto version = static_cast<uint64_t>(version_of_grad(*grad_places_[i], *grads_[i]));
    hashes.emplace_back(grad_places_[i]->number, address ^ (version << 48));
  }
  return hashes;
}

// Scans the gradients for the norm, and for inf and NaN, if the last scan did not or a gradient has
// changed since. Rows: the last scan. Columns: what the caller asks for; a norm is "given" if it
// passed the sum of squares. Entries: whether the step scans.
//
//   last scan                 nothing   found_inf   norm, given   norm, not given
//   none                      no        no          no            yes
//   without sums of squares   no        no          no            yes
//   with sums of squares      no        no          no            no
//   a gradient changed since  no        yes         yes           yes
void CompiledStepper::scan_if_needed(GradientOptions& options, bool wants_norm) {
  const auto scanned = std::exchange(scanned_, {});
  OptionalTensor sum = std::exchange(scanned_sum_, std::nullopt);
  const bool has_changed = !scanned.empty() && scanned != hashes_of_grads();
  const bool adds_squares = wants_norm && !options.sum_of_squares.has_value();
  const bool scans =
      has_changed ? wants_norm || options.found_inf.has_value() : adds_squares && !sum.has_value();
  if (scans) {
    for (size_t i = 0; i < grads_.size(); ++i) scan_.add(*grads_[i], grad_places_[i]->number);
    scan_.run({}, {}, wants_norm, options.skip_nonfinite, scratch_);
    const at::Tensor total = wants_norm ? scan_.sum_of_squares() : at::Tensor();
    sum = total.defined() ? OptionalTensor(total) : std::nullopt;
    for (const GradScan::Part& part : scan_.parts()) {
      if (!options.found_inf.has_value()) break;
      const at::Device device = scan_.parts().front().device;
      options.found_inf =
          scalar_on(device, *options.found_inf).add(to_device(part.found_inf, device));
    }
  }
  if (adds_squares) options.sum_of_squares = std::move(sum);
}

py::object CompiledStepper::step(const py::object& state, const py::object& param_groups,
                                 const py::object& params, Inputs inputs,
                                 const std::vector<Shard>& shards, bool trusts_states) {
  const bool takes_all = params.is_none();
  const Claim claim(*this, "step", /*waits=*/!takes_all);
  shards_ = &shards;
  progress.clear();
  py::list incomplete;
  if (!PyDict_Check(state.ptr()) || !read_groups(param_groups)) return incomplete;
  place_params(params);
  try {
    if (!collect(state, trusts_states, incomplete)) return py::list();
    if (!incomplete.empty()) return incomplete;
    if (!inputs.is_of_scaler && !scaled_.empty()) check_carries_no_scale();
    const GroupFormat first = formats_.empty() ? GroupFormat() : formats_[0];
    const bool wants_norm = first.max_grad_norm.has_value() || inputs.sum_of_squares.has_value();
    const bool had_scale = inputs.grad_scale.has_value();
    if (!places_.empty()) {
      const at::Device device = THPVariable_Unpack(places_[0].object).device();
      const auto renew = [&](OptionalTensor& scalar, bool is_wanted) {
        if (!is_wanted) scalar.reset();
        if (is_wanted && (!scalar.has_value() || scalar->device() != device))
          scalar = new_scalar(device, at::kFloat);
      };
      renew(grad_norm, wants_norm);
      renew(step_applied, tracks_step_applied);
      if (muon_ != nullptr && !muon_->skipped_matrices.has_value())
        muon_->skipped_matrices = new_scalar(device, at::kLong);
    }
    StepInputs of_step{{std::move(inputs.grad_scale), std::move(inputs.found_inf),
                        first.max_grad_norm, std::move(inputs.sum_of_squares),
                        wants_norm ? grad_norm : std::nullopt, first.skip_nonfinite},
                       std::move(inputs.max_norm),
                       tracks_step_applied ? step_applied : std::nullopt};
    if (muon_ != nullptr) muon_->step.prepare(muon_->groups, muon_->options);
    std::optional<WithoutGil> without_gil;
    if (!is_on_cpu_ || numel_ >= kSmallStep) without_gil.emplace(*this);
    const at::NoGradGuard no_grad;
    if (takes_all) scan_if_needed(of_step.gradients, wants_norm);
    StepProgress done;
    try {
      step_.run(groups_, of_step, scratch_, done);
      if (muon_ != nullptr) {
        muon_->step.run(muon_->groups, of_step, muon_->skipped_matrices, scratch_, done);
      }
    } catch (...) {
      if (without_gil.has_value()) without_gil->take_back();
      progress = done.text();
      throw;
    }
    if (without_gil.has_value()) without_gil->take_back();
    // On a GPU, a skipped step has refreshed stale masters, so they are remembered all the same.
    if (!done.was_skipped) remember_masters();
    if (had_scale && takes_all) remember_scaled();
    return py::int_(grads_.size());
  } catch (...) {  // no later step may use a scan that was made for this one
    if (takes_all) scanned_.clear();
    throw;
  }
}

at::Tensor& CompiledStepper::first_nonfinite_on(const at::Device& device) {
  for (at::Tensor& first : first_nonfinites_) {
    if (first.device() == device) return first;
  }
  const OutsideInferenceMode normal;
  return first_nonfinites_.emplace_back(
      at::full({}, kNoTensor, at::TensorOptions(device).dtype(at::kLong)));
}

bool CompiledStepper::collect_grads(const py::object& param_groups, const py::object& params,
                                    const std::vector<Shard>& shards) {
  shards_ = &shards;
  if (!read_groups(param_groups)) return false;
  place_params(params);
  for (size_t i = 0; i < places_.size(); ++i) {
    const auto tensor_at = [&](size_t ahead) -> const c10::TensorImpl* {
      if (i + ahead >= places_.size() || !is_param(places_[i + ahead].object)) return nullptr;
      return THPVariable_Unpack(places_[i + ahead].object).unsafeGetTensorImpl();
    };
    if (i + 12 < places_.size()) prefetch_begin(places_[i + 12].object);
    if (const auto* const ahead = tensor_at(8)) prefetch(ahead);
    if (const auto* const ahead = tensor_at(4)) {
      if (ahead->grad().defined()) prefetch(ahead->grad().unsafeGetTensorImpl());
    }
    if (const auto* const ahead = tensor_at(2)) {
      if (ahead->grad().defined()) prefetch_begin(storage_of(ahead->grad()));
    }
    const ParamPlace& place = places_[i];
    if (!is_param(place.object)) return false;
    const auto* const impl = THPVariable_Unpack(place.object).unsafeGetTensorImpl();
    if (impl->is_python_dispatch() && shards_->empty()) return false;
    const at::Tensor* const grad = grad_of(place);
    if (grad == nullptr) continue;
    step_.check_grad(*grad, place.group, place.index);
    grads_.push_back(grad);
    grad_places_.push_back(&place);
    numel_ += grad->numel();
    is_on_cpu_ &= grad->is_cpu();
  }
  return true;
}

py::object CompiledStepper::scan(const py::object& param_groups, const py::object& params,
                                 const OptionalTensor& found_inf, const OptionalTensor& grad_scale,
                                 bool sums_squares, const std::vector<Shard>& shards) {
  const bool takes_all = params.is_none();
  const Claim claim(*this, "scan_gradients", /*waits=*/!takes_all);
  if (takes_all) {  // if this scan fails, no step may use an earlier one
    scanned_.clear();
    scanned_sum_.reset();
  }
  if (!collect_grads(param_groups, params, shards)) return py::none();
  check_scalar(optimizer_, "found_inf", found_inf);
  check_scalar(optimizer_, "grad_scale", grad_scale);
  bool is_partitioned = false;
  for (size_t i = 0; i < grads_.size(); ++i) {
    const int64_t number = grad_places_[i]->number;
    const int64_t partition = shards.empty() ? 0 : shards[number].partition;
    is_partitioned |= partition != 0;
    scan_.add(*grads_[i], number, partition);
  }
  for (GradScan::Part& part : scan_.parts()) part.first_nonfinite = first_nonfinite_on(part.device);
  const GroupFormat first = formats_.empty() ? GroupFormat() : formats_[0];
  sums_squares |= first.max_grad_norm.has_value();
  {
    std::optional<WithoutGil> without_gil;
    if (!is_on_cpu_ || numel_ >= kSmallStep) without_gil.emplace(*this);
    scan_.run(found_inf, grad_scale, sums_squares, first.skip_nonfinite, scratch_);
    if (takes_all) scanned_ = hashes_of_grads();
    if (takes_all && sums_squares && !is_partitioned && !grads_.empty()) {
      scanned_sum_ = scan_.sum_of_squares();
    }
  }
  py::list found;
  for (const GradScan::Part& part : scan_.parts()) {
    found.append(py::make_tuple(part.found_inf, part.first_nonfinite, part.partition,
                                sums_squares ? OptionalTensor(part.sum_of_squares) : std::nullopt));
  }
  return found;
}

bool CompiledStepper::gradients_were_written(const py::object& param_groups,
                                             const std::vector<Shard>& shards) {
  const Claim claim(*this, "step");
  if (scanned_.empty() || !collect_grads(param_groups, py::none(), shards)) return false;
  const auto hashes = hashes_of_grads();
  return std::any_of(hashes.begin(), hashes.end(), [&](const auto& now) {
    const auto before =
        std::lower_bound(scanned_.begin(), scanned_.end(), std::pair(now.first, uint64_t{0}));
    return before != scanned_.end() && before->first == now.first && *before != now;
  });
}

void CompiledStepper::check_grads(const py::object& param_groups, bool is_of_scaler,
                                  const std::vector<Shard>& shards, const py::object& params) {
  const Claim claim(*this, "step");
  const bool are_read = collect_grads(param_groups, params, shards);
  if (are_read && !is_of_scaler && !scaled_.empty()) check_carries_no_scale();
}

void CompiledStepper::mark_scaled(const py::object& param_groups,
                                  const std::vector<Shard>& shards) {
  const Claim claim(*this, "step");
  if (collect_grads(param_groups, py::none(), shards)) remember_scaled();
}

void define_stepper(py::module_& module) {
  py::class_<Shard>(module, "Shard")
      .def(py::init([](int64_t partition, int64_t global_offset, bool is_dtensor, bool has_blocks,
                       OptionalTensor grad, int64_t version, int64_t grad_version) {
             return Shard{partition,       global_offset, is_dtensor,  has_blocks,
                          std::move(grad), version,       grad_version};
           }),
           py::arg("partition"), py::arg("global_offset"), py::arg("is_dtensor"),
           py::arg("has_blocks"), py::arg("grad"), py::arg("version"), py::arg("grad_version"));
  using Shards = std::vector<Shard>;
  py::class_<CompiledStepper>(module, "CompiledStepper")
      .def(py::init<std::string, const std::string&>(), py::arg("optimizer"),
           py::arg("hyperparameters"))
      .def(
          "step",
          [](CompiledStepper& self, const py::object& state, const py::object& param_groups,
             OptionalTensor grad_scale, OptionalTensor found_inf, OptionalTensor sum_of_squares,
             OptionalTensor max_norm, bool is_of_scaler, const py::object& params,
             const Shards& shards, bool trusts_states) {
            return self.step(state, param_groups, params,
                             {std::move(grad_scale), std::move(found_inf),
                              std::move(sum_of_squares), std::move(max_norm), is_of_scaler},
                             shards, trusts_states);
          },
          py::arg("state"), py::arg("param_groups"), py::arg("grad_scale"), py::arg("found_inf"),
          py::arg("sum_of_squares"), py::arg("max_norm"), py::arg("is_of_scaler"),
          py::arg("params") = py::none(), py::arg("shards") = Shards(),
          py::arg("trusts_states") = false)
      .def("scan", &CompiledStepper::scan, py::arg("param_groups"), py::arg("params"),
           py::arg("found_inf"), py::arg("grad_scale"), py::arg("sums_squares"),
           py::arg("shards") = Shards())
      .def("gradients_were_written", &CompiledStepper::gradients_were_written,
           py::arg("param_groups"), py::arg("shards") = Shards())
      .def("check_grads", &CompiledStepper::check_grads, py::arg("param_groups"),
           py::arg("is_of_scaler"), py::arg("shards") = Shards(), py::arg("params") = py::none())
      .def("mark_scaled", &CompiledStepper::mark_scaled, py::arg("param_groups"),
           py::arg("shards") = Shards())
      .def("forget_scan", &CompiledStepper::forget_scan)
      .def("forget_masters", &CompiledStepper::forget_masters)
      .def_readwrite("tracks_step_applied", &CompiledStepper::tracks_step_applied)
      .def_readonly("grad_norm", &CompiledStepper::grad_norm)
      .def_readonly("step_applied", &CompiledStepper::step_applied)
      .def_property_readonly("skipped_matrices", &CompiledStepper::skipped_matrices)
      .def_readwrite("progress", &CompiledStepper::progress);
  // Returns how many buffers the states of a group have, and whether they count steps because the
  // formula needs the number or because values are dithered.
  module.def(
      "state_needs",
      [](const std::string& hyperparameters, const py::dict& group) {
        GroupFormat format;
        OptionalTensor lr;
        if (!formula_named(hyperparameters)->read(group.ptr(), format, lr)) {
          throw py::value_error("the options of a group must be checked before they are used");
        }
        return std::make_tuple(format.buffer_count, format.formula_counts, format.dithers);
      },
      py::arg("hyperparameters"), py::arg("group"));
}

}  // namespace amp_ext::python
