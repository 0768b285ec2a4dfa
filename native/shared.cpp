#include "shared.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <memory>
#include <system_error>
#include <thread>

#include "buffer.h"
#include "parallel.h"

namespace py = pybind11;

namespace tierckpt {
namespace {

constexpr int kPopulateWrite = 23, kCollapse = 25;  // of madvise, Linux 5.14 and 6.1; older headers lack them
constexpr int kTries = 4;
constexpr size_t kSmall = 4096;
constexpr size_t kHuge = size_t{2} << 20;
constexpr unsigned kMaxThreads = 8;

[[noreturn]] void fail(int code, const char* what) {
  throw std::system_error(code, std::generic_category(), what);
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
      char* page = begin + k * kHuge;
      if (!advised(page, kSmall, kPopulateWrite) || !advised(page, kHuge, kCollapse)) refused = true;
    }
  });
}

}  // namespace

Shared::Shared(int fd, size_t nbytes, bool fresh) : nbytes_(nbytes) {
  const size_t slack = nbytes >= kHuge ? kHuge : 0;
  // Huge pages want addresses that are multiples of them, which mmap does not see to.
  void* raw = mmap(nullptr, nbytes + slack, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) fail(errno, "mmap");
  char* begin = static_cast<char*>(raw);
  const size_t head = slack == 0 ? 0 : -reinterpret_cast<uintptr_t>(raw) % kHuge;
  if (mmap(begin + head, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
    const int code = errno;
    munmap(raw, nbytes + slack);
    fail(code, "mmap");
  }
  const size_t mapped = (nbytes + kSmall - 1) / kSmall * kSmall, end = nbytes + slack;
  if (head != 0) munmap(begin, head);
  if (head + mapped < end) munmap(begin + head + mapped, end - head - mapped);
  address_ = begin + head;
  madvise(address_, nbytes, MADV_DONTFORK);
  madvise(address_, nbytes, MADV_HUGEPAGE);
  try {
    if (fresh) make_huge(begin + head, nbytes);
    populate(address_, nbytes);
  } catch (...) {
    munmap(address_, nbytes_);
    throw;
  }
}

Shared::~Shared() { munmap(address_, nbytes_); }

void bind_shared(py::module_& m) {
  using namespace py::literals;
  py::class_<Shared>(m, "Shared", py::is_final(), py::buffer_protocol(),
                     "A file in memory, mapped writable, with all its pages present and none of them for "
                     "forked children; unmapped when it and all views of it are gone.")
      .def(py::init([](int fd, py::ssize_t nbytes, bool fresh) {
             if (nbytes <= 0) throw py::value_error("nbytes must be positive");
             int code = 0;
             std::unique_ptr<Shared> made;
             {
               py::gil_scoped_release release;
               try {
                 made = std::make_unique<Shared>(fd, static_cast<size_t>(nbytes), fresh);
               } catch (const std::system_error& error) {
                 code = error.code().value();
               }
             }
             if (made == nullptr) {
               errno = code;
               PyErr_SetFromErrno(PyExc_OSError);
               throw py::error_already_set();
             }
             return made;
           }),
           "fd"_a, "nbytes"_a, py::kw_only(), "fresh"_a = false,
           "Map the first `nbytes`; `fresh`: nothing lies there yet, so its pages are made huge where the "
           "system has them.")
      .def_property_readonly("nbytes", &Shared::nbytes, "Size in bytes.")
      .def("__len__", &Shared::nbytes)
      .def_buffer([](Shared& s) {
        return py::buffer_info(static_cast<uint8_t*>(s.address()), static_cast<py::ssize_t>(s.nbytes()));
      });
}

}  // namespace tierckpt
