// A thread pool whose threads spin between the parts of a step and sleep between steps.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace hw {

// One spinning wait. The length of a pause instruction varies tenfold between CPUs, so a clock decides when to stop; it is
// read every 64 pauses, which costs a short wait nothing.
class SpinWait {
 public:
  explicit SpinWait(int microseconds) : limit_(microseconds) {}
  // Pauses once; true when the limit has passed.
  bool pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
    if (++pauses_ % 64) return over_;
    const auto now = std::chrono::steady_clock::now();
    if (pauses_ == 64) began_ = now;
    return over_ = over_ || now - began_ >= limit_;
  }
  // Pauses, and yields the core once the limit has passed: with more threads than cores, the others need it.
  void pause_or_yield() {
    if (pause()) std::this_thread::yield();
  }

 private:
  const std::chrono::microseconds limit_;
  std::chrono::steady_clock::time_point began_{};
  unsigned pauses_ = 0;
  bool over_ = false;
};

constexpr int BUSY_US = 50;    // spin time before a thread that waits within a step yields
constexpr int AWAKE_US = 200;  // spin time before an idle thread sleeps

// All threads of a pool pass it together.
class Barrier {
 public:
  explicit Barrier(int count) : count_(count) {}
  void wait() {
    if (count_ == 1) return;
    unsigned now = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == count_ - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      phase_.store(now + 1, std::memory_order_release);
      return;
    }
    for (SpinWait wait(BUSY_US); phase_.load(std::memory_order_acquire) == now;) wait.pause_or_yield();
  }

 private:
  const int count_;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<unsigned> phase_{0};
};

class ThreadPool {
 public:
  explicit ThreadPool(int count) : barrier(count), count_(count) {
    try {
      for (int i = 1; i < count; i++) threads_.emplace_back([this, i] { serve(i); });
    } catch (...) {
      stop();
      throw;
    }
  }
  ~ThreadPool() { stop(); }
  int count() const { return count_; }

  // Runs work(i) on every thread, the caller being thread 0; returns when all are done.
  void run(const std::function<void(int)>& work) {
    if (count_ > 1) {
      work_ = &work;
      pending_.store(count_ - 1, std::memory_order_relaxed);
      {
        std::lock_guard<std::mutex> hold(mutex_);
        job_.fetch_add(1, std::memory_order_release);
      }
      if (asleep_.load(std::memory_order_acquire)) wake_.notify_all();
    }
    work(0);
    for (SpinWait wait(BUSY_US); count_ > 1 && pending_.load(std::memory_order_acquire);) wait.pause_or_yield();
  }

  Barrier barrier;

 private:
  void serve(int thread) {
    unsigned seen = 0;
    for (;;) {
      for (SpinWait wait(AWAKE_US); job_.load(std::memory_order_acquire) == seen && !wait.pause();) {}
      if (job_.load(std::memory_order_acquire) == seen) {
        std::unique_lock<std::mutex> hold(mutex_);
        asleep_.fetch_add(1, std::memory_order_acq_rel);
        wake_.wait(hold, [&] { return job_.load(std::memory_order_acquire) != seen; });
        asleep_.fetch_sub(1, std::memory_order_acq_rel);
      }
      seen++;
      if (stopping_.load(std::memory_order_acquire)) return;
      (*work_)(thread);
      pending_.fetch_sub(1, std::memory_order_release);
    }
  }

  void stop() {
    stopping_.store(true, std::memory_order_release);
    {
      std::lock_guard<std::mutex> hold(mutex_);
      job_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    for (auto& t : threads_) t.join();
    threads_.clear();
  }

  const int count_;
  std::vector<std::thread> threads_;
  const std::function<void(int)>* work_ = nullptr;
  alignas(64) std::atomic<unsigned> job_{0};
  alignas(64) std::atomic<int> pending_{0};
  std::atomic<int> asleep_{0};
  std::atomic<bool> stopping_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
};

}  // namespace hw
