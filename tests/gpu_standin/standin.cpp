// A device of torch's on host memory, "standin", with the streams and events of `virtual_time.h`. It stands in for CUDA.
//
// Kernels are the CPU's, run on aliases of the tensors. Python calls what stands in `extern "C"` at the end, by ctypes.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstring>

#include "virtual_time.h"

namespace at::autocast {  // of ATen/autocast_mode.h, which costs a compiler ten seconds
TORCH_API ScalarType get_autocast_dtype(DeviceType);
TORCH_API Tensor cached_cast(ScalarType, const Tensor&, DeviceType);
}  // namespace at::autocast

namespace standin {

using at::Tensor;
using c10::Device, c10::DeviceIndex, c10::DeviceType, c10::DispatchKey, c10::DispatchKeySet, c10::IValue;
constexpr DeviceType KIND = DeviceType::PrivateUse1;

static int num_devices = 1;
static int64_t last_stream_id = 0;
static thread_local DeviceIndex current_device = 0;
static thread_local std::map<DeviceIndex, int64_t> current_streams;

static DeviceIndex index_of(Device device) { return device.index() < 0 ? current_device : device.index(); }
static size_t current_stream(DeviceIndex device) { return stream_number(device, current_streams[device]); }
static size_t number_of(const c10::Stream& stream) { return stream_number(index_of(stream.device()), stream.id()); }
static void set_device(DeviceIndex device) {
  TORCH_CHECK(device < num_devices, "CUDA error: invalid device ordinal");
  if (device >= 0) current_device = device;
}
struct On {  // a device, for as long as this lives
  DeviceIndex before = current_device;
  explicit On(DeviceIndex device) { set_device(device); }
  ~On() { current_device = before; }
};

// ---- memory

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = std::aligned_alloc(512, (bytes / 512 + 1) * 512);
    TORCH_CHECK(memory, "CUDA out of memory");
    std::memset(memory, 0xA5, bytes);  // nobody may rely on zeros
    allocated(reinterpret_cast<uintptr_t>(memory), bytes, current_stream(current_device));
    return {memory, memory, raw_deleter(), Device(KIND, current_device)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return [](void* memory) { freed(reinterpret_cast<uintptr_t>(memory)), std::free(memory); };
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};
static Allocator allocator;
REGISTER_ALLOCATOR(KIND, &allocator);

static std::map<uintptr_t, uintptr_t> pinned;  // first byte → end
struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = std::aligned_alloc(512, (bytes / 512 + 1) * 512);
    Lock lock(mutex);
    counters["pinned allocations"]++;
    pinned[reinterpret_cast<uintptr_t>(memory)] = reinterpret_cast<uintptr_t>(memory) + bytes + 1;
    return {memory, memory, raw_deleter(), Device(DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return [](void* memory) {
      Lock lock(mutex);
      pinned.erase(reinterpret_cast<uintptr_t>(memory));
      std::free(memory);
    };
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};
static PinnedAllocator pinned_allocator;
static bool is_pinned(const void* memory) {
  Lock lock(mutex);
  auto byte = reinterpret_cast<uintptr_t>(memory);
  auto after = pinned.upper_bound(byte);
  return after != pinned.begin() && byte < std::prev(after)->second;
}

// ---- streams, events, devices, random numbers: as torch asks for them

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Stream stream(Device device, int64_t id) {
    return c10::Stream(c10::Stream::UNSAFE, Device(KIND, index_of(device)), id);
  }
  static Moment& moment(void* event) { return *static_cast<Moment*>(event); }

  DeviceType type() const override { return KIND; }
  DeviceIndex deviceCount() const noexcept override { return num_devices; }
  Device getDevice() const override { return Device(KIND, current_device); }
  void setDevice(Device device) const override { set_device(device.index()); }
  void uncheckedSetDevice(Device device) const noexcept override { current_device = index_of(device); }
  Device exchangeDevice(Device device) const override {
    return Device(KIND, std::exchange(current_device, index_of(device)));
  }
  c10::Stream getStream(Device device) const noexcept override {
    return stream(device, current_streams[index_of(device)]);
  }
  c10::Stream getDefaultStream(Device device) const override { return stream(device, 0); }
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream getNewStream(Device device, int) const override {
    Lock lock(mutex);
    return stream(device, ++last_stream_id);
  }
  c10::Stream exchangeStream(c10::Stream next) const noexcept override {
    return stream(next.device(), std::exchange(current_streams[next.device_index()], next.id()));
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return reinterpret_cast<void*>(stream.id()); }
  void record(void** event, const c10::Stream& stream, DeviceIndex, c10::EventFlag) const override {
    if (!*event) *event = new Moment();
    moment(*event) = moment_of(number_of(stream));
    auto now = std::chrono::steady_clock::now().time_since_epoch();
    moment(*event).host_ms = std::chrono::duration<double, std::milli>(now).count();
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) wait_on_stream(number_of(stream), moment(event));
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override { delete static_cast<Moment*>(event); }
  bool queryEvent(void* event) const override { return !event || query(moment(event)); }
  bool queryStream(const c10::Stream& stream) const override {
    auto now = moment_of(number_of(stream));
    return query(now);
  }
  void synchronizeEvent(void* event) const override {
    if (event) wait_on_host("event.synchronize", moment(event));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    wait_on_host("stream.synchronize", moment_of(number_of(stream)));
  }
  void synchronizeDevice(DeviceIndex device) const override {
    Moment all;
    {
      Lock lock(mutex);
      for (auto& [name, number] : stream_numbers)
        if (name.first == device) {
          auto each = moment_of(number);
          join(all.clock, each.clock);
          all.unfinished.merge(each.unfinished);
        }
    }
    wait_on_host("synchronize", all);
  }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    Lock lock(mutex);
    auto block = block_at(reinterpret_cast<uintptr_t>(memory.get()));
    if (block != blocks.end()) block->second.recorded.insert(number_of(stream));
  }
  double elapsedTime(void* from, void* to, DeviceIndex) const override {  // as if the GPU took no time
    return moment(to).host_ms - moment(from).host_ms;
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Generator final : c10::GeneratorImpl {  // the CPU's, under another device's name
  c10::intrusive_ptr<c10::GeneratorImpl> numbers;
  explicit Generator(DeviceIndex device, c10::intrusive_ptr<c10::GeneratorImpl> numbers)
      : GeneratorImpl(Device(KIND, device), DispatchKeySet(DispatchKey::PrivateUse1)), numbers(std::move(numbers)) {}
  void set_current_seed(uint64_t seed) override { numbers->set_current_seed(seed); }
  void set_offset(uint64_t offset) override { numbers->set_offset(offset); }
  uint64_t get_offset() const override { return numbers->get_offset(); }
  uint64_t current_seed() const override { return numbers->current_seed(); }
  uint64_t seed() override { return numbers->seed(); }
  void set_state(const c10::TensorImpl& state) override { numbers->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return numbers->get_state(); }
  Generator* clone_impl() const override { return new Generator(device_.index(), numbers->clone()); }
};
static at::Generator new_generator(DeviceIndex device) {
  return at::make_generator<Generator>(device, c10::make_intrusive<at::CPUGeneratorImpl>());
}
static const at::Generator& default_generator(DeviceIndex device) {
  Lock lock(mutex);
  static std::map<DeviceIndex, at::Generator> generators;
  return generators.try_emplace(device, new_generator(device)).first->second;
}
static at::Generator on_the_cpu(const at::Generator& generator) {
  return at::Generator(static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->numbers);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return num_devices > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return num_devices; }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(DeviceIndex device) const override { set_device(device); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    return std::exchange(current_device, index_of({KIND, device}));
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override {
    return default_generator(index_of({KIND, device}));
  }
  at::Generator getNewGenerator(DeviceIndex device) const override { return new_generator(index_of({KIND, device})); }
  Device getDeviceFromPtr(void*) const override { return Device(KIND, current_device); }
  bool isPinnedPtr(const void* memory) const override { return is_pinned(memory); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto memory = allocator.allocate(bytes);
    std::memcpy(memory.get(), storage.data(), std::min(bytes, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(memory));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};
static Hooks hooks;

// ---- the same memory as a tensor of the CPU's, and back

static Tensor like(const Tensor& tensor, c10::Storage storage, DispatchKey key) {
  auto result = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), DispatchKeySet(key), tensor.dtype());
  auto* impl = result.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.is_conj()) impl->_set_conj(true);
  if (tensor.is_neg()) impl->_set_neg(true);
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return result;
}
static Tensor on_host(const Tensor& tensor) {
  auto* kept = new c10::Storage(tensor.storage());
  auto release = [](void* storage) { delete static_cast<c10::Storage*>(storage); };
  c10::DataPtr memory(kept->mutable_data(), kept, release, Device(DeviceType::CPU));
  auto* of_host = c10::GetAllocator(DeviceType::CPU);
  return like(tensor, {{}, kept->nbytes(), std::move(memory), of_host, true}, DispatchKey::CPU);
}
static Tensor on_device(const Tensor& tensor, DeviceIndex device) {  // new memory, as a kernel has allocated it
  auto* kept = new c10::Storage(tensor.storage());
  auto begin = reinterpret_cast<uintptr_t>(kept->mutable_data());
  if (begin) allocated(begin, kept->nbytes(), current_stream(device));
  auto release = [](void* storage) {
    std::unique_ptr<c10::Storage> kept(static_cast<c10::Storage*>(storage));
    freed(reinterpret_cast<uintptr_t>(kept->data()));
  };
  c10::DataPtr memory(kept->mutable_data(), kept, release, Device(KIND, device));
  return like(tensor, {{}, kept->nbytes(), std::move(memory), &allocator, true}, DispatchKey::PrivateUse1);
}
static Span span_of(const Tensor& tensor, bool write) {
  int64_t numel = tensor.numel() > 0;
  for (int64_t dim = 0; numel && dim < tensor.dim(); dim++) numel += (tensor.size(dim) - 1) * tensor.stride(dim);
  auto begin = reinterpret_cast<uintptr_t>(tensor.storage().data()) + tensor.storage_offset() * tensor.itemsize();
  return {begin, begin + numel * tensor.itemsize(), write};
}

// ---- kernels: each is called with the arguments and leaves the results on torch's stack

using Op = const c10::OperatorHandle&;
using Stack = torch::jit::Stack;

static bool starts(const std::string& name, std::initializer_list<const char*> beginnings) {
  return std::any_of(beginnings.begin(), beginnings.end(), [&](auto each) { return name.rfind(each, 0) == 0; });
}
template <typename Change>
static void each_tensor(IValue& value, Change change) {
  if (value.isTensor()) {
    value = change(value.toTensor());
  } else if (value.isTensorList()) {
    auto tensors = value.toTensorVector();
    for (auto& tensor : tensors) tensor = change(tensor);
    value = IValue(tensors);
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> tensors;
    for (std::optional<Tensor> each : value.toOptionalTensorVector())
      tensors.push_back(each ? std::optional<Tensor>(change(*each)) : each);
    value = tensors;
  }
}

// A call of one kernel: its arguments as the CPU takes them, and what they were.
struct Call {
  std::string name;
  DeviceIndex device = -1;
  std::vector<Span> spans;
  std::map<c10::TensorImpl*, Tensor> given;          // by the alias that the kernel gets
  std::vector<std::pair<Tensor, Tensor>> written;    // (alias, given)
  bool waits = false;                                // the host waits for its result
  bool in_place = true;                              // nothing new comes of it

  Call(Op op, Stack* stack) : name(op.schema().name().substr(6)) {
    const auto& schema = op.schema();
    bool may_mix = starts(name, {"index", "_index_put_impl_", "_unsafe_index"});  // indices may be on the CPU
    for (size_t i = 0; i < schema.arguments().size(); i++) {
      const auto& argument = schema.arguments()[i];
      auto& value = (*stack)[stack->size() - schema.arguments().size() + i];
      bool write = argument.alias_info() && argument.alias_info()->isWrite();
      each_tensor(value, [&](const Tensor& tensor) -> Tensor {
        if (!tensor.defined()) return tensor;
        waits |= name == "_index_put_impl_" && argument.name() == "indices" && tensor.scalar_type() == at::kBool;
        if (tensor.device().type() != KIND) {
          TORCH_CHECK(tensor.dim() == 0 || may_mix, "Expected all tensors to be on the same device, but found at ",
                      "least two devices, standin and cpu! (", name, ")");
          return tensor;
        }
        if (device < 0) device = tensor.device().index();
        TORCH_CHECK(device == tensor.device().index(), "Expected all tensors to be on the same device, but found at ",
                    "least two devices, standin:", int(device), " and ", tensor.device(), "! (", name, ")");
        auto alias = on_host(tensor);
        given[alias.unsafeGetTensorImpl()] = tensor;
        if (write) written.emplace_back(alias, tensor);
        spans.push_back(span_of(tensor, write));
        return alias;
      });
      if (value.isDevice()) {
        if (value.toDevice().type() == KIND) device = index_of(value.toDevice());
        value = Device(DeviceType::CPU);
      } else if (value.isGenerator() || (argument.name() == "generator" && value.isNone())) {
        auto known = value.isGenerator() && value.toGenerator().defined();
        value = on_the_cpu(known ? value.toGenerator() : default_generator(std::max<DeviceIndex>(device, 0)));
      } else if (argument.name() == "pin_memory") {
        value = IValue();
      }
    }
    if (device < 0) device = current_device;
    TORCH_CHECK(device < num_devices, "CUDA error: invalid device ordinal");
    for (const auto& result : schema.returns()) {
      in_place &= result.alias_info() && result.alias_info()->isWrite();
      waits |= !result.type()->isSubtypeOf(*c10::TensorType::get()) && result.type()->kind() != c10::TypeKind::ListType;
    }
    waits |= starts(name, {"nonzero", "masked_select", "_unique", "unique", "repeat_interleave", "bincount", "histc"});
    for (auto& [alias, tensor] : written) in_place &= tensor.numel() > 0 && !starts(name, {"resize", "set_"});
  }
  void take_over() {  // what a kernel has given other memory or another shape
    for (auto& [alias, tensor] : written) {
      if (alias.storage().data() != tensor.storage().data()) {
        hooks.resizePrivateUse1Bytes(tensor.storage(), alias.storage().nbytes());
        std::memcpy(tensor.storage().mutable_data(), alias.storage().data(), alias.storage().nbytes());
      }
      tensor.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides(), alias.storage_offset());
    }
  }
  void hand_back(Op op, Stack* stack) {
    for (size_t i = stack->size() - op.schema().returns().size(); i < stack->size(); i++)
      each_tensor((*stack)[i], [&](const Tensor& tensor) {
        if (!tensor.defined() || tensor.device().type() == KIND) return tensor;
        auto found = given.find(tensor.unsafeGetTensorImpl());
        if (found != given.end()) return found->second;
        auto result = on_device(tensor, device);
        if (detecting) {
          Lock lock(mutex);
          auto stream = current_stream(device);
          touch({span_of(result, true), stream, streams[stream].clock[stream], name});
        }
        return result;
      });
  }
};

static void run_on_cpu(Op op, Op instead, Stack* stack) {
  Call call(op, stack);
  On on(call.device);
  auto stream = current_stream(call.device);
  auto run = [instead](Stack* stack) { instead.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack); };
  if (starts(call.name, {"empty", "resize_"})) {  // no command
    run(stack);
    call.take_over();
    auto result = stack->back().toTensor();
    if (call.written.empty() && result.is_floating_point())  // whoever relies on zeros finds what is not a number
      std::memset(result.storage().mutable_data(), 0xFF, result.storage().nbytes());
  } else if (call.waits) {
    command(stream, call.name, call.spans, Behind::queue, [] {});
    wait_on_host(call.name == "_local_scalar_dense" ? "item" : call.name.c_str(), moment_of(stream));
    run(stack);
  } else if (call.in_place && !call.written.empty()) {
    auto first = stack->end() - op.schema().arguments().size();
    Stack arguments(first, stack->end());
    stack->erase(first, stack->end());
    for (size_t i = 0; i < op.schema().returns().size(); i++) stack->push_back(call.written[i].second);
    command(stream, call.name, call.spans, Behind::queue, [run, arguments, call]() mutable {
      c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset);
      run(&arguments);
      call.take_over();
    });
  } else {
    command(stream, call.name, call.spans, Behind::block, [&] { run(stack); });
    call.take_over();
  }
  call.hand_back(op, stack);
}
static void fallback(Op op, Stack* stack) { run_on_cpu(op, op, stack); }

static c10::OperatorHandle schema(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
}
static void convolution(Op op, Stack* stack) { run_on_cpu(op, schema("aten::convolution"), stack); }
static void convolution_backward(Op, Stack* stack) {  // which on the CPU also takes the sizes of the bias
  auto gradient = stack->end() - 10;
  IValue bias_sizes(std::vector<int64_t>{gradient->toTensor().size(1)});
  stack->insert(gradient + 3, bias_sizes);
  fallback(schema("aten::convolution_backward"), stack);
}

static void view(Op op, Stack* stack) {  // no command: the same memory, in another shape or type
  auto& self = *(stack->end() - op.schema().arguments().size());
  Tensor tensor = self.toTensor();
  self = on_host(tensor);
  op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
  stack->back() = like(stack->back().toTensor(), tensor.storage(), DispatchKey::PrivateUse1);
}

static void set(Op op, Stack* stack) {
  auto arguments = torch::jit::pop(*stack, op.schema().arguments().size());
  Tensor self = arguments[0].toTensor();
  auto* impl = self.unsafeGetTensorImpl();
  bool by_tensor = arguments[1].isTensor();
  auto storage = by_tensor ? arguments[1].toTensor().storage() : arguments[1].toStorage();
  impl->set_storage_keep_dtype(storage);
  if (by_tensor) {
    auto other = arguments[1].toTensor();
    impl->set_sizes_and_strides(other.sizes(), other.strides(), other.storage_offset());
  } else if (arguments.size() == 2) {
    impl->set_storage_offset(0);
    impl->set_sizes_contiguous({int64_t(storage.nbytes() / self.itemsize())});
  } else {
    auto sizes = arguments[3].toIntVector(), strides = arguments[4].toIntVector();
    impl->set_sizes_contiguous(sizes);
    if (strides.size() == sizes.size()) impl->set_sizes_and_strides(sizes, strides);
    impl->set_storage_offset(arguments[2].toInt());
  }
  stack->push_back(self);
}

static void copy_from(Op, Stack* stack) {
  bool non_blocking = torch::jit::pop(*stack).toBool();
  Tensor to = torch::jit::pop(*stack).toTensor(), from = torch::jit::pop(*stack).toTensor();
  stack->push_back(to);
  bool reads = from.device().type() == KIND, writes = to.device().type() == KIND;
  Tensor source = reads ? on_host(from) : from, target = writes ? on_host(to) : to;
  auto stream = current_stream((reads ? from : to).device().index());
  auto other = reads && writes ? current_stream(to.device().index()) : stream;
  std::vector<Span> spans;
  if (reads) spans.push_back(span_of(from, false));
  if (writes) spans.push_back(span_of(to, true));
  bool staged = !reads && !is_pinned(from.storage().data());  // the driver copies such memory before it returns
  if (staged) source = source.clone();
  bool waits = reads != writes && !(non_blocking && (staged || is_pinned((reads ? to : from).storage().data())));
  if (other != stream) wait_on_stream(stream, moment_of(other));
  const char* name = !reads ? "copy from host" : writes ? "copy_" : "copy to host";
  command(stream, name, spans, Behind::queue, [source, target] {
    c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset);
    target.copy_(source);
  });
  if (other != stream) wait_on_stream(other, moment_of(stream));
  if (waits) wait_on_host(reads ? "copy to host" : "copy from host", moment_of(stream));
}

static void record_stream(Op, Stack* stack) {
  auto stream = torch::jit::pop(*stack).toStream();
  Guard().recordDataPtrOnStream(torch::jit::pop(*stack).toTensor().storage().data_ptr(), stream);
}

static void math(Op op, Stack* stack) {  // of the ways to compute attention
  torch::jit::drop(*stack, op.schema().arguments().size());
  stack->push_back(int64_t(0));
}

template <bool lower>
static void autocast(Op op, Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard once(DispatchKey::AutocastPrivateUse1);
  auto type = lower ? at::autocast::get_autocast_dtype(KIND) : at::kFloat;
  for (auto value = stack->end() - op.schema().arguments().size(); value != stack->end(); value++)
    each_tensor(*value, [&](const Tensor& tensor) { return at::autocast::cached_cast(type, tensor, KIND); });
  op.callBoxed(stack);
}

static Tensor adopt(const Tensor& host, int64_t device) { return on_device(host, DeviceIndex(device)); }
static at::Generator generator(int64_t device) { return default_generator(DeviceIndex(device)); }

template <void (*kernel)(Op, Stack*)>
static torch::CppFunction boxed() {
  return torch::CppFunction::makeFromBoxedFunction<kernel>();
}

TORCH_LIBRARY(standin, m) {
  m.def("adopt(Tensor host, int device) -> Tensor", &adopt);
  m.def("generator(int device) -> Generator?", &generator);
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(boxed<&fallback>()); }
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  for (auto name : {"linear", "matmul", "conv1d", "conv2d", "scaled_dot_product_attention"})
    m.impl(name, boxed<&autocast<true>>());
  for (auto name : {"layer_norm", "log_softmax.int", "softmax.int", "nll_loss", "mse_loss"})
    m.impl(name, boxed<&autocast<false>>());
}
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  for (auto name : {"as_strided", "view", "view.dtype", "_reshape_alias", "unfold", "view_as_real", "view_as_complex"})
    m.impl(name, boxed<&view>());
  for (auto name : {"set_.source_Storage_storage_offset", "set_.source_Storage", "set_.source_Tensor"})
    m.impl(name, boxed<&set>());
  m.impl("_copy_from", boxed<&copy_from>());
  m.impl("record_stream", boxed<&record_stream>());
  m.impl("_fused_sdp_choice", boxed<&math>());
  m.impl("convolution_overrideable", boxed<&convolution>());
  m.impl("convolution_backward_overrideable", boxed<&convolution_backward>());
  for (auto name :  // torch's own would launch a command for each tensor
       {"add.List", "add.Scalar", "add_.List", "add_.Scalar", "add_.ScalarList", "add_.Tensor", "addcdiv_.Scalar",
        "addcdiv_.ScalarList", "addcmul_.Scalar", "copy_", "div_.List", "div_.Scalar", "div_.ScalarList",
        "lerp_.Scalar", "mul.Scalar", "mul.ScalarList", "mul_.List", "mul_.Scalar", "mul_.ScalarList", "mul_.Tensor",
        "neg", "neg_", "norm.Scalar", "sqrt", "zero_"})
    m.impl((std::string("_foreach_") + name).c_str(), boxed<&fallback>());
}

// ---- for Python

struct Batch { Jobs before; std::shared_ptr<Job> job; Moment after; };
static std::map<int64_t, Batch> batches;  // of NCCL's, by number

static std::string json(const std::map<std::string, int64_t>& counts) {
  std::string text;
  for (auto& [name, count] : counts) text += (text.empty() ? "\"" : ", \"") + name + "\": " + std::to_string(count);
  return "{" + text + "}";
}

extern "C" {
void standin_start(int devices, void (*note)(const char*)) {
  num_devices = devices, on_host_wait = note;
  at::RegisterPrivateUse1HooksInterface(&hooks);
}
int standin_device() { return current_device; }
void standin_set_device(int device) { current_device = DeviceIndex(device); }
int64_t standin_stream(int device) { return current_streams[DeviceIndex(device)]; }
void standin_set_stream(int device, int64_t id) { current_streams[DeviceIndex(device)] = id; }
void standin_detect(int on, int by_host) {
  Lock lock(mutex);
  detecting = on, host_waits_order = by_host;
  for (auto& [begin, block] : blocks) block.accesses.clear();
  races.clear();
}
void standin_late(int on) {
  Lock lock(mutex);
  late_after = on ? last_tick : UINT64_MAX;
}
void standin_reset() {
  Lock lock(mutex);
  commands.clear(), counters.clear(), races.clear();
  for (auto& stream : streams) stream.num_commands = 0;
}
void standin_count(const char* what) {
  Lock lock(mutex);
  counters[what]++;
}
void standin_fail(const char* why) {
  Lock lock(mutex);
  failure = why;
}
const char* standin_report() {
  static thread_local std::string text;
  Lock lock(mutex);
  std::map<std::string, int64_t> by_stream;
  for (auto& stream : streams)
    if (stream.num_commands) by_stream[stream.name] = stream.num_commands;
  text = "{\"commands\": " + json(commands) + ", \"by_stream\": " + json(by_stream) + ", \"counters\": " +
         json(counters) + ", \"races\": [";
  for (size_t i = 0; i < races.size(); i++) text += (i ? ", \"" : "\"") + races[i] + "\"";
  return (text += "]}").c_str();
}

// A batch on a stream of NCCL's, behind the current stream: `before` waits until it may begin, `end` ends it.
int64_t standin_batch(int device, int64_t id, const char* name, int num, const uintptr_t* begins, const int64_t* bytes,
                      const int* writes) {
  Lock lock(mutex);
  auto stream = stream_number(device, id);
  wait_on_stream(stream, moment_of(current_stream(DeviceIndex(device))));
  std::vector<Span> spans;
  for (int i = 0; i < num; i++) spans.push_back({begins[i], begins[i] + uintptr_t(bytes[i]), bool(writes[i])});
  tick(stream, name, spans);
  auto job = std::make_shared<Job>();
  Jobs before = std::exchange(streams[stream].unfinished, {job});
  auto number = int64_t(last_tick);
  batches[number] = {before, job, streams[stream]};
  return number;
}
void standin_before_batch(int64_t number) {
  Jobs before;
  {
    Lock lock(mutex);
    before = batches[number].before;
  }
  block_until_finished(before);
}
void standin_end_batch(int64_t number) {
  Lock lock(mutex);
  batches[number].job->done = true;
  changed.notify_all();
}
void standin_wait_batch(int64_t number, int device) {  // by the current stream
  Lock lock(mutex);
  wait_on_stream(current_stream(DeviceIndex(device)), batches[number].after);
}
void standin_forget_batch(int64_t number) {
  Lock lock(mutex);
  batches.erase(number);
}
int64_t standin_new_stream() {
  Lock lock(mutex);
  return ++last_stream_id;
}
}
}  // namespace standin
