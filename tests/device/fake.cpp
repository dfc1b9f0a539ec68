// A device that isn't the CPU, for machines that have none: torch's PrivateUse1 device under the name "fake".
//
// Tensors' pointers lie in a protected arena, so CPU code that touches one ends the process. Kernels are the CPU's own,
// on a second mapping of the arena. Fresh memory is full of NaN; generators draw other numbers than the CPU's; tensors
// and generators of other devices are refused; launches, copies and synchronizations are counted. Not there: streams,
// nondeterminism, and kernels that round differently.
#include <torch/extension.h>
#include <torch/library.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/mman.h>
#include <unistd.h>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>

namespace fake {
using at::Tensor;
constexpr auto KEY = c10::DispatchKey::PrivateUse1;
constexpr auto TYPE = c10::DeviceType::PrivateUse1;
constexpr int DEVICES = 2;
constexpr size_t ARENA = size_t(8) << 30;

static std::mutex mutex;
static thread_local c10::DeviceIndex current = 0;
static bool has_float64 = true, draws_as_cpu = false;
static std::map<std::string, long> launches;
static PyObject* listener = nullptr;  // called with each copy and each synchronization

static void launched(const std::string& name) {
  std::lock_guard<std::mutex> guard(mutex);
  launches[name]++;
}

static void tell(const std::string& event) {
  if (!listener) return;
  py::gil_scoped_acquire gil;
  PyObject* result = PyObject_CallFunction(listener, "s", event.c_str());
  if (!result) throw py::error_already_set();
  Py_DECREF(result);
}

static void check_dtype(at::ScalarType dtype) {
  TORCH_CHECK_TYPE(has_float64 || (dtype != at::kDouble && dtype != at::kComplexDouble), "the fake device has no float64");
}

// Memory

static char *kernels = nullptr, *pointers = nullptr;  // the arena, as kernels and as tensors see it
static pid_t owner = 0;
static size_t top = 0, used = 0, peak = 0, limit = ARENA;
static std::map<size_t, std::vector<size_t>> freed;      // size -> places
static std::unordered_map<size_t, size_t> sizes;         // place -> size

static void begin() {
  if (kernels) {
    TORCH_CHECK(getpid() == owner, "the fake device cannot be used in a forked process");
    return;
  }
  auto map = [](int may) { return (char*)mmap(nullptr, ARENA, may, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0); };
  kernels = map(PROT_READ | PROT_WRITE), pointers = map(PROT_NONE), owner = getpid();
  TORCH_CHECK(kernels != MAP_FAILED && pointers != MAP_FAILED, "no memory for the fake device");
}

static void* real(const void* p) { return p ? kernels + ((char*)p - pointers) : nullptr; }
static bool in_arena(const void* p) { return kernels && (char*)p >= kernels && (char*)p < kernels + ARENA; }

static void release(void* p) {
  if (!p) return;
  std::lock_guard<std::mutex> guard(mutex);
  size_t place = (char*)p - pointers;
  used -= sizes[place];
  freed[sizes[place]].push_back(place);
  sizes.erase(place);
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    begin();
    c10::Device device(TYPE, current);
    if (!n) return {nullptr, nullptr, &release, device};
    std::lock_guard<std::mutex> guard(mutex);
    size_t size = (n + 511) / 512 * 512, place = top;
    TORCH_CHECK_WITH(OutOfMemoryError, used + size <= limit, "fake out of memory: tried to allocate ", n, " bytes");
    if (auto& places = freed[size]; !places.empty()) place = places.back(), places.pop_back();
    else {
      TORCH_CHECK_WITH(OutOfMemoryError, top + size <= ARENA, "fake out of memory: the arena is full");
      top += size;
    }
    sizes[place] = size, used += size, peak = std::max(peak, used);
    memset(kernels + place, 0xff, size);  // NaN in every float
    return {pointers + place, pointers + place, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t n) const override { memcpy(real(to), real(from), n); }
};
static Allocator allocator;

static std::map<const char*, size_t> pins;
static bool is_pinned(const void* p) {
  std::lock_guard<std::mutex> guard(mutex);
  auto after = pins.upper_bound((const char*)p);
  return after != pins.begin() && (const char*)p < std::prev(after)->first + std::prev(after)->second;
}
struct Pinned final : c10::Allocator {
  static void drop(void* p) {
    { std::lock_guard<std::mutex> guard(mutex); pins.erase((char*)p); }
    free(p);
  }
  c10::DataPtr allocate(size_t n) override {
    void* p = nullptr;
    TORCH_CHECK(!posix_memalign(&p, 64, n + 1));
    std::lock_guard<std::mutex> guard(mutex);
    pins[(char*)p] = n;
    return {p, p, &drop, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &drop; }
  void copy_data(void* to, const void* from, size_t n) const override { memcpy(to, from, n); }
};
static Pinned pinned;

// Random numbers: the CPU's algorithm, from another seed unless a test compares bits with the CPU's

struct Generator final : c10::GeneratorImpl {
  at::Generator inner = at::make_generator<at::CPUGeneratorImpl>();
  uint64_t given = 0;
  explicit Generator(c10::DeviceIndex i) : GeneratorImpl({TYPE, i}, c10::DispatchKeySet(KEY)) { set_current_seed(0); }
  void set_current_seed(uint64_t seed) override { given = seed; inner.set_current_seed(draws_as_cpu ? seed : seed ^ 0x5DEECE66D); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return given; }
  uint64_t seed() override { set_current_seed(c10::detail::getNonDeterministicRandom()); return given; }
  void set_state(const c10::TensorImpl& s) override { inner.unsafeGetGeneratorImpl()->set_state(s); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner.unsafeGetGeneratorImpl()->get_state(); }
  static c10::DeviceType device_type() { return TYPE; }
  Generator* clone_impl() const override {
    auto* other = new Generator(device_.index());
    other->given = given, other->set_state(*get_state());
    return other;
  }
};
static const at::Generator& default_generator(c10::DeviceIndex i) {
  static at::Generator all[DEVICES] = {at::make_generator<Generator>(0), at::make_generator<Generator>(1)};
  return all[i < 0 ? current : i];
}
static at::Generator inside(const at::Generator& g) { return static_cast<Generator*>(g.unsafeGetGeneratorImpl())->inner; }

// What torch asks a device

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Stream stream(c10::Device d) { return c10::Stream(c10::Stream::DEFAULT, d); }
  c10::DeviceType type() const override { return TYPE; }
  c10::Device exchangeDevice(c10::Device d) const override { c10::Device was(TYPE, current); setDevice(d); return was; }
  c10::Device getDevice() const override { return {TYPE, current}; }
  void setDevice(c10::Device d) const override { TORCH_CHECK(d.index() < DEVICES, "no such device: ", d); uncheckedSetDevice(d); }
  void uncheckedSetDevice(c10::Device d) const noexcept override { if (d.index() >= 0) current = d.index(); }
  c10::Stream getStream(c10::Device d) const noexcept override { return stream(d); }
  c10::Stream getDefaultStream(c10::Device d) const override { return stream(d); }
  c10::Stream getNewStream(c10::Device d, int) const override { return stream(d); }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override { return stream(d); }
  c10::Stream exchangeStream(c10::Stream s) const noexcept override { return stream(s.device()); }
  c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { tell("sync stream"); }
  void synchronizeEvent(void*) const override { tell("sync event"); }
  void synchronizeDevice(const c10::DeviceIndex) const override { tell("sync device"); }
};

static void grow(c10::StorageImpl* storage, size_t n) {
  if (n <= storage->nbytes()) return;
  c10::DeviceGuard guard(storage->device());
  auto fresh = allocator.allocate(n);
  if (storage->nbytes()) memcpy(real(fresh.get()), real(storage->data()), storage->nbytes());
  storage->set_data_ptr_noswap(std::move(fresh));
  storage->set_nbytes(n);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return DEVICES; }
  void setCurrentDevice(c10::DeviceIndex i) const override { current = i; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex i) const override { return std::exchange(current, i); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex i) const override { return std::exchange(current, i < 0 ? current : i); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex i) const override { return default_generator(i); }
  at::Generator getNewGenerator(c10::DeviceIndex i) const override { return at::make_generator<Generator>(i < 0 ? current : i); }
  at::Device getDeviceFromPtr(void*) const override { return {TYPE, current}; }
  bool isPinnedPtr(const void* p) const override { return is_pinned(p); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned; }
  void resizePrivateUse1Bytes(const c10::Storage& s, size_t n) const override { grow(s.unsafeGetStorageImpl(), n); }
};

// Tensors without kernels: their memory, and views

using Ints = c10::SymIntArrayRef;
static c10::Device on(std::optional<at::Device> d) { return {TYPE, d && d->has_index() ? d->index() : current}; }

static Tensor empty(Ints size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device> d, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(on(d));
  check_dtype(at::dtype_or_default(dtype));
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &allocator, c10::DispatchKeySet(KEY), at::dtype_or_default(dtype), format);
}
static Tensor empty_strided(Ints size, Ints stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device> d, std::optional<bool>) {
  c10::DeviceGuard guard(on(d));
  check_dtype(at::dtype_or_default(dtype));
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &allocator, c10::DispatchKeySet(KEY), at::dtype_or_default(dtype));
}
static const Tensor& resize_(const Tensor& self, Ints size, std::optional<at::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  grow(impl->unsafe_storage().unsafeGetStorageImpl(), (impl->storage_offset() + impl->numel()) * impl->itemsize());
  return self;
}
static Tensor& set_storage(Tensor& self, at::Storage from, c10::SymInt offset, Ints size, Ints stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(from);
  auto sizes = C10_AS_INTARRAYREF_SLOW(size), strides = C10_AS_INTARRAYREF_SLOW(stride);
  if (strides.size() == sizes.size()) impl->set_sizes_and_strides(sizes, strides, offset.guard_int(__FILE__, __LINE__));
  else impl->set_storage_offset(offset.guard_int(__FILE__, __LINE__)), impl->set_sizes_contiguous(sizes);
  return self;
}
static Tensor& set_source(Tensor& self, at::Storage from) {
  return set_storage(self, from, 0, Ints{c10::SymInt(int64_t(from.nbytes() / self.dtype().itemsize()))}, {});
}
static Tensor& set_tensor(Tensor& self, const Tensor& from) {
  return set_storage(self, from.storage(), from.storage_offset(), from.sym_sizes(), from.sym_strides());
}
static Tensor& set_none(Tensor& self) {
  c10::Storage none(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), 0, allocator.allocate(0), &allocator, true));
  return set_storage(self, none, 0, Ints{c10::SymInt(0)}, {});
}
static Tensor as_strided(const Tensor& x, Ints size, Ints stride, std::optional<c10::SymInt> offset) {
  auto start = offset ? std::optional<int64_t>(offset->guard_int(__FILE__, __LINE__)) : std::nullopt;
  return at::native::as_strided_tensorimpl(x, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), start);
}
static Tensor view(const Tensor& x, Ints size) { return at::native::view(x, C10_AS_INTARRAYREF_SLOW(size)); }
static Tensor reshape_alias(const Tensor& x, Ints size, Ints stride) { return at::native::_reshape_alias(x, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride)); }

// Kernels: those of the CPU, on CPU tensors that alias the device's

struct Aliases {
  std::unordered_map<c10::StorageImpl*, c10::Storage> made;
  Tensor of(const Tensor& x) {
    if (!x.defined() || x.device().type() != TYPE) return x;
    auto* from = x.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
    auto found = made.find(from);
    if (found == made.end()) {
      c10::DataPtr data(real(from->data()), c10::Device(c10::kCPU));
      found = made.emplace(from, c10::Storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), from->nbytes(), std::move(data), c10::GetAllocator(c10::kCPU), true))).first;
    }
    Tensor alias = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(found->second), c10::DispatchKeySet(c10::DispatchKey::CPU), x.dtype());
    auto* impl = alias.unsafeGetTensorImpl();
    impl->set_sizes_and_strides(x.sizes(), x.strides(), x.storage_offset());
    impl->_set_conj(x.is_conj()), impl->_set_neg(x.is_neg());
    if (x.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
    return alias;
  }
  Tensor back(const Tensor& x, c10::DeviceIndex index) {  // a kernel's result: a view of an argument, or fresh memory
    if (!x.defined() || !x.device().is_cpu()) return x;
    if (in_arena(x.storage().data()))
      for (auto& [from, alias] : made)
        if (alias.data() == x.storage().data()) {
          auto same = c10::Storage(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(from));
          Tensor result = at::detail::make_tensor<c10::TensorImpl>(std::move(same), c10::DispatchKeySet(KEY), x.dtype());
          result.unsafeGetTensorImpl()->set_sizes_and_strides(x.sizes(), x.strides(), x.storage_offset());
          return result;
        }
    check_dtype(x.scalar_type());
    c10::DeviceGuard guard(c10::Device(TYPE, index));
    Tensor result = at::detail::empty_strided_generic(x.sizes(), x.strides(), &allocator, c10::DispatchKeySet(KEY), x.scalar_type());
    Aliases().of(result).copy_(x);
    return result;
  }
};

static const std::set<std::string> WAITING = {  // the host needs what the device computes
    "_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "equal", "bincount",
    "repeat_interleave.Tensor", "histc", "_linalg_svd.U", "_linalg_eigh.eigenvalues", "linalg_cholesky_ex.L", "multinomial"};

static void run(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  begin();
  const auto& schema = op.schema();
  const auto& arguments = schema.arguments();
  std::string name = schema.operator_name().name.substr(6);
  if (!schema.overload_name().empty()) name += "." + schema.overload_name();
  const auto& returns = schema.returns();
  bool is_view = !returns.empty() && returns[0].alias_info() && !returns[0].alias_info()->isWrite();
  if (!is_view && name != "_local_scalar_dense") launched(name);
  if (WAITING.count(name)) tell("sync " + name);

  Aliases aliases;
  size_t first = stack->size() - arguments.size();
  std::vector<std::pair<Tensor, Tensor>> written;  // device tensor, alias
  std::map<size_t, Tensor> given;
  int index = -1;
  bool has_other = false;
  auto alias = [&](const Tensor& x, bool is_written, bool may_be_scalar) {
    if (x.defined() && x.device().type() == TYPE) {
      TORCH_CHECK(index < 0 || index == x.device().index() || !x.dim(), name, ": expected all tensors on one device");
      index = index < 0 ? x.device().index() : index;
    } else if (x.defined() && !x.unsafeGetTensorImpl()->is_wrapped_number()) has_other |= x.dim() || !may_be_scalar;
    Tensor result = aliases.of(x);
    if (is_written) written.emplace_back(x, result);
    return result;
  };
  for (size_t i = 0; i < arguments.size(); i++) {
    auto& value = (*stack)[first + i];
    bool is_written = arguments[i].alias_info() && arguments[i].alias_info()->isWrite();
    if (value.isTensor()) {
      given[i] = value.toTensor();
      value = alias(given[i], is_written, true);
    } else if (value.isTensorList()) {
      std::vector<Tensor> list;
      for (auto& x : value.toTensorVector()) list.push_back(alias(x, is_written, true));
      value = std::move(list);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (std::optional<Tensor> x : value.toOptionalTensorList()) {
        if (x && x->defined() && x->is_cpu()) tell("h2d index");
        if (x && x->defined() && (x->scalar_type() == at::kBool || x->scalar_type() == at::kByte)) tell("sync " + name);
        list.push_back(x && x->defined() ? std::optional<Tensor>(aliases.of(*x)) : std::nullopt);
      }
      value = std::move(list);
    } else if (value.isDevice() && value.toDevice().type() == TYPE) {
      index = on(value.toDevice()).index();
      value = c10::Device(c10::kCPU);
    } else if (value.isGenerator() && value.toGenerator().defined()) {
      auto generator = value.toGenerator();
      TORCH_CHECK(generator.device().type() == TYPE, name, ": expected a generator of the fake device");
      value = inside(generator);
    } else if (value.isNone() && arguments[i].name() == "generator") value = inside(default_generator(-1));
  }
  TORCH_CHECK(index < 0 || !has_other, name, ": expected all tensors on one device, found fake:", index, " and cpu");
  index = index < 0 ? current : index;

  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);

  for (auto& [x, made] : written) {  // a kernel may have resized them
    auto* storage = x.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
    if (made.storage().data() != real(storage->data())) {
      grow(storage, made.storage().nbytes());
      memcpy(real(storage->data()), made.storage().data(), made.storage().nbytes());
    }
    if (made.sizes() != x.sizes() || made.strides() != x.strides())
      x.unsafeGetTensorImpl()->set_sizes_and_strides(made.sizes(), made.strides(), made.storage_offset());
  }
  first = stack->size() - returns.size();
  for (size_t i = 0; i < returns.size(); i++) {
    auto& value = (*stack)[first + i];
    if (value.isTensorList()) {
      std::vector<Tensor> list;
      for (const auto& x : value.toTensorVector()) list.push_back(aliases.back(x, index));
      value = std::move(list);
    } else if (value.isTensor()) {
      Tensor result = value.toTensor();
      const auto* mark = returns[i].alias_info();
      auto same = std::find_if(given.begin(), given.end(), [&](auto& one) {
        const auto* own = arguments[one.first].alias_info();
        return mark && mark->isWrite() && own && own->isWrite() && *own == *mark;
      });
      value = same == given.end() ? aliases.back(result, index) : same->second;
    }
  }
}

static Tensor& copy_(Tensor& to, const Tensor& from, bool non_blocking) {
  begin();
  bool into = to.device().type() == TYPE, out = from.device().type() == TYPE;
  if (into && out) launched("copy_");
  else if (into) tell(is_pinned(from.storage().data()) ? "h2d pinned" : "h2d pageable");
  else tell(non_blocking && is_pinned(to.storage().data()) ? "d2h pinned" : "sync d2h");
  Aliases aliases;
  c10::impl::ExcludeDispatchKeyGuard plain(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  aliases.of(to).copy_(aliases.of(from));
  return to;
}
static Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  Tensor target = to;
  return copy_(target, from, non_blocking);
}

// PrivateUse1 has convolutions of its own
using Three = std::tuple<Tensor, Tensor, Tensor>;
static Tensor convolution(const Tensor& x, const Tensor& w, const std::optional<Tensor>& b, Ints stride, Ints padding, Ints dilation, bool transposed, Ints more, c10::SymInt groups) {
  Aliases aliases;
  launched("convolution");
  auto bias = b && b->defined() ? std::optional<Tensor>(aliases.of(*b)) : std::nullopt;
  return aliases.back(at::convolution_symint(aliases.of(x), aliases.of(w), bias, stride, padding, dilation, transposed, more, groups), x.device().index());
}
static Three convolution_backward(const Tensor& grad, const Tensor& x, const Tensor& w, Ints stride, Ints padding, Ints dilation, bool transposed, Ints more, c10::SymInt groups, std::array<bool, 3> mask) {
  Aliases aliases;
  launched("convolution_backward");
  c10::SymInt out = transposed ? w.sym_size(1) * groups : w.sym_size(0);
  auto [a, b, c] = at::convolution_backward_symint(aliases.of(grad), aliases.of(x), aliases.of(w), Ints{out}, stride, padding, dilation, transposed, more, groups, mask);
  auto index = x.device().index();
  return {aliases.back(a, index), aliases.back(b, index), aliases.back(c, index)};
}
}  // namespace fake

namespace c10::impl {
C10_REGISTER_GUARD_IMPL(PrivateUse1, fake::Guard)
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fake::run>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", fake::empty);
  m.impl("empty_strided", fake::empty_strided);
  m.impl("resize_", fake::resize_);
  m.impl("set_.source_Storage", fake::set_source);
  m.impl("set_.source_Storage_storage_offset", fake::set_storage);
  m.impl("set_.source_Tensor", fake::set_tensor);
  m.impl("set_", fake::set_none);
  m.impl("as_strided", fake::as_strided);
  m.impl("view", fake::view);
  m.impl("_reshape_alias", fake::reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("copy_", fake::copy_);
  m.impl("_copy_from", fake::copy_from);
  m.impl("convolution_overrideable", fake::convolution);
  m.impl("convolution_backward_overrideable", fake::convolution_backward);
}
// Autocast: products in half precision, losses and norms in full
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  using namespace at::autocast;
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(scaled_dot_product_attention, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(layer_norm, fp32)
  KERNEL_PRIVATEUSEONE(nll_loss, fp32)
  KERNEL_PRIVATEUSEONE(mse_loss, fp32)
  KERNEL_PRIVATEUSEONE(softmax, int, fp32)
}

PYBIND11_MODULE(fake_device, m) {
  m.def("setup", [](py::object listen) {
    fake::listener = listen.release().ptr();
    c10::SetAllocator(fake::TYPE, &fake::allocator, 1);
    static fake::Hooks hooks;
    at::RegisterPrivateUse1HooksInterface(&hooks);
    static auto lib = torch::Library(torch::Library::IMPL, "aten", fake::KEY, __FILE__, __LINE__);
    auto& torchs = c10::Dispatcher::singleton();
    for (const auto& name : torchs.getAllOpNames())  // each is one launch, as on CUDA
      if (name.name.rfind("aten::_foreach_", 0) == 0 && torchs.findSchema(name)) {
        std::string full = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
        lib.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&fake::run>());
      }
  });
  m.def("generator", [](int i) { return fake::default_generator(i); });
  m.def("launches", [] { std::lock_guard<std::mutex> guard(fake::mutex); return fake::launches; });
  m.def("memory", [] { return std::make_tuple(fake::used, fake::peak, fake::limit); });
  m.def("reset", [] { fake::launches.clear(); fake::peak = fake::used; });
  m.def("set_limit", [](size_t bytes) { fake::limit = std::min(bytes, fake::ARENA); });
  m.def("set_draws_as_cpu", [](bool does) { fake::draws_as_cpu = does; });
  m.def("set_float64", [](bool has) { fake::has_float64 = has; });
  m.def("current", [] { return (int)fake::current; });
  m.def("make_current", [](int i) { fake::current = i; });
}
