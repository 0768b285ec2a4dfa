#include "recall.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace tierckpt {
namespace {

py::object borrowed(PyObject* object) { return py::reinterpret_borrow<py::object>(object); }
py::object owned(PyObject* object) { return py::reinterpret_steal<py::object>(object); }

PyObject* interned(const char* text) {
  PyObject* found = PyUnicode_InternFromString(text);
  if (found == nullptr) throw py::error_already_set();
  return found;
}

// Names of attributes, kept as long as the process lives.
struct Attributes {
  PyObject* parameters = interned("_parameters");
  PyObject* buffers = interned("_buffers");
  PyObject* modules = interned("_modules");
  PyObject* transient = interned("_non_persistent_buffers_set");
  PyObject* patches[2] = {interned("state_dict"), interned("load_state_dict")};
  PyObject* hooks[4] = {interned("_state_dict_hooks"), interned("_state_dict_pre_hooks"),
                        interned("_load_state_dict_pre_hooks"), interned("_load_state_dict_post_hooks")};
  PyObject* param_groups = interned("param_groups");
  PyObject* state = interned("state");
  PyObject* local = interned("_local_tensor");
  PyObject* spec = interned("_spec");
  PyObject* mesh = interned("mesh");
  PyObject* placed[3] = {interned("placements"), interned("shard_order"),
                         interned("use_strided_shard_as_shard_order")};
};

const Attributes& names() {
  static const Attributes attributes;
  return attributes;
}

// What went wrong in Python code makes the answer "no": the caller's full way meets it again and reports it.
// What is no Exception (an interrupt, say) goes on.
void forgive() {
  if (PyErr_Occurred() == nullptr) return;
  if (!PyErr_ExceptionMatches(PyExc_Exception)) throw py::error_already_set();
  PyErr_Clear();
}

// Whether two keys are the same and of the same type. Only types whose comparison runs no Python code: it is
// asked while dicts are iterated. Equal is not enough: 1, 1.0 and True are stored differently.
bool same_key(PyObject* a, PyObject* b) {
  if (a == b) return true;
  if (Py_TYPE(a) != Py_TYPE(b)) return false;
  if (PyUnicode_CheckExact(a)) {
    return PyUnicode_GET_LENGTH(a) == PyUnicode_GET_LENGTH(b) && PyUnicode_Compare(a, b) == 0;
  }
  if (PyLong_CheckExact(a) || PyBytes_CheckExact(a)) return PyObject_RichCompareBool(a, b, Py_EQ) == 1;
  if (!PyTuple_CheckExact(a) || PyTuple_GET_SIZE(a) != PyTuple_GET_SIZE(b)) return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(a); ++i) {
    if (!same_key(PyTuple_GET_ITEM(a, i), PyTuple_GET_ITEM(b, i))) return false;
  }
  return true;
}

// Steps
// --------------------------------------------------------------------------------------------------------

enum class Op : uint8_t {
  kTensor,
  kValue,
  kPerRank,
  kMapping,
  kSequence,
  kModule,
  kWrapper,
  kCall,
  kOptimizer,
  kStates,
  kParameters,
  kNames,
  kNone,
  kAnything,
  kEmpty,
};

enum class Hooks : uint8_t { kNone, kAsk, kIgnore };

// What must be found at one place of the state. All Python objects are borrowed from the description that the
// Recall keeps.
struct Step {
  Op op = Op::kNone;
  Hooks hooks = Hooks::kNone;
  bool pure = false;      // runs no Python code
  bool ordered = false;   // an OrderedDict: PyDict_Next does not know its order
  bool is_list = false;   // else a tuple, or a class made from it
  Py_ssize_t index = -1;  // where to put what is found, if not negative
  PyTypeObject* type = nullptr;
  PyObject* ask = nullptr;
  std::vector<PyObject*> keys;
  std::vector<int64_t> numbers;
  std::vector<Step> children;
};

class Parser {
 public:
  Step step(PyObject* description) {
    fields_ = description;
    if (!PyTuple_Check(description) || PyTuple_GET_SIZE(description) < 1) bad();
    const std::string op = py::cast<std::string>(py::handle(PyTuple_GET_ITEM(description, 0)));
    Step s;
    if (op == "tensor" || op == "per_rank") {
      s.op = op == "tensor" ? Op::kTensor : Op::kPerRank;
      s.type = type(description, 1);
      s.index = number(description, 2);
      s.pure = true;
    } else if (op == "value") {
      s.op = Op::kValue;
      s.index = number(description, 1);
    } else if (op == "mapping") {
      mapping(s, description);
    } else if (op == "sequence") {
      s.op = Op::kSequence;
      s.type = type(description, 1);
      s.is_list = PyType_FastSubclass(s.type, Py_TPFLAGS_LIST_SUBCLASS);
      if (!s.is_list && !PyType_FastSubclass(s.type, Py_TPFLAGS_TUPLE_SUBCLASS)) bad();
      children(s, field(description, 2));
      s.pure = all_pure(s);
    } else if (op == "module") {
      module(s, description);
    } else if (op == "wrapper" || op == "call") {
      s.op = op == "call" ? Op::kCall : Op::kWrapper;
      s.type = type(description, 1);
      s.ask = field(description, 2);
      s.children.push_back(step(field(description, 3)));
    } else if (op == "optimizer") {
      s.op = Op::kOptimizer;
      s.type = type(description, 1);
      s.ask = field(description, 2);
      s.index = number(description, 3);
      s.children.push_back(step(field(description, 4)));
      s.children.push_back(step(field(description, 5)));
    } else if (op == "states") {
      s.op = Op::kStates;
      s.type = type(description, 1);
      if (!PyType_FastSubclass(s.type, Py_TPFLAGS_DICT_SUBCLASS)) bad();
      numbers(s, field(description, 2));
      children(s, field(description, 3));
      if (s.numbers.size() != s.children.size()) bad();
    } else if (op == "parameters") {
      s.op = Op::kParameters;
      numbers(s, field(description, 1));
      s.pure = true;
    } else if (op == "names") {
      s.op = Op::kNames;
      keys(s, field(description, 1));
      s.pure = true;
    } else {
      s.op = op == "none" ? Op::kNone : op == "anything" ? Op::kAnything : Op::kEmpty;
      if (s.op == Op::kEmpty && op != "empty") bad();
      s.pure = true;
    }
    return s;
  }

 private:
  [[noreturn]] void bad() {
    throw py::value_error("malformed step: " + py::repr(fields_).cast<std::string>().substr(0, 80));
  }

  PyObject* field(PyObject* tuple, Py_ssize_t i) {
    if (i >= PyTuple_GET_SIZE(tuple)) bad();
    return PyTuple_GET_ITEM(tuple, i);
  }

  PyTypeObject* type(PyObject* tuple, Py_ssize_t i) {
    PyObject* found = field(tuple, i);
    if (!PyType_Check(found)) bad();
    return reinterpret_cast<PyTypeObject*>(found);
  }

  Py_ssize_t number(PyObject* tuple, Py_ssize_t i) {
    return py::cast<Py_ssize_t>(py::handle(field(tuple, i)));
  }

  void keys(Step& s, PyObject* tuple) {
    if (!PyTuple_CheckExact(tuple)) bad();
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); ++i) s.keys.push_back(PyTuple_GET_ITEM(tuple, i));
  }

  void numbers(Step& s, PyObject* tuple) {
    if (!PyTuple_CheckExact(tuple)) bad();
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); ++i) s.numbers.push_back(number(tuple, i));
  }

  void children(Step& s, PyObject* tuple) {
    if (!PyTuple_CheckExact(tuple)) bad();
    s.children.reserve(static_cast<size_t>(PyTuple_GET_SIZE(tuple)));
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); ++i)
      s.children.push_back(step(PyTuple_GET_ITEM(tuple, i)));
  }

  static bool all_pure(const Step& s) {
    return std::all_of(s.children.begin(), s.children.end(), [](const Step& child) { return child.pure; });
  }

  void mapping(Step& s, PyObject* description) {
    s.op = Op::kMapping;
    s.type = type(description, 1);
    if (!PyType_FastSubclass(s.type, Py_TPFLAGS_DICT_SUBCLASS)) bad();
    s.ordered = s.type == &PyODict_Type;
    keys(s, field(description, 2));
    children(s, field(description, 3));
    s.index = number(description, 4);
    if (s.keys.size() != s.children.size()) bad();
    s.pure = !s.ordered && all_pure(s);
  }

  // Its children are _parameters, _buffers and _modules; its numbers tell which buffers are persistent.
  void module(Step& s, PyObject* description) {
    s.op = Op::kModule;
    s.type = type(description, 1);
    const Py_ssize_t hooks = number(description, 2);
    s.hooks = hooks == 0 ? Hooks::kNone : hooks == 1 ? Hooks::kAsk : Hooks::kIgnore;
    for (Py_ssize_t i = 3; i < 6; ++i) {
      s.children.push_back(step(field(description, i)));
      if (s.children.back().op != Op::kMapping) bad();
    }
    numbers(s, field(description, 6));
    if (s.numbers.size() != s.children[1].keys.size()) bad();
  }

  PyObject* fields_ = nullptr;  // for messages
};

// Finding
// ------------------------------------------------------------------------------------------------------

// Containers within containers; beyond, the full way says what is wrong.
constexpr int kDepth = 64;

// One search. What it finds is held until it ends, and so is every container while Python code may run.
class Search {
 public:
  Search(const std::vector<PyTypeObject*>& scalars, PyObject* is_value, PyObject* is_sharded)
      : scalars_(scalars), is_value_(is_value), is_sharded_(is_sharded) {}

  std::vector<py::object> leaves, values, per_rank;

  // `object` is held by the caller. False also when an exception is set.
  bool match(const Step& s, PyObject* object, int depth) {
    switch (s.op) {
      case Op::kTensor:
        return Py_TYPE(object) == s.type && put(leaves, s.index, object);
      case Op::kValue:
        return value(object, depth) && put(values, s.index, object);
      case Op::kPerRank:
        return Py_TYPE(object) == s.type && put(per_rank, s.index, object);
      case Op::kMapping:
        return mapping(s, object, depth);
      case Op::kSequence:
        return sequence(s, object, depth);
      case Op::kModule:
        return module(s, object, depth);
      case Op::kWrapper: {
        if (Py_TYPE(object) != s.type) return false;
        const py::object inner = owned(PyObject_GetAttr(object, s.ask));
        return inner && match(s.children[0], inner.ptr(), depth);
      }
      case Op::kCall: {
        if (Py_TYPE(object) != s.type) return false;
        const py::object state = owned(PyObject_CallFunctionObjArgs(s.ask, object, nullptr));
        return state && state.ptr() != Py_NotImplemented && match(s.children[0], state.ptr(), depth + 1);
      }
      case Op::kOptimizer:
        return optimizer(s, object, depth);
      case Op::kStates:
        return false;  // only inside of an optimizer
      case Op::kParameters:
        return parameters(s, object);
      case Op::kNames:
        return named(s, object);
      case Op::kNone:
        return object == Py_None;
      case Op::kAnything:
        return true;
      case Op::kEmpty:
        return PyDict_CheckExact(object) && PyDict_GET_SIZE(object) == 0;
    }
    return false;
  }

  // Whether the parameters of all optimizers are the leaves that they were, and those that were none still
  // are.
  bool same_parameters() const {
    std::unordered_set<PyObject*> strangers;
    for (const auto& [parameter, leaf] : parameters_) {
      if (leaf < 0) {
        if (!strangers.insert(parameter.ptr()).second) return false;
      } else if (parameter.ptr() != leaves[static_cast<size_t>(leaf)].ptr()) {
        return false;
      }
    }
    return strangers.empty() || std::none_of(leaves.begin(), leaves.end(), [&](const py::object& leaf) {
             return strangers.count(leaf.ptr()) != 0;
           });
  }

 private:
  struct Held {
    const Step* step;
    py::object object;
  };

  static bool put(std::vector<py::object>& where, Py_ssize_t index, PyObject* object) {
    if (index >= 0) where[static_cast<size_t>(index)] = borrowed(object);
    return true;
  }

  bool scalar(PyObject* object) const {
    return std::find(scalars_.begin(), scalars_.end(), Py_TYPE(object)) != scalars_.end();
  }

  // Whether it holds no tensors, and nothing else that is more than a value.
  bool value(PyObject* object, int depth) {
    if (scalar(object)) return true;
    if (depth >= kDepth) return false;
    if (PyList_CheckExact(object) || PyTuple_CheckExact(object)) {
      // Its length is asked each time: Python code that the items run may change a list.
      for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(object); ++i) {
        PyObject* item = PySequence_Fast_GET_ITEM(object, i);
        if (scalar(item)) continue;
        const py::object held = borrowed(item);
        if (!value(item, depth + 1)) return false;
      }
      return true;
    }
    if (PyDict_CheckExact(object)) {
      std::vector<py::object> held;
      PyObject *key, *item;
      for (Py_ssize_t at = 0; PyDict_Next(object, &at, &key, &item);)
        if (!scalar(item)) held.push_back(borrowed(item));
      return std::all_of(held.begin(), held.end(),
                         [&](const py::object& each) { return value(each.ptr(), depth + 1); });
    }
    const py::object level = owned(PyLong_FromLong(depth));
    if (!level) return false;
    const py::object said = owned(PyObject_CallFunctionObjArgs(is_value_, object, level.ptr(), nullptr));
    return said && said.ptr() == Py_True;
  }

  // Matches a child now if that runs no Python code, else remembers it: then its container must not be
  // iterated.
  bool visit(const Step& child, PyObject* object, int depth, std::vector<Held>& later) {
    if (child.pure || (child.op == Op::kValue && scalar(object))) return match(child, object, depth);
    later.push_back({&child, borrowed(object)});
    return true;
  }

  bool finish(const std::vector<Held>& later, int depth) {
    return std::all_of(later.begin(), later.end(),
                       [&](const Held& held) { return match(*held.step, held.object.ptr(), depth); });
  }

  bool mapping(const Step& s, PyObject* object, int depth) {
    const size_t count = s.keys.size();
    if (Py_TYPE(object) != s.type || static_cast<size_t>(PyDict_GET_SIZE(object)) != count) return false;
    std::vector<Held> later;
    if (s.ordered) {
      const py::object keys = owned(PyObject_GetIter(object));
      if (!keys) return false;
      for (size_t i = 0; i < count; ++i) {
        const py::object key = owned(PyIter_Next(keys.ptr()));
        // Of a key that is the same as before the hash runs no Python code.
        if (!key || !same_key(key.ptr(), s.keys[i])) return false;
        PyObject* item = PyDict_GetItemWithError(object, key.ptr());
        if (item == nullptr || !visit(s.children[i], item, depth + 1, later)) return false;
      }
    } else {
      size_t i = 0;
      PyObject *key, *item;
      for (Py_ssize_t at = 0; PyDict_Next(object, &at, &key, &item); ++i)
        if (i >= count || !same_key(key, s.keys[i]) || !visit(s.children[i], item, depth + 1, later))
          return false;
    }
    return finish(later, depth + 1) && put(values, s.index, object);
  }

  bool sequence(const Step& s, PyObject* object, int depth) {
    const size_t count = s.children.size();
    if (Py_TYPE(object) != s.type || static_cast<size_t>(Py_SIZE(object)) != count) return false;
    std::vector<Held> later;
    for (size_t i = 0; i < count; ++i) {
      const auto at = static_cast<Py_ssize_t>(i);
      PyObject* item = s.is_list ? PyList_GET_ITEM(object, at) : PyTuple_GET_ITEM(object, at);
      if (!visit(s.children[i], item, depth + 1, later)) return false;
    }
    return finish(later, depth + 1);
  }

  bool module(const Step& s, PyObject* object, int depth) {
    if (Py_TYPE(object) != s.type) return false;
    const Attributes& n = names();
    const py::object attributes = owned(PyObject_GenericGetDict(object, nullptr));
    if (!attributes) return false;
    PyObject* dict = attributes.ptr();
    for (PyObject* patch : n.patches)
      if (PyDict_Contains(dict, patch) != 0) return false;
    if (s.hooks == Hooks::kNone) {
      for (PyObject* name : n.hooks) {
        PyObject* hooks = PyDict_GetItemWithError(dict, name);
        if (hooks == nullptr || !PyDict_Check(hooks) || PyDict_GET_SIZE(hooks) != 0) return false;
      }
    } else if (s.hooks == Hooks::kAsk) {
      // Before its parameters are read, which this may replace.
      const py::object said = owned(PyObject_CallFunctionObjArgs(is_sharded_, object, nullptr));
      if (!said || said.ptr() != Py_True) return false;
    }
    const auto found = [&](PyObject* name) {
      return py::reinterpret_borrow<py::object>(PyDict_GetItemWithError(dict, name));
    };
    const py::object parameters = found(n.parameters), buffers = found(n.buffers), modules = found(n.modules);
    if (!parameters || !buffers || !modules || !match(s.children[0], parameters.ptr(), depth)) return false;
    const py::object transient = found(n.transient);
    if (!transient || !PyAnySet_Check(transient.ptr())) return false;
    for (size_t i = 0; i < s.numbers.size(); ++i) {
      const int hidden =
          PySet_GET_SIZE(transient.ptr()) == 0 ? 0 : PySet_Contains(transient.ptr(), s.children[1].keys[i]);
      if (hidden < 0 || (hidden == 0) != (s.numbers[i] != 0)) return false;
    }
    return match(s.children[1], buffers.ptr(), depth) && match(s.children[2], modules.ptr(), depth);
  }

  bool optimizer(const Step& s, PyObject* object, int depth) {
    if (Py_TYPE(object) != s.type) return false;
    const py::object walkable = owned(PyObject_CallFunctionObjArgs(s.ask, object, nullptr));
    if (!walkable || walkable.ptr() != Py_True) return false;
    const size_t first = parameters_.size();
    const py::object groups = owned(PyObject_GetAttr(object, names().param_groups));
    if (!groups || !match(s.children[0], groups.ptr(), depth)) return false;
    const py::object states = owned(PyObject_GetAttr(object, names().state));
    return states && state(s.children[1], states.ptr(), first, depth) && put(values, s.index, object);
  }

  // The keys are parameters: told by identity, since Tensor.__hash__ and __eq__ are slow.
  bool state(const Step& s, PyObject* object, size_t first, int depth) {
    if (Py_TYPE(object) != s.type || static_cast<size_t>(PyDict_GET_SIZE(object)) != s.children.size())
      return false;
    std::vector<Held> later;
    size_t i = 0;
    PyObject *key, *item;
    for (Py_ssize_t at = 0; PyDict_Next(object, &at, &key, &item); ++i) {
      if (i >= s.children.size()) return false;
      const int64_t number = s.numbers[i];
      if (number >= 0) {
        const size_t place = first + static_cast<size_t>(number);
        if (place >= parameters_.size() || parameters_[place].first.ptr() != key) return false;
      }
      if (!visit(s.children[i], item, depth + 1, later)) return false;
    }
    return finish(later, depth + 1);
  }

  bool parameters(const Step& s, PyObject* object) {
    if (!PyList_CheckExact(object) || static_cast<size_t>(PyList_GET_SIZE(object)) != s.numbers.size())
      return false;
    for (size_t i = 0; i < s.numbers.size(); ++i)
      parameters_.emplace_back(borrowed(PyList_GET_ITEM(object, static_cast<Py_ssize_t>(i))), s.numbers[i]);
    return true;
  }

  static bool named(const Step& s, PyObject* object) {
    if (!PyList_CheckExact(object) || static_cast<size_t>(PyList_GET_SIZE(object)) != s.keys.size())
      return false;
    for (size_t i = 0; i < s.keys.size(); ++i)
      if (!same_key(PyList_GET_ITEM(object, static_cast<Py_ssize_t>(i)), s.keys[i])) return false;
    return true;
  }

  const std::vector<PyTypeObject*>& scalars_;
  PyObject* is_value_;
  PyObject* is_sharded_;
  std::vector<std::pair<py::object, int64_t>> parameters_;  // of optimizers, and the leaf that each was
};

py::object list_of(std::vector<py::object>& objects) {
  py::list list(objects.size());
  for (size_t i = 0; i < objects.size(); ++i)
    PyList_SET_ITEM(list.ptr(), static_cast<Py_ssize_t>(i),
                    (objects[i] ? objects[i] : py::none()).release().ptr());
  return std::move(list);
}

class Recall {
 public:
  Recall(py::tuple description, const py::tuple& scalars, py::function is_value, py::function is_sharded,
         size_t leaves, size_t values, size_t per_rank)
      : kept(py::make_tuple(description, scalars, is_value, is_sharded)),
        is_value_(is_value.ptr()),
        is_sharded_(is_sharded.ptr()),
        leaves_(leaves),
        values_(values),
        per_rank_(per_rank) {
    for (const py::handle& each : scalars) {
      if (!PyType_Check(each.ptr())) throw py::type_error("scalars must be types");
      scalars_.push_back(reinterpret_cast<PyTypeObject*>(each.ptr()));
    }
    root_ = Parser().step(description.ptr());
    check(root_);
  }

  py::object find(const py::object& state) const {
    const py::object alive = kept;  // the steps borrow from it, and Python code may run
    if (alive.is_none()) return py::none();
    Search search(scalars_, is_value_, is_sharded_);
    search.leaves.resize(leaves_);
    search.values.resize(values_);
    search.per_rank.resize(per_rank_);
    if (!search.match(root_, state.ptr(), 0) || !search.same_parameters()) {
      forgive();
      return py::none();
    }
    return py::make_tuple(list_of(search.leaves), list_of(search.values), list_of(search.per_rank));
  }

  void forget() { kept = py::none(); }

  // All that this refers to, for the garbage collector. The steps only borrow.
  py::object kept;

 private:
  void check(const Step& s) const {
    const auto below = [](const Step& step, size_t limit) {
      if (step.index >= 0 && static_cast<size_t>(step.index) >= limit)
        throw py::value_error("index " + std::to_string(step.index) + " of " + std::to_string(limit));
    };
    below(s, s.op == Op::kTensor ? leaves_ : s.op == Op::kPerRank ? per_rank_ : values_);
    if (s.op == Op::kParameters)
      for (int64_t leaf : s.numbers)
        if (leaf >= 0 && static_cast<size_t>(leaf) >= leaves_) throw py::value_error("no such leaf");
    for (const Step& child : s.children) check(child);
  }

  std::vector<PyTypeObject*> scalars_;
  PyObject* is_value_;
  PyObject* is_sharded_;
  size_t leaves_, values_, per_rank_;
  Step root_;
};

// Looking
// ------------------------------------------------------------------------------------------------------

constexpr int64_t kHost = -1, kElsewhere = -2;  // and the numbers of CUDA devices

// Attributes and methods of torch.Tensor: found once, called without a look-up by name.
class Descriptors {
 public:
  explicit Descriptors(const py::object& type)
      : shape_(get(type, "shape")),
        dtype_(get(type, "dtype")),
        is_cpu_(get(type, "is_cpu")),
        is_cuda_(get(type, "is_cuda")),
        version_(get(type, "_version")),
        data_ptr_(type.attr("data_ptr")),
        stride_(type.attr("stride")),
        get_device_(type.attr("get_device")),
        untyped_storage_(type.attr("untyped_storage")),
        is_conj_(type.attr("is_conj")),
        is_neg_(type.attr("is_neg")) {}

  py::object shape(PyObject* tensor) const { return attribute(shape_, tensor); }
  py::object dtype(PyObject* tensor) const { return attribute(dtype_, tensor); }
  py::object stride(PyObject* tensor) const { return call(stride_, tensor); }
  // kHost, the number of a CUDA device, or kElsewhere.
  int64_t device(PyObject* tensor) const {
    if (attribute(is_cpu_, tensor).ptr() == Py_True) return kHost;
    if (attribute(is_cuda_, tensor).ptr() != Py_True) return kElsewhere;
    const py::object found = call(get_device_, tensor);
    if (!found || !PyLong_Check(found.ptr())) return kElsewhere;
    return PyLong_AsLongLong(found.ptr());
  }
  bool is_lazy(PyObject* tensor, bool complex) const {
    return call(is_neg_, tensor).ptr() != Py_False || (complex && call(is_conj_, tensor).ptr() != Py_False);
  }

  bool address(PyObject* tensor, uint64_t* address) const {
    const py::object found = call(data_ptr_, tensor);
    if (!found || !PyLong_Check(found.ptr())) return false;
    *address = PyLong_AsUnsignedLongLong(found.ptr());
    return PyErr_Occurred() == nullptr;
  }

  // Whoever holds it keeps the memory of the tensor.
  py::object storage(PyObject* tensor) const { return call(untyped_storage_, tensor); }

  // -1 for a tensor that counts no versions: one made in inference mode.
  int64_t version(PyObject* tensor) const {
    const py::object found = attribute(version_, tensor);
    if (found && PyLong_Check(found.ptr())) return PyLong_AsLongLong(found.ptr());
    forgive();
    return -1;
  }

 private:
  static py::object get(const py::object& type, const char* name) {
    py::object found = type.attr(name);
    if (Py_TYPE(found.ptr())->tp_descr_get == nullptr)
      throw py::type_error(std::string(name) + " is no descriptor");
    return found;
  }

  static py::object attribute(const py::object& descriptor, PyObject* tensor) {
    PyObject* d = descriptor.ptr();
    return owned(Py_TYPE(d)->tp_descr_get(d, tensor, reinterpret_cast<PyObject*>(Py_TYPE(tensor))));
  }

  static py::object call(const py::object& method, PyObject* tensor) {
    return owned(PyObject_Vectorcall(method.ptr(), &tensor, 1, nullptr));
  }

  py::object shape_, dtype_, is_cpu_, is_cuda_, version_, data_ptr_, stride_, get_device_, untyped_storage_,
      is_conj_, is_neg_;
};

// The numbers of a tuple; false if it is none, or has others than machine integers.
bool numbers(const py::object& tuple, std::vector<int64_t>* found) {
  found->clear();
  if (!tuple || !PyTuple_Check(tuple.ptr())) return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple.ptr()); ++i) {
    PyObject* item = PyTuple_GET_ITEM(tuple.ptr(), i);
    if (!PyLong_CheckExact(item)) return false;
    const int64_t number = PyLong_AsLongLong(item);
    if (number == -1 && PyErr_Occurred() != nullptr) return false;
    found->push_back(number);
  }
  return true;
}

class Looks {
 public:
  Looks(const py::object& type, const py::list& leaves, const py::list& extra,
        const std::vector<int64_t>& sources, const std::vector<bool>& inside,
        const std::vector<bool>& present)
      : kept(py::list()), descriptors_(type) {
    if (sources.size() != inside.size() || sources.size() != present.size())
      throw py::value_error("sources, inside and present differ in length");
    for (size_t i = 0; i < sources.size() && usable_; ++i)
      learn(sources[i], inside[i], present[i], leaves, extra);
    if (!usable_) return;
    std::vector<uint64_t> found(rows_.size());
    std::vector<int64_t> versions(rows_.size());
    usable_ = read(leaves, extra, found.data(), versions.data(), nullptr, true);
  }

  size_t size() const { return rows_.size(); }
  bool usable() const { return usable_; }

  bool look(const py::list& leaves, const py::list& extra, uint64_t* addresses, int64_t* versions,
            py::list* storages) {
    return usable_ && read(leaves, extra, addresses, versions, storages, false);
  }

  // Rows that are not where they were, or count another version.
  std::vector<size_t> changed(const py::list& leaves, const py::list& extra, const uint64_t* addresses,
                              const int64_t* versions) const {
    std::vector<size_t> found;
    for (size_t i = 0; i < rows_.size(); ++i) {
      const py::object tensor = local(rows_[i], leaves, extra);
      uint64_t address = 0;
      const bool known = tensor && descriptors_.address(tensor.ptr(), &address);
      if (!known || address != addresses[i] || descriptors_.version(tensor.ptr()) != versions[i])
        found.push_back(i);
      forgive();
    }
    return found;
  }

  void forget() {
    usable_ = false;
    kept = py::none();
  }

  // All that this refers to, for the garbage collector, but for the descriptors, which are torch's.
  py::object kept;

 private:
  // One local tensor.
  struct Row {
    int64_t source;  // the leaf, or ~source of the extra tensors
    bool inside;     // it is inside of the leaf, a DTensor
    bool present;    // it has elements that are saved
    bool complex;
    int64_t device;
    PyTypeObject* type;
    PyObject* dtype;
    size_t first_dim;  // of its sizes in dims_, which its strides follow
    size_t ndim;
    uint32_t like;  // the first row with the same address, or itself
  };
  // What a DTensor is from outside.
  struct Outer {
    int64_t leaf;
    PyObject *spec, *mesh, *placed[3];  // placed: null where this torch has none
    int64_t device;
    PyObject* dtype;
    size_t first_dim, ndim;
  };

  static py::object item(const py::list& list, int64_t i) {
    if (i < 0 || i >= PyList_GET_SIZE(list.ptr())) throw py::index_error("no tensor " + std::to_string(i));
    return borrowed(PyList_GET_ITEM(list.ptr(), static_cast<Py_ssize_t>(i)));
  }

  py::object local(const Row& row, const py::list& leaves, const py::list& extra) const {
    py::object tensor = row.source < 0 ? item(extra, ~row.source) : item(leaves, row.source);
    if (row.inside) tensor = owned(PyObject_GetAttr(tensor.ptr(), names().local));
    return tensor;
  }

  void learn(int64_t source, bool inside, bool present, const py::list& leaves, const py::list& extra) {
    Row row{};
    row.source = source;
    row.inside = inside;
    row.present = present;
    row.device = kElsewhere;
    row.like = static_cast<uint32_t>(rows_.size());
    if (inside) {
      const py::object outer = item(leaves, source);
      usable_ = learn_outer(source, outer.ptr());
    }
    const py::object tensor = local(row, leaves, extra);
    if (tensor && usable_) {
      row.type = Py_TYPE(tensor.ptr());
      keep(py::type::of(tensor));
      row.dtype = form(tensor.ptr(), &row.first_dim, &row.ndim, true);
      row.device = descriptors_.device(tensor.ptr());
      row.complex = row.dtype != nullptr && borrowed(row.dtype).attr("is_complex").ptr() == Py_True;
    }
    usable_ = row.dtype != nullptr;
    forgive();
    rows_.push_back(row);
  }

  bool learn_outer(int64_t leaf, PyObject* tensor) {
    const Attributes& n = names();
    Outer outer{leaf, nullptr, nullptr, {}, descriptors_.device(tensor), nullptr, 0, 0};
    const auto get = [&](PyObject* from, PyObject* name) {
      const py::object found = owned(PyObject_GetAttr(from, name));
      if (found) keep(found);
      return found.ptr();
    };
    outer.spec = get(tensor, n.spec);
    if (outer.spec == nullptr) return false;
    outer.mesh = get(outer.spec, n.mesh);
    for (size_t i = 0; i < 3; ++i)
      if (PyObject_HasAttr(outer.spec, n.placed[i]) != 0) outer.placed[i] = get(outer.spec, n.placed[i]);
    outer.dtype = form(tensor, &outer.first_dim, &outer.ndim, false);
    outers_.push_back(outer);
    return outer.dtype != nullptr && outer.mesh != nullptr;
  }

  void keep(const py::object& object) {
    if (known_.insert(object.ptr()).second) py::reinterpret_borrow<py::list>(kept).append(object);
  }

  // Remembers sizes, strides (if wanted) and dtype; null if they cannot be had.
  PyObject* form(PyObject* tensor, size_t* first_dim, size_t* ndim, bool strides) {
    std::vector<int64_t> found;
    if (!numbers(descriptors_.shape(tensor), &found)) return nullptr;
    *first_dim = dims_.size();
    *ndim = found.size();
    dims_.insert(dims_.end(), found.begin(), found.end());
    if (strides) {
      if (!numbers(descriptors_.stride(tensor), &found) || found.size() != *ndim) return nullptr;
      dims_.insert(dims_.end(), found.begin(), found.end());
    }
    const py::object dtype = descriptors_.dtype(tensor);
    if (dtype) keep(dtype);
    return dtype.ptr();
  }

  bool same(const py::object& tuple, size_t first, size_t count) const {
    if (!tuple || !PyTuple_Check(tuple.ptr()) || static_cast<size_t>(PyTuple_GET_SIZE(tuple.ptr())) != count)
      return false;
    for (size_t k = 0; k < count; ++k) {
      PyObject* number = PyTuple_GET_ITEM(tuple.ptr(), static_cast<Py_ssize_t>(k));
      if (!PyLong_CheckExact(number) || PyLong_AsLongLong(number) != dims_[first + k]) return false;
    }
    return PyErr_Occurred() == nullptr;
  }

  // Every answer of torch may be an exception: then, too, it is not the same.
  bool same_row(size_t i, PyObject* tensor, uint64_t* address, int64_t* version) const {
    const Row& row = rows_[i];
    if (row.device == kElsewhere || Py_TYPE(tensor) != row.type ||
        descriptors_.dtype(tensor).ptr() != row.dtype ||
        !same(descriptors_.shape(tensor), row.first_dim, row.ndim) ||
        !same(descriptors_.stride(tensor), row.first_dim + row.ndim, row.ndim) ||
        !descriptors_.address(tensor, address) || (row.present && *address == 0))
      return false;
    // No two devices share an address.
    const bool there = *address != 0 && i < last_.size() && last_[i] == *address;
    if ((!there && descriptors_.device(tensor) != row.device) || descriptors_.is_lazy(tensor, row.complex))
      return false;
    *version = descriptors_.version(tensor);
    return true;
  }

  bool same_outer(const Outer& outer, PyObject* tensor) const {
    const Attributes& n = names();
    if (descriptors_.dtype(tensor).ptr() != outer.dtype ||
        !same(descriptors_.shape(tensor), outer.first_dim, outer.ndim) ||
        descriptors_.device(tensor) != outer.device)
      return false;
    // Not only the identity of the specification: nothing keeps torch from changing it in place.
    const py::object spec = owned(PyObject_GetAttr(tensor, n.spec));
    if (!spec || Py_TYPE(spec.ptr()) != Py_TYPE(outer.spec)) return false;
    if (owned(PyObject_GetAttr(spec.ptr(), n.mesh)).ptr() != outer.mesh) return false;
    for (size_t k = 0; k < 3; ++k) {
      if (outer.placed[k] == nullptr) continue;
      const py::object found = owned(PyObject_GetAttr(spec.ptr(), n.placed[k]));
      if (!found) return false;
      if (found.ptr() != outer.placed[k] &&
          PyObject_RichCompareBool(found.ptr(), outer.placed[k], Py_EQ) != 1)
        return false;
    }
    return true;
  }

  bool read(const py::list& leaves, const py::list& extra, uint64_t* addresses, int64_t* versions,
            py::list* storages, bool first) {
    // Python code may run meanwhile, though it does not know these lists: what is in them is held anyway.
    for (const Outer& outer : outers_) {
      if (!same_outer(outer, item(leaves, outer.leaf).ptr())) {
        forgive();
        return false;
      }
    }
    for (size_t i = 0; i < rows_.size(); ++i) {
      const py::object tensor = local(rows_[i], leaves, extra);
      if (!tensor || !same_row(i, tensor.ptr(), addresses + i, versions + i)) {
        forgive();
        return false;
      }
      if (storages == nullptr) continue;
      // In the same pass, while all about the tensor is in the caches.
      const py::object storage = descriptors_.storage(tensor.ptr());
      if (!storage || PyList_Append(storages->ptr(), storage.ptr()) != 0) {
        forgive();
        return false;
      }
    }
    if (first) return learn_aliases(addresses, leaves);
    return same_aliases(addresses) && same_objects(leaves);
  }

  bool learn_aliases(const uint64_t* addresses, const py::list& leaves) {
    std::unordered_map<uint64_t, uint32_t> known;
    const auto count = static_cast<size_t>(PyList_GET_SIZE(leaves.ptr()));
    std::vector<bool> alone(count, false);  // leaves that have an address, and nobody else has it
    for (const Row& row : rows_)
      if (row.source >= 0) alone[static_cast<size_t>(row.source)] = row.present;
    for (size_t i = 0; i < rows_.size(); ++i) {
      if (!rows_[i].present) continue;
      const uint32_t like = rows_[i].like =
          known.emplace(addresses[i], static_cast<uint32_t>(i)).first->second;
      if (like == i) continue;
      for (size_t each : {static_cast<size_t>(like), i})
        if (rows_[each].source >= 0) alone[static_cast<size_t>(rows_[each].source)] = false;
    }
    std::unordered_map<PyObject*, size_t> objects;
    for (size_t leaf = 0; leaf < count; ++leaf) {
      if (alone[leaf]) continue;
      PyObject* object = PyList_GET_ITEM(leaves.ptr(), static_cast<Py_ssize_t>(leaf));
      twins_.emplace_back(leaf, objects.emplace(object, leaf).first->second);
    }
    last_.assign(addresses, addresses + rows_.size());
    return true;
  }

  // Whether the rows that shared an address do, and no others. Most saves find every tensor where it was.
  bool same_aliases(const uint64_t* addresses) {
    if (last_.empty() || std::memcmp(last_.data(), addresses, last_.size() * sizeof(uint64_t)) == 0)
      return true;
    std::vector<uint64_t> different;
    different.reserve(rows_.size());
    for (size_t i = 0; i < rows_.size(); ++i) {
      if (!rows_[i].present) continue;
      if (rows_[i].like == i)
        different.push_back(addresses[i]);
      else if (addresses[i] != addresses[rows_[i].like])
        return false;
    }
    std::sort(different.begin(), different.end());
    if (std::adjacent_find(different.begin(), different.end()) != different.end()) return false;
    last_.assign(addresses, addresses + rows_.size());
    return true;
  }

  // Where addresses do not tell objects apart, whether the same leaves are the same object.
  bool same_objects(const py::list& leaves) const {
    std::unordered_map<PyObject*, size_t> objects;
    return std::all_of(twins_.begin(), twins_.end(), [&](const std::pair<size_t, size_t>& twin) {
      const py::object object = item(leaves, static_cast<int64_t>(twin.first));
      return objects.emplace(object.ptr(), twin.first).first->second == twin.second;
    });
  }

  const Descriptors descriptors_;
  bool usable_ = true;
  std::vector<Row> rows_;
  std::unordered_set<PyObject*> known_;  // what is in kept
  std::vector<Outer> outers_;
  std::vector<int64_t> dims_;
  std::vector<std::pair<size_t, size_t>> twins_;  // leaves, and the first leaf that is the same object
  std::vector<uint64_t> last_;                    // addresses whose aliases were checked
};

// Binding
// ------------------------------------------------------------------------------------------------------

// The address of a writable buffer of `count` 64-bit numbers, held until the end.
class Column {
 public:
  Column(const py::object& object, size_t count) {
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_WRITABLE) != 0) throw py::error_already_set();
    if (static_cast<size_t>(view_.len) != count * 8) {
      PyBuffer_Release(&view_);
      throw py::value_error("a buffer of " + std::to_string(count) + " 64-bit numbers is needed");
    }
  }
  ~Column() { PyBuffer_Release(&view_); }
  Column(const Column&) = delete;
  Column& operator=(const Column&) = delete;

  template <class T>
  T* as() const {
    return static_cast<T*>(view_.buf);
  }

 private:
  Py_buffer view_;
};

// Null as long as the instance is being made: the collector may come before it is complete.
template <class T>
T* constructed(PyObject* self) {
  const auto holder = reinterpret_cast<py::detail::instance*>(self)->get_value_and_holder();
  return holder.holder_constructed() ? static_cast<T*>(holder.value_ptr()) : nullptr;
}

// Lets the garbage collector see what instances of `T` keep, in `kept`.
template <class T>
py::custom_type_setup collected() {
  return py::custom_type_setup([](PyHeapTypeObject* heap) {
    PyTypeObject* type = &heap->ht_type;
    type->tp_flags |= Py_TPFLAGS_HAVE_GC;
    type->tp_traverse = [](PyObject* self, visitproc visit, void* arg) {
      Py_VISIT(Py_TYPE(self));
      if (T* instance = constructed<T>(self)) Py_VISIT(instance->kept.ptr());
      return 0;
    };
    type->tp_clear = [](PyObject* self) {
      if (T* instance = constructed<T>(self)) instance->forget();
      return 0;
    };
  });
}

}  // namespace

void bind_recall(py::module_& m) {
  using namespace py::literals;
  py::class_<Recall>(m, "Recall", py::is_final(), collected<Recall>(),
                     "What a live state looked like, container by container.")
      .def(py::init<py::tuple, py::tuple, py::function, py::function, size_t, size_t, size_t>(), "steps"_a,
           "scalars"_a, "is_value"_a, "is_sharded"_a, py::kw_only(), "leaves"_a, "values"_a, "per_rank"_a)
      .def("find", &Recall::find, "state"_a,
           "Lists of the leaves, values and per-rank leaves of a state that looks the same, else None.");
  py::class_<Looks>(m, "Looks", py::is_final(), collected<Looks>(), "What tensors looked like.")
      .def(py::init<py::object, py::list, py::list, const std::vector<int64_t>&, const std::vector<bool>&,
                    const std::vector<bool>&>(),
           "tensor"_a, "leaves"_a, "extra"_a, "sources"_a, "inside"_a, "present"_a)
      .def("__len__", &Looks::size)
      .def_property_readonly("usable", &Looks::usable, "Whether all can be read where they are.")
      .def(
          "look",
          [](Looks& looks, const py::list& leaves, const py::list& extra, const py::object& addresses,
             const py::object& versions, py::list storages) {
            const Column to(addresses, looks.size()), counts(versions, looks.size());
            return looks.look(leaves, extra, to.as<uint64_t>(), counts.as<int64_t>(), &storages);
          },
          "leaves"_a, "extra"_a, "addresses"_a, "versions"_a, "storages"_a,
          "Whether they look the same; then writes where they are, their version counters and their "
          "storages.")
      .def(
          "changed",
          [](const Looks& looks, const py::list& leaves, const py::list& extra, const py::object& addresses,
             const py::object& versions) {
            const Column at(addresses, looks.size()), counts(versions, looks.size());
            return looks.changed(leaves, extra, at.as<uint64_t>(), counts.as<int64_t>());
          },
          "leaves"_a, "extra"_a, "addresses"_a, "versions"_a,
          "The tensors that are elsewhere by now, or count another version.");
}

}  // namespace tierckpt
