// "NCCL" between simulated GPUs.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

#include "device.h"

namespace simulated {

struct Collective;

// Runs the collectives of one group in order, each as late as the rules in nccl.cpp allow.
class CollectiveThread {
 public:
  CollectiveThread() { std::thread([this] { serve(); }).detach(); }
  std::shared_ptr<Collective> launch(std::function<void()> run);
  void wait(Collective& collective);
  c10::intrusive_ptr<c10::ivalue::Future> future(Collective& collective, std::vector<at::Tensor> out);
  bool done(Collective& collective);

 private:
  void serve();
  void hurry(Collective& last, std::chrono::milliseconds patience);
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Collective>> queue_;
};

class Nccl : public c10d::Backend {
 public:
  using Work = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;

  Nccl(c10::intrusive_ptr<c10d::Store> store, c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size)
      : Backend(rank, size), store_(std::move(store)), gloo_(std::move(gloo)) {}

  const std::string getBackendName() const override { return "nccl"; }
  Work allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  Work allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  Work broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  Work reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  Work _reduce_scatter_base(at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions& options) override;
  Work _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& options) override;
  Work allgather_into_tensor_coalesced(Tensors& outs, Tensors& ins, const c10d::AllgatherOptions& options) override;
  Work allgather(std::vector<Tensors>& outs, Tensors& ins, const c10d::AllgatherOptions& options) override;
  Work gather(std::vector<Tensors>& outs, Tensors& ins, const c10d::GatherOptions& options) override;
  Work scatter(Tensors& outs, std::vector<Tensors>& ins, const c10d::ScatterOptions& options) override;
  Work send(Tensors& tensors, int to, int tag) override;
  Work recv(Tensors& tensors, int from, int tag) override;
  Work barrier(const c10d::BarrierOptions& options) override;
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }

 private:
  void check(const Tensors& tensors);
  void meet();
  Work launch(c10d::OpType kind, Tensors out, std::function<void()> run);
  at::Tensor sum(const at::Tensor& in, c10d::ReduceOp op);
  void gather_into(const at::Tensor& out, const at::Tensor& in);

  c10::intrusive_ptr<c10d::Store> store_;
  c10::intrusive_ptr<c10d::Backend> gloo_;
  bool met_ = false;
  CollectiveThread& thread_ = *new CollectiveThread;  // for the rest of the process, as its thread
};

}  // namespace simulated
