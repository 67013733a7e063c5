// "NCCL" between simulated GPUs. A collective reads its inputs and writes its outputs as late as somebody waits for it.
//
// One thread of each group runs the collectives in order, by gloo. A collective starts when it, or a later one of its group,
// is waited for, else after kPatience. So who does not wait finds what was there before, however slow the machine is.
#include "nccl.h"

#include <ATen/core/ivalue.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/stack.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

namespace simulated {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::milliseconds kPatience(100);
constexpr std::chrono::milliseconds kPatienceWithFuture(1);  // a wait for a future can't be noticed

struct Collective final : Late {
  Collective(CollectiveThread& thread, std::function<void()> run)
      : thread(thread), run(std::move(run)), due(Clock::now() + kPatience) {}
  void finish() override { thread.wait(*this); }

  CollectiveThread& thread;
  std::function<void()> run;
  Clock::time_point due;
  c10::DeviceIndex device = current_device();
  bool done = false;
  std::exception_ptr error;
  std::vector<at::Tensor> out;
  c10::intrusive_ptr<c10::ivalue::Future> future;
};

namespace {

void complete(c10::intrusive_ptr<c10::ivalue::Future> future, std::vector<at::Tensor> out, std::exception_ptr error,
              c10::DeviceIndex device) {
  set_device(device);  // for the callbacks
  if (error) future->setError(error); else future->markCompleted(c10::IValue(std::move(out)));
}

struct CollectiveWork final : c10d::Work {
  CollectiveWork(c10d::OpType kind, std::shared_ptr<Collective> collective, std::vector<at::Tensor> out)
      : Work(-1, kind), collective_(std::move(collective)), out_(std::move(out)) {}

  bool wait(std::chrono::milliseconds) override {
    wait_on_stream({collective_});
    return true;
  }
  void synchronize() override { wait_on_stream({collective_}); }
  void blockCurrentStream() override { wait_on_stream({collective_}); }
  bool isCompleted() override { return collective_->thread.done(*collective_); }
  bool isSuccess() const override { return true; }
  std::vector<at::Tensor> result() override { return out_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return collective_->thread.future(*collective_, out_); }

  std::shared_ptr<Collective> collective_;
  std::vector<at::Tensor> out_;
};

void write(const at::Tensor& out, const at::Tensor& value) { on_host(out).copy_(value.view_as(out)); }

at::Tensor read(const at::Tensor& in) { return on_host(in).clone(); }

}  // namespace

std::shared_ptr<Collective> CollectiveThread::launch(std::function<void()> run) {
  auto collective = std::make_shared<Collective>(*this, std::move(run));
  std::lock_guard lock(mutex_);
  queue_.push_back(collective);
  changed_.notify_all();
  return collective;
}

void CollectiveThread::hurry(Collective& last, std::chrono::milliseconds patience) {
  auto due = Clock::now() + patience;
  for (auto& collective : queue_) {
    collective->due = std::min(collective->due, due);
    if (collective.get() == &last) break;
  }
  changed_.notify_all();
}

void CollectiveThread::wait(Collective& collective) {
  std::unique_lock lock(mutex_);
  hurry(collective, std::chrono::milliseconds(0));
  changed_.wait(lock, [&] { return collective.done; });
  if (collective.error) std::rethrow_exception(collective.error);
}

bool CollectiveThread::done(Collective& collective) {
  std::lock_guard lock(mutex_);
  return collective.done;
}

c10::intrusive_ptr<c10::ivalue::Future> CollectiveThread::future(Collective& collective, std::vector<at::Tensor> out) {
  std::lock_guard lock(mutex_);
  if (!collective.future) {
    collective.future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    collective.out = std::move(out);
    if (collective.done) complete(collective.future, collective.out, collective.error, collective.device);
    hurry(collective, kPatienceWithFuture);
  }
  return collective.future;
}

void CollectiveThread::serve() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return !queue_.empty(); });
    auto collective = queue_.front();
    while (Clock::now() < collective->due) changed_.wait_until(lock, collective->due);
    lock.unlock();
    std::exception_ptr error;
    try {
      at::AutoDispatchBelowADInplaceOrView below;
      collective->run();
    } catch (...) {
      error = std::current_exception();
    }
    collective->run = nullptr;
    lock.lock();
    queue_.pop_front();
    collective->error = error;
    collective->done = true;
    changed_.notify_all();
    if (collective->future) {  // callbacks may wait for other collectives
      std::thread(complete, collective->future, collective->out, error, collective->device).detach();
    }
  }
}

Nccl::Work Nccl::launch(c10d::OpType kind, Tensors out, std::function<void()> run) {
  auto self = c10::intrusive_ptr<Nccl>::unsafe_reclaim_from_nonowning(this);  // until it has run
  auto ordered = [self, before = owed_by_stream(), run = std::move(run)] {
    for (auto& late : before) late->finish();
    run();
  };
  return c10::make_intrusive<CollectiveWork>(kind, thread_.launch(ordered), std::move(out));
}

// Refuse what NCCL refuses.
void Nccl::check(const Tensors& tensors) {
  for (const auto& tensor : tensors) {
    TORCH_CHECK(tensor.is_cuda() && tensor.layout() == at::kStrided, "Tensors must be CUDA and dense");
    TORCH_CHECK(tensor.is_contiguous(), "Tensors must be contiguous");
    TORCH_CHECK(tensor.device().index() == current_device(), "a collective on ", tensor.device(),
                " while the current device is cuda:", static_cast<int>(current_device()));
  }
}

// Exchange devices at the group's first collective, as NCCL does to build its communicator.
void Nccl::meet() {
  if (met_) return;
  met_ = true;
  auto key = [](int rank) { return "device/" + std::to_string(rank); };
  store_->set(key(rank_), std::to_string(current_device()));
  for (int rank = 0; rank < size_; rank++) {
    TORCH_CHECK(store_->get_to_str(key(rank)) != std::to_string(current_device()) || rank == rank_,
                "Duplicate GPU detected : rank ", rank_, " and rank ", rank, " both on CUDA device ",
                static_cast<int>(current_device()));
  }
}

at::Tensor Nccl::sum(const at::Tensor& in, c10d::ReduceOp op) {
  auto value = read(in).view({-1});
  bool mean = op == c10d::ReduceOp::AVG;
  if (op == c10d::ReduceOp::PREMUL_SUM) {
    value.mul_(reinterpret_cast<c10d::NCCLPreMulSumSupplement*>(op.supplement_.get())->double_factor);
  }
  c10d::AllreduceOptions options;
  options.reduceOp = mean || op == c10d::ReduceOp::PREMUL_SUM ? c10d::ReduceOp(c10d::ReduceOp::SUM) : op;
  Tensors values{value};
  gloo_->allreduce(values, options)->wait();
  return mean ? value.div_(size_) : value;
}

Nccl::Work Nccl::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  check(tensors);
  meet();
  return launch(c10d::OpType::ALLREDUCE, tensors, [this, tensors, op = options.reduceOp] {
    for (const auto& tensor : tensors) write(tensor, sum(tensor, op));
  });
}

Nccl::Work Nccl::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  return allreduce(tensors, options);
}

Nccl::Work Nccl::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  check(tensors);
  meet();
  return launch(c10d::OpType::BROADCAST, tensors, [this, tensor = tensors[0], options] {
    Tensors values{read(tensor).view({-1})};
    gloo_->broadcast(values, options)->wait();
    write(tensor, values[0]);
  });
}

Nccl::Work Nccl::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  check(tensors);
  meet();
  return launch(c10d::OpType::REDUCE, tensors, [this, tensor = tensors[0], options] {
    auto value = sum(tensor, options.reduceOp);
    if (options.rootRank == rank_) write(tensor, value);
  });
}

Nccl::Work Nccl::_reduce_scatter_base(at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions& options) {
  check({out, in});
  meet();
  TORCH_CHECK(in.numel() == out.numel() * size_ && in.dtype() == out.dtype(), "reduce-scatter of unequal shards");
  return launch(c10d::OpType::_REDUCE_SCATTER_BASE, {out}, [this, out, in, op = options.reduceOp] {
    write(out, sum(in, op).narrow(0, rank_ * out.numel(), out.numel()));
  });
}

void Nccl::gather_into(const at::Tensor& out, const at::Tensor& in) {
  auto value = read(in).view({-1});
  std::vector<Tensors> all{at::empty({size_, value.numel()}, value.options()).unbind()};
  Tensors mine{value};
  gloo_->allgather(all, mine)->wait();
  write(out, at::stack(all[0]));
}

Nccl::Work Nccl::_allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions&) {
  check({out, in});
  meet();
  return launch(c10d::OpType::_ALLGATHER_BASE, {out}, [this, out, in] { gather_into(out, in); });
}

Nccl::Work Nccl::allgather_into_tensor_coalesced(Tensors& outs, Tensors& ins, const c10d::AllgatherOptions&) {
  check(outs);
  check(ins);
  meet();
  return launch(c10d::OpType::COALESCED, outs, [this, outs, ins] {
    for (size_t i = 0; i < outs.size(); i++) gather_into(outs[i], ins[i]);
  });
}

Nccl::Work Nccl::allgather(std::vector<Tensors>& outs, Tensors& ins, const c10d::AllgatherOptions&) {
  check(outs[0]);
  check(ins);
  meet();
  return launch(c10d::OpType::ALLGATHER, outs[0], [this, out = outs[0], in = ins[0]] {
    std::vector<Tensors> all(1);
    for (const auto& tensor : out) all[0].push_back(at::empty_like(on_host(tensor)));
    Tensors mine{read(in)};
    gloo_->allgather(all, mine)->wait();
    for (size_t i = 0; i < out.size(); i++) write(out[i], all[0][i]);
  });
}

Nccl::Work Nccl::gather(std::vector<Tensors>& outs, Tensors& ins, const c10d::GatherOptions& options) {
  auto out = outs.empty() ? Tensors{} : outs[0];
  check(out);
  check(ins);
  meet();
  return launch(c10d::OpType::GATHER, out, [this, out, in = ins[0], options] {
    std::vector<Tensors> all(out.empty() ? 0 : 1);
    for (const auto& tensor : out) all[0].push_back(at::empty_like(on_host(tensor)));
    Tensors mine{read(in)};
    gloo_->gather(all, mine, options)->wait();
    for (size_t i = 0; i < out.size(); i++) write(out[i], all[0][i]);
  });
}

Nccl::Work Nccl::scatter(Tensors& outs, std::vector<Tensors>& ins, const c10d::ScatterOptions& options) {
  auto in = ins.empty() ? Tensors{} : ins[0];
  check(outs);
  check(in);
  meet();
  return launch(c10d::OpType::SCATTER, outs, [this, out = outs[0], in, options] {
    std::vector<Tensors> all(in.empty() ? 0 : 1);
    for (const auto& tensor : in) all[0].push_back(read(tensor));
    Tensors mine{at::empty_like(on_host(out))};
    gloo_->scatter(mine, all, options)->wait();
    write(out, mine[0]);
  });
}

Nccl::Work Nccl::send(Tensors& tensors, int to, int tag) {
  check(tensors);
  return launch(c10d::OpType::SEND, {}, [this, tensor = tensors[0], to, tag] {
    Tensors values{read(tensor)};
    gloo_->send(values, to, tag)->wait();
  });
}

Nccl::Work Nccl::recv(Tensors& tensors, int from, int tag) {
  check(tensors);
  return launch(c10d::OpType::RECV, tensors, [this, tensor = tensors[0], from, tag] {
    Tensors values{at::empty_like(on_host(tensor))};
    gloo_->recv(values, from, tag)->wait();
    write(tensor, values[0]);
  });
}

Nccl::Work Nccl::barrier(const c10d::BarrierOptions&) {
  return launch(c10d::OpType::BARRIER, {}, [this] { gloo_->barrier()->wait(); });
}

}  // namespace simulated
