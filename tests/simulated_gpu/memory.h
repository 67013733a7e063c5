// Memory, streams and events of the simulated GPU.
#pragma once

#include <c10/core/Allocator.h>

#include <functional>

#include "device.h"

namespace simulated {

c10::Allocator* device_allocator();
void register_allocators();
bool is_pinned(const void* address);

// A copy to pinned memory that need not have arrived when the call returns. The n-th arrives with let_copies_arrive(n).
void send_late(std::function<void()> write);
uint64_t copies_sent();
void let_copies_arrive(uint64_t count);

void wait_on(c10::Stream stream, LateWork work);
void settle(c10::Stream stream);  // a kernel is about to run on it
void synchronize_device();

// A point in a stream: what the stream then owed, and the copies that were then under way.
class Event {
 public:
  void record(c10::Stream stream);
  void block(c10::Stream stream) const;  // the stream waits
  void synchronize() const;              // the host waits

 private:
  LateWork work_;
  uint64_t copies_ = 0;
};

}  // namespace simulated
