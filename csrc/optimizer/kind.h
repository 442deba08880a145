// What an optimizer says of the options of its groups, for the classes of Python and of C++.
#pragma once

#include <amp_ext/export.h>
#include <amp_ext/hyperparameters.h>

#include <string>
#include <vector>

namespace amp_ext::optim {

enum class OptionKind {
  kLearningRate,  // a number; in Python also a tensor, which steps read on its device
  kNumber,
  kNumberFrom0,
  kLimit,  // a number of at least 0, or none
  kNumbers,
  kFlag,
  kMasters,       // MasterWeights
  kStates,        // StateDType
  kRounding,      // "dither", "nearest" or none
  kUnused,        // a flag that torch has and no step reads
  kUnusedOrNone,  // likewise, or none
};

// What a load makes of an option.
enum class OnLoad {
  kRequired,       // the file must have it
  kOffIfMissing,   // a file without it is older than torch's option
  kKeptIfMissing,  // torch has no such option
  kKept,           // it stays as configured, whatever the file says
};

struct OptionDescription {
  const char* name;
  OptionKind kind;
  OnLoad on_load;

  bool is_read() const { return kind != OptionKind::kUnused && kind != OptionKind::kUnusedOrNone; }
};

struct AMP_EXT_API Kind {
  std::vector<OptionDescription> options;  // those that all optimizers have come first
  std::vector<BufferDescription> buffers;  // all that the formula may keep
};

// That of the formula with these hyperparameters.
template <typename Hyperparameters>
AMP_EXT_API const Kind& kind_of();

// The options of all our optimizers that a load leaves as they were configured.
AMP_EXT_API std::vector<std::string> configured_options();

}  // namespace amp_ext::optim
