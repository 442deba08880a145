// Fits a small network to a photograph in fp16, without Python. The results are bit-identical to
// the run "fp16 amp_ext" of examples/photo.py.
//
//   python examples/photo.py --write-start start.pt    # the photograph and the initial weights
//   train start.pt --checkpoint run.pt --picture photo.ppm
//   train start.pt --resume run.pt
//
// `photo.py --steps N` limits the steps of both programs.

#include <amp_ext/amp_ext.h>
#include <torch/torch.h>

#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <fstream>
#include <iterator>
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

using Dict = c10::impl::GenericDict;

// Reads a file of Python's torch.save.
c10::IValue read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  TORCH_CHECK(file.good(), "can't read ", path);
  return torch::pickle_load({std::istreambuf_iterator<char>(file), {}});
}

c10::IValue entry(const c10::IValue& dict, const std::string& name) {
  const bool is_there = dict.isGenericDict() && dict.toGenericDict().contains(name);
  TORCH_CHECK(is_there, "no entry \"", name, "\" in the file: START is of photo.py --write-start");
  return dict.toGenericDict().at(name);
}

// The network.

// Creates a network with fp16 parameters that maps `width` Fourier features to red, green and blue.
torch::nn::Sequential make_model(int64_t width, const c10::IValue& weights, torch::Device device) {
  using torch::nn::Linear, torch::nn::ReLU;
  torch::nn::Sequential model(Linear(width, width), ReLU(), Linear(width, width), ReLU(),
                              Linear(width, 3));
  for (const auto& param : model->named_parameters()) {
    param.value().set_data(entry(weights, param.key()).toTensor());
  }
  model->to(device, torch::kHalf);
  return model;
}

// Returns sines and cosines of each pixel's coordinates: Tancik et al., "Fourier Features Let
// Networks Learn High Frequency Functions in Low Dimensional Domains", 2020.
Tensor fourier_features(const Tensor& coordinates, const Tensor& frequency) {
  const Tensor phase = coordinates.matmul(frequency);  // radians
  return torch::cat({phase.sin(), phase.cos()}, /*dim=*/-1);
}

// Returns a list of numbers of an archive.
template <typename Number>
std::vector<Number> numbers_in(torch::serialize::InputArchive& archive, const char* name) {
  Tensor numbers;
  archive.read(name, numbers, /*is_buffer=*/true);
  numbers = numbers.cpu();
  const Number* const first = numbers.const_data_ptr<Number>();
  return {first, first + numbers.numel()};
}

amp_ext::GradScalerOptions scaler_options() {
  amp_ext::GradScalerOptions options;
  options.growth_interval = kGrowthInterval;
  return options;
}

// A network that learns a photograph, with its optimizer, scaler and loss curve.
struct Training {
  const c10::IValue about;  // settings of the run, which a resumed run must share
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
        scaler(scaler_options()),
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

  // Writes a checkpoint.
  void save(const std::string& path) const {
    torch::serialize::OutputArchive archive;
    const auto write = [&](const char* name, const auto& save_to) {
      torch::serialize::OutputArchive part(archive.compilation_unit());
      save_to(part);
      archive.write(name, part);
    };
    write("model", [&](auto& part) { model->save(part); });
    write("optimizer", [&](auto& part) { optimizer.save(part); });
    write("scaler", [&](auto& part) { part << scaler; });
    archive.write("losses", torch::tensor(losses, torch::kDouble), /*is_buffer=*/true);
    archive.write("scales", torch::tensor(scales, torch::kDouble), /*is_buffer=*/true);
    archive.write("skipped", torch::tensor(skipped, torch::kLong), /*is_buffer=*/true);
    archive.write("about", c10::str(about));
    archive.write("seconds", seconds);
    archive.save_to(path);
  }

  void load(const std::string& path) {
    torch::serialize::InputArchive archive, part;
    archive.load_from(path, device);
    c10::IValue saved;
    TORCH_CHECK(archive.try_read("about", saved) && saved.toStringRef() == c10::str(about),
                "the run must be that of ", path, ", ", saved, ", got ", about);
    archive.read("model", part);
    model->load(part);
    archive.read("optimizer", part);
    optimizer.load(part);
    archive.read("scaler", part);
    part >> scaler;
    losses = numbers_in<double>(archive, "losses");
    scales = numbers_in<double>(archive, "scales");
    skipped = numbers_in<int64_t>(archive, "skipped");
    archive.read("seconds", saved);
    seconds = saved.toDouble();
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
  options["start"] = arguments[0];
  return options;
}

void report(const Training& training, int last) {
  const int done = training.steps();
  const bool has_skipped = !training.skipped.empty() && training.skipped.back() == done - 1;
  if (!has_skipped && done % kReportEvery != 0 && done != last) return;
  std::printf("step %3d of %d  loss %.5f  scale 2^%g%s\n", done, last, training.losses.back(),
              std::log2(training.scales.back()),
              has_skipped ? "  skipped: a gradient overflowed" : "");
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
    const c10::IValue start = read(options["start"]);
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
