// Runs the check in which two threads step parameters, for scripts/sanitize.sh --threads.
#include "checks_release.h"

int main() {
  for (int i = 0; i < 5; ++i) all_checks().at("hooks_of_two_threads_take_turns")();
}
