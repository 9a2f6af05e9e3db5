// Streams, events and memory of a GPU that is not there: what is ordered behind what, what is not done yet, and races.
//
// Every command of a stream has a number, its tick. A clock says, for each stream, up to which tick everything is
// ordered before: streams and events have one, and so has the host. A command runs at once, in the thread that issues
// it, unless its stream is behind a job that is not done (a batch of NCCL's whose peer has not come): then it waits in
// a queue, and the streams and events behind it wait, too. Nothing here knows torch.
#pragma once
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

extern "C" {  // of Python: whoever blocks here lets other threads go on
int PyGILState_Check(void);
void* PyEval_SaveThread(void);
void PyEval_RestoreThread(void*);
}

namespace standin {

using Clock = std::map<size_t, uint64_t>;  // stream → tick
struct Job { bool done = false; };
using Jobs = std::set<std::shared_ptr<Job>>;
struct Moment { Clock clock; Jobs unfinished; double host_ms = 0; };  // a point in a stream, which an event records
struct Stream : Moment { std::string name; int64_t num_commands = 0; };
struct Span { uintptr_t begin, end; bool write; };  // of memory, which a command reads or writes
struct Access { Span span; size_t stream; uint64_t tick; std::string by; };
struct Block { uintptr_t end; size_t stream; std::vector<Access> accesses; std::set<size_t> recorded; };
struct Queued { Jobs after; std::shared_ptr<Job> job; std::function<void()> run; };

// The first ones are never destroyed, because a thread waits there when the process ends.
inline auto& mutex = *new std::recursive_mutex;  // of everything below; nobody who holds it asks for Python's lock
inline auto& changed = *new std::condition_variable_any;
inline auto& queued = *new std::vector<Queued>;
inline std::vector<Stream> streams;
inline std::map<std::pair<int, int64_t>, size_t> stream_numbers;  // (device, torch's id) → index
inline std::map<uintptr_t, Block> blocks;                         // by their first byte
inline std::map<std::string, int64_t> commands, counters;
inline std::vector<std::string> races;
inline std::string failure;  // of a command, which whoever waits on the host learns
inline Clock host;           // what the host has waited for
inline bool detecting = false, host_waits_order = true;
inline uint64_t late_after = UINT64_MAX;  // later commands are done, for who asks, only once somebody has waited
inline uint64_t last_tick = 0;
inline void (*on_host_wait)(const char*) = nullptr;  // Python's, which looks for the line that waits

using Lock = std::unique_lock<std::recursive_mutex>;

inline void join(Clock& clock, const Clock& other) {
  for (auto& [stream, tick] : other) clock[stream] = std::max(clock[stream], tick);
}
inline bool ordered(const Access& access, const Clock& before) {
  auto found = before.find(access.stream);
  return found != before.end() && found->second >= access.tick;
}
inline bool finished(Jobs& jobs) {
  std::erase_if(jobs, [](auto& job) { return job->done; });
  return jobs.empty();
}

inline size_t stream_number(int device, int64_t id) {
  Lock lock(mutex);
  auto [found, is_new] = stream_numbers.try_emplace({device, id}, streams.size());
  if (is_new) {
    streams.emplace_back();
    streams.back().name = "device " + std::to_string(device) + (id ? ", stream " + std::to_string(id) : "");
  }
  return found->second;
}

// ---- waiting

inline Moment moment_of(size_t stream) {
  Lock lock(mutex);
  if (host_waits_order) join(streams[stream].clock, host);
  return streams[stream];
}
inline void wait_on_stream(size_t stream, const Moment& moment) {
  Lock lock(mutex);
  join(streams[stream].clock, moment.clock);
  for (auto& job : moment.unfinished)
    if (!job->done) streams[stream].unfinished.insert(job);
}
inline void block_until_finished(Jobs jobs) {  // without a word about order
  {
    Lock lock(mutex);
    if (finished(jobs)) return;
  }
  void* python = PyGILState_Check() ? PyEval_SaveThread() : nullptr;
  {
    Lock lock(mutex);
    changed.wait(lock, [&] { return finished(jobs); });
  }
  if (python) PyEval_RestoreThread(python);
}
inline void wait_on_host(const char* kind, const Moment& moment) {
  if (on_host_wait) on_host_wait(kind);
  block_until_finished(moment.unfinished);
  Lock lock(mutex);
  join(host, moment.clock);
  if (!failure.empty()) throw std::runtime_error(std::exchange(failure, ""));
}
inline bool query(Moment& moment) {
  Lock lock(mutex);
  counters["event queries"]++;
  if (!finished(moment.unfinished)) return false;
  for (auto& [stream, tick] : moment.clock)
    if (tick > late_after && host[stream] < tick) return false;
  join(host, moment.clock);
  return true;
}

// ---- races

inline std::map<uintptr_t, Block>::iterator block_at(uintptr_t byte) {
  auto after = blocks.upper_bound(byte);
  if (after == blocks.begin()) return blocks.end();
  auto found = std::prev(after);
  return byte < found->second.end ? found : blocks.end();
}
inline std::string described(const Access& access) {
  return std::string(access.span.write ? "write by " : "read by ") + access.by + " on " + streams[access.stream].name;
}
inline void report(const std::string& what, const Access& first, const std::string& second, const Block& block) {
  auto where = ", in memory of " + streams[block.stream].name;
  if (races.size() < 2000) races.push_back(what + ": " + second + " after " + described(first) + where);
}
inline void touch(const Access& access) {
  auto [begin, end, write] = access.span;
  auto found = block_at(begin);
  if (!detecting || begin >= end || found == blocks.end()) return;
  auto& [block_end, stream, accesses, recorded] = found->second;
  const Clock& before = streams[access.stream].clock;
  for (auto& other : accesses)
    if (begin < other.span.end && other.span.begin < end && (write || other.span.write) && other.tick != access.tick &&
        !ordered(other, before))
      report("race", other, described(access), found->second);
  std::erase_if(accesses, [&](auto& other) {  // whoever races with them races with this one, too
    return begin <= other.span.begin && other.span.end <= end && ordered(other, before) &&
           (write || (!other.span.write && other.stream == access.stream));
  });
  accesses.push_back(access);
}
inline void allocated(uintptr_t begin, size_t bytes, size_t stream) {
  Lock lock(mutex);
  blocks[begin] = Block{begin + std::max<size_t>(bytes, 1), stream, {}, {}};
}
// The caching allocator gives freed memory to the stream that it was allocated on, at once. Another stream's commands
// must be ordered before that stream's next one, or the allocator must know of them (`record_stream`).
inline void freed(uintptr_t begin) {
  Lock lock(mutex);
  auto found = blocks.find(begin);
  if (found == blocks.end()) return;
  auto& block = found->second;
  if (detecting) {
    Clock next = moment_of(block.stream).clock;
    for (auto& access : block.accesses)
      if (access.stream != block.stream && !ordered(access, next) && !block.recorded.count(access.stream))
        report("freed too early", access, "free", block);
  }
  blocks.erase(found);
}

// ---- commands

inline void tick(size_t stream, const std::string& name, const std::vector<Span>& spans) {
  if (host_waits_order) join(streams[stream].clock, host);
  streams[stream].clock[stream] = ++last_tick;
  streams[stream].num_commands++;
  commands[name]++;
  for (bool write : {false, true})
    for (auto& span : spans)
      if (span.write == write) touch({span, stream, last_tick, name});
}
inline void run_queue() {  // in a thread of its own, for ever
  Lock lock(mutex);
  while (true) {
    auto ready = std::find_if(queued.begin(), queued.end(), [](auto& each) { return finished(each.after); });
    if (ready == queued.end()) {
      changed.wait(lock);
      continue;
    }
    auto [after, job, run] = std::move(*ready);
    queued.erase(ready);
    lock.unlock();
    std::string said;
    try {
      run();
    } catch (const std::exception& error) {
      said = error.what();
    }
    run = nullptr;  // frees what it held
    lock.lock();
    if (failure.empty()) failure = said;
    job->done = true;
    changed.notify_all();
  }
}
enum class Behind { queue, block };  // where a command waits if its stream is behind an unfinished job
inline void command(size_t stream, const std::string& name, const std::vector<Span>& spans, Behind behind,
                    std::function<void()> run) {
  Jobs before;
  {
    Lock lock(mutex);
    tick(stream, name, spans);
    if (!finished(streams[stream].unfinished) && behind == Behind::queue) {
      static bool started = (std::thread(run_queue).detach(), true);
      (void)started;
      auto job = std::make_shared<Job>();
      queued.push_back({streams[stream].unfinished, job, std::move(run)});
      streams[stream].unfinished = {job};
      changed.notify_all();
      return;
    }
    before = streams[stream].unfinished;
  }
  block_until_finished(before);
  run();
}

}  // namespace standin
