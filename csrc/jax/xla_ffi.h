// The part of XLA's foreign function interface that a handler needs, declared again so that it is compiled ahead of time,
// without JAX's headers: the C ABI of xla/ffi/api/c_api.h, version 0.3. XLA keeps it stable, grows it only at the end of
// structures, and writes into each the size that it has, by which ffi.cpp checks a structure that it is given.
#pragma once

#include <stddef.h>
#include <stdint.h>

enum { XLA_FFI_MAJOR = 0, XLA_FFI_MINOR = 3 };
enum { XLA_FFI_METADATA = 1 };                        // XLA_FFI_Extension_Type
enum { XLA_FFI_STAGE_EXECUTE = 3 };                   // XLA_FFI_ExecutionStage
enum { XLA_FFI_ATTRIBUTE_SCALAR = 3 };                // XLA_FFI_AttrType
enum { XLA_FFI_S64 = 5 };                             // XLA_FFI_DataType
enum { XLA_FFI_ABORTED = 10, XLA_FFI_INTERNAL = 13 }; // XLA_FFI_Error_Code

struct xla_ffi_extension {
    size_t struct_size;
    int type;
    xla_ffi_extension* next;
};

struct xla_ffi_version {
    size_t struct_size;
    xla_ffi_extension* extensions;
    int major, minor;
};

struct xla_ffi_metadata {
    size_t struct_size;
    xla_ffi_version api_version;
    uint32_t traits;
};

struct xla_ffi_metadata_extension {
    xla_ffi_extension base;
    xla_ffi_metadata* metadata;
};

struct xla_ffi_error; // XLA's own

struct xla_ffi_error_args {
    size_t struct_size;
    xla_ffi_extension* extensions;
    const char* message;
    int code;
};

struct xla_ffi_api {
    size_t struct_size;
    xla_ffi_extension* extensions;
    xla_ffi_version api_version;
    const void* internal;
    xla_ffi_error* (*create_error)(xla_ffi_error_args*);
};

struct xla_ffi_buffer {
    size_t struct_size;
    xla_ffi_extension* extensions;
    int dtype;
    void* data;
    int64_t rank;
    int64_t* dims;
};

struct xla_ffi_span {
    const char* text;
    size_t length;
};

struct xla_ffi_scalar {
    int dtype;
    void* value;
};

struct xla_ffi_buffers { // XLA_FFI_Args and XLA_FFI_Rets
    size_t struct_size;
    xla_ffi_extension* extensions;
    int64_t count;
    int* types;
    xla_ffi_buffer** buffers; // all are of type 1, the only one there is
};

struct xla_ffi_attributes {
    size_t struct_size;
    xla_ffi_extension* extensions;
    int64_t count;
    int* types;
    xla_ffi_span** names;
    void** values;
};

struct xla_ffi_frame {
    size_t struct_size;
    xla_ffi_extension* extensions;
    const xla_ffi_api* api;
    void* context;
    int stage;
    xla_ffi_buffers arguments, results;
    xla_ffi_attributes attributes;
    void* future;
};
