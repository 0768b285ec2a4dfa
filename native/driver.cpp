#include "driver.h"

#include <dlfcn.h>

namespace tierckpt {
namespace {

template <class Function>
void find(void* library, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  if (*function == nullptr)
    throw CudaError(std::string("the CUDA driver has no ") + name + "; it is too old");
}

}  // namespace

Driver::Driver(const std::string& path) {
  // Never closed: streams and registered memory live as long as the process.
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) throw CudaError(dlerror());
  find(library, "cuGetErrorName", &GetErrorName);
  find(library, "cuGetErrorString", &GetErrorString);
  find(library, "cuDeviceGet", &DeviceGet);
  find(library, "cuDevicePrimaryCtxRetain", &DevicePrimaryCtxRetain);
  find(library, "cuCtxPushCurrent_v2", &CtxPushCurrent);
  find(library, "cuCtxPopCurrent_v2", &CtxPopCurrent);
  find(library, "cuCtxGetStreamPriorityRange", &CtxGetStreamPriorityRange);
  find(library, "cuStreamCreateWithPriority", &StreamCreateWithPriority);
  find(library, "cuStreamSynchronize", &StreamSynchronize);
  find(library, "cuStreamWaitEvent", &StreamWaitEvent);
  find(library, "cuStreamIsCapturing", &StreamIsCapturing);
  find(library, "cuThreadExchangeStreamCaptureMode", &ThreadExchangeStreamCaptureMode);
  find(library, "cuEventCreate", &EventCreate);
  find(library, "cuEventRecord", &EventRecord);
  find(library, "cuEventSynchronize", &EventSynchronize);
  find(library, "cuMemHostRegister_v2", &MemHostRegister);
  find(library, "cuMemHostUnregister", &MemHostUnregister);
  find(library, "cuMemHostAlloc", &MemHostAlloc);
  find(library, "cuMemFreeHost", &MemFreeHost);
  find(library, "cuMemHostGetDevicePointer_v2", &MemHostGetDevicePointer);
  find(library, "cuMemcpyDtoHAsync_v2", &MemcpyDtoHAsync);
  find(library, "cuModuleLoadData", &ModuleLoadData);
  find(library, "cuModuleGetFunction", &ModuleGetFunction);
  find(library, "cuLaunchKernel", &LaunchKernel);
  int (*init)(unsigned) = nullptr;
  find(library, "cuInit", &init);
  check(init(0), "cuInit");
}

std::string Driver::describe(int code) const {
  const char *name = nullptr, *text = nullptr;
  if (GetErrorName(code, &name) != 0 || name == nullptr) return "error " + std::to_string(code);
  if (GetErrorString(code, &text) != 0 || text == nullptr) return name;
  return std::string(name) + " (" + text + ")";
}

void Driver::check(int code, const char* what) const {
  if (code != 0) throw CudaError(std::string(what) + ": " + describe(code));
}

}  // namespace tierckpt
