// What the kernels are given, and what a thread does with it. Plain C++ too: the tests run it on the CPU.
#pragma once

#include <stdint.h>

#include "../fingerprint.h"

namespace tierckpt {

constexpr uint32_t kLoops = 6;

// Bytes [from, from + bytes) of one box in device memory, counted in row-major order.
struct Task {
  uint64_t src;          // address of the first element of the box
  uint64_t dst;          // gather: where these bytes go; fingerprint: where each thread puts its sums
  uint64_t from, bytes;  // fingerprint: `from` is a multiple of 8
  uint64_t run;          // bytes that lie together in the box
  uint32_t loops;        // around them, outermost first
  uint32_t unit;         // 1, 2, 4 or 8: divides all of the above, and the strides
  int64_t n[kLoops], stride[kLoops];  // bytes
};

TIERCKPT_DEVICE uint64_t address(const Task& t, uint64_t offset) {
  if (t.loops == 0) return t.src + offset;
  uint64_t index = offset / t.run, at = t.src + offset % t.run;
  for (uint32_t k = t.loops; k-- > 0;) {
    const uint64_t n = static_cast<uint64_t>(t.n[k]);
    at += index % n * static_cast<uint64_t>(t.stride[k]);
    index /= n;
  }
  return at;
}

template <class Unit>
TIERCKPT_DEVICE uint64_t assemble(const Task& t, uint64_t offset, uint32_t count) {
  uint64_t word = 0;
  for (uint32_t k = 0; k < count; k += sizeof(Unit))
    word |= static_cast<uint64_t>(*reinterpret_cast<const Unit*>(address(t, offset + k))) << (8 * k);
  return word;
}

// `count` bytes at `offset`, at most 8 and a multiple of the unit, as a little-endian number.
TIERCKPT_DEVICE uint64_t load(const Task& t, uint64_t offset, uint32_t count) {
  if (t.unit == 8) return assemble<uint64_t>(t, offset, count);
  if (t.unit == 4) return assemble<uint32_t>(t, offset, count);
  if (t.unit == 2) return assemble<uint16_t>(t, offset, count);
  return assemble<uint8_t>(t, offset, count);
}

struct alignas(16) Line {
  uint64_t low, high;
};

template <class Unit>
TIERCKPT_DEVICE void move_units(const Task& t, uint64_t at, uint64_t end) {
  for (; at < end; at += sizeof(Unit))
    *reinterpret_cast<Unit*>(at) = static_cast<Unit>(load(t, t.from + (at - t.dst), sizeof(Unit)));
}

// Writes whole lines of the destination at once: it is memory of the host, at the other end of a bus.
TIERCKPT_DEVICE void gather(const Task& t, uint32_t thread, uint32_t threads) {
  const uint64_t end = t.dst + t.bytes, step = sizeof(Line);
  for (uint64_t line = t.dst / step * step + step * thread; line < end; line += step * threads) {
    const uint64_t from = line < t.dst ? t.dst : line, to = end < line + step ? end : line + step;
    if (to - from == step) {
      const uint64_t offset = t.from + (line - t.dst);
      *reinterpret_cast<Line*>(line) = Line{load(t, offset, 8), load(t, offset + 8, 8)};
    } else if (t.unit == 8) {
      move_units<uint64_t>(t, from, to);
    } else if (t.unit == 4) {
      move_units<uint32_t>(t, from, to);
    } else if (t.unit == 2) {
      move_units<uint16_t>(t, from, to);
    } else {
      move_units<uint8_t>(t, from, to);
    }
  }
}

TIERCKPT_DEVICE void fingerprint(const Task& t, uint32_t thread, uint32_t threads) {
  Sums sums{0, 0};
  for (uint64_t at = uint64_t{8} * thread; at < t.bytes; at += uint64_t{8} * threads) {
    const uint64_t left = t.bytes - at;
    add(&sums, load(t, t.from + at, left < 8 ? static_cast<uint32_t>(left) : 8), (t.from + at) / 8);
  }
  reinterpret_cast<Sums*>(t.dst)[thread] = sums;
}

}  // namespace tierckpt
