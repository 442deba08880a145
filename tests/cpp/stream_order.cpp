// Checks StreamOrder with streams that exist only as vector clocks: random rounds of hooks on
// random streams, in which each access to shared memory must have waited for all writes before it.
#include "devices/stream_order.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

namespace {

constexpr int kStreams = 4;
using Clock = std::array<int, kStreams>;  // work of each stream that is known to have ended

std::array<Clock, kStreams> clocks;
int current = 0;

void wait_for(Clock& clock, const Clock& other) {
  for (int i = 0; i < kStreams; ++i) clock[i] = std::max(clock[i], other[i]);
}

c10::Stream stream_of(int id) {
  return c10::Stream(c10::Stream::UNSAFE, {c10::DeviceType::PrivateUse1, 0}, id);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = c10::DeviceType::PrivateUse1;
  Guard() = default;
  explicit Guard(c10::DeviceType) {}

  c10::DeviceType type() const override { return static_type; }
  c10::Device exchangeDevice(c10::Device device) const override { return device; }
  c10::Device getDevice() const override { return {static_type, 0}; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return stream_of(current); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Clock();
    *static_cast<Clock*>(*event) = clocks[stream.id()];
  }
  void block(void* event, const c10::Stream& stream) const override {
    wait_for(clocks[stream.id()], *static_cast<Clock*>(event));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Clock*>(event);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// Shared memory, with the clock of its last writes.
Clock written{};

void check_has_seen_writes() {
  for (int i = 0; i < kStreams; ++i) {
    if (clocks[current][i] >= written[i]) continue;
    std::printf("stream %d reads before stream %d has written\n", current, i);
    std::exit(1);
  }
}

void write() { written[current] = ++clocks[current][current]; }

}  // namespace

// An argument leaves out one call, so that the check must fail.
int main(int count, char** arguments) {
  const char left_out = count > 1 ? arguments[1][0] : ' ';
  std::mt19937 random(7);
  amp_ext::StreamOrder order({c10::DeviceType::PrivateUse1, 0});
  for (int round = 0; round < 2000; ++round) {
    current = static_cast<int>(random() % kStreams);
    if (left_out != 'b') order.begin();
    check_has_seen_writes();  // of the last round
    write();                  // the zeros
    order.begun();
    const Clock zeros = written;
    for (int hook = 0; hook < 6; ++hook) {
      current = static_cast<int>(random() % kStreams);
      if (left_out != 'e') order.enter();
      const Clock all = std::exchange(written, zeros);
      check_has_seen_writes();  // of the zeros only: each hook has an entry of its own
      written = all;
      write();
    }
    current = static_cast<int>(random() % kStreams);
    if (left_out != 'j') order.join();
    check_has_seen_writes();
    write();  // the sum of the entries
    order.end();
  }
  std::printf("ordered\n");
}
