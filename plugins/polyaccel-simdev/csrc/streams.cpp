#include "streams.h"

#include "faults.h"
#include "recording.h"
#include "waits.h"

#include <Python.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

namespace simdev {
namespace {

constexpr int kStreams = 9;  // of each device; 0 is the default one, the last that of collectives
constexpr int kDevicesAtMost = 16;

c10::DeviceIndex g_devices = 0;
thread_local c10::DeviceIndex t_device = 0;
thread_local std::array<c10::StreamId, kDevicesAtMost> t_streams{};

constexpr auto kLongestDelay = std::chrono::milliseconds(100);
constexpr auto kLongestEnd = std::chrono::seconds(5);  // work that waits for another rank may never end
constexpr int64_t kMostWork = 48;  // that is queued anywhere while a piece is held back

std::atomic<uint64_t> g_seed{0};
std::atomic<int64_t> g_queued{0};
std::mutex g_queues_mutex;

std::vector<Queue*>& all_queues() {
  static auto* all = new std::vector<Queue*>();
  return *all;
}

// For how much more queued work the piece of work `number` is held back: half of them not at all.
int64_t draw_delay(uint64_t number) {
  uint64_t bits = g_seed * 0x9E3779B97F4A7C15u + number;  // splitmix64
  bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9u;
  bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EBu;
  bits ^= bits >> 31;
  return bits & 1 ? 0 : 1 + int64_t((bits >> 8) % kMostWork);
}

Queue& queue_of(c10::Stream stream) {
  static auto* queues = new std::array<std::unique_ptr<Queue>, kDevicesAtMost * kStreams>();
  static std::mutex mutex;
  std::lock_guard lock(mutex);
  auto& queue = (*queues)[size_t(stream.device_index() * kStreams + stream.id())];
  if (!queue) queue = std::make_unique<Queue>();
  return *queue;
}

// Without the interpreter's lock, where this thread holds it.
class Unlocked {
 public:
  Unlocked() : thread_(Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}
  ~Unlocked() {
    if (thread_) PyEval_RestoreThread(thread_);
  }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  PyThreadState* thread_;
};

c10::DeviceIndex or_current(c10::DeviceIndex device) { return device < 0 ? t_device : device; }

c10::Stream stream_of(c10::DeviceIndex device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::kPrivateUse1, or_current(device)), id);
}

}  // namespace

Queue::Queue() {
  {
    std::lock_guard lock(g_queues_mutex);
    all_queues().push_back(this);
  }
  std::thread([this] { run(); }).detach();
}

void Queue::push(std::function<void()> work) {
  const int64_t number = ++g_queued;
  if (are_delayed()) {
    std::lock_guard lock(g_queues_mutex);
    for (auto* queue : all_queues()) queue->changed_.notify_all();
  }
  std::lock_guard lock(mutex_);
  waiting_.push_back({std::move(work), are_delayed() ? number + draw_delay(uint64_t(number)) : 0});
  changed_.notify_all();
}

Queue::Hurry::Hurry(Queue* queue) : queue_(queue) {
  if (!queue_) return;
  std::lock_guard lock(queue_->mutex_);
  ++queue_->hurries_;
  queue_->changed_.notify_all();
}

Queue::Hurry::~Hurry() {
  if (!queue_) return;
  std::lock_guard lock(queue_->mutex_);
  --queue_->hurries_;
}

void Queue::hold_back(std::unique_lock<std::mutex>& lock) {
  const auto until = std::chrono::steady_clock::now() + kLongestDelay;
  changed_.wait_until(lock, until, [this] { return hurries_ > 0 || g_queued >= waiting_.front().not_before; });
}

void set_delays(uint64_t seed) { g_seed = seed; }

bool are_delayed() { return g_seed != 0; }

bool Queue::is_hurried() {
  std::lock_guard lock(mutex_);
  return hurries_ > 0;
}

bool Queue::is_idle() {
  std::lock_guard lock(mutex_);
  return waiting_.empty() && !busy_;
}

void Queue::synchronize() {
  std::exception_ptr error;
  {
    const Unlocked unlocked;  // is taken again when `lock` is released
    const Hurry hurry(this);
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return waiting_.empty() && !busy_; });
    error = std::exchange(error_, nullptr);
  }
  if (error) std::rethrow_exception(error);
}

void Queue::end(std::chrono::steady_clock::time_point until) {
  const Hurry hurry(this);
  std::unique_lock lock(mutex_);
  has_ended_ = !changed_.wait_until(lock, until, [this] { return waiting_.empty() && !busy_; });
}

void end_queues() {
  const auto until = std::chrono::steady_clock::now() + kLongestEnd;
  std::vector<Queue*> queues;
  {
    std::lock_guard lock(g_queues_mutex);
    queues = all_queues();
  }
  for (auto* queue : queues) queue->end(until);
}

void Queue::run() {
  const Simulation simulation;  // the device does not wait for itself
  for (;;) {
    std::function<void()> work;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return !waiting_.empty(); });
      if (waiting_.front().not_before > g_queued) hold_back(lock);
      work = std::move(waiting_.front().work);
      waiting_.pop_front();
      busy_ = true;
    }
    std::exception_ptr error;
    try {
      work();
    } catch (...) {
      error = std::current_exception();
    }
    std::unique_lock lock(mutex_);
    if (has_ended_) {
      new auto(std::move(work));
      continue;
    }
    lock.unlock();
    work = nullptr;  // releases its tensors before any thread sees the queue idle
    lock.lock();
    busy_ = false;
    if (!error_) error_ = error;
    changed_.notify_all();
  }
}

void set_up_streams(c10::DeviceIndex devices) {
  TORCH_CHECK(devices >= 1 && devices <= kDevicesAtMost, "POLYACCEL_SIMDEV_DEVICES is 1 to ", kDevicesAtMost, ", not ",
              int(devices));
  g_devices = devices;
}

c10::DeviceIndex device_count() { return g_devices; }

c10::DeviceIndex current_device() { return t_device; }

void set_current_device(c10::DeviceIndex device) {
  TORCH_CHECK(device < g_devices, "simdev:", int(device), " does not exist, there are ", int(g_devices));
  if (device >= 0) t_device = device;
}

c10::Stream current_stream(c10::DeviceIndex device) {
  return stream_of(device, t_streams[size_t(or_current(device))]);
}

c10::Stream exchange_stream(c10::Stream stream) {
  const auto before = current_stream(stream.device_index());
  t_streams[size_t(stream.device_index())] = stream.id();
  return before;
}

c10::Stream default_stream(c10::DeviceIndex device) { return stream_of(device, 0); }

c10::Stream new_stream(c10::DeviceIndex device) {
  static std::atomic<unsigned> next{0};
  return stream_of(device, 1 + next++ % (kStreams - 2));
}

c10::Stream comm_stream(c10::DeviceIndex device) { return stream_of(device, kStreams - 1); }

void enqueue_now(c10::Stream stream, std::function<void()> work) { queue_of(stream).push(std::move(work)); }

void enqueue_wait(c10::Stream stream, Queue* queue, std::function<bool()> wait_briefly) {
  refuse_in_recording("waiting for what is not recorded");
  auto* own = &queue_of(stream);
  enqueue(stream, [own, queue, wait_briefly = std::move(wait_briefly)] {
    std::optional<Queue::Hurry> hurry;
    while (!wait_briefly()) {
      if (!hurry && (!are_delayed() || own->is_hurried())) hurry.emplace(queue);
    }
  });
}

bool is_idle(c10::Stream stream) { return queue_of(stream).is_idle(); }

void synchronize(c10::Stream stream) {
  refuse_in_recording("a wait of the host");
  queue_of(stream).synchronize();
}

void synchronize_device(c10::DeviceIndex device) {
  for (int id = 0; id < kStreams; ++id) synchronize(stream_of(device, id));
}

int64_t Event::State::last_recorded() {
  std::lock_guard lock(mutex);
  return recorded;
}

void Event::State::wait_for(int64_t number) {
  refuse_in_recording("a wait of the host");
  const Unlocked unlocked;
  std::unique_lock lock(mutex);
  Queue* const awaited = done >= number ? nullptr : queue;
  lock.unlock();
  const Queue::Hurry hurry(awaited);
  lock.lock();
  reached.wait(lock, [this, number] { return done >= number; });
}

bool Event::State::wait_briefly(int64_t number) {
  std::unique_lock lock(mutex);
  return reached.wait_for(lock, std::chrono::milliseconds(1), [this, number] { return done >= number; });
}

void Event::record(c10::Stream stream) {
  int64_t number;
  {
    std::lock_guard lock(state_->mutex);
    number = ++state_->recorded;
    state_->queue = &queue_of(stream);
    state_->recording = current_recording();
  }
  if (current_recording()) return;  // which has one order
  enqueue(stream, [state = state_, number] {
    std::lock_guard lock(state->mutex);
    state->done = std::max(state->done, number);  // recorded on another stream meanwhile
    state->at = std::chrono::steady_clock::now();
    state->reached.notify_all();
  });
}

void Event::block(c10::Stream stream) const {
  if (has_fault("late_stream")) return;
  Queue* queue;
  {
    std::lock_guard lock(state_->mutex);
    queue = state_->queue;
    if (current_recording() && state_->recording == current_recording()) return;
    TORCH_CHECK(!state_->recording, "simdev: an event of a recording means nothing outside of it");
  }
  enqueue_wait(stream, queue, [state = state_, number = state_->last_recorded()] { return state->wait_briefly(number); });
}

bool Event::is_reached() const {
  std::lock_guard lock(state_->mutex);
  return state_->done >= state_->recorded;
}

void Event::synchronize() const { state_->wait_for(state_->last_recorded()); }

double Event::milliseconds_until(const Event& later) const {
  TORCH_CHECK(is_reached() && later.is_reached(), "both events must have been reached");
  return std::chrono::duration<double, std::milli>(later.state_->at - state_->at).count();
}

}  // namespace simdev
