// Calls the kernels' FFI handlers in place of XLA, in a process that may be emulated: `host LIBRARY THREADS` answers calls on its
// standard input with results on its standard output, until it ends. THREADS: the most that a kernel may use. Numbers are 64-bit,
// little-endian.
//
// A call: the handler's name; the arguments and the results, each as dtype, rank, dimensions, bytes and, of an argument, its data; the
// attributes, each as name, dtype and value. An answer: an error, or an empty one, the number of helpers that were asked for, and the
// results' data.

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "xla/ffi/api/c_api.h"

struct XLA_FFI_Error {
  std::string message;
};

namespace {

constexpr int64_t kThreads = 3;  // what the kernels take for threads works one after the other
int64_t num_scheduled = 0;

XLA_FFI_Error* create_error(XLA_FFI_Error_Create_Args* args) { return new XLA_FFI_Error{args->message}; }

XLA_FFI_Error* schedule(XLA_FFI_ThreadPool_Schedule_Args* args) {
  ++num_scheduled;
  args->task(args->data);
  return nullptr;
}

XLA_FFI_Error* num_threads(XLA_FFI_ThreadPool_NumThreads_Args* args) {
  *args->num_threads = kThreads;
  return nullptr;
}

void read(void* to, size_t bytes) {
  if (std::fread(to, 1, bytes, stdin) != bytes) std::exit(std::feof(stdin) ? 0 : 1);
}

int64_t read_number() {
  int64_t out;
  read(&out, sizeof(out));
  return out;
}

std::string read_text() {
  std::string out(read_number(), '\0');
  read(&out[0], out.size());
  return out;
}

void write(const void* from, size_t bytes) {
  if (std::fwrite(from, 1, bytes, stdout) != bytes) std::exit(1);
}

struct Array {
  std::vector<int64_t> dims;
  XLA_FFI_Buffer buffer = {};
  size_t bytes = 0;
  std::unique_ptr<void, decltype(&std::free)> data{nullptr, std::free};
};

// With memory aligned as XLA's; what a kernel does not write has every bit set.
void read_array(Array& out, bool has_data) {
  out.buffer.struct_size = sizeof(XLA_FFI_Buffer);
  out.buffer.dtype = static_cast<XLA_FFI_DataType>(read_number());
  out.dims.resize(read_number());
  for (int64_t& dim : out.dims) dim = read_number();
  out.bytes = read_number();
  out.data.reset(std::aligned_alloc(64, out.bytes / 64 * 64 + 64));
  std::memset(out.data.get(), 0xff, out.bytes);
  if (has_data) read(out.data.get(), out.bytes);
  out.buffer.data = out.data.get();
  out.buffer.rank = out.dims.size();
  out.buffer.dims = out.dims.data();
}

struct Arrays {
  std::vector<Array> arrays;
  std::vector<void*> pointers;

  explicit Arrays(bool has_data) : arrays(read_number()) {
    for (Array& array : arrays) {
      read_array(array, has_data);
      pointers.push_back(&array.buffer);
    }
  }
};

struct Attribute {
  std::string name;
  XLA_FFI_ByteSpan span;
  XLA_FFI_Scalar scalar;
  int64_t value;
};

}  // namespace

int main(int count, char** arguments) {
  void* library = count == 3 ? dlopen(arguments[1], RTLD_NOW) : nullptr;
  if (!library) {
    std::fprintf(stderr, "%s\n", count == 3 ? dlerror() : "usage: host LIBRARY THREADS");
    return 2;
  }
  reinterpret_cast<void (*)(int64_t)>(dlsym(library, "hfax_set_most_threads"))(std::atoll(arguments[2]));
  XLA_FFI_Api api = {};
  api.struct_size = XLA_FFI_Api_STRUCT_SIZE;
  api.api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr, XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR};
  api.XLA_FFI_Error_Create = create_error;
  api.XLA_FFI_ThreadPool_Schedule = schedule;
  api.XLA_FFI_ThreadPool_NumThreads = num_threads;
  for (;;) {
    std::fflush(stdout);
    const std::string name = read_text();
    const auto handler = reinterpret_cast<XLA_FFI_Handler*>(dlsym(library, name.c_str()));
    Arrays args(true), rets(false);
    std::vector<Attribute> attributes(read_number());
    std::vector<XLA_FFI_ByteSpan*> names;
    std::vector<void*> values;
    for (Attribute& a : attributes) {
      a.name = read_text();
      a.span = {a.name.data(), a.name.size()};
      a.scalar = {static_cast<XLA_FFI_DataType>(read_number()), &a.value};
      a.value = read_number();
      names.push_back(&a.span);
      values.push_back(&a.scalar);
    }
    std::vector<XLA_FFI_ArgType> arg_types(args.pointers.size(), XLA_FFI_ArgType_BUFFER);
    std::vector<XLA_FFI_RetType> ret_types(rets.pointers.size(), XLA_FFI_RetType_BUFFER);
    std::vector<XLA_FFI_AttrType> attr_types(attributes.size(), XLA_FFI_AttrType_SCALAR);
    XLA_FFI_CallFrame frame = {};
    frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
    frame.api = &api;
    frame.stage = XLA_FFI_ExecutionStage_EXECUTE;
    frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, static_cast<int64_t>(args.pointers.size()), arg_types.data(), args.pointers.data()};
    frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, static_cast<int64_t>(rets.pointers.size()), ret_types.data(), rets.pointers.data()};
    frame.attrs = {XLA_FFI_Attrs_STRUCT_SIZE, nullptr, static_cast<int64_t>(values.size()), attr_types.data(), names.data(), values.data()};
    num_scheduled = 0;
    const std::unique_ptr<XLA_FFI_Error> error(handler ? handler(&frame) : new XLA_FFI_Error{"there is no handler " + name});
    const std::string message = error ? error->message : "";
    const int64_t size = message.size();
    write(&size, sizeof(size));
    write(message.data(), message.size());
    if (error) continue;
    write(&num_scheduled, sizeof(num_scheduled));
    for (const Array& array : rets.arrays) write(array.data.get(), array.bytes);
  }
}
