#include "recording.h"

#include "streams.h"

#include <c10/util/Exception.h>

#include <utility>

namespace simdev {
namespace {

thread_local std::shared_ptr<Recording> t_recording;

}  // namespace

void begin_recording() {
  refuse_in_recording("a recording");
  t_recording = std::make_shared<Recording>();
}

std::shared_ptr<Recording> end_recording() { return std::exchange(t_recording, nullptr); }

const Recording* current_recording() { return t_recording.get(); }

void refuse_in_recording(const char* what) {
  TORCH_CHECK(!t_recording, "simdev: ", what, " is not possible while work is recorded");
}

void play(const std::shared_ptr<Recording>& recording, c10::Stream stream) {
  refuse_in_recording("playing a recording");
  enqueue(stream, [recording] { recording->run(); });
}

void enqueue(c10::Stream stream, std::function<void()> work) {
  if (t_recording) {
    t_recording->add(std::move(work));
  } else {
    enqueue_now(stream, std::move(work));
  }
}

}  // namespace simdev
