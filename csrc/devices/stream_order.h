// Orders work that several streams of one device do on the same tensors.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <vector>

namespace amp_ext {

// One round of work goes from begin() to end(), each called on any stream. Between the two, every
// stream calls enter() before its first work. On the CPU, which has no streams, nothing happens.
class StreamOrder {
 public:
  explicit StreamOrder(const c10::Device& device)
      : device_(device), begun_(device.type()), ended_(device.type()) {}

  // Makes the current stream wait for the end of the last round.
  void begin() {
    if (device_.is_cpu()) return;
    streams_.assign(1, current());
    ended_.block(current());
  }
  // Marks the initial work of the round as enqueued, on the stream that called begin().
  void begun() {
    if (!device_.is_cpu()) begun_.record(current());
  }
  // Makes the current stream wait for the initial work, unless it has waited already.
  void enter() {
    if (device_.is_cpu() || is_known(current())) return;
    begun_.block(current());
    streams_.push_back(current());
  }
  // Makes the current stream wait for the work of all other streams so far.
  void join() {
    if (device_.is_cpu()) return;
    for (const c10::Stream& stream : streams_) {
      if (stream == current()) continue;
      c10::Event done(device_.type());
      done.record(stream);
      done.block(current());
    }
  }
  // Ends the round, after join() and the last work on the current stream.
  void end() {
    if (!device_.is_cpu()) ended_.record(current());
  }

 private:
  c10::Stream current() const {
    return c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
  }
  bool is_known(const c10::Stream& stream) const {
    return std::find(streams_.begin(), streams_.end(), stream) != streams_.end();
  }

  c10::Device device_;
  c10::Event begun_, ended_;
  std::vector<c10::Stream> streams_;  // streams that have entered the round
};

}  // namespace amp_ext
