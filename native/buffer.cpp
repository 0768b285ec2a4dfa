#include "buffer.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <limits>
#include <new>
#include <system_error>
#include <thread>

#include "parallel.h"

namespace tierckpt {
namespace {

constexpr int kPopulateWrite = 23, kCollapse = 25;  // of madvise, Linux 5.14 and 6.1; older headers lack them
constexpr int kTries = 4;
constexpr size_t kHuge = size_t{2} << 20;
constexpr size_t kBlock = size_t{64} << 20;
constexpr unsigned kMaxThreads = 8;

size_t page() {
  static const size_t size = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return size;
}

// Returns 0 or an errno. [begin, end) are whole pages.
int populate_block(char* begin, char* end) {
  while (madvise(begin, static_cast<size_t>(end - begin), kPopulateWrite) != 0) {
    if (errno == EINTR || errno == EAGAIN) continue;
    if (errno != EINVAL) return errno;
    // An older kernel. The pages may be in use already: touch them without changing them, atomically.
    for (char* p = begin; p < end; p += page()) __atomic_fetch_or(p, 0, __ATOMIC_RELAXED);
    return 0;
  }
  return 0;
}

bool advised(char* memory, size_t nbytes, int advice) {
  for (int k = 0; k < kTries; ++k) {
    if (madvise(memory, nbytes, advice) == 0) return true;
    if (errno != EAGAIN && errno != EINTR) break;
  }
  return false;
}

// Files in memory get huge pages by themselves only where the system's settings say so, which is seldom; a
// process may ask for them one by one all the same. That takes one small page to start from. Reading through
// small pages costs more than the copy itself. Where there are none to be had, small ones do.
void make_huge(char* begin, size_t nbytes) {
  const size_t count = nbytes / kHuge;
  const unsigned threads = std::min(std::max(1u, std::thread::hardware_concurrency()), kMaxThreads);
  std::atomic<size_t> taken{0};
  std::atomic<bool> refused{false};
  on_threads(static_cast<int>(std::min<size_t>(threads, count)), [&] {
    for (size_t k; !refused && (k = taken.fetch_add(1)) < count;) {
      char* first = begin + k * kHuge;
      if (!advised(first, page(), kPopulateWrite) || !advised(first, kHuge, kCollapse)) refused = true;
    }
  });
}

}  // namespace

void populate(void* address, size_t nbytes) {
  if (nbytes == 0) return;
  char* begin = static_cast<char*>(address);
  char* end = begin + nbytes;
  begin -= reinterpret_cast<uintptr_t>(begin) % page();
  const size_t total = (static_cast<size_t>(end - begin) + page() - 1) / page() * page();
  const size_t count = (total + kBlock - 1) / kBlock;
  const size_t threads =
      std::min<size_t>({count, std::max(1u, std::thread::hardware_concurrency()), size_t{kMaxThreads}});
  std::atomic<size_t> taken{0};
  std::atomic<int> error{0};
  on_threads(static_cast<int>(threads), [&] {
    for (size_t k; error == 0 && (k = taken.fetch_add(1)) < count;) {
      const int code = populate_block(begin + k * kBlock, begin + std::min(total, (k + 1) * kBlock));
      if (code != 0) error = code;
    }
  });
  if (error == ENOMEM) throw std::bad_alloc();
  if (error != 0) throw std::system_error(error, std::generic_category(), "populate");
}

Buffer::Buffer(size_t nbytes) : nbytes_(nbytes) {
  if (nbytes > std::numeric_limits<size_t>::max() / 2) throw std::bad_alloc();
  mapped_ = std::max<size_t>(1, (nbytes + page() - 1) / page()) * page();
  // Older kernels do not align large mappings to huge pages by themselves: map more and give back the ends.
  const size_t slack = mapped_ >= kHuge ? kHuge : 0;
  void* raw = mmap(nullptr, mapped_ + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (raw == MAP_FAILED) throw std::bad_alloc();
  char* begin = static_cast<char*>(raw);
  if (slack != 0) {
    const size_t head = -reinterpret_cast<uintptr_t>(raw) % kHuge;
    if (head != 0) munmap(begin, head);
    begin += head;
    if (slack != head) munmap(begin + mapped_, slack - head);
  }
  address_ = begin;
  madvise(address_, mapped_, MADV_HUGEPAGE);
}

Buffer::Buffer(int fd, size_t nbytes, bool fresh) : nbytes_(nbytes), owner_(getpid()) {
  mapped_ = (nbytes + page() - 1) / page() * page();
  const size_t slack = nbytes >= kHuge ? kHuge : 0;
  // Huge pages want addresses that are multiples of them, which mmap does not see to.
  void* raw = mmap(nullptr, mapped_ + slack, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) throw std::bad_alloc();
  char* begin = static_cast<char*>(raw);
  const size_t head = slack == 0 ? 0 : -reinterpret_cast<uintptr_t>(raw) % kHuge;
  if (mmap(begin + head, mapped_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
    const int code = errno;
    munmap(raw, mapped_ + slack);
    throw std::system_error(code, std::generic_category(), "mmap");
  }
  if (head != 0) munmap(begin, head);
  if (slack != head) munmap(begin + head + mapped_, slack - head);
  address_ = begin + head;
  madvise(address_, mapped_, MADV_DONTFORK);
  madvise(address_, mapped_, MADV_HUGEPAGE);
  try {
    if (fresh) make_huge(begin + head, mapped_);
    populate(address_, mapped_);
  } catch (...) {
    munmap(address_, mapped_);
    throw;
  }
}

void Buffer::pin(std::function<void(void*)> unpin) {
  // A child that shared the pages would make the kernel give this process others, while the device writes to
  // those before.
  madvise(address_, mapped_, MADV_DONTFORK);
  owner_ = getpid();
  unpin_ = std::move(unpin);
}

Buffer::~Buffer() {
  // A forked child has not inherited it: by now something else may lie there.
  if (owner_ != 0 && owner_ != getpid()) return;
  if (unpin_) unpin_(address_);
  munmap(address_, mapped_);
}

}  // namespace tierckpt
