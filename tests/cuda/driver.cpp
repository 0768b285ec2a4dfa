// A CUDA driver without a GPU, to test the order of what the CUDA path does: a thread for each stream, memory
// of the host as memory of the device, the project's own kernels run on the CPU.
//
// It is as strict as the contract allows a driver to be. Streams run only when they must: a closed gate holds
// a stream until the test opens it. Waiting on an event that was never recorded waits for nothing. Copies go
// to pinned memory only, and kernels know pinned memory by other addresses than the host. What breaks a rule
// is an error of that call, and counted.
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cuda/tasks.h"

namespace {

constexpr uint64_t kMapped = uint64_t{1} << 56;  // what is added to the address of pinned memory for kernels
enum Code { kSuccess = 0, kInvalidValue = 1, kInvalidContext = 201, kLaunchFailed = 719, kUnsupported = 900 };

std::mutex lock;
std::condition_variable& changed = *new std::condition_variable;  // never destroyed: threads wait for it until the end
int failures = 0;                                    // rules that were broken
std::string broken;                                  // which one was first
std::map<std::string, std::pair<int, int>> failing;  // call -> (how many succeed before, code)
unsigned delay = 0;                                  // microseconds before each piece of work, at most
int sticky = 0;                                      // what every call returns once the device has failed
std::map<uintptr_t, size_t> pinned;
std::vector<void*> contexts;
thread_local std::vector<void*> current;
std::atomic<void*> newest{nullptr};  // the stream that was created last

int breaks(const char* rule) {
  const std::lock_guard<std::mutex> guard(lock);
  if (failures++ == 0) broken = rule;
  return kInvalidValue;
}

// Whether this call is one that the test wants to fail.
int refused(const char* call) {
  const std::lock_guard<std::mutex> guard(lock);
  if (sticky != 0) return sticky;
  auto found = failing.find(call);
  if (found == failing.end()) return 0;
  if (found->second.first-- > 0) return 0;
  return found->second.second;
}

bool is_pinned(uintptr_t address, size_t size) {
  const std::lock_guard<std::mutex> guard(lock);
  auto found = pinned.upper_bound(address);
  if (found == pinned.begin()) return false;
  --found;
  return address + size <= found->first + found->second;
}

struct Event {
  uint64_t recorded = 0, reached = 0;
};

struct Stream {
  std::deque<std::function<void()>> work;
  bool open = true, capturing = false;
  bool running = false;
  std::thread thread;

  Stream() {
    thread = std::thread([this] { run(); });
    thread.detach();
  }

  void run() {
    std::minstd_rand random(static_cast<unsigned>(reinterpret_cast<uintptr_t>(this) >> 4));
    std::unique_lock<std::mutex> guard(lock);
    while (true) {
      changed.wait(guard, [this] { return open && !work.empty(); });
      auto next = std::move(work.front());
      work.pop_front();
      running = true;
      const unsigned most = delay;
      guard.unlock();
      if (most > 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % most));
      next();
      guard.lock();
      running = false;
      changed.notify_all();
    }
  }

  void put(std::function<void()> one) {
    const std::lock_guard<std::mutex> guard(lock);
    work.push_back(std::move(one));
    changed.notify_all();
  }
};

// The legacy default stream has the handle 0. Never destroyed: threads wait on what is static.
Stream* stream_of(void* handle) {
  static Stream* legacy = new Stream;
  return handle == nullptr ? legacy : static_cast<Stream*>(handle);
}

int needs_context() { return current.empty() ? breaks("no context is current") : 0; }

}  // namespace

#define API extern "C" __attribute__((visibility("default")))
#define ENTER(name) \
  if (const int code = refused(name)) return code

API int cuInit(unsigned) {
  ENTER("cuInit");
  return 0;
}
API int cuGetErrorName(int code, const char** name) {
  *name = code == kLaunchFailed   ? "CUDA_ERROR_LAUNCH_FAILED"
          : code == kInvalidValue ? "CUDA_ERROR_INVALID_VALUE"
                                  : "CUDA_ERROR";
  return 0;
}
API int cuGetErrorString(int, const char** text) {
  *text = "as the test wanted";
  return 0;
}
API int cuDeviceGet(int* device, int ordinal) {
  ENTER("cuDeviceGet");
  *device = ordinal;
  return 0;
}
API int cuDevicePrimaryCtxRetain(void** context, int device) {
  ENTER("cuDevicePrimaryCtxRetain");
  *context = reinterpret_cast<void*>(static_cast<uintptr_t>(device) + 1);
  return 0;
}
API int cuCtxPushCurrent_v2(void* context) {
  if (context == nullptr) return kInvalidContext;
  current.push_back(context);
  return 0;
}
API int cuCtxPopCurrent_v2(void** context) {
  if (current.empty()) return breaks("pop without a push");
  *context = current.back();
  current.pop_back();
  return 0;
}
API int cuCtxGetStreamPriorityRange(int* low, int* high) {
  *low = 0;
  *high = -5;
  return needs_context();
}
API int cuThreadExchangeStreamCaptureMode(int* mode) {
  thread_local int mine = 0;
  std::swap(*mode, mine);
  return 0;
}
API int cuStreamCreateWithPriority(void** stream, unsigned flags, int) {
  ENTER("cuStreamCreateWithPriority");
  if (flags != 1) return breaks("a stream that waits for the default stream");
  *stream = new Stream;
  newest = *stream;
  return needs_context();
}
API int cuStreamIsCapturing(void* stream, int* status) {
  ENTER("cuStreamIsCapturing");
  const std::lock_guard<std::mutex> guard(lock);
  *status = stream_of(stream)->capturing ? 1 : 0;
  return 0;
}
API int cuEventCreate(void** event, unsigned) {
  ENTER("cuEventCreate");
  *event = new Event;
  return needs_context();
}
API int cuEventRecord(void* handle, void* stream) {
  ENTER("cuEventRecord");
  if (const int code = needs_context()) return code;
  Stream* on = stream_of(stream);
  if (on->capturing) return breaks("an event is recorded into a graph");
  Event* event = static_cast<Event*>(handle);
  uint64_t number;
  {
    const std::lock_guard<std::mutex> guard(lock);
    number = ++event->recorded;
  }
  on->put([event, number, on] {
    const std::lock_guard<std::mutex> guard(lock);
    if (event->reached < number) event->reached = number;
    on->running = false;  // whoever waits for the event finds the stream idle
    changed.notify_all();
  });
  return 0;
}
API int cuStreamWaitEvent(void* stream, void* handle, unsigned) {
  ENTER("cuStreamWaitEvent");
  if (const int code = needs_context()) return code;
  Stream* on = stream_of(stream);
  if (on->capturing) return breaks("a graph waits for an event from outside");
  Event* event = static_cast<Event*>(handle);
  uint64_t number;
  {
    const std::lock_guard<std::mutex> guard(lock);
    number = event->recorded;
  }
  on->put([event, number] {
    std::unique_lock<std::mutex> guard(lock);
    changed.wait(guard, [&] { return event->reached >= number; });
  });
  return 0;
}
API int cuStreamSynchronize(void* handle) {
  if (const int code = needs_context()) return code;
  Stream* on = stream_of(handle);
  {
    std::unique_lock<std::mutex> guard(lock);
    changed.wait(guard, [&] { return on->work.empty() && !on->running; });
  }
  ENTER("cuStreamSynchronize");
  return 0;
}
API int cuEventSynchronize(void* handle) {
  if (const int code = needs_context()) return code;
  Event* event = static_cast<Event*>(handle);
  {
    std::unique_lock<std::mutex> guard(lock);
    const uint64_t number = event->recorded;
    changed.wait(guard, [&] { return event->reached >= number; });
  }
  ENTER("cuEventSynchronize");
  return 0;
}
API int cuMemHostRegister_v2(void* address, size_t size, unsigned flags) {
  ENTER("cuMemHostRegister");
  if (const int code = needs_context()) return code;
  if (flags != 3) return breaks("registered for one context, or not mapped");
  const std::lock_guard<std::mutex> guard(lock);
  if (!pinned.emplace(reinterpret_cast<uintptr_t>(address), size).second) return 712;  // already registered
  return 0;
}
API int cuMemHostUnregister(void* address) {
  if (const int code = needs_context()) return code;
  const std::lock_guard<std::mutex> guard(lock);
  return pinned.erase(reinterpret_cast<uintptr_t>(address)) == 1 ? 0 : 713;
}
API int cuMemHostAlloc(void** address, size_t size, unsigned flags) {
  ENTER("cuMemHostAlloc");
  if (flags != 3) return breaks("allocated for one context, or not mapped");
  *address = std::aligned_alloc(4096, (size + 4095) / 4096 * 4096);
  const std::lock_guard<std::mutex> guard(lock);
  pinned.emplace(reinterpret_cast<uintptr_t>(*address), size);
  return 0;
}
API int cuMemFreeHost(void* address) {
  {
    const std::lock_guard<std::mutex> guard(lock);
    if (pinned.erase(reinterpret_cast<uintptr_t>(address)) == 0) return kInvalidValue;
  }
  std::free(address);
  return needs_context();
}
API int cuMemHostGetDevicePointer_v2(uint64_t* device, void* host, unsigned) {
  ENTER("cuMemHostGetDevicePointer");
  if (!is_pinned(reinterpret_cast<uintptr_t>(host), 1))
    return breaks("the device's address of memory that is not pinned");
  *device = reinterpret_cast<uintptr_t>(host) + kMapped;
  return 0;
}
API int cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t size, void* stream) {
  ENTER("cuMemcpyDtoHAsync");
  if (const int code = needs_context()) return code;
  if (!is_pinned(reinterpret_cast<uintptr_t>(to), size)) return breaks("a copy to memory that is not pinned");
  stream_of(stream)->put([=] { std::memcpy(to, reinterpret_cast<const void*>(from), size); });
  return 0;
}
API int cuModuleLoadData(void** module, const void* image) {
  ENTER("cuModuleLoadData");
  *module = const_cast<void*>(image);
  return needs_context();
}
API int cuModuleGetFunction(void** function, void*, const char* name) {
  ENTER("cuModuleGetFunction");
  const std::string wanted(name);
  *function = reinterpret_cast<void*>(uintptr_t{wanted == "tierckpt_gather"        ? 1u
                                                : wanted == "tierckpt_fingerprint" ? 2u
                                                                                   : 0u});
  return *function == nullptr ? 500 : 0;
}
API int cuLaunchKernel(void* function, unsigned blocks, unsigned, unsigned, unsigned threads, unsigned,
                       unsigned, unsigned, void* stream, void** parameters, void**) {
  ENTER("cuLaunchKernel");
  if (const int code = needs_context()) return code;
  const uint64_t address = *static_cast<uint64_t*>(parameters[0]) - kMapped;
  const uint32_t count = *static_cast<uint32_t*>(parameters[1]);
  const bool gathers = function == reinterpret_cast<void*>(1);
  if (!is_pinned(address, count * sizeof(tierckpt::Task))) return breaks("tasks that the device cannot read");
  stream_of(stream)->put([=] {
    const tierckpt::Task* tasks = reinterpret_cast<const tierckpt::Task*>(address);
    for (unsigned block = 0; block < blocks; ++block)
      for (uint32_t i = block; i < count; i += blocks) {
        tierckpt::Task task = tasks[i];
        task.dst -= kMapped;
        const size_t writes = gathers ? task.bytes : threads * sizeof(tierckpt::Sums);
        if (!is_pinned(task.dst, writes)) {
          breaks("a kernel writes to memory that is not pinned");
          continue;
        }
        for (unsigned thread = 0; thread < threads; ++thread)
          gathers ? tierckpt::gather(task, thread, threads) : tierckpt::fingerprint(task, thread, threads);
      }
  });
  return 0;
}

// What the test does beside.

// A stream as training has it.
API void* test_stream() { return new Stream; }
// An optimizer's kernel: adds to each of so many floats.
API void test_add(void* stream, float* at, size_t count, float value) {
  stream_of(stream)->put([=] {
    for (size_t i = 0; i < count; ++i) at[i] += value;
  });
}
// The stream that the project has created last: that of its copies.
API void* test_newest() { return newest; }
API void test_delay(unsigned most) {
  const std::lock_guard<std::mutex> guard(lock);
  delay = most;
}
API void test_open(void* stream, bool open) {
  const std::lock_guard<std::mutex> guard(lock);
  stream_of(stream)->open = open;
  changed.notify_all();
}
API void test_capture(void* stream, bool on) {
  const std::lock_guard<std::mutex> guard(lock);
  stream_of(stream)->capturing = on;
}
// Return when the stream has nothing to do that its gate lets it do; false after so many seconds.
API bool test_settle(void* stream, double seconds) {
  std::unique_lock<std::mutex> guard(lock);
  Stream* of = stream_of(stream);
  return changed.wait_for(guard, std::chrono::duration<double>(seconds),
                          [&] { return of->work.empty() && !of->running; });
}
// Whether anything waits or runs on it.
API bool test_busy(void* stream) {
  const std::lock_guard<std::mutex> guard(lock);
  return !stream_of(stream)->work.empty() || stream_of(stream)->running;
}
// After `after` more calls of that name each one fails with this code; a code of 0 ends it.
API void test_fail(const char* call, int after, int code) {
  const std::lock_guard<std::mutex> guard(lock);
  if (code == 0)
    failing.erase(call);
  else
    failing[call] = {after, code};
}
// As after an error of a kernel: from now on every call returns it; 0 ends it.
API void test_break(int code) {
  const std::lock_guard<std::mutex> guard(lock);
  sticky = code;
}
API int test_failures(const char** first) {
  const std::lock_guard<std::mutex> guard(lock);
  *first = broken.c_str();
  return failures;
}
API size_t test_pinned() {
  const std::lock_guard<std::mutex> guard(lock);
  return pinned.size();
}
API bool test_is_pinned(uintptr_t address) { return is_pinned(address, 1); }
