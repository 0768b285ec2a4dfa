// The Python face of the native code: arguments are checked here, and the GIL is released around all that
// takes long.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <system_error>

#include "buffer.h"
#include "compare.h"
#include "copy.h"
#include "device.h"
#include "fingerprints.h"
#include "io.h"
#include "recall.h"
#include "stream.h"
#include "table.h"

namespace py = pybind11;

namespace tierckpt {
namespace {

// The contiguous bytes of a Python object, held for the life of this one, so that nobody can resize or free
// them while the GIL is released.
class View {
 public:
  View(const py::object& object, int flags) {
    if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) throw py::error_already_set();
  }
  ~View() { PyBuffer_Release(&view_); }
  View(const View&) = delete;
  View& operator=(const View&) = delete;

  char* data() const { return static_cast<char*>(view_.buf); }
  size_t size() const { return static_cast<size_t>(view_.len); }
  const Py_buffer& raw() const { return view_; }

 private:
  Py_buffer view_;
};

// 64-bit integers, as such or as bare bytes.
class Words : public View {
 public:
  Words(const py::object& object, const char* name) : View(object, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS) {
    const char* format = raw().format ? raw().format : "B";
    if (*format == '@' || *format == '=' || *format == '<') ++format;
    const bool words = raw().itemsize == 8 && std::strchr("qQlL", *format) != nullptr;
    const bool bytes = raw().itemsize == 1 && std::strchr("Bbc", *format) != nullptr;
    if (*format == '\0' || !(words || bytes) || size() % 8 != 0)
      throw py::value_error(std::string(name) + " must hold 64-bit integers");
  }
  size_t count() const { return size() / 8; }
};

std::vector<int64_t> column(const py::object& object, const char* name) {
  const Words words(object, name);
  std::vector<int64_t> values(words.count());
  if (!values.empty()) std::memcpy(values.data(), words.data(), words.size());
  return values;
}

[[noreturn]] void raise_os_error(int code, PyObject* name = nullptr) {
  errno = code;
  if (name != nullptr)
    PyErr_SetFromErrnoWithFilenameObject(PyExc_OSError, name);
  else
    PyErr_SetFromErrno(PyExc_OSError);
  throw py::error_already_set();
}

// Runs work without the GIL; a failed system call becomes an OSError.
template <class Work>
auto without_gil(const Work& work, PyObject* name = nullptr) {
  try {
    py::gil_scoped_release release;
    return work();
  } catch (const std::system_error& error) {
    raise_os_error(error.code().value(), name);
  }
}

void check_pointers(const Table& table, const Words& pointers) {
  if (pointers.count() != table.size())
    throw py::value_error("the table has " + std::to_string(table.size()) + " entries, not " +
                          std::to_string(pointers.count()));
}

void check_copy(const Table& table, const Words& pointers, int64_t lo, int64_t hi, const View& memory,
                int threads) {
  check_pointers(table, pointers);
  if (lo < 0 || hi < lo)
    throw py::value_error("not a range: " + std::to_string(lo) + ", " + std::to_string(hi));
  if (memory.size() != static_cast<size_t>(hi - lo))
    throw py::value_error("the range has " + std::to_string(hi - lo) + " bytes, the buffer " +
                          std::to_string(memory.size()));
  if (threads <= 0) throw py::value_error("threads must be positive");
}

void py_gather(const Table& table, const py::object& pointers, int64_t lo, int64_t hi, const py::object& dst,
               int threads, std::optional<bool> stream) {
  const Words words(pointers, "pointers");
  const View memory(dst, PyBUF_WRITABLE);
  check_copy(table, words, lo, hi, memory, threads);
  without_gil([&] { gather(table, words.data(), lo, hi, memory.data(), threads, stream); });
}

void py_scatter(const Table& table, const py::object& pointers, int64_t lo, int64_t hi, const py::object& src,
                int threads, std::optional<bool> stream) {
  const Words words(pointers, "pointers");
  const View memory(src, PyBUF_SIMPLE);
  check_copy(table, words, lo, hi, memory, threads);
  without_gil([&] { scatter(table, words.data(), lo, hi, memory.data(), threads, stream); });
}

std::vector<uint32_t> py_differing(const Table& table, const py::object& pointers, const py::object& shard,
                                   int64_t every, uint64_t phase) {
  const Words words(pointers, "pointers");
  const View memory(shard, PyBUF_SIMPLE);
  check_pointers(table, words);
  if (memory.size() < static_cast<size_t>(table.span().second))
    throw py::value_error("the boxes reach to byte " + std::to_string(table.span().second) +
                          ", the buffer has " + std::to_string(memory.size()));
  if (every <= 0) throw py::value_error("every must be positive");
  return without_gil([&] { return differing(table, words.data(), memory.data(), every, phase); });
}

std::unique_ptr<Samples> make_samples(const Table& table, const py::object& pointers, size_t count,
                                      uint64_t phase) {
  const Words words(pointers, "pointers");
  check_pointers(table, words);
  return without_gil([&] { return std::make_unique<Samples>(table, words.data(), count, phase); });
}

std::vector<uint32_t> samples_differing(const Samples& samples, const py::object& shard) {
  const View memory(shard, PyBUF_SIMPLE);
  if (memory.size() < static_cast<size_t>(samples.end()))
    throw py::value_error("the samples reach to byte " + std::to_string(samples.end()) + ", the buffer has " +
                          std::to_string(memory.size()));
  return without_gil([&] { return samples.differing(memory.data()); });
}

std::unique_ptr<Buffer> make_buffer(py::ssize_t nbytes, bool populated) {
  if (nbytes < 0) throw py::value_error("nbytes must not be negative");
  try {
    auto buffer = std::make_unique<Buffer>(static_cast<size_t>(nbytes));
    if (populated) without_gil([&] { populate(buffer->address(), buffer->nbytes()); });
    return buffer;
  } catch (const std::bad_alloc&) {
    PyErr_SetString(PyExc_MemoryError, ("cannot map " + std::to_string(nbytes) + " bytes").c_str());
    throw py::error_already_set();
  }
}

std::unique_ptr<Buffer> map_buffer(int fd, py::ssize_t nbytes, bool fresh) {
  if (nbytes <= 0) throw py::value_error("nbytes must be positive");
  try {
    return without_gil([&] { return std::make_unique<Buffer>(fd, static_cast<size_t>(nbytes), fresh); });
  } catch (const std::bad_alloc&) {
    PyErr_SetString(PyExc_MemoryError, ("cannot map " + std::to_string(nbytes) + " bytes").c_str());
    throw py::error_already_set();
  }
}

py::bytes sums_bytes(const std::vector<Sums>& sums) {
  return py::bytes(reinterpret_cast<const char*>(sums.data()), sums.size() * sizeof(Sums));
}

py::bytes py_fingerprints(const Table& table, const py::object& pointers) {
  const Words words(pointers, "pointers");
  check_pointers(table, words);
  return sums_bytes(without_gil([&] { return fingerprints(table, words.data()); }));
}

void py_device_gather(Job& job, const Table& table, const py::object& pointers, const Buffer& to) {
  const Words words(pointers, "pointers");
  check_pointers(table, words);
  without_gil([&] { job.gather(table, words.data(), to); });
}

size_t py_device_fingerprint(Job& job, const Table& table, const py::object& pointers) {
  const Words words(pointers, "pointers");
  check_pointers(table, words);
  return without_gil([&] { return job.fingerprint(table, words.data()); });
}

// Called by the main thread between two instructions of its program. What it raises is nobody's.
int run_soon(void* callable) {
  const py::object owned = py::reinterpret_steal<py::object>(static_cast<PyObject*>(callable));
  const py::object result = py::reinterpret_steal<py::object>(PyObject_CallNoArgs(owned.ptr()));
  if (!result) PyErr_WriteUnraisable(owned.ptr());
  return 0;
}

bool py_call_soon(const py::object& callable) {
  PyObject* kept = callable.inc_ref().ptr();
  if (Py_AddPendingCall(&run_soon, kept) == 0) return true;
  Py_DECREF(kept);
  return false;
}

void py_stream_copy(const py::object& dst, const py::object& src, const std::optional<std::string>& kernel) {
  const View to(dst, PyBUF_WRITABLE), from(src, PyBUF_SIMPLE);
  if (to.size() != from.size()) throw py::value_error("dst and src differ in size");
  const bool known = without_gil([&] {
    const bool found =
        stream_copy_with(kernel.value_or(stream_kernels().front()), to.data(), from.data(), to.size());
    stream_fence();
    return found;
  });
  if (!known) throw py::value_error("no kernel " + *kernel);
}

void py_populate(const py::object& object) {
  const View memory(object, PyBUF_WRITABLE);
  without_gil([&] { populate(memory.data(), memory.size()); });
}

std::pair<int, bool> py_open_direct(int dir_fd, const py::object& name, int flags, unsigned mode) {
  PyObject* encoded = nullptr;
  if (!PyUnicode_FSConverter(name.ptr(), &encoded)) throw py::error_already_set();
  const py::object path = py::reinterpret_steal<py::object>(encoded);
  const char* text = PyBytes_AS_STRING(path.ptr());
  return without_gil([&] { return open_direct(dir_fd, text, flags, mode); }, name.ptr());
}

bool py_reserve(int fd, int64_t size) {
  return without_gil([&] { return reserve(fd, size); });
}

void py_write_at(int fd, const py::object& object, int64_t offset) {
  const View memory(object, PyBUF_SIMPLE);
  without_gil([&] { write_at(fd, memory.data(), memory.size(), offset); });
}

size_t py_read_at(int fd, const py::object& object, int64_t offset) {
  const View memory(object, PyBUF_WRITABLE);
  return without_gil([&] { return read_at(fd, memory.data(), memory.size(), offset); });
}

std::optional<double> py_cached(int fd, int64_t offset, int64_t length) {
  if (offset < 0 || length < 0) throw py::value_error("offset and length must not be negative");
  return without_gil([&] { return cached(fd, offset, length); });
}

}  // namespace

PYBIND11_MODULE(_native, m) {
  using namespace py::literals;
  m.doc() = "Copies of tensors, direct file I/O and page-aligned memory, without the GIL.";

  py::class_<Buffer>(
      m, "Buffer", py::buffer_protocol(),
      "Page-aligned anonymous memory, on huge pages where the system has them; freed when it and all "
      "views of it are gone.")
      .def(py::init(&make_buffer), "nbytes"_a, py::kw_only(), "populate"_a = false,
           "Map `nbytes` of zeros; with `populate` all pages are made present at once, in parallel.")
      .def_static("of", &map_buffer, "fd"_a, "nbytes"_a, py::kw_only(), "fresh"_a = false,
                  "The first bytes of a file in memory, shared with whoever else maps it, all present; "
                  "`fresh`: nothing lies "
                  "there yet, so its pages are made huge where the system has them.")
      .def_property_readonly("pinned", &Buffer::pinned, "Whether a device reads and writes it.")
      .def_property_readonly(
          "address", [](const Buffer& b) { return reinterpret_cast<uintptr_t>(b.address()); },
          "Address of the first byte; never 0.")
      .def_property_readonly("nbytes", &Buffer::nbytes, "Size in bytes.")
      .def("__len__", &Buffer::nbytes)
      .def_buffer([](Buffer& b) {
        return py::buffer_info(static_cast<uint8_t*>(b.address()), static_cast<py::ssize_t>(b.nbytes()));
      });

  py::class_<Table>(m, "CopyTable", py::is_final(),
                    "Geometry of many strided boxes between one linear byte range, the shard, and tensors in "
                    "memory. Immutable; any number of threads may use it at once.")
      .def(py::init([](const py::object& offsets, const py::object& itemsizes, const py::object& ndims,
                       const py::object& shapes, const py::object& shard_strides,
                       const py::object& tensor_strides) {
             const Columns columns{column(offsets, "offsets"),
                                   column(itemsizes, "itemsizes"),
                                   column(ndims, "ndims"),
                                   column(shapes, "shapes"),
                                   column(shard_strides, "shard_strides"),
                                   column(tensor_strides, "tensor_strides")};
             py::gil_scoped_release release;
             return std::make_unique<Table>(columns);
           }),
           "offsets"_a, "itemsizes"_a, "ndims"_a, "shapes"_a, "shard_strides"_a, "tensor_strides"_a,
           "Columns of 64-bit integers, one element per box (offsets in the shard, itemsizes, ndims) or per "
           "dimension of each box (shapes in elements, strides in bytes).")
      .def("__len__", &Table::size)
      .def_property_readonly("nbytes", &Table::nbytes, "Bytes that all boxes hold together.")
      .def_property_readonly("span", &Table::span, "First and last (exclusive) byte of the shard in any box.")
      .def("covered", &Table::covered, "lo"_a, "hi"_a, py::call_guard<py::gil_scoped_release>(),
           "Bytes of the boxes that lie in [lo, hi); where boxes overlap they count once for each.")
      .def("gather", &py_gather, "pointers"_a, "lo"_a, "hi"_a, "dst"_a, "threads"_a = 1, py::kw_only(),
           "stream"_a = py::none(),
           "Copy what lies in the range [lo, hi) of the shard from the tensors into `dst`.")
      .def("scatter", &py_scatter, "pointers"_a, "lo"_a, "hi"_a, "src"_a, "threads"_a = 1, py::kw_only(),
           "stream"_a = py::none(), "Copy the range [lo, hi) of the shard from `src` to the tensors.")
      .def("differing", &py_differing, "pointers"_a, "shard"_a, "every"_a, "phase"_a,
           "Boxes of which a sample is not as it was copied to `shard`.");
  py::class_<Samples>(m, "Samples", py::is_final(), "Some lines of the tensors of a table as they were.")
      .def(py::init(&make_samples), "table"_a, "pointers"_a, "count"_a, "phase"_a)
      .def("differing", &samples_differing, "shard"_a, "Boxes of which a line was another than `shard` has.");

  m.attr("DEVICE_LOOPS") = kDeviceLoops;
  py::register_exception<CudaError>(m, "CudaError", PyExc_RuntimeError);
  py::class_<Driver, std::shared_ptr<Driver>>(m, "Driver", py::is_final(), "The CUDA driver.")
      .def(py::init<const std::string&>(), "path"_a = "libcuda.so.1",
           py::call_guard<py::gil_scoped_release>())
      .def(
          "device",
          [](const std::shared_ptr<Driver>& driver, int ordinal) {
            py::gil_scoped_release release;
            return std::shared_ptr<Device>(new Device(driver, ordinal),
                                           [](Device*) {});  // it is never destroyed
          },
          "ordinal"_a, "A GPU, by the number that the CUDA runtime gives it.");
  py::class_<Device, std::shared_ptr<Device>>(m, "Device", py::is_final(), "One GPU as this process uses it.")
      .def_property_readonly(
          "has_kernels", &Device::has_kernels,
          "Whether it can copy what does not lie together in memory, and take fingerprints.")
      .def(
          "pin",
          [](const Device& device, Buffer& buffer) {
            py::gil_scoped_release release;
            device.pin(buffer);
          },
          "buffer"_a, "Make memory known to all GPUs until it is unmapped.")
      .def(
          "job",
          [](const std::shared_ptr<Device>& device, uint64_t stream) {
            py::gil_scoped_release release;
            return std::make_unique<Job>(device, stream);
          },
          "stream"_a, "Copies that come after what `stream` has to do now.");
  py::class_<Job>(m, "DeviceJob", py::is_final(),
                  "What one save copies from one GPU. Any thread may call it.")
      .def("gather", &py_device_gather, "table"_a, "pointers"_a, "to"_a,
           "Enqueue the copy of all boxes of a table into pinned memory.")
      .def("fingerprint", &py_device_fingerprint, "table"_a, "pointers"_a,
           "Enqueue fingerprints of all boxes; their number is the argument of `sums`.")
      .def("mark", &Job::mark, py::call_guard<py::gil_scoped_release>(),
           "What was enqueued so far is what `hold` and `wait` are about.")
      .def("hold", &Job::hold, "stream"_a, py::call_guard<py::gil_scoped_release>(),
           "What is enqueued on `stream` from now on comes after that.")
      .def("wait", &Job::wait, py::call_guard<py::gil_scoped_release>(), "Return when that is done.")
      .def("settle", &Job::settle, py::call_guard<py::gil_scoped_release>(),
           "Return when nothing is written or read any more, marked or not.")
      .def(
          "sums", [](const Job& job, size_t number) { return sums_bytes(job.sums(number)); }, "number"_a,
          "After `wait`: 16 bytes for each entry of the table.");

  m.def("call_soon", &py_call_soon, "callable"_a,
        "Have the main thread call this as soon as it is between two instructions; false if too many wait "
        "for that.");
  m.def("fingerprints", &py_fingerprints, "table"_a, "pointers"_a,
        "For each entry of a table 16 bytes that tell whether others hold the same.");
  m.def("populate", &py_populate, "buffer"_a,
        "Make all pages of a writable buffer present, in parallel, without changing them.");
  m.def("open_direct", &py_open_direct, "dir_fd"_a, "name"_a, "flags"_a, "mode"_a = 0666,
        "Open a file past the page cache where its file system allows it: (descriptor, whether it does).");
  m.def("reserve", &py_reserve, "fd"_a, "size"_a,
        "Allocate the first `size` bytes of a file where its file system can do that; whether it did.");
  m.def("write_at", &py_write_at, "fd"_a, "buffer"_a, "offset"_a, "Write the whole buffer at `offset`.");
  m.def("read_at", &py_read_at, "fd"_a, "buffer"_a, "offset"_a,
        "Read at `offset` until the buffer is full or the file ends; return the bytes read.");
  m.def("cached", &py_cached, "fd"_a, "offset"_a, "length"_a,
        "Fraction of a range of a file that is in the page cache; None where the system cannot tell.");
  m.def("stream_kernels", &stream_kernels,
        "The instruction sets of the non-temporal copies that this machine runs, best first.");
  m.def("stream_copy", &py_stream_copy, "dst"_a, "src"_a, "kernel"_a = py::none(),
        "Copy `src` to `dst`, of the same size, past the caches.");
  bind_recall(m);
}

}  // namespace tierckpt
