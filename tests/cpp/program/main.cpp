// Tests the C++ interface. Reads commands, one a line with a tab before the argument: `check NAME`
// runs a check, `do FOLDER` does the scenario that a file there says, `save FILE` writes one. Ends
// what each prints by a line of \4 and its exit code.
#include <cstdio>
#include <exception>
#include <iostream>
#include <string>

#include "call_scenarios.h"
#include "checks_files.h"
#include "checks_optimizers.h"
#include "checks_scaler.h"

int main() {
  const std::map<std::string, std::function<void(const std::string&)>> commands = {
      {"check", [](const std::string& name) { all_checks().at(name)(); }},
      {"do", [](const std::string& folder) { call_scenarios::do_in(folder); }},
      {"save", [](const std::string& path) { amp_ext::save_state(path, "text"); }}};
  for (std::string line; std::getline(std::cin, line);) {
    const size_t tab = line.find('\t');
    int code = 1;
    try {
      commands.at(line.substr(0, tab))(line.substr(tab + 1));
      code = 0;
    } catch (const c10::Error& error) {
      std::printf("%s\n", error.what_without_backtrace());
    } catch (const std::exception& error) {
      std::printf("%s\n", error.what());
    }
    std::printf("\4%d\n", code);
    std::fflush(stdout);
  }
}
