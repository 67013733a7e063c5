// What the parts of the simulated GPU share: devices, streams with work that they still owe, and counters.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace simulated {

constexpr int kDevices = 4;

// Work that was launched and may not have been done. Whatever reads its results without finish() reads them too early.
struct Late {
  virtual ~Late() = default;
  virtual void finish() = 0;
};
using LateWork = std::vector<std::shared_ptr<Late>>;

// The device and the stream that this thread launches on, as torch.cuda.current_device() and current_stream() tell.
c10::DeviceIndex current_device();
void set_device(int64_t index);
c10::Stream current_stream(c10::DeviceIndex device);
c10::Stream new_stream(c10::DeviceIndex device);
void set_stream(c10::Stream stream);

// Let the current stream wait for the work: the default stream by finishing it here and now, any other with its next kernel.
void wait_on_stream(LateWork work);
// What the current stream has been told to wait for and has not finished.
LateWork owed_by_stream();

// A tensor of the host with the same memory.
at::Tensor on_host(const at::Tensor& tensor);

// Count a kernel launch; a list of tensors takes one for each `per_launch` of them.
void count_launch(const std::string& op, int64_t tensors = 1, int64_t per_launch = 1);
// Count a wait of the host for the device, and refuse it under torch.cuda.set_sync_debug_mode("error").
void count_wait(const std::string& reason);

}  // namespace simulated
