#include "device.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "cuda/embedded.h"
#include "cuda/tasks.h"

namespace tierckpt {

static_assert(kDeviceLoops == kLoops, "what the planner is told");

namespace {

// Of cuda.h.
constexpr unsigned kNonBlocking = 1;       // CU_STREAM_NON_BLOCKING: no order with the default stream
constexpr unsigned kBlockingNoTiming = 3;  // CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING
constexpr unsigned kPortableMapped = 3;    // CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP
constexpr int kRelaxed = 2;                // CU_STREAM_CAPTURE_MODE_RELAXED

// From here on the copy engine is as fast for a box by itself as the kernel is for many.
constexpr int64_t kDirect = int64_t{256} << 10;
constexpr uint64_t kTask = uint64_t{64} << 10;
constexpr size_t kBlockMin = size_t{64} << 10;
// The bus is the limit: a few multiprocessors fill it, and training keeps the others.
constexpr unsigned kGatherBlocks = 64, kGatherThreads = 256;
constexpr unsigned kPrintBlocks = 1024, kPrintThreads = 32;

CuStream stream_of(uint64_t handle) { return reinterpret_cast<CuStream>(static_cast<uintptr_t>(handle)); }

uint64_t pointer(const char* pointers, uint32_t index) {
  return reinterpret_cast<uintptr_t>(present_pointer(pointers, index));
}

int64_t bytes_of(const Table& table, const Box& box) {
  if (box.ndim == 0) return box.run;
  const Dim& outer = *table.dims(box);
  return outer.n * outer.bytes;
}

uint32_t unit_of(uint64_t bits) { return static_cast<uint32_t>(std::min<uint64_t>(8, bits & -bits)); }

// The tasks of one box, each of at most kTask bytes; `to` is the address of its first byte, 0 if there is
// none.
void cut(const Table& table, const Box& box, uint64_t from, uint64_t to, std::vector<Task>* tasks) {
  if (box.ndim > kLoops)
    throw std::invalid_argument("entry " + std::to_string(box.index) + ": more than " +
                                std::to_string(kLoops) + " loops");
  Task task{};
  task.src = from;
  task.run = static_cast<uint64_t>(box.run);
  task.loops = box.ndim;
  uint64_t bits = from | task.run | to;
  int64_t extent = box.run;
  for (uint32_t k = box.ndim; k-- > 0;) {
    const Dim& d = table.dims(box)[k];
    if (d.shard != extent)
      throw std::invalid_argument("entry " + std::to_string(box.index) + ": it has gaps in the shard");
    extent *= d.n;
    task.n[k] = d.n;
    task.stride[k] = d.tensor;
    bits |= static_cast<uint64_t>(d.tensor);
  }
  task.unit = unit_of(bits);
  const uint64_t size = static_cast<uint64_t>(bytes_of(table, box));
  for (uint64_t at = 0; at < size; at += kTask) {
    task.from = at;
    task.dst = to == 0 ? 0 : to + at;
    task.bytes = std::min(kTask, size - at);
    tasks->push_back(task);
  }
}

}  // namespace

Device::Current::Current(const Device& device) : driver_(*device.driver_), mode_(kRelaxed) {
  driver_.check(driver_.CtxPushCurrent(device.context_), "cuCtxPushCurrent");
  driver_.ThreadExchangeStreamCaptureMode(&mode_);
}

Device::Current::~Current() {
  driver_.ThreadExchangeStreamCaptureMode(&mode_);
  CuContext context;
  driver_.CtxPopCurrent(&context);
}

Device::Device(std::shared_ptr<Driver> driver, int ordinal) : driver_(std::move(driver)) {
  const Driver& d = *driver_;
  int handle = 0, low = 0, high = 0;
  d.check(d.DeviceGet(&handle, ordinal), "cuDeviceGet");
  // That of the CUDA runtime, so of torch.
  d.check(d.DevicePrimaryCtxRetain(&context_, handle), "cuDevicePrimaryCtxRetain");
  const Current current(*this);
  d.check(d.CtxGetStreamPriorityRange(&low, &high), "cuCtxGetStreamPriorityRange");
  d.check(d.StreamCreateWithPriority(&stream_, kNonBlocking, low), "cuStreamCreateWithPriority");
  load();
}

void Device::load() {
  // Machine code where there is some for this GPU, else what its driver compiles; older drivers read older
  // text only.
  CuModule module = nullptr;
  for (const Embedded& image : {kernels_binary(), kernels_text()}) {
    if (image.size == 0 || driver_->ModuleLoadData(&module, image.data) != 0) continue;
    CuFunction gather = nullptr, fingerprint = nullptr;
    if (driver_->ModuleGetFunction(&gather, module, "tierckpt_gather") != 0 ||
        driver_->ModuleGetFunction(&fingerprint, module, "tierckpt_fingerprint") != 0)
      continue;
    gather_ = gather;
    fingerprint_ = fingerprint;
    return;
  }
}

void Device::pin(Buffer& buffer) const {
  if (buffer.pinned()) return;
  const Current current(*this);
  driver_->check(driver_->MemHostRegister(buffer.address(), buffer.mapped(), kPortableMapped),
                 "cuMemHostRegister");
  buffer.pin([this](void* address) {
    try {
      const Current current(*this);
      driver_->MemHostUnregister(address);
    } catch (const CudaError&) {  // the end of the process
    }
  });
}

Device::Block Device::take(size_t nbytes) {
  size_t wanted = kBlockMin;
  while (wanted < nbytes) wanted *= 2;
  {
    const std::lock_guard<std::mutex> guard(lock_);
    const auto found =
        std::find_if(blocks_.begin(), blocks_.end(), [&](const Block& b) { return b.nbytes == wanted; });
    if (found != blocks_.end()) {
      const Block block = *found;
      blocks_.erase(found);
      return block;
    }
  }
  Block block{nullptr, 0, wanted};
  void* host = nullptr;
  driver_->check(driver_->MemHostAlloc(&host, wanted, kPortableMapped), "cuMemHostAlloc");
  block.host = static_cast<char*>(host);
  if (const int code = driver_->MemHostGetDevicePointer(&block.device, host, 0)) {
    driver_->MemFreeHost(host);
    driver_->check(code, "cuMemHostGetDevicePointer");
  }
  return block;
}

void Device::give(const Block& block) {
  const std::lock_guard<std::mutex> guard(lock_);
  blocks_.push_back(block);
}

CuEvent Device::take_event() {
  {
    const std::lock_guard<std::mutex> guard(lock_);
    if (!events_.empty()) {
      CuEvent event = events_.back();
      events_.pop_back();
      return event;
    }
  }
  CuEvent event = nullptr;
  driver_->check(driver_->EventCreate(&event, kBlockingNoTiming), "cuEventCreate");
  return event;
}

void Device::give_event(CuEvent event) {
  const std::lock_guard<std::mutex> guard(lock_);
  events_.push_back(event);
}

Job::Job(std::shared_ptr<Device> device, uint64_t stream) : device_(std::move(device)), pid_(getpid()) {
  const Driver& d = *device_->driver_;
  const Device::Current current(*device_);
  int capturing = 0;
  d.check(d.StreamIsCapturing(stream_of(stream), &capturing), "cuStreamIsCapturing");
  if (capturing != 0) throw CudaError("a CUDA graph is being captured; save before or after that");
  event_ = device_->take_event();
  try {
    d.check(d.EventRecord(event_, stream_of(stream)), "cuEventRecord");
    d.check(d.StreamWaitEvent(device_->stream_, event_, 0), "cuStreamWaitEvent");
  } catch (...) {
    device_->give_event(event_);
    throw;
  }
}

Job::~Job() {
  if (pid_ != getpid()) return;  // a forked child has no GPU
  try {
    settle();
  } catch (const CudaError&) {
    // Nothing runs any more after an error of the GPU; whoever waited was told.
  }
  for (const Device::Block& block : blocks_) device_->give(block);
  for (const Prints& prints : prints_)
    if (prints.block.host != nullptr) device_->give(prints.block);
  device_->give_event(event_);
}

void Job::launch(CuFunction kernel, unsigned threads, const std::vector<Task>& tasks) {
  if (tasks.empty()) return;
  if (kernel == nullptr) throw std::invalid_argument("no kernel was built that this GPU runs");
  const size_t nbytes = tasks.size() * sizeof(Task);
  const Device::Block block = device_->take(nbytes);
  blocks_.push_back(block);
  loose_ = true;
  std::memcpy(block.host, tasks.data(), nbytes);
  CuAddress address = block.device;
  uint32_t count = static_cast<uint32_t>(tasks.size());
  void* parameters[] = {&address, &count};
  const unsigned most = threads == kPrintThreads ? kPrintBlocks : kGatherBlocks;
  const unsigned blocks = static_cast<unsigned>(std::min<size_t>(tasks.size(), most));
  const Driver& d = *device_->driver_;
  d.check(d.LaunchKernel(kernel, blocks, 1, 1, threads, 1, 1, 0, device_->stream_, parameters, nullptr),
          "cuLaunchKernel");
}

void Job::gather(const Table& table, const char* pointers, const Buffer& to) {
  const std::lock_guard<std::mutex> guard(lock_);
  const Driver& d = *device_->driver_;
  const Device::Current current(*device_);
  if (!to.pinned()) throw std::invalid_argument("the memory is not pinned");
  if (static_cast<size_t>(table.span().second) > to.nbytes())
    throw std::invalid_argument("the table is larger than the memory");
  CuAddress base = 0;
  d.check(d.MemHostGetDevicePointer(&base, to.address(), 0), "cuMemHostGetDevicePointer");
  char* memory = static_cast<char*>(to.address());
  loose_ = true;
  std::vector<Task> tasks;
  for (const Box& box : table.boxes()) {
    const uint64_t from = pointer(pointers, box.index);
    if (box.ndim == 0 && (box.run >= kDirect || !device_->has_kernels()))
      d.check(d.MemcpyDtoHAsync(memory + box.start, from, static_cast<size_t>(box.run), device_->stream_),
              "cuMemcpyDtoHAsync");
    else
      cut(table, box, from, base + static_cast<uint64_t>(box.start), &tasks);
  }
  launch(device_->gather_, kGatherThreads, tasks);
}

size_t Job::fingerprint(const Table& table, const char* pointers) {
  const std::lock_guard<std::mutex> guard(lock_);
  const Device::Current current(*device_);
  Prints prints{{}, table.size(), {nullptr, 0, 0}, {}};
  std::vector<Task> tasks;
  for (const Box& box : table.boxes()) {
    cut(table, box, pointer(pointers, box.index), 0, &tasks);
    prints.rows.resize(tasks.size(), box.index);
  }
  if (!tasks.empty()) {
    constexpr size_t each = kPrintThreads * sizeof(Sums);
    prints.block = device_->take(tasks.size() * each);
    for (size_t i = 0; i < tasks.size(); ++i) tasks[i].dst = prints.block.device + i * each;
  }
  prints_.push_back(std::move(prints));
  launch(device_->fingerprint_, kPrintThreads, tasks);
  return prints_.size() - 1;
}

void Job::mark() {
  const std::lock_guard<std::mutex> guard(lock_);
  const Device::Current current(*device_);
  device_->driver_->check(device_->driver_->EventRecord(event_, device_->stream_), "cuEventRecord");
  marked_ = true;
  loose_ = false;
  marked_prints_ = prints_.size();
}

void Job::hold(uint64_t stream) {
  const Driver& d = *device_->driver_;
  {
    const std::lock_guard<std::mutex> guard(lock_);
    if (!marked_) return;
    const Device::Current current(*device_);
    int capturing = 0;
    // An event from outside must not get into a graph. The question itself fails while another stream is
    // captured that this one, the default stream, would wait for.
    if (d.StreamIsCapturing(stream_of(stream), &capturing) == 0 && capturing == 0) {
      d.check(d.StreamWaitEvent(stream_of(stream), event_, 0), "cuStreamWaitEvent");
      return;
    }
  }
  wait();
}

void Job::wait() {
  const Device::Current current(*device_);
  size_t ready = 0;
  {
    const std::lock_guard<std::mutex> guard(lock_);
    ready = marked_prints_;
  }
  device_->driver_->check(device_->driver_->EventSynchronize(event_), "cuEventSynchronize");
  const std::lock_guard<std::mutex> guard(lock_);
  for (size_t i = 0; i < ready; ++i) {
    Prints& prints = prints_[i];
    if (!prints.sums.empty()) continue;
    prints.sums.assign(prints.count, Sums{0, 0});
    const Sums* partial = reinterpret_cast<const Sums*>(prints.block.host);
    for (const uint32_t row : prints.rows)
      for (unsigned k = 0; k < kPrintThreads; ++k, ++partial) {
        prints.sums[row].a += partial->a;
        prints.sums[row].b += partial->b;
      }
  }
}

void Job::settle() {
  bool loose = false;
  {
    const std::lock_guard<std::mutex> guard(lock_);
    if (!loose_ && !marked_) return;
    loose = loose_;
  }
  const Device::Current current(*device_);
  const Driver& d = *device_->driver_;
  // An event may be what the driver refuses: then for the stream itself, and so for other saves as well.
  if (loose)
    d.check(d.StreamSynchronize(device_->stream_), "cuStreamSynchronize");
  else
    d.check(d.EventSynchronize(event_), "cuEventSynchronize");
}

std::vector<Sums> Job::sums(size_t number) const {
  if (number >= prints_.size() || prints_[number].sums.size() != prints_[number].count)
    throw std::invalid_argument("no such fingerprints, or they were not waited for");
  return prints_[number].sums;
}

}  // namespace tierckpt
