// Runs the threads of a block as fibers, lets them meet, and says who did not come.
//
// Compiled without sanitizers, also where kernels are compiled with them: what the scheduler shares
// with its fibers is no race. It tells them of its stacks and meetings where they are linked in.
#include "cuda_emulator.h"

#include <sys/mman.h>

#include <algorithm>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <map>
#include <mutex>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

Dimensions threadIdx, blockIdx, blockDim, gridDim;

// The sanitizers' interface for programs that switch stacks; null where they are not linked in.
extern "C" {
#define OPTIONAL __attribute__((weak))
OPTIONAL void __sanitizer_start_switch_fiber(void** fake_stack, const void* bottom, size_t size);
OPTIONAL void __sanitizer_finish_switch_fiber(void* fake_stack, const void** bottom, size_t* size);
OPTIONAL void __asan_poison_memory_region(const volatile void* begin, size_t size);
OPTIONAL void __asan_unpoison_memory_region(const volatile void* begin, size_t size);
OPTIONAL void* __tsan_get_current_fiber();
OPTIONAL void* __tsan_create_fiber(unsigned flags);
OPTIONAL void __tsan_destroy_fiber(void* fiber);
OPTIONAL void __tsan_switch_to_fiber(void* fiber, unsigned flags);
OPTIONAL void __tsan_acquire(void* address);
OPTIONAL void __tsan_release(void* address);
#undef OPTIONAL

// Keeps the registers of one stack on it and goes on with another.
void cuda_emulator_switch(void** stack_pointer, void* other_stack_pointer);
}

asm(R"(
.pushsection .text
.hidden cuda_emulator_switch
.globl cuda_emulator_switch
.type cuda_emulator_switch, @function
cuda_emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size cuda_emulator_switch, .-cuda_emulator_switch
.popsection
)");

namespace cuda_emulator {

namespace {

constexpr int kWarpSize = 32;
constexpr int kMaxThreads = 1024;
constexpr size_t kMaxSharedBytes = 48 * 1024;
constexpr size_t kSharedGap = 64;        // between shared variables, so that overruns are seen
constexpr size_t kPageBytes = 4096;      // below each stack, without access
constexpr size_t kStackBytes = 1 << 20;  // reserved; sanitizers' reports need much

// One line of execution with a stack of its own; the host's has the stack it came with.
struct Fiber {
  void* stack_pointer = nullptr;
  const void* stack = nullptr;
  size_t stack_bytes = 0;
  void* fake_stack = nullptr;  // AddressSanitizer's
  void* tsan = nullptr;        // ThreadSanitizer's
};

Fiber host;

void switch_fibers(Fiber& from, Fiber& to) {
  if (__sanitizer_start_switch_fiber) {
    __sanitizer_start_switch_fiber(&from.fake_stack, to.stack, to.stack_bytes);
  }
  constexpr unsigned kNoOrder = 1;  // only meetings order memory
  if (__tsan_switch_to_fiber) __tsan_switch_to_fiber(to.tsan, kNoOrder);
  cuda_emulator_switch(&from.stack_pointer, to.stack_pointer);
  if (__sanitizer_finish_switch_fiber) {
    __sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);
  }
}

void order_after(void* meeting) {
  if (__tsan_acquire) __tsan_acquire(meeting);
}
void order_before(void* meeting) {
  if (__tsan_release) __tsan_release(meeting);
}

struct Thread {
  enum State { kReady, kWaitsForBlock, kWaitsForWarp, kExited };

  Fiber fiber;
  State state = kExited;
  Site site{};
  bool predicate = false;
  uint32_t mask = 0;
  uint64_t value = 0;
};

// Those who meet again and again: all threads of a block, or the lanes of a mask.
struct Company {
  int meetings = 0;
  char order[2];  // of memory, by turns: who is late must not learn of the next meeting

  char* order_of_this_meeting() { return order + meetings % 2; }
};

struct Warp {
  uint64_t values[kWarpSize];             // that each lane brought to its last meeting
  std::map<uint32_t, Company> companies;  // by mask
};

struct SharedVariable {
  const void* variable;
  size_t offset;
};

std::mutex one_launch_at_a_time;
std::vector<Thread> threads;  // kept over blocks and launches, of the largest block so far
std::vector<Warp> warps;
char* stacks = nullptr;

// The launch.
const Grid* grid = nullptr;
int current = 0;  // thread
int predicates = 0;
std::exception_ptr failure;
std::vector<SharedVariable> shared_variables;
size_t shared_bytes = 0;
alignas(64) char shared[kMaxSharedBytes + kSharedGap];

cudaError_t last_error = cudaSuccess;

Company block_company;
char block_start;
char block_end;

// Reports.

std::string text_of(const Site& site) {
  return std::string(site.called) + " (" + site.file + ":" + std::to_string(site.line) + ", in " +
         site.function + ")";
}

std::string name_of_thread(int thread) {
  return "thread " + std::to_string(thread) + " of block " + std::to_string(blockIdx.x);
}

[[noreturn]] void fail_with(const std::string& text) { throw Error("cuda_emulator: " + text); }

bool same_place(const Site& a, const Site& b) {
  return a.line == b.line && (a.file == b.file || std::strcmp(a.file, b.file) == 0);
}

bool have_met(const Thread& a, const Thread& b) {
  return a.state == b.state && same_place(a.site, b.site) && a.mask == b.mask;
}

// No thread can go on: names one that waits and one that it waits for in vain.
[[noreturn]] void fail_as_stuck() {
  const auto waits_for = [](Thread::State state) {
    return std::find_if(threads.begin(), threads.begin() + grid->threads,
                        [=](const Thread& thread) { return thread.state == state; });
  };
  auto waiting = waits_for(Thread::kWaitsForWarp);  // it may be what others at a barrier wait for
  if (waiting == threads.begin() + grid->threads) waiting = waits_for(Thread::kWaitsForBlock);
  const int thread = static_cast<int>(waiting - threads.begin());
  const bool in_warp = waiting->state == Thread::kWaitsForWarp;
  const int first = in_warp ? thread / kWarpSize * kWarpSize : 0;
  const int end = in_warp ? first + kWarpSize : grid->threads;
  for (int i = first; i < end; ++i) {
    if (in_warp && (waiting->mask >> (i - first) & 1) == 0) continue;
    if (i < grid->threads && have_met(threads[i], *waiting)) continue;
    std::string why = "does not exist";
    if (i < grid->threads) {
      why = threads[i].state == Thread::kExited ? "has exited"
                                                : "waits at " + text_of(threads[i].site);
    }
    fail_with(name_of_thread(thread) + " waits at " + text_of(waiting->site) + " for thread " +
              std::to_string(i) + ", which " + why);
  }
  fail_with(name_of_thread(thread) + " waits for ever at " + text_of(waiting->site));
}

// Fibers.

void run_threads_for_ever() {
  if (__sanitizer_finish_switch_fiber) {
    __sanitizer_finish_switch_fiber(nullptr, &host.stack, &host.stack_bytes);
  }
  for (;;) {
    order_after(&block_start);
    try {
      grid->call(grid->kernel, grid->arguments);
    } catch (...) {
      failure = std::current_exception();
    }
    order_before(&block_end);
    Thread& self = threads[current];
    self.state = Thread::kExited;
    switch_fibers(self.fiber, host);
  }
}

void start_fiber(Fiber& fiber, char* stack) {
  void** top = reinterpret_cast<void**>(stack + kStackBytes);
  *--top = nullptr;  // aligns the stack as a call would; nothing returns there
  *--top = reinterpret_cast<void*>(&run_threads_for_ever);
  top -= 6;  // the registers that cuda_emulator_switch restores
  std::fill(top, top + 6, nullptr);
  fiber = {top, stack, kStackBytes, nullptr,
           __tsan_create_fiber ? __tsan_create_fiber(0) : nullptr};
}

// After a failure fibers hang in the middle of a kernel.
void drop_fibers() {
  if (stacks == nullptr) return;
  for (Thread& thread : threads) {
    if (__tsan_destroy_fiber) __tsan_destroy_fiber(thread.fiber.tsan);
  }
  const size_t bytes = threads.size() * (kPageBytes + kStackBytes);
  if (__asan_unpoison_memory_region) __asan_unpoison_memory_region(stacks, bytes);
  munmap(stacks, bytes);
  threads.clear();
  stacks = nullptr;
}

void keep_fibers(int count) {
  if (static_cast<size_t>(count) <= threads.size()) return;
  drop_fibers();
  const size_t bytes = count * (kPageBytes + kStackBytes);
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw Error("cuda_emulator: no memory for the stacks of a block");
  stacks = static_cast<char*>(memory);
  threads.resize(count);
  warps.resize((count + kWarpSize - 1) / kWarpSize);
  for (int i = 0; i < count; ++i) {
    char* const page = stacks + i * (kPageBytes + kStackBytes);
    mprotect(page, kPageBytes, PROT_NONE);
    start_fiber(threads[i].fiber, page + kPageBytes);
  }
}

// The scheduler.

// Lets those lanes go on whose whole mask has come. Returns whether there are any.
bool release_warps() {
  bool any = false;
  for (int i = 0; i < grid->threads; ++i) {
    if (threads[i].state != Thread::kWaitsForWarp) continue;
    const int first = i / kWarpSize * kWarpSize;
    const uint32_t mask = threads[i].mask;
    bool all_there = true;
    for (int lane = 0; lane < kWarpSize; ++lane) {
      if ((mask >> lane & 1) == 0) continue;
      all_there =
          all_there && first + lane < grid->threads && have_met(threads[first + lane], threads[i]);
    }
    if (!all_there) continue;
    any = true;
    Warp& warp = warps[i / kWarpSize];
    ++warp.companies[mask].meetings;
    for (int lane = 0; lane < kWarpSize; ++lane) {
      if ((mask >> lane & 1) == 0) continue;
      warp.values[lane] = threads[first + lane].value;
      threads[first + lane].state = Thread::kReady;
    }
  }
  return any;
}

// Lets the block go on if all its threads wait at the same barrier.
bool release_block() {
  int count = 0;
  for (int i = 0; i < grid->threads; ++i) {
    if (threads[i].state != Thread::kWaitsForBlock ||
        !same_place(threads[i].site, threads[0].site)) {
      return false;
    }
    count += threads[i].predicate;
  }
  predicates = count;
  ++block_company.meetings;
  for (int i = 0; i < grid->threads; ++i) threads[i].state = Thread::kReady;
  return true;
}

void run_block(int64_t block, std::vector<int>& order, std::mt19937* random) {
  blockIdx.x = static_cast<unsigned>(block);
  if (__asan_unpoison_memory_region) __asan_unpoison_memory_region(shared, sizeof shared);
  std::memset(shared, 0xff, sizeof shared);
  if (__asan_poison_memory_region) __asan_poison_memory_region(shared, sizeof shared);
  shared_variables.clear();
  shared_bytes = kSharedGap;
  for (int i = 0; i < grid->threads; ++i) threads[i].state = Thread::kReady;
  order_before(&block_start);
  for (;;) {
    if (random != nullptr) std::shuffle(order.begin(), order.end(), *random);
    bool all_exited = true;
    for (const int i : order) {
      if (threads[i].state == Thread::kReady) {
        current = i;
        threadIdx.x = static_cast<unsigned>(i);
        switch_fibers(host, threads[i].fiber);
        if (failure) std::rethrow_exception(std::exchange(failure, nullptr));
      }
      all_exited = all_exited && threads[i].state == Thread::kExited;
    }
    if (all_exited) break;
    if (!release_warps() && !release_block()) fail_as_stuck();
  }
  order_after(&block_end);
}

void wait(Thread::State state, const Site& site) {
  Thread& self = threads[current];
  self.state = state;
  self.site = site;
  switch_fibers(self.fiber, host);
}

// Whether the environment refuses this launch.
bool is_refused() {
  static std::string counted_for;
  static int launches = 0;
  const char* const number = std::getenv("CUDA_EMULATOR_REFUSED_LAUNCH");
  if (number == nullptr) return false;
  if (counted_for != number) launches = 0;
  counted_for = number;
  return launches++ == std::atoi(number);
}

int driver_version() {
  const char* const version = std::getenv("CUDA_EMULATOR_DRIVER_VERSION");
  return version == nullptr ? 13000 : std::atoi(version);
}

}  // namespace

int lane() { return current % kWarpSize; }

void fail(const Site& site, const char* text) {
  fail_with(name_of_thread(current) + " " + text + " at " + text_of(site));
}

int meet_block(bool predicate, const Site& site) {
  threads[current].predicate = predicate;
  threads[current].mask = 0;
  char* const order = block_company.order_of_this_meeting();
  order_before(order);
  wait(Thread::kWaitsForBlock, site);
  order_after(order);
  return predicates;
}

static int64_t votes_taken, votes_held;

const uint64_t* meet_warp(uint32_t mask, uint64_t value, const Site& site) {
  if ((mask >> lane() & 1) == 0) fail(site, "is not in its own mask");
  threads[current].mask = mask;
  threads[current].value = value;
  wait(Thread::kWaitsForWarp, site);
  return warps[current / kWarpSize].values;
}

void synchronize_warp(uint32_t mask, const Site& site) {
  char* const order = warps[current / kWarpSize].companies[mask].order_of_this_meeting();
  order_before(order);
  meet_warp(mask, 0, site);
  order_after(order);
}

bool vote(uint32_t mask, bool predicate, const Site& site) {
  const uint64_t* const predicates = meet_warp(mask, predicate, site);
  bool held = false;
  for (int i = 0; i < kWarpSize; ++i) held |= (mask >> i & 1) != 0 && predicates[i] != 0;
  if ((mask & ((1u << lane()) - 1)) == 0) {  // the first lane of the mask
    ++votes_taken;
    votes_held += held;
  }
  return held;
}

void cuda_emulator_votes(int64_t* taken, int64_t* held) {
  *taken = votes_taken;
  *held = votes_held;
}

uint32_t select_bytes(uint32_t first, uint32_t second, uint32_t selector) {
  const uint64_t both = (uint64_t{second} << 32) | first;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t digit = selector >> (4 * i) & 15;
    uint32_t byte = both >> (8 * (digit & 7)) & 0xff;
    if ((digit & 8) != 0) byte = (byte & 0x80) != 0 ? 0xff : 0;
    result |= byte << (8 * i);
  }
  return result;
}

void* shared_memory(const void* variable, size_t bytes, size_t alignment) {
  for (const SharedVariable& known : shared_variables) {
    if (known.variable == variable) return shared + known.offset;
  }
  const size_t offset = (shared_bytes + alignment - 1) / alignment * alignment;
  if (offset + bytes > kMaxSharedBytes) {
    fail_with("a block has more than " + std::to_string(kMaxSharedBytes) + " bytes to share");
  }
  shared_bytes = offset + bytes + kSharedGap;
  shared_variables.push_back({variable, offset});
  if (__asan_unpoison_memory_region) __asan_unpoison_memory_region(shared + offset, bytes);
  return shared + offset;
}

void run(const Grid& launched) {
  const std::lock_guard<std::mutex> lock(one_launch_at_a_time);
  constexpr size_t kLimit = 32764;
  if (launched.argument_bytes > kLimit) {
    last_error = cudaErrorInvalidValue;
    return;
  }
  if (launched.blocks < 1 || launched.blocks > INT_MAX || launched.threads < 1 ||
      launched.threads > kMaxThreads) {
    last_error = cudaErrorInvalidConfiguration;
    return;
  }
  if (is_refused()) {
    last_error = cudaErrorLaunchOutOfResources;
    return;
  }
  grid = &launched;
  blockDim.x = static_cast<unsigned>(launched.threads);
  gridDim.x = static_cast<unsigned>(launched.blocks);
  keep_fibers(launched.threads);
  if (__tsan_get_current_fiber) host.tsan = __tsan_get_current_fiber();

  std::vector<int> order(launched.threads);
  std::iota(order.begin(), order.end(), 0);
  std::vector<int64_t> blocks(launched.blocks);
  std::iota(blocks.begin(), blocks.end(), 0);
  const char* const seed = std::getenv("CUDA_EMULATOR_SEED");
  std::mt19937 random(seed == nullptr ? 0 : std::atoi(seed));
  if (seed != nullptr) std::shuffle(blocks.begin(), blocks.end(), random);
  try {
    for (const int64_t block : blocks) run_block(block, order, seed == nullptr ? nullptr : &random);
  } catch (...) {
    drop_fibers();
    throw;
  }
}

}  // namespace cuda_emulator

cudaError_t cudaDriverGetVersion(int* version) {
  *version = cuda_emulator::driver_version();
  return cudaSuccess;
}

cudaError_t cudaGetLastError() { return std::exchange(cuda_emulator::last_error, cudaSuccess); }

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorInvalidValue:
      return "invalid argument";
    case cudaErrorInvalidConfiguration:
      return "invalid configuration argument";
    case cudaErrorLaunchOutOfResources:
      return "too many resources requested for launch";
  }
  return "unrecognized error code";
}
