// Selects the engine of a device, and runs CPU launches in torch's threads.
#include "devices/dispatch.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdlib>
#include <optional>

#include "cpu/launcher.h"
#include "cpu/processor.h"
#include "devices/torch_version.h"
#include "element.h"

namespace amp_ext {

namespace {

const cpu::Engine& selected_engine() {
  static const cpu::Engine* const engine = cpu::select_engine();
  TORCH_CHECK(
      engine != nullptr,
      "amp_ext: the environment variable AMP_EXT_CPU_ISA must be plain, avx2 or avx512, on a "
      "processor that has it, got ",
      std::getenv("AMP_EXT_CPU_ISA"));
  return *engine;
}

bool asks_ahead() {
  static const std::optional<bool> asks =
      cpu::asks_ahead(cpu::processor_vendor(), std::getenv("AMP_EXT_CPU_PREFETCH"));
  TORCH_CHECK(asks.has_value(),
              "amp_ext: the environment variable AMP_EXT_CPU_PREFETCH must be 0 or 1, got ",
              std::getenv("AMP_EXT_CPU_PREFETCH"));
  return *asks;
}

void parallel_for(int64_t total, int64_t grain, const std::function<void(int64_t, int64_t)>& run) {
  at::parallel_for(0, total, grain, run);
}

class CpuEngine : public DeviceEngine {
 public:
  void step(const at::Device&, const StepLaunch& launch, StepScratch&) const override {
    launcher().step(launch);
    std::fill_n(launch.is_launched, launch.count, true);
  }
  void judge_norm(const at::Device&, const GradientInputs& inputs, NormJudgement* judgement,
                  float* skips) const override {
    amp_ext::judge_norm(inputs, *judgement, *skips);
  }
  void scan(const at::Device&, const GradScanLaunch& launch, StepScratch&) const override {
    launcher().scan(launch);
  }
  void multiply(const at::Device&, const std::vector<KernelTensorArgs>& all_args,
                const MultiplyInputs& inputs, float* found_inf, int64_t* first_nonfinite,
                bool* is_launched) const override {
    launcher().multiply(all_args, inputs, found_inf, first_nonfinite);
    std::fill_n(is_launched, all_args.size(), true);
  }
  void count_nonfinite(const at::Device&, const std::vector<KernelTensorArgs>& all_args,
                       int64_t* counts) const override {
    launcher().count_nonfinite(all_args, counts);
  }
  void average(const at::Device&, const AverageLaunch& launch) const override {
    launcher().average(launch);
  }
  void update_scale(const at::Device&, const ScaleUpdate& update,
                    const std::vector<OverflowFlag>& flags) const override {
    cpu::Launcher::update_scale(update, flags);
  }

 private:
  static cpu::Launcher launcher() { return {selected_engine(), parallel_for, asks_ahead()}; }
};

}  // namespace

bool uses_cuda_engine(const at::Device& device) {
#if defined(AMP_EXT_CUDA_EMULATOR)
  return device.is_cpu();
#else
  return device.is_cuda();
#endif
}

void StepScratch::make_room(const at::Device& device) {
#if defined(AMP_EXT_WITH_CUDA)
  if (uses_cuda_engine(device)) block_counter(device);
#endif
  static_cast<void>(device);
}

const DeviceEngine& engine_of(const at::Device& device) {
#if defined(AMP_EXT_WITH_CUDA)
  if (uses_cuda_engine(device)) return cuda_engine();
#endif
  static_cast<void>(device);
  static const CpuEngine engine;
  return engine;
}

void check_device(const std::string& operation, const std::string& name, const at::Device& device) {
  check_torch_version(operation);
#if defined(AMP_EXT_WITH_CUDA)
  if (uses_cuda_engine(device)) return check_driver(operation);
#endif
  if (device.is_cpu()) return;
#if !defined(AMP_EXT_WITH_CUDA)
  TORCH_CHECK(!device.is_cuda(), operation, ": ", name, " must be on cpu, got ", device,
              ": this amp_ext was built without CUDA. Install a CUDA toolkit of torch's version, "
              "set CUDA_HOME, and rebuild: AMP_EXT_CUDA=1 pip install --no-build-isolation "
              "--force-reinstall --no-deps --no-cache-dir <amp_ext's folder>");
#endif
  TORCH_CHECK(false, operation, ": ", name, " must be on cpu or cuda, got ", device);
}

bool host_knows_of_skip(const at::Device& device, const GradientInputs& inputs) {
  return !uses_cuda_engine(device) && StepDecision::read(inputs).skip;
}

const char* cpu_isa() { return selected_engine().name; }

}  // namespace amp_ext
