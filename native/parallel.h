// Work split over short-lived threads.
#pragma once

#include <new>
#include <system_error>
#include <thread>
#include <vector>

namespace tierckpt {

// Runs work() on `threads` threads at once, the caller's among them, and returns when all are done. work()
// takes its share from a common counter and must not throw; where the system refuses threads, fewer do the
// same work.
template <class Work>
void on_threads(int threads, const Work& work) {
  std::vector<std::thread> helpers;
  try {
    helpers.reserve(static_cast<size_t>(threads));
    while (helpers.size() + 1 < static_cast<size_t>(threads)) helpers.emplace_back(work);
  } catch (const std::system_error&) {
  } catch (const std::bad_alloc&) {
  }
  work();
  for (std::thread& helper : helpers) helper.join();
}

}  // namespace tierckpt
