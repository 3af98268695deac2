// Operators. Memory, copies, fills and random numbers are the device's own; everything else waits for the current
// stream, runs on the CPU with copies of its arguments, and copies the results back.

#include "ops.h"

#include "device.h"
#include "faults.h"
#include "memory.h"
#include "recording.h"
#include "streams.h"
#include "waits.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <chrono>
#include <set>
#include <string>
#include <thread>

namespace simdev {
namespace {

using at::Tensor;
using c10::Device;
using std::optional;

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

c10::DeviceGuard guard_for(optional<Device> device) {
  const Device wanted = device.value_or(Device(c10::kPrivateUse1));
  return c10::DeviceGuard(wanted.has_index() ? wanted : Device(c10::kPrivateUse1, current_device()));
}

Tensor empty(c10::SymIntArrayRef size, optional<at::ScalarType> dtype, optional<at::Layout>, optional<Device> device,
             optional<bool>, optional<at::MemoryFormat> format) {
  const auto guard = guard_for(device);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), device_allocator(), kKeys, c10::dtype_or_default(dtype),
                                   format);
}

Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, optional<at::ScalarType> dtype,
                     optional<at::Layout>, optional<Device> device, optional<bool>) {
  const auto guard = guard_for(device);
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                           device_allocator(), kKeys, c10::dtype_or_default(dtype));
}

// A CPU tensor over the same memory. For work on the streams and for code that has waited for them.
Tensor on_host(const Tensor& tensor) {
  if (tensor.is_cpu()) return tensor;
  return at::from_blob(host_address(tensor.unsafeGetTensorImpl()->data()), tensor.sizes(), tensor.strides(),
                       tensor.options().device(c10::kCPU).requires_grad(false));
}

void enqueue_for(const Tensor& tensor, std::function<void()> work) {
  const Tensor kept = current_recording() ? tensor : Tensor();  // a recording keeps its memory, as a chip's does
  enqueue(current_stream(tensor.device().index()), [work = std::move(work), kept] {
    const c10::InferenceMode no_history;
    work();
  });
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  const Tensor& on_device = to.is_privateuseone() ? to : from;
  const auto stream = current_stream(on_device.device().index());
  if (from.is_privateuseone() && from.device() != to.device()) {
    Event written;
    written.record(current_stream(from.device().index()));
    written.block(stream);
  }
  // Memory of the device is not kept: its owner may free it, as with a chip. `on_host` is the tensor itself on the host.
  const auto copy = [source = on_host(from), target = on_host(to)] { target.copy_(source); };
  const bool between_devices = from.is_privateuseone() && to.is_privateuseone();
  const Tensor& other = to.is_privateuseone() ? from : to;
  if (between_devices) {
    enqueue_for(on_device, [copy, from] { copy(); });  // `from` has no stream of this device
  } else if (non_blocking && is_pinned(other.const_data_ptr())) {
    if (has_fault("slow_copy")) {
      synchronize(stream);
      // Never deleted: to release tensors takes Python, which may have ended by then.
      const auto* kept = new auto(copy);
      new Tensor(from);
      new Tensor(to);
      std::thread([kept] {
        std::this_thread::sleep_for(std::chrono::milliseconds(200));
        const c10::InferenceMode no_history;
        (*kept)();
      }).detach();
    } else {
      enqueue_for(on_device, copy);
    }
  } else {
    host_waits(non_blocking ? "copy of pageable memory" : "copy that blocks");
    synchronize(stream);
    const c10::InferenceMode no_history;
    copy();
  }
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  if (from.sizes() != to.sizes()) at::native::resize_(to, from.sizes());
  to.copy_(from);
  return to;
}

Tensor& fill(Tensor& self, const at::Scalar& value) {
  enqueue_for(self, [host = on_host(self), value] { host.fill_(value); });
  return self;
}

Tensor& zero(Tensor& self) { return fill(self, 0); }

at::Scalar item(const Tensor& self) {
  host_waits("item");
  synchronize(current_stream(self.device().index()));
  return at::_local_scalar_dense(on_host(self));
}

Tensor& set_to(Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size,
               c10::SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset.expect_int());
  impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
  return self;
}

Tensor& set_to_all(Tensor& self, at::Storage source) {
  const c10::SymInt numel(int64_t(source.nbytes() / self.itemsize())), one(1);
  return set_to(self, std::move(source), 0, numel, one);
}

// Draws with the device's generator: its state goes through one of the CPU's.
template <class Draw>
Tensor& draw(Tensor& self, const optional<at::Generator>& chosen, Draw fill_with) {
  synchronize(current_stream(self.device().index()));
  at::Generator generator = chosen && chosen->defined() ? *chosen : default_generator(self.device().index());
  at::Generator engine = at::detail::createCPUGenerator();
  std::lock_guard lock(generator.mutex());
  engine.set_state(generator.get_state());
  auto host = on_host(self);
  fill_with(host, engine);
  generator.set_state(engine.get_state());
  return self;
}

Tensor& normal(Tensor& self, double mean, double std, optional<at::Generator> generator) {
  return draw(self, generator, [=](Tensor& host, at::Generator& engine) { host.normal_(mean, std, engine); });
}

Tensor& uniform(Tensor& self, double from, double to, optional<at::Generator> generator) {
  return draw(self, generator, [=](Tensor& host, at::Generator& engine) { host.uniform_(from, to, engine); });
}

Tensor& bernoulli(Tensor& self, double p, optional<at::Generator> generator) {
  return draw(self, generator, [=](Tensor& host, at::Generator& engine) { host.bernoulli_(p, engine); });
}

// The host of any device must have their results to go on: they are sizes, or decide between true and false.
bool has_results_for_host(const std::string& name, const torch::jit::Stack& stack) {
  static const std::set<std::string> names{"aten::nonzero", "aten::masked_select", "aten::_unique", "aten::_unique2",
                                           "aten::unique_dim", "aten::unique_consecutive", "aten::equal",
                                           "aten::is_nonzero", "aten::bincount"};
  if (name == "aten::repeat_interleave") return stack.back().isNone();  // the size of the output was not given
  return names.count(name) > 0;
}

// The arguments of a call with tensors over the host's mapping of the same memory.
torch::jit::Stack arguments_on_host(const torch::jit::Stack& arguments) {
  torch::jit::Stack host;
  for (const auto& argument : arguments) {
    if (argument.isTensor() && argument.toTensor().defined()) {
      host.emplace_back(on_host(argument.toTensor()));
    } else if (argument.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& one : argument.toTensorVector()) list.push_back(on_host(one));
      host.emplace_back(list);
    } else if (argument.isDevice()) {
      host.emplace_back(Device(c10::kCPU));
    } else {
      host.push_back(argument);
    }
  }
  return host;
}

// Records a call. What writes to its arguments does so when it is played; the results of any other call, whose sizes
// are found by calling it once, get memory of their own.
void record_call(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  TORCH_CHECK(!has_results_for_host(schema.name(), *stack), "simdev: ", schema.name(),
              " has results for the host, which is not possible while work is recorded");
  const torch::jit::Stack arguments(stack->end() - int64_t(schema.arguments().size()), stack->end());
  torch::jit::drop(*stack, schema.arguments().size());
  std::vector<Tensor> results;
  if (!schema.is_mutable()) {
    auto host = arguments_on_host(arguments);
    {
      const c10::InferenceMode no_history;
      op.callBoxed(&host);
    }
    for (const auto& result : host) {
      TORCH_CHECK(result.isTensor(), "simdev: ", schema.name(), " cannot be recorded, a result is no tensor");
      const Tensor sample = result.toTensor();
      results.push_back(at::empty_strided(sample.sizes(), sample.strides(),
                                          sample.options().device(Device(c10::kPrivateUse1, current_device()))));
      stack->emplace_back(results.back());
    }
  } else {
    for (const auto& result : schema.returns()) {
      for (size_t at = 0; at < arguments.size(); ++at) {
        const auto* alias = schema.arguments()[at].alias_info();
        if (alias && result.alias_info() && *alias == *result.alias_info()) stack->push_back(arguments[at]);
      }
    }
  }
  enqueue(current_stream(current_device()), [op, arguments, results] {
    const c10::InferenceMode no_history;
    auto host = arguments_on_host(arguments);
    op.callBoxed(&host);
    for (size_t at = 0; at < results.size(); ++at) on_host(results[at]).copy_(host[at].toTensor());
  });
}

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  if (current_recording()) return record_call(op, stack);
  if (has_results_for_host(op.schema().name(), *stack)) host_waits(op.schema().name().c_str());
  const Simulation simulation;
  for (size_t at = stack->size() - op.schema().arguments().size(); at < stack->size(); ++at) {
    auto& argument = (*stack)[at];
    if (argument.isTensor() && argument.toTensor().is_privateuseone()) {
      synchronize(current_stream(argument.toTensor().device().index()));
    } else if (argument.isGenerator()) {
      argument = c10::IValue();  // a device's generator is not a CPU's
    }
  }
  synchronize(current_stream(current_device()));  // for tensors in lists
  at::native::cpu_fallback(op, stack, true);
}

}  // namespace

void scale(const Tensor& self, double factor) {
  enqueue_for(self, [host = on_host(self), factor]() mutable {
    host.mul_(factor);
    if (has_fault("wrong_kernel")) host.nan_to_num_(0.0, std::numeric_limits<double>::infinity(),
                                                    -std::numeric_limits<double>::infinity());
  });
}

void keep_busy(int64_t milliseconds, c10::DeviceIndex device) {
  enqueue(current_stream(device), [milliseconds] {
    std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
  });
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("fill_.Scalar", fill);
  m.impl("zero_", zero);
  m.impl("_local_scalar_dense", item);
  m.impl("normal_", normal);
  m.impl("uniform_", uniform);
  m.impl("bernoulli_.float", bernoulli);
  m.impl("set_.source_Storage_storage_offset", set_to);
  m.impl("set_.source_Storage", set_to_all);
  m.impl("record_stream", [](Tensor& self, c10::Stream stream) { record_use(self.storage().data(), stream); });
  // Views, which move nothing.
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  m.impl("view", [](const Tensor& self, c10::SymIntArrayRef size) {
    return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
  });
  m.impl("_reshape_alias", [](const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
    return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
  });
  m.impl("resize_", [](const Tensor& self, c10::SymIntArrayRef size, optional<at::MemoryFormat> format) -> const Tensor& {
    return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
  });
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>()); }

}  // namespace simdev
