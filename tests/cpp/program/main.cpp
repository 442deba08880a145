// Tests the C++ interface: `program checks` lists the checks, `program check NAME` runs one,
// `program bad` prints the errors of bad calls, `program train FOLDER` trains as a file there says.
#include <cstdio>
#include <exception>
#include <string>

#include "bad_calls.h"
#include "checks.h"
#include "training.h"

int main(int count, char** arguments) {
  const std::string command = count > 1 ? arguments[1] : "";
  const std::string argument = count > 2 ? arguments[2] : "";
  try {
    if (command == "checks") {
      for (const auto& [name, check] : checks::all()) std::printf("%s\n", name.c_str());
    } else if (command == "check") {
      checks::all().at(argument)();
    } else if (command == "bad") {
      for (const auto& [name, call] : bad_calls::all()) {
        std::printf("%s\t%s\n", name.c_str(), error_of(call).c_str());
      }
    } else if (command == "train") {
      train(argument);
    } else {
      std::fprintf(stderr, "usage: program checks | check NAME | bad | train FOLDER\n");
      return 2;
    }
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "%s\n", error.what_without_backtrace());
    return 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
