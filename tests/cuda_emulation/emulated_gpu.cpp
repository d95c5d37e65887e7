// Streams, events and graphs as queues of work, and their scheduler.

#include "emulated_gpu.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceType.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <deque>
#include <map>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "emulated_gpu_queue.h"

namespace emulated_gpu {

using Key = std::pair<c10::DeviceIndex, c10::StreamId>;

/// A device's write to pinned memory that is not yet visible to the host.
struct HiddenWrite {
  char* memory;
  std::vector<std::pair<std::size_t, char>> changed;

  void show() const {
    for (const auto& [at, value] : changed) memory[at] = value;
  }
};
using HiddenWrites = std::set<std::shared_ptr<HiddenWrite>>;

/// A record of an event.
struct EventRecord {
  bool is_done = false;
  std::chrono::steady_clock::time_point reached{};
  HiddenWrites preceding_writes;  // writes that ran before the record
  uint64_t capture = 0;
  std::set<std::size_t> nodes;  // of the capture, before the record
};

struct Work {
  std::function<void()> run;
  std::shared_ptr<EventRecord> waits_for;
  std::shared_ptr<EventRecord> marks;
};

struct Graph::Recording {
  struct Node {
    std::function<void()> run;
    std::set<std::size_t> after;
    Kind kind;
    std::vector<const void*> pinned;
  };
  uint64_t id = 0;
  Key origin{};
  std::vector<Node> nodes;
  std::map<Key, std::set<std::size_t>> ends;  // per stream, the nodes that its next node follows
};

struct Machine {
  using Recording = Graph::Recording;

  std::recursive_mutex mutex;
  std::mt19937_64 random;
  std::map<Key, std::deque<Work>> queues;
  std::map<Key, Recording*> captured;  // streams that are being captured
  std::set<uint64_t> active;           // captures
  uint64_t captures = 0;
  c10::StreamId streams = 0;
  Counts counts;
  std::vector<std::shared_ptr<HiddenWrite>> hidden;  // in the order in which they ran
  std::map<Key, HiddenWrites> preceding_writes;      // writes that a stream's next work follows
  Key running{};                                     // the stream whose work runs

  static Machine& instance() {
    static auto* const machine = new Machine;  // leaked, since static tensors may outlive it
    return *machine;
  }

  Recording* recording_of(const Key& key) const {
    const auto found = captured.find(key);
    return found == captured.end() ? nullptr : found->second;
  }

  bool coin() { return random() % 2 == 0; }

  /// Runs the first work of a random runnable stream. Returns false if there is none.
  bool run_one() {
    std::vector<Key> runnable;
    for (auto& [key, queue] : queues) {
      const bool may_run = !queue.empty() &&
                           (queue.front().waits_for == nullptr || queue.front().waits_for->is_done);
      if (may_run) runnable.push_back(key);
    }
    if (runnable.empty()) return false;
    running = runnable[random() % runnable.size()];
    std::deque<Work>& queue = queues[running];
    const Work work = std::move(queue.front());
    queue.pop_front();
    HiddenWrites& writes = preceding_writes[running];
    if (work.waits_for != nullptr) {
      writes.insert(work.waits_for->preceding_writes.begin(),
                    work.waits_for->preceding_writes.end());
    }
    if (work.run) work.run();
    if (work.marks != nullptr) {
      work.marks->is_done = true;
      work.marks->reached = std::chrono::steady_clock::now();
      work.marks->preceding_writes = writes;
    }
    return true;
  }

  /// Runs work that writes pinned memory on the device's view of it, and restores the host's view.
  void run_hidden(const std::function<void()>& run, const std::vector<const void*>& pinned) {
    std::vector<std::pair<char*, std::vector<char>>> seen;  // host view
    std::vector<std::vector<char>> before;                  // device view
    for (const void* const memory : pinned) {
      const auto [begin, bytes] = pinned_block(memory);
      if (begin == nullptr) throw CudaUsageError("a kernel writes pinned memory that was freed");
      seen.emplace_back(begin, std::vector<char>(begin, begin + bytes));
    }
    for (const auto& [begin, bytes] : seen) {
      for (const auto& write : hidden) {
        if (write->memory == begin) write->show();
      }
      before.emplace_back(begin, begin + bytes.size());
    }
    run();
    for (std::size_t i = 0; i < seen.size(); ++i) {
      const auto write = std::make_shared<HiddenWrite>(HiddenWrite{seen[i].first, {}});
      for (std::size_t at = 0; at < before[i].size(); ++at) {
        if (write->memory[at] != before[i][at]) write->changed.emplace_back(at, write->memory[at]);
      }
      hidden.push_back(write);
      preceding_writes[running].insert(write);
    }
    for (const auto& [begin, bytes] : seen) std::copy(bytes.begin(), bytes.end(), begin);
  }

  /// Makes the writes of `known` visible to the host. A copy, since `preceding_writes` changes.
  void show(const HiddenWrites known) {
    std::erase_if(hidden, [&](const auto& write) {
      if (known.count(write) == 0) return false;
      write->show();
      return true;
    });
    for (auto& [key, writes] : preceding_writes) {
      std::erase_if(writes, [&](const auto& write) { return known.count(write) != 0; });
    }
  }
  /// Makes all writes of a device visible to the host.
  void show(c10::DeviceIndex device) {
    for (const auto& [key, writes] : std::map(preceding_writes)) {
      if (key.first == device) show(writes);
    }
  }

  template <class IsDone>
  void run_until(const IsDone& is_done) {
    while (!is_done()) {
      if (!run_one()) throw CudaUsageError("deadlock: no work of the device can run");
    }
  }

  /// Runs a random amount of work.
  void run_some() {
    while (coin() && run_one()) {
    }
  }

  void add_node(Recording& recording, const Key& key, Recording::Node node) {
    std::set<std::size_t>& end = recording.ends[key];
    node.after = end;
    end = {recording.nodes.size()};
    recording.nodes.push_back(std::move(node));
  }

  void check_no_capture(const char* what) const {
    if (!active.empty()) throw CudaUsageError(std::string(what) + " during a capture");
  }
};

namespace {

Key key_of(const c10::Stream& stream) { return {stream.device_index(), stream.id()}; }

struct Current {
  c10::DeviceIndex device = 0;
  std::array<c10::StreamId, kDevices> streams{};
};
thread_local Current current;

c10::Stream stream_of(c10::DeviceIndex index, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, device(index), id);
}

class GuardImpl final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return c10::kPrivateUse1; }
  c10::Device getDevice() const override { return device(current.device); }
  void setDevice(c10::Device to) const override { uncheckedSetDevice(to); }
  void uncheckedSetDevice(c10::Device to) const noexcept override {
    if (to.has_index()) current.device = to.index();
  }
  c10::Device exchangeDevice(c10::Device to) const override {
    const c10::Device before = getDevice();
    setDevice(to);
    return before;
  }
  c10::Stream getStream(c10::Device of) const override {
    const c10::DeviceIndex index = of.has_index() ? of.index() : current.device;
    return stream_of(index, current.streams[static_cast<std::size_t>(index)]);
  }
  c10::Stream getDefaultStream(c10::Device of) const override {
    return stream_of(of.has_index() ? of.index() : current.device, 0);
  }
  c10::Stream exchangeStream(c10::Stream to) const override {
    const c10::Stream before = getStream(to.device());
    current.streams[static_cast<std::size_t>(to.device_index())] = to.id();
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex /*index*/,
              c10::EventFlag /*flag*/) const override {
    Machine& machine = Machine::instance();
    const std::lock_guard lock(machine.mutex);
    if (*event == nullptr) *event = new std::shared_ptr<EventRecord>;
    auto event_record = std::make_shared<EventRecord>();
    if (auto* const recording = machine.recording_of(key_of(stream))) {
      event_record->capture = recording->id;
      event_record->nodes = recording->ends[key_of(stream)];
    } else {
      machine.queues[key_of(stream)].push_back({nullptr, nullptr, event_record});
    }
    get_event_record(*event) = std::move(event_record);
  }
  void block(void* event, const c10::Stream& stream) const override {
    Machine& machine = Machine::instance();
    const std::lock_guard lock(machine.mutex);
    if (event == nullptr || get_event_record(event) == nullptr) return;
    const std::shared_ptr<EventRecord>& event_record = get_event_record(event);
    const Key key = key_of(stream);
    auto* recording = machine.recording_of(key);
    if (recording == nullptr && event_record->capture == 0) {
      machine.queues[key].push_back({nullptr, event_record, nullptr});
      return;
    }
    if (recording == nullptr && machine.active.count(event_record->capture) != 0) {
      for (const auto& [other, recording_of_stream] : machine.captured) {
        if (recording_of_stream->id == event_record->capture) recording = recording_of_stream;
      }
      machine.captured[key] = recording;  // the stream joins the capture
    }
    if (recording == nullptr || recording->id != event_record->capture) {
      throw CudaUsageError("a stream waits for an event of another capture");
    }
    recording->ends[key].insert(event_record->nodes.begin(), event_record->nodes.end());
  }
  bool queryEvent(void* event) const override {
    Machine& machine = Machine::instance();
    const std::lock_guard lock(machine.mutex);
    if (event == nullptr || get_event_record(event) == nullptr) return true;
    check_queryable(*get_event_record(event));
    machine.run_some();
    const EventRecord& event_record = *get_event_record(event);
    if (event_record.is_done) machine.show(event_record.preceding_writes);
    return event_record.is_done;
  }
  /// Host time between the records; the emulation has no device time.
  double elapsedTime(void* first, void* second, c10::DeviceIndex /*index*/) const override {
    const std::chrono::duration<double, std::milli> time =
        get_event_record(second)->reached - get_event_record(first)->reached;
    return time.count();
  }
  void synchronizeEvent(void* event) const override {
    Machine& machine = Machine::instance();
    const std::lock_guard lock(machine.mutex);
    if (event == nullptr || get_event_record(event) == nullptr) return;
    check_queryable(*get_event_record(event));
    if (!get_event_record(event)->is_done) ++machine.counts.syncs;
    machine.run_until([&] { return get_event_record(event)->is_done; });
    machine.show(get_event_record(event)->preceding_writes);
  }
  void destroyEvent(void* event, c10::DeviceIndex /*index*/) const noexcept override {
    delete static_cast<std::shared_ptr<EventRecord>*>(event);
  }

  bool queryStream(const c10::Stream& stream) const override {
    Machine& machine = Machine::instance();
    const std::lock_guard lock(machine.mutex);
    machine.check_no_capture("query of a stream");
    machine.run_some();
    const bool is_idle = machine.queues[key_of(stream)].empty();
    if (is_idle) machine.show(machine.preceding_writes[key_of(stream)]);
    return is_idle;
  }
  void synchronizeStream(const c10::Stream& stream) const override { wait_for(stream); }
  void synchronizeDevice(c10::DeviceIndex index) const override {
    Machine& machine = Machine::instance();
    const std::lock_guard lock(machine.mutex);
    check_not_capturing("synchronization with a device");
    ++machine.counts.syncs;
    machine.run_until([&] {
      return std::all_of(machine.queues.begin(), machine.queues.end(), [&](const auto& queue) {
        return queue.first.first != index || queue.second.empty();
      });
    });
    machine.show(index);
  }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    record_use(memory, stream);
  }

 private:
  static std::shared_ptr<EventRecord>& get_event_record(void* event) {
    return *static_cast<std::shared_ptr<EventRecord>*>(event);
  }
  static void check_queryable(const EventRecord& event_record) {
    check_not_capturing("query of an event");
    if (event_record.capture != 0) throw CudaUsageError("query of an event that was captured");
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex /*index*/) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return current.device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return std::exchange(current.device, index);
  }
  void setCurrentDevice(c10::DeviceIndex index) const override { current.device = index; }
  bool isPinnedPtr(const void* memory) const override { return is_pinned(memory); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_memory(); }
  /// For at::manual_seed; not used.
  const at::Generator& getDefaultGenerator(c10::DeviceIndex /*index*/) const override {
    static const at::Generator generator = at::detail::createCPUGenerator();
    return generator;
  }
};

[[maybe_unused]] const bool is_registered = [] {
  c10::register_privateuse1_backend("hostgpu");
  static const c10::impl::DeviceGuardImplRegistrar guard(c10::kPrivateUse1, new GuardImpl);
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  c10::SetAllocator(c10::kPrivateUse1, device_memory());
  at::setHostAllocator(c10::kPrivateUse1, pinned_memory());
  return true;
}();

}  // namespace

std::recursive_mutex& mutex() { return Machine::instance().mutex; }

c10::Stream current_stream(c10::Device of) { return GuardImpl().getStream(of); }

void enqueue(const c10::Stream& stream, std::function<void()> run, Kind kind,
             std::vector<const void*> pinned) {
  Machine& machine = Machine::instance();
  const std::lock_guard lock(machine.mutex);
  if (kind == Kind::launch) ++machine.counts.launches;
  if (kind == Kind::op) ++machine.counts.ops;
  if (kind == Kind::copy_from_host) ++machine.counts.copies_from_host;
  if (kind == Kind::copy_to_host) ++machine.counts.copies_to_host;
  const Key key = key_of(stream);
  if (!pinned.empty() && (kind == Kind::launch || kind == Kind::copy_to_host)) {
    run = [&machine, run = std::move(run), pinned] { machine.run_hidden(run, pinned); };
  }
  if (auto* const recording = machine.recording_of(key)) {
    machine.add_node(*recording, key, {std::move(run), {}, kind, std::move(pinned)});
    return;
  }
  machine.queues[key].push_back({std::move(run), nullptr, nullptr});
  machine.run_some();
}

void check_not_capturing(const char* what) {
  if (cuda_emulation::relaxed_guards == 0) Machine::instance().check_no_capture(what);
}

void wait_for(const c10::Stream& stream) {
  Machine& machine = Machine::instance();
  const std::lock_guard lock(machine.mutex);
  machine.check_no_capture("synchronization with a stream");
  ++machine.counts.syncs;
  machine.run_until([&] { return machine.queues[key_of(stream)].empty(); });
  machine.show(machine.preceding_writes[key_of(stream)]);
}

uint64_t capture_id_of(const c10::Stream& stream) {
  Machine& machine = Machine::instance();
  const std::lock_guard lock(machine.mutex);
  const auto* const recording = machine.recording_of(key_of(stream));
  return recording == nullptr ? 0 : recording->id;
}

void add_dependency(const c10::Stream& earlier, const c10::Stream& later) {
  const GuardImpl guard;
  void* event = nullptr;
  guard.record(&event, earlier, earlier.device_index(), c10::EventFlag::PYTORCH_DEFAULT);
  guard.block(event, later);
  guard.destroyEvent(event, earlier.device_index());
}

std::function<bool()> make_query(const c10::Stream& stream) {
  Machine& machine = Machine::instance();
  const std::lock_guard lock(machine.mutex);
  if (machine.recording_of(key_of(stream)) != nullptr) return [] { return false; };
  auto event_record = std::make_shared<EventRecord>();
  machine.queues[key_of(stream)].push_back({nullptr, nullptr, event_record});
  return [event_record] { return event_record->is_done; };
}

void begin(uint64_t seed) {
  run_all();
  Machine& machine = Machine::instance();
  const std::lock_guard lock(machine.mutex);
  machine.random.seed(seed);
  machine.counts = {};
}

void run_all() {
  Machine& machine = Machine::instance();
  const std::lock_guard lock(machine.mutex);
  machine.run_until([&] {
    return std::all_of(machine.queues.begin(), machine.queues.end(),
                       [](const auto& queue) { return queue.second.empty(); });
  });
  for (int i = 0; i < kDevices; ++i) machine.show(static_cast<c10::DeviceIndex>(i));
  check_guard_bytes();
}

c10::Stream new_stream(int device_index) {
  Machine& machine = Machine::instance();
  const std::lock_guard lock(machine.mutex);
  return stream_of(static_cast<c10::DeviceIndex>(device_index), ++machine.streams);
}

StreamBlocker::StreamBlocker(const c10::Stream& stream) : gate_(std::make_shared<EventRecord>()) {
  Machine& machine = Machine::instance();
  const std::lock_guard lock(machine.mutex);
  machine.queues[key_of(stream)].push_back({nullptr, gate_, nullptr});
}

void StreamBlocker::end() { gate_->is_done = true; }

Counts counts() { return Machine::instance().counts; }

}  // namespace emulated_gpu

c10::Stream cuda_emulation::current_stream(c10::Device device) {
  if (device.is_cpu()) return c10::Stream(c10::Stream::DEFAULT, device);
  return emulated_gpu::current_stream(device);
}
void cuda_emulation::enqueue_launch(const c10::Stream& stream, std::size_t bytes,
                                    std::vector<const void*> pointers, std::function<void()> run) {
  emulated_gpu::Machine& machine = emulated_gpu::Machine::instance();
  const std::lock_guard lock(machine.mutex);
  machine.counts.argument_bytes += static_cast<int64_t>(bytes);
  std::erase_if(pointers, [](const void* pointer) { return !emulated_gpu::is_pinned(pointer); });
  emulated_gpu::enqueue(stream, std::move(run), emulated_gpu::Kind::launch, std::move(pointers));
}
uint64_t cuda_emulation::current_capture_id(c10::Device device) {
  return device.is_cpu() ? 0 : emulated_gpu::capture_id_of(emulated_gpu::current_stream(device));
}

namespace emulated_gpu {

Graph::Graph() : recording_(std::make_shared<Recording>()) {}
Graph::~Graph() = default;

void Graph::capture_begin() {
  Machine& machine = Machine::instance();
  const std::lock_guard lock(machine.mutex);
  const Key key = key_of(current_stream(device(current.device)));
  if (key.second == 0) throw CudaUsageError("the default stream cannot be captured");
  *recording_ = Recording{++machine.captures, key, {}, {}};
  machine.captured[key] = recording_.get();
  machine.active.insert(recording_->id);
}

void Graph::capture_end() {
  Machine& machine = Machine::instance();
  const std::lock_guard lock(machine.mutex);
  std::erase_if(machine.captured,
                [&](const auto& captured) { return captured.second == recording_.get(); });
  machine.active.erase(recording_->id);
  std::set<std::size_t> joined;  // nodes before the end of the capture's stream
  std::vector<std::size_t> open(recording_->ends[recording_->origin].begin(),
                                recording_->ends[recording_->origin].end());
  while (!open.empty()) {
    const std::size_t node = open.back();
    open.pop_back();
    if (!joined.insert(node).second) continue;
    open.insert(open.end(), recording_->nodes[node].after.begin(),
                recording_->nodes[node].after.end());
  }
  if (joined.size() != recording_->nodes.size()) {
    throw CudaUsageError("a capture ends before a forked stream has joined it");
  }
}

void Graph::replay() {
  Machine& machine = Machine::instance();
  const std::lock_guard lock(machine.mutex);
  const Key key = key_of(current_stream(device(current.device)));
  if (machine.recording_of(key) != nullptr) throw CudaUsageError("a replay during a capture");
  const std::vector<Recording::Node>& nodes = recording_->nodes;
  std::vector<std::size_t> missing;  // number of unfinished dependencies
  std::vector<std::vector<std::size_t>> followers(nodes.size());
  std::vector<std::size_t> ready;
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    missing.push_back(nodes[i].after.size());
    for (const std::size_t before : nodes[i].after) followers[before].push_back(i);
    if (nodes[i].after.empty()) ready.push_back(i);
  }
  while (!ready.empty()) {
    std::swap(ready[machine.random() % ready.size()], ready.back());
    const std::size_t node = ready.back();
    ready.pop_back();
    for (const std::size_t follower : followers[node]) {
      if (--missing[follower] == 0) ready.push_back(follower);
    }
    for (const void* const memory : nodes[node].pinned) {
      if (!is_pinned(memory)) throw CudaUsageError("a replay uses pinned memory that was freed");
    }
    machine.queues[key].push_back({nodes[node].run, nullptr, nullptr});
  }
  machine.run_some();
}

int64_t Graph::launches() const {
  return std::count_if(recording_->nodes.begin(), recording_->nodes.end(),
                       [](const auto& node) { return node.kind == Kind::launch; });
}

}  // namespace emulated_gpu
