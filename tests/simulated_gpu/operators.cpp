// Operators of the simulated GPU. Each runs as its CPU kernel on the same memory; only copies know of two memories.
#include <ATen/EmptyTensor.h>
#include <ATen/TensorUtils.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <cmath>
#include <mutex>
#include <set>

#include "memory.h"

namespace simulated {

at::Tensor on_host(const at::Tensor& tensor) {
  if (!tensor.is_cuda()) return tensor;
  void* memory = nullptr;
  if (tensor.numel() > 0) {
    auto needed = tensor.storage_offset() + at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), 1);
    TORCH_CHECK(static_cast<size_t>(needed * tensor.element_size()) <= tensor.storage().nbytes(),
                "a tensor whose memory was freed is used");
    memory = static_cast<char*>(tensor.storage().mutable_data()) + tensor.storage_offset() * tensor.element_size();
  }
  auto host = at::from_blob(memory, tensor.sizes(), tensor.strides(), [kept = tensor.storage()](void*) {},
                            tensor.options().device(at::kCPU));
  if (tensor.is_conj()) host._set_conj(true);
  if (tensor.is_neg()) host._set_neg(true);
  return host;
}

namespace {

constexpr c10::DispatchKeySet kKey(c10::DispatchKey::CUDA);

c10::Device device_or_current(std::optional<at::Device> device) {
  return {c10::DeviceType::CUDA, device && device->has_index() ? device->index() : current_device()};
}

// A tensor of the device with the memory of a fresh tensor of the host.
at::Tensor adopted(const at::Tensor& host, c10::Device device) {
  auto* kept = new c10::Storage(host.storage());
  c10::DataPtr data(kept->mutable_data(), kept, [](void* it) { delete static_cast<c10::Storage*>(it); }, device);
  c10::Storage storage(c10::Storage::use_byte_size_t(), kept->nbytes(), std::move(data), device_allocator(), true);
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), kKey, host.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
  return tensor;
}

// ---- all operators but those below --------------------------------------------------------------------------------------

const std::set<std::string> kReadByHost = {
    "aten::_local_scalar_dense", "aten::nonzero",         "aten::masked_select",     "aten::equal",
    "aten::_unique2",            "aten::unique_dim",      "aten::unique_consecutive", "aten::repeat_interleave",
};

// The arguments of one call, first those of the device, then the same as tensors of the host.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack& stack) : schema_(op.schema()), name_(schema_.name()) {
    auto given = torch::jit::last(stack, schema_.arguments().size());
    given_.assign(given.begin(), given.end());
    for (const auto& value : given_) look_at(value);
  }

  void count() const {
    bool list = name_.rfind("aten::_foreach", 0) == 0, fused = name_.rfind("aten::_fused", 0) == 0;
    list = list || name_.find("_amp_foreach") != std::string::npos;
    auto tensors = given_.empty() || !given_[0].isTensorList() || !(list || fused) ? 1 : given_[0].toTensorVector().size();
    if (kReadByHost.count(name_) > 0) {
      count_wait(name_);
    } else {
      count_launch(name_, static_cast<int64_t>(tensors), fused ? 30 : 100);
    }
  }

  std::vector<c10::IValue> arguments_on_host() {
    std::vector<c10::IValue> host;
    for (size_t i = 0; i < given_.size(); i++) host.push_back(as_on_host(given_[i], is_out(i)));
    return host;
  }

  // What the operator returns: the argument itself where it writes one, else a new tensor of the device.
  std::vector<c10::IValue> results(const std::vector<c10::IValue>& host, at::ArrayRef<c10::IValue> returned) {
    std::vector<c10::IValue> results;
    for (size_t i = 0; i < given_.size(); i++) {
      if (is_out(i) && given_[i].isTensor()) grow(given_[i].toTensor(), host[i].toTensor());
    }
    for (size_t i = 0; i < returned.size(); i++) {
      const auto* alias = schema_.returns()[i].alias_info();
      TORCH_CHECK(alias == nullptr || alias->isWrite(), name_, " returns a view, which the simulated GPU lacks");
      results.push_back(alias == nullptr ? as_on_device(returned[i]) : given_[argument_of(*alias)]);
    }
    return results;
  }

 private:
  void look_at(const c10::IValue& value) {
    if (value.isTensor()) {
      meet(value.toTensor(), false);
    } else if (value.isTensorList()) {
      for (const auto& tensor : value.toTensorVector()) meet(tensor, true);
    } else if (value.isList()) {
      for (const auto& element : value.toListRef()) look_at(element);
    } else if (value.isDevice() && !device_) {
      device_ = device_or_current(value.toDevice());
    }
  }

  // Refuse what a GPU refuses. A number may lie on the host, and an index may, for which a GPU waits.
  void meet(const at::Tensor& tensor, bool in_list) {
    if (!tensor.defined()) return;
    if (tensor.is_cuda()) {
      TORCH_CHECK(!device_ || *device_ == tensor.device(), name_, ": Expected all tensors to be on the same device, but found ",
                  *device_, " and ", tensor.device());
      device_ = tensor.device();
    } else if (name_.rfind("aten::index", 0) == 0 && tensor.dim() > 0) {
      count_wait(name_ + " with an index on the host");
    } else {
      TORCH_CHECK(tensor.dim() == 0 && !in_list, name_, ": Expected all tensors to be on the same device, but found one on cpu");
    }
    if (name_.rfind("aten::index", 0) == 0 && (tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte)) {
      count_wait(name_ + " with a mask");
    }
  }

  bool written(size_t argument) const {
    const auto* alias = schema_.arguments()[argument].alias_info();
    return alias != nullptr && alias->isWrite();
  }

  bool is_out(size_t argument) const { return written(argument) && schema_.arguments()[argument].kwarg_only(); }

  size_t argument_of(const c10::AliasInfo& alias) const {
    for (size_t i = 0; i < given_.size(); i++) {
      const auto* its = schema_.arguments()[i].alias_info();
      if (its != nullptr && its->beforeSets() == alias.beforeSets()) return i;
    }
    TORCH_CHECK(false, name_, " returns an alias of no argument");
  }

  static c10::IValue as_on_host(const c10::IValue& value, bool out) {
    if (value.isTensor()) {
      const auto& tensor = value.toTensor();
      if (!tensor.defined()) return value;
      if (out && tensor.numel() == 0) return at::empty({0}, tensor.options().device(at::kCPU));  // to be resized
      return on_host(tensor);
    }
    if (value.isTensorList()) {
      std::vector<at::Tensor> host;
      for (const auto& tensor : value.toTensorVector()) host.push_back(tensor.defined() ? on_host(tensor) : tensor);
      return host;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> host;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
        host.push_back(tensor && tensor->defined() ? std::optional(on_host(*tensor)) : tensor);
      }
      return host;
    }
    return value.isDevice() ? c10::IValue(c10::Device(at::kCPU)) : value;
  }

  c10::IValue as_on_device(const c10::IValue& value) const {
    auto device = device_.value_or(device_or_current(std::nullopt));
    if (value.isTensor()) return value.toTensor().defined() ? adopted(value.toTensor(), device) : value;
    if (!value.isTensorList()) return value;
    std::vector<at::Tensor> tensors;
    for (const auto& tensor : value.toTensorVector()) tensors.push_back(adopted(tensor, device));
    return tensors;
  }

  static void grow(const at::Tensor& tensor, const at::Tensor& host) {
    if (tensor.sizes() == host.sizes()) return;
    at::native::resize_(tensor, host.sizes(), std::nullopt);
    on_host(tensor).copy_(host);
  }

  const c10::FunctionSchema& schema_;
  std::string name_;
  std::vector<c10::IValue> given_;
  std::optional<c10::Device> device_;
};

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  settle(current_stream(current_device()));
  Call call(op, *stack);
  call.count();
  auto host = call.arguments_on_host();
  torch::jit::drop(*stack, host.size());
  torch::jit::Stack inner(host);
  {
    at::AutoDispatchBelowADInplaceOrView below;
    op.callBoxed(inner);
  }
  for (auto& result : call.results(host, inner)) stack->push_back(std::move(result));
}

// ---- copies -------------------------------------------------------------------------------------------------------------

// A copy from pinned memory in a stream of its own. It reads its source when the stream goes on, or whoever waits for it.
struct LateCopy final : Late {
  LateCopy(at::Tensor to, at::Tensor from) : to_(std::move(to)), from_(std::move(from)) {}
  void finish() override {
    at::AutoDispatchBelowADInplaceOrView below;
    std::call_once(once_, [this] {
      to_.copy_(from_);
      to_ = from_ = at::Tensor();
    });
  }

 private:
  at::Tensor to_, from_;
  std::once_flag once_;
};

at::Tensor& copy_(at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  if (to.is_same(from)) return to;
  bool to_host = to.is_cpu(), from_host = from.is_cpu();
  auto target = on_host(to), source = on_host(from);
  auto stream = current_stream(current_device());
  bool late = from_host && non_blocking && stream.id() != 0 && is_pinned(source.const_data_ptr());
  if (!late) settle(stream);
  at::AutoDispatchBelowADInplaceOrView below;
  bool pinned = to_host && to.numel() > 0 && is_pinned(target.const_data_ptr());
  count_launch("aten::copy_");
  if ((to_host && !(non_blocking && pinned)) || (from_host && !non_blocking)) {
    count_wait(to_host ? "copy to the host" : "copy from the host");
    if (to_host) let_copies_arrive(copies_sent());
  } else if (to_host) {
    auto sent = source.expand(target.sizes()).to(target.scalar_type(), false, true);
    if (target.is_floating_point()) target.fill_(NAN); else target.fill_(77);
    send_late([target, sent] {
      at::AutoDispatchBelowADInplaceOrView below;
      target.copy_(sent);
    });
    return to;
  } else if (late) {
    if (target.is_floating_point()) target.fill_(NAN); else target.fill_(77);
    wait_on_stream({std::make_shared<LateCopy>(target, source)});
    return to;
  }
  target.copy_(source);
  return to;
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  auto target = to;
  return copy_(target, from, non_blocking);
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  auto target = to;
  if (to.sizes() != from.sizes()) target.resize_(from.sizes());
  return copy_(target, from, false);
}

// ---- memory and views: no kernel, and nothing to wait for ---------------------------------------------------------------

struct OnDevice {  // the allocator takes the current device
  explicit OnDevice(c10::Device device) : before(current_device()) { set_device(device.index()); }
  ~OnDevice() { set_device(before); }
  c10::DeviceIndex before;
};

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  OnDevice there(device_or_current(device));
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), device_allocator(), kKey,
                                   dtype.value_or(at::kFloat), format);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  OnDevice there(device_or_current(device));
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                           device_allocator(), kKey, dtype.value_or(at::kFloat));
}

const at::Tensor& resize_(const at::Tensor& tensor, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  OnDevice there(tensor.device());
  return at::native::resize_(tensor, C10_AS_INTARRAYREF_SLOW(size), format);
}

at::Tensor as_strided(const at::Tensor& tensor, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                      std::optional<c10::SymInt> offset) {
  auto start = offset ? std::optional(offset->expect_int()) : std::nullopt;
  return at::native::as_strided_tensorimpl(tensor, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), start);
}

at::Tensor view(const at::Tensor& tensor, c10::SymIntArrayRef size) {
  return at::native::view(tensor, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor reshape_alias(const at::Tensor& tensor, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(tensor, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

at::Tensor& set_storage(at::Tensor& tensor, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size,
                        c10::SymIntArrayRef stride) {
  return at::native::set_storage_cpu_(tensor, std::move(storage), offset.expect_int(), C10_AS_INTARRAYREF_SLOW(size),
                                      C10_AS_INTARRAYREF_SLOW(stride));
}

at::Tensor& set_whole_storage(at::Tensor& tensor, at::Storage storage) {
  auto elements = static_cast<int64_t>(storage.nbytes() / tensor.element_size());
  return at::native::set_storage_cpu_(tensor, std::move(storage), 0, {elements}, {1});
}

void record_stream(at::Tensor&, at::Stream) {}

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  std::set<std::string> own{"_efficientzerotensor"};
  auto implement = [&](const char* name, auto&& function) {
    own.insert(name);
    library.impl(name, function);
  };
  implement("copy_", copy_);
  implement("_copy_from", copy_from);
  implement("_copy_from_and_resize", copy_from_and_resize);
  implement("empty.memory_format", empty);
  implement("empty_strided", empty_strided);
  implement("resize_", resize_);
  implement("as_strided", as_strided);
  implement("view", view);
  implement("_reshape_alias", reshape_alias);
  implement("unfold", at::native::unfold);
  implement("view_as_real", at::native::view_as_real);
  implement("view_as_complex", at::native::view_as_complex);
  implement("set_.source_Tensor", at::native::set_tensor_);
  implement("set_.source_Storage", set_whole_storage);
  implement("set_.source_Storage_storage_offset", set_storage);
  implement("record_stream", record_stream);

  // The fallback is for operators that torch can't compose of others. A GPU has one kernel for each of these too.
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& op : dispatcher.getAllOpNames()) {
    if (op.name.rfind("aten::", 0) != 0) continue;
    auto name = op.name.substr(6) + (op.overload_name.empty() ? "" : "." + op.overload_name);
    bool of_lists = name.rfind("_foreach_", 0) == 0;
    bool on_cpu = dispatcher.findOp(op)->hasKernelForDispatchKey(c10::DispatchKey::CPU);
    if ((of_lists || on_cpu) && own.count(name) == 0) {
      library.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
    }
  }
}

}  // namespace
}  // namespace simulated
