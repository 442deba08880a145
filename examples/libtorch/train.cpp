// Fits a small network to a photograph in fp16, without Python. The results are bit-identical to
// the run "fp16 amp_ext" of examples/photo.py.
//
//   python examples/photo.py --write-start start.pt    # the photograph and the initial weights
//   train start.pt --checkpoint run.pt --picture photo.ppm
//   train start.pt --resume run.pt                     # like photo.py --resume run.pt
//
// Each program can resume from a checkpoint of the other. `photo.py --steps N` limits the steps of
// both.

#include <amp_ext/amp_ext.h>
#include <torch/torch.h>

#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace {

using torch::Tensor;

constexpr double kLearningRate = 5e-3;
constexpr int64_t kGrowthInterval = 10;  // steps; small, so that the demo shows the scale grow
constexpr int kReportEvery = 10;         // steps
constexpr int kSaveEvery = 20;           // steps between two checkpoints

// Helpers for dicts and lists with values of any type, as in Python.

using Dict = c10::impl::GenericDict;

Dict new_dict(std::initializer_list<std::pair<std::string, c10::IValue>> entries) {
  Dict dict(c10::AnyType::get(), c10::AnyType::get());
  for (const auto& [name, value] : entries) dict.insert(name, value);
  return dict;
}

template <typename Element>
c10::impl::GenericList new_list(const std::vector<Element>& elements) {
  c10::impl::GenericList list(c10::AnyType::get());
  for (const Element& element : elements) list.push_back(element);
  return list;
}

template <typename Element>
std::vector<Element> elements_of(const c10::IValue& list) {
  std::vector<Element> elements;
  for (const c10::IValue& element : list.toListRef()) elements.push_back(element.to<Element>());
  return elements;
}

c10::IValue entry(const c10::IValue& dict, const std::string& name) {
  const bool is_there = dict.isGenericDict() && dict.toGenericDict().contains(name);
  TORCH_CHECK(is_there, "no entry \"", name,
              "\" in the file: START is of photo.py --write-start, and ",
              "--resume takes a file of --checkpoint");
  return dict.toGenericDict().at(name);
}

// The network.

void load_weights(torch::nn::Module& model, const c10::IValue& weights) {
  const torch::NoGradGuard no_grad;
  for (const auto& param : model.named_parameters()) {
    param.value().copy_(entry(weights, param.key()).toTensor());
  }
}

// Creates a network with fp16 parameters that maps `width` Fourier features to red, green and blue.
torch::nn::Sequential make_model(int64_t width, const c10::IValue& weights, torch::Device device) {
  using torch::nn::Linear, torch::nn::ReLU;
  torch::nn::Sequential model(Linear(width, width), ReLU(), Linear(width, width), ReLU(),
                              Linear(width, 3));
  load_weights(*model, weights);
  model->to(device, torch::kHalf);
  return model;
}

// Returns sines and cosines of each pixel's coordinates: Tancik et al., "Fourier Features Let
// Networks Learn High Frequency Functions in Low Dimensional Domains", 2020.
Tensor fourier_features(const Tensor& coordinates, const Tensor& frequency) {
  const Tensor phase = coordinates.matmul(frequency);  // radians
  return torch::cat({phase.sin(), phase.cos()}, /*dim=*/-1);
}

// A network that learns a photograph, with its optimizer, scaler and loss curve.
struct Training {
  const c10::IValue about;  // settings of the run, which a resumed run must share
  c10::IValue random;       // states of Python's random generators, unused here and saved unchanged
  const int64_t divisor;    // number of tiles; divides each loss, because gradients add up
  const torch::Device device;
  const Tensor photo;     // [height, width, 3], 0 to 1
  const Tensor order;     // [tiles, pixels]: indices of the pixels of each tile
  const Tensor features;  // [tiles, pixels, width]
  const Tensor colours;   // [tiles, pixels, 3]
  torch::nn::Sequential model;
  amp_ext::optim::AdamW optimizer;
  amp_ext::GradScaler scaler;
  std::vector<double> losses;    // mean squared error of each step
  std::vector<double> scales;    // loss scale of each step taken and of the next step
  std::vector<int64_t> skipped;  // indices of the steps that were skipped after an overflow
  double seconds = 0.0;          // time of all steps but the first

  // Starts from the file that `photo.py --write-start` wrote.
  explicit Training(const c10::IValue& start)
      : about(entry(start, "about")),
        random(entry(start, "random")),
        divisor(entry(about, "tiles").toInt()),
        device(entry(start, "device").toStringRef()),
        photo(entry(start, "photo").toTensor()),
        order(entry(start, "order").toTensor()),
        features(fourier_features(entry(start, "coordinates").toTensor(),
                                  entry(start, "frequency").toTensor())
                     .index({order})
                     .to(device)),
        colours(photo.view({-1, 3}).index({order}).to(device)),
        model(make_model(entry(about, "width").toInt(), entry(start, "model"), device)),
        optimizer(model->parameters(), amp_ext::optim::AdamWOptions(kLearningRate)),
        scaler(amp_ext::GradScalerOptions().device(device.type()).growth_interval(kGrowthInterval)),
        scales{scaler.get_scale()} {}

  int steps() const { return static_cast<int>(losses.size()); }

  void step() {
    const auto begin = std::chrono::steady_clock::now();
    optimizer.zero_grad();
    Tensor step_loss = torch::zeros({}, device);
    for (int64_t tile = 0; tile < features.size(0); ++tile) {
      Tensor loss;
      {
        const amp_ext::Autocast autocast(device.type(), torch::kHalf);
        const Tensor output = model->forward(features[tile]);
        loss = torch::mse_loss(output.to(torch::kFloat), colours[tile]);
      }
      scaler.scale(loss / divisor).backward();
      step_loss += loss.detach();
    }
    scaler.step(optimizer);  // changes nothing if a gradient is inf or NaN
    scaler.update();

    // Training does not need these numbers, and each of the two reads waits for a GPU.
    losses.push_back(step_loss.item<double>() / static_cast<double>(features.size(0)));
    scales.push_back(scaler.get_scale());
    if (scales.back() < scales[scales.size() - 2]) skipped.push_back(steps() - 1);
    if (steps() == 1) return;  // the first step includes the warm-up of libraries
    seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }

  // Returns the picture that the network has learned: [height, width, 3], 0 to 1.
  Tensor picture() {
    const torch::NoGradGuard no_grad;
    const amp_ext::Autocast autocast(device.type(), torch::kHalf);
    Tensor pixels = torch::empty({photo.numel() / 3, 3});
    for (int64_t tile = 0; tile < features.size(0); ++tile) {
      const Tensor output = model->forward(features[tile]).to(torch::kFloat);
      pixels.index_copy_(0, order[tile], output.nan_to_num().clamp(0, 1).cpu());
    }
    return pixels.view_as(photo);
  }

  // Writes a checkpoint like Python's MixedPrecisionTrainer.save, with the `extra` entry of
  // photo.py.
  void save(const std::string& path) const {
    Dict weights = new_dict({});
    for (const auto& param : model->named_parameters()) weights.insert(param.key(), param.value());
    const Dict trainer = new_dict({{"optimizer", optimizer.state_dict()},
                                   {"scaler", scaler.state_dict()},
                                   {"scheduler", {}},
                                   {"gradient_accumulation_steps", 1},
                                   {"accumulated", 0},
                                   {"gradients", new_list<Tensor>({})},
                                   {"loss", {}}});
    const auto curves =
        new_list<c10::IValue>({new_list(losses), new_list(scales), new_list(skipped), seconds});
    const Dict extra = new_dict({{"about", about}, {"curves", curves}});
    amp_ext::save_state(
        path,
        new_dict({{"model", weights}, {"trainer", trainer}, {"random", random}, {"extra", extra}}));
  }

  void load(const std::string& path) {
    const c10::IValue content = amp_ext::load_state(path);
    const c10::IValue extra = entry(content, "extra"), saved = entry(extra, "about");
    TORCH_CHECK(saved == about, "the run must be that of ", path, ", ", saved, ", got ", about);
    load_weights(*model, entry(content, "model"));  // first, because masters are copied from them
    optimizer.load_state_dict(entry(entry(content, "trainer"), "optimizer"));
    scaler.load_state_dict(entry(entry(content, "trainer"), "scaler"));
    random = entry(content, "random");
    const c10::List<c10::IValue> curves = entry(extra, "curves").toList();
    losses = elements_of<double>(curves.get(0));
    scales = elements_of<double>(curves.get(1));
    skipped = elements_of<int64_t>(curves.get(2));
    seconds = curves.get(3).toDouble();
  }
};

double psnr(double mean_squared_error) { return -10 * std::log10(mean_squared_error); }

void write_ppm(const std::string& path, const Tensor& picture) {
  const Tensor bytes = picture.mul(255).round().to(torch::kByte).contiguous();
  std::ofstream file(path, std::ios::binary);
  file << "P6\n" << bytes.size(1) << ' ' << bytes.size(0) << "\n255\n";
  file.write(static_cast<const char*>(bytes.const_data_ptr()), bytes.numel());
  file.close();
  TORCH_CHECK(file.good(), "can't write ", path);
}

// The options of the command line, by name, and the path START under "start".
using Options = std::map<std::string, std::string>;

Options read_command_line(const std::vector<std::string>& arguments) {
  const char* const usage =
      "usage: train START [--resume FILE] [--checkpoint FILE] [--picture FILE]";
  Options options{{"--resume", ""}, {"--checkpoint", ""}, {"--picture", ""}};
  TORCH_CHECK(!arguments.empty() && arguments[0][0] != '-', "START must come first\n", usage);
  for (size_t i = 1; i < arguments.size(); i += 2) {
    TORCH_CHECK(options.count(arguments[i]), "unknown option ", arguments[i], "\n", usage);
    TORCH_CHECK(i + 1 < arguments.size(), arguments[i], " needs a value\n", usage);
    options[arguments[i]] = arguments[i + 1];
  }
  for (const char* const name : {"--checkpoint", "--picture"}) {  // checked before training starts
    const auto folder = std::filesystem::absolute(options[name] + ".").parent_path();
    TORCH_CHECK(std::filesystem::is_directory(folder), name, ": no such folder: ", folder.string());
  }
  options["start"] = arguments[0];
  return options;
}

void report(const Training& training, int last) {
  const int done = training.steps();
  const bool has_skipped = !training.skipped.empty() && training.skipped.back() == done - 1;
  if (!has_skipped && done % kReportEvery != 0 && done != last) return;
  const double loss = training.losses.back(), scale = training.scales.back();
  std::printf("step %3d of %d  loss %.5f  PSNR %5.2f dB  scale 2^%g%s\n", done, last, loss,
              psnr(loss), std::log2(scale), has_skipped ? "  skipped: a gradient overflowed" : "");
  std::fflush(stdout);
}

void run(Training& training, int steps, const std::string& checkpoint, const std::string& picture) {
  while (training.steps() < steps) {
    training.step();
    report(training, steps);
    const bool is_due = training.steps() == steps || training.steps() % kSaveEvery == 1;
    if (!checkpoint.empty() && is_due) training.save(checkpoint);
  }
  const Tensor learned = training.picture();
  const double error = torch::mse_loss(learned, training.photo).item<double>();
  std::printf("the picture: PSNR %.2f dB, trained in %.1f s\n", psnr(error), training.seconds);
  if (!picture.empty()) write_ppm(picture, learned);
}

}  // namespace

int main(int argc, char** argv) {
  int code = 2;  // exit status for wrong arguments or files
  try {
    Options options = read_command_line({argv + 1, argv + argc});
    const c10::IValue start = amp_ext::load_state(options["start"]);
    Training training(start);
    if (!options["--resume"].empty()) training.load(options["--resume"]);
    const int steps = static_cast<int>(entry(start, "steps").toInt());
    TORCH_CHECK(training.steps() <= steps, "START has ", steps, " steps, and ", options["--resume"],
                " has taken ", training.steps(), " already");
    code = 1;  // exit status for an error in training
    run(training, steps, options["--checkpoint"], options["--picture"]);
    return 0;
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "train: %s\n", error.what_without_backtrace());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "train: %s\n", error.what());
  }
  return code;
}
