// One block for one task after the other. No shared memory, no waiting for other threads.
#include "tasks.h"

extern "C" __global__ void tierckpt_gather(const tierckpt::Task* tasks, uint32_t count) {
  for (uint32_t i = blockIdx.x; i < count; i += gridDim.x)
    tierckpt::gather(tasks[i], threadIdx.x, blockDim.x);
}

extern "C" __global__ void tierckpt_fingerprint(const tierckpt::Task* tasks, uint32_t count) {
  for (uint32_t i = blockIdx.x; i < count; i += gridDim.x)
    tierckpt::fingerprint(tasks[i], threadIdx.x, blockDim.x);
}
