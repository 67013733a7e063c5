// The simulated GPU as a Python module, and its counters. device.py puts it behind torch.cuda.
#include <torch/csrc/utils/pybind.h>

#include <map>
#include <mutex>

#include "memory.h"
#include "nccl.h"

namespace simulated {
namespace {

std::mutex counts_mutex;
std::map<std::string, int64_t> launches;
py::object* on_wait = nullptr;  // called with the reason of each wait; never freed, since threads outlive the interpreter

c10::Stream stream_of(int64_t device, int64_t id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(device)), id);
}

void resize_storage(const at::Storage& storage, size_t bytes) {
  auto before = current_device();
  set_device(storage.device().index());
  auto data = device_allocator()->allocate(bytes);
  set_device(before);
  std::memcpy(data.get(), storage.data(), std::min(bytes, storage.nbytes()));
  storage.set_data_ptr_noswap(std::move(data));
  storage.set_nbytes(bytes);
}

}  // namespace

void count_launch(const std::string& op, int64_t tensors, int64_t per_launch) {
  std::lock_guard lock(counts_mutex);
  launches[op] += std::max<int64_t>(1, (tensors + per_launch - 1) / per_launch);
}

void count_wait(const std::string& reason) {
  if (on_wait == nullptr) return;
  py::gil_scoped_acquire gil;
  (*on_wait)(reason);
}

}  // namespace simulated

PYBIND11_MODULE(simulated_gpu_native, module) {
  using namespace simulated;
  py::call_guard<py::gil_scoped_release> without_gil;

  module.attr("DEVICES") = kDevices;
  module.def("current_device", [] { return static_cast<int>(current_device()); });
  module.def("set_device", &set_device);
  module.def("current_stream", [](int device) { return current_stream(device).id(); });
  module.def("new_stream", [](int device) { return new_stream(device).id(); });
  module.def("set_stream", [](int device, int64_t id) { set_stream(stream_of(device, id)); });
  module.def("synchronize", &synchronize_device, without_gil);
  module.def("resize_storage", &resize_storage);
  py::class_<Event>(module, "Event")
      .def(py::init())
      .def("record", [](Event& event, int device, int64_t id) { event.record(stream_of(device, id)); })
      .def("block", [](Event& event, int device, int64_t id) { event.block(stream_of(device, id)); }, without_gil)
      .def("synchronize", &Event::synchronize, without_gil);

  module.def("launches", [] {
    std::lock_guard lock(counts_mutex);
    return launches;
  });
  module.def("on_wait", [](py::object called) {
    delete on_wait;
    on_wait = called.is_none() ? nullptr : new py::object(called);
  });

  py::class_<Nccl, c10d::Backend, c10::intrusive_ptr<Nccl>>(module, "Nccl")
      .def(py::init<c10::intrusive_ptr<c10d::Store>, c10::intrusive_ptr<c10d::Backend>, int, int>());
}
