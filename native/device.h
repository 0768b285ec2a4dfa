// Copies out of the memory of a GPU, on a stream of their own.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "buffer.h"
#include "driver.h"
#include "fingerprint.h"
#include "table.h"

namespace tierckpt {

// Loops of a box that the kernels can copy.
constexpr unsigned kDeviceLoops = 6;

// One GPU as this process uses it. Never destroyed: what it owns lives as long as the process.
class Device {
 public:
  // Throws CudaError.
  Device(std::shared_ptr<Driver> driver, int ordinal);
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  // Whether there are kernels: without them only what lies together in memory can be copied.
  bool has_kernels() const { return gather_ != nullptr; }

  // Pins memory for all GPUs until it is unmapped; once is enough. Throws CudaError.
  void pin(Buffer& buffer) const;

 private:
  friend class Job;

  // The context of this GPU is the thread's as long as this lives, and a graph that is captured elsewhere is
  // not disturbed by what we do.
  class Current {
   public:
    explicit Current(const Device& device);
    ~Current();
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;

   private:
    const Driver& driver_;
    int mode_;
  };

  // Pinned memory of the host that the GPU reads and writes.
  struct Block {
    char* host;
    CuAddress device;
    size_t nbytes;
  };

  Block take(size_t nbytes);
  void give(const Block& block);
  CuEvent take_event();
  void give_event(CuEvent event);
  void load();

  const std::shared_ptr<Driver> driver_;
  CuContext context_ = nullptr;
  CuStream stream_ = nullptr;
  CuFunction gather_ = nullptr, fingerprint_ = nullptr;
  std::mutex lock_;
  std::vector<Block> blocks_;
  std::vector<CuEvent> events_;
};

// What one save copies from one GPU. Any thread may call it.
class Job {
 public:
  // All that is enqueued later comes after what `stream` has to do now. Throws CudaError.
  Job(std::shared_ptr<Device> device, uint64_t stream);
  // Waits until nothing is written or read any more.
  ~Job();
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  // Enqueues the copy of all boxes of the table to the places in the pinned memory `to` that the table says.
  // Boxes have no gaps in the shard. pointers: table.size() addresses in device memory. Throws CudaError,
  // std::invalid_argument.
  void gather(const Table& table, const char* pointers, const Buffer& to);

  // Enqueues fingerprints of all boxes; their number is the argument of `sums`.
  size_t fingerprint(const Table& table, const char* pointers);

  // What was enqueued so far is what `hold` and `wait` are about. Throws CudaError.
  void mark();
  // What is enqueued on `stream` later comes after that. Where that cannot be said, because a graph is
  // captured there, it waits as `wait` does.
  void hold(uint64_t stream);
  // Returns when that is done. Throws CudaError.
  void wait();
  // Returns when nothing is written or read any more, also of what a call that failed has enqueued. Throws
  // CudaError if the GPU has failed: then nothing runs on it.
  void settle();

  // After `wait`: for each entry of the table the fingerprint of its box.
  std::vector<Sums> sums(size_t number) const;

 private:
  struct Prints {
    std::vector<uint32_t> rows;  // of each task
    size_t count;                // of rows
    Device::Block block;
    std::vector<Sums> sums;
  };

  void launch(CuFunction kernel, unsigned threads, const std::vector<struct Task>& tasks);

  const std::shared_ptr<Device> device_;
  const int pid_;
  std::mutex lock_;
  CuEvent event_ = nullptr;
  bool marked_ = false;
  bool loose_ = false;  // whether there may be work behind the last mark
  size_t marked_prints_ = 0;
  std::vector<Device::Block> blocks_;
  std::vector<Prints> prints_;
};

}  // namespace tierckpt
