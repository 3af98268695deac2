// Recordings: work that a thread would have queued, kept to be queued again and again, as a chip plays a graph of it.
#pragma once

#include <c10/core/Stream.h>

#include <functional>
#include <memory>
#include <vector>

namespace simdev {

class Recording {
 public:
  void add(std::function<void()> work) { work_.push_back(std::move(work)); }
  void run() const {
    for (const auto& work : work_) work();
  }

 private:
  std::vector<std::function<void()>> work_;  // keeps the tensors alive that it is about
};

// From here on the thread queues nothing: what it would queue, on any stream, is recorded in that order. What needs a
// result on the host throws.
void begin_recording();
std::shared_ptr<Recording> end_recording();
const Recording* current_recording();  // of this thread; nullptr where it does not record

// Throws where this thread records.
void refuse_in_recording(const char* what);

void play(const std::shared_ptr<Recording>& recording, c10::Stream stream);

}  // namespace simdev
