// Drives the real CUDA caching allocator of one torch release over the fake runtime, one command per line.
//
// The protocol is described in README.md. A script begins with `init` and ends with `end`; for each script
// this process forks, so that every script meets an allocator that has never been used, and a crash of the
// library costs one answer (`died <signal>`) and not the session.

#include <c10/cuda/CUDAAllocatorConfig.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <sys/wait.h>
#include <unistd.h>

#include <ctime>
#include <cinttypes>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <string>
#include <unordered_map>
#include <vector>

#include "fake.h"

// Exported by libc10_cuda, declared in no header: tells c10 that the device has a context.
namespace c10::cuda::_internal {
C10_CUDA_API void setHasPrimaryContext(bool (*function)(c10::DeviceIndex));
}

namespace {

namespace ca = c10::cuda::CUDACachingAllocator;
using Pool = c10::MempoolId_t;

std::unordered_map<uint64_t, void*> blocks;  // the script's names for what it allocated
std::string trace;                           // entries since the last time they were asked for
std::string last_error;
std::vector<int64_t> shown;  // statistics as last shown by `every`
int every = 0;
bool tracing = true;

// ---- lines in and out

std::string input, output;
size_t input_at = 0;

void flush() {
  for (size_t at = 0; at < output.size();) {
    ssize_t n = write(1, output.data() + at, output.size() - at);
    if (n <= 0) _exit(1);
    at += size_t(n);
  }
  output.clear();
}

// The next line, or false at the end of input. Answers are written out before waiting for input.
bool read_line(std::string& line) {
  for (;;) {
    size_t stop = input.find('\n', input_at);
    if (stop != std::string::npos) {
      line.assign(input, input_at, stop - input_at);
      input_at = stop + 1;
      return true;
    }
    input.erase(0, input_at);
    input_at = 0;
    flush();
    char buffer[65536];
    ssize_t n = read(0, buffer, sizeof buffer);
    if (n <= 0) return false;
    input.append(buffer, size_t(n));
  }
}

void put(std::string& to, const char* format, ...) {
  char buffer[256];
  va_list arguments;
  va_start(arguments, format);
  int n = vsnprintf(buffer, sizeof buffer, format, arguments);
  va_end(arguments);
  to.append(buffer, size_t(n));
}

std::string one_line(const std::string& text) {
  std::string result;
  for (char c : text) {
    if (c == '\n')
      result += "\\n";
    else
      result += c;
  }
  return result;
}

// ---- statistics, in the order of the README

template <typename F>
void walk_stats(F&& visit) {
  auto stats = ca::getDeviceStats(0);
  auto four = [&](const std::string& name, const auto& s) {
    visit(name, ".current", s.current);
    visit(name, ".peak", s.peak);
    visit(name, ".allocated", s.allocated);
    visit(name, ".freed", s.freed);
  };
  static const std::string kinds[] = {".all", ".small_pool", ".large_pool"};
  auto twelve = [&](const std::string& name, const auto& array) {
    for (size_t i = 0; i < 3; i++) four(name + kinds[i], array[i]);
  };
  twelve("allocation", stats.allocation);
  twelve("segment", stats.segment);
  twelve("active", stats.active);
  twelve("inactive_split", stats.inactive_split);
  twelve("allocated_bytes", stats.allocated_bytes);
  twelve("reserved_bytes", stats.reserved_bytes);
  twelve("active_bytes", stats.active_bytes);
  twelve("inactive_split_bytes", stats.inactive_split_bytes);
  twelve("requested_bytes", stats.requested_bytes);
  four("oversize_allocations", stats.oversize_allocations);
  four("oversize_segments", stats.oversize_segments);
  visit("num_alloc_retries", "", stats.num_alloc_retries);
  visit("num_ooms", "", stats.num_ooms);
  visit("max_split_size", "", stats.max_split_size);
  visit("num_sync_all_streams", "", stats.num_sync_all_streams);
  visit("num_device_alloc", "", stats.num_device_alloc);
  visit("num_device_free", "", stats.num_device_free);
  auto newer = [&](auto& s) {
    if constexpr (requires { s.num_oom_rejections; }) visit("num_oom_rejections", "", s.num_oom_rejections);
  };
  newer(stats);
}

std::string pool_stats() {
  std::string text;
  auto stats = ca::getDeviceStats(0);
  auto newer = [&](auto& s) {
    if constexpr (requires { s.reserved_bytes_by_private_pools; }) {
      for (auto& [id, array] : s.reserved_bytes_by_private_pools) {
        put(text, " %llu:%llu", id.first, id.second);
        for (auto& x : array)
          put(text, ",%" PRId64 ",%" PRId64 ",%" PRId64 ",%" PRId64, x.current, x.peak, x.allocated, x.freed);
      }
    }
  };
  newer(stats);
  return text.empty() ? "none" : text.substr(1);
}

// Cheap form for use after every operation: `index=value` of those that changed.
void changed_stats(std::string& to) {
  size_t i = 0;
  const char* separator = "";
  auto stats = ca::getDeviceStats(0);
  auto visit = [&](int64_t value) {
    if (shown.size() <= i) shown.push_back(0);
    if (shown[i] != value) {
      shown[i] = value;
      put(to, "%s%zu=%" PRId64, separator, i, value);
      separator = ",";
    }
    i++;
  };
  auto four = [&](const auto& s) { visit(s.current), visit(s.peak), visit(s.allocated), visit(s.freed); };
  for (auto* array : {&stats.allocation, &stats.segment, &stats.active, &stats.inactive_split, &stats.allocated_bytes,
                      &stats.reserved_bytes, &stats.active_bytes, &stats.inactive_split_bytes, &stats.requested_bytes})
    for (auto& s : *array) four(s);
  four(stats.oversize_allocations);
  four(stats.oversize_segments);
  visit(stats.num_alloc_retries), visit(stats.num_ooms), visit(stats.max_split_size);
  visit(stats.num_sync_all_streams), visit(stats.num_device_alloc), visit(stats.num_device_free);
  auto newer = [&](auto& s) {
    if constexpr (requires { s.num_oom_rejections; }) visit(s.num_oom_rejections);
  };
  newer(stats);
}

// ---- trace and snapshot

void entry_text(std::string& to, const ca::TraceEntry& e) {
  static const char* names[] = {"alloc",       "free_requested", "free_completed", "segment_alloc", "segment_free",
                                "segment_map", "segment_unmap",  "snapshot",       "oom",           "annotate"};
  if (!to.empty()) to += ' ';
  put(to, "%s:%#zx:%zu:%zu:%llu:%llu", names[e.action_], size_t(e.addr_), size_t(e.size_),
      reinterpret_cast<size_t>(e.stream_), e.mempool_.first, e.mempool_.second);
}

std::string snapshot_text() {
  auto shot = ca::snapshot();
  auto& c = shot.config_metadata;
  std::string text;
  put(text, "cfg %" PRId64 " %.17g %d", int64_t(c.max_split_size), c.garbage_collection_threshold,
      int(c.expandable_segments));
  for (size_t v : c.roundup_power2_divisions) put(text, " %zu", v);
  for (auto& s : shot.segments) {
    int64_t age = -1;
    auto newer = [&](auto& x) {
      if constexpr (requires { x.registration_counter; }) age = x.registration_counter;
    };
    newer(s);
    put(text, ";seg %#zx %zu %zu %zu %zu %zu %d %d %llu:%llu %" PRId64, size_t(s.address), size_t(s.total_size),
        size_t(s.allocated_size), size_t(s.active_size), size_t(s.requested_size), reinterpret_cast<size_t>(s.stream),
        int(s.is_large), int(s.is_expandable), s.owner_private_pool_id.first, s.owner_private_pool_id.second, age);
    for (auto& b : s.blocks)
      put(text, " %c,%zu,%zu,%d", b.allocated ? 'a' : b.active ? 'p' : 'i', size_t(b.size), size_t(b.requested_size),
          int(b.gc_counter));
  }
  return text;
}

// The ring buffer of history proper (not the tracker), oldest first as the library returns it.
std::string history_text() {
  auto shot = ca::snapshot();
  std::string text;
  for (auto& e : shot.device_traces.at(0)) entry_text(text, e);
  return text.empty() ? "none" : text;
}

template <typename Allocator>
void record_history(Allocator* allocator, bool on, size_t entries, bool clear) {
  auto when = ca::RecordContext::NEVER;
  const std::vector<std::string> skip;
  if constexpr (requires { allocator->recordHistory(on, nullptr, entries, when, clear, skip); })
    allocator->recordHistory(on, nullptr, entries, when, clear, skip);
  else
    allocator->recordHistory(on, nullptr, entries, when, clear);
}

template <typename Allocator>
void mark_capture(Allocator* allocator, bool begin) {
  if constexpr (requires { allocator->markCaptureBegin(0); })
    begin ? allocator->markCaptureBegin(0) : allocator->markCaptureEnd(0);
}

template <typename Allocator>
bool set_no_split(Allocator* allocator, Pool id) {
  if constexpr (requires { allocator->setNoSplit(0, id); }) return allocator->setNoSplit(0, id), true;
  return false;
}

// Up to 2.10 the flag could only be set.
template <typename Allocator>
bool set_use_on_oom(Allocator* allocator, Pool id, bool value) {
  if constexpr (requires { allocator->setUseOnOOM(0, id, value); })
    return allocator->setUseOnOOM(0, id, value), true;
  else
    return value && (allocator->setUseOnOOM(0, id), true);
}

// ---- timing

struct Xorshift {
  uint64_t state = 0x9E3779B97F4A7C15u;
  uint64_t next() {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state;
  }
  // Roughly log-uniform over 512 B .. 4 MiB, in integers only so that any language repeats it.
  size_t size() {
    uint64_t r = next();
    uint64_t exponent = 9 + (r >> 48) % 13;
    return (uint64_t(1) << exponent) + (r & ((uint64_t(1) << exponent) - 1));
  }
};

// Time this thread has spent on a processor: what else the machine does counts less than with a wall clock.
double cpu_nanoseconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return double(now.tv_sec) * 1e9 + double(now.tv_nsec);
}

// Nanoseconds per operation, best of five repetitions.
template <typename F>
double best(size_t iterations, F&& body) {
  double result = 1e300;
  for (int round = 0; round < 5; round++) {
    double began = cpu_nanoseconds();
    for (size_t i = 0; i < iterations; i++) body();
    result = std::min(result, (cpu_nanoseconds() - began) / double(iterations));
  }
  return result;
}

std::string bench(std::istringstream& words) {
  std::string kind, text;
  size_t size = 0, iterations = 0;
  words >> kind >> size >> iterations;
  auto* a = ca::get();
  if (tracing) {
    text = "error protocol: timing needs `init trace=0`, or it would time the tracing";
  } else if (kind == "pair") {
    double ns = best(iterations, [&] { a->raw_delete(a->raw_alloc_with_stream(size, nullptr)); });
    put(text, "%.1f ns/pair", ns);
  } else if (kind == "replace") {
    Xorshift random;
    std::vector<void*> live(size);
    for (auto& p : live) p = a->raw_alloc_with_stream(random.size(), nullptr);
    double ns = best(iterations, [&] {
      void*& slot = live[(random.next() >> 32) % size];
      a->raw_delete(slot);
      slot = a->raw_alloc_with_stream(random.size(), nullptr);
    });
    for (auto& p : live) a->raw_delete(p);
    put(text, "%.1f ns/replacement", ns);
  } else {
    text = "error protocol: bench pair BYTES TIMES | bench replace LIVE TIMES";
  }
  return text;
}

// ---- commands

uint64_t number(std::istringstream& words) {
  std::string word;
  words >> word;
  return strtoull(word.c_str(), nullptr, 0);
}

void* stream(std::istringstream& words) { return reinterpret_cast<void*>(number(words)); }
cudaStream_t handle(void* s) { return static_cast<cudaStream_t>(s); }

// `7` is the pool (0, 7) of a MemPool object, `7:0` the pool of a graph capture.
Pool pool(std::istringstream& words) {
  std::string word;
  words >> word;
  size_t colon = word.find(':');
  if (colon == std::string::npos) return {0, strtoull(word.c_str(), nullptr, 0)};
  return {strtoull(word.c_str(), nullptr, 0), strtoull(word.c_str() + colon + 1, nullptr, 0)};
}

std::string rest(std::istringstream& words) {
  std::string text;
  std::getline(words >> std::ws, text);
  return text;
}

std::string init(std::istringstream& words) {
  std::string word;
  while (words >> word) {
    size_t equals = word.find('=');
    std::string key = word.substr(0, equals), value = equals == std::string::npos ? "" : word.substr(equals + 1);
    if (key == "total")
      fake_set_total(strtoull(value.c_str(), nullptr, 0));
    else if (key == "conf")
      value.empty() ? unsetenv("PYTORCH_CUDA_ALLOC_CONF") : setenv("PYTORCH_CUDA_ALLOC_CONF", value.c_str(), 1);
    else if (key == "trace")
      tracing = value != "0";
    else
      return "error protocol: unknown init key " + key;
  }
  c10::cuda::_internal::setHasPrimaryContext([](c10::DeviceIndex) { return true; });
  ca::init(1);
  // Reading the snapshot parses the settings now; the tracker comes after it so that a trace starts empty.
  ca::snapshot();
  if (tracing) ca::get()->attachAllocatorTraceTracker([](const ca::TraceEntry& e) { entry_text(trace, e); });
  return "ok";
}

std::string driver_calls() {
  auto& c = *fake_calls();
  std::string text;
  put(text, "used=%zu malloc=%" PRIu64 " malloc_oom=%" PRIu64 " free=%" PRIu64 " reserve=%" PRIu64 " unreserve=%" PRIu64,
      fake_used(), c.malloc_ok, c.malloc_oom, c.free, c.reserve, c.unreserve);
  put(text, " create=%" PRIu64 " create_oom=%" PRIu64 " release=%" PRIu64 " map=%" PRIu64 " unmap=%" PRIu64,
      c.create_ok, c.create_oom, c.release, c.map, c.unmap);
  put(text, " event_record=%" PRIu64 " event_sync=%" PRIu64, c.event_record, c.event_sync);
  return text;
}

std::string run(const std::string& line) {
  std::istringstream words(line);
  std::string op;
  words >> op;
  if (op == "init") return init(words);
  if (op == "malloc") {
    uint64_t id = number(words);
    size_t bytes = number(words);
    void* p = ca::raw_alloc_with_stream(bytes, handle(stream(words)));
    blocks[id] = p;
    std::string text;
    put(text, "%#zx", reinterpret_cast<size_t>(p));
    return text;
  }
  if (op == "free") {
    auto it = blocks.find(number(words));
    if (it == blocks.end()) return "error protocol: no such block";
    void* p = it->second;
    blocks.erase(it);
    ca::raw_delete(p);
    return "ok";
  }
  if (op == "record_stream") {
    auto it = blocks.find(number(words));
    if (it == blocks.end()) return "error protocol: no such block";
    // The library recognises its own memory by the deleter; the pointer stays ours.
    c10::DataPtr p(it->second, it->second, ca::get()->raw_deleter(), c10::Device(c10::kCUDA, 0));
    ca::recordStream(p, c10::cuda::getStreamFromExternal(handle(stream(words)), 0));
    p.release_context();
    return "ok";
  }
  if (op == "busy") return fake_busy(stream(words)), "ok";
  if (op == "idle") return fake_idle(stream(words)), "ok";
  if (op == "empty_cache") return ca::emptyCache(), "ok";
  if (op == "settings") return ca::setAllocatorSettings(rest(words)), "ok";
  if (op == "fraction") return ca::setMemoryFraction(strtod(rest(words).c_str(), nullptr), 0), "ok";
  if (op == "pool_create") {
    Pool id = pool(words);
    ca::createOrIncrefPool(0, id);
    for (std::string flag; words >> flag;) {
      bool known = flag == "use_on_oom" ? set_use_on_oom(ca::get(), id, true)
                                        : flag == "no_split" && set_no_split(ca::get(), id);
      if (!known) return "error protocol: pool flag " + flag + " is unknown to this release";
    }
    return "ok";
  }
  if (op == "pool_use_on_oom") {
    Pool id = pool(words);
    if (!set_use_on_oom(ca::get(), id, number(words) != 0)) return "error protocol: this release cannot unset it";
    return "ok";
  }
  if (op == "pool_begin") return ca::beginAllocateToPool(0, pool(words), [](cudaStream_t) { return true; }), "ok";
  if (op == "pool_end") return ca::endAllocateToPool(0, pool(words)), "ok";
  if (op == "pool_release") return ca::releasePool(0, pool(words)), "ok";
  if (op == "pool_empty") return ca::emptyCache(pool(words)), "ok";
  if (op == "pool_use_count") return std::to_string(ca::getPoolUseCount(0, pool(words)));
  if (op == "pool_stats") return pool_stats();
  if (op == "capture_begin") {
    void* s = stream(words);
    uint64_t id = number(words);
    return fake_capture(s, id ? id : 1), mark_capture(ca::get(), true), "ok";
  }
  if (op == "capture_end") return fake_capture(stream(words), 0), mark_capture(ca::get(), false), "ok";
  if (op == "reset_peak") return ca::resetPeakStats(0), "ok";
  if (op == "reset_accumulated") return ca::resetAccumulatedStats(0), "ok";
  if (op == "stats") {
    std::string text;
    walk_stats([&](const std::string& name, const char* part, int64_t value) {
      put(text, "%s%s%s=%" PRId64, text.empty() ? "" : " ", name.c_str(), part, value);
    });
    return text;
  }
  if (op == "snapshot") return snapshot_text();
  if (op == "trace_since") {
    std::string text = trace.empty() ? "none" : trace;
    return trace.clear(), text;
  }
  if (op == "history") {
    uint64_t entries = number(words);
    std::string clear = rest(words);
    return record_history(ca::get(), entries != 0, entries, clear == "clear"), "ok";
  }
  if (op == "history_show") return history_text();
  if (op == "every") return every = int(number(words)), "ok";
  if (op == "driver_calls") return driver_calls();
  if (op == "last_error") return last_error.empty() ? "none" : last_error;
  if (op == "bench") return bench(words);
  return "error protocol: unknown command " + op;
}

// One command, errors turned into an answer, followed by what `every` asked for.
std::string answer(const std::string& line) {
  std::string text;
  auto failed = [&](const char* kind, const std::string& what) {
    last_error = one_line(what);
    text = std::string("error ") + kind + " " + last_error;
  };
  try {
    text = run(line);
  } catch (const c10::OutOfMemoryError& e) {
    last_error = one_line(e.what_without_backtrace());
    text = "oom";
  } catch (const c10::ValueError& e) {
    failed("ValueError", e.what_without_backtrace());
  } catch (const c10::Error& e) {
    failed("RuntimeError", e.what_without_backtrace());
  } catch (const std::invalid_argument& e) {
    failed("invalid_argument", e.what());
  } catch (const std::out_of_range& e) {
    failed("out_of_range", e.what());
  } catch (const std::exception& e) {
    failed("exception", e.what());
  }
  if (every != 0 && line.compare(0, 5, "every") != 0) {
    text += '|';
    if (every & 1) changed_stats(text);
    text += '|';
    if (every & 2) {
      text += trace;
      trace.clear();
    }
  }
  return text;
}

// The child's life: one script, from `init` to `end`.
void script(std::string line) {
  // After settings that the library refuses it is half made, and crashes if it is used.
  std::string begun = answer(line);
  output += begun + '\n';
  while (read_line(line) && line != "end") output += (begun == "ok" ? answer(line) : begun) + '\n';
  flush();
  _exit(0);
}

}  // namespace

int main() {
  // Segments then ask for no handle type to share between processes, which the fake driver has not.
  setenv("TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC", "0", 1);
  signal(SIGPIPE, SIG_DFL);
  std::string line;
  while (read_line(line)) {
    if (line.compare(0, 4, "init") != 0) {
      output += line.empty() ? "" : "error protocol: a script begins with init\n";
      continue;
    }
    flush();
    pid_t child = fork();
    if (child == 0) script(line);
    // What was already read belongs to the child, which goes on reading; nothing of the next script may be
    // sent before the answer to this one's `end`.
    input.clear();
    input_at = 0;
    int status = 0;
    if (child < 0 || waitpid(child, &status, 0) < 0) return 1;
    if (WIFSIGNALED(status))
      output += "died " + std::to_string(WTERMSIG(status)) + "\n";
    else
      output += "bye\n";
    flush();
  }
  flush();
  return 0;
}
