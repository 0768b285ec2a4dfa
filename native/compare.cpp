#include "compare.h"

#include <algorithm>
#include <cstring>

namespace tierckpt {
namespace {

constexpr int64_t kLine = 64;

// splitmix64 (Steele, Lea, Flood 2014).
uint64_t mixed(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

struct Where {
  const char* tensor;
  int64_t shard;
  size_t n;
};

int64_t bytes_of(const Table& table, const Box& box) {
  return box.ndim == 0 ? box.run : table.dims(box)->n * table.dims(box)->bytes;
}

// The line that holds byte `at` of a box, counted in shard order.
Where line_at(const Table& table, const Box& box, const char* tensor, int64_t at) {
  int64_t off = box.start;
  const Dim* dims = table.dims(box);
  for (uint32_t k = 0; k < box.ndim; ++k) {
    const int64_t i = at / dims[k].bytes;
    at -= i * dims[k].bytes;
    off += i * dims[k].shard;
    tensor += i * dims[k].tensor;
  }
  const int64_t from = at / kLine * kLine;
  return {tensor + from, off + from, static_cast<size_t>(std::min(kLine, box.run - from))};
}

void sort_unique(std::vector<uint32_t>& found) {
  std::sort(found.begin(), found.end());
  found.erase(std::unique(found.begin(), found.end()), found.end());
}

}  // namespace

std::vector<uint32_t> differing(const Table& table, const char* pointers, const char* shard, int64_t every,
                                uint64_t phase) {
  std::vector<uint32_t> found;
  for (const Box& box : table.boxes()) {
    const int64_t bytes = bytes_of(table, box);
    const char* tensor = present_pointer(pointers, box.index);
    auto same = [&](int64_t at) {
      const Where line = line_at(table, box, tensor, at);
      return std::memcmp(line.tensor, shard + line.shard, line.n) == 0;
    };
    bool good = same(bytes - 1);
    uint64_t random = phase;
    for (int64_t lo = 0; good && lo < bytes; lo += every) {
      random = mixed(random + box.index);
      good = same(lo + static_cast<int64_t>(random % static_cast<uint64_t>(std::min(every, bytes - lo))));
    }
    if (!good) found.push_back(box.index);
  }
  sort_unique(found);
  return found;
}

Samples::Samples(const Table& table, const char* pointers, size_t count, uint64_t phase) {
  const std::vector<Box>& boxes = table.boxes();
  if (boxes.empty()) return;
  lines_.reserve(count);
  uint64_t random = phase;
  for (size_t k = 0; k < count; ++k) {
    random = mixed(random + k);
    const Box& box = boxes[random % boxes.size()];
    const uint64_t at = mixed(random) % static_cast<uint64_t>(bytes_of(table, box));
    const Where line = line_at(table, box, present_pointer(pointers, box.index), static_cast<int64_t>(at));
    Line& taken = lines_.emplace_back();
    taken.at = line.shard, taken.index = box.index, taken.n = static_cast<uint32_t>(line.n);
    std::memcpy(taken.bytes, line.tensor, line.n);
    end_ = std::max(end_, line.shard + static_cast<int64_t>(line.n));
  }
}

std::vector<uint32_t> Samples::differing(const char* shard) const {
  std::vector<uint32_t> found;
  for (const Line& line : lines_)
    if (std::memcmp(line.bytes, shard + line.at, line.n) != 0) found.push_back(line.index);
  sort_unique(found);
  return found;
}

}  // namespace tierckpt
