// A few threads that stay awake between the parts of a step and sleep between steps.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace hw {

// One wait, awake. How long a pause takes varies tenfold between CPUs, so the clock says when it was long enough; it is
// read every 64 pauses, which costs a short wait nothing.
class Wait {
 public:
  explicit Wait(int microseconds) : limit_(microseconds) {}
  // Pauses once; true when the time is over.
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
  // Pauses, and once the time is over lets others have the core: with more threads than cores they are waited for.
  void pause_or_yield() {
    if (pause()) std::this_thread::yield();
  }

 private:
  const std::chrono::microseconds limit_;
  std::chrono::steady_clock::time_point began_{};
  unsigned pauses_ = 0;
  bool over_ = false;
};

constexpr int BUSY = 50;    // microseconds that a member with work to come keeps its core while it waits
constexpr int AWAKE = 200;  // microseconds before a member with no work sleeps

// All members of a team pass it together.
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
    for (Wait wait(BUSY); phase_.load(std::memory_order_acquire) == now;) wait.pause_or_yield();
  }

 private:
  const int count_;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<unsigned> phase_{0};
};

class Team {
 public:
  explicit Team(int count) : barrier(count), count_(count) {
    try {
      for (int i = 1; i < count; i++) threads_.emplace_back([this, i] { serve(i); });
    } catch (...) {
      stop();
      throw;
    }
  }
  ~Team() { stop(); }
  int count() const { return count_; }

  // work(i) on every member, the caller being member 0; returns when all have ended.
  void run(const std::function<void(int)>& work) {
    if (count_ > 1) {
      work_ = &work;
      left_.store(count_ - 1, std::memory_order_relaxed);
      {
        std::lock_guard<std::mutex> hold(mutex_);
        turn_.fetch_add(1, std::memory_order_release);
      }
      if (asleep_.load(std::memory_order_acquire)) wake_.notify_all();
    }
    work(0);
    for (Wait wait(BUSY); count_ > 1 && left_.load(std::memory_order_acquire);) wait.pause_or_yield();
  }

  Barrier barrier;

 private:
  void serve(int member) {
    unsigned seen = 0;
    for (;;) {
      for (Wait wait(AWAKE); turn_.load(std::memory_order_acquire) == seen && !wait.pause();) {}
      if (turn_.load(std::memory_order_acquire) == seen) {
        std::unique_lock<std::mutex> hold(mutex_);
        asleep_.fetch_add(1, std::memory_order_acq_rel);
        wake_.wait(hold, [&] { return turn_.load(std::memory_order_acquire) != seen; });
        asleep_.fetch_sub(1, std::memory_order_acq_rel);
      }
      seen++;
      if (ending_.load(std::memory_order_acquire)) return;
      (*work_)(member);
      left_.fetch_sub(1, std::memory_order_release);
    }
  }

  void stop() {
    ending_.store(true, std::memory_order_release);
    {
      std::lock_guard<std::mutex> hold(mutex_);
      turn_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    for (auto& t : threads_) t.join();
    threads_.clear();
  }

  const int count_;
  std::vector<std::thread> threads_;
  const std::function<void(int)>* work_ = nullptr;
  alignas(64) std::atomic<unsigned> turn_{0};
  alignas(64) std::atomic<int> left_{0};
  std::atomic<int> asleep_{0};
  std::atomic<bool> ending_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
};

}  // namespace hw
