// Collectives of device tensors: through host memory and a backend for the CPU, on their own thread.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "streams.h"

namespace simdev {

class Comm final : public c10d::Backend {
 public:
  Comm(c10::intrusive_ptr<c10d::Backend> host, int rank, int size);

  const std::string getBackendName() const override { return "simcomm"; }
  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions&) override;
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions&) override;
  c10::intrusive_ptr<c10d::Work> allreduce_coalesced(std::vector<at::Tensor>& tensors,
                                                     const c10d::AllreduceCoalescedOptions&) override;
  c10::intrusive_ptr<c10d::Work> allgather(std::vector<std::vector<at::Tensor>>& outputs,
                                           std::vector<at::Tensor>& inputs, const c10d::AllgatherOptions&) override;
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions&) override;
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                      const c10d::ReduceScatterOptions&) override;
  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                                               std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions&) override;
  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int to, int tag) override;
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int from, int tag) override;
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions&) override;

 private:
  using Tensors = std::vector<at::Tensor>;
  // Copies `inputs` to the host, lets `call` start the collective on them and on memory for `outputs`, waits, and
  // divides the results, and copies them to the outputs.
  c10::intrusive_ptr<c10d::Work> run(
      c10d::OpType kind, Tensors outputs, Tensors inputs,
      std::function<c10::intrusive_ptr<c10d::Work>(Tensors& outputs, Tensors& inputs)> call, int divisor = 1,
      bool is_message = false);
  int divisor(const c10d::ReduceOp& op) const;

  c10::intrusive_ptr<c10d::Backend> host_;
  Queue* collectives_;  // in the order of the calls
  Queue* messages_[2];  // sends and receives, so that one in each direction passes
};

}  // namespace simdev
