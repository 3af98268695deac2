#include "comm.h"

#include "recording.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DeviceGuard.h>

namespace simdev {
namespace {

using Tensors = std::vector<at::Tensor>;

// Done when the results are in device memory. Waiting holds up the current stream and not the host, which hears of an
// error when it waits for that stream.
class CommWork final : public c10d::Work {
 public:
  CommWork(int rank, c10d::OpType kind, Tensors outputs, c10::Device device, Queue* queue)
      : Work(rank, kind),
        queue_(queue),
        outputs_(std::move(outputs)),
        device_(device),
        future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                         std::vector<c10::Device>{device})) {}

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

  bool wait(std::chrono::milliseconds timeout) override {
    if (timeout != kNoTimeout || isCompleted()) return Work::wait(timeout);
    const auto self = c10::intrusive_ptr<CommWork>::reclaim_copy(this);
    enqueue_wait(current_stream(device_.index()), queue_, [self] { return self->wait_briefly(); });
    return true;
  }

  void end(std::exception_ptr error) {
    if (error) {
      future_->setError(error);
    } else {
      future_->markCompleted(c10::IValue(outputs_));
    }
    finish(error);
  }

 private:
  bool wait_briefly() {
    std::unique_lock lock(mutex_);
    const bool is_done = cv_.wait_for(lock, std::chrono::milliseconds(1), [this] { return completed_; });
    if (is_done && exception_) std::rethrow_exception(exception_);
    return is_done;
  }

  Queue* queue_;
  Tensors outputs_;
  c10::Device device_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

Tensors to_host(const Tensors& tensors) {
  Tensors copies;
  for (const auto& tensor : tensors) copies.push_back(tensor.to(at::kCPU).contiguous());
  return copies;
}

Tensors room_for(const Tensors& tensors) {
  Tensors room;
  for (const auto& tensor : tensors) room.push_back(at::empty(tensor.sizes(), tensor.options().device(at::kCPU)));
  return room;
}

// gloo has no average: the sum, which `run` then divides.
template <class Options>
Options with_sum(Options options) {
  if (options.reduceOp == c10d::ReduceOp::AVG) options.reduceOp = c10d::ReduceOp::SUM;
  return options;
}

}  // namespace

Comm::Comm(c10::intrusive_ptr<c10d::Backend> host, int rank, int size)
    : Backend(rank, size), host_(std::move(host)), collectives_(new Queue()), messages_{new Queue(), new Queue()} {}

int Comm::divisor(const c10d::ReduceOp& op) const { return op == c10d::ReduceOp::AVG ? getSize() : 1; }

c10::intrusive_ptr<c10d::Work> Comm::run(
    c10d::OpType kind, Tensors outputs, Tensors inputs,
    std::function<c10::intrusive_ptr<c10d::Work>(Tensors&, Tensors&)> call, int divisor, bool is_message) {
  refuse_in_recording("a collective");
  const auto& any = outputs.empty() ? inputs : outputs;
  const auto device = any.empty() ? c10::Device(c10::kPrivateUse1, current_device()) : any.front().device();
  auto* queue = is_message ? messages_[outputs.empty() ? 0 : 1] : collectives_;
  const auto work = c10::make_intrusive<CommWork>(getRank(), kind, outputs, device, queue);
  Event ready;  // what the caller has queued until now comes first
  ready.record(current_stream(device.index()));
  queue->push([work, device, ready, outputs = std::move(outputs), inputs = std::move(inputs), call = std::move(call), divisor] {
    std::exception_ptr error;
    try {
      const c10::DeviceGuard guard(device);
      // Counts no change of a tensor: its owner, who may go on meanwhile, has counted that of the call.
      const at::AutoDispatchBelowADInplaceOrView uncounted;
      // Not the default one, which may hold a stream up until this work is done.
      exchange_stream(comm_stream(device.index()));
      ready.synchronize();
      auto results = room_for(outputs), arguments = to_host(inputs);
      call(results, arguments)->wait();
      if (divisor != 1) {
        for (auto& result : results) result.div_(divisor);
      }
      for (size_t at = 0; at < outputs.size(); ++at) at::Tensor(outputs[at]).copy_(results[at]);
    } catch (...) {
      error = std::current_exception();
    }
    work->end(error);
  });
  return work;
}

c10::intrusive_ptr<c10d::Work> Comm::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  return run(c10d::OpType::BROADCAST, tensors, tensors, [host = host_, options](Tensors& outputs, Tensors& inputs) {
    outputs = inputs;
    return host->broadcast(outputs, options);
  });
}

c10::intrusive_ptr<c10d::Work> Comm::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return run(c10d::OpType::ALLREDUCE, tensors, tensors,
             [host = host_, options = with_sum(options)](Tensors& outputs, Tensors& inputs) {
               outputs = inputs;
               return host->allreduce(outputs, options);
             },
             divisor(options.reduceOp));
}

c10::intrusive_ptr<c10d::Work> Comm::allreduce_coalesced(Tensors& tensors,
                                                         const c10d::AllreduceCoalescedOptions& options) {
  return run(c10d::OpType::ALLREDUCE_COALESCED, tensors, tensors,
             [host = host_, options](Tensors& outputs, Tensors& inputs) {
               outputs = inputs;
               return host->allreduce_coalesced(outputs, options);
             });
}

c10::intrusive_ptr<c10d::Work> Comm::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                               const c10d::AllgatherOptions& options) {
  return run(c10d::OpType::ALLGATHER, outputs.at(0), inputs, [host = host_, options](Tensors& results, Tensors& given) {
    std::vector<Tensors> lists{results};
    return host->allgather(lists, given, options);
  });
}

c10::intrusive_ptr<c10d::Work> Comm::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                     const c10d::AllgatherOptions& options) {
  return run(c10d::OpType::_ALLGATHER_BASE, {output}, {input},
             [host = host_, options](Tensors& outputs, Tensors& inputs) {
               return host->_allgather_base(outputs[0], inputs[0], options);
             });
}

c10::intrusive_ptr<c10d::Work> Comm::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                          const c10d::ReduceScatterOptions& options) {
  return run(c10d::OpType::_REDUCE_SCATTER_BASE, {output}, {input},
             [host = host_, options = with_sum(options)](Tensors& outputs, Tensors& inputs) {
               return host->_reduce_scatter_base(outputs[0], inputs[0], options);
             },
             divisor(options.reduceOp));
}

c10::intrusive_ptr<c10d::Work> Comm::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                   std::vector<int64_t>& output_sizes, std::vector<int64_t>& input_sizes,
                                                   const c10d::AllToAllOptions& options) {
  return run(c10d::OpType::ALLTOALL_BASE, {output}, {input},
             [host = host_, options, output_sizes, input_sizes](Tensors& outputs, Tensors& inputs) {
               auto to = output_sizes, from = input_sizes;
               return host->alltoall_base(outputs[0], inputs[0], to, from, options);
             });
}

c10::intrusive_ptr<c10d::Work> Comm::send(Tensors& tensors, int to, int tag) {
  return run(
      c10d::OpType::SEND, {}, tensors,
      [host = host_, to, tag](Tensors&, Tensors& inputs) { return host->send(inputs, to, tag); }, 1, true);
}

c10::intrusive_ptr<c10d::Work> Comm::recv(Tensors& tensors, int from, int tag) {
  return run(
      c10d::OpType::RECV, tensors, {},
      [host = host_, from, tag](Tensors& outputs, Tensors&) { return host->recv(outputs, from, tag); }, 1, true);
}

c10::intrusive_ptr<c10d::Work> Comm::barrier(const c10d::BarrierOptions& options) {
  return run(c10d::OpType::BARRIER, {}, {}, [host = host_, options](Tensors&, Tensors&) {
    auto on_cpu = options;
    on_cpu.device = c10::nullopt;
    on_cpu.device_ids.clear();
    return host->barrier(on_cpu);
  });
}

}  // namespace simdev
