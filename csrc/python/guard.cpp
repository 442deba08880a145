// Binds NormStatistics, which the Python class NormGuard wraps.
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

#include "optimizer/norm_statistics.h"
#include "python/module.h"

namespace amp_ext::python {

void define_guard(py::module_& module) {
  using release_gil = py::call_guard<py::gil_scoped_release>;
  py::class_<NormStatistics, std::shared_ptr<NormStatistics>>(module, "NormStatistics")
      .def(py::init([](double sigma_factor, int64_t window, int64_t warmup_steps, double max_norm,
                       int64_t patience, bool clips) {
             return std::make_shared<NormStatistics>(NormGuardHyperparameters{
                 sigma_factor, window, warmup_steps, max_norm, patience, clips});
           }),
           py::arg("sigma_factor"), py::arg("window"), py::arg("warmup_steps"), py::arg("max_norm"),
           py::arg("patience"), py::arg("clips"))
      .def(
          "state",
          [](const NormStatistics& self, bool wait) {
            NormSummary summary;
            {
              const py::gil_scoped_release release;
              summary = self.read(wait);
            }
            py::dict state;
            NormSummary::for_each_field(
                [&](const char* name, auto field) { state[name] = summary.*field; });
            return state;
          },
          py::arg("wait"))
      .def(
          "load",
          [](NormStatistics& self, const py::dict& state) {
            NormSummary summary;
            NormSummary::for_each_field([&](const char* name, auto field) {
              auto& value = summary.*field;
              value = py::cast<std::decay_t<decltype(value)>>(state[name]);
            });
            self.load(summary);
          },
          py::arg("state"))
      .def(
          "limits",
          [](const NormStatistics& self, bool wait) {
            const NormSummary summary = self.read(wait);
            return std::make_tuple(deviation_of(summary), summary.limit);
          },
          release_gil(), py::arg("wait"))
      .def(
          "last_step_skipped",
          [](const NormStatistics& self, bool wait) { return self.last_step_skipped(wait); },
          release_gil(), py::arg("wait"))
      .def(
          "history",
          [](const NormStatistics& self, bool wait) {
            const NormHistory history = self.history(wait);
            return std::make_tuple(history.first_norm, history.norms, history.withheld);
          },
          release_gil(), py::arg("wait"))
      .def("must_warn", &NormStatistics::must_warn)
      .def_static("warning", &NormStatistics::warning);
}

}  // namespace amp_ext::python
