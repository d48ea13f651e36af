// A fake CUDA runtime (and the few driver functions behind it): one device, no GPU, fully deterministic.
//
// torch's allocator library links to libcudart by soname and symbol version; build.py gives this file the same
// ones. Memory is only addresses and a byte count, nothing is ever touched. Placement and event rules below
// are a contract: the Rust null device follows the same, so that addresses can be compared one to one.
//
// Placement of cudaMalloc: sizes round up to 2 MiB. Address space is taken in chunks of roundup(size, 32 MiB);
// a new chunk takes the highest free range below TOP that holds it. A request goes to the lowest address that
// fits inside one existing chunk, else to a new chunk. A chunk that becomes empty is given back.
// Placement of reservations: lowest free range from VA_BASE on, sizes rounded up to 2 MiB.
// Memory in use: cudaMalloc sizes (rounded) plus handles; a handle counts until it is released and unmapped.
// Events: a stream counts what was recorded on it. Work recorded on a stream that is not busy is complete at
// once, on a busy one when the stream is marked idle, or when an event at or after it is waited for, or the
// stream or device is synchronised. Waiting does not make a busy stream idle.

#include "fake.h"

#include <cstring>
#include <map>
#include <string>
#include <unordered_map>

namespace {

constexpr size_t MIB = size_t(1) << 20;
constexpr size_t UNIT = 2 * MIB;
constexpr size_t CHUNK = 32 * MIB;
constexpr uint64_t TOP = 0x7f0000000000;
constexpr uint64_t VA_BASE = 0x200000000;
constexpr int OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_READY = 600, NOT_SUPPORTED = 801;

struct Chunk {
  size_t size;
  std::map<uint64_t, size_t> live;  // address -> size
};
struct Handle {
  size_t size;
  int maps;
  bool released;
};
struct Stream {
  uint64_t recorded = 0, completed = 0, capture = 0;
  bool busy = false;
};
struct Event {
  Stream* stream = nullptr;
  uint64_t seq = 0;
};

size_t total = size_t(80) << 30;
size_t used = 0;
FakeCalls calls{};
std::map<uint64_t, Chunk> chunks;  // by base address
std::map<uint64_t, size_t> reservations;
std::unordered_map<uint64_t, Handle> handles;
std::unordered_map<uint64_t, uint64_t> mapped;  // page address -> handle
uint64_t next_handle = 1;
std::unordered_map<uint64_t, Stream> streams;
thread_local int last_error = OK;

size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }
Stream& stream_of(const void* handle) { return streams[reinterpret_cast<uint64_t>(handle)]; }
int fail(int code) { return last_error = code; }

// Lowest hole in a chunk that holds `size`, or 0.
uint64_t hole(uint64_t base, const Chunk& chunk, size_t size) {
  uint64_t at = base;
  for (auto& [address, length] : chunk.live) {
    if (address - at >= size) return at;
    at = address + length;
  }
  return base + chunk.size - at >= size ? at : 0;
}

uint64_t place(size_t size) {
  for (auto& [base, chunk] : chunks) {
    if (uint64_t at = hole(base, chunk, size)) {
      chunk.live.emplace(at, size);
      return at;
    }
  }
  size_t length = round_up(size, CHUNK);
  uint64_t limit = TOP;
  for (auto it = chunks.rbegin(); it != chunks.rend(); ++it) {
    if (limit - (it->first + it->second.size) >= length) break;
    limit = it->first;
  }
  uint64_t base = limit - length;
  chunks[base] = Chunk{length, {{base, size}}};
  return base;
}

void settle(uint64_t id) {
  auto it = handles.find(id);
  if (it == handles.end() || it->second.maps > 0 || !it->second.released) return;
  used -= it->second.size;
  handles.erase(it);
}

// ---- driver functions, reached through cudaGetDriverEntryPoint*

int mem_address_reserve(uint64_t* out, size_t size, size_t, uint64_t, unsigned long long) {
  size = round_up(size, UNIT);
  uint64_t at = VA_BASE;
  for (auto& [address, length] : reservations) {
    if (address - at >= size) break;
    at = address + length;
  }
  reservations.emplace(at, size);
  calls.reserve++;
  *out = at;
  return OK;
}

int mem_address_free(uint64_t address, size_t) {
  calls.unreserve++;
  return reservations.erase(address) ? OK : INVALID_VALUE;
}

int mem_create(uint64_t* out, size_t size, const void*, unsigned long long) {
  size = round_up(size, UNIT);
  if (used + size > total) {
    calls.create_oom++;
    return OUT_OF_MEMORY;
  }
  used += size;
  calls.create_ok++;
  *out = next_handle++;
  handles[*out] = Handle{size, 0, false};
  return OK;
}

int mem_release(uint64_t id) {
  auto it = handles.find(id);
  if (it == handles.end()) return INVALID_VALUE;
  calls.release++;
  it->second.released = true;
  settle(id);
  return OK;
}

int mem_map(uint64_t address, size_t, size_t, uint64_t id, unsigned long long) {
  auto it = handles.find(id);
  if (it == handles.end() || mapped.count(address)) return INVALID_VALUE;
  calls.map++;
  it->second.maps++;
  mapped[address] = id;
  return OK;
}

int mem_unmap(uint64_t address, size_t) {
  auto it = mapped.find(address);
  if (it == mapped.end()) return INVALID_VALUE;
  calls.unmap++;
  uint64_t id = it->second;
  mapped.erase(it);
  handles[id].maps--;
  settle(id);
  return OK;
}

int mem_set_access(uint64_t, size_t, const void*, size_t) { return OK; }
int granularity(size_t* out, const void*, int) { return *out = UNIT, OK; }
int device_attribute(int* out, int, int) { return *out = 0, OK; }  // no RDMA, no fabric handles
int device_get(int* out, int ordinal) { return *out = ordinal, OK; }
int error_string(int, const char** out) { return *out = "fake driver error", OK; }
int not_supported() { return NOT_SUPPORTED; }

void* entry(const std::string& name) {
  static const std::unordered_map<std::string, void*> table = {
      {"cuMemAddressReserve", (void*)mem_address_reserve},
      {"cuMemAddressFree", (void*)mem_address_free},
      {"cuMemCreate", (void*)mem_create},
      {"cuMemRelease", (void*)mem_release},
      {"cuMemMap", (void*)mem_map},
      {"cuMemUnmap", (void*)mem_unmap},
      {"cuMemSetAccess", (void*)mem_set_access},
      {"cuMemGetAllocationGranularity", (void*)granularity},
      {"cuDeviceGetAttribute", (void*)device_attribute},
      {"cuDeviceGet", (void*)device_get},
      {"cuGetErrorString", (void*)error_string},
  };
  auto it = table.find(name);
  return it == table.end() ? (void*)not_supported : it->second;
}

}  // namespace

extern "C" {

// ---- knobs

void fake_set_total(size_t bytes) { total = bytes; }
void fake_busy(void* stream) { stream_of(stream).busy = true; }
void fake_idle(void* stream) {
  Stream& s = stream_of(stream);
  s.busy = false;
  s.completed = s.recorded;
}
void fake_capture(void* stream, uint64_t id) { stream_of(stream).capture = id; }
size_t fake_used() { return used; }
const FakeCalls* fake_calls() { return &calls; }

// ---- memory

int cudaMalloc(void** out, size_t size) {
  if (size <= total) size = round_up(size, UNIT);  // rounding up might wrap
  if (size > total || used + size > total) {
    calls.malloc_oom++;
    return fail(OUT_OF_MEMORY);
  }
  calls.malloc_ok++;
  used += size;
  *out = reinterpret_cast<void*>(place(size));
  return OK;
}

int cudaFree(void* pointer) {
  if (!pointer) return OK;
  uint64_t address = reinterpret_cast<uint64_t>(pointer);
  auto chunk = chunks.upper_bound(address);
  if (chunk == chunks.begin()) return fail(INVALID_VALUE);
  --chunk;
  auto it = chunk->second.live.find(address);
  if (it == chunk->second.live.end()) return fail(INVALID_VALUE);
  calls.free++;
  used -= it->second;
  chunk->second.live.erase(it);
  if (chunk->second.live.empty()) chunks.erase(chunk);
  return OK;
}

int cudaMemGetInfo(size_t* free, size_t* all) { return *free = total - used, *all = total, OK; }

// ---- device. The caller provides the properties struct; only fields up to `minor`, which lie at the same
// place in CUDA 12 and 13, are written.

int cudaGetDeviceProperties(void* out, int) {
  char* at = static_cast<char*>(out);
  memset(at, 0, 392);
  strcpy(at, "Fake");
  memcpy(at + 288, &total, sizeof total);
  int version[2] = {9, 0};
  memcpy(at + 360, version, sizeof version);
  return OK;
}
int cudaGetDeviceProperties_v2(void* out, int device) { return cudaGetDeviceProperties(out, device); }
int cudaGetDeviceCount(int* n) { return *n = 1, OK; }
int cudaGetDevice(int* device) { return *device = 0, OK; }
int cudaSetDevice(int) { return OK; }
int cudaDeviceGetStreamPriorityRange(int* low, int* high) { return *low = 0, *high = -5, OK; }
int cudaDriverGetVersion(int* version) { return *version = 13000, OK; }
int cudaDeviceSynchronize() {
  calls.device_sync++;
  for (auto& [handle, s] : streams) s.completed = s.recorded;
  return OK;
}
int cudaGetDriverEntryPointByVersion(const char* name, void** out, unsigned, unsigned long long, int* found) {
  *out = entry(name);
  if (found) *found = 0;
  return OK;
}
int cudaGetDriverEntryPoint(const char* name, void** out, unsigned long long, int* found) {
  return cudaGetDriverEntryPointByVersion(name, out, 0, 0, found);
}

// ---- errors

int cudaGetLastError() {
  int code = last_error;
  last_error = OK;
  return code;
}
const char* cudaGetErrorString(int code) { return code == OUT_OF_MEMORY ? "out of memory" : "fake CUDA error"; }
const char* cudaGetErrorName(int code) { return code == OUT_OF_MEMORY ? "cudaErrorMemoryAllocation" : "cudaErrorFake"; }

// ---- streams and events

int cudaStreamCreateWithPriority(void** out, unsigned, int) {
  static uint64_t next = 0x7000000;
  return *out = reinterpret_cast<void*>(next += 0x10), OK;
}
int cudaStreamQuery(void* stream) {
  Stream& s = stream_of(stream);
  return s.completed >= s.recorded ? OK : NOT_READY;
}
int cudaStreamSynchronize(void* stream) {
  calls.stream_sync++;
  Stream& s = stream_of(stream);
  s.completed = s.recorded;
  return OK;
}
int cudaStreamWaitEvent(void*, void*, unsigned) { return OK; }
int cudaStreamIsCapturing(void* stream, int* status) {
  auto it = streams.find(reinterpret_cast<uint64_t>(stream));
  return *status = it != streams.end() && it->second.capture != 0, OK;
}
int cudaStreamGetCaptureInfo_v2(void* stream, int* status, unsigned long long* id, void** graph, const void*** nodes,
                                size_t* count) {
  Stream& s = stream_of(stream);
  *status = s.capture != 0;
  if (id) *id = s.capture;
  if (graph) *graph = nullptr;
  if (nodes) *nodes = nullptr;
  if (count) *count = 0;
  return OK;
}
int cudaStreamGetCaptureInfo(void* stream, int* status, unsigned long long* id, void** graph, const void*** nodes,
                             const void**, size_t* count) {
  return cudaStreamGetCaptureInfo_v2(stream, status, id, graph, nodes, count);
}
int cudaThreadExchangeStreamCaptureMode(int* mode) {
  thread_local int current = 0;
  std::swap(*mode, current);
  return OK;
}
int cudaEventCreateWithFlags(void** out, unsigned) { return *out = new Event, OK; }
int cudaEventDestroy(void* event) { return delete static_cast<Event*>(event), OK; }
int cudaEventRecord(void* event, void* stream) {
  calls.event_record++;
  Event& e = *static_cast<Event*>(event);
  Stream& s = stream_of(stream);
  e.stream = &s;  // references into an unordered_map stay valid
  e.seq = ++s.recorded;
  if (!s.busy) s.completed = s.recorded;
  return OK;
}
int cudaEventQuery(void* event) {
  calls.event_query++;
  Event& e = *static_cast<Event*>(event);
  if (!e.stream || e.stream->completed >= e.seq) return OK;
  return fail(NOT_READY);
}
int cudaEventSynchronize(void* event) {
  calls.event_sync++;
  Event& e = *static_cast<Event*>(event);
  if (e.stream && e.stream->completed < e.seq) e.stream->completed = e.seq;
  return OK;
}
int cudaEventElapsedTime(float* ms, void*, void*) { return *ms = 0, OK; }

// ---- imported by the library, never reached by the native allocator on one device

#define REFUSE(name) \
  int name() { return fail(NOT_SUPPORTED); }
REFUSE(cudaDeviceCanAccessPeer)
REFUSE(cudaDeviceEnablePeerAccess)
REFUSE(cudaDeviceGetDefaultMemPool)
REFUSE(cudaDeviceGetGraphMemAttribute)
REFUSE(cudaDeviceSetGraphMemAttribute)
REFUSE(cudaFreeAsync)
REFUSE(cudaGraphAddEmptyNode)
REFUSE(cudaGraphNodeGetDependencies)
REFUSE(cudaGraphNodeGetType)
REFUSE(cudaIpcCloseMemHandle)
REFUSE(cudaIpcGetMemHandle)
REFUSE(cudaIpcOpenMemHandle)
REFUSE(cudaMallocAsync)
REFUSE(cudaMemPoolGetAttribute)
REFUSE(cudaMemPoolSetAccess)
REFUSE(cudaMemPoolSetAttribute)
REFUSE(cudaMemPoolTrimTo)
REFUSE(cudaMemcpy)
REFUSE(cudaMemcpyAsync)
REFUSE(cudaMemcpyPeerAsync)
REFUSE(cudaStreamGetPriority)
REFUSE(cudaStreamUpdateCaptureDependencies)
}
