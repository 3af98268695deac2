// Streams: queues of work, each with its own thread, and events, points in such queues.
// Waits of the host release the interpreter's lock, whoever calls: work that ends releases tensors, which takes it.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>

namespace simdev {

// Work that runs in order on its own thread, which lives until the process ends.
class Queue {
 public:
  Queue();
  void push(std::function<void()> work);
  bool is_idle();
  void synchronize();  // rethrows the first error of its work since the last time

  bool is_hurried();

  // Waits until nothing is queued or runs, at most until then; what still runs later is not released. Without the
  // interpreter, which takes the lock that releasing tensors needs along, that would end the process.
  void end(std::chrono::steady_clock::time_point until);

  // While one lives, work of a queue is not held back: the host waits for it, directly or by way of other queues.
  class Hurry {
   public:
    explicit Hurry(Queue* queue);  // nullptr: none
    ~Hurry();
    Hurry(const Hurry&) = delete;
    Hurry& operator=(const Hurry&) = delete;

   private:
    Queue* queue_;
  };

 private:
  struct Item {
    std::function<void()> work;
    int64_t not_before;  // held back until so much work has been queued anywhere in the process
  };
  void run();
  void hold_back(std::unique_lock<std::mutex>& lock);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Item> waiting_;
  bool busy_ = false;
  bool has_ended_ = false;
  int hurries_ = 0;
  std::exception_ptr error_;
};

// Holds work of all streams back, each piece as long as a generator of this seed says: until more work has been queued,
// the host waits for it, or some milliseconds are over. 0: none.
void set_delays(uint64_t seed);
bool are_delayed();

// Ends every queue of the process, in seconds at most: called before the interpreter ends.
void end_queues();

void set_up_streams(c10::DeviceIndex devices);
c10::DeviceIndex device_count();
c10::DeviceIndex current_device();
void set_current_device(c10::DeviceIndex device);  // of this thread

c10::Stream current_stream(c10::DeviceIndex device);
c10::Stream exchange_stream(c10::Stream stream);  // of this thread; returns the one before
c10::Stream default_stream(c10::DeviceIndex device);
c10::Stream new_stream(c10::DeviceIndex device);  // one of a few, in turn
c10::Stream comm_stream(c10::DeviceIndex device);  // for copies of collectives alone

// Lets later work of the stream wait until `wait_briefly`, which takes a millisecond at most, says that it is time.
// `queue` is hurried as long as the stream is.
void enqueue_wait(c10::Stream stream, Queue* queue, std::function<bool()> wait_briefly);

void enqueue(c10::Stream stream, std::function<void()> work);      // or records it, see recording.h
void enqueue_now(c10::Stream stream, std::function<void()> work);  // though the thread may be recording
bool is_idle(c10::Stream stream);
void synchronize(c10::Stream stream);
void synchronize_device(c10::DeviceIndex device);

// A point in a queue, moved by recording again. Queued work that refers to it keeps what it needs of it.
class Event {
 public:
  void record(c10::Stream stream);
  void block(c10::Stream stream) const;  // later work there waits; the host does not
  bool is_reached() const;
  void synchronize() const;
  double milliseconds_until(const Event& later) const;

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable reached;
    int64_t recorded = 0, done = 0;
    Queue* queue = nullptr;                // in which it was recorded last
    const void* recording = nullptr;       // to which that belongs
    std::chrono::steady_clock::time_point at;

    int64_t last_recorded();
    void wait_for(int64_t number);
    bool wait_briefly(int64_t number);
  };

  std::shared_ptr<State> state_ = std::make_shared<State>();
};

}  // namespace simdev
