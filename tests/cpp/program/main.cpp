// Tests the C++ classes. `program check NAME` runs a check, `program train CASE FOLDER` trains with
// the tensors of a file there. Prints what fails, and exits with 1.
#include <amp_ext/amp_ext.h>
#include <torch/torch.h>

#include <fstream>
#include <iostream>

namespace {

using namespace amp_ext;
using namespace amp_ext::optim;
namespace theirs = torch::optim;
using torch::Tensor;
using Params = std::vector<Tensor>;
using Groups = std::vector<theirs::OptimizerParamGroup>;
using Make = std::function<std::unique_ptr<theirs::Optimizer>(const Params&)>;

void check(bool holds, const std::string& what) {
  if (!holds) throw std::runtime_error("FAILED: " + what);
}

// Fails unless a call throws an error that contains these words.
void check_refused(const std::string& words, const std::function<void()>& call) {
  try {
    call();
  } catch (const c10::Error& error) {
    const std::string text = error.what_without_backtrace();
    return check(text.find(words) != std::string::npos, text + "\nmust contain: " + words);
  }
  check(false, "no error: " + words);
}

GradScaler scaler_of(double scale, bool enabled = true) {
  GradScalerOptions options;
  options.init_scale = scale;
  options.enabled = enabled;
  options.growth_interval = 10;
  options.hysteresis = 2;
  return GradScaler(options);
}

// Training with the bits of Python.

// Makes an optimizer of two groups, of which the second has another learning rate.
template <typename Optimizer, typename Options>
Make with(const Options& options) {
  return [options](const Params& params) {
    Groups groups{{{params[0]}}};
    groups.emplace_back(Params{params[1]}, std::make_unique<Options>(0.005));
    return std::make_unique<Optimizer>(groups, options);
  };
}

const std::map<std::string, Make> kCases = {
    {"adam", with<Adam>(AdamOptions().betas({0.8, 0.95}).amsgrad(true).max_grad_norm(0.5))},
    {"adam-8bit-bf16", with<Adam>(AdamOptions().master_weights("split8").state_dtype("8bit-bf16"))},
    {"adamw", with<AdamW>(AdamWOptions().eps(1e-5).denominator_floor(1e-6).clip_value(0.125))},
    {"adamw-split", with<AdamW>(AdamWOptions().master_weights("split").state_dtype(at::kBFloat16))},
    {"adamw-8bit", with<AdamW>(AdamWOptions().state_dtype("8bit").rounding("nearest"))},
    {"adamw-skip", with<AdamW>(AdamWOptions().max_grad_norm(0.5).skip_nonfinite(true))},
    {"sgd",
     with<SGD>(
         SGDOptions().weight_decay(0.1).decoupled_weight_decay(true).cautious_weight_decay(true))},
    {"sgd-masters", with<SGD>(SGDOptions().momentum(0.75).nesterov(true).write_back_grads(true))},
    {"sgd-none", with<SGD>(SGDOptions().momentum(0.75).dampening(0.25).master_weights(false))},
    {"lion", with<Lion>(LionOptions().betas({0.8, 0.95}).maximize(true).rounding("dither"))},
    {"lion-none", with<Lion>(LionOptions().master_weights(false).state_dtype(std::nullopt))},
    {"lion-8bit", with<Lion>(LionOptions().master_weights("split").state_dtype("8bit"))}};

// Trains with the parameters and the gradients of a file. Resumes once, with new objects.
void train(const std::string& name, const std::string& folder) {
  std::ifstream file(folder + "/data.pt", std::ios::binary);
  const auto data = torch::pickle_load({std::istreambuf_iterator<char>(file), {}}).toGenericDict();
  const double scale = data.at("scale").toDouble();
  Params params;
  for (const c10::IValue& each : data.at("params").toListRef()) {
    params.push_back(each.toTensor().clone().set_requires_grad(true));
  }
  auto optimizer = kCases.at(name)(params);
  GradScaler scaler = scaler_of(scale, scale != 1.0);
  std::vector<Params> bits(params.size());
  for (const c10::IValue& grads : data.at("grads").toListRef()) {
    const auto step = static_cast<int64_t>(bits[0].size());
    if (step == data.at("resume_at").toInt()) {
      torch::save(*optimizer, folder + "/optimizer.pt");
      torch::save(scaler, folder + "/scaler.pt");
      optimizer = kCases.at(name)(params);
      scaler = scaler_of(2.0, scale != 1.0);
      torch::load(*optimizer, folder + "/optimizer.pt");
      torch::load(scaler, folder + "/scaler.pt");
    }
    if (step == data.at("lr_at").toInt()) optimizer->param_groups()[0].options().set_lr(0.003);
    for (size_t i = 0; i < params.size(); ++i) {
      params[i].mutable_grad() = scaler.scale(grads.toListRef()[i].toTensor().clone());
    }
    if (step % 10 == 8 && params[0].scalar_type() != torch::kHalf) scaler.unscale_(*optimizer);
    scaler.step(*optimizer);
    scaler.update();
    for (size_t i = 0; i < params.size(); ++i) bits[i].push_back(params[i].detach().clone());
  }
  torch::save(*optimizer, folder + "/optimizer.pt");
  const std::vector<char> saved = torch::pickle_save(
      std::make_tuple(torch::stack(bits[0]), torch::stack(bits[1]), scaler.get_scale()));
  std::ofstream(folder + "/result.pt", std::ios::binary).write(saved.data(), saved.size());
}

// Checks of the classes alone.

Tensor parameter(double value, c10::ScalarType dtype = torch::kFloat) {
  return torch::full({1}, value, dtype).requires_grad_(true);
}

void give(Tensor& param, double grad) { param.mutable_grad() = torch::full_like(param, grad); }

double value(const Tensor& param) { return param.item<double>(); }

void calls() {
  Tensor param = parameter(1.0);
  SGD optimizer({param}, SGDOptions(0.5));
  GradScaler scaler = scaler_of(4.0), disabled = scaler_of(4.0, /*enabled=*/false);
  check_refused("Attempted step but _scale is None", [&] { scaler.step(optimizer); });
  scaler.scale(torch::ones({}));
  check_refused("No inf checks were recorded prior to update.", [&] { scaler.update(); });
  const auto closure = [&] {
    give(param, -6.0);
    return (param - 3.0).square().sum();
  };
  check_refused("Closure use is not currently", [&] { scaler.step(optimizer, closure); });
  give(param, 4.0);
  scaler.unscale_(optimizer);
  check_refused("unscale_() has already been called", [&] { scaler.unscale_(optimizer); });
  scaler.step(optimizer);
  check(value(param) == 0.5, "gradients are unscaled once");
  check_refused("step() has already been called", [&] { scaler.step(optimizer); });
  scaler.update();
  give(param, 4.0);
  scaler.step(optimizer);
  check(value(param) == 0.0, "the step unscales gradients");
  check_refused("grad of group 0, param 0 still carries the loss scale", [&] { optimizer.step(); });
  scaler.update();
  for (const double grad : {double{INFINITY}, double{NAN}}) {  // with a hysteresis of 2
    give(param, grad);
    scaler.step(optimizer);
    scaler.update();
  }
  check(value(param) == 0.0 && scaler.get_scale() == 2.0, "steps are skipped");
  scaler.step(optimizer);
  scaler.update(8.0);
  give(param, 8.0);
  scaler.step(optimizer);
  check(scaler.get_scale() == 8.0 && value(param) == -0.5, "the scale is set");
  const torch::NoGradGuard no_grad;  // the step enables gradients for the closure
  const Tensor loss = disabled.step(optimizer, closure);
  check(loss.requires_grad() && value(loss) == 12.25 && value(param) == 2.5, "a closure");
}

// A class of the user with its own step.
struct Counted : amp_ext::optim::SGD {
  using FusedOptimizer::FusedOptimizer;
  Tensor step(LossClosure closure = nullptr) override {
    return FusedOptimizer::step(std::move(closure));
  }
};

void others() {
  Tensor a = parameter(1.0), b = parameter(1.0), c = parameter(1.0);
  GradScaler scaler = scaler_of(4.0);
  scaler.scale(a);
  theirs::SGD of_torch({a, b}, theirs::SGDOptions(1.0));
  Counted counted({c}, SGDOptions(1.0));
  for (const double grad : {2.0, double{INFINITY}, 1.0}) {
    for (Tensor* const param : {&a, &b, &c}) give(*param, grad * scaler.get_scale());
    scaler.step(of_torch);
    scaler.step(counted);
    scaler.update();
  }
  check(value(a) == -2.0 && value(b) == -2.0, "an overflow skips steps of torch's optimizers");
  check(value(c) == -2.0, "a derived class gets unscaled gradients");
  a.set_data(a.to(torch::kHalf));
  give(a, 1.0);
  check_refused("Attempting to unscale FP16 gradients", [&] { scaler.step(of_torch); });
}

void groups() {
  Tensor a = parameter(1.0), b = parameter(3.0);
  SGD optimizer({a}, SGDOptions(0.5).momentum(0.5));
  Groups other, foreign;
  other.emplace_back(Params{b}, std::make_unique<SGDOptions>(SGDOptions().weight_decay(0.25)));
  foreign.emplace_back(Params{b}, std::make_unique<LionOptions>(0.1));
  optimizer.add_param_group(other[0]);
  const auto& options = static_cast<SGDOptions&>(optimizer.param_groups()[1].options());
  check(options.lr() == 0.5 && options.momentum() == 0.5 && options.weight_decay() == 0.25,
        "a group takes the options that it does not set from the optimizer");
  check_refused("more than one parameter group", [&] { optimizer.add_param_group(other[0]); });
  check_refused("be amp_ext::optim::SGDOptions", [&] { optimizer.add_param_group(foreign[0]); });
  theirs::StepLR schedule(optimizer, /*step_size=*/1, /*gamma=*/0.5);
  schedule.step();
  schedule.step();
  give(a, 1.0);
  optimizer.step();  // b has no gradient
  check(options.lr() == 0.25 && value(a) == 0.75 && value(b) == 3.0, "a schedule");
  SGD later({a}, SGDOptions(0.5));
  later.step();
  static_cast<SGDOptions&>(later.param_groups()[0].options()).momentum(0.5).dampening(0.5);
  later.step();
  check(value(a) == -0.25, "the first step with a momentum that was switched on");
  static_cast<theirs::Optimizer&>(optimizer).add_param_group(Params{parameter(1.0)});
  check_refused("group 2 has no options of its own", [&] { optimizer.step(); });
}

void values() {
  Tensor a = parameter(1.0), b = parameter(1.0);
  const auto refused = [&](const char* words, const AdamWOptions& options) {
    check_refused(words, [&] { AdamW({a}, options); });
  };
  refused("AdamW: beta2 must be below 1, got 1", AdamWOptions().betas({0.9, 1.0}));
  refused("master_weights must be true, false, 'split' or", AdamWOptions().master_weights("low"));
  refused("state_dtype must be Float, BFloat16, '8bit-bf16'", AdamWOptions().state_dtype("4bit"));
  refused("nullopt with amsgrad", AdamWOptions().state_dtype("8bit").amsgrad(true));
  refused("cautious_weight_decay must be false unless",
          AdamWOptions().decoupled_weight_decay(false).cautious_weight_decay(true));
  refused("rounding must be 'dither', 'nearest' or", AdamWOptions().rounding("up"));
  check_refused("Nesterov momentum requires", [&] { SGD({a}, SGDOptions(0.1).nesterov(true)); });
  AdamW optimizer({a}, AdamWOptions(0.5));
  optimizer.add_param_group(Params{b});
  auto& options = static_cast<AdamWOptions&>(optimizer.param_groups()[1].options());
  const auto step = [&] { optimizer.step(); };
  give(a, 1.0);
  options.max_grad_norm(1.0);
  check_refused("max_grad_norm and skip_nonfinite must be the same in all groups", step);
  options.max_grad_norm(std::nullopt);
  b.mutable_grad() = torch::ones({1}).to_sparse();
  check_refused("grad of group 1, param 0 must be Strided, got Sparse", step);
  check(value(a) == 1.0, "nothing is written before an error");
  give(b, 1.0);
  optimizer.step();
  b.set_data(b.detach().to(torch::kHalf));
  give(b, 1.0);
  check_refused("param of group 1, param 0 must stay Float after its first step", step);
}

void masters() {
  Tensor param = parameter(1.0, torch::kBFloat16);
  for (const MasterWeights& form : {MasterWeights(true), MasterWeights("split")}) {
    AdamW optimizer({param}, AdamWOptions(1e-3).weight_decay(0.0).master_weights(form));
    give(param, 1.0);
    optimizer.step();
    check(value(optimizer.master_params()[0]) != value(param), "a master keeps more bits");
    std::stringstream file;
    torch::save(optimizer, file);
    const torch::NoGradGuard no_grad;
    param.fill_(3.0);
    optimizer.step();
    check(std::abs(value(optimizer.master_params()[0]) - 3.0) < 0.02, "a write reaches the master");
    torch::load(optimizer, file);
    optimizer.step();
    check(std::abs(value(param) - 3.0) < 0.02, "a loaded master follows the parameter");
  }
  const c10::InferenceMode inference;
  AdamW optimizer({parameter(1.0, torch::kHalf)}, AdamWOptions(1e-3));
  check(!optimizer.master_params()[0].is_inference(), "states are no inference tensors");
}

void archives() {
  Tensor a = torch::ones({2}).requires_grad_(true), b = parameter(3.0);
  AdamW optimizer({a, b}, AdamWOptions(0.5));
  give(a, 1.0);
  optimizer.step();
  std::stringstream file;
  torch::save(optimizer, file);
  const auto refused = [&](theirs::Optimizer&& other, const char* words) {
    std::stringstream copy(file.str());
    check_refused(words, [&] { torch::load(other, copy); });
  };
  refused(AdamW({a}, AdamWOptions()), "group0_of_1_params of the archive must be Float of sizes");
  refused(AdamW({b, a}, AdamWOptions()), "exp_avg of the archive must be Float of sizes [1]");
  refused(AdamW({a, b}, AdamWOptions().state_dtype(torch::kBFloat16)), "must be BFloat16 of sizes");
  refused(Adam({a, b}, AdamOptions()),
          "Adam of the archive must be Float of sizes [], got nothing");
  auto& options = static_cast<AdamWOptions&>(optimizer.param_groups()[0].options());
  options.lr(0.1).betas({0.5, 0.5});
  torch::load(optimizer, file);
  check(options.lr() == 0.5 && options.betas() == std::tuple(0.9, 0.999), "loaded options");
  torch::serialize::InputArchive whole;
  torch::serialize::OutputArchive before;
  std::stringstream copy(file.str());
  whole.load_from(copy);
  for (const std::string& key : whole.keys()) {
    if (key == "group0_cautious_weight_decay") continue;
    Tensor tensor;
    whole.read(key, tensor, /*is_buffer=*/true);
    before.write(key, tensor, /*is_buffer=*/true);
  }
  std::stringstream older;
  before.save_to(older);
  options.cautious_weight_decay(true).lr(0.1);
  torch::load(optimizer, older);
  check(options.lr() == 0.5 && options.cautious_weight_decay(), "an archive of before an option");
  a.set_data(a.detach().to(torch::kHalf));
  refused(AdamW({a, b}, AdamWOptions()), "master_param of the archive must be Float of sizes [2]");
  GradScaler scaler = scaler_of(4.0);
  check_refused("torch::load of a GradScaler: ", [&] { torch::load(scaler, file); });
  check(scaler.get_scale() == 4.0, "a refused archive changes nothing");
}

void casts() {
  const auto dtype = [] { return torch::mm(torch::ones({2, 2}), torch::ones({2, 2})).dtype(); };
  {
    const Autocast scope(torch::kCPU, torch::kBFloat16);
    check(dtype() == torch::kBFloat16, "a scope");
    const Autocast inner(torch::kCPU, torch::kHalf, /*enabled=*/false);
    check(dtype() == torch::kFloat, "an inner scope");
  }
  check(dtype() == torch::kFloat, "the end of a scope");
  Tensor weight = torch::ones({1, 1}).requires_grad_(true);
  SGD ours({weight}, SGDOptions(1.0));
  theirs::SGD foreign({weight}, theirs::SGDOptions(1.0));
  GradScaler scaler = scaler_of(0.5), disabled = scaler_of(1.0, /*enabled=*/false);
  scaler.scale(weight);
  for (const int i : {0, 1, 2}) {
    const Autocast scope(torch::kCPU, torch::kBFloat16);
    torch::mm(torch::ones({1, 1}), weight);  // caches a cast of the weight
    give(weight, -1.0);
    i == 0 ? ours.step() : i == 1 ? scaler.step(foreign) : disabled.step(foreign);
    check(value(torch::mm(torch::ones({1, 1}), weight)) == value(weight), "a cast is out of date");
  }
}

const std::map<std::string, std::function<void()>> kChecks = {
    {"calls", calls},     {"others", others},     {"groups", groups}, {"values", values},
    {"masters", masters}, {"archives", archives}, {"casts", casts}};

}  // namespace

int main(int, char** argv) {
  const std::string command = argv[1], name = argv[2];
  try {
    command == "check" ? kChecks.at(name)() : train(name, argv[3]);
  } catch (const std::exception& error) {
    std::cout << error.what() << "\n";
    return 1;
  }
}
