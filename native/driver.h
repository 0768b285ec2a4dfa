// The CUDA driver, found at run time: one build serves machines with and without it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

namespace tierckpt {

// A call that the driver refused.
class CudaError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

using CuContext = void*;
using CuStream = void*;
using CuEvent = void*;
using CuModule = void*;
using CuFunction = void*;
using CuAddress = uint64_t;

class Driver {
 public:
  // Throws CudaError if there is no such library, or it has no device.
  explicit Driver(const std::string& path);
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;

  // Throws CudaError naming what was wanted.
  void check(int code, const char* what) const;
  std::string describe(int code) const;

  // As cuda.h declares them; handles are opaque pointers, a device is an int.
  int (*DeviceGet)(int*, int);
  int (*DevicePrimaryCtxRetain)(CuContext*, int);
  int (*CtxPushCurrent)(CuContext);
  int (*CtxPopCurrent)(CuContext*);
  int (*CtxGetStreamPriorityRange)(int*, int*);
  int (*StreamCreateWithPriority)(CuStream*, unsigned, int);
  int (*StreamSynchronize)(CuStream);
  int (*StreamWaitEvent)(CuStream, CuEvent, unsigned);
  int (*StreamIsCapturing)(CuStream, int*);
  int (*ThreadExchangeStreamCaptureMode)(int*);
  int (*EventCreate)(CuEvent*, unsigned);
  int (*EventRecord)(CuEvent, CuStream);
  int (*EventSynchronize)(CuEvent);
  int (*MemHostRegister)(void*, size_t, unsigned);
  int (*MemHostUnregister)(void*);
  int (*MemHostAlloc)(void**, size_t, unsigned);
  int (*MemFreeHost)(void*);
  int (*MemHostGetDevicePointer)(CuAddress*, void*, unsigned);
  int (*MemcpyDtoHAsync)(void*, CuAddress, size_t, CuStream);
  int (*ModuleLoadData)(CuModule*, const void*);
  int (*ModuleGetFunction)(CuFunction*, CuModule, const char*);
  int (*LaunchKernel)(CuFunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                      CuStream, void**, void**);

 private:
  int (*GetErrorName)(int, const char**);
  int (*GetErrorString)(int, const char**);
};

}  // namespace tierckpt
