#include "table.h"

#include <algorithm>
#include <limits>
#include <stdexcept>

namespace tierckpt {
namespace {

constexpr size_t kFan = 16;
constexpr int64_t kMaxItem = 16;
constexpr int64_t kMaxDims = 64;

[[noreturn]] void bad(size_t entry, const std::string& what) {
  throw std::invalid_argument("entry " + std::to_string(entry) + ": " + what);
}

int64_t mul(size_t entry, int64_t a, int64_t b) {
  int64_t r;
  if (__builtin_mul_overflow(a, b, &r)) bad(entry, "extent overflows 64 bits");
  return r;
}

int64_t add(size_t entry, int64_t a, int64_t b) {
  int64_t r;
  if (__builtin_add_overflow(a, b, &r)) bad(entry, "extent overflows 64 bits");
  return r;
}

// Bytes of box that lie before shard position x.
int64_t below(const Box& box, const Dim* dims, int64_t x) {
  int64_t total = 0, off = box.start;
  for (uint32_t k = 0; k < box.ndim; ++k) {
    if (x <= off) return total;
    const Dim& d = dims[k];
    const int64_t whole = std::min(d.n, (x - off) / d.shard);
    total += whole * d.bytes;
    if (whole == d.n) return total;
    off += whole * d.shard;
  }
  return total + std::clamp<int64_t>(x - off, 0, box.run);
}

}  // namespace

Table::Table(const Columns& c) : size_(c.offsets.size()) {
  if (c.itemsizes.size() != size_ || c.ndims.size() != size_)
    throw std::invalid_argument("offsets, itemsizes and ndims differ in length");
  if (size_ > std::numeric_limits<uint32_t>::max()) throw std::invalid_argument("too many entries");
  if (c.shapes.size() != c.shard_strides.size() || c.shapes.size() != c.tensor_strides.size())
    throw std::invalid_argument("shapes, shard_strides and tensor_strides differ in length");
  size_t column = 0;
  boxes_.reserve(size_);
  for (size_t entry = 0; entry < size_; ++entry) {
    const int64_t ndim = c.ndims[entry];
    if (ndim < 0 || ndim > kMaxDims) bad(entry, "ndim " + std::to_string(ndim) + " is not in 0..64");
    if (static_cast<size_t>(ndim) > c.shapes.size() - column)
      throw std::invalid_argument("shapes has fewer elements than ndims adds up to");
    add(c, entry, column);
    column += static_cast<size_t>(ndim);
  }
  if (column != c.shapes.size())
    throw std::invalid_argument("shapes has more elements than ndims adds up to");
  index();
}

// Checks one entry and appends its box in normal form: no loop of one index, loops in shard order, loops
// merged that continue each other on both sides, what is contiguous on both sides in the run.
void Table::add(const Columns& c, size_t entry, size_t column) {
  const int64_t item = c.itemsizes[entry], ndim = c.ndims[entry];
  if (item < 1 || item > kMaxItem) bad(entry, "itemsize " + std::to_string(item) + " is not in 1..16");
  if (c.offsets[entry] < 0) bad(entry, "negative offset");
  Dim d[kMaxDims];
  size_t count = 0;
  bool empty = false;
  for (size_t k = column; k < column + static_cast<size_t>(ndim); ++k) {
    if (c.shapes[k] < 0) bad(entry, "negative size");
    if (c.shard_strides[k] < 0) bad(entry, "negative shard stride");
    empty |= c.shapes[k] == 0;
    if (c.shapes[k] > 1) d[count++] = {c.shapes[k], c.shard_strides[k], c.tensor_strides[k], 0, 0};
  }
  if (empty) return;
  std::stable_sort(d, d + count, [](const Dim& a, const Dim& b) { return a.shard > b.shard; });

  int64_t run = item, extent = item, bytes = item, down = 0, up = 0;
  Dim kept[kMaxDims];  // innermost first
  size_t depth = 0;
  for (size_t k = count; k-- > 0;) {
    const Dim& x = d[k];
    // Clipping relies on it: the parts of the shard inside two indices of one loop never interleave.
    if (x.shard < extent) bad(entry, "elements overlap in the shard");
    const int64_t reach = mul(entry, x.n - 1, x.tensor);
    if (reach < 0)
      down = tierckpt::add(entry, down, reach);
    else
      up = tierckpt::add(entry, up, reach);
    const int64_t inner_extent = extent, inner_bytes = bytes;
    extent = tierckpt::add(entry, mul(entry, x.n - 1, x.shard), extent);
    bytes = mul(entry, x.n, bytes);
    if (depth == 0 && x.shard == run && x.tensor == run) {
      run = mul(entry, run, x.n);
    } else if (depth > 0 && x.shard == kept[depth - 1].n * kept[depth - 1].shard &&
               x.tensor == mul(entry, kept[depth - 1].n, kept[depth - 1].tensor)) {
      kept[depth - 1].n *= x.n;
    } else {
      kept[depth++] = {x.n, x.shard, x.tensor, inner_extent, inner_bytes};
    }
  }
  tierckpt::add(entry, tierckpt::add(entry, up, item), mul(entry, down, -1));
  tierckpt::add(entry, c.offsets[entry], extent);
  nbytes_ = tierckpt::add(entry, nbytes_, bytes);
  boxes_.push_back(
      {c.offsets[entry], run, static_cast<uint32_t>(entry), static_cast<uint32_t>(depth), dims_.size()});
  dims_.insert(dims_.end(), std::make_reverse_iterator(kept + depth), std::make_reverse_iterator(kept));
}

void Table::index() {
  std::stable_sort(boxes_.begin(), boxes_.end(),
                   [](const Box& a, const Box& b) { return a.start < b.start; });
  std::vector<int64_t> ends;
  ends.reserve(boxes_.size());
  for (const Box& box : boxes_) {
    const Dim* d = dims(box);
    ends.push_back(box.start + (box.ndim ? (d->n - 1) * d->shard + d->extent : box.run));
  }
  if (!boxes_.empty()) {
    lo_ = boxes_.front().start;
    hi_ = *std::max_element(ends.begin(), ends.end());
  }
  ends_.push_back(std::move(ends));
  while (ends_.back().size() > 1) {
    const std::vector<int64_t>& fine = ends_.back();
    std::vector<int64_t> coarse;
    for (size_t i = 0; i < fine.size(); i += kFan)
      coarse.push_back(*std::max_element(fine.begin() + i, fine.begin() + std::min(i + kFan, fine.size())));
    ends_.push_back(std::move(coarse));
  }
}

// The position after the largest group that begins at i and ends at or before lo.
size_t Table::skip(size_t i, int64_t lo) const {
  size_t level = 0, node = i, width = 1;
  while (level + 1 < ends_.size() && node % kFan == 0 && ends_[level + 1][node / kFan] <= lo) {
    node /= kFan;
    width *= kFan;
    ++level;
  }
  return i + width;
}

int64_t Table::covered(int64_t lo, int64_t hi) const {
  int64_t total = 0;
  for (size_t i = next(0, lo, hi); i < boxes_.size(); i = next(i + 1, lo, hi)) {
    const Dim* d = dims(boxes_[i]);
    total += below(boxes_[i], d, hi) - below(boxes_[i], d, lo);
  }
  return total;
}

}  // namespace tierckpt
